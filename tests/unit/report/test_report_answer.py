"""What a report says in words follows from its records, with no more certainty than they give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from scipy import stats
from tests.support.answers import (
    EXPERIMENT,
    fair,
    headline,
    known,
    plain,
    source,
    study,
    timed,
    told,
)
from tests.support.drawn import record

from orchestra.errors import InputError
from orchestra.records.record import RunRecord
from orchestra.report.fairness import fairness
from orchestra.report.measures import TIME_TO_TARGET, TRAIN
from orchestra.report.numbers import fixed, paired_difference, significant
from orchestra.report.rows import rows_of

TUNING = {"trials": 3, "metric": "accuracy", "better": "higher", "seed": 1000, "choices": []}


def judged(figures: Mapping[str, Sequence[float]], paces: Mapping[str, float]) -> list[RunRecord]:
    """For each strategy and seed a run without a target that ended with that accuracy."""
    return [
        record(
            label,
            seed=seed,
            metrics={"accuracy": figure},
            time_to_target_seconds=None,
            samples_per_second=paces[label] + seed,
        )
        for label, of_seeds in figures.items()
        for seed, figure in enumerate(of_seeds)
    ]


def test_a_paired_interval_by_hand() -> None:
    # Differences 2, 3, 4: mean 3, standard deviation 1, t(0.975, 2) = 4.302653.
    difference = paired_difference({0: 5.0, 1: 7.0, 2: 9.0}, {0: 3.0, 1: 4.0, 2: 5.0})
    assert difference is not None
    assert (difference.mean, difference.n) == (3.0, 3)
    assert difference.low == pytest.approx(3 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert difference.high == pytest.approx(3 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert difference.certain


def test_pairs_are_of_one_seed_and_agree_with_a_library() -> None:
    ours = {3: 1.25, 0: 2.5, 1: 0.75, 9: 100.0}
    theirs = {1: 1.0, 3: 1.75, 0: 2.0, 8: -100.0}
    difference = paired_difference(ours, theirs)
    pairs = [(ours[seed], theirs[seed]) for seed in (0, 1, 3)]
    expected = stats.ttest_rel(*zip(*pairs, strict=True)).confidence_interval(0.95)
    assert difference is not None
    assert (difference.low, difference.high) == pytest.approx((expected.low, expected.high))
    assert not difference.certain


def test_one_pair_has_no_interval_and_none_no_difference() -> None:
    one = paired_difference({0: 2.0}, {0: 1.0})
    assert one is not None
    assert (one.mean, one.low, one.high, one.n, one.certain) == (1.0, None, None, 1, False)
    assert paired_difference({0: 2.0}, {1: 1.0}) is None


def test_mean_and_spread_of_a_sample() -> None:
    seconds = [1.0, 2.0, 6.0]
    runs = [record("ring", seed=seed, train_seconds=s) for seed, s in enumerate(seconds)]
    (row,) = study(source(runs)).rows
    assert row.mean(TRAIN.read) == 3.0
    assert row.spread(TRAIN.read) == pytest.approx(math.sqrt(7))
    (alone,) = study(source(runs[:1])).rows
    assert alone.spread(TRAIN.read) is None
    assert (alone.mean(lambda _: None), alone.spread(lambda _: None)) == (None, None)


def test_figures_are_written_with_the_digits_that_mean_something() -> None:
    written = [significant(value) for value in (0.0, 3.14159, 12.345, 1234.5, 0.0123, 2.5e-7)]
    assert [plain(text) for text in written] == ["0", "3.14", "12.3", "1 234", "0.0123", "2.50e-07"]
    assert plain(fixed(-1234.56, 1)) == "-1 234.6"
    assert fixed(0.0004, 2) == "0.00040"
    assert (fixed(0.0004, 2, sign=True), fixed(1.0, 1, sign=True)) == ("0.00", "+1.0")


def test_one_process_first_says_that_distributing_did_not_pay() -> None:
    runs = timed({"ring": [5.1, 5.2, 5.3], "one process": [3.0, 3.1, 3.2], "server": [6, 6.1, 6.2]})
    assert headline(source(runs)) == (
        "One process with all cores reached accuracy 0.95 first, after 3.10 s (mean of 3 seeds); "
        "the fastest of the distributed strategies, ring on 4 ranks, took 5.20 s, 1.7 times as "
        "long: on this machine distributing did not pay."
    )


def test_a_distributed_strategy_first_says_that_it_paid() -> None:
    runs = timed({"one process": [6.0, 6.1], "ring": [2.0, 2.1], "server": [2.5, 2.7]})
    said = told(source(runs))
    assert plain(said.headline) == (
        "Ring on 4 ranks reached accuracy 0.95 first, after 2.05 s (mean of 2 seeds); one process "
        "with all cores took 6.05 s, 3.0 times as long: on this machine distributing paid."
    )
    assert "The next after ring was server on 4 ranks, after 2.60 s" in plain(" ".join(said.detail))


def test_within_noise_nothing_is_claimed() -> None:
    runs = timed({"one process": [3.0, 5.0, 4.0], "ring": [4.9, 3.2, 4.2]})
    said = told(source(runs))
    assert plain(said.headline).endswith(
        "1.0 times as long, but over 3 seeds the two cannot be told apart: whether distributing "
        "pays on this machine stays open."
    )
    assert "n = 3" in plain(" ".join(said.detail))


def test_one_seed_says_that_no_spread_is_known() -> None:
    said = told(source(timed({"one process": [3.0], "ring": [4.0]})))
    assert said.headline.endswith(": in these runs, one of each, distributing did not pay.")
    assert "mean of" not in said.headline
    assert "Each row is one run: the spread over seeds is not known." in said.caveats


def test_who_reached_it_less_often_is_not_called_first() -> None:
    runs = timed({"one process": [3.0, 3.1, 3.2], "ring": [1.0, None, None]})
    assert headline(source(runs)) == (
        "One process with all cores reached accuracy 0.95 most often, after 3.10 s (mean of 3 "
        "seeds); the fastest of the distributed strategies, ring on 4 ranks, took 1.00 s where it "
        "got there, in 1 of 3 runs: whether distributing pays on this machine stays open."
    )


@pytest.mark.parametrize(
    ("times", "end"),
    [
        (
            {"one process": [None, None], "ring": [1.0, 1.2]},
            "one process with all cores did not reach it in 2 runs: on this machine "
            "distributing paid.",
        ),
        (
            {"one process": [1.0, 1.2], "ring": [None, None]},
            "no distributed strategy reached it: on this machine distributing did not pay.",
        ),
        (
            {"ring": [1.0, 1.2], "server": [2.0, 2.1]},
            "whether distributing paid is not known, without a run of one process with all cores.",
        ),
        ({"one process": [1.0, 1.2]}, "no distributed strategy stands beside it."),
    ],
)
def test_the_target_reached_by_one_side_only(times: dict[str, list[Any]], end: str) -> None:
    assert headline(source(timed(times))).endswith(end)


def test_without_a_target_the_final_figure_and_the_speed_decide() -> None:
    figures = {"one process": [0.91, 0.92, 0.93], "ring": [0.95, 0.96, 0.97]}
    runs = judged(figures, {"one process": 8000, "ring": 4000})
    said = told(source(runs, target=None))
    assert plain(said.headline) == (
        "Ring on 4 ranks ended with the best accuracy, 0.9600 ± 0.0100; the next was one process "
        "with all cores with 0.9200 ± 0.0100, a difference beyond the spread over the seeds."
    )
    assert plain(said.detail[0]) == (
        "By speed, one process with all cores came to 8 001 ± 1 samples/s, 2.0 times as many as "
        "ring on 4 ranks (4 001 ± 1 samples/s): on this machine distributing did not pay."
    )


def test_a_target_that_nobody_reached_falls_back_to_the_final_figure() -> None:
    figures = {"one process": [0.91, 0.93], "ring": [0.92, 0.915]}
    runs = judged(figures, {"one process": 8000, "ring": 4000})
    assert headline(source(runs)) == (
        "No strategy reached accuracy 0.95 within 160 samples; one process with all cores ended "
        "with the best accuracy, 0.9200 ± 0.0141; the next was ring on 4 ranks with 0.9175 ± "
        "0.0035, but over the seeds one process cannot be told from ring."
    )


def test_a_falling_target_is_named_as_a_bound() -> None:
    bound = {"metric": "mse", "at_least": None, "at_most": 0.5}
    runs = timed({"ring": [1.0]}, metrics={"mse": 0.4})
    assert "reached mse ≤ 0.5 first" in headline(source(runs, target=bound))


def test_no_completed_run_has_no_answer() -> None:
    failed = [record("ring", status="failed", failure="rank 2 died: killed\nTraceback")]
    assert headline(source(failed)) == (
        "There is no answer: none of 1 run was completed; the first failure, of ring: "
        "rank 2 died: killed."
    )


def test_failures_are_said_beside_the_answer() -> None:
    runs = timed({"one process": [1.0, 1.1], "ring": [2.0, 2.1]})
    runs += [record("server", status="failed", failure="x"), record("switch", status="stopped")]
    assert {"1 of 6 runs failed.", "1 of 6 runs was stopped."} <= {*told(source(runs)).caveats}


def test_why_names_where_the_time_went_and_who_shared_the_cores() -> None:
    seconds = {"compute": 1.0, "communicate": 0.5, "wait": 0.5}
    runs = timed({"one process": [1.0]}, seconds={"compute": 0.8, "communicate": 0, "wait": 0})
    runs += timed({"server": [2.0]}, seconds=seconds, bytes_sent=2_500_000)
    why = plain(" ".join(told(source(runs)).why))
    assert why == (
        "A worker of server spent 50 % of its time computing, 25 % sending and receiving, and "
        "25 % waiting; its 4 ranks share 2 cores, and each computed for 1.00 s, one process for "
        "0.800 s. Its ranks sent 2.50 MB, and its gradients were 1.00 updates old in the mean."
    )


def test_different_experiments_are_not_called_a_fair_comparison() -> None:
    first = source(timed({"one process": [3.0, 3.1]}), "a", optimizer="SGD(lr=0.1)")
    second = source(timed({"ring": [1.0, 1.1]}), "b", optimizer="SGD(lr=0.2)")
    said = told(first, second)
    assert plain(said.headline) == (
        "This is not one fair comparison, for the runs differ in optimizer: ring on 4 ranks "
        "reached accuracy 0.95 first, after 1.05 s (mean of 2 seeds); one process with all cores "
        "took 3.05 s, 2.9 times as long: whether distributing pays does not follow."
    )
    verdict = fairness(study(first, second))
    assert not verdict.fair
    (doubt,) = verdict.doubts
    assert doubt == "The runs differ in optimizer: SGD(lr=0.1) (a); SGD(lr=0.2) (b)."


def test_different_machines_are_not_fair() -> None:
    other = known("b", EXPERIMENT, [record("ring")], {"cores": 64})
    verdict = fairness(study(source([record("one process")]), other))
    assert not verdict.fair
    assert any("Not the same number of cores" in text for text in verdict.doubts)


def test_fairness_says_what_was_equal() -> None:
    text = "\n".join(fair([record(label) for label in ("one process", "ring", "server")]).equal)
    assert "The same number of samples: 160 in every run." in text
    assert "The same global batch: 8 samples in every row." in text
    assert (
        "A budget of 4 ranks, dedicated servers included; 1 of them servers under server." in text
    )


def test_fairness_tells_threads_and_where_nodes_are_unlike_their_range() -> None:
    def by_rank(*threads: int) -> list[dict[str, Any]]:
        of_all = {"role": "worker", "seconds": {}}
        return [{"rank": rank, "threads": own, **of_all} for rank, own in enumerate(threads)]

    unlike = by_rank(4, 1, 4, 4)
    runs = [
        record("one process", threads=8, by_rank=by_rank(8)),
        record("ring", threads=4, by_rank=unlike),
        record("server", threads=4, by_rank=unlike),
    ]
    told = fairness(study(source(runs))).equal
    assert "Threads in a process: 8 (one process); 1 to 4 (the others)." in told


def test_fairness_doubts_what_was_not() -> None:
    verdict = fair([record("ring"), record("ring", seed=1), record("server", samples=400)])
    text = "\n".join(verdict.doubts)
    assert verdict.fair
    assert "the same seeds: 0, 1 (ring); 0 (server)." in text
    assert "Not the same number of samples: from 160 to 400." in text


def test_tuning_is_told() -> None:
    assert fair([record("ring")], optimizer="SGD(lr=0.1)").tuning == [
        "NOT tuned: every strategy ran with SGD(lr=0.1); another learning rate may suit some of "
        "them better"
    ]
    tune = {"settings": {"optimizer.lr": [0.1, 0.2, 0.3]}}
    tuned = known("t", {**EXPERIMENT, "tune": tune}, [record("ring")], tuning=TUNING)
    (text,) = fairness(study(tuned)).tuning
    assert text.startswith("tuned, 3 trials: for each strategy and number of ranks the best optim")


def test_a_rival_has_the_same_ranks_and_experiment() -> None:
    runs = [record(label, ranks) for ranks in (2, 4) for label in ("one process", "ring")]
    whole = study(source(runs))
    rivals = {row.name: whole.rival(row) for row in whole.rows}
    assert {name: rival and rival.name for name, rival in rivals.items()} == {
        "one process (2 ranks)": None,
        "ring (2 ranks)": "one process (2 ranks)",
        "one process (4 ranks)": None,
        "ring (4 ranks)": "one process (4 ranks)",
    }


def test_a_chosen_baseline_is_a_label_or_the_name_of_a_row() -> None:
    runs = [record(label, ranks) for ranks in (2, 4) for label in ("server", "ring")]

    def rivals(baseline: str) -> list[str]:
        whole = study(source(runs), baseline=baseline)
        found = [whole.rival(row) for row in whole.rows if row.label == "server"]
        return [rival.name for rival in found if rival is not None]

    assert rivals("ring") == ["ring (2 ranks)", "ring (4 ranks)"]
    assert rivals("ring (2 ranks)") == ["ring (2 ranks)", "ring (2 ranks)"]
    with pytest.raises(InputError, match=r"--baseline: no row 'rings'; did you mean 'ring'\?"):
        rivals("rings")


def test_rows_of_several_sources_join_where_only_the_seed_differs() -> None:
    first, second = source([record("ring", seed=0)], "a"), source([record("ring", seed=1)], "b")
    (row,) = rows_of([first, second])
    assert row.name == "ring"
    assert row.values(TIME_TO_TARGET.read).keys() == {0, 1}


def test_rows_of_one_label_are_told_apart_by_their_folders() -> None:
    first = source([record("ring")], "runs/a", batch_size=16)
    second = source([record("ring")], "runs/b", batch_size=32)
    again = source([record("ring")], "runs/b", batch_size=32)
    names = [row.name for row in rows_of([first, second, again])]
    assert names == ["ring [a]", "ring [b] [runs/b]", "ring [b] [runs/b] #2"]

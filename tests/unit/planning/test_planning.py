"""`orchestra plan`: candidates, who is dropped and why, the answer, and the command it gives."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.support.plans import ACCURACY, RECORD, experiment, found_on, points
from tests.support.recorded import changed

import orchestra
from orchestra.cli.plan import read_target
from orchestra.cluster import load_cluster
from orchestra.engines.processes.system import now
from orchestra.engines.simulation import trials
from orchestra.engines.simulation.costs import sample_operations
from orchestra.engines.simulation.training import assigned
from orchestra.engines.simulation.trials import Trial, Tried
from orchestra.errors import InputError
from orchestra.optimizers.settings import rate_factor
from orchestra.planning.answer import PlanAnswer, Verified, adaptive, answered
from orchestra.planning.api import device_of, real_run
from orchestra.planning.candidates import Space, counted, short
from orchestra.planning.page import write_page
from orchestra.planning.race import SearchBudget, TrialRequest
from orchestra.planning.search import Search
from orchestra.planning.standing import (
    CUT_OFF,
    Length,
    Standing,
    bottleneck,
    cannot_win,
    chosen,
    pessimistic,
    reached,
    value_at,
)
from orchestra.planning.table import ON_TERMINALS, candidates_sheet
from orchestra.records.files import LIVE
from orchestra.records.report import Point
from orchestra.trainer.settings import Target
from orchestra.worker.runtime import SilentReporter


def timed(space: Space, labels: Container[str], folder: Path) -> Search:
    """A search that has only found the speeds of the candidates with `labels`."""
    some = [each for each in space.candidates() if each.label in labels]
    budget = SearchBudget(0.0, 1e12)
    search = Search([], ACCURACY, Length(1000, 10), folder, budget, lambda what, part: None)
    search.add_speeds(some, now() + 60.0)
    return search


# Decisions on plain figures


def test_a_target_is_reached_between_two_snapshots() -> None:
    at = reached(points(0.5, 0.8, 1.0, 0.7), ACCURACY)
    assert at is not None
    assert (at.samples, at.seconds, at.spacing) == pytest.approx((250, 5.0, 2.0))
    assert reached(points(0.5, 0.8), ACCURACY) is None
    came_back = reached(points(0.5, math.nan, 1.0), ACCURACY)  # on a line from the first one
    assert came_back is not None
    assert came_back.spacing == 2 * at.spacing
    falling = reached(points(0.9, 0.5), Target("accuracy", at_most=0.7))
    assert falling is not None
    assert falling.samples == pytest.approx(150)


def test_a_curve_is_read_between_its_snapshots() -> None:
    assert value_at(points(0.5, 0.8), "accuracy", 150) == pytest.approx(0.65)
    assert value_at(points(0.5, 0.8), "accuracy", 900) == 0.8
    assert value_at([], "accuracy", 150) is None


def test_the_bound_counts_updates_of_fewer_samples() -> None:
    # one process needs 1000 samples in steps of 64; an update is made of 16
    assert cannot_win(1000, 64, 64, speed=10, best=99) == pytest.approx(100)
    assert cannot_win(1000, 64, 64, speed=10, best=101) is None
    assert cannot_win(1000, 64, 16, speed=10, best=26) is None
    assert cannot_win(1000, 64, 16, speed=10, best=24) == pytest.approx(25)
    assert cannot_win(1000, 64, 128, speed=10, best=99) == pytest.approx(100)


def test_another_learning_rate_is_not_bounded_by_the_reference(tmp_path: Path) -> None:
    search = played(tmp_path, {"one process": 1.0, "one process, rate x 2": 1.6})
    found = search.best()
    assert found is not None
    assert found[0].name == "one process, rate x 2"
    assert search.entries["one process, rate x 0.5"].rungs  # it was raced, too


def test_a_rung_ends_at_a_snapshot() -> None:
    length = Length(1000, 10)
    assert [length.part(samples) for samples in (100, 101, 999, 5000)] == [0.1, 0.2, 1.0, 1.0]


def test_of_equally_fast_ones_that_with_fewer_nodes_is_chosen() -> None:
    assert chosen({"four": 1.0, "one": 1.019}, {"four": 4, "one": 1}) == "one"
    assert chosen({"four": 1.0, "one": 1.03}, {"four": 4, "one": 1}) == "four"


def test_a_time_of_few_seeds_has_to_be_shorter_by_more() -> None:
    seeds = {"lucky": 1, "steady": 4}
    near = pessimistic({"lucky": 1.0, "steady": 1.05}, seeds)
    assert near["steady"] < near["lucky"]
    far = pessimistic({"lucky": 1.0, "steady": 1.2}, seeds)
    assert far["lucky"] < far["steady"]
    assert pessimistic({}, {}) == {}


def test_a_bottleneck_is_the_largest_part() -> None:
    assert bottleneck({"compute": 1.0, "communicate": 3.0, "wait": 0.0}) == "messages 75 %"
    assert bottleneck({}) == "not known"


# Candidates


def test_candidates_use_the_fastest_nodes_and_keep_the_samples(tmp_path: Path) -> None:
    found = found_on("examples/clusters/mixed.yaml", tmp_path)
    assert found["ring on 3 nodes"].nodes == ("fast-0", "fast-1", "fast-2")
    assert found["ring on 4 nodes"].nodes[-1] == "slow"
    assert {found[f"ring on 4 nodes{text}"].samples for text in ("", ", batch x 2")} == {64, 128}
    assert "ring, shares by speed on 4 nodes" in found
    cluster = load_cluster(found["ring on 2 nodes"].run.training.cluster, where="", folder=Path())
    assert [node.name for node in cluster.nodes_of(2)] == ["fast-0", "fast-1"]


def unlike_machines(folder: Path, gpu: str) -> str:
    """The file of a cluster of a GPU, two nodes of 16 cores, and an old one of 8."""
    (folder / "lab.yaml").write_text(
        "all_nodes:\n  link: {bandwidth: 1 Gbit/s, latency: 50 us}\n"
        "  loopback: {bandwidth: 3 GB/s, latency: 15 us}\n"
        "nodes:\n  old: {cores: 8, speed: 0.5}\n  big: {count: 2, cores: 16, speed: 1}\n"
        f"  gpu: {{cores: 8, {gpu}}}\nranks: spread\n"
    )
    return str(folder / "lab.yaml")


@pytest.mark.parametrize(
    ("gpu", "fastest"),
    [
        # 16 cores of 20 GFLOP/s do the work of 9, as a part of it is done by one thread
        ("devices: 1, flops: 0.3 TFLOP/s", ("gpu", "big-0", "big-1", "old")),
        ("devices: 1, flops: 0.1 TFLOP/s", ("big-0", "big-1", "gpu", "old")),
        # One process has one device, and a group all
        ("devices: 2, flops: 0.1 TFLOP/s", ("gpu", "big-0", "big-1", "old")),
    ],
)
def test_the_fastest_node_of_a_plan_is_that_of_the_simulation(
    gpu: str, fastest: tuple[str, ...], tmp_path: Path
) -> None:
    cluster = load_cluster(unlike_machines(tmp_path, gpu), where="cluster", folder=Path())
    space = Space(experiment(), cluster, tmp_path / "clusters")
    assert tuple(node.name for node in space.fastest) == fastest
    found = {each.name: each for each in space.candidates()}
    assert found["ring on 2 nodes"].nodes == fastest[:2]
    search = timed(space, ["one process"], tmp_path)
    entries = {name: entry for name, entry in search.entries.items() if entry.record is not None}
    assert len(entries) == 6
    for entry in entries.values():
        assert entry.record is not None
        assert entry.candidate.nodes == (entry.record.machine.node,)


def test_the_answer_names_the_node_on_which_one_process_was_simulated(tmp_path: Path) -> None:
    search = played(tmp_path, {"one process": 1.0})
    entry = search.entries["one process"]
    assert entry.record is not None
    entry.record = changed(entry.record, node="elsewhere")
    answer = answered(search, "assumed", tmp_path)
    assert next(row for row in answer.rows if row.name == "one process").nodes == ("elsewhere",)


def test_what_averages_all_gradients_learns_as_one_process_does(tmp_path: Path) -> None:
    found = found_on("lan_1gbit(nodes=4)", tmp_path)
    exact = ("one process", "ring on 4 nodes", "ring on 3 nodes", "server beside on 4 nodes")
    assert len({found[name].learns_as for name in exact}) == 1
    others = ("asynchronous on 4 nodes", "ring, BF16 on 4 nodes", "local SGD, H=4 on 4 nodes")
    assert len({found[name].learns_as for name in (*exact, *others)}) == 4
    assert found["ring, BF16 on 4 nodes"].update_samples == 64
    assert found["local SGD, H=4 on 4 nodes"].update_samples == 16


def test_the_learning_rate_goes_with_the_batch(tmp_path: Path) -> None:
    for optimizer, rate in (("SGD(lr=0.1)", 0.4), ("Adam(lr=0.1)", 0.2)):
        found = found_on("lan_1gbit(nodes=2)", tmp_path, optimizer=optimizer)
        four = found["one process, batch x 4"].run.training.optimizer
        assert four.arguments["lr"] == pytest.approx(rate)
        assert rate_factor(four, 1.0) == 1.0
        kept = found["one process, batch x 0.25, rate kept"]
        assert kept.run.training.optimizer.arguments["lr"] == 0.1
        assert kept.learns_as != found["one process, batch x 0.5, rate kept"].learns_as


def test_strategies_of_the_file_are_candidates(tmp_path: Path) -> None:
    found = found_on(
        "lan_1gbit(nodes=4)",
        tmp_path,
        strategies={"mine": "LocalSGD(5)", "one process": "Single()"},
    )
    assert found["mine on 4 nodes"].run.training.ranks == 4


def test_a_strategy_of_the_file_keeps_its_settings_under_a_label_of_the_list(
    tmp_path: Path,
) -> None:
    own = {"ring": "LocalSGD(5)", "tree": 'AllReduce("tree")'}
    found = found_on("lan_1gbit(nodes=4)", tmp_path, strategies=own)
    assert repr(found["ring of the file on 4 nodes"].run.strategy) == "LocalSGD(5)"
    assert "tree of the file on 4 nodes" not in found


def test_what_cannot_be_timed_from_shapes_is_timed_with_values(tmp_path: Path) -> None:
    own = {"switch": "Switch(AllReduce(), LocalSGD(8), when=LossStable())"}
    found = found_on("lan_1gbit(nodes=2)", tmp_path, strategies=own)
    assert short(found["ring on 2 nodes"].run).training.tensors == "shapes"
    assert short(found["switch on 2 nodes"].run).training.tensors == "real"


def test_strategies_of_the_user_are_timed_with_values_or_the_plan_says_why_not(
    tmp_path: Path,
) -> None:
    own = {
        "reads values": "tests.support.tasks_for_tests:ReadsValues",
        "fails": "tests.support.tasks_for_tests:NeverUpdates",
        "too few": "Hop(backup=2)",
    }
    cluster = load_cluster("lan_1gbit(nodes=2)", where="cluster", folder=Path())
    space = Space(experiment(strategies=own), cluster, tmp_path / "clusters")
    search = timed(space, own, tmp_path)
    assert search.entries["reads values on 2 nodes"].speed
    assert search.notes == ["fails on 2 nodes is left out: rank 0 failed: ValueError: no update"]
    (reason,) = space.refused
    assert reason.startswith("too few on 2 nodes is left out: ")


def test_one_machine_has_ranks_in_place_of_nodes(tmp_path: Path) -> None:
    found = found_on("one_host(cores=4)", tmp_path)
    assert found["ring on 4 ranks"].run.training.ranks == 4
    assert found["ring on 4 ranks"].nodes == ("host",)


def test_an_auto_begins_with_the_first_and_knows_the_samples_of_the_others(tmp_path: Path) -> None:
    names = ("one process", "ring", "halving-doubling", "all to all", "local SGD, H=16", "gossip")
    found = found_on("lan_1gbit(nodes=4)", tmp_path)
    tried = [found[name if name == "one process" else f"{name} on 4 nodes"] for name in names]
    standing = Standing([*tried, found["ring on 3 nodes"]], ACCURACY, Length(1000, 10), [0])
    for rank, entry in enumerate(standing.entries.values()):
        entry.record = changed(RECORD, samples_per_second=100.0 + rank)
        entry.curves = {0: points(0.5, 0.8, 1.0)}
    local = standing.entries["local SGD, H=16 on 4 nodes"]
    local.curves = {0: points(0.5, 0.8, 0.85, 0.95)}
    best = standing.entries["halving-doubling on 4 nodes"]
    # at most two that learn the same, none on other nodes, nor one that cannot be a candidate
    assert adaptive(standing, best) == (
        "Auto((AllReduce('halving_doubling'), AllReduce('parallel'), LocalSGD(16)), "
        "samples=(250.0, 250.0, 350.0))"
    )
    assert adaptive(standing, standing.entries["one process"]) is None
    assert adaptive(standing, None) is None


def test_a_seed_that_was_cut_off_counts_with_its_seconds_so_far(tmp_path: Path) -> None:
    ring = found_on("lan_1gbit(nodes=4)", tmp_path)["gossip on 4 nodes"]
    standing = Standing([ring], ACCURACY, Length(1000, 10), [0, 1])
    (entry,) = standing.entries.values()
    entry.record = changed(RECORD, samples_per_second=50.0)
    entry.curves = {0: points(0.5, 0.8, 1.0)}
    assert standing.time(entry) == pytest.approx(5.0)
    entry.curves = {0: points(0.5, 0.8, 1.0), 1: points(0.1, 0.1)}
    assert standing.time(entry) == pytest.approx(5.0)  # at 4 s nothing speaks against it
    entry.curves = {0: points(0.5, 0.8, 1.0), 1: points(0.1, 0.1, 0.1)}
    assert standing.time(entry) == pytest.approx((5.0 + 6.0) / 2)
    entry.curves = {0: points(0.5, 0.8, 1.0), 1: points(0.1, 0.1, 0.1, 0.1)}
    assert standing.time(entry) == pytest.approx((5.0 + 8.0) / 2)
    assert not standing.missed(entry)
    entry.curves = {0: points(0.5, 0.8, 1.0), 1: points(*[0.1] * 10)}
    assert standing.time(entry) is None  # it has missed the target with all samples
    assert standing.missed(entry) == [1]


# The search, without a simulation


class Played(Search):
    """A search in which curves are known: accuracy = part of all samples times a factor."""

    factors: Mapping[str, float]
    by_seed: Mapping[tuple[str, int], float]  # where a seed has another one
    unreached: Container[str]  # there is no time for their real gradients
    asked_for: list[tuple[str, int | None, float]]  # name, seed of a run that learns, part

    def hand_out(self, trial, told, until, many):  # type: ignore[no-untyped-def]
        while (item := trial()) is not None:
            told(item[0], self.outcome(item[0]))
        return False

    def outcome(self, request: TrialRequest) -> Tried:
        name, seed, samples = request.entry.name, request.run.seed, round(1000 * request.part)
        self.asked_for.append((name, seed if request.learns else None, request.part))
        if not request.learns:
            return Tried(changed(RECORD, name=name, samples_per_second=10.0))
        if name in self.unreached:
            return Tried()
        factor = self.by_seed.get((name, seed), self.factors.get(name, 0.1))
        curve = [
            Point(n, n / 10, {"accuracy": min(1.0, factor * n / 1000)})
            for n in range(100, samples + 1, 100)
        ]
        return Tried(changed(RECORD, name=name, samples=samples), curve)


def played(
    tmp_path: Path,
    factors: dict[str, float],
    unreached: Container[str] = (),
    by_seed: Mapping[tuple[str, int], float] = MappingProxyType({}),
) -> Played:
    some = list(found_on("lan_1gbit(nodes=2)", tmp_path).values())
    budget = SearchBudget(0.0, 1e12)
    search = Played(
        some, ACCURACY, Length(1000, 10), tmp_path, budget, lambda what, part: None, seeds=(0, 1)
    )
    search.factors, search.unreached, search.asked_for = factors, unreached, []
    search.by_seed = by_seed
    search.run()
    return search


def test_progress_says_what_is_under_way_and_is_never_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def hand_out(trial, told, until, many, tell):  # type: ignore[no-untyped-def]
        tell()
        trial()
        return False

    monkeypatch.setattr("orchestra.planning.search.hand_out", hand_out)
    some = list(found_on("lan_1gbit(nodes=2)", tmp_path).values())
    budget = SearchBudget(0.0, 1e12)
    search = Search(
        some, ACCURACY, Length(1000, 10), tmp_path, budget, lambda what, part: told.append(what)
    )
    search.run()
    assert told == ["simulating", "1 speed from shapes"]


def test_the_search_finds_the_first_and_says_why_others_are_out(tmp_path: Path) -> None:
    search = played(tmp_path, {"one process": 1.0, "gossip on 2 nodes": 1.8})
    found = search.best()
    assert found is not None
    best, seconds = found
    assert best.name == "gossip on 2 nodes"
    assert seconds == pytest.approx(50.0)
    assert set(search.times(best)) == {0, 1, 2, 3}  # two more than were asked for
    reasons = {name: entry.dropped or "" for name, entry in search.entries.items()}
    assert reasons["ring on 2 nodes"].startswith("learns the same as one process")
    assert reasons["ring, BF16 on 2 nodes"].startswith("cannot win: 90 s at least")
    assert reasons["local SGD, H=4 on 2 nodes"].startswith("unlikely to win: about")
    assert search.is_confirmed()
    # Its speed alone
    assert {seed for name, seed, _ in search.asked_for if name == "ring on 2 nodes"} == {None}


def test_luck_with_one_seed_does_not_win(tmp_path: Path) -> None:
    lucky = "push-sum on 2 nodes"
    factors = {"one process": 1.0, "gossip on 2 nodes": 1.8, lucky: 2.0}
    search = played(tmp_path, factors, by_seed={(lucky, 1): 1.0})
    found = search.best()
    assert found is not None
    assert found[0].name == "gossip on 2 nodes"
    assert (lucky, 1) in {(name, seed) for name, seed, _ in search.asked_for}


def test_a_trial_ends_with_its_time_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no record then, and has not failed; whoever tries the next one can go on."""
    candidate = found_on("lan_1gbit(nodes=16)", tmp_path)["gossip on 16 nodes"]
    assignment = assigned(short(candidate.run), tmp_path / "run")
    monkeypatch.setattr(trials, "GRACE", 0.0)
    over, ahead = time.monotonic(), time.monotonic() + 600
    late = trials.tried(SilentReporter(), Trial(assignment), over)
    assert (late.record, late.failure) == (None, None)
    done = trials.tried(SilentReporter(), Trial(assignment), ahead)
    assert done.record is not None
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_whoever_watches_is_not_shown_a_trial_whose_time_is_over(tmp_path: Path) -> None:
    candidate = found_on("lan_1gbit(nodes=16)", tmp_path)["gossip on 16 nodes"]
    assignment = assigned(short(candidate.run), tmp_path / "run")
    written = []

    class Alarmed(SilentReporter):
        def progress(self, **_: object) -> None:
            written.append((assignment.folder / LIVE).exists())
            if written[-1]:
                signal.raise_signal(signal.SIGALRM)

    late = trials.tried(Alarmed(), Trial(assignment), time.monotonic() + 600)
    assert written[-1]
    assert late.record is None
    assert not (assignment.folder / LIVE).exists()


@pytest.mark.parametrize(("lead", "said"), [(1.5, True), (3.0, False)])
def test_a_small_lead_of_what_is_predicted_too_well_is_told(
    tmp_path: Path, lead: float, said: bool
) -> None:
    name = "asynchronous beside on 2 nodes"
    search = played(tmp_path, {"one process": 1.0, name: lead})
    answer = answered(search, "assumed", tmp_path)
    assert answer.recommended is not None
    assert answer.recommended.name == name
    assert any("up to 2 times as long" in note for note in answer.notes) == said
    other = played(tmp_path, {"one process": 1.0, "gossip on 2 nodes": lead})
    assert not any("times as long" in n for n in answered(other, "assumed", tmp_path).notes)


def test_the_answer_says_how_the_search_ended(tmp_path: Path) -> None:
    search = played(tmp_path, {"one process": 1.0, "gossip on 2 nodes": 1.8})
    said = answered(search, "assumed", tmp_path).ending
    assert said == "confirmed with 4 seeds: no other beats gossip on 2 nodes by more than 2%"
    search.stopped = True
    assert answered(search, "assumed", tmp_path).ending.startswith("stopped before its end")
    # Each is the faster one with every second seed
    pair = ("gossip on 2 nodes", "push-sum on 2 nodes")
    by_turns = {(name, seed): 1.8 + 0.4 * ((seed + at) % 2)
                for at, name in enumerate(pair) for seed in range(8)}  # fmt: skip
    close = played(tmp_path, {"one process": 1.0}, by_seed=by_turns)
    said = answered(close, "assumed", tmp_path).ending
    assert (
        said
        == "not confirmed: gossip on 2 nodes and others are too close to tell apart, with 8 seeds"
    )
    close.ending = "out of time"
    said = answered(close, "assumed", tmp_path).ending
    assert said.startswith("out of time, not confirmed: gossip on 2 nodes has 8 seeds; more --")


def test_the_table_of_a_terminal_has_batch_and_rate_in_numbers(tmp_path: Path) -> None:
    search = played(tmp_path, {"one process": 1.0, "one process, batch x 2": 1.0})
    sheet = candidates_sheet(answered(search, "assumed", tmp_path))
    shown = sheet.only(lambda column, _: column.key in ON_TERMINALS)
    titles = [column.title for column in shown.columns]
    lines = {line[0].text: line for line in shown.lines}
    rate = experiment().training.optimizer.arguments["lr"]
    assert isinstance(rate, float)
    for name, times in (("one process", 1), ("one process, batch x 2", 2)):
        cells = dict(zip(titles, (cell.text for cell in lines[name]), strict=True))
        assert cells["batch"] == str(64 * times)
        assert float(cells["rate"]) == pytest.approx(rate * times)


@pytest.mark.parametrize(("samples_per_step", "said"), [(0.4, True), (600, False)])
def test_short_steps_on_a_device_are_doubted(
    tmp_path: Path, samples_per_step: float, said: bool
) -> None:
    search = played(tmp_path, {"one process": 1.0})
    for entry in search.entries.values():
        if entry.record is not None:
            speed = entry.candidate.samples / (samples_per_step * 1e-3)
            entry.record = changed(entry.record, samples_per_second=speed)
    best = answered(search, "assumed", tmp_path).recommended
    assert best is not None
    notes = answered(search, "assumed", tmp_path, devices=best.nodes).notes
    assert any(f"the speed of {best.nodes[0]} is from" in note for note in notes) == said
    if said:
        assert any("A step takes 400 us" in note for note in notes)
    assert not any("was not measured" in n for n in answered(search, "assumed", tmp_path).notes)


def test_samples_per_second_times_operations_are_the_flops_of_a_device(tmp_path: Path) -> None:
    path = unlike_machines(tmp_path, "devices: 1, flops: 0.3 TFLOP/s")
    cluster = load_cluster(path, where="cluster", folder=Path())
    search = timed(Space(experiment(), cluster, tmp_path / "clusters"), ["one process"], tmp_path)
    entry = search.entries["one process, batch x 4"]
    flops = counted(entry.candidate.run, sample_operations)
    assert flops is not None
    assert entry.speed is not None
    assert entry.speed * flops == pytest.approx(0.3e12, rel=0.1)
    answer = replace(answered(search, "assumed", tmp_path), sample_flops=flops)
    assert answer.operations == (
        "2.21 MFLOP for the gradient of a sample; flops of a device: its samples/s x 2.21 MFLOP"
    )
    assert replace(answer, sample_flops=None).operations == ""


def test_who_was_not_simulated_is_left_out_and_others_are_judged(tmp_path: Path) -> None:
    search = played(tmp_path, {"one process": 1.0}, {"gossip on 2 nodes"})
    assert search.entries["gossip on 2 nodes"].dropped == CUT_OFF
    assert "no time for the race of gossip on 2 nodes" in search.notes
    others = [entry for entry in search.entries.values() if entry.dropped == CUT_OFF]
    assert [entry.name for entry in others] == ["gossip on 2 nodes"]
    assert (search.entries["push-sum on 2 nodes"].dropped or "").startswith("unlikely")


def test_where_none_reaches_the_target_there_is_no_best_one(tmp_path: Path) -> None:
    search = played(tmp_path, {"one process": 0.8})
    assert search.best() is None
    assert max(max(e.done.values(), default=0.0) for e in search.entries.values()) == 1.0


def test_ctrl_c_leaves_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Played.outcome

    def interrupted(self: Played, request: TrialRequest) -> Tried:
        if request.entry.name == "one process, rate x 2":
            raise KeyboardInterrupt
        return outcome(self, request)

    monkeypatch.setattr(Played, "outcome", interrupted)
    search = played(tmp_path, {"one process": 1.0})
    assert search.stopped
    best = search.best()
    assert best is not None
    assert best[0].candidate.exact


# The command line


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("accuracy>=0.9", {"metric": "accuracy", "at_least": 0.9}),
        ("loss <= 1e-3", {"metric": "loss", "at_most": 0.001}),
    ],
)
def test_a_target_on_the_command_line(text: str, target: dict[str, object]) -> None:
    assert read_target(text) == target


@pytest.mark.parametrize("text", ["accuracy", "accuracy=0.9", ">=0.9", "accuracy>=high"])
def test_no_target_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--target: .* is no target; write 'accuracy>=0.9'"):
        read_target(text)


def test_the_recommended_experiment_is_one_of_real_processes(tmp_path: Path) -> None:
    given = experiment()
    run = found_on("lan_1gbit(nodes=4)", tmp_path)["ring on 4 nodes"].run
    real = real_run(given, run)
    assert real.training.engine == "processes"
    assert real.training.calibration == "auto"
    assert (real.ranks, real.training.batch_size) == ((4,), 16)


@pytest.mark.parametrize(
    ("nodes", "device"),
    [(["gpu"], "cuda"), (["gpu", "big-0"], "auto"), (["big-0", "old"], "cpu")],
)
def test_the_recommended_experiment_trains_on_the_devices_of_its_nodes(
    nodes: list[str], device: str, tmp_path: Path
) -> None:
    path = unlike_machines(tmp_path, "devices: 1, flops: 0.3 TFLOP/s")
    cluster = load_cluster(path, where="cluster", folder=Path())
    assert device_of("cpu", cluster, nodes) == device


def test_before_the_command_stands_where_to_give_it(tmp_path: Path) -> None:
    search = played(tmp_path, {"one process": 1.0})
    answer = answered(search, "assumed", tmp_path)
    assert answer.recommended is not None
    assert answer.where == f"on {answer.recommended.nodes[0]}"
    on_two = replace(answer, recommended=replace(answer.recommended, nodes=("a", "b")))
    assert on_two.where == "on each of a and b, in a folder that they share"
    on_many = replace(answer, recommended=replace(answer.recommended, nodes=("a",) * 16))
    assert on_many.where.startswith("on each of the 16 nodes that plan.json names, ")
    assert replace(answer, recommended=None, rows=()).where == ""


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="holds files; choose another --out"):
        orchestra.plan("digits", "lan_1gbit(nodes=2)", out=tmp_path, quiet=True)


def test_a_verified_candidate_has_its_means_on_the_page(tmp_path: Path) -> None:
    """A mean is told only where every seed that was predicted has reached the target."""
    known = {0: 1.0, 1: 1.2}
    reached_all = Verified("ring", known, {0: 1.1, 1: 1.5}, "emulation", computing=1.04)
    slower = replace(reached_all, computing=1.25)
    missed_one = Verified("tree", known, {0: 1.1, 1: None}, "emulation")
    refused = Verified("gossip", known, {}, "emulation", "it needs root")
    assert reached_all.outcome == "measured 1.30 s"
    assert slower.outcome == "measured 1.30 s (computing took 1.25 times as long as predicted)"
    assert missed_one.outcome == "target not reached with 1 of 2 seeds"
    assert refused.outcome == "not measured: it needs root"
    plan = PlanAnswer(
        ACCURACY, (), None, "none", None, None, {}, None, {}, (), "assumed", tmp_path,
        verified=[reached_all, missed_one, refused],
    )  # fmt: skip
    text = write_page(plan, "a plan").read_text()
    for expected in ("1.10", "1.30", "emulation", missed_one.outcome, refused.outcome):
        assert expected in text


def test_each_candidate_has_a_colour_of_its_own_on_the_page(tmp_path: Path) -> None:
    names = ("one process", "one process, batch x 2, rate x 1", "one process, batch x 4, rate x 1")
    curves = {name: [(1.0, 0.5), (2.0, 0.9)] for name in names}
    plan = PlanAnswer(
        ACCURACY, (), None, "none", None, None, {}, None, curves, (), "assumed", tmp_path,
    )  # fmt: skip
    write_page(plan, "a plan")
    drawn = (tmp_path / "figures" / "curves.svg").read_text()
    lines = re.findall(r'<path aria-label="[^"]*strategy: [^"]*"[^>]*stroke="([^"]+)"', drawn)
    assert len({*lines}) == len(names)

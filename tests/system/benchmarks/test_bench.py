"""The benchmarks: every contestant takes part, pairs lie side by side, windows count steps."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from benchmarks import averaging, peers, server, shapes, simulation, step, suspend, turns
from benchmarks.options import listed
from benchmarks.ratios import Ratio
from benchmarks.server import Peer, ServerRow, bench_server
from benchmarks.server_cost import ONE_BUCKET, SERVERS, Size, bench_server_cost
from benchmarks.step import SUBJECTS
from benchmarks.suspend import RankSteps, Window, row_of
from benchmarks.turns import Block, order
from tests.support.blocks import blocks_of

from orchestra.cli.main import guarded, main
from orchestra.errors import InputError
from orchestra.strategies.parameter_server import ParameterServer

pytestmark = pytest.mark.lab
SMALL = replace(SUBJECTS["lenet"], steps=2, batch_size=4)
PEER = "DDP, 1/5/25/100 MB"


def two_matrices() -> torch.nn.Module:
    """Of 1.2 MB each, so that buckets of 1 MB hold one of them."""
    return torch.nn.Sequential(*(torch.nn.Linear(550, 550, bias=False) for _ in range(2)))


TWO_BUCKETS = replace(
    SMALL, name="two", build=two_matrices, batch=partial(step.images, (550,)), batch_size=2
)


def test_every_other_round_runs_in_reverse() -> None:
    assert [list(order("abc", number)) for number in (1, 2, 3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_contestants_of_a_pair_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    runtime = Mock()
    runtime.reporter.stop_requested.return_value = False
    ran: list[str] = []
    contestants = {name: partial(ran.append, name) for name in "abp"}
    found = turns.take_turns(runtime, contestants, 2, [("a", "p"), ("b", "p")])
    assert "".join(ran) == "pbpa" + "apbp" + "pbpa"
    assert [{name: len(blocks[name]) for name in blocks} for blocks in found] == [
        {"a": 2, "p": 2},
        {"b": 2, "p": 2},
    ]


def test_the_slowest_rank_counts_and_the_processor_time_of_all() -> None:
    ranks = [blocks_of(ours=[1.0, 5.0]), blocks_of(ours=[2.0, 4.0])]
    assert turns.of_all_ranks(ranks) == {"ours": [Block(2.0, 6.0), Block(5.0, 18.0)]}


def test_the_best_bucket_size_is_fastest_in_most_rounds() -> None:
    """One slow round of the machine, or of its own, changes nothing."""
    seconds = {name: [4.0, 40.0, 4.0] for name in "abcd"}
    seconds["c"] = [2.0, 20.0, 90.0]
    assert step.fastest(seconds) == "c"


def test_a_stop_within_a_round_of_the_choice_ends_it() -> None:
    assert step.fastest({"a": [], "b": []}) == "a"
    assert step.fastest({"a": [], "b": [1.0]}) == "a"
    assert step.fastest({"a": [2.0, 1.0], "b": [1.0]}) == "b"


def test_bucket_sizes_that_cut_alike_run_once() -> None:
    one, two = ((3, 4),), ((3,), (4,))
    assert step.equal_sizes({1: two, 5: one, 25: one}) == [[1], [5, 25]]


def test_an_equal_contestant_scores_one_beside_the_chosen_peer() -> None:
    """Chosen on the rounds that judge, the luckiest of four equal sizes would look 2 % faster."""
    draw = random.Random(1)

    def rounds() -> dict[str, list[float]]:
        return {name: [draw.gauss(1.0, 0.08) for _ in range(12)] for name in ("abcd", *"abcd")}

    apart, same = [], []
    for _ in range(400):
        choosing, judged = rounds(), rounds()
        ours = judged.pop("abcd")
        choosing.pop("abcd")
        apart.append(Ratio.of(ours, judged[step.fastest(choosing)]).median)
        same.append(Ratio.of(ours, judged[step.fastest(judged)]).median)
    assert statistics.mean(apart) == pytest.approx(1.0, abs=0.005)
    assert statistics.mean(same) > 1.015


def test_figures_of_a_step_come_from_its_own_pairs() -> None:
    """The peer's time comes from all its blocks, a ratio from the blocks beside the contestant."""
    groups = [
        blocks_of(ours=[3.0, 60.0, 9.0], peer=[2.0, 20.0, 9.0]),
        blocks_of(alone=[4.0, 4.0, 4.0], peer=[4.0, 4.0, 8.0]),
    ]
    peer, ours, alone = step.step_rows(SMALL, 2, [groups, groups])
    assert (peer.contestant, peer.ratio) == ("peer", None)
    assert peer.step_seconds == 6.0 / SMALL.steps  # of 2, 4, 4, 8, 9, and 20
    assert ours.ratio == Ratio(1.5, None, None, 3)  # of 3 / 2, 60 / 20, and 9 / 9
    assert ours.processor_ratio == ours.ratio
    assert ours.step_seconds == 9.0 / SMALL.steps
    assert ours.samples_per_second == 2 * SMALL.batch_size * SMALL.steps / 9.0
    assert alone.ratio is not None
    assert alone.ratio.median == 1.0


def test_steps_of_every_contestant_are_measured() -> None:
    told: list[tuple[str, float]] = []
    rows = [*step.bench_step((2,), 1, (SMALL,), lambda what, part: told.append((what, part)))]
    contestants = [PEER, *map(repr, step.OURS), step.ALONE]
    assert [row.contestant for row in rows] == contestants
    assert {(row.model, row.ranks) for row in rows} == {("lenet", 2)}
    assert all(row.step_seconds > 0 for row in rows)
    assert [row.contestant for row in rows if row.ratio is None] == [PEER]
    assert told
    assert {what for what, _ in told} == {"lenet, 2 ranks"}


def test_rounds_that_choose_the_bucket_size_judge_nobody() -> None:
    peer, *others = step.bench_step((2,), 2, (TWO_BUCKETS,))
    assert peer.contestant in {"DDP, 1 MB", "DDP, 5/25/100 MB"}
    assert {row.ratio.pairs for row in others if row.ratio is not None} == {2}


def test_the_sizes_of_the_models() -> None:
    sizes = [sum(p.numel() for p in subject.build().parameters()) for subject in SUBJECTS.values()]
    assert sizes[0] == 61_706
    assert sizes[1] == pytest.approx(25e6, rel=0.01)


def test_peers_and_their_ratios_come_from_pairs() -> None:
    first = blocks_of(ours=[2.0, 4.0], peer=[4.0, 8.0])
    second = blocks_of(ours=[8.0, 8.0], peer=[4.0, 8.0])
    (row,) = peers.rows_of("lenet", 2, [[first], [second]])
    assert (row.technique, row.peer) == ("ours", "peer")
    assert row.ratio == Ratio(1.5, None, None, 2)  # of 8 / 4, and 8 / 8


def test_pushes_to_a_server_are_counted_for_all() -> None:
    memory, sockets = bench_server((2,), rounds=1, sizes=("0.25 MB",), block_bytes=0)
    assert (memory.workers, memory.over, sockets.over) == (2, "memory", "sockets")
    assert {"gloo", "rpc", "bare"} <= memory.peers.keys()
    assert list(sockets.peers) == ["gloo"]
    for row in (memory, sockets):
        assert row.gigabytes_per_second == pytest.approx(row.per_second * 500_000e-9)
        for peer in row.peers.values():
            assert peer.ratio.median == pytest.approx(row.per_second / peer.per_second)


def test_servers_beside_workers_are_measured_in_parts_and_in_one_bucket() -> None:
    in_parts, in_one = bench_server_cost(1, (Size(26.0, 1),))
    assert (in_parts.contestant, in_one.contestant) == (SERVERS, ONE_BUCKET)
    assert in_parts.ring_ms == in_one.ring_ms > 0
    for row in (in_parts, in_one):
        assert row.ratio.median == pytest.approx(row.servers_ms / row.ring_ms)


def test_the_pace_is_that_of_the_others_in_each_window() -> None:
    steady = [float(second) for second in range(40)]
    slowed = [t for t in steady if not 10 <= t < 20 or t % 2 == 0]
    slowest = [t for t in steady if not 10 <= t < 20 or t % 4 == 0]
    stopped = [t for t in steady if t < 10 or 20 <= t < 30]
    assert suspend.VICTIM == 1
    ranks = [RankSteps(times, 0.5) for times in (slowed, stopped, slowed, slowest)]
    pairs = [
        (Window(0, 10), Window(10, 20)),
        (Window(20, 30), Window(30, 40)),
        (Window(0, 10), Window(10, 20)),
    ]
    row = row_of("waits", [*ranks, RankSteps([], 0.25), None], pairs)
    assert row.ratios == (0.5, 1.0, 0.5)
    assert (row.ratio, row.before_per_second, row.suspended_per_second) == (0.5, 1.0, 0.5)
    assert row.busy_cores == 2.25


@pytest.mark.lab  # a pause of the machine is as long as its windows
@pytest.mark.parametrize("load", suspend.LOADS)
def test_a_worker_is_suspended_and_the_others_step_on(load: str) -> None:
    (row,) = suspend.bench_suspend(pairs=2, window=0.5, loads=(load,))
    assert (row.load, len(row.ratios)) == (load, 2)
    assert row.suspended_per_second > 0


@pytest.mark.lab  # likewise
def test_the_measure_sees_a_server_that_waits_for_everybody() -> None:
    """Once a worker is suspended, the others complete at most the step under way."""
    synchronous = ParameterServer(consistency="synchronous")
    (row,) = suspend.bench_suspend(pairs=2, window=1.0, loads=("waits",), strategy=synchronous)
    assert row.suspended_per_second <= 1.0 < row.before_per_second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2,x"], "--ranks: '2,x' is not a list of whole numbers"),
        (["--ranks", "1,2"], "--ranks: 1 is below 2"),
        (["--rounds", "0"], "--rounds: 0 is below 1"),
        (["--model", "lennet"], "--model: unknown 'lennet'; did you mean 'lenet'?"),
        (["--json", "here"], "--json: here exists; name a new file"),
        (["--json", "no/file"], "--json: there is no folder no"),
        (["--round", "2"], "did you mean '--rounds'?"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    assert guarded(step.main, arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_one_model_or_all() -> None:
    assert listed("--model", None, SUBJECTS) == SUBJECTS
    assert listed("--model", "mlp25m", SUBJECTS) == {"mlp25m": SUBJECTS["mlp25m"]}
    with pytest.raises(InputError):
        listed("--model", "mlp", SUBJECTS)


def test_figures_as_a_table_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "SUBJECTS", {"lenet": SMALL})
    file = tmp_path / "figures.json"
    assert guarded(step.main, ["--ranks", "2", "--rounds", "1", "--json", str(file)]) == 0
    captured = capsys.readouterr()
    assert all(re.fullmatch(r"orchestra: .+, \d+%", line) for line in captured.err.splitlines())
    document = json.loads(file.read_text())
    assert document["environment"]["cores"]
    assert document["command"] == "python -m benchmarks.step --ranks 2 --rounds 1"
    (table,) = document["tables"]
    assert table["title"] == "lenet, 2 ranks"
    assert [line[0] for line in table["lines"]] == [row["contestant"] for row in document["rows"]]
    assert [row["contestant"] for row in document["rows"]][-1] == step.ALONE
    for row in document["rows"]:
        assert f"{row['contestant']}  " in captured.out
    assert "\x1b" not in captured.out


def test_steps_measured_before_ctrl_c_are_shown_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: object) -> Iterator[step.StepRow]:
        yield step.StepRow("lenet", 2, "ours", 0.0125, 1.0, Ratio(0.9, 0.8, 1.0, 12))
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "bench_step", measured)
    file = tmp_path / "figures.json"
    assert guarded(step.main, ["--json", str(file)]) == 1
    assert "ours      12.50          1  0.90 (0.80-1.00)" in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["rows"]
    assert row["ratio"] == {"median": 0.9, "low": 0.8, "high": 1.0, "pairs": 12}


def test_rates_and_paces_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    peers = {
        "gloo": Peer(200.6, Ratio(2.0, 1.5, 2.5, 7)),
        "rpc": Peer(100.3, Ratio(4.0, 3.0, 5.0, 7)),
    }
    server.table_of([ServerRow(3, "4 MB", "memory", 401.2, 3.21, peers)]).show()
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 4 MB memory 401 3.21 201 2.00 (1.50-2.50) 100 4.00 (3.00-5.00)" in printed
    ratios = (0.9, 0.95, 1.0)
    row = suspend.SuspendRow("waits", 20.0, 19.0, ratios, 0.95, 0.9, 0.5, 2)
    suspend.table_of([row]).show()
    printed = capsys.readouterr().out
    assert "waits 20.0 19.0 95% 90% to 100% 0.5 of 2" in " ".join(printed.split())
    assert "required: 90% of the pace" in printed


def test_the_old_command_says_where_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--ranks", "2"]) == 2
    error = capsys.readouterr().err
    assert "python -m benchmarks.step" in error
    assert error.count("\n") == 1


def test_simulated_and_plain_steps_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[float] = []
    contest = simulation.SimulationContest(workers=2, rounds=2, batch_size=2)
    row = simulation.measured(contest, lambda _, part: told.append(part))
    assert row.workers == 2
    assert min(row.simulated_seconds, row.plain_seconds) > 0
    assert row.ratio.pairs == 2
    assert told
    simulation.table_of([row]).show()
    assert str(row.ratio) in capsys.readouterr().out


def test_simulations_of_time_alone_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(shapes.bench_scale(["ring", "server"], shapes.Scale(32, 2, 1000), 100))
    for row in rows:
        assert (row.workers, row.steps) == (32, 2)
        assert min(row.seconds or 0, row.virtual_seconds or 0, row.peak_megabytes or 0) > 0
    shapes.table_of(rows, 100).show()
    assert "32 workers" in capsys.readouterr().out


def test_what_was_measured_before_ctrl_c_is_shown_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = shapes.ScaleRow("ring", "AllReduce()", 64, 100, 1000, 10.0, 7.5, 7.25, 3.0, 400.0)
    measured = Mock(side_effect=[finished, KeyboardInterrupt])
    monkeypatch.setattr(shapes, "_measured", measured)
    figures = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        shapes.main(["--strategies", "ring,server", "--json", str(figures)])
    assert "7.5" in capsys.readouterr().out
    assert [row["label"] for row in json.loads(figures.read_text())["rows"]] == ["ring"]


def test_nothing_is_written_where_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shapes, "_measured", Mock(side_effect=KeyboardInterrupt))
    figures = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        shapes.main(["--strategies", "ring", "--json", str(figures)])
    assert not figures.exists()


def test_peers_that_are_not_installed_have_a_line_in_place_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(averaging, "is_installed", lambda package: False)
    assert averaging.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "torchft is not installed: no row for it." in lines
    assert "hivemind is not installed: no row for it." in lines


@pytest.mark.skipif(
    not any(map(find_spec, {*averaging.PACKAGES.values()})), reason="neither is installed"
)
def test_peers_that_are_installed_average_and_have_rows() -> None:
    """Ranks fail where a peer does not average."""
    installed = {peer for peer, package in averaging.PACKAGES.items() if find_spec(package)}
    rows = list(averaging.bench_averaging((2,), 1, (SMALL,)))
    assert {row.peer for row in rows} == installed
    assert all(row.ratio.median == row.step_seconds / row.peer_seconds for row in rows)

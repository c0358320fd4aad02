"""Who held up the others: from made-up sums, from simulated runs, and from real ones."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.drawn import keep, record
from tests.support.lab import some
from tests.support.pages import Page
from tests.support.shapes import in_shapes
from tests.support.simulated import cluster, simulated
from tests.support.training import settings
from torch.utils.data import Dataset

from orchestra.cluster import Cluster
from orchestra.cluster.faults import Fault, LinkSlow, SlowDown
from orchestra.cluster.file import cluster_text
from orchestra.cluster.nodes import ExponentialTail
from orchestra.engines.events import Heartbeat
from orchestra.engines.live import Display, SlowRanks
from orchestra.engines.processes import launch
from orchestra.records.record import RunRecord
from orchestra.records.report import (
    MAX_POINTS,
    Counters,
    CounterSeries,
    RankReport,
    StragglerFinding,
)
from orchestra.records.stragglers import find
from orchestra.report.page import write_report
from orchestra.settings import parse
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.registry import STRATEGIES
from orchestra.tasks import Task
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run
from orchestra.transports.framing import Stream, pack_header
from orchestra.transports.matching import Mailbox
from orchestra.worker.runtime import RankActivity, Runtime

STEPS = 60
Factors = Callable[[int, int], float]
"""Of a rank and a step: how many times as long as usual."""


def one(_: int, __: int) -> float:
    return 1.0


def together(
    ranks: int,
    compute: Factors = one,
    *,
    reading: Factors | None = None,
    samples: Sequence[int] = (),
    steps: int = STEPS,
) -> dict[int, list[Counters]]:
    """Ranks that wait for each other after each step: 1 s for 8 samples, times a factor."""
    by_rank = {rank: [Counters(0.0)] for rank in range(ranks)}
    for step in range(steps):
        counts = {rank: samples[rank] if samples else 8 for rank in range(ranks)}
        own = {r: compute(r, step) * counts[r] / 8 for r in range(ranks)}
        read = {rank: reading(rank, step) if reading else 0.0 for rank in range(ranks)}
        longest = max(own[rank] + read[rank] for rank in range(ranks))
        for rank, series in by_rank.items():
            last = series[-1]
            blocked = longest - own[rank] - read[rank]
            series.append(
                Counters(
                    last.seconds + longest,
                    last.steps + 1,
                    last.samples + counts[rank],
                    last.compute + own[rank],
                    last.input + read[rank],
                    last.blocked + blocked,
                )
            )
    return by_rank


def slow(which: int, factor: float, first: int = 0, last: int = STEPS) -> Factors:
    return lambda rank, step: factor if rank == which and first <= step < last else 1.0


def test_a_slow_rank_is_named_with_what_the_others_lost() -> None:
    (found,) = find(together(4, slow(2, 4.0)))
    assert (found.ranks, found.cause, found.factor) == ((2,), "compute", 4.0)
    assert (found.since_seconds, found.since_step, found.until_seconds) == (0.0, 1, None)
    assert found.lost_seconds == pytest.approx(3 * 3.0 * STEPS)
    assert found.text == "rank 2 is 4.0x slower (compute), 540 s lost to it"


def test_a_slow_loader_is_input() -> None:
    (found,) = find(together(3, reading=lambda rank, _: 2.0 if rank == 1 else 0.1))
    assert (found.ranks, found.cause) == ((1,), "input")
    assert found.lost_seconds == pytest.approx(2 * 1.9 * STEPS)


def test_it_is_slow_from_when_to_when() -> None:
    found, *more = find(together(4, slow(0, 4.0, 20, 40)))
    assert not more
    assert found.since_step == pytest.approx(20, abs=2)
    assert found.until_step == pytest.approx(41, abs=2)
    assert found.since_seconds == pytest.approx(20.0, abs=3.0)
    assert found.until_seconds == pytest.approx(100.0, abs=3.0)


def test_two_bursts_are_two_and_two_stragglers_share_what_is_lost() -> None:
    twice = find(together(4, lambda r, s: 4.0 if r == 1 and s % 60 < 8 else 1.0, steps=120))
    assert [each.ranks for each in twice] == [(1,), (1,)]
    both = find(together(4, lambda rank, _: 3.0 if rank < 2 else 1.0))
    assert [each.ranks for each in both] == [(0,), (1,)]
    assert [each.lost_seconds for each in both] == [pytest.approx(2 * 2.0 * STEPS / 2)] * 2


def test_whom_nobody_waits_for_costs_nothing() -> None:
    by_rank = {}
    for rank in range(4):
        seconds = 4.0 if rank == 3 else 1.0
        steps = range(int(240 / seconds) + 1)
        by_rank[rank] = [
            Counters(s * (seconds + 0.1), s, 8 * s, s * seconds, blocked=0.1 * s) for s in steps
        ]
    (found,) = find(by_rank)
    assert (found.ranks, found.lost_seconds) == ((3,), 0.0)
    assert found.text == "rank 3 is 4.0x slower (compute)"


def test_a_slow_rank_with_a_smaller_part_holds_up_nobody() -> None:
    speeds = slow(1, 4.0)
    assert find(together(4, speeds, samples=(8, 2, 8, 8))) == []
    assert find(together(4, samples=(2, 8, 8, 8))) == [], "more samples take longer"
    assert find(together(4, speeds, samples=(8, 4, 8, 8)))[0].factor == 4.0


@pytest.mark.parametrize("seed", range(5))
def test_chance_is_no_straggler(seed: int) -> None:
    draw = random.Random(seed)
    assert find(together(8, lambda *_: 1 + draw.expovariate(1.0))) == []
    (found,) = find(together(8, lambda r, _: (1 + draw.expovariate(1.0)) * (1 + 2 * (r == 5))))
    assert found.ranks == (5,)


def test_too_little_tells_nothing() -> None:
    assert find(together(4, slow(2, 4.0), steps=8)) == []
    assert find(together(1)) == []
    assert find({}) == []
    assert find(together(4, slow(2, 1.1))) == []
    assert find(together(4, slow(2, 4.0)), least_seconds=1e6) == []
    mostly_waiting = {
        rank: [p._replace(seconds=100 * p.seconds) for p in series]
        for rank, series in together(4, slow(2, 4.0)).items()
    }
    assert find(mostly_waiting) == []


def test_servers_are_compared_with_each_other() -> None:
    by_rank = together(3)
    for server, seconds in ((3, 0.1), (4, 0.1), (5, 0.5)):
        by_rank[server] = [Counters(float(t), compute=t * seconds) for t in range(STEPS + 1)]
    assert find(by_rank, servers={3, 4, 5})[0].ranks == (5,)


def with_links(
    by_rank: Mapping[int, Sequence[Counters]], rates: Mapping[tuple[int, int], float]
) -> dict[int, list[Counters]]:
    """A second a step for 1 MB over each link, times its factor; workers are blocked that long."""
    return {
        rank: [
            point._replace(
                seconds=10.0 * point.steps,
                blocked=9.0 * point.steps,
                arrived=tuple(
                    (source, 1e6 * point.steps, 0.5 * factor * point.steps)
                    for (source, target), factor in rates.items()
                    if target == rank
                ),
            )
            for point in series
        ]
        for rank, series in by_rank.items()
    }


def test_the_rank_behind_a_slow_link_is_named() -> None:
    ring = {(rank, (rank + 1) % 5): 1.0 for rank in range(5)}
    both_ways = {**ring, (1, 2): 10.0, (2, 3): 10.0}
    (found,) = find(with_links(together(5), both_ways), nodes=dict(enumerate("abcde")))
    assert (found.ranks, found.nodes, found.cause) == ((2,), ("c",), "link")
    assert found.factor == pytest.approx(10.0)
    assert found.lost_seconds == pytest.approx(4 * 4.5 * STEPS)
    (found,) = find(with_links(together(5), {**ring, (2, 3): 10.0}))
    assert found.ranks == (2, 3), "it may be what 2 sends through, or 3 receives through"
    assert found.who == "a link of rank 2 or 3"
    assert find(with_links(together(5), ring)) == []


def test_the_links_of_a_rank_that_has_not_been_heard_of_are_left_out() -> None:
    ring = {(rank, (rank + 1) % 5): 1.0 for rank in range(5)}
    known = with_links(together(5), {**ring, (2, 3): 10.0, (3, 4): 10.0})
    del known[3]
    assert all(3 not in each.ranks for each in find(known))


def test_what_all_share_slows_nobody_more_than_the_others() -> None:
    server = {(0, w): 5.0 for w in range(1, 6)} | {(w, 0): 1.0 for w in range(1, 6)}
    assert find(with_links(together(6), server)) == []
    thin = {p: r * (1 + 9 * (3 in p)) for p, r in server.items()}
    (found,) = find(with_links(together(6), thin))
    assert found.ranks == (3,)
    every_second = {(r, (r + 1) % 8): 5.0 if r % 2 else 1.0 for r in range(8)}
    assert find(with_links(together(8), every_second)) == []


def test_links_inside_a_node_are_no_measure_for_others() -> None:
    nodes = dict(enumerate("aabbccddee"))
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    rates = {pair: 1.0 if nodes[pair[0]] == nodes[pair[1]] else 8.0 for pair in pairs}
    assert find(with_links(together(10), rates), nodes=nodes) == []
    thin = {
        p: r * 10 if "b" in (nodes[p[0]], nodes[p[1]]) and r > 1 else r for p, r in rates.items()
    }
    (found,) = find(with_links(together(10), thin), nodes=nodes)
    assert (found.ranks, found.who) == ((2, 3), "a link of rank 2 and 3 (b)")


def test_a_series_keeps_few_points_over_all_of_the_time() -> None:
    series = CounterSeries()
    for step in range(10_000):
        if series.due(step / 10):
            series.add(Counters(step / 10, step))
    points = [point.seconds for point in series.points]
    assert MAX_POINTS / 3 < len(points) <= MAX_POINTS
    gaps = [b - a for a, b in itertools.pairwise(points)]
    assert points[0] == 0.0
    assert 999.9 - points[-1] < 2 * max(gaps)
    assert max(gaps) < 6 * 1000 / MAX_POINTS


# Simulated

NODE = 2


def fast(_: Cluster) -> tuple[Fault, ...]:
    return ()


def lan(
    folder: Path, *, node: Mapping[str, Any] | None = None, faults: Sequence[Fault] = ()
) -> str:
    """The file of a cluster of eight, of which one node or fault is special."""
    made = cluster("lan_1gbit(nodes=8)")
    nodes = list(made.nodes)
    nodes[NODE] = replace(nodes[NODE], **(node or {}))
    path = folder / "cluster.yaml"
    path.write_text(cluster_text(replace(made, nodes=tuple(nodes), faults=tuple(faults))))
    return str(path)


def shapes(strategy: str, folder: Path, on: str, **training: Any) -> RunRecord:
    task = "images(model='large', sample_flops=1e8)"
    chosen = parse(strategy, STRATEGIES, where="test")
    run = settings(chosen, 4, task, **{"steps": 48, "batch_size": 64, **training})
    return simulated(in_shapes(run), folder, on)


def stragglers(record: RunRecord) -> list[tuple[list[int], str]]:
    return [(list(each.ranks), each.cause) for each in record.machine.stragglers]


RING, SERVER = 'AllReduce("ring")', "ParameterServer()"
SERVERS = 'ParameterServer(servers=2, placement="dedicated")'  # NODE holds one of them
ASYNCHRONOUS = 'ParameterServer(consistency="asynchronous")'
WAITING = [
    RING,
    SERVER,
    'ParameterServer(placement="beside")',
    SERVERS,
    "LocalSGD(every=4)",
    "Gossip()",
]
MORE = [
    'AllReduce("tree")',
    'AllReduce("halving_doubling")',
    "StochasticGradientPush()",
    "Prague()",
    'ParameterServer(placement="beside", servers=2)',
]
LAB = [pytest.param(each, marks=pytest.mark.lab) for each in MORE]


LIKE_OTHERS = ('ParameterServer(placement="beside")', "Gossip()")


@pytest.mark.parametrize(
    "strategy",
    some(
        [
            *(
                pytest.param(each, marks=pytest.mark.lab if each in LIKE_OTHERS else ())
                for each in WAITING
            ),
            *LAB,
        ]
    ),
)
def test_a_slow_node_of_a_simulated_cluster(strategy: str, tmp_path: Path) -> None:
    usual = cluster("lan_1gbit").nodes[0].speed
    assert usual is not None
    found = shapes(strategy, tmp_path, lan(tmp_path, node={"speed": usual / 4}))
    assert stragglers(found) == [([NODE], "compute")]
    (only,) = found.machine.stragglers
    assert only.factor == pytest.approx(4.0, rel=0.1)
    assert (only.nodes, only.since_seconds) == (("worker-2",), 0.0)
    assert only.until_seconds is None
    assert only.lost_seconds > 0
    assert found.time.training is not None
    lost_by_each = only.lost_seconds / (found.asked.workers - (strategy != SERVERS))
    assert lost_by_each < found.time.training


@pytest.mark.parametrize("strategy", some([*WAITING, *LAB]))
def test_a_thin_link_of_a_simulated_cluster(strategy: str, tmp_path: Path) -> None:
    up = cluster("lan_1gbit").nodes[0].up
    assert up is not None
    thin = replace(up, bandwidth=up.bandwidth / 10)
    found = shapes(strategy, tmp_path, lan(tmp_path, node={"up": thin, "down": thin}))
    assert stragglers(found) == [([NODE], "link")]
    assert found.machine.stragglers[0].lost_seconds > 0


@pytest.mark.parametrize(
    ("strategy", "cause"),
    some(
        [
            (RING, "compute"),
            (RING, "link"),
            pytest.param(ASYNCHRONOUS, "compute", marks=pytest.mark.lab),
            pytest.param(ASYNCHRONOUS, "link", marks=pytest.mark.lab),
            pytest.param(SERVERS, "compute", marks=pytest.mark.lab),
        ]
    ),
)
def test_a_fault_is_told_from_when_on_and_until_when(
    strategy: str, cause: str, tmp_path: Path
) -> None:
    kind = SlowDown if cause == "compute" else LinkSlow
    faults = [kind("worker-2", 10.0, at=10.0, until=20.0)]
    found = shapes(strategy, tmp_path, lan(tmp_path, faults=faults), steps=400)
    assert stragglers(found) == [([NODE], cause)]
    (only,) = found.machine.stragglers
    assert found.time.training is not None
    window = found.time.training / 30
    assert only.since_seconds == pytest.approx(10.0, abs=1.5 * window)
    assert only.until_seconds == pytest.approx(20.0, abs=1.5 * window)
    if strategy == ASYNCHRONOUS:
        assert only.lost_seconds == 0
    elif strategy == RING:
        assert 15.0 < only.lost_seconds < 30.0  # three others, nine tenths of ten seconds


@pytest.mark.parametrize("jitter", [None, ExponentialTail(0.5)])
@pytest.mark.parametrize("strategy", [RING, ASYNCHRONOUS, *LAB])
def test_equal_nodes_are_silent(
    strategy: str, jitter: ExponentialTail | None, tmp_path: Path
) -> None:
    on = "lan_1gbit(nodes=8)"
    if jitter is not None:
        made = cluster(on)
        nodes = tuple(replace(node, jitter=jitter) for node in made.nodes)
        path = tmp_path / "cluster.yaml"
        path.write_text(cluster_text(replace(made, nodes=nodes)))
        on = str(path)
    assert stragglers(shapes(strategy, tmp_path, on)) == []


# On real processes


SLOW = "ORCHESTRA_TEST_SLOW_LOADER"


class SlowOnOne(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Reading a sample takes long, in a process that says so."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if SLOW in os.environ:
            threading.Event().wait(0.01)
        return torch.full((64,), float(index)), torch.tensor(index % 4)


def slow_loader() -> Task:
    return Task(
        model=lambda: torch.nn.Linear(64, 4),
        train=SlowOnOne(),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


def train_slowly(runtime: Runtime, assignment: tuple[Run, Path]) -> RankReport:
    if runtime.rank == 1:
        os.environ[SLOW] = ""
    return train(runtime, assignment)


def test_a_slow_loader_of_a_real_process(tmp_path: Path) -> None:
    run = settings(
        AllReduce("ring"), 2, "tests.contract.trainer.test_stragglers:slow_loader", batch_size=4
    )
    reports = launch(train_slowly, (run, tmp_path), 2).results
    (found,) = find({report.rank: report.counters for report in reports})
    assert (found.ranks, found.cause) == ((1,), "input")
    assert found.lost_seconds > 0


def test_bytes_take_the_time_for_which_somebody_is_ready_to_read_them() -> None:
    tensor = torch.ones(200_000, dtype=torch.uint8)
    wire = pack_header(tensor, 0) + tensor.numpy().tobytes()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mailbox = Mailbox(0)
        stream = Stream(theirs, 1, mailbox)
        for _ in range(2):
            ours.sendall(wire[:70_000])
            mailbox.blocked += 1.0  # before its first byte was there
            stream.read()
            mailbox.blocked += 2.0
            ours.sendall(wire[70_000:140_000])
            stream.read()
            mailbox.blocked += 3.0
            ours.sendall(wire[140_000:])
            stream.read()
        ours.sendall(pack_header(tensor[:9], 0) + bytes(9))
        stream.read()
    assert mailbox.arrived == {1: (2 * len(wire), 10.0)}, "what is there at once takes no time"


# For the user


def test_it_is_told_once_and_once_when_it_is_over() -> None:
    told: list[str] = []
    clock = iter(range(0, 1_000_000, 3))
    ranks = SlowRanks((), told.append, clock=lambda: float(next(clock)))
    by_rank = together(4, slow(2, 4.0, 20, 60), steps=120)
    lines = set[str]()
    for step in range(121):
        for rank, series in by_rank.items():
            ranks.on_beat(Heartbeat(rank, counters=series[step]))
        lines.update(each.who for each in ranks.present)
    assert len(told) == 2
    assert told[0].startswith("rank 2 is 4.0x slower (compute), ")
    assert told[1] == "rank 2 is as fast as the others again"
    assert lines == {"rank 2"}
    assert ranks.present == []


def test_the_line_of_a_run_says_who_is_slow(capsys: pytest.CaptureFixture[str]) -> None:
    run = settings(AllReduce("ring"), 4, "images()")
    with Display(run, run.strategy.roles(4)) as display:
        for rank, series in together(4, slow(2, 4.0)).items():
            for counters in series:
                display.on_event(
                    Heartbeat(
                        rank, step=counters.steps, activity=RankActivity.TRAINING, counters=counters
                    )
                )
        display._slow._look()
        assert display._text().endswith("rank 2 is 4.0x slower (compute), 540 s lost to it")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("orchestra: rank 2 is 4.0x slower (compute), ")


def test_the_page_has_a_sentence_and_a_table(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("orchestra.report.page.save", lambda figure, folder: None)
    monkeypatch.setattr("orchestra.report.page.library", lambda: "")
    first = StragglerFinding((2,), ("node-c",), "compute", 3.96, 10.0, 11, 20.0, 14, 41.2)
    nobody = replace(first, cause="link", until_seconds=None, lost_seconds=0.0)
    texts = list[str]()
    for found in ([first], [nobody], [first, nobody]):
        folder = tmp_path / str(len(texts))
        keep(folder, [record("ring", stragglers=[asdict(each) for each in found])])
        write_report([folder], folder)
        texts.append(" ".join(Page(folder / "report.html").text.split()))
    slow = "Under ring, rank 2 (node-c) took 4.0 times as long as its peers (compute)"
    assert (
        f"{slow} from 10.0 s to 20.0 s, and the other workers lost 41.2 s to that, all together."
        in texts[0]
    )
    line = "ring 0 rank 2 (node-c) 4.0 times compute 10.0 s, step 11 20.0 s, step 14 41.2 s"
    assert line in texts[0]
    assert "(link) from 10.0 s on, and nobody waited for it." in texts[1]
    assert (
        "Under ring, rank 2 (node-c) and 1 other were slower than the rest (compute and link)"
        in texts[2]
    )

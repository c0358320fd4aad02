"""What links carried: exact bytes, however a simulation computes them; `links.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.lab import some
from tests.support.simulated import FREE, Second, cluster, simulated_here
from tests.support.timelines import assert_matched, assert_well_formed, read
from tests.support.training import settings, step_lines

from orchestra.cluster import load_cluster
from orchestra.collectives import Group, all_reduce
from orchestra.engines.simulation.network import Meter
from orchestra.engines.simulation.simulate import Simulation, SimulationOutcome
from orchestra.engines.simulation.training import links_of
from orchestra.errors import InputError
from orchestra.records.combine import combine
from orchestra.records.links import MAX_LINKS, LinkLoad
from orchestra.records.record import Asked, Batching, Pacing, RunRecord
from orchestra.records.store import RunFolder
from orchestra.records.trace import read_trace, write_trace
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run
from orchestra.transports.framing import header_bytes
from orchestra.worker.runtime import Runtime, SilentReporter

HEADER = header_bytes(1)
LENGTH = 4 * 3 * 100


def carried(schedule: str, ranks: int, on: str, *, measured: bool = True) -> dict[str, LinkLoad]:
    """By name, what each link carried in one all-reduce of `LENGTH` float32."""

    def rank_program(runtime: Runtime) -> None:
        runtime.stopwatch(measured)
        group = Group(tuple(range(ranks)))
        all_reduce(runtime.transport, torch.ones(LENGTH), schedule, group, tag=1)
        runtime.stopwatch(False)

    outcome = Simulation(cluster(on), ranks, Second(), FREE, SilentReporter()).run(rank_program)
    assert outcome.failure is None, outcome.failure
    links = links_of(cluster(on), outcome.sent, outcome.seconds, wire=1.0)
    return {link.name: link for link in links.busiest}


def test_a_ring_on_four_nodes_is_the_closed_form() -> None:
    links = carried("ring", 4, "lan_1gbit(nodes=8)")
    each = 2 * 3 * (4 * LENGTH // 4 + HEADER)  # 2 (N-1) pieces of n / N float32
    assert {name: link.bytes for name, link in links.items()} == {
        f"worker-{node} {way}": each for node in range(4) for way in ("up", "down")
    }
    seconds = 2 * 3 * (100e-6 + (LENGTH + HEADER) / 125e6)  # two links of 50 us
    for link in links.values():
        assert link.share == pytest.approx(each / (125e6 * seconds), rel=1e-6)


def test_ranks_of_one_node_share_its_loopback() -> None:
    links = carried("ring", 4, "lan_1gbit(nodes=2)")  # ranks 0 and 2, 1 and 3: all go round
    each = 2 * 3 * (LENGTH + HEADER)
    assert {name: link.bytes for name, link in links.items()} == {
        f"worker-{node} {way}": 2 * each for node in range(2) for way in ("up", "down")
    }
    assert {*carried("ring", 3, "one_host")} == {"host loopback"}


def test_what_crosses_between_two_sites() -> None:
    links = carried("ring", 4, "two_sites(nodes=4)")
    each = 2 * 3 * (LENGTH + HEADER)
    assert {link.bytes for link in links.values()} == {each}
    assert len(links) == 2 * 4 + 2  # nodes, and the line between: a ring crosses it once each way


def test_nothing_counts_while_the_stopwatch_stands() -> None:
    assert carried("ring", 4, "lan_1gbit(nodes=4)", measured=False) == {}


def test_a_meter_counts_bytes_and_seconds_while_it_runs() -> None:
    now = 1.0
    meter = Meter(lambda: now)
    meter.count(3, 5)
    meter.run(True)
    meter.count(3, 7)
    meter.count_all({1: 2, 3: 1})
    now = 3.5
    meter.run(False)
    meter.run(False)
    meter.count_all({1: 100})
    meter.run(True)
    now = 4.0
    meter.run(False)
    assert (meter.sent, meter.seconds) == ({3: 8, 1: 2}, 3.0)


# Whole runs


def trained(strategy: str, ranks: int, folder: Path, on: str, **training: Any) -> RunRecord:
    """A simulated run, in this process; what its links carried is in `folder`."""
    built = parse(strategy, STRATEGIES, where="test")
    run = settings(
        built, ranks, "images(model='cnn')", steps=5,
        engine="simulation", cluster=on, calibration="none", **training,
    )  # fmt: skip
    folder.mkdir()
    return record(run, simulated_here(run, folder), folder)


def record(run: Run, outcome: SimulationOutcome, folder: Path) -> RunRecord:
    asked = Asked("", repr(run.strategy), "simulation", run.training.ranks, 0, 0, 0)
    found = combine(outcome.results, asked, Pacing(), Batching())
    return replace(found, folder=folder)


IN_BUCKETS: Mapping[str, Any] = {"bucket_megabytes": 0.0005}


@pytest.mark.parametrize(
    ("strategy", "on"),
    some(
        [
            ("AllReduce('ring')", "lan_1gbit(nodes=4)"),
            ("AllReduce('tree')", "two_sites(nodes=4)"),
            ("AllReduce('halving_doubling')", "lan_1gbit(nodes=4)"),
            ("AllReduce('ring')", "one_host(cores=2)"),
            ("ParameterServer(servers=2)", "lan_1gbit(nodes=3)"),
            (
                "Switch(AllReduce('ring'), ParameterServer(), when=AfterSteps(2))",
                "lan_1gbit(nodes=4)",
            ),
        ]
    ),
)
def test_at_once_is_what_it_is_message_by_message_and_in_shapes(
    strategy: str, on: str, tmp_path: Path
) -> None:
    """A timeline of few ranks is made of messages; without one nothing needs them."""
    found, sent = [], []
    for name, training in (
        ("messages", {"trace_steps": 50}),
        ("at once", {"trace_steps": 0}),
        ("shapes", {"tensors": "shapes"}),
    ):
        told = trained(strategy, 4, tmp_path / name, on, **IN_BUCKETS, **training)
        links = RunFolder(tmp_path / name).links
        assert links is not None
        assert links.seconds == told.time.training
        found.append({link.name: link.bytes for link in links.busiest})
        sent.append(told.traffic.sent)
    assert found[0] == found[1] == found[2]
    assert sent[0] == sent[1] == sent[2]


@pytest.mark.parametrize("strategy", ["AllReduce('ring')", "ParameterServer()", "Gossip()"])
def test_all_that_ranks_sent_went_up_their_links(strategy: str, tmp_path: Path) -> None:
    told = trained(strategy, 4, tmp_path / "run", "lan_1gbit(nodes=4)")
    links = RunFolder(tmp_path / "run").links
    assert links is not None
    by_name = {link.name: link.bytes for link in links.busiest}
    for rank in told.machine.by_rank:
        assert by_name[f"worker-{rank.rank} up"] == rank.bytes_sent
    down = sum(size for name, size in by_name.items() if name.endswith("down"))
    assert down == told.traffic.sent
    assert (links.count, links.unused, sum(links.tenths)) == (8, 0, 8)


def test_native_collectives_cross_links_as_a_ring(tmp_path: Path) -> None:
    trained("AllReduce('native')", 4, tmp_path / "run", "lan_1gbit(nodes=4)")
    links = RunFolder(tmp_path / "run").links
    assert links is not None
    gradient = 5 * 4 * elements(tmp_path / "run")
    for link in links.busiest:
        assert link.bytes > 2 * 3 / 4 * gradient
    assert len(links.busiest) == 8


def elements(folder: Path) -> int:
    """Of the model that a run left."""
    from safetensors.torch import load_file

    return sum(tensor.numel() for tensor in load_file(folder / "parameters.safetensors").values())


def test_the_same_run_leaves_the_same_bytes_and_its_cluster(tmp_path: Path) -> None:
    for name in ("one", "other"):
        trained("ParameterServer()", 3, tmp_path / name, "stragglers(nodes=4)")
    for file in ("links.json", "cluster.yaml"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    kept = load_cluster("cluster.yaml", where="test", folder=tmp_path / "one")
    assert kept == cluster("stragglers(nodes=4)")


def test_a_checkpoint_is_off_the_stopwatch(tmp_path: Path) -> None:
    plain = trained("AllReduce('ring')", 3, tmp_path / "plain", "lan_1gbit(nodes=3)")
    saved = trained(
        "AllReduce('ring')", 3, tmp_path / "saved", "lan_1gbit(nodes=3)", checkpoint_every=2
    )
    assert (tmp_path / "saved" / "checkpoints").exists()
    texts = [Counter(link_bytes(record.folder)) for record in (plain, saved)]
    assert texts[0] == texts[1]


def link_bytes(folder: Path) -> dict[str, int]:
    links = RunFolder(folder).links
    assert links is not None
    return {link.name: link.bytes for link in links.busiest}


# The timeline


def test_the_messages_of_a_step_are_those_of_its_lines(tmp_path: Path) -> None:
    """What a run's timeline has."""
    built = parse("AllReduce('ring')", STRATEGIES, where="test")
    run = settings(
        built, 4, "images()", steps=7,
        engine="simulation", cluster="lan_1gbit(nodes=4)", calibration="none",
    )  # fmt: skip
    write_trace(tmp_path, simulated_here(run, tmp_path).results)
    trace = read(tmp_path)
    assert_well_formed(trace)
    assert_matched(trace, all_of_them=True)
    sent: dict[tuple[int, int], list[int]] = {}
    for start, end in read_trace(tmp_path / "trace.json.gz").arrows:
        if start["slice"]["args"].get("step") == 4 and start["pid"] != end["pid"]:
            size = start["slice"]["args"]["bytes_sent"]
            sent.setdefault((start["pid"], end["pid"]), []).append(size)
    assert {pair: len(sizes) for pair, sizes in sent.items()} == {
        (rank, (rank + 1) % 4): 6 for rank in range(4)
    }
    for (source, _), sizes in sent.items():
        lines = {line["step"]: line["bytes_sent"] for line in step_lines(tmp_path, source)}
        assert sum(sizes) == lines[4]


# The file


def test_of_many_links_the_busiest_are_listed_and_all_are_counted() -> None:
    on, ranks = cluster("lan_1gbit(nodes=100)"), 100
    sent = [{(rank + 1) % ranks: 1000 * rank} for rank in range(ranks - 1)] + [{}]
    links = links_of(on, sent, seconds=1e-3, wire=2.0)
    assert len(links.busiest) == MAX_LINKS
    assert (links.count, links.unused) == (200, 4)  # rank 0 sent nothing, and rank 99
    first = links.busiest[0]
    assert (first.name, first.bytes) == ("worker-98 up", 98_000)
    assert first.share == 98_000 * 2.0 / (125e6 * 1e-3)
    shares = [link.share for link in links.busiest]
    assert shares == sorted(shares, reverse=True)
    assert sum(links.tenths) == 200
    assert links.tenths[-1] == 2 * 42  # from 56,250 bytes on


def test_no_links_of_a_single_process(tmp_path: Path) -> None:
    trained("Single()", 4, tmp_path / "run", "lan_1gbit(nodes=4)")
    links = RunFolder(tmp_path / "run").links
    assert links is not None
    assert (links.count, links.busiest) == (0, [])


def test_a_damaged_file_is_told_by_name_and_none_is_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).links is None
    (tmp_path / "links.json").write_text(json.dumps({"seconds": 1}))
    with pytest.raises(InputError, match=r"links\.json: is damaged"):
        _ = RunFolder(tmp_path).links

"""The timeline that a run leaves: what it shows, and that it agrees with the records."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.lab import some
from tests.support.meshes import mesh
from tests.support.timelines import (
    OTHERS,
    Event,
    Trace,
    assert_matched,
    assert_well_formed,
    read,
    traced,
)
from tests.support.training import settings, step_lines, train_processes

from orchestra.engines.processes.system import TimedCompute
from orchestra.records.files import TRACE
from orchestra.records.report import Instant, MessageKey, RankReport, Timeline, TimelineSlice
from orchestra.records.trace import THREADS, trace_events, write_trace
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.trace import STEPS
from orchestra.trainer.trace import Trace as RankTrace
from orchestra.worker.interception import Chain, InterceptedTransport
from orchestra.worker.runtime import Work

TAG = 7


@pytest.fixture(autouse=True)
def over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at are messages."""
    monkeypatch.setenv("ORCHESTRA_SHARED_MEMORY", "0")
    monkeypatch.setenv("ORCHESTRA_COMPILED", "0")


def flow(event: Event) -> int:
    return int(event["tid"]) % THREADS


def test_a_ring(tmp_path: Path) -> None:
    trace = traced('AllReduce("ring")', 3, tmp_path)
    assert_well_formed(trace)
    assert_matched(trace, all_of_them=True)
    assert trace.names("process") == {f"rank {rank}: worker" for rank in range(3)}
    assert trace.names("thread") == {"steps", "main"}
    assert not list(tmp_path.glob(".*")), "nothing half-written stays behind"
    for rank in range(3):
        steps = trace.slices("step", rank=rank)
        assert [event["name"] for event in steps] == [f"step {n}" for n in range(1, 6)]
        compute = Counter(event["name"] for event in trace.slices("compute", rank=rank))
        assert compute == {"gradient (8 samples)": 5, "update": 5}
        sent = trace.slices("send", rank=rank)
        assert {event["args"]["peer"] for event in sent} == {(rank + 1) % 3}
        names = {event["name"] for event in trace.received(rank)}
        assert names == {f"receive 2.85 kB from rank {(rank - 1) % 3}"}


@pytest.mark.parametrize(
    ("strategy", "training"),
    some(
        [
            ('AllReduce("ring")', {}),
            ('AllReduce("ring")', {"checkpoint_every": 2}),
            ('AllReduce("parallel")', {"bucket_megabytes": 0.003}),
            ("ParameterServer()", {}),
            ('ParameterServer(consistency="asynchronous")', {}),
        ]
    ),
)
def test_it_agrees_with_the_step_records(
    strategy: str, training: dict[str, Any], tmp_path: Path
) -> None:
    """Bytes exactly; waiting as the transport counted it; compute no shorter than was charged."""
    trace = traced(strategy, 3, tmp_path, **training)
    assert_well_formed(trace)
    assert_matched(trace, all_of_them=False)
    for rank in range(2):
        for line in step_lines(tmp_path, rank)[:5]:
            slices = [e for e in trace.slices(rank=rank) if e["args"].get("step") == line["step"]]
            assert sum(e["args"].get("bytes_sent", 0) for e in slices) == line["bytes_sent"]
            waited = sum(e["dur"] for e in slices if e["cat"] == "wait" and flow(e) == STEPS + 1)
            assert waited == pytest.approx(line["wait"] * 1e6, abs=2)
            computed = sum(e["dur"] for e in slices if e["cat"] == "compute")
            assert computed >= line["compute"] * 1e6 - 2


def test_an_asynchronous_server_serves_as_many_rounds(tmp_path: Path) -> None:
    """And its last round to the end: what it sends and computes is there for each request."""
    trace = traced('ParameterServer(consistency="asynchronous")', 3, tmp_path, trace_steps=4)
    assert trace.names("process") == {"rank 0: worker", "rank 1: worker", "rank 2: server"}
    served = trace.received(rank=2)
    assert Counter(event["args"]["tag"] for event in served) == {"request": 8, "gradient": 8}
    sent = trace.slices("send", rank=2)
    assert Counter(e["args"]["tag"] for e in sent if "bytes_sent" in e["args"]) == {
        "answer": 8,
        "values": 8,
    }
    computed = Counter(event["name"] for event in trace.slices("compute", rank=2))
    assert computed == {"update": 8, "encode": 8}  # of the values that are answered with
    assert "wait for any rank" in {event["name"] for event in trace.slices("wait", rank=2)}
    assert all("step" not in event["args"] for event in trace.slices(rank=2))
    ways = {(send["pid"], receive["pid"]) for send, receive in trace.arrows()}
    to_server, from_server = {(0, 2), (1, 2)}, {(2, 0), (2, 1)}
    assert ways <= to_server | from_server
    assert ways & to_server
    assert ways & from_server


def test_a_switch_is_marked_and_opens_a_second_window(tmp_path: Path) -> None:
    strategy = 'Switch(AllReduce("ring"), ParameterServer(consistency="asynchronous"), '
    trace = traced(strategy + "when=AfterSteps(6))", 3, tmp_path, steps=12, trace_steps=3)
    assert_well_formed(trace)
    assert_matched(trace, all_of_them=False)
    (switch,) = (e for e in trace.events if e["ph"] == "i" and e["s"] == "g")
    assert switch["name"] == "switch, after step 6"
    steps = {rank: [e["args"]["step"] for e in trace.slices("step", rank=rank)] for rank in (0, 2)}
    assert steps == {0: [1, 2, 3, 7, 8, 9], 2: [1, 2, 3]}
    for rank, tags in ((0, {"values", "answer"}), (2, {"request", "gradient"})):
        by_tag = defaultdict(list)
        for event in trace.received(rank):
            by_tag[event["args"]["tag"]].append(event["ts"])
        assert by_tag.keys() == tags | {"gradients"}
        assert max(by_tag["gradients"]) < switch["ts"]
        assert all(min(by_tag[tag]) > by_tag["gradients"][-1] for tag in tags)
    closings = [e for e in trace.events if e["ph"] == "i" and e["s"] == "p"]
    assert Counter(event["pid"] for event in closings) == {0: 2, 1: 2, 2: 2}


def test_background_flows_have_threads_of_their_own(tmp_path: Path) -> None:
    trace = traced('AllReduce("ring")', 2, tmp_path / "buckets", bucket_megabytes=0.003)
    assert trace.names("thread") == {"steps", "main", "background"}
    names = {(flow(e), e["name"]) for e in trace.slices("send", "receive") if e["name"] != OTHERS}
    assert names
    assert STEPS + 1 not in {number for number, _ in names}
    waits = [e["name"] for e in trace.slices("wait") if flow(e) == STEPS + 1]
    assert "wait for another flow" in waits
    beside = traced('ParameterServer(placement="beside")', 2, tmp_path / "beside")
    assert beside.names("thread") == {"steps", "main", "serve to the end"}
    updates = [e for e in beside.slices("compute") if e["name"] == "update"]
    # The flow that brings the last push of a step makes the update: the worker's, or the server's.
    assert updates
    assert {flow(event) for event in updates} <= {STEPS + 1, STEPS + 2}
    assert_well_formed(beside)


def test_native_collectives(tmp_path: Path) -> None:
    trace = traced('AllReduce("native")', 2, tmp_path)
    assert_well_formed(trace)
    native = trace.slices("native", rank=0)
    assert [event["name"] for event in native] == ["all-reduce (native), 8.55 kB"] * 5
    assert not list(trace.arrows())


def test_a_checkpoint_is_apart_from_the_steps(tmp_path: Path) -> None:
    trace = traced('AllReduce("ring")', 2, tmp_path, checkpoint_every=2, steps=10)
    names = [event["name"] for event in trace.slices("step", rank=0)]
    assert names == ["step 1", "step 2", "checkpoint", "step 3", "step 4", "checkpoint", "step 5"]


def test_a_run_that_goes_on_from_a_checkpoint_leaves_the_trace_of_that_part(tmp_path: Path) -> None:
    traced('AllReduce("ring")', 2, tmp_path, checkpoint_every=8)
    trace = traced('AllReduce("ring")', 2, tmp_path, checkpoint_every=8)
    assert [event["name"] for event in trace.slices("step", rank=0)] == [
        f"step {number}" for number in range(9, 13)
    ]
    assert_matched(trace, all_of_them=True)


def test_one_process(tmp_path: Path) -> None:
    trace = traced("Single()", 2, tmp_path)
    assert_well_formed(trace)
    assert {event["cat"] for event in trace.slices()} == {"compute", "step"}


def test_without_steps_to_trace_there_is_no_file(tmp_path: Path) -> None:
    chosen = parse("Single()", STRATEGIES, where="test")
    train_processes(settings(chosen, 1, "images()", steps=2, trace_steps=0), tmp_path)
    assert (tmp_path / "curve.jsonl").exists()
    assert not (tmp_path / TRACE).exists()


def test_a_run_that_ends_inside_its_window(tmp_path: Path) -> None:
    """What follows the last step belongs to none."""
    trace = traced('AllReduce("ring")', 2, tmp_path, steps=3, trace_steps=20)
    for rank in range(2):
        steps = trace.slices("step", rank=rank)
        assert [event["args"]["step"] for event in steps] == [1, 2, 3]
        end = steps[-1]["ts"] + steps[-1]["dur"]
        assert max(e["ts"] + e["dur"] for e in trace.slices(rank=rank)) <= end + 0.001


@pytest.mark.parametrize("source", [0, None])
def test_arrows_are_right_whenever_windows_open(source: int | None) -> None:
    """The sender's opens after two messages, the receiver's closes before the last of five."""
    with mesh(2) as (sender, receiver):
        tracers = [RankTrace(sender.now, 100), RankTrace(receiver.now, 100)]
        chains = [Chain([tracer]) for tracer in tracers]
        ends = [
            InterceptedTransport(transport, chain, chain.main)
            for transport, chain in zip((sender, receiver), chains, strict=True)
        ]
        tracers[1].open_for_steps(1)
        for number in range(5):
            if number == 2:
                tracers[0].open_for_steps(1)
            if number == 4:
                tracers[1].close()
            sent = ends[0].send(torch.zeros(number + 1), 1, TAG)
            assert ends[1].receive(source, TAG).wait().numel() == number + 1
            sent.wait()
        assert chains[1].interceptors == []  # after the only window nothing is looked at any more
        assert chains[0].interceptors == tracers[:1]
    reports = [report(rank, tracer.timeline("")) for rank, tracer in enumerate(tracers)]
    trace = Trace(trace_events(reports))
    assert_well_formed(trace)
    assert_matched(trace, all_of_them=False)
    assert [send["args"]["payload_bytes"] for send, _ in trace.arrows()] == [12, 16]


# What needs no run


def report(rank: int, timeline: Timeline | None) -> RankReport:
    return RankReport(
        rank, "worker", 1, 1, {}, 1.0, {}, 0, False, {}, 0, None, False, 1, None, timeline
    )


def sending(rank: int, clock: str, began: float) -> RankReport:
    """One message to the other of two ranks, and one from it, 2 ms after the stopwatch began."""
    at, other = began + 0.002, 1 - rank
    slices = [
        TimelineSlice(1, "send", "send", at, at + 0.001, {}, MessageKey(rank, other, 1, 0)),
        TimelineSlice(
            1, "receive", "receive", at + 0.001, at + 0.003, {}, MessageKey(other, rank, 1, 0)
        ),
    ]
    return report(rank, Timeline(clock, began, ("steps", "main"), slices))


def begins(reports: list[RankReport]) -> list[float]:
    return [event["ts"] for event in trace_events(reports) if event["ph"] == "s"]


def test_ranks_with_one_clock_keep_their_distance() -> None:
    assert begins([sending(0, "a", 100.0), sending(1, "a", 100.5)]) == [2000.0, 502000.0]


def test_ranks_with_clocks_of_their_own_begin_together() -> None:
    assert begins([sending(0, "a", 100.0), sending(1, "b", 7000.5)]) == [2000.0, 2000.0]


def test_a_message_whose_other_end_was_not_traced_has_no_arrow() -> None:
    lonely = [sending(0, "a", 0.0), report(1, Timeline("a", 0.0, ("steps", "main")))]
    assert {event["ph"] for event in trace_events(lonely)} == {"M", "X"}
    both = [sending(0, "a", 0.0), sending(1, "a", 0.0)]
    assert {event["ph"] for event in trace_events(both)} == {"M", "X", "s", "f"}


def test_what_was_moved_before_a_message_was_sent_was_another() -> None:
    message = MessageKey(0, 1, 1, 0)
    send = TimelineSlice(1, "send", "send", 1.002, 1.003, {}, message)
    receive = TimelineSlice(1, "receive", "receive", 1.001, 1.004, {"step": 3, "tag": "x"}, message)
    ends = [(0, [send]), (1, [receive])]
    reports = [report(r, Timeline("", 1.0, ("steps", "main"), slices)) for r, slices in ends]
    trace = Trace(trace_events(reports))
    assert [(e["name"], e["ts"], e["dur"], e["args"]) for e in trace.slices(rank=1)] == [
        (OTHERS, 1000.0, 1000.0, {"step": 3}),
        ("receive", 2000.0, 2000.0, {"step": 3, "tag": "x"}),
    ]
    ((start, end),) = trace.arrows()
    assert (start["ts"], end["ts"]) == (2000.0, 2000.0)


def test_an_outer_slice_comes_before_one_that_begins_with_it() -> None:
    inner, outer = (
        TimelineSlice(1, "compute", name, 1.0, end, {}) for name, end in (("a", 2), ("b", 3))
    )
    timeline = Timeline("", 0.0, ("steps", "main"), [inner, outer], [Instant("x", 1.0, True)])
    events = trace_events([report(0, timeline)])
    assert [event["name"] for event in events if event["ph"] == "X"] == ["b", "a"]
    assert [event["s"] for event in events if event["ph"] == "i"] == ["g"]


def test_a_rank_that_was_left_out_is_not_there(tmp_path: Path) -> None:
    write_trace(tmp_path, [report(0, None)])
    assert not list(tmp_path.iterdir())
    write_trace(tmp_path, [report(0, None), sending(1, "a", 0.0)])
    assert Trace(read(tmp_path).events).names("process") == {"rank 1: worker"}


def test_what_surrounds_a_gradient_is_not_charged() -> None:
    """Neither the trace nor the record of steps counts it as computation on real processes."""
    compute = TimedCompute()
    compute.run(Work("step", 8), lambda: None)
    assert compute.seconds == compute.main_seconds == 0.0

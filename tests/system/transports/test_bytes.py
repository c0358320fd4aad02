"""The bytes of a record are those that the kernels of the other ranks have confirmed.

Compiled code moves a collective with a frame where messages have a header each. It counts as those
messages, whatever moves it.
"""

from __future__ import annotations

import ctypes
import fcntl
import struct
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.lab import some
from tests.support.training import settings
from tests.support.waiting import wait_until
from torch import Tensor

from orchestra.engines.processes import launch
from orchestra.exchange import wait_for_everyone
from orchestra.records.report import RankReport
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.session import Session
from orchestra.trainer.settings import Run
from orchestra.transports.collective import messages_of
from orchestra.transports.executor import Frame, plan_of
from orchestra.transports.framing import header_bytes
from orchestra.transports.handshake import CHALLENGE_BYTES, HELLO_BYTES
from orchestra.transports.matching import Flow
from orchestra.transports.protocol import CollectiveCall, Transport
from orchestra.transports.sockets import SocketTransport
from orchestra.worker.interception import InterceptedTransport
from orchestra.worker.runtime import Runtime

HELLO = CHALLENGE_BYTES + HELLO_BYTES


@pytest.fixture(autouse=True)
def over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at are messages."""
    monkeypatch.setenv("ORCHESTRA_SHARED_MEMORY", "0")


pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's"),
    pytest.mark.usefixtures("lanes"),
]


@dataclass
class Confirmed:
    """Bytes that the data connections of a rank have carried, while its stopwatch ran."""

    transport: SocketTransport
    total: int = 0
    at_start: int = field(default=0, init=False)
    saved: int = field(default=0, init=False)  # bytes by which what was sent is less than counted

    def __post_init__(self) -> None:
        lanes = self.transport.lanes
        if lanes is None:
            return
        exchange = lanes.exchange

        def watched(
            flow: Flow, transport: Transport, call: CollectiveCall,
            memory: Tensor, first: int, end: int | None,
        ) -> int:  # fmt: skip
            known = set(lanes._wires)
            scratch = exchange(flow, transport, call, memory, first, end)
            self.saved += self._saved(flow.rank, call, memory, first, end)
            for peer, _ in set(lanes._wires) - known:
                # Both say hello, the lower rank where it listens; the other's SYN counts as a byte.
                self.saved -= HELLO + (header_bytes(1) + 2 if peer > flow.rank else 1)
            return scratch

        lanes.exchange = watched  # type: ignore[method-assign]

    @staticmethod
    def _saved(rank: int, call: CollectiveCall, memory: Tensor, first: int, end: int | None) -> int:
        schedule = call.schedule
        assert schedule is not None
        edges = schedule.edges(call.vector.numel()) if call.edges is None else tuple(call.edges)
        index = call.group.index(rank)
        rows = plan_of(schedule, index, edges, memory.element_size(), first, end).rows
        messages = messages_of(call, rank, first, end).messages_sent
        frames = len(set(rows["peer"][rows["sends"] == 1]))
        return messages * header_bytes(1) - frames * ctypes.sizeof(Frame)

    def start(self) -> None:
        self.at_start = self._settled()

    def stop(self) -> None:
        self.total += self._settled() - self.at_start

    def _settled(self) -> int:
        wait_until(lambda: not self._unconfirmed(), "all bytes are acknowledged")
        return self.transport.acknowledged_bytes() + self.saved

    def _unconfirmed(self) -> int:
        """Bytes that lie in this kernel, sent or not, until the other end confirms them."""
        connections = [each.connection for each in self.transport._engine._streams.values()]
        if self.transport.lanes is not None:
            connections += [each.connection for each in self.transport.lanes._wires.values()]
        empty = struct.pack("i", 0)
        queues = [fcntl.ioctl(each, termios.TIOCOUTQ, empty) for each in connections]
        return sum(struct.unpack("i", queue)[0] for queue in queues)


def measured(runtime: Runtime, assignment: tuple[Run, Path]) -> tuple[RankReport, int]:
    """A training, and the bytes that were confirmed to this rank."""
    run, folder = assignment
    assert isinstance(runtime.transport, InterceptedTransport)
    assert isinstance(runtime.transport.inner, SocketTransport)
    confirmed = Confirmed(runtime.transport.inner)
    session = Session(runtime, run, run.strategy, folder)
    resume, pause = session.recorder.resume, session.recorder.pause
    session.recorder.resume = in_turn(confirmed.start, resume)  # type: ignore[method-assign]
    session.recorder.pause = in_turn(pause, confirmed.stop)  # type: ignore[method-assign]
    session.begin()
    session.train()
    wait_for_everyone(session.worker)  # who leaves closes its connections
    return session.finish(), confirmed.total


def in_turn(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        then()

    return both


SWITCH = 'Switch(AllReduce("ring"), ParameterServer(consistency="asynchronous"), '


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    some(
        [
            pytest.param('AllReduce("ring")', 2, marks=pytest.mark.lab),
            ('AllReduce("ring")', 4),
            pytest.param('AllReduce("parallel")', 2, marks=pytest.mark.lab),
            ('AllReduce("parallel")', 3),
            pytest.param("ParameterServer()", 2, marks=pytest.mark.lab),
            ("ParameterServer(servers=2)", 4),
            pytest.param('ParameterServer(consistency="asynchronous")', 2, marks=pytest.mark.lab),
            ('ParameterServer(consistency="asynchronous")', 3),
            pytest.param(SWITCH + "when=AfterSteps(10))", 2, marks=pytest.mark.lab),
            (SWITCH + "when=AfterSteps(10))", 3),
        ]
    ),
)
def test_the_bytes_of_a_record_are_those_on_the_connections(
    strategy: str, ranks: int, tmp_path: Path
) -> None:
    chosen = parse(strategy, STRATEGIES, where="test")
    run = settings(chosen, ranks, "images(samples=480)", batch_size=8, trace_steps=0)
    results = launch(measured, (run, tmp_path), ranks).results
    sent = sum(report.bytes_sent for report, _ in results)
    assert sent > 100_000
    assert sent == sum(confirmed for _, confirmed in results)

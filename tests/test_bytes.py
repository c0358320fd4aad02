"""The bytes of a record are those that the kernels of the other ranks have confirmed."""

from __future__ import annotations

import fcntl
import struct
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.training import settings
from tests.waiting import wait_until

from orchestra.engines.processes import launch
from orchestra.exchange import wait_for_everyone
from orchestra.records.report import RankReport
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.session import Session
from orchestra.trainer.settings import Run
from orchestra.transports.sockets import SocketTransport
from orchestra.worker.interception import InterceptedTransport
from orchestra.worker.runtime import Runtime


@pytest.fixture(autouse=True)
def over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at are messages."""
    monkeypatch.setenv("ORCHESTRA_SHARED_MEMORY", "0")


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")


@dataclass
class Confirmed:
    """Bytes that the data connections of a rank have carried, while its stopwatch ran."""

    transport: SocketTransport
    total: int = 0
    at_start: int = field(default=0, init=False)

    def start(self) -> None:
        self.at_start = self._settled()

    def stop(self) -> None:
        self.total += self._settled() - self.at_start

    def _settled(self) -> int:
        wait_until(lambda: not self._unconfirmed(), "all bytes are acknowledged")
        return self.transport.acknowledged_bytes()

    def _unconfirmed(self) -> int:
        """Bytes that lie in this kernel, sent or not, until the other end confirms them."""
        streams = self.transport._engine._streams.values()
        empty = struct.pack("i", 0)
        queues = [fcntl.ioctl(stream.connection, termios.TIOCOUTQ, empty) for stream in streams]
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
    [
        pytest.param('AllReduce("ring")', 2, marks=pytest.mark.matrix),
        ('AllReduce("ring")', 4),
        pytest.param('AllReduce("parallel")', 2, marks=pytest.mark.matrix),
        ('AllReduce("parallel")', 3),
        pytest.param("ParameterServer()", 2, marks=pytest.mark.matrix),
        ("ParameterServer(servers=2)", 4),
        pytest.param('ParameterServer(consistency="asynchronous")', 2, marks=pytest.mark.matrix),
        ('ParameterServer(consistency="asynchronous")', 3),
        pytest.param(SWITCH + "when=AfterSteps(10))", 2, marks=pytest.mark.matrix),
        (SWITCH + "when=AfterSteps(10))", 3),
    ],
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

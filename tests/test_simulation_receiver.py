"""A rank that computes takes in no more than its kernel has room for: against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.simulated import FREE, run_ranks
from tests.test_simulation_tcp import BANDWIDTH, LATENCY, TAG, nodes

from orchestra.engines.simulation.stream import Stream
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import Transport
from orchestra.worker.runtime import Runtime, Work

BUFFER = 4_000_000
OVERHEAD = replace(FREE, wire=1.06, tcp=replace(FREE.tcp, unread=BUFFER))
FIRST = 2 * LATENCY  # until the first byte of a message is there


def crossing(size: float) -> float:
    """Seconds that `size` bytes are on a link."""
    return size * 1.06 / BANDWIDTH


def message(size: int) -> torch.Tensor:
    """A tensor whose message has `size` bytes, its header included."""
    return torch.zeros((size - header_bytes(1)) // 4)


def when_there(
    *sizes: int, seconds: float, computes: bool = True, measured: bool = True, buffer: int = 0
) -> list[float]:
    """When rank 1 has each of the messages that rank 0 sends at once, and when 0 is free.

    Rank 1 computes for `seconds` before it waits for any.
    """

    def program(runtime: Runtime) -> list[float]:
        transport: Transport = runtime.transport
        runtime.stopwatch(measured)
        if runtime.rank == 0:
            for handle in [transport.send(message(size), 1, TAG) for size in sizes]:
                handle.wait()
            return [transport.now()]
        if computes:
            runtime.compute.run(Work("gradient", seconds), lambda: None)  # type: ignore[arg-type]
        times = []
        for _ in sizes:
            transport.receive(0, TAG).wait()
            times.append(transport.now())
        return times

    outcome = run_ranks(2, program, nodes(2), replace(OVERHEAD, buffer=buffer))
    assert outcome.failure is None, outcome.failure
    return [*outcome.results[1], *outcome.results[0]]


def test_what_its_kernel_has_no_room_for_crosses_once_it_receives() -> None:
    size = 10_000_000
    there, free = when_there(size, seconds=5)
    assert there == free == pytest.approx(5 + crossing(size - BUFFER))
    # One that waits, or begins to while the buffer fills, takes in all of it as it comes.
    assert when_there(size, seconds=5, computes=False)[0] == pytest.approx(FIRST + crossing(size))
    assert when_there(size, seconds=0.5)[0] == pytest.approx(FIRST + crossing(size))


def test_a_message_that_fits_crosses_meanwhile() -> None:
    assert when_there(BUFFER, seconds=5) == pytest.approx([5, FIRST + crossing(BUFFER)])


def test_messages_share_the_buffer() -> None:
    sizes = [3_000_000] * 3
    first, second, third, free = when_there(*sizes, seconds=5)
    assert first == pytest.approx(5)
    assert second == pytest.approx(5 + crossing(2_000_000))
    assert third == free == pytest.approx(5 + crossing(5_000_000))


def test_a_sender_is_free_once_its_own_kernel_holds_the_rest() -> None:
    there, free = when_there(10_000_000, seconds=5, buffer=6_500_000)
    assert free == pytest.approx(FIRST + crossing(3_500_000))
    assert there == pytest.approx(5 + crossing(6_000_000))
    _, free = when_there(10_000_000, seconds=5, buffer=5_000_000)
    assert free == pytest.approx(5 + crossing(1_000_000))


def test_outside_the_stopwatch_there_is_room() -> None:
    there, _ = when_there(10_000_000, seconds=5, measured=False)
    assert there == pytest.approx(5)


@pytest.mark.parametrize("size", [3_000_000, 12_000_000])
def test_a_rank_that_turns_to_computing_in_the_middle_of_a_message(size: int) -> None:
    def program(runtime: Runtime) -> float:
        transport: Transport = runtime.transport
        runtime.stopwatch(True)
        if runtime.rank == 0:
            transport.send(message(size), 1, TAG).wait()
        elif runtime.rank == 2:
            runtime.compute.run(Work("gradient", 1), lambda: None)
            transport.send(torch.zeros(1), 1, TAG + 1).wait()
        else:
            transport.receive(2, TAG + 1).wait()  # at 1 s and a little
            runtime.compute.run(Work("gradient", 9), lambda: None)
            transport.receive(0, TAG).wait()
        return transport.now()

    outcome = run_ranks(3, program, nodes(3), OVERHEAD)
    assert outcome.failure is None, outcome.failure
    small = crossing(4 + header_bytes(1))
    turned = 1 + FIRST + small * (2 if crossing(size) > 1 else 1)  # it shares the link
    crossed = (1 - FIRST + FIRST) * BANDWIDTH / 1.06 if crossing(size) > 1 else size
    left = max(size - crossed - BUFFER, 0.0)
    assert outcome.results[1] == pytest.approx(turned + 9 + crossing(left), rel=1e-4)


def test_a_background_flow_that_waits_takes_in_for_all() -> None:
    def program(runtime: Runtime) -> float:
        transport: Transport = runtime.transport
        runtime.stopwatch(True)
        if runtime.rank == 0:
            transport.send(message(10_000_000), 1, TAG).wait()
            transport.send(torch.zeros(1), 1, TAG + 1).wait()
            return transport.now()
        task = transport.spawn(lambda own: own.receive(0, TAG + 1).wait())
        runtime.compute.run(Work("gradient", 5), lambda: None)
        transport.receive(0, TAG).wait()
        now = transport.now()
        task.wait()
        return now

    outcome = run_ranks(2, program, nodes(2), OVERHEAD)
    assert outcome.failure is None, outcome.failure
    assert outcome.results[1] == pytest.approx(5)


def test_who_turns_away_for_a_moment_stops_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does so for each message: to look at all of its connections then would take too long."""
    looks: list[Stream] = []
    monkeypatch.setattr(Stream, "bar", looks.append)

    def program(runtime: Runtime) -> float:
        transport: Transport = runtime.transport
        runtime.stopwatch(True)
        if runtime.rank == 0:
            transport.send(message(10_000_000), 1, TAG).wait()
        for _ in range(200 if runtime.rank else 0):
            if runtime.rank == 2:
                transport.send(torch.zeros(1), 1, TAG + 1).wait()
            else:
                transport.receive(2, TAG + 1).wait()
            runtime.compute.run(Work("gradient", 0.01), lambda: None)  # type: ignore[arg-type]
        if runtime.rank == 1:
            transport.receive(0, TAG).wait()
        return transport.now()

    outcome = run_ranks(3, program, nodes(3), OVERHEAD)
    assert outcome.failure is None, outcome.failure
    assert looks == []
    assert outcome.results[1] == pytest.approx(FIRST + crossing(10_000_000), rel=1e-2)

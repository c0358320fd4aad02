"""Servers and workers' channels together, over real sockets, ranks being threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.threads import run_ranks
from torch import Tensor

from orchestra.coordinator.rest import Reason, Rest
from orchestra.errors import PeerLost
from orchestra.exchange.channel import ServerChannel
from orchestra.optimizers.state import capture
from orchestra.parameter_server.held_slice import HeldSlice
from orchestra.parameter_server.how import GradientsBack, OptimizerStep
from orchestra.parameter_server.messages import Answer, Push, QuietPoint
from orchestra.parameter_server.placement import Slice, place
from orchestra.parameter_server.server import Server
from orchestra.parameter_server.state import ServerState
from orchestra.parameter_server.when import Asynchronous, Synchronous, When
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime

SIZE = 100


def charge(kind: str, amount: int, function: Callable[[], Any]) -> Any:
    return function()


def make_slices(servers: Sequence[int]) -> list[Slice]:
    slices = place([(0, SIZE)], SIZE, len(servers), divisible=True)
    return [replace(part, rank=rank) for rank, part in zip(servers, slices, strict=True)]


def make_server(part: Slice, consistency: When, workers: set[int], **more: Any) -> Server:
    """A server of its slice of zeros, with plain SGD."""
    values = torch.zeros(part.end - part.first)
    optimizer = torch.optim.SGD([values], lr=0.1)
    state = ServerState(consistency, workers)
    application = OptimizerStep(values, {"x": (values, 0)}, optimizer)
    return Server(HeldSlice(state, application, charge, **more))


def make_channel(rank: int, transport: Any, slices: Sequence[Slice]) -> ServerChannel:
    worker: Any = SimpleNamespace(rank=rank, transport=transport)
    return ServerChannel(worker, slices)


def push(channel: ServerChannel, gradient: Tensor, into: Tensor, samples: int = 1) -> list[Answer]:
    rank = channel.worker.rank
    own = Push(rank, channel.clock + 1, samples, samples, 0.0, False, (0.5,), (True,))
    return channel.exchange(own, gradient, into)


def gradient_of(rank: int, step: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * rank + step))


def test_synchronous_servers_apply_the_weighted_average_in_rank_order() -> None:
    workers, servers = (0, 1, 2), (3, 4)
    slices = make_slices(servers)

    def program(runtime: Runtime) -> Any:
        if runtime.rank in servers:
            part = slices[runtime.rank - servers[0]]
            server = make_server(part, Synchronous(), set(workers))
            server.serve_to_the_end(runtime.transport)
            return server.own.values
        channel, into = make_channel(runtime.rank, runtime.transport, slices), torch.zeros(SIZE)
        for step in range(3):
            push(channel, gradient_of(runtime.rank, step), into, samples=runtime.rank + 1)
        channel.leave()
        return into

    results = run_ranks(5, program)
    expected = torch.zeros(SIZE)
    for step in range(3):
        average = torch.zeros(SIZE)
        for rank in workers:
            average += gradient_of(rank, step) * ((rank + 1) / 6)
        expected.add_(average, alpha=-0.5)
    for rank in workers:
        assert torch.equal(results[rank], expected)
    assert torch.equal(torch.cat([results[rank] for rank in servers]), expected)


def test_a_server_that_only_averages_returns_the_average() -> None:
    slices = make_slices([2])

    def program(runtime: Runtime) -> Any:
        if runtime.rank == 2:
            values = torch.zeros(SIZE)
            state = ServerState(Synchronous(), {0, 1})
            held = HeldSlice(state, GradientsBack(values), charge)
            Server(held).serve_to_the_end(runtime.transport)
            return values
        channel = make_channel(runtime.rank, runtime.transport, slices)
        vector = gradient_of(runtime.rank, 0)
        push(channel, vector, vector)
        channel.leave()
        return vector

    one, other, values = run_ranks(3, program)
    assert torch.equal(one, gradient_of(0, 0) * 0.5 + gradient_of(1, 0) * 0.5)
    assert torch.equal(one, other)
    assert not values.any()


def test_a_worker_suspended_in_mid_push_holds_up_nobody() -> None:
    """Worker 1 gets half its message out, and the rest only after worker 0 took 20 steps."""
    slices, finished = make_slices([2]), threading.Event()

    def program(runtime: Runtime) -> Any:
        transport = runtime.transport
        if runtime.rank == 2:
            server = make_server(slices[0], Asynchronous(), {0, 1})
            server.serve_to_the_end(transport)
            return None
        suspended: Any = Suspended(transport, runtime.rank, finished)
        channel, into = make_channel(runtime.rank, suspended, slices), torch.zeros(SIZE)
        staleness = []
        for step in range(1 if runtime.rank else 20):
            answers = push(channel, gradient_of(runtime.rank, step), into)
            staleness += [answer.staleness for answer in answers]
        finished.set()
        channel.leave()
        return [answer.version for answer in answers], staleness

    one, other, _ = run_ranks(3, program)
    assert one == ([20], [0] * 20)
    assert other == ([21], [20])


class Suspended:
    """A transport whose rank 1 stops after the first message of its push."""

    def __init__(self, transport: Transport, rank: int, until: threading.Event) -> None:
        self._transport, self._suspended, self._until = transport, rank == 1, until
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, tensor: Tensor, to: int, tag: int, **options: Any) -> Any:
        self._sent += 1
        if self._suspended and self._sent == 2:
            assert self._until.wait(60)
        return self._transport.send(tensor, to, tag, **options)


@pytest.mark.parametrize("consistency", [Asynchronous(), Synchronous()])
def test_the_loss_of_a_worker(consistency: When) -> None:
    """An asynchronous server goes on; a synchronous one ends."""
    slices = make_slices([2])

    def program(runtime: Runtime) -> Any:
        transport = runtime.transport
        if runtime.rank == 2:
            server = make_server(slices[0], consistency, {0, 1})
            server.serve_to_the_end(transport)
            return server.own.state.version
        if runtime.rank == 1:
            transport.send(torch.zeros(SIZE), 2, Tag.GRADIENT).wait()
            transport.abort(RuntimeError("killed"))  # type: ignore[attr-defined]
            return None
        channel, into = make_channel(runtime.rank, transport, slices), torch.zeros(SIZE)
        for step in range(5):
            answers = push(channel, gradient_of(0, step), into)
        channel.leave()
        return [answer.version for answer in answers]

    if isinstance(consistency, Synchronous):
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            run_ranks(3, program)
        return
    assert run_ranks(3, program) == [[5], None, 5]


def test_pause_returns_when_nothing_is_in_flight_and_tells_who_is_there() -> None:
    """Worker 1 leaves after the first quiet point, so that the second is not complete."""
    slices = make_slices([2, 3])

    def program(runtime: Runtime) -> Any:
        transport = runtime.transport
        if runtime.rank >= 2:
            server = make_server(slices[runtime.rank - 2], Asynchronous(), {0, 1})
            return [server.serve(transport) for _ in range(3)], server.own.state.version
        channel, into = make_channel(runtime.rank, transport, slices), torch.zeros(SIZE)
        complete = []
        for step in (1, 2) if runtime.rank == 0 else (1,):
            for _ in range(3):
                push(channel, gradient_of(runtime.rank, step), into)
            complete.append(channel.pause(Rest(Reason.PHASE, step)))
        channel.leave()
        return complete

    results = run_ranks(4, program)
    assert results[:2] == [[True, False], [True]]
    assert (
        results[2:]
        == [
            (
                [
                    QuietPoint(Rest(Reason.PHASE, 1), True),
                    QuietPoint(Rest(Reason.PHASE, 2), False),
                    None,
                ],
                9,
            )
        ]
        * 2
    )


def test_servers_and_channels_go_on_from_what_they_saved() -> None:
    slices = make_slices([1])
    saved: dict[str, Any] = {}

    def program(runtime: Runtime, resumed: bool) -> Any:
        if runtime.rank == 1:
            server = make_server(slices[0], Asynchronous(), {0})
            if resumed:
                server.load_state_dict(saved["server"])
            server.serve_to_the_end(runtime.transport)
            saved["server"] = capture(server)
            return server.own.values
        channel, into = make_channel(runtime.rank, runtime.transport, slices), torch.zeros(SIZE)
        if resumed:
            channel.load_state_dict(saved["channel"])
        push(channel, gradient_of(0, channel.clock), into)
        channel.leave()
        saved["channel"] = dict(channel.state_dict())
        return into

    run_ranks(2, lambda runtime: program(runtime, False))
    into, values = run_ranks(2, lambda runtime: program(runtime, True))
    expected = torch.zeros(SIZE)
    for step in range(2):
        expected.add_(gradient_of(0, step), alpha=-0.5)
    assert torch.equal(into, expected)
    assert torch.equal(values, expected)
    assert saved["channel"] == {"clock": 2}
    assert saved["server"]["read"] == {"0": 2}
    assert saved["server"]["version"] == saved["server"]["consumed"] == 2

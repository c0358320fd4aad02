"""A server beside a worker shares its memory: a step sends nothing, and copies what it has to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from tests.support.threads import run_ranks
from torch import Tensor, nn

from orchestra.coordinator.rest import Reason, Rest
from orchestra.errors import PeerLost
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.parameter_server.how import Correction, WorkerMemory
from orchestra.parameter_server.messages import Push
from orchestra.parameter_server.when import ServerSettings
from orchestra.settings import parse
from orchestra.strategies.member import Member
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.registry import STRATEGIES
from orchestra.transports.tags import Tag
from orchestra.worker.interception import HookedCall, HookedFlow, Interceptor, intercepted
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Step, Worker

T = TypeVar("T")
RATE = 0.125
PARTS, WHOLE = 64, 1 << 20
"""Bytes of a bucket: less than the model, and more."""
BESIDE = [
    "ParameterServer(placement='beside', servers=2)",
    "ParameterServer(placement='beside', returns='gradients')",
    "ParameterServer(placement='beside', servers=2, consistency='asynchronous')",
    "ParameterServer(placement='beside', consistency='bounded', staleness=1)",
    "ParameterServer(placement='beside', servers=2, backup=0, compression=TopK(0.5))",
    "ElasticAveraging(1, servers=2, placement='beside')",
]


@dataclass(eq=False)
class Noting(Interceptor):
    """Notes the tags of what `rank` sends to itself."""

    rank: int
    tags: list[int] = field(default_factory=list)

    def begin(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        if operation.kind == "send" and operation.peer == self.rank:
            self.tags.append(operation.tag)
        return proceed()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def larger() -> nn.Module:
    """Its parts are above 4 KB: smaller messages are copied by the transport anyhow."""
    return nn.Sequential(nn.Linear(4, 2048, bias=False), nn.Linear(2048, 4, bias=False))


def make_worker(
    runtime: Runtime, bucket_bytes: int = WHOLE, make: Callable[[], nn.Module] = small
) -> Worker:
    torch.manual_seed(0)
    model = make()
    names = frozenset(name for name, _ in model.named_parameters())
    spec = OptimizerSpec(torch.optim.SGD, {"lr": RATE}, ((names, {}),))
    return Worker(
        runtime, model, spec, loss=lambda model, batch: model(batch).mean(),
        bucket_bytes=bucket_bytes,
    )  # fmt: skip


def take_step(worker: Worker, member: Member[Any]) -> None:
    worker.begin_step(Step(1, worker.runtime.ranks, rates=(RATE,)))
    member.gradient(torch.ones(1, 4))
    member.update()


@pytest.mark.parametrize("bucket_bytes", [PARTS, WHOLE])
@pytest.mark.parametrize("strategy", BESIDE)
def test_worker_sends_nothing_to_itself_in_a_step(strategy: str, bucket_bytes: int) -> None:
    chosen = parse(strategy, STRATEGIES, where="test")

    def program(runtime: Runtime) -> list[int]:
        noting = Noting(runtime.rank)
        worker = make_worker(intercepted(runtime, noting), bucket_bytes)
        member = chosen.join(worker)
        noting.tags.clear()
        for _ in range(3):
            take_step(worker, member)
        sent = list(noting.tags)
        member.rest(Rest(Reason.END))
        return sent

    assert run_ranks(2, program) == [[], []]


@dataclass(frozen=True, repr=False)
class Doubling(Correction):
    def correct(self, push: Push, gradient: Tensor, values: Tensor, memory: WorkerMemory) -> float:
        gradient.mul_(2)
        return 1.0


def test_correction_does_not_change_the_gradient_of_the_worker() -> None:
    strategy = ParameterServer(
        placement="beside", consistency="asynchronous", learning_rate=Doubling()
    )

    def program(runtime: Runtime) -> tuple[Tensor, Tensor, Tensor]:
        worker = make_worker(runtime)
        member = strategy.join(worker)
        before = worker.parameters.clone()
        worker.begin_step(Step(1, 1, rates=(RATE,)))
        member.gradient(torch.ones(1, 4))
        gradient = worker.gradients.vector.clone()
        member.update()
        moved = before - worker.parameters
        member.rest(Rest(Reason.END))
        return gradient, worker.gradients.vector, moved

    ((gradient, after, moved),) = run_ranks(1, program)
    assert torch.equal(after, gradient)
    assert torch.allclose(moved, 2 * RATE * gradient, atol=1e-6)


@dataclass(frozen=True, repr=False)
class DoublingAnyPush(Doubling):
    def contradictions(self, given: ServerSettings, setting: str) -> Iterator[str]:
        return iter(())


@pytest.mark.parametrize("bucket_bytes", [PARTS, WHOLE])
def test_synchronous_server_corrects_pushes_that_come_in_parts(bucket_bytes: int) -> None:
    def program(runtime: Runtime) -> list[Tensor]:
        moved = []
        for rate in ("kept", DoublingAnyPush()):
            worker = make_worker(runtime, bucket_bytes)
            member = ParameterServer(placement="beside", learning_rate=rate).join(worker)
            before = worker.parameters.clone()
            worker.begin_step(Step(1, 2, rates=(RATE,)))
            member.gradient(torch.ones(1, 4))
            member.update()
            member.rest(Rest(Reason.END))
            moved.append(before - worker.parameters)
        return moved

    for plain, doubled in run_ranks(2, program):
        assert torch.allclose(doubled, 2 * plain, atol=1e-6)


read_at: list[int] = []
"""Where gradients lay that a server has read."""


@dataclass(frozen=True, repr=False)
class Reading(Correction):
    changes_gradient = False

    def correct(self, push: Push, gradient: Tensor, values: Tensor, memory: WorkerMemory) -> float:
        read_at.append(gradient.data_ptr())
        return 1.0


@pytest.mark.parametrize("bucket_bytes", [PARTS, WHOLE])
def test_gradient_that_is_only_read_is_not_copied(bucket_bytes: int) -> None:
    strategy = ParameterServer(
        placement="beside", consistency="asynchronous", learning_rate=Reading()
    )
    read_at.clear()

    def program(runtime: Runtime) -> int:
        worker = make_worker(runtime, bucket_bytes)
        member = strategy.join(worker)
        take_step(worker, member)
        member.rest(Rest(Reason.END))
        return worker.gradients.vector.data_ptr()

    assert run_ranks(1, program) == read_at


@dataclass(eq=False)
class Watching(Interceptor):
    """Counts what a server receives of gradients, and what did not land in place; and requests."""

    received: int = 0
    copied: int = 0
    requests: int = 0

    def begin(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        self.requests += operation.kind == "send" and operation.tag == Tag.REQUEST
        return proceed()

    def wait(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        begun: Any = operation.begun
        if operation.kind == "receive" and operation.tag == Tag.GRADIENT:
            self.received += 1
            self.copied += begun.finished and begun.landed is not begun.into
        return proceed()


@pytest.mark.parametrize("bucket_bytes", [8192, WHOLE])
@pytest.mark.parametrize("strategy", [
    "ParameterServer(consistency='asynchronous')",
    "ParameterServer(backup=0, consistency='bounded', staleness=1, delay_compensation='constant')",
    "ParameterServer(consistency='asynchronous', servers=2, placement='beside')",
])  # fmt: skip
def test_gradients_land_where_they_are_applied(strategy: str, bucket_bytes: int) -> None:
    """In the same memory in each step, and with one request for all parts of a push."""
    chosen = parse(strategy, STRATEGIES, where="test")

    def program(runtime: Runtime) -> Watching:
        watching = Watching()
        worker = make_worker(intercepted(runtime, watching), bucket_bytes, larger)
        is_worker = runtime.rank in chosen.roles(runtime.ranks).workers
        for number in range(6):
            if (
                number % 3 == 0
            ):  # a phase after another one, which has received all that it waits for
                member = chosen.join(worker)
            rest = Rest(Reason.END if number % 3 == 2 else Reason.CHECKPOINT)
            if is_worker:
                take_step(worker, member)
            elif rest.reason is not Reason.END:
                member.serve()
            if is_worker or rest.reason is Reason.END:
                member.rest(rest)
            # The first parts may be here before their server begins to serve.
            watching.copied *= number % 3 > 0
        return watching

    results = run_ranks(2, program)
    roles = chosen.roles(2)
    pushes, rests = 6 * len(roles.servers), 6 * len(roles.servers) * len(roles.workers)
    in_parts = 6 * 2  # one for each tensor
    received = sum(result.received for result in results)
    assert received == (pushes if bucket_bytes == WHOLE else in_parts)
    assert [result.copied for result in results] == [0, 0]
    assert sum(result.requests for result in results) == pushes + rests


def test_receive_that_is_withdrawn_takes_nothing() -> None:
    def program(runtime: Runtime) -> Tensor | None:
        transport = runtime.transport
        if runtime.rank == 0:
            transport.receive(1, Tag.AGREE).withdraw()
            transport.send(torch.zeros(1), 1, Tag.READY).wait()
            return transport.receive(1, Tag.AGREE).wait()
        transport.receive(0, Tag.READY).wait()
        transport.send(torch.ones(2), 0, Tag.AGREE).wait()
        return None

    received, _ = run_ranks(2, program)
    assert torch.equal(received, torch.ones(2))


def test_worker_learns_why_its_server_has_given_up() -> None:
    """It waits in its own process: no connection that ends would tell it."""
    strategy = ParameterServer(placement="beside")

    def program(runtime: Runtime) -> int:
        worker = make_worker(runtime)
        member = strategy.join(worker)
        if runtime.rank == 1:
            runtime.transport.disconnect(0, "for the test")  # type: ignore[attr-defined]
            return -1
        with pytest.raises(PeerLost) as lost:
            take_step(worker, member)
        return lost.value.rank

    assert run_ranks(2, program) == [1, -1]

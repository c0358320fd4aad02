"""What keeping a timeline costs a step of a ring of 4 ranks: block beside block, in one process.

python -m tests.support.scripts.trace_cost [ROUNDS [STEPS OF A BLOCK]]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from benchmarks.gloo import join_gloo
from benchmarks.ratios import Ratio
from benchmarks.step import SUBJECTS
from benchmarks.turns import Blocks, of_all_ranks, processor, take_turns, wall
from torch import Tensor

from orchestra.engines.processes import launch
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.strategies.all_reduce import AllReduce
from orchestra.tasks.classification import cross_entropy
from orchestra.trainer.trace import Trace
from orchestra.transports.protocol import Traffic
from orchestra.worker.interception import Chain, InterceptedTransport, intercepted
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Step, Worker

RANKS = 4
STRATEGY = AllReduce("ring")
SUBJECT = SUBJECTS["lenet"]
FOR_EVER = 1_000_000_000
PLAIN, CLOSED, OPEN = "no timeline", "outside the window", "inside the window"


def measure(runtime: Runtime, argument: tuple[int, int, str]) -> Blocks:
    """On each rank: the blocks of every contestant."""
    rounds, steps, store = argument
    join_gloo(runtime, store)
    contestants = {
        PLAIN: contestant(runtime, None, steps),
        CLOSED: contestant(runtime, Trace(runtime.transport.now, 0), steps),
        OPEN: contestant(runtime, Trace(runtime.transport.now, FOR_EVER), steps),
    }
    (blocks,) = take_turns(runtime, contestants, rounds)
    return blocks


def contestant(runtime: Runtime, tracer: Trace | None, steps: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = SUBJECT.build()
    names = frozenset(name for name, _ in model.named_parameters())
    spec = OptimizerSpec(torch.optim.SGD, {"lr": 0.01}, ((names, {}),))
    if tracer is not None:
        runtime = intercepted(runtime, tracer)
    worker = Worker(runtime, model, spec, loss=cross_entropy)
    member = STRATEGY.join(worker)
    batch, samples = SUBJECT.batch(SUBJECT.batch_size), SUBJECT.batch_size
    if tracer is not None:
        tracer.open_for_steps(1)

    def block() -> None:
        for number in range(steps):
            worker.begin_step(Step(samples, samples * RANKS, rates=(0.01,)))
            member.gradient(batch)
            member.update()
            if tracer is not None:
                tracer.step_ended(number)

    return block


class Nowhere:
    """A transport and its handles that do nothing at all."""

    rank, size, bytes_sent, source = 0, 4, 0, 1

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.tensor = torch.zeros(1)

    def send(self, tensor: Tensor, to: int, tag: int, **options: Any) -> Self:
        return self

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Self:
        return self

    def wait(self) -> Tensor:
        return self.tensor

    def now(self) -> float:
        return time.perf_counter()


def seconds_of_a_message(transport: Any, repeats: int = 200) -> float:
    """To send one and to receive one; the best of many, which other programs disturb least."""
    tensor, best = torch.zeros(1), float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(100):
            transport.send(tensor, 1, 1).wait()
            transport.receive(2, 1).wait()
        best = min(best, (time.perf_counter() - started) / 100)
    return best


def print_messages() -> None:
    nowhere: Any = Nowhere()
    for name, limit in ((CLOSED, 0), (OPEN, FOR_EVER)):
        tracer = Trace(nowhere.now, limit)
        tracer.open_for_steps(1)
        chain = Chain([tracer])
        watched = InterceptedTransport(nowhere, chain, chain.main)
        more = seconds_of_a_message(watched) - seconds_of_a_message(nowhere)
        print(f"{name}: {1e6 * more:+.2f} us for a message sent and one received")


def main(rounds: int = 40, steps: int = 20) -> None:
    print_messages()
    with tempfile.TemporaryDirectory() as folder:
        argument = (rounds, steps, str(Path(folder, "store")))
        results: Sequence[Blocks] = launch(measure, argument, RANKS).results
    print(f"{SUBJECT.name}, {RANKS} ranks, batch {SUBJECT.batch_size}, {rounds} blocks of {steps}")
    blocks = of_all_ranks(results)
    for name in (PLAIN, CLOSED, OPEN):
        for of, what in ((wall, "us a step"), (processor, "us of the processors a step")):
            seconds, ratio = of(blocks[name]), Ratio.of(of(blocks[name]), of(blocks[PLAIN]))
            each = 1e6 * statistics.median(seconds) / steps
            print(f"{name}: {each:.0f} {what}, ratio {ratio.median:.4f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

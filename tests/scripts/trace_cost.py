"""What keeping a timeline costs a step of a ring of 4 ranks: block beside block, in one process.

python -m tests.scripts.trace_cost [ROUNDS [STEPS OF A BLOCK]]
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
from torch import Tensor

from orchestra.bench.step import SUBJECTS
from orchestra.bench.timing import join_gloo, take_turns
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

Figures = dict[str, list[tuple[float, float]]]
"""By contestant, of each block: seconds on the clock, and seconds of the processor."""


def measure(runtime: Runtime, argument: tuple[int, int, str]) -> Figures:
    """On each rank: the blocks of every contestant."""
    rounds, steps, store = argument
    join_gloo(runtime, store)
    figures: Figures = {}
    contestants = {
        PLAIN: contestant(runtime, None, steps),
        CLOSED: contestant(runtime, Trace(runtime.transport.now, 0), steps),
        OPEN: contestant(runtime, Trace(runtime.transport.now, FOR_EVER), steps),
    }
    blocks = {
        name: timed(block, figures.setdefault(name, [])) for name, block in contestants.items()
    }
    take_turns(runtime, blocks, rounds)
    return {name: values[1:] for name, values in figures.items()}  # the first ones warm up


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


def timed(block: Callable[[], None], into: list[tuple[float, float]]) -> Callable[[], None]:
    def run() -> None:
        clock, processor = time.perf_counter(), time.process_time()
        block()
        into.append((time.perf_counter() - clock, time.process_time() - processor))

    return run


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
        results: Sequence[Figures] = launch(measure, argument, RANKS).results
    print(f"{SUBJECT.name}, {RANKS} ranks, batch {SUBJECT.batch_size}, {rounds} blocks of {steps}")
    plain = [of_all_ranks(block) for block in zip(*(r[PLAIN] for r in results), strict=True)]
    for name in (PLAIN, CLOSED, OPEN):
        blocks = [of_all_ranks(block) for block in zip(*(r[name] for r in results), strict=True)]
        for index, what in enumerate(("us a step", "us of the processors a step")):
            values, beside = [b[index] for b in blocks], [b[index] for b in plain]
            each = 1e6 * statistics.median(values) / steps
            print(f"{name}: {each:.0f} {what}, ratio {median_ratio(values, beside):.4f}")


def of_all_ranks(block: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds of the slowest on the clock, and of all together on the processors."""
    clock, processor = zip(*block, strict=True)
    return max(clock), sum(processor)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

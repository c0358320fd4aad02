"""`orchestra bench step`: a step of `AllReduce` beside DistributedDataParallel and one process."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from orchestra.bench.timing import Blocks, Progress, join_gloo, median_ratio, run_ranks, take_turns
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy
from orchestra.tasks import Characters
from orchestra.tasks.characters import GPT, VOCABULARY, next_token_loss
from orchestra.tasks.classification import cross_entropy, lenet5, resnet20
from orchestra.tasks.task import Loss
from orchestra.worker.batches import Batch
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Step, Worker


@dataclass(frozen=True)
class BenchmarkModel:
    """A model and its batches for a benchmark; `batch_size` is that of one worker.

    `steps` steps are timed together as one block, which is long compared with the clock's
    resolution and short compared with the drift of the machine.
    """

    name: str
    build: Callable[[], nn.Module]
    batch_size: int
    batch: Callable[[int], Batch]
    steps: int
    loss: Loss = cross_entropy


def images(shape: Sequence[int], samples: int) -> tuple[Tensor, Tensor]:
    """Return random inputs, [samples, *shape], and labels of ten classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, *shape, generator=generator)
    return inputs, torch.randint(10, (samples,), generator=generator)


def perceptron() -> nn.Module:
    width = 1_960
    return nn.Sequential(
        nn.Linear(1024, width), nn.ReLU(),
        *(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())),
        nn.Linear(width, 10),
    )  # fmt: skip


def transformer() -> nn.Module:
    """Return the GPT of the task `characters`: 116,705 parameters."""
    chosen = Characters()
    return GPT(VOCABULARY, chosen.context, chosen.layers, chosen.heads, chosen.width)


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    """Return random characters, [samples, context], and random ones that follow."""
    generator = torch.Generator().manual_seed(0)
    shape = 2, samples, Characters().context
    first, second = torch.randint(VOCABULARY, shape, generator=generator)
    return first, second


SUBJECTS = {
    "lenet": BenchmarkModel("lenet", lenet5, 64, partial(images, (1, 28, 28)), steps=25),
    "mlp25m": BenchmarkModel("mlp25m", perceptron, 32, partial(images, (1024,)), steps=3),
    "resnet20": BenchmarkModel("resnet20", resnet20, 16, partial(images, (3, 32, 32)), steps=3),
    "gpt": BenchmarkModel("gpt", transformer, 32, tokens, steps=5, loss=next_token_loss),
}


BUCKET_MEGABYTES = (1, 5, 25, 100)
PEER = "DistributedDataParallel, {} MB"
OURS = (AllReduce("native"), AllReduce("ring"))
ALONE = "one process, all cores"
RATE = 0.01


@dataclass(frozen=True)
class Contest:
    """The order to the ranks; `threads` is the number of threads of one process with all cores."""

    subject: BenchmarkModel
    rounds: int
    store: str
    threads: int


@dataclass(frozen=True)
class StepRow:
    """The result of one contestant, with one model on one number of ranks.

    `step_seconds` is the median over the rounds; `ratio` the median of the ratios to the block
    of the best DistributedDataParallel (`best_peer`) in the same round.
    """

    model: str
    ranks: int
    contestant: str
    step_seconds: float
    ratio: float
    samples_per_second: float
    best_peer: bool


def bench_step(
    ranks: Sequence[int] = (2, 4),
    rounds: int = 7,
    subjects: Sequence[BenchmarkModel] = tuple(SUBJECTS.values()),
    on_progress: Progress | None = None,
) -> list[StepRow]:
    """Measure every subject on every number of ranks (2 or more), in `rounds` rounds.

    Raises:
        KeyboardInterrupt: the user stopped it.
    """
    rows = []
    # One round more, which warms up
    blocks = (rounds + 1) * (len(BUCKET_MEGABYTES) + len(OURS) + 1)
    for subject, count in itertools.product(subjects, ranks):
        what = f"{subject.name}, {count} ranks"
        with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder:
            store = str(Path(folder) / "store")
            # The launcher's threads, which are those of one process with all cores; ranks get a
            # part of them
            contest = Contest(subject, rounds, store, torch.get_num_threads())
            first, *_ = run_ranks(
                measure, contest, count, steps=blocks, what=what, on_progress=on_progress
            )
        rows += step_rows(subject, count, first)
    return rows


def step_rows(subject: BenchmarkModel, ranks: int, blocks: Blocks) -> list[StepRow]:
    """Return the figures of each contestant; `blocks` holds seconds of `subject.steps` steps."""
    medians = {name: statistics.median(seconds) for name, seconds in blocks.items()}
    best = _best_peer(blocks)
    samples = ranks * subject.batch_size * subject.steps
    return [
        StepRow(
            subject.name, ranks, name, medians[name] / subject.steps,
            median_ratio(seconds, blocks[best]), samples / medians[name], name == best,
        )
        for name, seconds in blocks.items()
    ]  # fmt: skip


def _best_peer(blocks: Blocks) -> str:
    """Return the bucket size that is fastest beside the others in the same rounds."""
    # Against the mean of its round, so that a slow round favours no size
    peers = [PEER.format(size) for size in BUCKET_MEGABYTES]
    rounds = list(map(statistics.mean, zip(*(blocks[name] for name in peers), strict=True)))
    return min(peers, key=lambda name: median_ratio(blocks[name], rounds))


def measure(runtime: Runtime, contest: Contest) -> Blocks:
    """Return on each rank the seconds of each contestant's blocks."""
    subject = contest.subject
    join_gloo(runtime, contest.store)
    steps = {PEER.format(size): _peer(subject, size) for size in BUCKET_MEGABYTES}
    steps |= {repr(strategy): our_step(runtime, subject, strategy) for strategy in OURS}
    blocks = {name: block_of(step, subject.steps) for name, step in steps.items()}
    blocks[ALONE] = alone(runtime, contest, subject.steps)
    return take_turns(runtime, blocks, contest.rounds)


def block_of(step: Callable[[], None], steps: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(steps):
            step()

    return block


def _peer(subject: BenchmarkModel, bucket_megabytes: int) -> Callable[[], None]:
    torch.manual_seed(0)
    # Without copies between gradients and buckets: the peer at its best
    model = DistributedDataParallel(
        subject.build(), bucket_cap_mb=bucket_megabytes, gradient_as_bucket_view=True
    )
    return plain_step(subject, model, subject.batch_size)


def plain_step(
    subject: BenchmarkModel,
    model: nn.Module,
    samples: int,
    optimizer: Any = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
    then: Callable[[], object] = lambda: None,
) -> Callable[[], None]:
    """Return a step as in a plain training loop. It reads the loss, as every step of ours does.

    Args:
        optimizer: plain SGD if None.
        then: called at the end of the step.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=RATE)
    batch = subject.batch(samples)

    def step() -> None:
        optimizer.zero_grad()
        loss = subject.loss(model, batch)
        backward(loss)
        # Reads the loss as a loop that logs it would; ours does so, too
        loss.item()
        optimizer.step()
        then()

    return step


def alone(runtime: Runtime, contest: Contest, steps_of_block: int) -> Callable[[], None]:
    """Return a block in which the first rank has the batch of all ranks and all cores, while the
    others wait at the barrier before the next block.
    """
    if runtime.rank != 0:
        return lambda: None
    subject = contest.subject
    step = plain_step(subject, subject.build(), subject.batch_size * runtime.ranks)
    steps = block_of(step, steps_of_block)

    def block() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(contest.threads)
        steps()
        torch.set_num_threads(threads)

    return block


def our_step(runtime: Runtime, subject: BenchmarkModel, strategy: Strategy) -> Callable[[], None]:
    torch.manual_seed(0)
    model = subject.build()
    names = frozenset(name for name, _ in model.named_parameters())
    spec = OptimizerSpec(torch.optim.SGD, {"lr": RATE}, ((names, {}),))
    worker = Worker(runtime, model, spec, loss=subject.loss)
    member = strategy.join(worker)
    batch, samples = subject.batch(subject.batch_size), subject.batch_size

    def step() -> None:
        worker.begin_step(Step(samples, samples * runtime.ranks, rates=(RATE,)))
        # Without reading data and writing records, which the peers' loop lacks, too
        member.gradient(batch)
        member.update()

    return step

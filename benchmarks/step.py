"""A step of `AllReduce` beside DistributedDataParallel and one process.

DistributedDataParallel runs with the bucket size that is fastest here. That is found in rounds of
its own, before those that are judged: the best of several on the rounds by which it is judged would
owe part of its lead to luck, and an equal contestant would look slower.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gloo import join_gloo
from benchmarks.options import (
    PrintedTable,
    bench_parser,
    listed,
    print_remarks,
    rank_counts,
    read_options,
    write_figures,
)
from benchmarks.ratios import Ratio
from benchmarks.turns import Blocks, of_all_ranks, processor, take_turns, wall
from orchestra.calibration.timing import Progress, run_ranks
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
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

DESCRIPTION = """\
Time a step of AllReduce beside DistributedDataParallel (DDP), and of one process with all cores and
the batch of all ranks beside it, in pairs of blocks, in turn, in the same processes.

DDP has the bucket size that is fastest here, of 1, 5, 25 and 100 MB. It is chosen in rounds of its
own, which nobody is judged by. Sizes that cut a model's gradient in the same way run once.

Each ratio is the median over the pairs, with a 95 % interval in brackets: the sign-based interval
of a median, from the k-th smallest ratio of all pairs to the k-th largest one. It assumes nothing
of how times are distributed, draws nothing at random, and takes 6 pairs at least.
"""

BUCKET_MEGABYTES = (1, 5, 25, 100)
CHOOSING_ROUNDS = 10  # those that choose among them, and are not judged
PEER = "DDP, {} MB"
OURS = (AllReduce("native"), AllReduce("ring"))
ALONE = "one process, all cores"
RATE = 0.01
Bucketing = tuple[tuple[int, ...], ...]
"""The elements of each parameter in each bucket, in the order in which the buckets are reduced."""


@dataclass(frozen=True)
class Contest:
    """The order to the ranks.

    Attributes:
        threads: of one process with all cores; None: it takes no part.
        interface: the network that gloo uses; by default loopback.
    """

    subject: BenchmarkModel
    rounds: int
    store: str
    threads: int | None = None
    ours: tuple[Strategy, ...] = OURS
    interface: str = ""

    @property
    def contestants(self) -> list[str]:
        """The names of those that are measured beside the peer."""
        return [*map(repr, self.ours), *([ALONE] if self.threads is not None else [])]

    @property
    def blocks(self) -> int:
        """The most blocks that it can take, those of warm-up included."""
        return _blocks_of_choice() + 2 * len(self.contestants) * (self.rounds + 1)


def _blocks_of_choice() -> int:
    return len(BUCKET_MEGABYTES) * (CHOOSING_ROUNDS + 1)


@dataclass(frozen=True)
class StepRow:
    """The result of one contestant, with one model on one number of ranks.

    Attributes:
        step_seconds: the median of its blocks.
        ratio: its time over that of DistributedDataParallel, in pairs of blocks side by side; None
            for DistributedDataParallel itself.
        processor_ratio: the same of the processor time of all ranks together.
    """

    model: str
    ranks: int
    contestant: str
    step_seconds: float
    samples_per_second: float
    ratio: Ratio | None = None
    processor_ratio: Ratio | None = None


def bench_step(
    ranks: Sequence[int] = (2, 4),
    rounds: int = 12,
    subjects: Sequence[BenchmarkModel] = tuple(SUBJECTS.values()),
    on_progress: Progress | None = None,
) -> Iterator[StepRow]:
    """Measure every subject on every number of ranks (2 or more), in `rounds` pairs of blocks.

    Raises:
        KeyboardInterrupt: the user stopped it.
    """
    for subject, count in itertools.product(subjects, ranks):
        with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder:
            store = str(Path(folder) / "store")
            # The launcher's threads, which are those of one process with all cores; ranks get a
            # part of them
            contest = Contest(subject, rounds, store, torch.get_num_threads())
            results = run_ranks(
                measure, contest, count, steps=contest.blocks,
                what=f"{subject.name}, {count} ranks", on_progress=on_progress,
            )  # fmt: skip
        yield from step_rows(subject, count, results)


def step_rows(
    subject: BenchmarkModel, ranks: int, results: Sequence[Sequence[Blocks]]
) -> list[StepRow]:
    """Return the figures of DistributedDataParallel, and those of each contestant beside it, from
    what `measure` returns on each rank.
    """
    samples = ranks * subject.batch_size * subject.steps

    def row(name: str, seconds: Sequence[float], *ratios: Ratio) -> StepRow:
        median = statistics.median(seconds)
        return StepRow(subject.name, ranks, name, median / subject.steps, samples / median, *ratios)

    rows, beside = [], list[float]()
    peer = ""
    for group in zip(*results, strict=True):
        (ours, own), (peer, others) = of_all_ranks(group).items()
        beside += wall(others)
        by_clock = Ratio.of(wall(own), wall(others))
        rows.append(row(ours, wall(own), by_clock, Ratio.of(processor(own), processor(others))))
    return [row(peer, beside), *rows]


def measure(runtime: Runtime, contest: Contest) -> list[Blocks]:
    """Return on each rank the blocks of each contestant and of the peer beside it."""
    subject = contest.subject
    join_gloo(runtime, contest.store, contest.interface)
    sizes = equal_sizes({size: bucketing_of(subject, size) for size in BUCKET_MEGABYTES})
    peers = {
        PEER.format("/".join(map(str, equal))): block_of(_peer(subject, equal[0]), subject.steps)
        for equal in sizes
    }
    peer = _chosen(runtime, peers)
    # The others go, with their memory
    blocks = {peer: peers.pop(peer)}
    peers.clear()
    for strategy in contest.ours:
        step = our_step(runtime, subject, strategy)
        blocks[repr(strategy)] = block_of(step, subject.steps)
    if contest.threads is not None:
        blocks[ALONE] = alone(runtime, contest, subject.steps)
    groups = [(name, peer) for name in contest.contestants]
    return take_turns(runtime, blocks, contest.rounds, groups, done=_blocks_of_choice())


def bucketing_of(subject: BenchmarkModel, bucket_megabytes: int) -> Bucketing:
    """Return how DistributedDataParallel cuts the gradient with this bucket size."""
    model = _distributed(subject, bucket_megabytes)
    found: list[tuple[int, ...]] = []

    def reduce(bucket: Any) -> Future[Tensor]:
        found.append(tuple(parameter.numel() for parameter in bucket.parameters()))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        reduced: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return reduced

    # torch would refuse the annotations of `reduce`, which are strings in this module
    model.register_comm_hook(None, lambda _, bucket: reduce(bucket))
    batch = subject.batch(subject.batch_size)
    # The first step has one bucket; by the second one the buckets are cut in the order in which the
    # first one's gradients came
    for _ in range(2):
        found.clear()
        subject.loss(model, batch).backward()
    return tuple(found)


def equal_sizes(bucketings: Mapping[int, Bucketing]) -> list[list[int]]:
    """Return the bucket sizes, those together that cut the gradient in the same way."""
    equal: dict[Bucketing, list[int]] = {}
    for size, bucketing in bucketings.items():
        equal.setdefault(bucketing, []).append(size)
    return [*equal.values()]


def _chosen(runtime: Runtime, peers: Mapping[str, Callable[[], None]]) -> str:
    """Return the fastest of `peers`, the same on all ranks, in rounds that nobody is judged by."""
    names = [*peers]
    if len(names) == 1:
        return names[0]
    (blocks,) = take_turns(runtime, peers, CHOOSING_ROUNDS)
    # The first rank's clock decides
    place = torch.tensor(names.index(fastest({name: wall(blocks[name]) for name in names})))
    dist.broadcast(place, 0)
    return names[int(place)]


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the contestant that is fastest beside the others in the same rounds."""
    # The user may stop it within a round, or before one is over; then nothing is judged
    rounds = list(zip(*seconds.values(), strict=False))
    if not rounds:
        return next(iter(seconds))
    # Against the mean of its round, so that a slow round favours nobody
    means = list(map(statistics.mean, rounds))
    beside = dict(zip(seconds, zip(*rounds, strict=True), strict=True))
    return min(beside, key=lambda name: Ratio.of(beside[name], means).median)


def block_of(step: Callable[[], None], steps: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(steps):
            step()

    return block


def _distributed(subject: BenchmarkModel, bucket_megabytes: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    # Without copies between gradients and buckets: the peer at its best
    return DistributedDataParallel(
        subject.build(), bucket_cap_mb=bucket_megabytes, gradient_as_bucket_view=True
    )


def _peer(subject: BenchmarkModel, bucket_megabytes: int) -> Callable[[], None]:
    return plain_step(subject, _distributed(subject, bucket_megabytes), subject.batch_size)


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
    all_cores = contest.threads or 1
    step = plain_step(subject, subject.build(), subject.batch_size * runtime.ranks)
    steps = block_of(step, steps_of_block)

    def block() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(all_cores)
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


def tables_of(rows: Iterable[StepRow]) -> Iterator[PrintedTable]:
    """Yield a table for each model and number of ranks."""
    headings = ("", "ms a step", "samples/s", "step / DDP's", "processor / DDP's")
    for (model, ranks), group in groupby(rows, lambda row: (row.model, row.ranks)):
        lines = []
        for row in group:
            figures = f"{row.step_seconds * 1e3:.2f}", f"{row.samples_per_second:,.0f}"
            ratios = (str(ratio or "") for ratio in (row.ratio, row.processor_ratio))
            lines.append((row.contestant, *figures, *ratios))
        yield PrintedTable(f"{model}, {ranks} ranks", headings, lines)


def main(arguments: list[str]) -> int:
    """Measure, and print the figures."""
    parser = bench_parser(
        "python -m benchmarks.step", DESCRIPTION, rounds=12, rounds_of="pairs of blocks"
    )
    parser.option("--ranks", "N,...", "numbers of processes (default: 2,4)", default="2,4")
    parser.option(
        "--model", "NAME", "lenet, mlp25m, resnet20, gpt or all (default: all)", default="all"
    )
    options = read_options(parser, arguments)
    ranks = rank_counts(options.ranks)
    model = None if options.model == "all" else options.model
    subjects = listed("--model", model, SUBJECTS)
    rows: list[StepRow] = []
    try:
        with progress_line() as tell:
            for row in bench_step(ranks, options.rounds, list(subjects.values()), tell):
                rows.append(row)
    finally:
        # Also what was measured before Ctrl-C
        if rows:
            tables = list(tables_of(rows))
            for table in tables:
                table.show()
            print_remarks(
                "Ratios below 1: faster than DistributedDataParallel at its best bucket size; in "
                "brackets the 95 % interval. Processor: the time of all ranks together."
            )
            write_figures(options.json, "step", rows, tables, options.command)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))

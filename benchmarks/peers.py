"""Techniques that PyTorch and its neighbours have, too, beside theirs: a step of each."""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
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
from benchmarks.step import (
    ALONE,
    RATE,
    SUBJECTS,
    BenchmarkModel,
    Contest,
    alone,
    block_of,
    our_step,
    plain_step,
)
from benchmarks.turns import Blocks, of_all_ranks, take_turns, wall
from orchestra.calibration.timing import Progress, run_ranks
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.settings import parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES
from orchestra.worker.runtime import Runtime

EVERY = 8
"""Steps between two averages of local SGD, and of a block."""
PLAIN = "DDP"
FP16, POWER = (f"{PLAIN}, {hook}" for hook in ("fp16", "PowerSGD"))
POST_LOCAL, ACCELERATE = "PostLocalSGD", "Accelerate"
ONE_BUCKET = 1000
"""Megabytes. The PowerSGD hook waits for all-reduces in callbacks of gloo's two threads: with
several buckets it hangs, or ranks call them in different orders (torch 2.13)."""
OURS = {
    "AllReduce('native')": PLAIN,
    "AllReduce()": PLAIN,
    "AllReduce(compression=FP16())": FP16,
    "AllReduce(compression=BF16())": FP16,
    "AllReduce(compression=PowerSGD(1))": POWER,
    f"LocalSGD({EVERY})": POST_LOCAL,
    ALONE: PLAIN,
}
"""Each with the peer that does the same; PyTorch's hook for bf16 is for GPUs only."""
HEADINGS = ("technique", "ms", "peer", "ms", "ratio")
DESCRIPTION = """\
Time a step of each technique that PyTorch has, too, beside that of its peer, in turn, in the same
processes: plain DistributedDataParallel, its hooks for fp16 (beside our BF16, too) and PowerSGD,
its PostLocalSGD optimizer, and the LocalSGD of Hugging Face Accelerate where that is installed. One
process with all cores and the batch of all ranks stands beside the plain one.
"""


@dataclass(frozen=True)
class PeerRow:
    """A technique with one model on one number of ranks.

    `step_seconds` and `peer_seconds` are medians over the rounds; `ratio` is that of ours over the
    peer's, in pairs of blocks side by side.
    """

    model: str
    ranks: int
    technique: str
    step_seconds: float
    peer: str
    peer_seconds: float
    ratio: Ratio


def bench_peers(
    ranks: Sequence[int],
    rounds: int,
    subjects: Sequence[BenchmarkModel],
    on_progress: Progress | None = None,
) -> Iterator[PeerRow]:
    """Measure every subject on every number of ranks.

    Raises KeyboardInterrupt where the user stopped it.
    """
    for subject in subjects:
        for count in ranks:
            results = hold(measure, len(_pairs()), subject, count, rounds, on_progress)
            yield from rows_of(subject.name, count, results)


def hold(
    program: Callable[[Runtime, Contest], list[Blocks]],
    pairs: int,
    subject: BenchmarkModel,
    ranks: int,
    rounds: int,
    on_progress: Progress | None,
) -> Sequence[list[Blocks]]:
    """Let so many pairs of `program` take turns on `ranks` processes; return each one's blocks."""
    with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder:
        contest = Contest(subject, rounds, str(Path(folder) / "store"), torch.get_num_threads())
        results: Sequence[list[Blocks]] = run_ranks(
            program,
            contest,
            ranks,
            steps=(rounds + 1) * 2 * pairs,
            what=f"{subject.name}, {ranks} ranks",
            on_progress=on_progress,
        )
    return results


def rows_of(model: str, ranks: int, results: Sequence[list[Blocks]]) -> Iterator[PeerRow]:
    """Yield a row for each of our techniques beside its peer; blocks have `EVERY` steps."""
    for pair in zip(*results, strict=True):
        (ours, own), (peer, others) = (
            (name, wall(blocks)) for name, blocks in of_all_ranks(pair).items()
        )
        seconds, peer_seconds = (statistics.median(each) / EVERY for each in (own, others))
        yield PeerRow(model, ranks, ours, seconds, peer, peer_seconds, Ratio.of(own, others))


def _pairs() -> list[tuple[str, str]]:
    """Return our techniques, each beside its peer; what is not installed has no pair."""
    pairs = list(OURS.items())
    if _accelerate_is_there():
        pairs.insert(-1, (f"LocalSGD({EVERY})", ACCELERATE))
    return pairs


def _accelerate_is_there() -> bool:
    return importlib.util.find_spec("accelerate") is not None


def measure(runtime: Runtime, contest: Contest) -> list[Blocks]:
    """On each rank: the blocks of each pair."""
    subject = contest.subject
    join_gloo(runtime, contest.store)
    steps: dict[str, Callable[[], None]] = {
        PLAIN: _hooked(subject),
        FP16: _hooked(subject, default_hooks.fp16_compress_hook),
        POWER: _hooked(subject, powerSGD_hook.powerSGD_hook, _power_sgd(), ONE_BUCKET),
        POST_LOCAL: _post_local(subject, runtime),
    }
    if _accelerate_is_there():
        steps[ACCELERATE] = _accelerate(subject, runtime)
    for text in OURS:
        if text != ALONE:
            strategy: Strategy = parse(text, STRATEGIES, where="benchmark")
            steps[text] = our_step(runtime, subject, strategy)
    blocks = {name: block_of(step, EVERY) for name, step in steps.items()}
    blocks[ALONE] = alone(runtime, contest, EVERY)
    return take_turns(runtime, blocks, contest.rounds, _pairs())


def _hooked(
    subject: BenchmarkModel,
    hook: Callable[..., Any] | None = None,
    state: object = None,
    bucket_megabytes: int | None = None,
) -> Callable[[], None]:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        subject.build(), bucket_cap_mb=bucket_megabytes, gradient_as_bucket_view=True
    )
    if hook is not None:
        model.register_comm_hook(state, hook)
    return plain_step(subject, model, subject.batch_size)


def _power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=2
    )


def _post_local(subject: BenchmarkModel, runtime: Runtime) -> Callable[[], None]:
    """No gradient is averaged from the first step on; parameters are, every `EVERY` steps."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # warns of torch.jit

    torch.manual_seed(0)
    model = DistributedDataParallel(subject.build(), gradient_as_bucket_view=True)
    groups = [dist.new_group([rank]) for rank in range(runtime.ranks)]
    state = post_localSGD_hook.PostLocalSGDState(None, groups[runtime.rank], 0)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE), PeriodicModelAverager(EVERY, warmup_steps=0)
    )
    return plain_step(subject, model, subject.batch_size, optimizer)


def _accelerate(subject: BenchmarkModel, runtime: Runtime) -> Callable[[], None]:
    os.environ |= {
        "RANK": str(runtime.rank),
        "LOCAL_RANK": str(runtime.rank),
        "WORLD_SIZE": str(runtime.ranks),
        "LOCAL_WORLD_SIZE": str(runtime.ranks),
        "MASTER_ADDR": "127.0.0.1",  # asked for, but the process group is there already
        "ACCELERATE_USE_CPU": "true",
    }
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    plain = subject.build()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=RATE))
    local = LocalSGD(accelerator, model, EVERY)
    local.__enter__()  # left with the process
    return plain_step(
        subject, model, subject.batch_size, optimizer, accelerator.backward, local.step
    )


def tables_of(rows: Sequence[PeerRow]) -> Iterator[PrintedTable]:
    """Yield a table for each model and number of ranks."""
    for (model, ranks), group in groupby(rows, lambda row: (row.model, row.ranks)):
        lines = [_line(row) for row in group]
        yield PrintedTable(f"{model}, {ranks} ranks", HEADINGS, lines)


def _line(row: PeerRow) -> tuple[str, ...]:
    return (
        row.technique,
        f"{1e3 * row.step_seconds:.3g}",
        row.peer,
        f"{1e3 * row.peer_seconds:.3g}",
        str(row.ratio),
    )


def compare_steps(
    name: str, description: str, bench: Callable[..., Iterator[PeerRow]], arguments: list[str]
) -> None:
    """Measure as the command line of `benchmarks.<name>` says, and print the times."""
    parser = bench_parser(
        f"python -m benchmarks.{name}", description, rounds=7, rounds_of="pairs of blocks"
    )
    parser.option("--ranks", "N,...", "numbers of processes (default: 2,4)", default="2,4")
    parser.option("--models", "NAME,...", f"some of {', '.join(SUBJECTS)}")
    options = read_options(parser, arguments)
    subjects = list(listed("--models", options.models, SUBJECTS).values())
    with progress_line() as tell:
        rows = list(bench(rank_counts(options.ranks), options.rounds, subjects, tell))
    tables = list(tables_of(rows))
    for table in tables:
        table.show()
    write_figures(options.json, name, rows, tables, options.command)


def main(arguments: list[str]) -> int:
    """Measure, and print the times."""
    compare_steps("peers", DESCRIPTION, bench_peers, arguments)
    if not _accelerate_is_there():
        print("Accelerate is not installed: no row for its LocalSGD.")
    print_remarks(
        "DDP: DistributedDataParallel on gloo. Ratios below 1: faster than the peer; "
        "in brackets the 95 % interval."
    )
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))

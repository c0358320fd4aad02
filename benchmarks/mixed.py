"""Time to a target on emulated clusters of unlike nodes: Orchestra, its rivals, one node alone."""

from __future__ import annotations

import copy
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gloo import join_gloo
from benchmarks.options import (
    PrintedTable,
    bench_parser,
    listed,
    print_remarks,
    read_options,
    write_figures,
)
from orchestra.calibration.timing import Progress
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.cluster.file import read_cluster
from orchestra.data.feed import open_samples
from orchestra.engines.emulation.network import NODE_END
from orchestra.engines.emulation.nodes import EmulatedCluster
from orchestra.engines.processes.launch import launch
from orchestra.engines.run import train_run
from orchestra.errors import RunFailed
from orchestra.optimizers.settings import Optimizer
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.tasks.task import evaluate, load_task
from orchestra.trainer.balancing import LBBSP
from orchestra.trainer.settings import Run, Target, Training
from orchestra.worker.runtime import Runtime

METRIC, RANKS, SNAPSHOTS = "accuracy", 4, 25


@dataclass(frozen=True)
class Subject:
    """What is trained: at most so many `samples`, to a target of the accuracy.

    Attributes:
        batches: samples a worker and step; one node takes as many a step as the four do together.
        rates: learning rates of SGD with momentum 0.9. Of both, those with which a strategy is
            fastest in a simulation of the first cluster are taken for all contestants that compute
            the same.
    """

    task: str
    at_least: float
    samples: int
    batches: Sequence[int]
    rates: Sequence[float]


SUBJECTS = {
    "digits28": Subject("digits28", 0.85, 25_600, (8, 16), (0.025, 0.05)),
    "images": Subject("images", 0.6, 7_680, (8,), (0.05, 0.1)),
}
"""LeNet-5, whose gradient of a sample takes 0.25 ms of a core, and ResNet-20."""
EVERY = 8
"""Steps between two averages of local SGD."""
_LINK = "{bandwidth: 480 Mbit/s, latency: 0 us}"  # latency, gloo's sockets would not have
_COMMON = "ranks: spread\nall_nodes:\n  cores: 1\n  loopback: {bandwidth: 3 GB/s, latency: 15 us}\n"
CLUSTERS = {
    "one slow node": f"""\
  link: {_LINK}
nodes: {{fast: {{count: 3, speed: 0.48}}, slow: {{speed: 0.12}}}}
""",
    "four speeds": f"""\
  link: {_LINK}
nodes: {{a: {{speed: 0.8}}, b: {{speed: 0.48}}, c: {{speed: 0.24}}, d: {{speed: 0.12}}}}
""",
    "slow link": f"""\
  link: {_LINK}
nodes:
  near: {{count: 3, speed: 0.48}}
  far: {{speed: 0.24, link: {{bandwidth: 48 Mbit/s, latency: 0 us}}}}
""",
}
"""Of four nodes each, which share two cores of this machine: as the names say. Nodes have half a
core, and links half of 1 Gbit/s, so that computing and sending take as long beside each other as on
whole cores."""

ALONE, RING, POWER, LOCAL = "fastest node alone", "ring", "PowerSGD", "local SGD"
OURS = {
    ALONE: ("Single()", None),
    RING: ('AllReduce("ring")', None),
    "ring, LB-BSP": ('AllReduce("ring")', LBBSP()),
    POWER: ('AllReduce("ring", compression=PowerSGD(1))', None),
    "PowerSGD, LB-BSP": ('AllReduce("ring", compression=PowerSGD(1))', LBBSP()),
    LOCAL: (f"LocalSGD({EVERY})", None),
    "local SGD, LB-BSP": (f"LocalSGD({EVERY})", LBBSP(low=4)),  # of less, replicas diverge
    "asynchronous server": (
        'ParameterServer(consistency="asynchronous", placement="beside", '
        'learning_rate="by_staleness")',
        None,
    ),
}
PEERS = ("DDP", "DDP, fp16", "DDP, PowerSGD", "PostLocalSGD")
"""DistributedDataParallel on gloo."""
LIKE = {
    "ring, LB-BSP": RING,
    "PowerSGD, LB-BSP": POWER,
    "local SGD, LB-BSP": LOCAL,
    "DDP": RING,
    "DDP, fp16": RING,
    "DDP, PowerSGD": POWER,
    "PostLocalSGD": LOCAL,
}
"""Contestants, and the strategy that computes the same."""
DESCRIPTION = f"""\
Train a model on {RANKS} emulated nodes that are unlike, and tell when an {METRIC} is
reached: with strategies of Orchestra, with DistributedDataParallel, its hooks for fp16 and PowerSGD
and its PostLocalSGD, and on the fastest node alone. Batches and learning rates are chosen alike for
all. Needs root.
"""


@dataclass(frozen=True)
class MixedRow:
    """A contestant on a cluster: seconds to the target, None where it was not reached, its final
    figure, seconds of the run, and what it was tuned to."""

    cluster: str
    contestant: str
    seed: int
    to_target: float | None
    final: float
    seconds: float
    batch: int
    rate: float

    @property
    def merit(self) -> tuple[float, float]:
        """Less is better: sooner at the target, else nearer to it."""
        return (math.inf if self.to_target is None else self.to_target), -self.final


def bench_mixed(
    subject: Subject, clusters: Sequence[str], seeds: int, on_progress: Progress | None = None
) -> Iterator[MixedRow]:
    """Tune in the simulation, then run every contestant with each seed on every cluster.

    Raises:
        InputError: this machine cannot emulate.
        RunFailed: a run failed.
    """
    tuned = [label for label in OURS if label not in LIKE]
    grid = list(itertools.product(subject.batches, subject.rates))
    total = len(tuned) + len(clusters) * seeds * (len(OURS) + len(PEERS))
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        if on_progress is not None:
            on_progress(what, done / total)
        done += 1

    with tempfile.TemporaryDirectory(prefix="orchestra-mixed-") as place:
        files = {name: Path(place) / f"{number}.yaml" for number, name in enumerate(clusters)}
        for name, file in files.items():
            file.write_text(_COMMON + CLUSTERS[name])
        settings: dict[str, tuple[int, float]] = {}
        for label in tuned:
            tell(f"simulating {label}")
            first, file = next(iter(files.items()))
            tried = [_trained(subject, first, label, file, each, "simulation", 0) for each in grid]
            best = min((row for row in tried if row is not None), key=lambda row: row.merit)
            settings[label] = best.batch, best.rate
        for (name, file), seed in itertools.product(files.items(), range(seeds)):
            for label in (*OURS, *PEERS):
                tell(f"{name}: {label}")
                tuning = settings[LIKE.get(label, label)]
                if label in PEERS:
                    yield _rival(subject, name, label, file, tuning, seed)
                elif row := _trained(subject, name, label, file, tuning, "emulation", seed):
                    yield row


def _trained(
    subject: Subject,
    cluster: str,
    label: str,
    file: Path,
    tuning: tuple[int, float],
    engine: Any,
    seed: int,
) -> MixedRow | None:
    """The row of a strategy of ours; None where it diverges in a simulation."""
    notation, shares = OURS[label]
    batch, rate = tuning
    training = Training(
        ranks=RANKS, batch_size=batch, steps=_steps(subject, batch), engine=engine,
        cluster=str(file), shares=shares, optimizer=Optimizer("SGD", {"lr": rate, "momentum": 0.9}),
        snapshots=SNAPSHOTS, target=Target(METRIC, at_least=subject.at_least), trace_steps=0,
        threads=1,
    )  # fmt: skip
    strategy = parse(notation, STRATEGIES, where=label)
    with tempfile.TemporaryDirectory(prefix="orchestra-mixed-") as folder:
        run = Run(label, subject.task, strategy, seed=seed, training=training)
        try:
            record = train_run(run, Path(folder), quiet=True)
        except RunFailed as error:
            if engine == "simulation" and "loss became" in str(error):
                return None
            raise
    if record.ending.status == "stopped":
        raise KeyboardInterrupt
    assert record.time.training is not None
    return MixedRow(
        cluster, label, seed, record.to_target.seconds, record.learned.metrics[METRIC],
        record.time.training, *tuning,
    )  # fmt: skip


def _steps(subject: Subject, batch: int) -> int:
    return subject.samples // (RANKS * batch)


# Rivals


@dataclass(frozen=True)
class Job:
    """What each rank of a rival trains."""

    subject: Subject
    label: str
    batch: int
    rate: float
    seed: int
    store: str


def _rival(
    subject: Subject, cluster: str, label: str, file: Path, tuning: tuple[int, float], seed: int
) -> MixedRow:
    with (
        tempfile.TemporaryDirectory(prefix="orchestra-mixed-") as folder,
        EmulatedCluster(read_cluster(file), RANKS, threads=1) as emulated,
    ):
        job = Job(subject, label, *tuning, seed, str(Path(folder) / "store"))
        outcome = launch(rival, job, RANKS, places=emulated.places())
    if outcome.stopped:
        raise KeyboardInterrupt
    curve, final, seconds = outcome.results[0]
    reached = next((at for at, figure in curve if figure >= subject.at_least), None)
    return MixedRow(cluster, label, seed, reached, final, seconds, *tuning)


def rival(runtime: Runtime, job: Job) -> tuple[list[tuple[float, float]], float, float] | None:
    """On each rank: train as `_trained` does; rank 0 tells the curve, the end, and the seconds."""
    join_gloo(runtime, job.store, NODE_END)
    task = load_task(job.subject.task)
    torch.manual_seed(job.seed)
    plain = task.model()
    model = DistributedDataParallel(plain, bucket_cap_mb=1000, gradient_as_bucket_view=True)
    optimizer = _hooked(model, job, runtime)
    samples = open_samples(task.train, job.seed, task.collate)
    # Everything that happens once, on a copy: DistributedDataParallel's buckets, gloo's connections
    warm = DistributedDataParallel(copy.deepcopy(plain))
    for step in range(3):
        task.loss(warm, samples.read(step * job.batch, (step + 1) * job.batch)).backward()
    dist.barrier()
    batch, steps = job.batch, _steps(job.subject, job.batch)
    began, taken = runtime.transport.now(), list[tuple[float, dict[str, Tensor]]]()
    for step in range(steps):
        first = (step * RANKS + runtime.rank) * batch
        loss = task.loss(model, samples.read(first, first + batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (step + 1) * SNAPSHOTS % steps < SNAPSHOTS and runtime.rank == 0:
            state = {name: value.clone() for name, value in plain.state_dict().items()}
            taken.append((runtime.transport.now() - began, state))
        runtime.reporter.progress(step=step, samples=0)
    seconds = runtime.transport.now() - began
    if runtime.rank:
        return None
    curve, judged = [], task.validation or task.test
    assert judged is not None
    assert task.test is not None
    for at, state in taken:
        plain.load_state_dict(state)
        curve.append((at, evaluate(task, plain, judged, 512)[METRIC]))
    return curve, evaluate(task, plain, task.test, 512)[METRIC], seconds


def _hooked(model: DistributedDataParallel, job: Job, runtime: Runtime) -> Any:
    """Register the hook that `job` names; return the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=job.rate, momentum=0.9)
    match job.label:
        case "DDP, fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "DDP, PowerSGD":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=2
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        case "PostLocalSGD":
            groups = [dist.new_group([rank]) for rank in range(runtime.ranks)]
            own = post_localSGD_hook.PostLocalSGDState(None, groups[runtime.rank], 0)
            model.register_comm_hook(own, post_localSGD_hook.post_localSGD_hook)
            averager = PeriodicModelAverager(EVERY, warmup_steps=0)
            return PostLocalSGDOptimizer(optimizer, averager)
    return optimizer


def tables_of(rows: Sequence[MixedRow]) -> Iterator[PrintedTable]:
    """Yield a table for each cluster; ratios are to Orchestra's best strategy there."""
    for cluster in dict.fromkeys(row.cluster for row in rows):
        group = [row for row in rows if row.cluster == cluster]
        by_label = {
            label: [row for row in group if row.contestant == label]
            for label in dict.fromkeys(row.contestant for row in group)
        }
        times = {label: _median(found) for label, found in by_label.items()}
        best = min(times[label] for label in times if label in OURS and label != ALONE)
        lines = [
            (
                label,
                "not reached" if math.isinf(times[label]) else f"{times[label]:.1f}",
                "" if math.isinf(times[label]) else f"{times[label] / best:.2f}",
                f"{sum(row.final for row in found) / len(found):.3f}",
                f"{sum(row.seconds for row in found) / len(found):.1f}",
                str(found[0].batch),
                f"{found[0].rate:g}",
            )
            for label, found in sorted(by_label.items(), key=lambda pair: times[pair[0]])
        ]
        headings = ("", "s to target", "to our best", METRIC, "s in all", "batch", "rate")
        yield PrintedTable(cluster, headings, lines)


def _median(rows: Sequence[MixedRow]) -> float:
    times = sorted(math.inf if row.to_target is None else row.to_target for row in rows)
    return times[len(times) // 2]


def main(arguments: list[str]) -> int:
    """Measure, and print the times."""
    parser = bench_parser("python -m benchmarks.mixed", DESCRIPTION)
    parser.option("--task", "NAME", f"{' or '.join(SUBJECTS)} (default: digits28)")
    parser.option("--clusters", "NAME,...", f"some of {', '.join(CLUSTERS)}")
    parser.option("--seeds", "N", "how many (default: 3)", type=int, default=3)
    options = read_options(parser, arguments)
    clusters = list(listed("--clusters", options.clusters, CLUSTERS))
    subject = next(iter(listed("--task", options.task or "digits28", SUBJECTS).values()))
    rows: list[MixedRow] = []
    try:
        with progress_line() as tell:
            for row in bench_mixed(subject, clusters, options.seeds, tell):
                rows.append(row)
    finally:
        if rows:
            tables = list(tables_of(rows))
            for table in tables:
                table.show()
            print_remarks(
                f"Seconds of {subject.task} to {METRIC} {subject.at_least} on {RANKS} emulated "
                "nodes: medians of seeds."
            )
            write_figures(options.json, "mixed", rows, tables, options.command)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))

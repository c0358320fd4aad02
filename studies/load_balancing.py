"""Remedies against a slow machine: what each costs in time and in accuracy.

    python -m studies.load_balancing                in virtual time
    python -m studies.load_balancing processes      real ones, on this machine
    python -m studies.load_balancing emulation      emulated nodes (Linux, root)
    python -m studies.load_balancing emulation 480  the same with links of 480 Mbit/s

Three machines of examples/simulation/one_of_four.yaml are equally fast, and the fourth has a
quarter of their speed. In the column "slow for a while" all are equal, but after a quarter of the
run the fourth slows down to that for half of its time. Seconds are over the ideal, in which nobody
ever waits: all samples over the sum of the speeds. Accuracies are on the test data, with the lowest
and the highest of three seeds.

Of the real processes three sleep 5 ms for each sample of a gradient, and the fourth 20 ms: they
need no core for that, so that four unlike machines fit on one.

The emulated nodes are those of examples/clusters/mixed.yaml, with LeNet-5 and 512 samples a worker
and step. On their links of 100 Mbit/s an all-reduce takes a quarter of what the gradients take at
best; on half of 1 Gbit/s, which suits nodes of half a core, a twentieth. The ideal is what the four
take for the same samples, in proportion to their speeds, when nobody exchanges anything before the
end.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time  # noqa: TID251 - sleeps stand for computation
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.options import PrintedTable, bench_parser, read_options, write_figures
from torch import Tensor, nn

import orchestra
from orchestra import Task
from orchestra.cli.main import guarded
from orchestra.records.record import RunRecord
from orchestra.tasks.task import load_task

EXAMPLES = Path(__file__).parent.parent / "examples"
CLUSTER = EXAMPLES / "simulation" / "one_of_four.yaml"
EMULATED = EXAMPLES / "clusters" / "mixed.yaml"
SLOW = 0.25
RING = 'AllReduce("ring")'
SERVER = 'ParameterServer(placement="beside")'
POOL = 'ParameterServer(consistency="asynchronous", placement="beside")'
REMEDIES = {
    "all-reduce": (RING, None),
    "measured shares": (RING, "measured"),
    "LBBSP": (RING, "LBBSP()"),
    "Proportional": (RING, "Proportional()"),
    "LBBSP, synchronous server": (SERVER, "LBBSP()"),
    "LBBSP, local SGD": ("LocalSGD(4)", "LBBSP()"),
    "backup worker": ('AllReduce("ring", backup=1)', None),
    "partial all-reduce": ("Prague()", None),
    "asynchronous server": (POOL, None),
    "pairwise averaging": ("PairwiseAveraging()", None),
}
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class RemedyRow:
    """What a remedy costs.

    Attributes:
        one_slow: seconds over the ideal, with one slow machine.
        slow_for_a_while: the same where a machine is slow for half of the time; None: not run.
        accuracies: on the test data, of each seed; empty: not evaluated.
    """

    remedy: str
    one_slow: float
    slow_for_a_while: float | None = None
    accuracies: tuple[float, ...] = ()


def heavy_digits() -> Task:
    """The task digits, with a gradient charged as 1 GFLOP a sample: a model worth distributing."""
    return replace(load_task("digits"), sample_flops=1e9)


NAP = 0.005
"""Seconds for a sample, on a fast process."""


def napping_digits(folder: str) -> Task:
    """The task digits; the first process that asks in `folder` is slow."""
    task, naps = load_task("digits"), list[float]()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not naps:
            try:
                (Path(folder) / "slow").touch(exist_ok=False)
                naps.append(NAP / SLOW)
            except FileExistsError:
                naps.append(NAP)
        if model.training:
            time.sleep(naps[0] * len(batch[0]))
        return task.loss(model, batch)

    return replace(task, loss=loss)


def main(arguments: Sequence[str]) -> int:
    """Print a line for each remedy."""
    parser = bench_parser(
        "python -m studies.load_balancing", "Compare remedies for a slow machine."
    )
    engines: dict[str, Callable[[Path, float | None], Iterator[RemedyRow]]] = {
        "simulation": simulated, "processes": on_processes, "emulation": emulated,
    }  # fmt: skip
    parser.add_argument("engine", nargs="?", choices=engines, default="simulation")
    parser.add_argument("megabits", nargs="?", type=float, help="of the links of emulated nodes")
    options = read_options(parser, arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(engines[options.engine](Path(folder), options.megabits))
    table = table_of(rows)
    table.show()
    write_figures(options.json, "load_balancing", rows, [table], options.command)
    return 0


def table_of(rows: Sequence[RemedyRow]) -> PrintedTable:
    """Return the table of `rows`, without columns in which nothing was measured."""
    headings = ["remedy", "one slow"]
    columns = [[row.remedy for row in rows], [f"{row.one_slow:.2f}" for row in rows]]
    if all(row.slow_for_a_while is not None for row in rows):
        headings.append("slow for a while")
        columns.append([f"{row.slow_for_a_while:.2f}" for row in rows])
    if all(row.accuracies for row in rows):
        headings.append("accuracy")
        columns.append([
            f"{statistics.fmean(all_seeds):.3f} ({min(all_seeds):.3f} to {max(all_seeds):.3f})"
            for all_seeds in (row.accuracies for row in rows)
        ])  # fmt: skip
    return PrintedTable("seconds over the ideal", headings, [*zip(*columns, strict=True)])


def on_processes(folder: Path, _: float | None) -> Iterator[RemedyRow]:
    """Yield a row for each remedy; `folder` is for its runs."""
    steps, batch = 80, 32
    ideal = steps * 4 * batch * NAP / (3 + SLOW)
    for name in ("all-reduce", "measured shares", "LBBSP", "Proportional", "asynchronous server"):
        strategy, shares = REMEDIES[name]
        place = folder / name
        place.mkdir()
        settings: dict[str, Any] = {"shares": shares} if shares else {}
        run = orchestra.train(
            f"studies.load_balancing:napping_digits({str(place)!r})", strategy, ranks=4,
            steps=steps, batch_size=batch, optimizer="SGD(lr=0.05)", snapshots=1, threads=1,
            out=place / "run", quiet=True, **settings,
        )  # fmt: skip
        yield RemedyRow(name, (run.time.training or 0.0) / ideal)


def emulated(folder: Path, megabits: float | None) -> Iterator[RemedyRow]:
    """Yield a row for each remedy; `folder` is for its runs. The first one is the ideal itself."""
    steps, batch = 144, 512
    cluster = folder / "cluster.yaml"
    text = EMULATED.read_text()
    assert "100 Mbit/s" in text
    cluster.write_text(text if megabits is None else text.replace("100 M", f"{megabits:g} M"))

    def run(name: str, strategy: str, shares: Any, seed: int) -> RunRecord:
        settings: dict[str, Any] = {"steps": steps, "batch_size": batch}
        if shares:
            settings["shares"] = shares
        return orchestra.train(
            "digits28", strategy, ranks=4, seeds=[seed], threads=1, optimizer="Adam(lr=0.004)",
            engine="emulation", cluster=str(cluster), snapshots=1, trace_steps=0,
            out=folder / f"{name} {seed}", quiet=True, **settings,
        )  # fmt: skip

    # What they do beside each other, and not alone, since they share this machine's caches
    apart = [run("apart", f"LocalSGD({steps})", [4, 4, 4, 1], seed) for seed in SEEDS]
    ideal = statistics.median(each.time.training or 0.0 for each in apart)
    yield RemedyRow(
        f"the ideal, {ideal:.1f} s", 1.0,
        accuracies=tuple(each.learned.metrics["accuracy"] for each in apart),
    )  # fmt: skip
    for name in ("all-reduce", "LBBSP", "Proportional", "asynchronous server"):
        strategy, shares = REMEDIES[name]
        if strategy == POOL:  # Adam's steps do not shrink with the samples behind a gradient
            strategy = POOL.replace(")", ', learning_rate="divided")')
        runs = [run(name, strategy, shares, seed) for seed in SEEDS]
        seconds = statistics.median(each.time.training or 0.0 for each in runs)
        found = tuple(each.learned.metrics["accuracy"] for each in runs)
        yield RemedyRow(name, seconds / ideal, accuracies=found)


def simulated(folder: Path, _: float | None) -> Iterator[RemedyRow]:
    """Yield a row for each remedy; `folder` is for its runs."""
    alone = trained(folder / "alone", "Single", None, CLUSTER, 0)
    sample = alone.time.worker["compute"] / alone.learned.samples
    ideal = alone.learned.samples * sample / (3 + SLOW)
    while_slow, at_rest = alone.learned.samples * sample / 8, alone.learned.samples * sample / 4
    changing = folder / "changing.yaml"
    span = f"at: {at_rest / 4} s, until: {at_rest / 4 + while_slow} s"
    equal = CLUSTER.read_text().replace("flops: 25 GFLOP/s", "flops: 100 GFLOP/s")
    changing.write_text(f"{equal}\nfaults:\n  - SlowDown: {{node: slow, factor: 4, {span}}}\n")
    ideal_changing = at_rest + while_slow * (1 - SLOW) / 4
    for number, (name, (strategy, shares)) in enumerate(REMEDIES.items()):
        runs = [
            trained(folder / f"{number}-{seed}", strategy, shares, CLUSTER, seed) for seed in SEEDS
        ]
        once = trained(folder / f"{number}-changing", strategy, shares, changing, 0)
        seconds = statistics.fmean(run.time.training or 0.0 for run in runs)
        later = (once.time.training or 0.0) / ideal_changing
        found = tuple(run.learned.metrics["accuracy"] for run in runs)
        yield RemedyRow(name, seconds / ideal, later, found)


def trained(out: Path, strategy: str, shares: str | None, cluster: Path, seed: int) -> RunRecord:
    """The record of one run of 200 steps."""
    settings: dict[str, Any] = {"shares": shares} if shares else {}
    return orchestra.train(
        "studies.load_balancing:heavy_digits", strategy, ranks=4, steps=200, batch_size=32,
        threads=1, seeds=[seed], optimizer="SGD(lr=0.1)", engine="simulation", cluster=str(cluster),
        calibration="none", snapshots=1, trace_steps=0, out=out, quiet=True, **settings,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(guarded(main))

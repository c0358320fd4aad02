"""A step of the ring beside DistributedDataParallel on emulated nodes: Orchestra's messages between
hosts beside gloo's.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks import before
from benchmarks.options import (
    PrintedTable,
    bench_parser,
    listed,
    print_remarks,
    read_options,
    write_figures,
)
from benchmarks.ratios import Ratio
from benchmarks.step import BenchmarkModel, Contest, measure
from benchmarks.turns import Blocks, of_all_ranks, processor, wall
from orchestra.calibration.timing import Progress, run_ranks
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.cluster import Cluster, Link, NetworkSwitch, Node
from orchestra.engines.emulation.network import NODE_END
from orchestra.engines.emulation.nodes import EmulatedCluster
from orchestra.errors import InputError
from orchestra.strategies.all_reduce import AllReduce
from orchestra.tasks import Synthetic
from orchestra.tasks.regression import pull, synthetic

OURS = AllReduce("ring")
GIGABITS = 10.0
# gloo's sockets would have no latency where the kernel lacks netem, so nobody has one
LINK = Link(GIGABITS * 1e9 / 8, 0.0)
TENSORS = 20
"""That the parameters of a model are in: LeNet-5 has 10, ResNet-20 has 65."""
PATIENCE = 300.0
"""Seconds without progress after which a rank counts as hung: the slowest nodes take ten times as
long as this machine, and longer where other programs run on it."""


@dataclass(frozen=True)
class Nodes:
    """So many equal nodes, with a rank each and this share of one of the machine's cores."""

    count: int
    share: float

    def __str__(self) -> str:
        return f"{self.count}x{self.share:g}"

    @property
    def cluster(self) -> Cluster:
        nodes = (
            Node(
                f"node-{number}", 1, speed=self.share, switch="switch", up=LINK, down=LINK,
                loopback=Link(3e9, 15e-6),
            )
            for number in range(self.count)
        )  # fmt: skip
        return Cluster(str(self), tuple(nodes), (NetworkSwitch("switch"),), placement="spread")


NODES = {
    str(nodes): nodes
    for nodes in (Nodes(2, 0.95), Nodes(4, 0.48), Nodes(2, 0.125), Nodes(4, 0.125))
}


def built(parameters: int) -> nn.Module:
    """Return the model of the task `synthetic`, which takes next to no computation."""
    return synthetic(Synthetic(parameters, tensors=TENSORS)).model()


MODELS = {
    f"{megabytes:g} MB": BenchmarkModel(
        f"{megabytes:g} MB", partial(built, round(megabytes * 1e6 / 4)), 1, torch.ones, steps, pull
    )
    for megabytes, steps in ((0.25, 20), (0.67, 15), (2.7, 8), (30.0, 2))
}
KEYS = ("nodes", "model")
"""The fields that tell rows apart."""
DESCRIPTION = f"""\
Time a step of AllReduce("ring") beside one of DistributedDataParallel (DDP) on gloo, in pairs of
blocks, in turn, on the same emulated nodes with links of {GIGABITS:g} Gbit/s and without a latency.
2x0.95 means two nodes, each with 0.95 of a core of this machine. Models are synthetic: they have a
size, and next to no computation. DDP has the bucket size that is fastest there, chosen in rounds of
its own. Needs root.

A run starts the nodes and the ranks anew. The ratio is the median over the pairs of all runs, with
the sign-based 95 % interval in brackets; the column "runs" has the least and the most of the runs'
own medians, which tells what starting anew changes.
"""


@dataclass(frozen=True)
class EmulatedRow:
    """A model on emulated nodes.

    Attributes:
        step_seconds, peer_seconds: of the ring and of DistributedDataParallel, medians.
        ratio: the ring's time over that of DistributedDataParallel, over the pairs of all runs.
        processor_ratio: the same of the processor time of all ranks together.
        runs: the median ratio of each run.
        peers: the bucket size that was chosen in each run.
    """

    nodes: str
    model: str
    step_seconds: float
    peer_seconds: float
    ratio: Ratio
    processor_ratio: Ratio
    runs: tuple[float, ...]
    peers: tuple[str, ...]


def bench_emulated(
    nodes: Sequence[Nodes] = tuple(NODES.values()),
    models: Sequence[BenchmarkModel] = tuple(MODELS.values()),
    runs: int = 3,
    rounds: int = 10,
    on_progress: Progress | None = None,
) -> Iterator[EmulatedRow]:
    """Measure every model on all of these nodes, in `runs` runs of `rounds` pairs each.

    Raises:
        InputError: this machine cannot emulate them.
        KeyboardInterrupt: the user stopped it.
    """
    for place, model in itertools.product(nodes, models):
        found = [
            _run(place, model, rounds, f"{place}, {model.name}, run {number}", on_progress)
            for number in range(1, runs + 1)
        ]
        yield row_of(place, model, found)


def _run(
    nodes: Nodes, model: BenchmarkModel, rounds: int, what: str, on_progress: Progress | None
) -> Blocks:
    """Return the blocks of the ring and of DistributedDataParallel, of all ranks together."""
    with (
        tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder,
        EmulatedCluster(nodes.cluster, nodes.count, threads=1) as emulated,
    ):
        contest = Contest(
            model, rounds, str(Path(folder) / "store"), ours=(OURS,), interface=NODE_END
        )
        results: Sequence[list[Blocks]] = run_ranks(
            measure, contest, nodes.count, steps=contest.blocks, what=what,
            on_progress=on_progress, places=emulated.places(), patience=PATIENCE,
        )  # fmt: skip
    return of_all_ranks([blocks for (blocks,) in results])


def row_of(nodes: Nodes, model: BenchmarkModel, runs: Sequence[Blocks]) -> EmulatedRow:
    """Return the figures of the `runs`, each with the blocks of the ring and of its peer."""
    pairs = [tuple(blocks.values()) for blocks in runs]
    ours, peers = ([*itertools.chain(*blocks)] for blocks in zip(*pairs, strict=True))
    return EmulatedRow(
        str(nodes), model.name,
        statistics.median(wall(ours)) / model.steps, statistics.median(wall(peers)) / model.steps,
        Ratio.of(wall(ours), wall(peers)), Ratio.of(processor(ours), processor(peers)),
        tuple(Ratio.of(wall(own), wall(others)).median for own, others in pairs),
        tuple(list(blocks)[1] for blocks in runs),
    )  # fmt: skip


def table_of(rows: Sequence[EmulatedRow]) -> PrintedTable:
    """Return the table with a line for each model on each kind of nodes."""
    lines = [
        (
            row.nodes,
            row.model,
            f"{1e3 * row.step_seconds:.3g}",
            f"{1e3 * row.peer_seconds:.3g}",
            str(row.ratio),
            f"{min(row.runs):.2f}-{max(row.runs):.2f}",
            str(row.processor_ratio),
            "; ".join(dict.fromkeys(peer.partition(", ")[2] for peer in row.peers)),
        )
        for row in rows
    ]
    headings = (
        "nodes",
        "model",
        "ring, ms",
        "DDP, ms",
        "time ratio",
        "runs",
        "processor time ratio",
        "DDP's buckets",
    )
    return PrintedTable(f"a step over {GIGABITS:g} Gbit/s", headings, lines)


def main(arguments: list[str]) -> int:
    """Measure, and print what was measured, also after Ctrl-C."""
    parser = bench_parser(
        "python -m benchmarks.emulated", DESCRIPTION, rounds=10, rounds_of="pairs of blocks a run"
    )
    parser.option("--nodes", "NAME,...", f"some of {', '.join(NODES)}")
    parser.option("--models", "SIZE,...", f"some of {', '.join(MODELS)}")
    parser.option("--runs", "N", "how often all start anew (default: 3)", type=int, default=3)
    before.add_option(parser)
    options = read_options(parser, arguments)
    earlier = before.read(options.before, "emulated", KEYS) if options.before else None
    if options.runs < 1:
        raise InputError(f"--runs: {options.runs} is below 1")
    nodes = list(listed("--nodes", options.nodes, NODES).values())
    models = list(listed("--models", options.models, MODELS).values())
    rows: list[EmulatedRow] = []
    try:
        with progress_line() as tell:
            for row in bench_emulated(nodes, models, options.runs, options.rounds, tell):
                rows.append(row)
    finally:
        if rows:
            table = table_of(rows)
            table.show()
            print_remarks("Ratios below 1: the ring is faster; in brackets the 95 % interval.")
            write_figures(options.json, "emulated", rows, [table], options.command)
    if earlier is None:
        return 0
    return min(before.print_changes(KEYS, rows, earlier), 1)


if __name__ == "__main__":
    sys.exit(guarded(main))

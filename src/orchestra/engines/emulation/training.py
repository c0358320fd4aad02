"""A training run on an emulated cluster: from its settings to its record. Imports without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.file import cluster_text
from orchestra.engines.emulation.network import LinkCounters, Meters
from orchestra.engines.emulation.nodes import (
    EmulatedCluster,
    Schedule,
    not_emulated,
    require_emulation,
    require_room,
)
from orchestra.engines.events import Event, Notice
from orchestra.engines.processes import training as processes
from orchestra.engines.processes.display import Display, Progress
from orchestra.engines.processes.launch import launch
from orchestra.engines.run import record_of, write_environment
from orchestra.errors import InputError
from orchestra.records.record import (
    CLUSTER,
    EMULATION,
    Link,
    Links,
    RunRecord,
    write_atomically,
    write_links,
)
from orchestra.records.report import RankReport
from orchestra.strategies.base import roles_of
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run

if TYPE_CHECKING:
    from orchestra.worker.runtime import Runtime


def train_run(
    run: Run, folder: Path, *, quiet: bool = False, progress: Progress | None = None
) -> RunRecord:
    """Train `run` on processes that are kept apart like the nodes of its cluster; its records go
    into `folder`.

    See `orchestra.engines.run.train_run`; raises `InputError` also where this machine cannot
    emulate the cluster.
    """
    roles = roles_of(run.strategy, run.training.ranks)
    if run.training.device == "cuda":
        raise InputError("device: an emulation divides the processor, not GPUs: use cpu")
    run = replace(run, training=run.training.with_setting("device", "cpu"))
    cluster = load_cluster(run.training.cluster, where="cluster", folder=Path())
    alone = isinstance(run.strategy, Single) and len(cluster.nodes) > 1
    if alone:
        cluster = replace(cluster, placement=(best_node(cluster),))
    ranks = len(roles.shares)
    with EmulatedCluster(cluster, ranks, run.training.threads) as emulated:
        write_environment(folder)
        write_atomically(folder / CLUSTER, cluster_text(cluster))
        # Nobody's stopwatch runs while snapshots are evaluated
        schedule = Schedule(emulated.changes(), ranks, at_end=emulated.quotas.lift)
        meters = emulated.network.meters()
        notices = not_emulated(emulated, native=run.strategy.native)
        with Display(run, roles, quiet=quiet, progress=progress, folder=folder) as display:
            for text in notices if progress is None else ():  # else it would say so with each run
                display.on_event(Notice(text))
            try:
                outcome = launch(
                    program,
                    (run, folder.absolute(), cluster.bandwidths_of(ranks), meters),
                    ranks,
                    patience=run.training.patience,
                    on_event=_all(display.on_event, schedule.on_event),
                    places=emulated.places(),
                )
            finally:
                schedule.close()
        results = cast("tuple[RankResult | None, ...]", outcome.results)
        write_links(folder, carried(emulated, [each for each in results if each is not None]))
        keep_counters(folder, emulated, results)
    return record_of(
        run,
        [None if each is None else each.report for each in results],
        folder,
        outcome.setup,
        left_out=outcome.left_out,
        notices=(*notices, *outcome.notices),
        node=emulated.nodes[0].name if alone else None,
        nodes=emulated.nodes,
    )


@dataclass(frozen=True)
class RankResult:
    """What the program of a rank returns: `sent` are its bytes from beginning to end; `before` and
    `after` what links had carried when it began to train and when it stopped."""

    report: RankReport
    sent: int
    before: dict[str, LinkCounters]
    after: dict[str, LinkCounters]


def program(
    runtime: Runtime, assignment: tuple[Run, Path, tuple[float, ...], Meters]
) -> RankResult:
    """Run the program of each rank, and read the links' counters."""
    from orchestra.engines.emulation.traffic import MeteredReporter

    run, folder, bandwidths, meters = assignment
    reporter = MeteredReporter(runtime.reporter, meters)
    runtime = replace(runtime, bandwidths=bandwidths, reporter=reporter)
    report = processes.program(runtime, (run, folder))
    return RankResult(report, runtime.transport.bytes_sent, reporter.before, reporter.after)


def best_node(cluster: Cluster) -> str:
    """Return where one process with all cores is fastest; of equal nodes the first by name."""
    return min(cluster.nodes, key=lambda node: (-node.cores * (node.speed or 0.0), node.name)).name


def on_best_node(cluster: Cluster, ranks: int) -> Cluster:
    """Return `cluster` with all ranks on the node where one process is fastest, without faults.

    Raises:
        InputError: this machine cannot emulate that node.
    """
    found = replace(cluster, placement=(best_node(cluster),) * ranks, faults=())
    require_emulation()
    require_room(found, found.nodes_of(ranks)[:1])
    return found


def keep_counters(
    folder: Path, emulated: EmulatedCluster, results: Sequence[RankResult | None]
) -> None:
    """Write what the transports counted, and what the cables and quotas did, for comparison."""
    counters = emulated.network.meters().read()
    document = {
        "sent_by_rank": [None if each is None else each.sent for each in results],
        "cables": {
            name: {"frames": each.frames, "bytes": each.bytes, "payload": each.payload}
            for name, each in counters.items()
        },
        "throttled": {
            name: dict(zip(("times", "seconds"), emulated.quotas.throttled(name), strict=True))
            for name in emulated.network.namespaces
        },
    }
    write_atomically(folder / EMULATION, json.dumps(document, indent=1) + "\n")


def carried(emulated: EmulatedCluster, ran: Sequence[RankResult]) -> Links:
    """Return what the links carried from when all ranks train until none does.

    Where they pause together, at a checkpoint, what follows counts as well.
    """
    seconds = max(each.report.train_seconds for each in ran)
    found = []
    for name, end in emulated.network.ends.items():
        frames, size = (
            # Counters only rise: the highest first reading is the last one before training, the
            # highest second one is after all.
            max(getattr(each.after[name], what) for each in ran)
            - max(getattr(each.before[name], what) for each in ran)
            for what in ("frames", "bytes")
        )
        crossed = LinkCounters(frames, size)
        share = crossed.on_the_wire / (end.channel.bandwidth * seconds)
        found.append(Link(name, end.channel.bandwidth, crossed.payload, share))
    return Links.of(seconds, found)


def _all(*listeners: Callable[[Event | Notice], None]) -> Callable[[Event | Notice], None]:
    def on_event(event: Event | Notice) -> None:
        for listener in listeners:
            listener(event)

    return on_event

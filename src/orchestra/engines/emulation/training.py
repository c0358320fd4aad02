"""A training run on an emulated cluster: from its settings to its record. Imports without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.file import cluster_text
from orchestra.engines.emulation.network import LinkCounters
from orchestra.engines.emulation.nodes import TRAINING, EmulatedCluster, Schedule, not_emulated
from orchestra.engines.events import Event, Heartbeat, Notice
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
        schedule, traffic = Schedule(emulated.changes(), ranks), Traffic(emulated, ranks)
        notices = not_emulated(emulated, native=run.strategy.native)
        with Display(run, roles, quiet=quiet, progress=progress, folder=folder) as display:
            for text in notices if progress is None else ():  # else it would say so with each run
                display.on_event(Notice(text))
            try:
                outcome = launch(
                    program,
                    (run, folder.absolute(), cluster.bandwidths_of(ranks)),
                    ranks,
                    patience=run.training.patience,
                    on_event=_all(display.on_event, schedule.on_event, traffic.on_event),
                    places=emulated.places(),
                )
            finally:
                schedule.close()
        results = cast("tuple[tuple[RankReport, int] | None, ...]", outcome.results)
        reports = [None if result is None else result[0] for result in results]
        write_links(folder, traffic.links(max(r.train_seconds for r in reports if r is not None)))
        keep_counters(folder, emulated, [None if each is None else each[1] for each in results])
    return record_of(
        run,
        reports,
        folder,
        outcome.setup,
        left_out=outcome.left_out,
        notices=(*notices, *outcome.notices),
        node=emulated.nodes[0].name if alone else None,
        nodes=emulated.nodes,
    )


def program(
    runtime: Runtime, assignment: tuple[Run, Path, tuple[float, ...]]
) -> tuple[RankReport, int]:
    """The program of each rank: its report, and the bytes that it sent from beginning to end."""
    run, folder, bandwidths = assignment
    report = processes.program(replace(runtime, bandwidths=bandwidths), (run, folder))
    return report, runtime.transport.bytes_sent


def best_node(cluster: Cluster) -> str:
    """Where one process computes fastest with all cores; of equal nodes the first by name."""
    return min(cluster.nodes, key=lambda node: (-node.cores * (node.speed or 0.0), node.name)).name


def keep_counters(folder: Path, emulated: EmulatedCluster, sent: list[int | None]) -> None:
    """Write what the transports counted, and what the cables and quotas did, for comparison."""
    counters: dict[str, LinkCounters] = emulated.network.counters()
    document = {
        "sent_by_rank": sent,
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


class Traffic:
    """What the links of an emulated cluster carry from when all ranks train until none does.

    Where they pause together, at a checkpoint, what follows counts as well.
    """

    def __init__(self, emulated: EmulatedCluster, ranks: int) -> None:
        self._network, self._ranks = emulated.network, ranks
        self._training: set[int] = set()
        self._began = False
        self._before: dict[str, LinkCounters] | None = None
        self._after: dict[str, LinkCounters] | None = None

    def on_event(self, event: Event | Notice) -> None:
        if not isinstance(event, Heartbeat) or (event.phase in TRAINING) == (
            event.rank in self._training
        ):
            return
        self._training ^= {event.rank}
        self._began = self._began or len(self._training) == self._ranks
        if not self._began:  # with the last one the stopwatch starts at once
            self._before = self._network.counters()
        elif not self._training:
            self._after = self._network.counters()

    def links(self, seconds: float) -> Links:
        before, after = self._before, self._after or self._network.counters()
        found = []
        for name, end in self._network.ends.items():
            began = before[name] if before is not None else LinkCounters(0, 0)
            payload = after[name].payload - began.payload
            crossed = after[name].on_the_wire - began.on_the_wire
            share = crossed / (end.channel.bandwidth * seconds)
            found.append(Link(name, end.channel.bandwidth, max(payload, 0), share))
        return Links.of(seconds, found)


def _all(*listeners: Callable[[Event | Notice], None]) -> Callable[[Event | Notice], None]:
    def on_event(event: Event | Notice) -> None:
        for listener in listeners:
            listener(event)

    return on_event

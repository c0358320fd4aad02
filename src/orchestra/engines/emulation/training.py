"""A training run on an emulated cluster: from its settings to its record. Imports without torch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.file import cluster_text
from orchestra.engines.emulation.network import LinkCounters, Meters
from orchestra.engines.emulation.nodes import (
    Change,
    EmulatedCluster,
    require_emulation,
    require_room,
)
from orchestra.engines.events import Event, Heartbeat, Notice
from orchestra.engines.live import Display, Progress
from orchestra.engines.processes import training as processes
from orchestra.engines.processes.launch import launch
from orchestra.engines.run import record_of, write_environment
from orchestra.errors import InputError
from orchestra.records.files import CLUSTER, EMULATION, write_atomically
from orchestra.records.links import LinkLoad, Links
from orchestra.records.record import RunRecord
from orchestra.records.report import RankReport
from orchestra.records.store import write_links
from orchestra.strategies.base import roles_of
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run
from orchestra.worker.runtime import PassingReporter, RankActivity, Runtime

TRAINING = (RankActivity.TRAINING, RankActivity.SERVING)  # while the stopwatch runs
Readings = dict[str, LinkCounters]  # by the name of a link


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
        cluster = cluster.alone_on(best_node(cluster))
    if cluster.joins:
        raise InputError(
            f"cluster {cluster.name}: no rank joins an emulated run: leave out Join, or simulate it"
        )
    ranks = len(roles.shares)
    with EmulatedCluster(cluster, ranks, run.training.threads) as emulated:
        write_environment(folder)
        write_atomically(folder / CLUSTER, cluster_text(cluster))
        # Nobody's stopwatch runs while snapshots are evaluated
        schedule = TimedChanges(emulated.changes(), ranks, at_end=emulated.quotas.lift)
        meters = emulated.network.meters()
        notices = not_emulated(emulated, native=run.strategy.traits().native)
        with Display(run, roles, quiet=quiet, progress=progress, folder=folder) as display:
            for text in notices if progress is None else ():  # else it would say so with each run
                display.on_event(Notice(text))

            def on_event(event: Event | Notice) -> None:
                display.on_event(event)
                schedule.on_event(event)

            try:
                outcome = launch(
                    program, (run, folder.absolute(), cluster.bandwidths_of(ranks), meters), ranks,
                    patience=run.training.patience, on_event=on_event, places=emulated.places(),
                    min_ranks=run.training.min_ranks or 1,
                    grace=run.training.grace,
                )  # fmt: skip
            finally:
                schedule.close()
        results = cast("tuple[RankResult | None, ...]", outcome.results)
        write_links(folder, carried(emulated, [each for each in results if each is not None]))
        keep_counters(folder, emulated, results)
    return record_of(
        run, [None if each is None else each.report for each in results], folder, outcome.setup,
        left_out=outcome.left_out, notices=(*notices, *outcome.notices), nodes=emulated.nodes,
        node=emulated.nodes[0].name if alone else None, terminated=outcome.terminated,
    )  # fmt: skip


@dataclass(frozen=True)
class RankResult:
    """What the program of a rank returns: `sent` are its bytes from beginning to end; `before` and
    `after` what links had carried when it began to train and when it stopped."""

    report: RankReport
    sent: int
    before: Readings
    after: Readings


def program(
    runtime: Runtime, assignment: tuple[Run, Path, tuple[float, ...], Meters]
) -> RankResult:
    """Run the program of each rank, and read the links' counters as it trains.

    Each rank reads them before it says that it trains, and no rank's stopwatch starts until all
    have said so (`start_together`): the highest readings are those at the start, however late the
    launcher hears of it.
    """
    run, folder, bandwidths, meters = assignment
    before, after = Readings(), Readings()

    class Metered(PassingReporter):
        def activity(self, activity: RankActivity) -> None:
            if activity not in TRAINING and before:
                after.update(meters.read())
            elif activity in TRAINING and not before:
                before.update(meters.read())
            super().activity(activity)

    reporter = Metered(runtime.reporter)
    runtime = replace(runtime, bandwidths=bandwidths, reporter=reporter)
    report = processes.program(runtime, (run, folder))
    return RankResult(report, runtime.transport.bytes_sent, before, after)


class TimedChanges:
    """Carries out `changes` in a thread, once all `ranks` have begun to train, until `close`.

    When they evaluate and none trains any more, nothing more is changed, and `at_end` is called.
    """

    def __init__(
        self, changes: Sequence[Change], ranks: int, at_end: Callable[[], None] = lambda: None
    ) -> None:
        self._changes, self._at_end = changes, at_end
        self._awaited, self._training = set(range(ranks)), set[int]()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry_out, name="faults", daemon=True)
        self._error: BaseException | None = None

    def on_event(self, event: Event | Notice) -> None:
        if not isinstance(event, Heartbeat):
            return
        if event.activity in TRAINING:
            self._training.add(event.rank)
            if event.rank in self._awaited:
                self._awaited.remove(event.rank)
                if not self._awaited:
                    self.begin()
            return
        self._training.discard(event.rank)
        over = (
            event.activity is RankActivity.EVALUATING and not self._awaited and not self._training
        )
        if over and not self._closed.is_set():
            self._closed.set()
            self._at_end()

    def begin(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Change nothing more. Raises what a change raised, if anything."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _carry_out(self) -> None:
        began = time.monotonic()
        try:
            for change in self._changes:
                if self._closed.wait(max(0.0, began + change.at - time.monotonic())):
                    return
                change.act()
        except BaseException as error:
            self._error = error


def best_node(cluster: Cluster) -> str:
    """Return where one process with all cores is fastest; of equal nodes the first by name."""
    return min(cluster.nodes, key=lambda node: (-node.cores * (node.speed or 0.0), node.name)).name


def on_best_node(cluster: Cluster, ranks: int) -> Cluster:
    """Return `cluster` with all ranks on the node where one process is fastest, without faults.
    Raises `InputError` where this machine cannot emulate that node."""
    found = replace(cluster, placement=(best_node(cluster),) * ranks, faults=())
    require_emulation()
    require_room(found, found.nodes_of(ranks)[:1])
    return found


def keep_counters(
    folder: Path, emulated: EmulatedCluster, results: Sequence[RankResult | None]
) -> None:
    """Write what the transports counted, and what the cables and quotas did, for comparison."""
    document = {
        "sent_by_rank": [None if each is None else each.sent for each in results],
        "cables": {
            name: {"frames": each.frames, "bytes": each.bytes, "payload": each.payload}
            for name, each in emulated.network.meters().read().items()
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
        found.append(LinkLoad(name, end.channel.bandwidth, crossed.payload, share))
    return Links.of(seconds, found)


def not_emulated(emulated: EmulatedCluster, *, native: bool) -> list[str]:
    """Return a line for each thing that the emulation leaves out or does otherwise."""
    cluster, nodes, lines = emulated.cluster, emulated.nodes, []
    if any(any(place.latencies) for place in emulated.places()):
        lines.append("latencies are added in the transport, as this kernel has no netem")
        if native:
            lines.append("native collectives have no latency, as torch.distributed adds none")
    ignored = {
        "jitter": any(node.jitter not in (None, "default") for node in nodes),
        "drift": any(node.drift is not None for node in nodes),
        "memory": any(node.memory is not None for node in nodes),
        "overhead": cluster.overhead is not None,
    }
    names = [name for name, given in ignored.items() if given]
    if names:
        lines.append(f"not emulated: {', '.join(names)} of cluster {cluster.name}")
    if any(node.cores > 1 for node in nodes):
        lines.append(
            "a quota is for all cores of a node together: while a rank computes with fewer "
            "threads, each has more of the processor than one core of the node"
        )
    return lines

"""Answers of the simulation: the seconds of a step, and the activity of every rank in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from orchestra.engines.simulation.costs import FLOPS, OVERHEAD, assumed_costs
from orchestra.engines.simulation.simulate import Simulation
from orchestra.errors import OrchestraError
from orchestra.optimizers.settings import Optimizer
from orchestra.records.report import Counters, MessageKey, RankReport, TimelineSlice
from orchestra.strategies.base import roles_of
from orchestra.strategies.registry import strategy_of
from orchestra.studio.menu import BATCH, MenuEntry, Situation
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run, Training
from orchestra.trainer.trace import Trace
from orchestra.worker.interception import intercepted
from orchestra.worker.runtime import PassingReporter, Runtime, SilentReporter

MOST_MESSAGES = 3000  # the most messages of one step that a page is given
TENSORS = 4
"""The tensors of the model, of equal sizes. Each is a bucket, and can overlap with backward."""
SMALL = 1000
"""Messages with fewer bytes, which only coordinate, are left out if there are larger ones."""


class Moment(NamedTuple):
    """The totals of a rank at the end of a step, since the start; times in seconds."""

    seconds: float
    samples: float
    compute: float
    communicate: float
    wait: float
    background: float
    bytes_sent: float


@dataclass
class _Watch(PassingReporter):
    """Records the moments of one rank."""

    runtime: Runtime
    moments: list[Moment] = field(default_factory=list)

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
        counters: Counters | None = None,
    ) -> None:
        super().progress(
            step=step, samples=samples, loss=loss, fraction=fraction, counters=counters
        )
        transport, computed = self.runtime.transport, self.runtime.compute.main_seconds
        traffic = transport.traffic
        moment = Moment(
            transport.now(), samples, computed, traffic.seconds_communicating,
            traffic.seconds_waiting, traffic.seconds_in_background, transport.bytes_sent,
        )  # fmt: skip
        self.moments.append(moment)


@dataclass
class Simulated:
    """The result of a run: the moments and, if watched, the timeline of each rank."""

    moments: list[list[Moment]]
    traces: list[Trace]
    roles: list[str]

    def window(self, first: int) -> tuple[float, float]:
        """Return the time from which all workers together have done `first` batches each, and
        the time at which the first of them has done its last one. If batches go to whichever
        worker is free, that is when one finds no batch any more."""
        series = [moments for moments in self.moments if moments]
        # The first steps do not count, since workers that start together first fall out of step.
        ends = sorted(moment.seconds for moments in series for moment in moments)
        # The end does not count either: some workers are done, and replicas are averaged.
        return ends[first * len(series) - 1], min(moments[-1].seconds for moments in series)


def answer(kind: str, situation: Situation, entry: MenuEntry) -> dict[str, Any]:
    """Return the times of a "step" or the events of its "course"; or only a line, `error`."""
    # For a picture one round is enough, and one step more, into which messages may reach
    steps = entry.steps if kind == "step" else entry.skip + entry.round + 1
    try:
        run = run_of(situation, entry.notation_for(situation.workers), steps)
        simulated = carry_out(run, situation, watched=kind == "course")
    # One line of the page; the other strategies still have their answers
    except OrchestraError as error:
        return {"error": str(error)}
    if kind == "step":
        return measured(simulated, entry.skip)
    return course(simulated, entry.skip, entry.round)


def run_of(situation: Situation, notation: str, steps: int) -> Run:
    """Return a run of `steps` steps under the strategy: of shapes, with assumed costs. Raises
    `InputError` if the strategy cannot have that many workers."""
    strategy = strategy_of(notation)
    # The page speaks of workers; machines that only serve come on top of these
    beside = getattr(strategy, "placement", "dedicated") != "dedicated"
    dedicated = 0 if beside else getattr(strategy, "servers", 0)
    parameters = round(situation.megabytes * 1e6 / 4)
    # The assumed costs divide by FLOPS again
    sample_flops = situation.compute_ms * 1e-3 * FLOPS / BATCH
    samples = situation.workers * steps * BATCH
    training = Training(
        ranks=situation.workers + dedicated,
        batch_size=BATCH,
        # A slider moves the workers alone; a global batch would change their computing
        equal="worker_batch",
        epochs=1,
        optimizer=Optimizer("SGD", {"lr": 0.1}),
        engine="simulation",
        tensors="shapes",
        # This machine's own calibration has nothing to do with the situation
        calibration="none",
        threads=1,
        snapshots=0,
        trace_steps=0,
        # A bucket for each tensor, whatever the size of the model
        bucket_megabytes=situation.megabytes / TENSORS,
    )
    task = (
        f"synthetic({parameters}, tensors={TENSORS}, samples={samples}, "
        f"sample_flops={sample_flops!r})"
    )
    return Run("studio", task, strategy, training=training)


def carry_out(run: Run, situation: Situation, *, watched: bool = False) -> Simulated:
    """Simulate the run in this process; with `watched`, record the messages and timelines, too.
    Raises `InputError` if the strategy refuses that many workers, `RunFailed` without an end."""
    ranks = len(roles_of(run.strategy, run.training.ranks).shares)
    watches: dict[int, _Watch] = {}
    traces: dict[int, Trace] = {}

    def program(runtime: Runtime) -> RankReport:
        watch = watches[runtime.rank] = _Watch(runtime.reporter, runtime)
        runtime = replace(runtime, reporter=watch)
        if watched:
            # Put around the run here, because runs of shapes record no timeline.
            trace = traces[runtime.rank] = Trace(runtime.transport.now, limit=1_000_000)
            trace.open_for_steps(1)
            runtime = intercepted(runtime, trace)
        return train(runtime, (run, Path()))

    outcome = Simulation(
        situation.cluster(ranks), ranks, assumed_costs(run), OVERHEAD,
        SilentReporter(), threads=1, values=False,
    ).run(program)  # fmt: skip
    outcome.check()
    return Simulated(
        [watches[rank].moments for rank in range(ranks)],
        [traces[rank] for rank in sorted(traces)],
        [report.role for report in outcome.results],
    )


def measured(simulated: Simulated, first: int) -> dict[str, float]:
    """Return the mean step of the workers, in seconds of virtual time, without the first `first`
    steps of each, in which ranks start.

    `step` is the time in which all workers together do as many batches as there are workers;
    `compute`, `communicate` and `wait` are a worker's parts of it. While its main flow waits,
    its background flows may exchange: as long as their bytes move, that counts as communicating.
    `bytes_sent` are those of one worker.
    """
    begin, end = simulated.window(first)
    passed, workers = end - begin, [moments for moments in simulated.moments if moments]
    done: Any = sum(_between(moments, begin, end) for moments in workers)
    samples, compute, communicate, wait, background, sent = done[1:].tolist()
    # Background exchange may overlap with computation; subtracting it from waiting keeps the sum
    # unchanged.
    behind = min(wait, background)
    # By samples, not steps: with batches for whoever is free, workers take unlike numbers of steps
    step = passed * len(workers) * BATCH / samples
    share = step / passed / len(workers)
    return {
        "step": step,
        "samples_per_second": samples / passed,
        "compute": compute * share,
        "communicate": (communicate + behind) * share,
        "wait": (wait - behind) * share,
        "bytes_sent": sent * share,
    }


def _between(moments: Sequence[Moment], begin: float, end: float) -> Any:
    """Return the differences of all totals between two moments, interpolated between step ends."""
    columns = numpy.array(moments).T
    # A window ends in the midst of steps of most workers
    both = [numpy.interp((begin, end), columns[0], column) for column in columns]
    return numpy.diff(both)[:, 0]


def course(simulated: Simulated, first: int, count: int) -> dict[str, Any]:
    """Return the activity of every rank for `count` steps of rank 0, after its `first` ones.

    Spans are [begin, end, category, name], in seconds from the beginning of the window. There is
    one list for each rank's main flow and all its computing, and one for the exchanges of its
    background flows. Messages are [begin, end, source, target, bytes].
    """
    moments = simulated.moments[0]
    # Rank 0 works under every strategy of the menu
    last = min(first + count, len(moments)) - 1
    begin, end = moments[min(first, last) - 1].seconds, moments[last].seconds
    ranks: list[dict[str, Any]] = []
    ends: dict[str, dict[MessageKey, TimelineSlice]] = {"send": {}, "receive": {}}
    for trace, role in zip(simulated.traces, simulated.roles, strict=True):
        timeline = trace.timeline("virtual")
        assert timeline is not None
        pieces = [piece for piece in timeline.slices if piece.end > begin and piece.start < end]
        # Computing of a background flow takes the rank's core, so it stands in the main lane
        main = [piece for piece in pieces if piece.flow == 1 or piece.category == "compute"]
        others = [p for p in pieces if p.flow > 1 and p.category not in ("compute", "wait")]
        ranks.append(
            {"role": role, "main": _spans(main, begin, end), "behind": _spans(others, begin, end)}
        )
        for piece in timeline.slices:
            if piece.message is not None:
                ends[piece.category][piece.message] = piece
    messages = sorted(_messages(ends["send"], ends["receive"], begin, end))
    shown = [message for message in messages if message[4] >= SMALL] or messages
    # Every so many-th, so that what is shown is spread over the whole window
    every = -(-len(shown) // MOST_MESSAGES)
    return {
        "seconds": end - begin, "ranks": ranks, "messages": shown[::every], "every": every,
        "count": len(messages), "bytes": sum(message[4] for message in messages),
    }  # fmt: skip


def _spans(pieces: Iterable[TimelineSlice], begin: float, end: float) -> list[list[Any]]:
    """Return the spans of `pieces`; adjacent ones of a category and name are merged."""
    found: list[list[Any]] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        start, stop = max(piece.start, begin) - begin, min(piece.end, end) - begin
        if stop <= start:
            continue
        last = found[-1] if found else None
        # A step of many buckets has thousands of pieces, of which a screen shows hundreds
        if last and last[2] == piece.category and last[3] == piece.name and start <= last[1]:
            last[1] = max(last[1], stop)
        else:
            found.append([start, stop, piece.category, piece.name])
    return found


def _messages(
    sent: dict[MessageKey, TimelineSlice],
    received: dict[MessageKey, TimelineSlice],
    begin: float,
    end: float,
) -> Iterable[tuple[float, float, int, int, int]]:
    """Yield the messages between ranks that were under way in the window."""
    for message, piece in sent.items():
        other = received.get(message)
        # A message that the run ended before, or one between flows of a rank
        if other is None or message.source == message.target:
            continue
        if piece.start < end and other.end > begin:
            size = piece.args["payload_bytes"]
            yield piece.start - begin, other.end - begin, message.source, message.target, size

"""One question answered by the simulation: seconds of a step, and what every rank did in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from orchestra.engines.simulation.cost_source import FLOPS
from orchestra.engines.simulation.costs import OVERHEAD, assumed_costs
from orchestra.engines.simulation.simulate import simulate
from orchestra.errors import InputError, OrchestraError, RunFailed
from orchestra.optimizers.settings import Optimizer
from orchestra.records.report import Message, RankReport, Slice
from orchestra.strategies.base import roles_of
from orchestra.strategies.registry import strategy_of
from orchestra.studio.menu import BATCH, Entry, Situation
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run, Training
from orchestra.trainer.trace import Trace
from orchestra.worker.interception import intercepted
from orchestra.worker.runtime import PassingReporter, Runtime, SilentReporter

MOST_MESSAGES = 3000
"""That a page is given of one step."""
TENSORS = 4
"""Of the model, of equal sizes, each a bucket: what can overlap with the backward pass."""
SMALL = 1000
"""Bytes; smaller messages, which say who wants what, are left out where there are larger ones."""


class Moment(NamedTuple):
    """What a rank has done when one of its steps ends: sums since the start, in seconds."""

    seconds: float
    samples: float
    compute: float
    communicate: float
    wait: float
    background: float
    bytes_sent: float


@dataclass
class _Watch(PassingReporter):
    """Notes the moments of one rank."""

    runtime: Runtime
    moments: list[Moment] = field(default_factory=list)

    def progress(self, *_: Any, **facts: Any) -> None:
        super().progress(**facts)
        traffic, compute = self.runtime.transport.traffic, self.runtime.compute
        self.moments.append(
            Moment(
                self.runtime.transport.now(),
                facts["samples"],
                compute.main_seconds,
                traffic.seconds_communicating,
                traffic.seconds_waiting,
                traffic.seconds_in_background,
                self.runtime.transport.bytes_sent,
            )
        )


@dataclass
class Simulated:
    """What became of a run: the moments and, where watched, the timeline of each rank."""

    moments: list[list[Moment]]
    traces: list[Trace]
    roles: list[str]

    def window(self, first: int) -> tuple[float, float]:
        """From where the workers together have done `first` batches each to where one has done its
        last; that is, with batches for whoever is free, where one finds none any more.
        """
        series = [moments for moments in self.moments if moments]
        ends = sorted(moment.seconds for moments in series for moment in moments)
        return ends[first * len(series) - 1], min(moments[-1].seconds for moments in series)


def answer(kind: str, situation: Situation, entry: Entry) -> dict[str, Any]:
    """Return what is `measured` of a "step", or its `course`; or an `error` in a line."""
    steps = entry.steps if kind == "step" else entry.skip + entry.round + 1
    try:
        run = run_of(situation, entry.notation_for(situation.workers), steps)
        simulated = carry_out(run, situation, watched=kind == "course")
    except OrchestraError as error:
        return {"error": str(error)}
    if kind == "step":
        return measured(simulated, entry.skip)
    return course(simulated, entry.skip, entry.round)


def run_of(situation: Situation, notation: str, steps: int) -> Run:
    """Return a run of `steps` steps under the strategy: of shapes, with assumed costs.

    Raises:
        InputError: the strategy cannot have that many workers.
    """
    strategy = strategy_of(notation)
    dedicated = getattr(strategy, "servers", 0)
    if getattr(strategy, "placement", "dedicated") != "dedicated":
        dedicated = 0
    parameters = round(situation.megabytes * 1e6 / 4)
    sample_flops = situation.compute_ms * 1e-3 * FLOPS / BATCH
    samples = situation.workers * steps * BATCH
    training = Training(
        ranks=situation.workers + dedicated,
        batch_size=BATCH,
        equal="worker_batch",
        epochs=1,
        optimizer=Optimizer("SGD", {"lr": 0.1}),
        engine="simulation",
        tensors="shapes",
        calibration="none",
        threads=1,
        snapshots=0,
        trace_steps=0,
        bucket_megabytes=situation.megabytes / TENSORS,
    )
    task = (
        f"synthetic({parameters}, tensors={TENSORS}, samples={samples}, "
        f"sample_flops={sample_flops!r})"
    )
    return Run("studio", task, strategy, training=training)


def carry_out(run: Run, situation: Situation, *, watched: bool = False) -> Simulated:
    """Simulate it in this process; with `watched` also who sends what, when.

    Raises:
        InputError: the strategy refuses that many workers.
        RunFailed: the simulation came to no end.
    """
    ranks = len(roles_of(run.strategy, run.training.ranks).shares)
    watches: dict[int, _Watch] = {}
    traces: dict[int, Trace] = {}

    def program(runtime: Runtime) -> RankReport:
        watch = watches[runtime.rank] = _Watch(runtime.reporter, runtime)
        runtime = replace(runtime, reporter=watch)
        if watched:
            trace = traces[runtime.rank] = Trace(runtime.transport.now, limit=1_000_000)
            trace.open_for_steps(1)
            runtime = intercepted(runtime, trace)
        return train(runtime, (run, Path()))

    outcome = simulate(
        program, situation.cluster(ranks), ranks, assumed_costs(run), OVERHEAD,
        SilentReporter(), threads=1, values=False,
    )  # fmt: skip
    if outcome.bad_input is not None:
        raise InputError(outcome.bad_input)
    if outcome.failure is not None:
        raise RunFailed(outcome.failure)
    return Simulated(
        [watches[rank].moments for rank in range(ranks)],
        [traces[rank] for rank in sorted(traces)],
        [report.role for report in outcome.results],
    )


def measured(simulated: Simulated, first: int) -> dict[str, float]:
    """Return a step in the mean over the workers, in seconds of virtual time, after the first
    `first` steps of each, by which all have got going.

    `step` is how long all workers together take for as many batches as there are workers; of that,
    a worker computes, exchanges and waits. While its main flow waits, its background flows may
    exchange: as long as bytes of theirs move, that counts as exchanging. `bytes_sent` are those of
    a worker.
    """
    begin, end = simulated.window(first)
    passed, workers = end - begin, [moments for moments in simulated.moments if moments]
    done = sum(
        (_between(moments, begin, end) for moments in workers),
        start=numpy.zeros(len(Moment._fields)),
    )
    samples, compute, communicate, wait, background, sent = done[1:].tolist()
    behind = min(wait, background)
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
    """Return the differences of all sums between two moments, linear between the ends of steps."""
    columns = numpy.array(moments).T
    return numpy.array(
        [numpy.interp(end, columns[0], column) - numpy.interp(begin, columns[0], column)
         for column in columns]
    )  # fmt: skip


# The course of one step


def course(simulated: Simulated, first: int, count: int) -> dict[str, Any]:
    """Return what every rank did from where rank 0 has done `first` steps on, for `count` steps of
    it.

    Spans are [begin, end, category, name], in seconds from the beginning of the window. There is a
    list for the main flow of each rank and all that it computes, and one for what its flows in the
    background exchange. Messages are [begin,
    end, source, target, bytes].
    """
    moments = simulated.moments[0]
    last = min(first + count, len(moments)) - 1
    begin, end = moments[min(first, last) - 1].seconds, moments[last].seconds
    ranks: list[dict[str, Any]] = []
    sent: dict[Message, Slice] = {}
    received: dict[Message, Slice] = {}
    for trace, role in zip(simulated.traces, simulated.roles, strict=True):
        timeline = trace.timeline("virtual")
        assert timeline is not None
        pieces = [piece for piece in timeline.slices if piece.end > begin and piece.start < end]
        main = [piece for piece in pieces if piece.flow == 1 or piece.category == "compute"]
        others = [p for p in pieces if p.flow > 1 and p.category not in ("compute", "wait")]
        ranks.append(
            {"role": role, "main": _spans(main, begin, end), "behind": _spans(others, begin, end)}
        )
        for piece in timeline.slices:
            if piece.message is not None:
                ends = sent if piece.category == "send" else received
                ends[piece.message] = piece
    messages = sorted(_messages(sent, received, begin, end))
    larger = [message for message in messages if message[4] >= SMALL]
    shown = larger or messages
    every = -(-len(shown) // MOST_MESSAGES)
    return {
        "seconds": end - begin, "ranks": ranks, "messages": shown[::every], "every": every,
        "count": len(messages), "bytes": sum(message[4] for message in messages),
    }  # fmt: skip


def _spans(pieces: Iterable[Slice], begin: float, end: float) -> list[list[Any]]:
    """Neighbours of a category are put together where nothing lies between."""
    found: list[list[Any]] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        start, stop = max(piece.start, begin) - begin, min(piece.end, end) - begin
        if stop <= start:
            continue
        last = found[-1] if found else None
        if last and last[2] == piece.category and last[3] == piece.name and start <= last[1]:
            last[1] = max(last[1], stop)
        else:
            found.append([start, stop, piece.category, piece.name])
    return found


def _messages(
    sent: dict[Message, Slice], received: dict[Message, Slice], begin: float, end: float
) -> Iterable[tuple[float, float, int, int, int]]:
    """Yield those between ranks that were under way in the window."""
    for message, piece in sent.items():
        other = received.get(message)
        if other is None or message.source == message.target:
            continue
        if piece.start < end and other.end > begin:
            size = piece.args["payload_bytes"]
            yield piece.start - begin, other.end - begin, message.source, message.target, size

"""What workers report of their steps to the one that observes for all, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestra.schedules.work_queue import Report
from orchestra.worker.worker import Step, Worker

Observe = Callable[[Step], bool]
"""Take note of a step as all workers know it together; True to leave the phase."""


def own_seconds(worker: Worker) -> float:
    """What `worker` has needed so far, without waiting for others."""
    communicating = worker.transport.traffic.seconds_communicating
    return worker.compute.seconds + communicating + worker.transport.traffic.seconds_in_background


class Judge:
    """The first worker's: puts the reports of all workers on a step together, and observes it."""

    def __init__(self, observe: Observe, worker: Worker) -> None:
        self._observe = observe
        self._worker = worker
        self._reports: dict[int, dict[int, list[float]]] = {}

    def __call__(self, step: int, rank: int, report: list[float]) -> bool:
        """Whether, with this report of `rank`, all are to leave."""
        reports = self._reports.setdefault(step, {})
        reports[rank] = report
        if set(self._worker.workers.ranks) - self._worker.transport.lost() - reports.keys():
            return False
        del self._reports[step]
        return self._observe(_combined([reports[r] for r in sorted(reports)]))


def _combined(reports: list[list[float]]) -> Step:
    """A step as all workers know it together, from each one's report."""
    samples, losses, seconds, rates, epochs, fractions, own, mean = zip(*reports, strict=True)
    return Step(
        samples=int(sum(samples)),
        total_samples=int(sum(samples)),
        loss=_mean(samples, losses),
        losses=losses,
        seconds=seconds,
        rates=(min(rates),),
        epoch=min(epochs),
        fraction=min(fractions),
        counts=tuple(map(int, samples)),
        squares=own,
        square=mean[0],
    )


def step_of_round(reports: Sequence[Report], seconds: tuple[float, ...]) -> Step:
    """A round of batches as one step: all samples before its end are done."""
    samples = [report.stop - report.start for report in reports]
    losses = tuple(report.loss for report in reports)
    return Step(
        samples=sum(samples),
        total_samples=sum(samples),
        loss=_mean(samples, losses),
        losses=losses,
        seconds=seconds,
        rates=(min(report.rate for report in reports),),
        epoch=max(report.epoch for report in reports),
        fraction=max(report.fraction for report in reports),
        counts=tuple(samples),
    )


def counted(position: int, budget: int | None) -> Step:
    """What rules that count know of the round that ends at `position`."""
    assert budget is not None, "an open end has no fractions"
    return Step(planned=position, fraction=position / budget)


def _mean(samples: Sequence[float], losses: Sequence[float]) -> float:
    total = sum(samples)
    return sum(n * loss for n, loss in zip(samples, losses, strict=True)) / total if total else 0.0

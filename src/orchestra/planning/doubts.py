"""What to doubt in the answer of a plan: how its search ended, and what it cannot predict."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from orchestra.cluster.units import SECONDS
from orchestra.planning.search import Search
from orchestra.planning.standing import SPARED, Contender
from orchestra.report.numbers import count, some

if TYPE_CHECKING:
    from orchestra.planning.answer import CandidateRow

TOO_WELL = 2.0
"""How many times as long as predicted steps take on emulated nodes, where workers answer others
on the core of their gradients."""
SHORT_STEP = 1e-3
"""Seconds; in shorter steps on devices the times of starting kernels can be most of the time."""


def ending(search: Search) -> str:
    """Return how the search ended, and what that says of its answer."""
    first = search.best()
    if search.stopped:
        return "stopped before its end; more time may change the answer"
    if first is None:
        return "out of time" if search.ending == "out of time" else "nothing was left to simulate"
    name, seeds = first[0].name, count("seed", len(search.times(first[0])))
    if search.ending == "confirmed":
        return f"confirmed with {seeds}: no other beats {name} by more than {SPARED:.0%}"
    if search.ending == "nothing left":
        return f"not confirmed: {name} and others are too close to tell apart, with {seeds}"
    return f"out of time, not confirmed: {name} has {seeds}; more --minutes may change the answer"


def about_predictions(
    best: CandidateRow | None, rows: Sequence[CandidateRow], entries: Mapping[str, Contender]
) -> Sequence[str]:
    """Return a note where the lead of the recommended row may be an error of the prediction.

    Where workers answer others on the core of their gradients, predictions are too fast, by up to
    `TOO_WELL` times.
    """
    beside = {
        name: entry.candidate.run.strategy.traits().answers_beside
        for name, entry in entries.items()
    }
    if best is None or best.seconds is None or not beside[best.name]:
        return ()
    others = (row for row in rows if row.seconds is not None and not beside[row.name])
    first = next(others, None)
    if first is None or (first.seconds or 0.0) > TOO_WELL * best.seconds:
        return ()
    return (
        f"{best.name}: its workers answer others on the core that computes their gradients, and "
        f"steps of a few milliseconds took up to {TOO_WELL:g} times as long as predicted on real "
        f"processes (docs/results/fidelity.md); {first.name} is the first that does not",
    )


def about_devices(best: CandidateRow | None, devices: Collection[str]) -> Sequence[str]:
    """Return a note where the recommended row has steps on devices that are shorter than what a
    simulation can know of devices."""
    if best is None or not best.speed or not (names := [n for n in best.nodes if n in devices]):
        return ()
    seconds = best.batch / best.speed
    if seconds >= SHORT_STEP:
        return ()
    return (
        f"the speed of {some(names)} is from the cluster's file, and was not measured. A step "
        f"takes {SECONDS.rounded(seconds)}. The simulation leaves out the time in which a device "
        "starts each operation, which can be most of such a step: measure its samples/s",
    )

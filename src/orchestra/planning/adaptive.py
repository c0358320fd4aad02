"""An `Auto` made from a plan: it chooses among candidates while the training goes on."""

from __future__ import annotations

from statistics import fmean

from orchestra.planning.standing import Entry, Standing
from orchestra.settings import write
from orchestra.strategies.auto import Auto
from orchestra.strategies.registry import STRATEGIES

MOST = 4
"""The most candidates to rehearse, because each costs time."""
ALIKE = 2
"""The most candidates that learn the same and differ in their exchange only."""


def adaptive(search: Standing, best: Entry | None) -> str | None:
    """Return the notation of an `Auto` that begins with `best` and knows the samples of the others.

    They have the nodes, batch and learning rate of `best`. None where there are no such others.
    """
    if best is None:
        return None
    chosen: list[Entry] = []
    for entry in (best, *search.ranking()):
        alike = [each for each in chosen if each.candidate.learns_as == entry.candidate.learns_as]
        if entry in chosen or len(alike) == ALIKE or not _suits(entry, best):
            continue
        if search.time(entry) is not None:
            chosen.append(entry)
    # `Auto` begins with its first candidate, which has to be what the plan recommends.
    if len(chosen) < 2 or chosen[0] is not best:
        return None
    del chosen[MOST:]
    samples = [
        round(fmean(each.samples for each in search.times(entry).values())) for entry in chosen
    ]
    strategies = tuple(entry.candidate.run.strategy for entry in chosen)
    return write(Auto(strategies, samples=tuple(map(float, samples))), STRATEGIES)


def _suits(entry: Entry, best: Entry) -> bool:
    """Return whether it can be a candidate beside `best`: it differs in the strategy alone."""
    own, other = entry.candidate, best.candidate
    alike = (own.nodes, own.batch, own.rate) == (other.nodes, other.batch, other.rate)
    given = own.run.training.shares == other.run.training.shares
    return own.run.strategy.exchanges_as is not None and alike and given

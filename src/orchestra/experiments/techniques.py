"""Techniques: rows of a comparison that differ in one setting, and where that pays."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import cast

from orchestra.engines.events import Event, Notice
from orchestra.engines.processes.launch import launch
from orchestra.engines.simulation.costs import cost_source_of
from orchestra.engines.simulation.trials import BreakEven, Question, Rival, find_break_even
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.experiment import tuned
from orchestra.records.files import TECHNIQUES, write_atomically
from orchestra.records.record import RunRecord
from orchestra.settings.base import default_of, to_plain
from orchestra.settings.reading import read_json
from orchestra.strategies.base import Strategy
from orchestra.trainer.settings import Run

PATIENCE = 600.0  # the most seconds of one simulation of a search


@dataclass(frozen=True)
class Technique:
    """The row `name` is the row `plain` with one `setting` more, "compression=BF16()"."""

    name: str
    plain: str
    setting: str


@dataclass(frozen=True)
class Judged:
    """A technique on `ranks` ranks; `break_even`, None if not searched, is `text` in words."""

    technique: Technique
    ranks: int
    break_even: BreakEven | None
    text: str


def techniques(strategies: Mapping[str, Strategy]) -> list[Technique]:
    """Return all pairs of strategies of one kind that are equal but for one setting, which has
    its default in one of them.
    """
    pairs = product(strategies.items(), repeat=2)
    return [
        Technique(name, plain, setting)
        for (name, strategy), (plain, other) in pairs
        if (setting := _one_more(strategy, other)) is not None
    ]


def _one_more(strategy: Strategy, plain: Strategy) -> str | None:
    """Return the only setting that differs, where `plain` has its default."""
    # Settings of the same name mean other things in other strategies
    if type(strategy) is not type(plain):
        return None
    names = [f.name for f in fields(plain) if getattr(strategy, f.name) != getattr(plain, f.name)]
    # A row is plain where its setting has the default; of two other values neither would be.
    if len(names) != 1:
        return None
    (name,) = names
    if getattr(plain, name) != default_of(plain.__dataclass_fields__[name]):
        return None
    return f"{name}={getattr(strategy, name)!r}"


def on_most_ranks(
    pairs: Sequence[Technique], runs: Sequence[Run], records: Sequence[RunRecord]
) -> Iterator[tuple[Technique, Run, Run]]:
    """Yield each technique with its run and the plain one, with the first seed and the settings
    that were chosen for them, on the most ranks that both completed.
    """
    settings = {
        (r.asked.name, r.asked.ranks): r.asked.tuned
        for r in records
        if r.ending.status == "completed"
    }

    def run_of(name: str, ranks: int) -> Run:
        run = next(r for r in runs if (r.name, r.training.ranks) == (name, ranks))
        # With the settings that trials have chosen, as in the comparison
        return tuned(run, settings[name, ranks])

    for pair in pairs:
        ranks = [n for name, n in settings if name == pair.name and (pair.plain, n) in settings]
        # On the most ranks: there exchanging costs most
        if ranks:
            yield pair, run_of(pair.name, max(ranks)), run_of(pair.plain, max(ranks))


def steps_needed(run: Run, records: Sequence[RunRecord]) -> float | None:
    """Return the mean steps to the target over the seeds, or all steps without a target.

    None if some did not reach it.
    """
    found = []
    for record in records:
        if (record.asked.name, record.asked.ranks) != (run.name, run.training.ranks):
            continue
        whole = record.time.training
        until = whole if run.training.target is None else record.to_target.seconds
        if record.ending.status != "completed" or not whole or until is None:
            return None
        # Steps, which other links do not change; their time is what the search simulates.
        found.append(record.learned.steps * until / whole)
    return statistics.fmean(found)


def break_even(
    technique: Run,
    plain: Run,
    records: Sequence[RunRecord],
    seconds: float,
    on_event: Callable[[Event | Notice], None],
) -> BreakEven:
    """Return the bandwidth at which `technique` begins to pay, by a search of so many `seconds`;
    `KeyboardInterrupt` if the user stopped it.
    """
    needed = [(run, steps_needed(run, records)) for run in (technique, plain)]
    if any(steps is None for _, steps in needed):
        return BreakEven(reason="not every run reached the target")
    first, second = (Rival(run, steps or 0.0, cost_source_of(run)) for run, steps in needed)
    question = Question(first, second, seconds)
    try:
        outcome = launch(find_break_even, question, 1, patience=PATIENCE, on_event=on_event)
    # A technique without an answer is no reason to end a comparison that is done
    except (InputError, RunFailed) as failure:
        return BreakEven(reason=str(failure).splitlines()[0])
    if outcome.stopped:
        raise KeyboardInterrupt
    (found,) = outcome.results
    return cast("BreakEven", found)


def read_techniques(folder: Path) -> list[Judged]:
    """Return the content of `techniques.json` in `folder`; empty where there is no such file."""
    try:
        found = read_json(folder / TECHNIQUES, dict[str, list[Judged]])
        return list(found.get("techniques", []))
    except FileNotFoundError:
        return []
    except InputError as error:
        raise InputError(f"{error}; delete it") from None


def write_techniques(folder: Path, judged: Sequence[Judged]) -> None:
    """Write `techniques.json` into `folder`."""
    document = {"techniques": to_plain(list(judged))}
    write_atomically(folder / TECHNIQUES, json.dumps(document, indent=2) + "\n")

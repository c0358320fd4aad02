"""The questions of the report, as their files in `declared/` state them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from orchestra.errors import InputError
from orchestra.experiments.experiment import Experiment, with_one_process
from orchestra.experiments.file import load
from orchestra.settings.reading import Entry

FOLDER = Path(__file__).parent / "declared"
COMMON = FOLDER / "common.yaml"


@dataclass(frozen=True)
class Place:
    """The row of a strategy: its comparison, cluster, number of ranks, and label."""

    comparison: str
    cluster: str
    ranks: int
    label: str


@dataclass(frozen=True)
class Claim:
    """A hypothesis about one pair of rows: `lower` has less of the `figure` than `than`.

    With `margin`, that they differ by no more than it; with `one_sided`, that `lower` has no more
    than `margin` in excess. A `relative` margin is in per cent of `than`. An `exact` claim compares
    simulated times without chance: one run of each row, with the error of the simulation.
    """

    says: str
    figure: str
    lower: Place
    than: Place
    margin: float | None = None
    one_sided: bool = False
    relative: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Comparison:
    """Strategies on clusters, with the entries of an experiment file."""

    name: str
    clusters: Mapping[str, str]
    ranks: tuple[int, ...]
    entries: Mapping[str, Any]
    source: Path

    @property
    def exact(self) -> bool:
        """True if its runs have no values, and so tell times only."""
        return self.entries.get("tensors") == "shapes"

    def experiment(self, cluster: str, ranks: int) -> Experiment:
        """Return the experiment of all strategies on a cluster of so many ranks."""
        filled = {"ranks": ranks, "quarter": max(1, ranks // 4)}
        strategies = {
            label: notation.format(**filled)
            for label, notation in self.entries["strategies"].items()
        }
        values = {**self.entries, "strategies": strategies, "ranks": ranks, "name": self.name}
        if self.clusters[cluster]:
            values["cluster"] = self.clusters[cluster].format(**filled)
        where = f"{self.source.name} comparisons.{self.name}"
        given = {key: Entry(value, f"{where}.{key}") for key, value in values.items()}
        return with_one_process(load(None, given=given))


@dataclass(frozen=True)
class Question:
    """A question: why it is asked, how it is answered, and what was expected before any run."""

    number: int
    text: str
    declared: datetime.date
    because: str
    method: str
    hypotheses: Sequence[Mapping[str, Any]]
    comparisons: Sequence[Comparison] = ()
    published: Sequence[Mapping[str, float]] = ()
    missing: str = ""  # what has to be made before the question can be answered

    @cached_property
    def claims(self) -> list[Claim]:
        """Every pair of rows that a hypothesis names."""
        return [claim for each in self.hypotheses for claim in self._claims(each)]

    def _claims(self, hypothesis: Mapping[str, Any]) -> Iterator[Claim]:
        if "figure" not in hypothesis:
            return
        for lower, than, cluster in product(
            _listed(hypothesis["lower"]), _listed(hypothesis["than"]), hypothesis["at"]
        ):
            comparison = self._comparison(lower)
            for ranks in hypothesis.get("ranks") or comparison.ranks:
                less, more = (self._place(text, cluster, ranks) for text in (lower, than))
                margin, exact = _margin(hypothesis), comparison.exact
                says, figure = hypothesis["says"], hypothesis["figure"]
                yield Claim(says, figure, less, more, **margin, exact=exact)

    def _comparison(self, row: str) -> Comparison:
        name = row.split(" / ")[0]
        return next(each for each in self.comparisons if each.name == name)

    def _place(self, text: str, cluster: str, ranks: int) -> Place:
        name, label = text.split(" / ")
        known = {each.name: each for each in self.comparisons}
        if name not in known or label not in [*known[name].entries["strategies"], "one process"]:
            raise InputError(f"question {self.number}: there is no row {text!r}; name one of it")
        if cluster not in known[name].clusters:
            raise InputError(f"question {self.number}: {name!r} has no cluster {cluster!r}; add it")
        return Place(name, cluster, ranks, label)

    def small(self) -> Question:
        """Return the question with runs of a moment, which show that it can be answered."""
        made = []
        for each in self.comparisons:
            length = {"steps": 4} if "steps" in each.entries else {"epochs": 1}
            entries = {**each.entries, **length, "seeds": [0], "tune": None}
            made.append(replace(each, ranks=each.ranks[:1], entries=_without_empty(entries)))
        return replace(self, comparisons=made)


def questions() -> list[Question]:
    """Return all questions, in order."""
    return [read(path) for path in sorted(FOLDER.glob("[0-9]*.yaml"))]


def read(path: Path) -> Question:
    """Return the question of a file."""
    common = yaml.safe_load(COMMON.read_text())
    document = yaml.safe_load(path.read_text())
    comparisons = [
        _comparison(name, {**common, **own}, path)
        for name, own in document.pop("comparisons", {}).items()
    ]
    text, number = document.pop("question"), int(path.name[:2])
    return Question(number, text, comparisons=comparisons, **document)


def _comparison(name: str, entries: dict[str, Any], path: Path) -> Comparison:
    clusters, ranks = entries.pop("clusters"), entries.pop("ranks")
    return Comparison(name, clusters, tuple(_listed(ranks)), _without_empty(entries), path)


def _without_empty(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that have a value: an empty one takes a common entry away."""
    return {key: value for key, value in entries.items() if value is not None}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _margin(hypothesis: Mapping[str, Any]) -> dict[str, Any]:
    one_sided = "above_by_at_most" in hypothesis
    given = hypothesis.get("above_by_at_most" if one_sided else "within")
    if given is None:
        return {}
    relative = str(given).endswith("%")
    margin = float(str(given).removesuffix("%"))
    return {"margin": margin, "one_sided": one_sided, "relative": relative}

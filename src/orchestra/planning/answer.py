"""The answer of a plan: rows, one sentence, one command, and an `Auto` that goes on choosing."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from orchestra.cluster.units import FLOPS
from orchestra.planning.doubts import about_devices, about_predictions, ending
from orchestra.planning.search import Search
from orchestra.planning.standing import (
    NO_TIME,
    Contender,
    Standing,
    best_value,
    bottleneck,
    chosen,
    pessimistic,
)
from orchestra.report.figures.results import knee
from orchestra.report.numbers import listed, significant, uncertain
from orchestra.settings import write
from orchestra.strategies.auto import Auto
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Engine, Target

RECOMMENDED = "recommended.yaml"
PORT = 29400
CURVES = 8
"""The most candidates whose curves are in the answer."""
NAMED = 4
"""The most nodes that are named before the command."""
MOST, ALIKE = 4, 2
"""The most candidates of an `Auto`, because rehearsing each costs time; the most of them that learn
the same and differ in their exchange only."""
TOLERATED = 0.1
"""A larger relative deviation of the compute time from the prediction is reported: a machine that
others use is not as fast as when it was calibrated."""


@dataclass(frozen=True)
class CandidateRow:
    """A candidate in the answer.

    Attributes:
        name, strategy: in words, and in their notation.
        nodes: the names of those that it uses.
        ranks: processes, servers included.
        batch: samples in a step of all workers.
        rate: the learning rate; None where the optimizer has none.
        speed: samples/s.
        seconds: to the target, the mean over the seeds; None where that is not known.
        uncertainty: of the seconds.
        seeds: how many runs reached the target; the seconds are their mean.
        after: seconds up to which it was simulated without reaching the target.
        best: the best value of the target's metric that was seen.
        cost: to the target, in `currency`; None without prices.
        bottleneck: what most of a worker's time goes into.
        dropped: why it was not simulated to the end; None for those that were.
        rungs: what each rung of the race saw.
    """

    name: str
    strategy: str
    nodes: Sequence[str]
    ranks: int
    batch: int
    rate: float | None
    speed: float | None
    seconds: float | None
    uncertainty: float | None
    seeds: int
    after: float | None
    best: float | None
    cost: float | None
    currency: str | None
    bottleneck: str
    dropped: str | None
    rungs: Sequence[str]


@dataclass(frozen=True)
class Verified:
    """A candidate that was trained for real, with seeds that reached the target in simulation.

    Attributes:
        name: of the candidate.
        predicted: by seed, seconds to the target.
        measured: the same, on `engine`; None where the target was not reached.
        failure: why it was not carried out; None where it was.
        computing: how many times as long as predicted a worker computed for each sample; None where
            nothing was carried out.
    """

    name: str
    predicted: Mapping[int, float]
    measured: Mapping[int, float | None]
    engine: Engine
    failure: str | None = None
    computing: float | None = None

    @property
    def mean_predicted(self) -> float:
        """The mean over the seeds, in seconds."""
        return fmean(self.predicted.values())

    @property
    def mean_measured(self) -> float | None:
        """The mean over the seeds, in seconds; None if one missed the target or was not trained."""
        reached = [seconds for seconds in self.measured.values() if seconds is not None]
        return fmean(reached) if len(reached) == len(self.predicted) else None

    @property
    def outcome(self) -> str:
        """The text that stands next to the prediction."""
        if self.failure is not None:
            return f"not measured: {self.failure}"
        if self.mean_measured is not None:
            text = f"measured {significant(self.mean_measured)} s"
            if self.computing is not None and abs(self.computing - 1) > TOLERATED:
                times = significant(self.computing)
                text += f" (computing took {times} times as long as predicted)"
            return text
        missed = sum(seconds is None for seconds in self.measured.values())
        return f"target not reached with {missed} of {len(self.measured)} seeds"


@dataclass(frozen=True)
class PlanAnswer:
    """The result of a plan.

    Attributes:
        target: what was planned for; None where not even that could be chosen.
        rows: of all candidates, the first to the target first, then those that came closest.
        recommended: the first row's, or of equally fast ones that with the fewest nodes; None
            where no candidate reaches the target.
        headline: the answer in one sentence.
        command: trains what is recommended.
        scaled: whose scaling curve is shown: what is recommended, or where that is one process the
            first row of several.
        scaling: its samples/s by number of nodes (or ranks of one node).
        knee: the number of these beyond which more gain less than they cost.
        curves: of the candidates that were simulated furthest, with the first seed: seconds of the
            cluster and the target's metric at each snapshot.
        notes: what there was no time for, and doubts about the costs.
        costs: where the durations of the simulation come from.
        folder, report: where everything lies, and the page.
        ending: how the search ended, in words.
        sample_flops: floating-point operations of a sample's gradient; None where not counted.
        stopped: the user ended the search.
        verified: the first candidates as they were carried out for real, where that was asked for.
        adaptive: an `Auto` that begins with what is recommended; None where no other candidate on
            the same nodes is known well enough.
    """

    target: Target | None
    rows: Sequence[CandidateRow]
    recommended: CandidateRow | None
    headline: str
    command: str | None
    scaled: str | None
    scaling: Mapping[int, float]
    knee: int | None
    curves: Mapping[str, Sequence[tuple[float, float]]]
    notes: Sequence[str]
    costs: str
    folder: Path
    report: Path | None = None
    stopped: bool = False
    verified: Sequence[Verified] = ()
    adaptive: str | None = None
    ending: str = ""
    sample_flops: float | None = None

    @property
    def places(self) -> str:
        """The unit that `scaling` counts."""
        return "nodes" if any(len(row.nodes) > 1 for row in self.rows) else "ranks"

    @property
    def operations(self) -> str:
        """What a sample counts as, and so what to write for `flops`; empty where not known."""
        if not self.sample_flops:
            return ""
        count = FLOPS.rounded(self.sample_flops).removesuffix("/s")
        return f"{count} for the gradient of a sample; flops of a device: its samples/s x {count}"

    @property
    def where(self) -> str:
        """The machines on which to give the command, as "on gpu"; empty where there is only one."""
        nodes = () if self.recommended is None else self.recommended.nodes
        if len(nodes) > 1:
            many = f"the {len(nodes)} nodes that plan.json names"
            names = listed(nodes) if len(nodes) <= NAMED else many
            return f"on each of {names}, in a folder that they share"
        return f"on {nodes[0]}" if nodes and self.places == "nodes" else ""


def answered(search: Search, costs: str, folder: Path, devices: Collection[str] = ()) -> PlanAnswer:
    """Return the answer with what was found so far; `devices` names the nodes that have any."""
    rows = rows_of(search)
    best, scaled = recommended(rows), to_scale(rows)
    scaling = {} if scaled is None else scaling_of(search, search.entries[scaled.name])
    return PlanAnswer(
        target=search.target,
        rows=rows,
        recommended=best,
        headline=headline(rows, best, search.target),
        command=None if best is None else command(best, folder / RECOMMENDED),
        scaled=None if scaled is None else scaled.name,
        scaling=scaling,
        knee=knee(scaling),
        curves=curves_of(search, rows),
        notes=(
            *search.notes,
            *about_predictions(best, rows, search.entries),
            *about_devices(best, devices),
        ),
        costs=costs,
        folder=folder,
        stopped=search.stopped,
        ending=ending(search),
        adaptive=adaptive(search, None if best is None else search.entries[best.name]),
    )


def rows_of(search: Standing) -> list[CandidateRow]:
    """Return the rows of all candidates: those with a time first, by time; then by how close they
    came to the target; last those without any measurement.
    """

    def key(row: CandidateRow) -> tuple[int, float]:
        if row.seconds is not None:
            return 0, row.seconds
        if row.best is not None and search.target is not None:
            return 1, search.target.penalty(row.best)
        # Nothing was learned: the fastest first, and last those whose speed is not known either.
        return 2, -(row.speed or 0.0)

    return sorted((row_of(search, entry) for entry in search.entries.values()), key=key)


def row_of(search: Standing, entry: Contender) -> CandidateRow:
    """Return the row of a candidate in the answer."""
    candidate, training = entry.candidate, entry.candidate.run.training
    time, target = search.time(entry), search.target
    rate = training.optimizer.arguments.get("lr")
    missed = search.missed(entry) if search.times(entry) else []
    reason = f"seed {missed[0]} did not reach the target" if missed else None
    return CandidateRow(
        name=entry.name,
        strategy=repr(candidate.run.strategy),
        nodes=nodes_of(entry),
        ranks=training.ranks,
        batch=candidate.samples,
        rate=float(rate) if isinstance(rate, int | float) else None,
        speed=entry.speed,
        seconds=time,
        uncertainty=search.uncertainty(entry) if time else None,
        seeds=len(search.times(entry)),
        # A lower bound, of those that have no time to the target
        after=search.elapsed(entry) or None if time is None else None,
        best=best_value(search.curve(entry), target) if target and entry.speed else None,
        cost=None if time is None or entry.cost_rate is None else time * entry.cost_rate,
        currency=None if entry.record is None else entry.record.spending.currency,
        bottleneck=bottleneck({} if entry.record is None else entry.record.time.worker),
        dropped=entry.dropped or reason,
        rungs=list(entry.rungs),
    )


def nodes_of(entry: Contender) -> Sequence[str]:
    """Return the names of the nodes that a candidate uses: as simulated, where it was."""
    # Of one process on a cluster of several nodes the record names the node
    ran_on = None if entry.record is None else entry.record.machine.node
    return entry.candidate.nodes if ran_on is None else (ran_on,)


def recommended(rows: Sequence[CandidateRow]) -> CandidateRow | None:
    """Return the row to train; None where none reaches the target."""
    times = {row.name: row.seconds for row in rows if row.seconds is not None}
    times = pessimistic(times, {row.name: row.seeds for row in rows})
    name = chosen(times, {row.name: len(row.nodes) for row in rows}) if times else None
    return next((row for row in rows if row.name == name), None)


def headline(rows: Sequence[CandidateRow], best: CandidateRow | None, target: Target | None) -> str:
    """Return the answer in one sentence."""
    if not any(row.speed for row in rows):
        # Of many refusals the first one; mostly it is the same for all
        reason = next((row.dropped for row in rows if row.dropped not in (None, NO_TIME)), None)
        if reason is None:
            return "There was no time to simulate anything; give more minutes."
        return f"None of the candidates can run here; the first: {reason}."
    if target is None:
        return "There was no time to find a target; give one with --target, or more minutes."
    text = target_text(target)
    if best is None or best.seconds is None:
        closest = next((row for row in rows if row.best is not None), None)
        if closest is None:
            return f"Nothing is known of {text} yet: there was no time to train; give more minutes."
        return (
            f"None of them reaches {text} in the samples and time given; the closest is "
            f"{closest.name} with {target.metric} {closest.best:.4g}."
        )
    reaches = f"reaches {text} in {time_text(best)} s"
    if best.strategy == "Single()":
        alone = f"{best.name} on {best.nodes[0]} {reaches}"
        if not any(row.speed for row in rows if row.strategy != "Single()"):
            return f"{alone}; there was no time to simulate any other strategy."
        rival = next((r for r in rows if r.seconds is not None and r.ranks > 1), None)
        beside = f"; the best of several is {rival.name}, {time_text(rival)} s" if rival else ""
        # On a cluster of one node the others are processes of the same machine
        one = "machine" if any(len(row.nodes) > 1 for row in rows) else "process"
        return f"One {one} wins: {alone}{beside}."
    gain = ""
    single = next((r for r in rows if r.strategy == "Single()" and r.seconds is not None), None)
    if single is not None and single.seconds is not None:
        times = single.seconds / best.seconds
        gain = f", {times:.2f} times as fast as {single.name} ({time_text(single)} s)"
    return f"Train under {best.name}: it {reaches}{gain}."


def time_text(row: CandidateRow) -> str:
    """Return the seconds to the target with what they are known to, or how far it was simulated."""
    if row.seconds is not None:
        known = row.uncertainty
        return uncertain(row.seconds, known) if known else significant(row.seconds)
    if row.seeds:
        return "seed missed"
    return "–" if row.after is None else f"> {significant(row.after)}"


def target_text(target: Target) -> str:
    """Return the target as part of a sentence: "accuracy >= 0.85"."""
    return f"{target.metric} {'>=' if target.rising else '<='} {target.bound:g}"


def command(row: CandidateRow, path: Path) -> str:
    """Return the command that trains the experiment in the file `path`, whose row is `row`.

    On several nodes it is given on each of them, with the folder shared by all.
    """
    train = ["orchestra", "train", str(path), "--out", str(path.parent / "trained")]
    nodes = len(row.nodes)
    if nodes == 1:
        return shlex.join(train)
    return shlex.join([
        "torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(row.ranks // nodes),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{row.nodes[0]}:{PORT}", "-m", *train,
    ])  # fmt: skip


def to_scale(rows: Sequence[CandidateRow]) -> CandidateRow | None:
    """Return the row whose scaling curve is shown."""
    best = recommended(rows)
    if best is None or best.strategy != "Single()":
        return best
    several = (row for row in rows if row.strategy != "Single()" and row.speed is not None)
    return min(several, key=lambda row: row.seconds or math.inf, default=None)


def scaling_of(search: Standing, entry: Contender) -> dict[int, float]:
    """Return the strategy's samples/s by number of nodes, or of ranks on one; one process for 1."""
    own, found = entry.candidate, dict[int, float]()
    for other in search.entries.values():
        each, training = other.candidate, other.candidate.run.training
        # One process is the beginning of every scaling curve
        alike = isinstance(each.run.strategy, Single) or (
            each.run.strategy == own.run.strategy and training.shares == own.run.training.shares
        )
        if alike and each.batch == own.batch and other.speed is not None:
            places = len(each.nodes) if len(each.nodes) > 1 else training.ranks
            # Several candidates have one number of places where learning rates differ.
            found[places] = max(found.get(places, 0.0), other.speed)
    return dict(sorted(found.items()))


def curves_of(
    search: Standing, rows: Sequence[CandidateRow]
) -> dict[str, list[tuple[float, float]]]:
    """Return the curves of the first of `rows`, one for those that learn alike."""
    found: dict[str, list[tuple[float, float]]] = {}
    if search.target is None:
        return found
    seen, metric = set(), search.target.metric
    for row in rows:
        entry = search.entries[row.name]
        points, learns_as = search.curve(entry), entry.candidate.learns_as
        # Candidates that learn the same would be one curve drawn twice, at other speeds.
        if learns_as in seen or not points or not entry.speed or len(found) == CURVES:
            continue
        seen.add(learns_as)
        exact = entry.candidate.exact
        found[row.name] = [
            # An exact candidate's curve was made by one process, whose seconds are not its own.
            (point.samples / entry.speed if exact else point.seconds, point.metrics[metric])
            for point in points
            if metric in point.metrics
        ]
    return found


def adaptive(search: Standing, best: Contender | None) -> str | None:
    """Return the notation of an `Auto` that begins with `best` and knows the samples of the others.

    They have the nodes, batch and learning rate of `best`. None where there are no such others.
    """
    if best is None:
        return None
    found: list[Contender] = []
    for entry in (best, *search.ranking()):
        alike = [each for each in found if each.candidate.learns_as == entry.candidate.learns_as]
        if entry in found or len(alike) == ALIKE or not _suits(entry, best):
            continue
        if search.time(entry) is not None:
            found.append(entry)
    # `Auto` begins with its first candidate, which has to be what the plan recommends.
    if len(found) < 2 or found[0] is not best:
        return None
    del found[MOST:]
    means = [fmean(each.samples for each in search.times(entry).values()) for entry in found]
    strategies = tuple(entry.candidate.run.strategy for entry in found)
    return write(Auto(strategies, samples=tuple(float(round(mean)) for mean in means)), STRATEGIES)


def _suits(entry: Contender, best: Contender) -> bool:
    """Return whether it can be a candidate beside `best`: it differs in the strategy alone."""
    own, other = entry.candidate, best.candidate
    alike = (own.nodes, own.batch, own.rate) == (other.nodes, other.batch, other.rate)
    given = own.run.training.shares == other.run.training.shares
    return own.run.strategy.traits().exchange is not None and alike and given

"""How far `orchestra plan` is from the best candidate, on pairs of a task and a cluster.

    python -m studies.regret --list                   # the pairs, drawn by a seed
    python -m studies.regret --out runs/regret        # all: calibration, plans, simulations, table
    sudo python -m studies.regret --out runs/regret --emulate    # real runs on emulated nodes, too

For each pair: `orchestra plan` for two minutes, and all of its candidates simulated to the
target without dropping any. Regret is the time of the plan's choice over the least of all, less 1;
beside it stands that of three rules that look at nothing: data-parallel training on all nodes (a
ring), one process, DiLoCo. With --emulate, candidates of pairs with up to eight nodes, which
together have the cores of a small machine, are trained for real: the same list for each pair, the
three rules among it, and the plan's first ones. All have the first seed, those that are less than
twice the best the second one, too, and those that still are so then, and the plan's choice, two
more.

Whatever is done is kept in the folder, and the same command goes on. --seconds ends it early.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from studies.regret_pairs import LINKS, SEED, SEEDS, TASKS, Pair, pairs

from orchestra.calibration import Workload, calibrate
from orchestra.cluster.calibration import read_calibration
from orchestra.cluster.file import cluster_text
from orchestra.cluster.units import BANDWIDTH
from orchestra.engines.processes.system import now
from orchestra.engines.simulation.trials import Tried
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.experiment import ONE_PROCESS, Experiment
from orchestra.planning.api import (
    RECORD,
    carried_out_for_real,
    carry_out,
    emulated_nodes,
    length_of,
    planned,
)
from orchestra.planning.candidates import Space, with_rates
from orchestra.planning.race import CONFIRMED_STEPS, SearchBudget, TrialRequest
from orchestra.planning.search import Search
from orchestra.planning.standing import Contender, Length
from orchestra.records.files import write_atomically
from orchestra.settings.reading import Entry as Given

MINUTES = 2.0
FURTHER = 2.0
"""A candidate is given up after so many times the least time known, and counts as slower."""
CHUNK = 8
NODE_STEPS = 1600
"""Steps of all nodes together from which a speed is taken: 64 that all send to all take seconds a
step to simulate."""
DONE = "simulated.ok"
"""The file that says that all candidates of a pair are simulated."""
EMULATED_ALONE = (
    "", ", batch x 0.25, rate kept", ", batch x 0.5", ", batch x 0.5, rate kept", ", batch x 2",
    ", rate x 2",
)  # fmt: skip
EMULATED_ON_ALL = (
    "ring", "ring, BF16", "ring, PowerSGD", "asynchronous beside", "local SGD, H=4",
    "local SGD, H=16", "DiLoCo, H=32", "push-sum",
)  # fmt: skip
"""Candidates that are trained for real on every small pair, beside the plan's first ones."""
FURTHER_SEEDS = (2, 3)
"""Of candidates that are less than `FURTHER` times the least time after the first seeds."""
LONGER = 1.6
"""Times the samples that the simulation needed, for a real run."""

# All candidates


class Exhaustive(Search):
    """All candidates to the target, none dropped; what is known is kept in a file."""

    def __init__(self, pair: Pair, experiment: Experiment, folder: Path, until: float) -> None:
        space = Space(experiment, pair.cluster, folder / "clusters")
        length: Length = length_of(experiment)
        super().__init__(
            space.candidates(), experiment.training.target, length, folder / "runs",
            SearchBudget(0.0, 1e12), lambda *_: None, seeds=experiment.seeds,
        )  # fmt: skip
        self._file, self._until = folder / "simulated.json", until
        self._nodes = pair.nodes
        self.known: dict[str, Any] = (
            json.loads(self._file.read_text()) if self._file.exists() else {}
        )

    def simulate(self) -> bool:
        """Simulate what is not known yet: whatever learns as one process does, then the rest.

        Whether all is known.
        """
        entries = list(self.entries.values())
        steps = max(each.candidate.run.training.steps or 0 for each in entries)
        self.find_speeds(entries, 1e12, min(steps, CONFIRMED_STEPS, NODE_STEPS // self._nodes))
        for entry in entries:
            if entry.candidate.exact and entry.candidate.batch == 1 and entry.speed:
                rates = [
                    each for each in with_rates(entry.candidate) if each.name not in self.known
                ]
                self.entries |= {
                    c.name: replace(entry, candidate=c, curves={}, done={}) for c in rates
                }
        exact = [e for e in self.entries.values() if e.candidate.exact]
        sources = {self.source(entry).name: self.source(entry) for entry in exact if entry.speed}
        missing = [
            e for e in sources.values() if any(x.name not in self.known for x in self.alike(e))
        ]
        self._all([(entry, 1.0) for entry in missing], exact)
        for entry in self.entries.values():
            if entry.speed is None and entry.name not in self.known:
                self.known[entry.name] = {"failed": entry.dropped}
        rest = [e for e in self.entries.values() if not e.candidate.exact and e.speed]
        rest = [entry for entry in rest if entry.name not in self.known]
        rest.sort(key=lambda entry: not entry.name.startswith("DiLoCo"))
        while rest and now() < self._until:
            chunk, rest = rest[:CHUNK], rest[CHUNK:]
            self._all([(entry, self._part(entry)) for entry in chunk], chunk)
        return not rest

    def _part(self, entry: Contender) -> float:
        """Up to which part of its samples: a rule, to its end."""
        if entry.name.startswith("DiLoCo"):
            return 1.0
        assert entry.speed is not None
        best = min(self.seconds().values(), default=math.inf)
        return min(1.0, FURTHER * best * entry.speed / self.length.samples)

    def _all(self, wanted: Sequence[tuple[Contender, float]], entries: Sequence[Contender]) -> None:
        """Train the `wanted` ones up to their parts, and note what became of `entries`."""
        waiting = [(e, seed, part) for e, part in wanted for seed in self.asked]

        def ask() -> TrialRequest | None:
            return self.request_run(*waiting.pop(0)) if waiting else None

        def told(request: TrialRequest, tried: Tried) -> None:
            self.under_way.remove(request)
            self.take_curve(request, tried)

        self.carry_out(ask, told, 1e12)
        for entry in entries:
            if entry.name in self.known or not self.source(entry).curves:
                continue
            time, best = self.time(entry), max(self.elapsed(entry), 0.0)
            self.known[entry.name] = {
                "seconds": time if set(self.times(entry)) == set(self.asked) else None,
                "samples": statistics.fmean(x.samples for x in self.times(entry).values())
                if self.times(entry) else None,
                "after": best, "nodes": len(entry.candidate.nodes),
                "strategy": repr(entry.candidate.run.strategy),
            }  # fmt: skip
        write_atomically(self._file, json.dumps(self.known, indent=1) + "\n")

    def seconds(self) -> dict[str, float]:
        """To the target, of those that reach it with every seed."""
        return {name: own["seconds"] for name, own in self.known.items() if own.get("seconds")}


# A pair


def prepare(pair: Pair, folder: Path) -> str:
    """The path of a calibration that holds the pair's task, which is made if there is none.

    It is that of an emulated node for a pair that can be emulated, and one for all others.
    """
    emulated = emulated_nodes(pair.cluster) if pair.small else None
    path = (folder / str(pair.number) if emulated else folder) / "calibration.json"
    given = {key: Given(TASKS[pair.task][key], key) for key in ("task", "optimizer")}
    experiment = planned(None, (), given)
    work = Workload(experiment.task, experiment.training.optimizer, batch_sizes=(8, 64, 128))
    known = read_calibration(path).tasks if path.exists() else ()
    if work.key not in {task.key for task in known}:
        print(f"calibrating {pair.task}: leave the machine alone", file=sys.stderr)
        found = calibrate([work], 0.3, limit=90.0, emulated=emulated)
        for task in known:
            found = found.with_task(task)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, found.to_json())
    return str(path.absolute())


def carry_out_pair(
    pair: Pair, folder: Path, calibration: str, until: float, plan_only: bool
) -> None:
    """Plan, and simulate all candidates, as far as neither is there, until a moment."""
    folder.mkdir(parents=True, exist_ok=True)
    experiment = pair.experiment(calibration)
    file = folder / "cluster.yaml"
    write_atomically(file, cluster_text(pair.cluster))
    if not (folder / "plan" / RECORD).exists() and now() + 60 * MINUTES < until:
        carry_out(
            experiment, str(file), folder / "plan", MINUTES, lambda *_: None, report=False
        )  # fmt: skip
    if plan_only or (folder / DONE).exists() or now() > until:
        return
    if Exhaustive(pair, experiment, folder, until).simulate():
        (folder / DONE).touch()
        print(f"done: {pair.title}", flush=True)


def chosen_of(folder: Path) -> list[str]:
    """The plan's choice, and then its first rows."""
    record = json.loads((folder / "plan" / RECORD).read_text())
    best = record["recommended"]
    first = [best["name"]] if best else []
    return list(dict.fromkeys([*first, *[*predicted(folder)][:3]]))


def predicted(folder: Path) -> dict[str, float]:
    """The plan's times to target."""
    record = json.loads((folder / "plan" / RECORD).read_text())
    return {row["name"]: row["seconds"] for row in record["rows"] if row["seconds"] is not None}


def rules(pair: Pair) -> dict[str, str]:
    """The candidates of the rules that look at nothing."""
    on = f" on {pair.nodes} nodes"
    return {"DDP": f"ring{on}", "one machine": ONE_PROCESS, "DiLoCo": f"DiLoCo, H=32{on}"}


def near(found: Mapping[str, Any], names: Iterable[str], seed: int) -> set[str]:
    """Those of `names` that by the seeds before this one are not too far from the best."""
    times = {}
    for name in names:
        by_seed = found.get(name, {}).get("by_seed", {})
        known = [by_seed.get(str(earlier)) for earlier in range(seed)]
        times[name] = math.inf if None in known else statistics.fmean(known or [0.0])
    return {name for name in names if times[name] <= FURTHER * min(times.values())}


def emulate(pair: Pair, folder: Path, calibration: str, until: float) -> None:
    """Train candidates for real on emulated nodes, until a moment.

    All have the first seed; those that were not too far from the best have the others, too.
    """
    file = folder / "emulated.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    experiment = pair.experiment(calibration)
    target, length = experiment.training.target, length_of(experiment)
    assert target is not None
    every = Exhaustive(pair, experiment, folder, until)
    candidates = {name: entry.candidate for name, entry in every.entries.items()}
    candidates |= {
        other.name: other for each in [*candidates.values()] for other in with_rates(each)
    }
    names = dict.fromkeys(
        [f"{ONE_PROCESS}{how}" for how in EMULATED_ALONE]
        + [f"{what} on {pair.nodes} nodes" for what in EMULATED_ON_ALL]
        + chosen_of(folder)
    )
    for seed in (*SEEDS, *FURTHER_SEEDS):
        if seed != FURTHER_SEEDS[-1]:  # all of these seeds, or none
            wanted = near(found, names, seed) | {*chosen_of(folder)[:1]}
        for number, name in enumerate(names, start=1):
            own = found.setdefault(name, {"seconds": None, "by_seed": {}, "failure": None})
            if str(seed) in own["by_seed"] or name not in wanted or now() > until:
                continue
            run, known = candidates[name].run, every.known.get(name, {})
            part = min(1.0, LONGER * (known.get("samples") or length.samples) / length.samples)
            steps = math.ceil(part * (run.training.steps or 0))
            run = replace(run, training=replace(run.training, steps=steps), seed=seed)
            snapshots = max(4, round(part * length.snapshots))
            runs = folder / "emulated" / f"{number}-{seed}"
            own["by_seed"][str(seed)] = None
            try:
                real = carried_out_for_real(run, "emulation", snapshots, runs, target)
                own["by_seed"][str(seed)] = real.seconds
            except (InputError, RunFailed) as error:
                own["failure"] = str(error).splitlines()[0]
            times_of = [*own["by_seed"].values()]
            own["seconds"] = None if None in times_of else statistics.fmean(times_of)
            said = own["by_seed"][str(seed)] or own["failure"] or "not reached"
            print(f"{pair.title}, {name}, seed {seed}: {said}", file=sys.stderr)
            write_atomically(file, json.dumps(found, indent=1) + "\n")


# Figures


@dataclass(frozen=True)
class Row:
    """Regrets of a pair, each the time over the least, less 1; None where the target was missed.

    Attributes:
        measured: "emulation" or "simulation".
        candidates: that were measured, and of these those that reached the target.
        span: the longest time to the target over the least.
    """

    pair: Pair
    measured: str
    candidates: int
    reached: int
    span: float
    best: str
    choice: str
    seconds: float
    regret: float | None
    of_rules: Mapping[str, float | None]
    predicted: float | None


def row_of(pair: Pair, folder: Path, measured: str) -> Row | None:
    """The figures of a pair; None where they are not there yet."""
    files = {"simulation": "simulated.json", "emulation": "emulated.json"}
    file = folder / files[measured]
    if not file.exists() or not (folder / "plan" / RECORD).exists():
        return None
    known = json.loads(file.read_text())
    plan = json.loads((folder / "plan" / RECORD).read_text())
    times = {name: own["seconds"] for name, own in known.items() if own.get("seconds")}
    choice = plan["recommended"]["name"] if plan["recommended"] else ""
    if not times:
        return None
    seeds = {name: len(known[name].get("by_seed", ())) for name in times}
    # A mean of fewer seeds is the luck of those that were not tried again
    best = min(times, key=lambda name: (-seeds[name], times[name]))

    def regret(name: str) -> float | None:
        return times[name] / times[best] - 1 if name in times else None

    longest = max(max(own.get("after") or 0, own.get("seconds") or 0) for own in known.values())
    return Row(
        pair, measured, len(known), len(times), longest / times[best], best, choice, times[best],
        regret(choice), {rule: regret(name) for rule, name in rules(pair).items()},
        plan["recommended"]["seconds"] if plan["recommended"] else None,
    )  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """The table, and the median and worst regret of the plan and of each rule."""
    lines = [
        "| pair | task | cluster | measured by | candidates, reached | best | its s "
        "| plan's choice | regret | DDP | one machine | DiLoCo |",
        "| --- " * 12 + "|",
    ]
    for row in rows:
        pair = row.pair
        width = BANDWIDTH.write(LINKS[pair.link].bandwidth)
        where = f"{pair.nodes} nodes, {pair.kind}, {width}"
        choice = "the same" if row.choice == row.best else row.choice
        cells = [str(pair.number), pair.task, where, row.measured]
        cells += [f"{row.candidates}, {row.reached}", row.best, f"{row.seconds:.3g}", choice]
        cells += [_percent(each) for each in (row.regret, *row.of_rules.values())]
        lines.append("| " + " | ".join(cells) + " |")
    columns = {"plan": [row.regret for row in rows]}
    for rule in rows[0].of_rules if rows else ():
        columns[f"always {rule}"] = [row.of_rules[rule] for row in rows]
    lines += ["", "| | median | worst |", "| --- | --- | --- |"]
    for name, values in columns.items():
        known = [math.inf if value is None else value for value in values]
        middle, worst = statistics.median(known), max(known)
        lines.append(f"| {name} | {_percent(middle)} | {_percent(worst)} |")
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "target missed" if value is None or math.isinf(value) else f"{100 * value:.1f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("runs/regret"))
    parser.add_argument("--list", action="store_true", help="only the pairs")
    parser.add_argument("--draw", type=int, default=SEED, help="seed that draws the pairs")
    parser.add_argument("--pairs", default="", help="such as 1,3 (default: all)")
    parser.add_argument("--emulate", action="store_true", help="small pairs for real, too")
    parser.add_argument("--plan-only", action="store_true", help="do not simulate all candidates")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    options = parser.parse_args()
    wanted = pairs(options.draw)
    if options.list:
        for pair in wanted:
            print(pair)
        return 0
    numbers = {int(text) for text in options.pairs.split(",") if text}
    chosen = [pair for pair in wanted if not numbers or pair.number in numbers]
    until = min(now() + options.seconds, 1e12)
    options.out.mkdir(parents=True, exist_ok=True)
    for pair in chosen:
        folder, calibration = options.out / str(pair.number), prepare(pair, options.out)
        if now() < until and not options.emulate:
            carry_out_pair(pair, folder, calibration, until, options.plan_only)
        elif now() < until and pair.small:
            emulate(pair, folder, calibration, until)
    found = [
        row
        for measured in ("simulation", "emulation")
        for pair in wanted
        if (row := row_of(pair, options.out / str(pair.number), measured)) is not None
    ]
    write_atomically(options.out / "regret.json", json.dumps([asdict(r) for r in found], indent=1))
    for measured in ("simulation", "emulation"):
        if own := [row for row in found if row.measured == measured]:
            write_atomically(options.out / f"regret-{measured}.md", markdown(own))
            print(markdown(own))
    return 0


if __name__ == "__main__":
    sys.exit(main())

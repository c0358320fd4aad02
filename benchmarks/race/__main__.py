"""How far a plan's choice is from the best candidate, replayed on a recording.

    python -m benchmarks.race record --out runs/race [--pairs 1,2] [--seconds 900]
    python -m benchmarks.race replay --out runs/race [--pairs 1,2] [--budget 60] [--draws 42]

`record` simulates every candidate of 24 pairs of a task and a cluster, with 8 seeds; the same
command goes on where an earlier one ended. `replay` plans each recorded pair on a clock of its own,
once for each draw of the order of seeds, and prints what the choices take more than the best
candidate, beside three rules that look at nothing.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.race.oracle import Oracle, candidates_of, record
from benchmarks.race.pairs import RacePair, pairs
from benchmarks.race.replay import Known, Regrets, draws, quantile, raced, regrets_of
from orchestra.engines.processes.system import now
from orchestra.errors import InputError


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("record", "replay"))
    parser.add_argument("--out", type=Path, default=Path("runs/race"), help="the recording")
    parser.add_argument("--pairs", default="", help="such as 1,3 (default: all)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop recording after")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each plan")
    parser.add_argument("--processes", type=int, default=2, help="of each plan")
    parser.add_argument("--draws", type=int, default=42, help="plans of each pair")
    options = parser.parse_args()
    try:
        chosen = wanted(options.pairs)
        if options.what == "record":
            return 0 if record(chosen, options.out, now() + options.seconds) else 1
        found = replayed(chosen, options)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(markdown(found))
    return 0


def wanted(numbers: str) -> Sequence[RacePair]:
    """Return the pairs with these numbers, all by default."""
    every = {str(pair.number): pair for pair in pairs()}
    names = [text.strip() for text in numbers.split(",") if text.strip()]
    if unknown := [name for name in names if name not in every]:
        raise InputError(f"--pairs: there is no pair {unknown[0]}; give numbers from 1 to 24")
    return [every[name] for name in names or every]


def replayed(chosen: Sequence[RacePair], options: argparse.Namespace) -> list[Regrets]:
    """Replay plans of all chosen pairs of which everything is recorded."""
    oracle, found = Oracle.read(options.out), []
    seeds = draws(options.draws, random.Random(0))
    with tempfile.TemporaryDirectory(prefix="orchestra-race-") as place:
        for pair in chosen:
            candidates = candidates_of(pair, Path(place) / str(pair.number))
            if not oracle.knows(pair, candidates):
                print(f"not recorded: {pair.title}", file=sys.stderr)
                continue
            known = Known.of(pair, oracle, candidates)
            found.append(regrets_of(known, raced, seeds, options.budget, options.processes))
    if not found:
        raise InputError(
            f"--out {options.out}: no pair is recorded there; python -m benchmarks.race record "
            f"--out {options.out}"
        )
    return found


def markdown(found: Sequence[Regrets]) -> str:
    """Return a line for each pair, and the regrets of all plans and of each rule."""
    rules = list(found[0].rules)
    lines = [
        "| pair | best | nodes | median | 95 % | worst | seconds | "
        + " | ".join(rules) + " |",
        "| --- " * (7 + len(rules)) + "|",
    ]  # fmt: skip
    for each in found:
        numbers = [percent(quantile(each.regrets, part)) for part in (0.5, 0.95, 1.0)]
        seconds = f"{quantile(each.seconds, 0.5):.0f}"
        cells = [each.pair.title, each.best.name, str(len(each.best.nodes)), *numbers, seconds]
        lines.append("| " + " | ".join([*cells, *map(percent, each.rules.values())]) + " |")
    lines += ["", "| | plans | median | 95 % | worst |", "| --- | --- | --- | --- | --- |"]
    groups = {
        "all pairs": found,
        "several nodes win": [each for each in found if len(each.best.nodes) > 1],
        "one node wins": [each for each in found if len(each.best.nodes) == 1],
    }
    for group, some in groups.items():
        rows = {group: [regret for each in some for regret in each.regrets]}
        rows |= {f"{group}, always {rule}": [each.rules[rule] for each in some] for rule in rules}
        for name, values in rows.items():
            if values:
                numbers = [percent(quantile(values, part)) for part in (0.5, 0.95, 1.0)]
                lines.append(f"| {name} | {len(values)} | " + " | ".join(numbers) + " |")
    overrun = max(seconds for each in found for seconds in each.overruns)
    lines += ["", f"The budget was overrun by {overrun:.1f} s at most."]
    return "\n".join(lines)


def percent(value: float) -> str:
    """Return a regret as a percentage."""
    return "target missed" if math.isinf(value) else f"{100 * value:.1f} %"


if __name__ == "__main__":
    sys.exit(main())

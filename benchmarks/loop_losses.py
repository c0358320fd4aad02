"""Losses of ranks in a loop of the user's own, at random operations.

A trial is the script `tests/support/elastic_loop.py` on two to four ranks under all-reduce, of
which one, but not the first, is killed. Where it had begun to train, all others have to end well,
with equal models after each epoch.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import warm
from tests.support.elastic_ranks import ranks, written

from benchmarks.options import bench_parser, read_options, write_figures
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line

EPOCHS = 3
MOST = {"gradient": 20, "collective": 80, "wait": 120, "send": 100, "receive": 100}
"""Of each kind of operation, the numbers from which that of the kill is drawn."""
DESCRIPTION = """\
Kill one rank of a small loop of its own, at a random operation, again and again, and check that the
others end with equal models. A number names a trial of a seed.
"""


@dataclass(frozen=True)
class Trial:
    """What was disturbed, and what came of it."""

    number: int
    ranks: int
    fault: str
    shared_memory: bool
    went_on: bool  # else the rank was lost before training, or never came to the operation
    problem: str

    @staticmethod
    def of(seed: int, number: int) -> Trial:
        """Carry out trial `number` of the campaign `seed`."""
        draw = random.Random(f"{seed} {number}")
        at, count, shared = draw.choice(sorted(MOST)), draw.choice((2, 3, 4)), draw.random() < 0.5
        victim, nth = draw.randrange(1, count), draw.randint(1, MOST[at])
        fault = f'Inject("kill", rank={victim}, at="{at}", number={nth})'
        variables = {"ORCHESTRA_INJECT": fault, "ORCHESTRA_SHARED_MEMORY": str(int(shared))}
        variables.update(warm.variables())
        with tempfile.TemporaryDirectory(prefix="orchestra-losses-") as name:
            folder = Path(name)
            with ranks(folder, count, EPOCHS, **variables) as started:
                ended = [each.end() for each in started]
            left = [rank for rank in range(count) if rank != victim]
            statuses = {ended[rank].status for rank in left}
            went_on = any("going on with" in each.err for each in ended)
            problem = ""
            if len(statuses) > 1 or (went_on and statuses != {0}):
                problem = f"exit statuses {[each.status for each in ended]}: {ended[0].err}"
            elif went_on:
                ends = [written(folder, rank)[1] for rank in left]
                if [each[0] for each in ends[0]] != list(range(EPOCHS)):
                    problem = f"epochs {[each[0] for each in ends[0]]}"
                elif any(other != ends[0] for other in ends):
                    problem = "the models differ"
        return Trial(number, count, fault, shared, went_on, problem)


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("python -m benchmarks.loop_losses", DESCRIPTION)
    parser.option("--count", "N", "trials (default: 50)", type=int, default=50)
    parser.option("--seed", "S", "of the campaign (default: 0)", type=int, default=0)
    options = read_options(parser, arguments)
    trials: list[Trial] = []
    with progress_line() as tell:
        for number in range(options.count):
            trials.append(Trial.of(options.seed, number))
            if problem := trials[-1].problem:
                print(f"{number} {trials[-1].fault}: {problem}", flush=True)
            tell(f"trial {number}", (number + 1) / options.count)
    went_on, broken = (sum(bool(getattr(t, n)) for t in trials) for n in ("went_on", "problem"))
    print(f"{len(trials)} trials; in {went_on} the others went on; {broken} broke a promise")
    write_figures(options.json, "loop_losses", trials)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(guarded(main))

"""Which refinements pay: docs/results/fidelity.md, "What each refinement is worth".

    sudo python -m studies.refinements record runs/refinements
    python -m studies.refinements predict runs/refinements

The first calibrates this machine and makes the real runs, once: on the emulated clusters of
`python -m benchmarks.fidelity` and on one host (Linux, root; 40 minutes on a quiet machine). The
second predicts each run again without one refinement at a time, and prints how many percentage
points of the error the refinement saves. Predictions are exact: the same folder gives the same
table.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

from benchmarks.fidelity.cases import CONTROLS, TASKS, Case, cases, write_clusters
from benchmarks.fidelity.runs import bench_fidelity, step_seconds

from orchestra.calibration import calibrate
from orchestra.cli.main import guarded
from orchestra.cli.parser import Parser
from orchestra.cli.terminal import print_table, progress_line
from orchestra.cluster.calibration import read_calibration
from orchestra.cluster.nodes import Overhead, Sharing
from orchestra.engines.simulation import training, world
from orchestra.engines.simulation.stream import Route
from orchestra.errors import InputError
from orchestra.worker.runtime import SilentReporter

SMALL = (
    "ring", "halving_doubling", "tree", "parallel", "sharded", "server", "asynchronous",
    "asynchronous beside", "bounded", "local SGD", "gossip", "push-sum", "pairwise",
)  # fmt: skip
LARGE = ("asynchronous", "gossip", "push-sum", "late push-sum", "pairwise")


@dataclass(frozen=True)
class RunGroup:
    """Runs that share a calibration, on emulated `clusters` or, without any, on one host."""

    task: str
    labels: Sequence[str]
    clusters: Sequence[str] = ()

    @property
    def file(self) -> str:
        place = "emulated" if self.clusters else "one-host"
        return f"{place}-{self.task}"

    def cases(self, folder: Path) -> list[Case]:
        """Return the cases of the group; cluster files lie in `folder`."""
        files = write_clusters(folder)
        on: Sequence[Path | None] = [files[name] for name in self.clusters] or [None]
        return cases(self.labels, [TASKS[self.task]], None if self.clusters else (2, 4), on)


GROUPS = (
    RunGroup("cnn", SMALL, ("equal", "slow-node", "slow-link", "racks")),
    RunGroup("mlp", LARGE, ("equal",)),  # messages of 4.4 MB, which no kernel buffers
    RunGroup("cnn", SMALL),
)
ROW_POINTS, MEAN_POINTS = 0.05, 0.005
"""What a refinement has to bring: so much on some row, or in the mean of all absolute errors."""
NO_LIMIT = 1e15


@dataclass(frozen=True)
class Recorded:
    """A real run: its case, and the median of its rounds."""

    ranks: int
    cluster: str
    label: str
    steps: int
    real_seconds: float

    def __str__(self) -> str:
        return f"{self.label}, {self.cluster or f'one host, {self.ranks} ranks'}"


Charges = Callable[[Overhead, Sharing], tuple[Overhead, Sharing]]


def _tcp(**changes: float) -> Charges:
    return lambda overhead, sharing: (
        replace(overhead, tcp=replace(overhead.tcp, **changes)),
        sharing,
    )


def _sharing(**changes: float | None) -> Charges:
    return lambda overhead, sharing: (overhead, replace(sharing, **changes))


def _overhead(**changes: float) -> Charges:
    return lambda overhead, sharing: (replace(overhead, **changes), sharing)


@contextmanager
def _charged(change: Charges) -> Iterator[None]:
    """Simulate with other costs."""
    usual = training._charges

    def changed(run: object, source: object) -> object:
        costs, overhead, sharing, jitter = usual(run, source)  # type: ignore[arg-type]
        return costs, *change(overhead, sharing), jitter

    with mock.patch.object(training, "_charges", changed):
        yield


@contextmanager
def _even_weights() -> Iterator[None]:
    usual = world.World._route

    def route(self: world.World, source: int, target: int) -> Route:
        return replace(usual(self, source, target), weight=1.0)

    with mock.patch.object(world.World, "_route", route):
        yield


REFINEMENTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "largest window": lambda: _charged(_tcp(window=NO_LIMIT)),
    "slow start": lambda: _charged(_tcp(first_window=NO_LIMIT)),
    "unlike shares": lambda: _charged(_tcp(unfairness=0.0)),
    "weights by latency": _even_weights,
    "acknowledgements": lambda: _charged(_tcp(acknowledgements=0.0)),
    "time slices": lambda: _charged(_sharing(time_slice=None)),
    "refilled caches": lambda: _charged(_sharing(refill=0.0)),
    "cold caches": lambda: _charged(_overhead(cold=0.0)),
    "handling": lambda: _charged(_overhead(handling=0.0)),
}
"""Each leaves one out."""


def record(folder: Path, rounds: int) -> None:
    """Calibrate and run each group that `folder` does not hold; keep both there."""
    folder.mkdir(parents=True, exist_ok=True)
    for group in GROUPS:
        rows_file, calibration = _files(folder, group)
        if rows_file.exists():
            continue
        chosen = group.cases(folder)
        subjects = {case.subject.task: case.subject for case in chosen}
        with progress_line() as tell:
            works = [*subjects.values()]
            measured = calibrate(works, 0.4, tell, emulated=chosen[0].cluster)
            calibration.write_text(measured.to_json())
            rows, _ = bench_fidelity(chosen, rounds, calibration=calibration, on_progress=tell)
        found = [
            Recorded(row.ranks, row.cluster, row.label, row.steps, row.real_seconds) for row in rows
        ]
        rows_file.write_text(json.dumps([asdict(row) for row in found], indent=2))


def _files(folder: Path, group: RunGroup) -> tuple[Path, Path]:
    return folder / f"{group.file}.json", folder / f"{group.file}-calibration.json"


def _recorded(folder: Path, group: RunGroup) -> list[Recorded]:
    try:
        rows = json.loads(_files(folder, group)[0].read_text())
    except FileNotFoundError:
        raise InputError(f"{folder}: {group.file} is not recorded; record it first") from None
    found = (Recorded(**row) for row in rows)
    return [row for row in found if row.label not in CONTROLS]


def predict(folder: Path) -> None:
    """Print for each group what each refinement is worth."""
    rows = {group: _recorded(folder, group) for group in GROUPS}
    jobs = [(folder, group, name) for group in GROUPS for name in ("", *REFINEMENTS)]
    with progress_line() as tell, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        predictions = []
        for number, found in enumerate(pool.map(_predicted, jobs), start=1):
            predictions.append(found)
            tell("predicting", number / len(jobs))
    for number, group in enumerate(GROUPS):
        begin = number * (1 + len(REFINEMENTS))
        _print(group, rows[group], predictions[begin : begin + 1 + len(REFINEMENTS)])


def _print(
    group: RunGroup, rows: Sequence[Recorded], predictions: Sequence[Sequence[float]]
) -> None:
    usual, *others = (_errors(seconds, rows) for seconds in predictions)
    lines = []
    for name, errors in zip(REFINEMENTS, others, strict=True):
        gains = [other - own for own, other in zip(usual, errors, strict=True)]
        best, worst = (each(range(len(rows)), key=gains.__getitem__) for each in (max, min))
        shown = (
            f"{gains[n]:+.1%}, {rows[n]}" if abs(gains[n]) > 5e-4 else "" for n in (best, worst)
        )
        mean = statistics.fmean(gains)
        pays = gains[best] >= ROW_POINTS or mean >= MEAN_POINTS
        moved = sum(abs(gain) >= 1e-3 for gain in gains)
        lines.append((name, f"{mean:+.2%}", *shown, str(moved), "pays" if pays else ""))
    title = (
        f"{group.file}: errors of {statistics.fmean(usual):.2%} in the mean, "
        f"{statistics.median(usual):.2%} in the median, {max(usual):.1%} at worst"
    )
    headings = ("refinement", "mean gain", "largest gain", "largest loss", "rows moved", "")
    print_table(title, headings, lines)


def _predicted(job: tuple[Path, RunGroup, str]) -> list[float]:
    folder, group, name = job
    by_name = {(case.ranks, case.block[2], case.label): case for case in group.cases(folder)}
    calibration = _files(folder, group)[1]
    machine = read_calibration(calibration).cluster
    found = []
    with REFINEMENTS[name]() if name else nullcontext():
        for row in _recorded(folder, group):
            case = replace(by_name[row.ranks, row.cluster, row.label], steps=row.steps)
            run = case.simulated(machine, str(calibration))
            with tempfile.TemporaryDirectory() as own:
                assignment = training.assigned(run, Path(own))
                training.carried_out(assignment, SilentReporter()).check()
                found.append(step_seconds(run, Path(own)))
    return found


def _errors(seconds: Sequence[float], rows: Sequence[Recorded]) -> list[float]:
    return [abs(one / row.real_seconds - 1) for one, row in zip(seconds, rows, strict=True)]


def main(arguments: list[str]) -> int:
    """Record or predict."""
    parser = Parser("refinements", __doc__ or "")
    parser.prog = "python -m studies.refinements"
    parser.add_argument("what", choices=("record", "predict"))
    parser.add_argument("folder", type=Path)
    parser.option("--rounds", "N", "of real runs (default: 2)", type=int, default=2)
    options = parser.read(arguments)
    if options.what == "record":
        record(options.folder, options.rounds)
    else:
        predict(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))

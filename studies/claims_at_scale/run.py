"""Published claims with 8 and 32 workers, simulated with real gradients.

    python -m studies.claims_at_scale.run --out runs/claims-at-scale --jobs 2

Makes what studies.yaml describes, on equal machines (lan), on machines of which a quarter is slow
(stragglers), and with slow links as well (unlike), and prints the tables of
docs/results/claims-at-scale.md. Each row has its settings chosen for each number of workers, on the
first cluster of the study. Gradients of a row whose parameters do not depend on time are computed
there only, and re-timed for another.

Ctrl-C stops it; the same command goes on. --tables prints the tables of what is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from studies.claims_at_scale.claims import print_tables
from studies.claims_at_scale.search import at_edge, search
from studies.pool import Job, Pool

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.file import cluster_text
from orchestra.cluster.nodes import DEFAULT, Line, Link, Overhead
from orchestra.errors import InputError
from orchestra.experiments.experiment import (
    RATE,
    Experiment,
    TuningTrial,
    on_ranks,
    runs,
    trials,
    write_tuning,
)
from orchestra.experiments.file import load
from orchestra.experiments.run import claim
from orchestra.records.files import run_folder, write_atomically
from orchestra.records.record import RunRecord
from orchestra.records.store import write_summary
from orchestra.settings.reading import Entry, read_document
from orchestra.trainer.settings import Run

FILE = Path(__file__).parent / "studies.yaml"
CLUSTERS = {
    "lan": "lan_1gbit({0}, cores=1, speed={1})",
    "stragglers": "stragglers({0}, cores=1, speed={1})",
    "unlike": "stragglers({0}, cores=1, speed={1}, bandwidth='100 Mbit/s')",
}
TRIAL_SEEDS = 3
"""Of each trial, from that of the tuning on. With one, a row can be given settings at the edge of
divergence, with which that seed went well and all others fail."""
SIZES = (8, 32)  # the file is written for the first
ONE_WORKER = "one_worker"
OF_ONE = "same_rate"  # the study whose optimizer is that chosen for `ONE_WORKER`

SPEED = 0.05
"""Of a worker's core: a gradient of eight images takes 18 ms, as that of a model with twenty times
the operations would. At full speed everything would measure the server's cable."""
SERVER_LINK = Link(1.25e9, 50e-6)
MESSAGE = Line(20e-6, 0.2e-9)
"""Processor seconds at each end of a message, on every node: those that are assumed at speed 1."""
Chosen = Mapping[str, tuple[Run, Mapping[str, Any]]]


def _studies() -> dict[str, tuple[Experiment, list[str]]]:
    """By name, the experiment with `SIZES[0]` workers, and its clusters."""
    document = read_document(FILE, needs="common", example="common: {}")
    common = _entries(document.pop("common"))
    found = {}
    for name, own in document.items():
        entries = common | _entries(own) | {"name": Entry(name, own.where)}
        clusters = entries.pop("clusters").value
        found[name] = load(None, given=entries), clusters
    return found


def _entries(mapping: Entry) -> dict[str, Entry]:
    return {
        key: mapping.inside.get(key, Entry(value, mapping.where))
        for key, value in mapping.value.items()
    }


STUDIES = _studies()


def cluster_of(kind: str, workers: int) -> Cluster:
    """Machines for `workers`, and one for a server, which is not to be the bottleneck."""
    machines = load_cluster(CLUSTERS[kind].format(workers, SPEED), where=kind, folder=Path())
    server = replace(
        machines.nodes[0],
        name="server",
        speed=1.0,
        jitter=DEFAULT,
        up=SERVER_LINK,
        down=SERVER_LINK,
    )
    cost = Line(MESSAGE.fixed * SPEED, MESSAGE.each * SPEED)
    overhead = Overhead(
        cost, cost, MESSAGE.each * SPEED, 1 << 17, 1538 / 1448, local=Line(0.0, 0.0)
    )
    return replace(
        machines, name=f"{kind}-{workers}", nodes=(*machines.nodes, server), overhead=overhead
    )


class Scale:
    """All studies with so many workers."""

    def __init__(self, out: Path, workers: int) -> None:
        self.out, self.workers = out, workers
        self.folders = {kind: out / f"{workers}-{kind}" for kind in CLUSTERS}

    def experiment(self, study: str, kind: str) -> Experiment:
        """The experiment of a study on a cluster for these workers."""
        written, _ = STUDIES[study]
        (ranks,) = written.ranks
        if study != ONE_WORKER:
            ranks += self.workers - SIZES[0]
        training = replace(written.training, ranks=ranks, cluster=str(self._cluster(kind)))
        return replace(written, ranks=(ranks,), training=training)

    def _cluster(self, kind: str) -> Path:
        path = (self.out / "clusters" / f"{kind}-{self.workers}.yaml").resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, cluster_text(cluster_of(kind, self.workers)))
        return path

    def size(self, study: str) -> int:
        """How many runs there are, the trials of the grid included."""
        first, *_ = kinds = STUDIES[study][1]
        experiment = self.experiment(study, first)
        return TRIAL_SEEDS * len(trials(experiment)) + len(kinds) * len(runs(experiment))

    def carry_out(self, study: str, pool: Pool) -> None:
        """The trials on the first cluster, and the runs on each one."""
        chosen = self._tuned(study, pool)
        for kind in STUDIES[study][1]:
            experiment, folder = self.experiment(study, kind), self.folders[kind] / study
            claim(folder, experiment)
            records = pool.make(list(self._jobs(experiment, folder, kind, chosen)))
            write_summary(folder, experiment.name, records)

    def _tuned(self, study: str, pool: Pool) -> Chosen:
        """By label, a run with what its trials chose, and that."""
        kind = STUDIES[study][1][0]
        experiment, folder = self.experiment(study, kind), self.folders[kind] / study
        claim(folder, experiment)
        if study == OF_ONE:
            experiment = self._like_one(experiment, pool)
        tune, grid = experiment.tune, trials(experiment)
        assert tune is not None

        def make(some: Sequence[TuningTrial]) -> list[tuple[TuningTrial, RunRecord]]:
            jobs = [job for trial in some for job in _of_trial(trial, experiment, folder)]
            if some is not grid:
                pool.expect(jobs)
            records = iter(pool.make(jobs))
            return [(trial, _mean([*islice(records, TRIAL_SEEDS)])) for trial in some]

        choices = search(tune, experiment.training, grid, make)
        write_tuning(folder, tune, experiment.training, choices)
        for choice in choices.values():
            if choice.best is None or at_edge(choice):
                row = on_ranks(choice.outcomes[0][0].run)
                print(f"{folder}: {row}: no best settings inside the grid", file=sys.stderr)
        best = {label: choice.best for (label, _), choice in choices.items()}
        return {label: (it.run, it.settings) for label, it in best.items() if it}

    def _like_one(self, experiment: Experiment, pool: Pool) -> Experiment:
        """`experiment` with the optimizer, rate and all, that was chosen for one worker."""
        ((run, _),) = Scale(self.out, 1)._tuned(ONE_WORKER, pool).values()
        optimizer, tune = run.training.optimizer, experiment.tune
        assert tune is not None
        settings = {**tune.settings, RATE: (optimizer.arguments["lr"],)}
        training = replace(experiment.training, optimizer=optimizer)
        return replace(experiment, tune=replace(tune, settings=settings), training=training)

    def _jobs(
        self, experiment: Experiment, folder: Path, kind: str, chosen: Chosen
    ) -> Iterator[Job]:
        first = STUDIES[experiment.name][1][0]
        for run in runs(experiment):
            if run.name not in chosen:
                continue
            best, settings = chosen[run.name]
            training = replace(best.training, cluster=experiment.training.cluster)
            made = replace(run, training=training, strategy=best.strategy)
            place = run_folder(folder, run.name, run.training.ranks, run.seed)
            source = None
            if kind != first and not made.strategy.traits().depends_on_speed:
                source = self.folders[first] / place.relative_to(self.folders[kind])
            what = f"{folder.parent.name}, {folder.name}: {run.name}, seed {run.seed}"
            yield Job(made, experiment, place, what, settings, source)


def _of_trial(trial: TuningTrial, experiment: Experiment, folder: Path) -> Iterator[Job]:
    """Its runs, of which only the last parameters are judged."""
    run = replace(trial.run, training=replace(trial.run.training, snapshots=0))
    first = trial.folder(folder)
    for seed in range(run.seed, run.seed + TRIAL_SEEDS):
        place = first if seed == run.seed else first.with_name(f"{first.name}-seed-{seed}")
        what = f"{folder.parent.name}, {folder.name}, {trial}, seed {seed}"
        yield Job(replace(run, seed=seed), experiment, place, what)


def _mean(records: Sequence[RunRecord]) -> RunRecord:
    """One record with the mean accuracy and loss; that of a failed run if there is one."""
    for record in records:
        if record.ending.status != "completed":
            return record
    accuracy = fmean(record.learned.metrics["accuracy"] for record in records)
    losses = [record.learned.loss for record in records if record.learned.loss is not None]
    learned = replace(records[0].learned, metrics={"accuracy": accuracy}, loss=fmean(losses))
    return replace(records[0], learned=learned)


def _parts(out: Path, studies: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, Scale]]:
    """One worker first, then all studies with each size."""
    if ONE_WORKER in studies:
        yield ONE_WORKER, Scale(out, 1)
    for workers in sizes:
        yield from ((study, Scale(out, workers)) for study in studies if study != ONE_WORKER)


def main() -> None:
    """Make what is missing, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/claims-at-scale"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each takes one core")
    parser.add_argument("--workers", type=int, nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--tables", action="store_true", help="run nothing")
    given = parser.parse_args()
    parts = list(_parts(given.out, given.studies, given.workers))
    if not given.tables:
        try:
            with Pool(given.jobs, sum(scale.size(study) for study, scale in parts)) as pool:
                for study, scale in parts:
                    scale.carry_out(study, pool)
        except KeyboardInterrupt:
            sys.exit("stopped; the same command goes on")
        except InputError as error:
            sys.exit(str(error))
    alone = Scale(given.out, 1).folders["lan"]
    print_tables({workers: Scale(given.out, workers).folders for workers in given.workers}, alone)


if __name__ == "__main__":
    main()

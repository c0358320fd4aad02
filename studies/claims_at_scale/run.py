"""The claims of docs/claims.md with 8 and 32 workers, simulated with real gradients.

    python -m studies.claims_at_scale.run --out runs/claims-at-scale --jobs 2

Runs the experiments of this folder, each with 8 and with 32 workers, on equal machines (lan) and on
machines of which a quarter is slow (stragglers), and prints the tables of docs/claims-at-scale.md.
Every row has its learning rate chosen once for each number of workers, on lan. Gradients of a row
whose parameters do not depend on time are computed on lan only, and re-timed for stragglers.

Ctrl-C stops it; the same command goes on. --tables prints the tables of what is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from studies.claims_at_scale.claims import print_tables
from studies.pool import Job, Pool

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.costs import Line, Overhead
from orchestra.cluster.jitter import DEFAULT
from orchestra.cluster.nodes import Link
from orchestra.cluster.writing import cluster_text
from orchestra.errors import InputError
from orchestra.experiments import Experiment, claim, load, runs
from orchestra.experiments.tuning import choose, trials, write_tuning
from orchestra.records.layout import run_folder
from orchestra.records.record import write_atomically, write_summary
from orchestra.trainer.settings import Run, Training

HERE = Path(__file__).parent
STUDIES = (
    "one_worker",
    "asynchronous",
    "same_rate",
    "push_sum",
    "rounds",
    "outer_nesterov",
    "switch_order",
    "switch_local",
    "plain_sgd",
    "switch_quarter",
)
BESIDE = ("switch_local", "plain_sgd", "switch_quarter")
LAN, STRAGGLERS = "lan", "stragglers"
CLUSTERS = {LAN: "lan_1gbit({0}, speed={1})", STRAGGLERS: "stragglers({0}, speed={1})"}
SIZES = (8, 32)  # the files are written for the first
ONE_WORKER = "one_worker"
RATE_OF_ONE = "same_rate"  # the experiment that takes its rate from `ONE_WORKER`

SPEED = 0.05
"""Of a worker's core: a gradient of eight images takes 18 ms, as that of a model with twenty times
the operations would. At full speed everything would measure the server's cable."""
SERVER_LINK = Link(1.25e9, 50e-6)
MESSAGE = Line(20e-6, 0.2e-9)
"""Processor seconds at each end of a message, on every node: those that are assumed at speed 1."""


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
        """The experiment of the file `study` on a cluster for these workers."""
        written = load(HERE / f"{study}.yaml")
        (ranks,) = written.ranks
        if study != ONE_WORKER:
            ranks += self.workers - SIZES[0]
        cluster = str(self._cluster(kind))
        training = replace(written.training, ranks=ranks, cluster=cluster)
        return replace(written, ranks=(ranks,), training=training)

    def _cluster(self, kind: str) -> Path:
        path = (self.out / "clusters" / f"{kind}-{self.workers}.yaml").resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, cluster_text(cluster_of(kind, self.workers)))
        return path

    def kinds(self, study: str) -> list[str]:
        """One worker is never stale, whatever the machines."""
        return [LAN] if study == ONE_WORKER else list(CLUSTERS)

    def size(self, study: str) -> int:
        """How many runs there are, trials included."""
        experiment = self.experiment(study, LAN)
        return len(trials(experiment)) + len(self.kinds(study)) * len(runs(experiment))

    def carry_out(self, study: str, pool: Pool) -> None:
        """The trials on lan, and the runs on each cluster."""
        chosen = self._tuned(study, pool)
        for kind in self.kinds(study):
            self._run(study, kind, chosen, pool)

    def _tuned(self, study: str, pool: Pool) -> Mapping[str, tuple[Training, Mapping[str, Any]]]:
        """By label, the training with what its trials chose, and that."""
        experiment = self.experiment(study, LAN)
        if study == RATE_OF_ONE:
            found = Scale(self.out, 1)._tuned(ONE_WORKER, pool)
            (rate,) = [tuned["optimizer.lr"] for _, tuned in found.values()]
            optimizer = experiment.training.optimizer.with_setting("lr", rate)
            training = replace(experiment.training, optimizer=optimizer)
            return dict.fromkeys(experiment.strategies, (training, {"optimizer.lr": rate}))
        assert experiment.tune is not None
        folder = self.folders[LAN] / study
        claim(folder, experiment)
        there = trials(experiment)
        jobs = [
            Job(self._trial(it.run), experiment, it.folder(folder), f"{folder.name}, {it}")
            for it in there
        ]
        outcomes = list(zip(there, pool.make(jobs), strict=True))
        choices = choose(experiment.tune, experiment.training, outcomes)
        write_tuning(folder, experiment.tune, experiment.training, choices)
        best = {label: choice.best for (label, _), choice in choices.items()}
        return {label: (it.run.training, it.settings) for label, it in best.items() if it}

    def _trial(self, run: Run) -> Run:
        """Only its last parameters are judged."""
        return replace(run, training=replace(run.training, snapshots=0))

    def _run(
        self,
        study: str,
        kind: str,
        chosen: Mapping[str, tuple[Training, Mapping[str, Any]]],
        pool: Pool,
    ) -> None:
        experiment, folder = self.experiment(study, kind), self.folders[kind] / study
        claim(folder, experiment)
        records = pool.make(list(self._jobs(experiment, folder, kind, chosen)))
        write_summary(folder, experiment.name, records)

    def _jobs(
        self,
        experiment: Experiment,
        folder: Path,
        kind: str,
        chosen: Mapping[str, tuple[Training, Mapping[str, Any]]],
    ) -> Iterator[Job]:
        for run in runs(experiment):
            if run.name not in chosen:
                continue
            training, tuned = chosen[run.name]
            training = replace(training, cluster=experiment.training.cluster)
            source = None
            if kind != LAN and not run.strategy.depends_on_speed:
                lan = self.folders[LAN] / experiment.name
                source = run_folder(lan, run.name, run.training.ranks, run.seed)
            place = run_folder(folder, run.name, run.training.ranks, run.seed)
            what = f"{folder.parent.name}, {folder.name}: {run.name}, seed {run.seed}"
            yield Job(replace(run, training=training), experiment, place, what, tuned, source)


def _parts(out: Path, studies: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, Scale]]:
    """What matters most first: the claims themselves with each size, then what is beside them."""
    if ONE_WORKER in studies:
        yield ONE_WORKER, Scale(out, 1)
    for beside in (False, True):
        for workers in sizes:
            for study in studies:
                if study != ONE_WORKER and (study in BESIDE) == beside:
                    yield study, Scale(out, workers)


def main() -> None:
    """Make what is missing, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/claims-at-scale"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each takes one core")
    parser.add_argument("--workers", type=int, nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES)
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
    alone = Scale(given.out, 1).folders[LAN]
    print_tables({workers: Scale(given.out, workers).folders for workers in given.workers}, alone)


if __name__ == "__main__":
    main()

"""The study of claims with more workers: its file, clusters and search, and that it goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.claims_at_scale import run as study
from studies.claims_at_scale import warmed
from studies.claims_at_scale.claims import claims_of, print_tables
from studies.claims_at_scale.run import CLUSTERS, SIZES, STUDIES, Scale
from studies.claims_at_scale.search import ROUNDS, Outcomes, at_edge, search
from studies.claims_at_scale.verdicts import SECONDS
from studies.pool import Job, Pool, make
from tests.support.recorded import recorded

from orchestra.experiments.experiment import Choice, Experiment, Tune, TuningTrial, trials
from orchestra.experiments.file import load
from orchestra.records.record import RunRecord
from orchestra.records.store import finished
from orchestra.strategies.base import refusal_of


def test_every_study_has_ten_seeds_in_the_simulation_and_tuned_rates() -> None:
    for experiment, clusters in STUDIES.values():
        assert len(set(experiment.seeds)) == 10
        assert experiment.tune is not None
        assert experiment.training.engine == "simulation"
        assert experiment.training.calibration == "none"
        assert clusters
        assert set(clusters) <= set(CLUSTERS)


@pytest.mark.parametrize("workers", SIZES)
def test_every_difference_is_of_two_rows_that_are_run(workers: int, tmp_path: Path) -> None:
    for claim in claims_of(workers):
        for pair in claim.pairs:
            for name, label, ranks in (pair.ours, pair.theirs):
                scale = Scale(tmp_path, 1 if name == study.ONE_WORKER else workers)
                experiment = scale.experiment(name, STUDIES[name][1][0])
                assert experiment.ranks == (ranks,)
                assert refusal_of(experiment.strategies[label], ranks) is None
                assert claim.figure != SECONDS or experiment.training.snapshots
    assert {claim.comparison for claim in claims_of(workers)} == STUDIES.keys()


@pytest.mark.parametrize("kind", CLUSTERS)
def test_the_last_of_all_ranks_is_on_the_server_and_a_quarter_of_the_others_slow(kind: str) -> None:
    *workers, server = study.cluster_of(kind, 8).nodes_of(9)
    assert (server.name, server.speed) == ("server", 1.0)
    slow = [node for node in workers if node.speed != study.SPEED]
    assert len(slow) == (0 if kind == "lan" else 2)
    bandwidths = {node.up.bandwidth for node in workers if node.up is not None}
    assert bandwidths == {12.5e6 if kind == "unlike" else 125e6}


def test_a_run_from_a_warmed_start_is_past_the_plateau_and_every_rank_has_the_same() -> None:
    task = warmed.digits()
    generator = torch.get_rng_state()
    first = task.model()
    torch.set_rng_state(generator)
    again = task.model()
    for ours, theirs in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert task.metrics is not None
    assert task.test is not None
    assert task.collate is not None
    batch = task.collate(task.test.__getitems__(list(range(300))))  # type: ignore[attr-defined]
    with torch.no_grad():
        assert task.metrics(first.eval(), iter([batch]))["accuracy"] > 0.8
    with torch.device("meta"):
        assert next(task.model().parameters()).is_meta


def searched(
    best: Mapping[str, float], **settings: list[float]
) -> tuple[Choice, list[TuningTrial]]:
    """The search of one row whose accuracy falls with the distance from `best`."""
    written, _ = STUDIES["outer_nesterov"]
    grid = {"optimizer.lr": [0.01], **{key.replace("_", "."): v for key, v in settings.items()}}
    tune = Tune({key: tuple(values) for key, values in grid.items()})
    strategies = {"row": written.strategies["outer Nesterov"]}
    made: list[TuningTrial] = []

    def make(some: Sequence[TuningTrial]) -> Outcomes:
        made.extend(some)
        return [(trial, judged(trial, best)) for trial in some]

    experiment = replace(written, strategies=strategies, tune=tune)
    choices = search(tune, experiment.training, trials(experiment), make)
    (choice,) = choices.values()
    return choice, made


def judged(trial: TuningTrial, best: Mapping[str, float]) -> RunRecord:
    far = sum(abs(math.log(trial.settings[key] / at)) for key, at in best.items())
    return recorded(
        "row", "", "simulation", 8, 8, 0, 1000, "completed", final_loss=far,
        metrics={"accuracy": 0.5 + 0.5 / (1 + far)},
    )  # fmt: skip


def test_a_grid_whose_best_is_at_an_edge_is_extended_until_it_is_inside() -> None:
    choice, made = searched({"optimizer.lr": 0.3}, optimizer_lr=[0.01, 0.03])
    assert choice.best is not None
    assert [trial.settings["optimizer.lr"] for trial in made] == [0.01, 0.03, 0.09, 0.27, 0.81]
    assert choice.best.settings == {"optimizer.lr": 0.27}
    assert choice.best.run.training.optimizer.arguments["lr"] == 0.27
    assert not at_edge(choice)
    assert [trial.number for trial in made] == list(range(5))


def test_a_grid_in_which_nothing_learns_is_extended_to_lower_rates() -> None:
    choice, made = searched({"optimizer.lr": 1e-3}, optimizer_lr=[0.1, 0.3])
    assert [trial.settings["optimizer.lr"] for trial in made[:4]] == [0.1, 0.3, 0.0333, 0.0111]
    assert choice.best is not None
    assert choice.best.settings["optimizer.lr"] < 0.002


def test_a_search_without_end_is_ended_and_says_so() -> None:
    choice, made = searched({"optimizer.lr": 1e-12}, optimizer_lr=[0.01, 0.1])
    assert len(made) == 2 + ROUNDS
    assert at_edge(choice)


def test_all_settings_have_neighbours_and_momentum_goes_towards_one() -> None:
    best = {"optimizer.lr": 0.3, "strategy.outer.momentum": 0.97}
    choice, made = searched(
        best, optimizer_lr=[0.1, 0.3, 0.9], **{"strategy.outer.momentum": [0.5, 0.9]}
    )
    assert choice.best is not None
    assert choice.best.settings == {"optimizer.lr": 0.3, "strategy.outer.momentum": 0.98}
    extended = [trial.settings["strategy.outer.momentum"] for trial in made[6:]]
    assert sorted(set(extended)) == [0.98, 0.996]
    assert repr(choice.best.run.strategy) == "LocalSGD(8, outer=Nesterov(0.7, 0.98))"


class InTurn(Pool):
    """A pool without processes of its own; `made` counts."""

    def __init__(self) -> None:
        self.made = self.total = 0
        self._done = set()

    def make(self, jobs: Sequence[Job]) -> list[RunRecord]:
        missing = [job for job in jobs if not finished(job.folder, failed=True)]
        self.made += len(missing)
        for job in missing:
            make(job)
        return [finished(job.folder, failed=True)[0] for job in jobs]


def small(experiment: Experiment) -> Experiment:
    """Half a minute's work in a second; no grid has an edge."""
    tune = experiment.tune
    if tune is not None:
        tune = replace(tune, settings={key: found[-1:] for key, found in tune.settings.items()})
    training = experiment.training.with_setting("steps", 4)
    return replace(experiment, seeds=(0,), tune=tune, training=training)


@pytest.mark.lab
def test_it_tunes_once_retimes_what_no_speed_changes_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Scale.experiment
    monkeypatch.setattr(Scale, "experiment", lambda *args: small(whole(*args)))
    one, scale, pool = Scale(tmp_path, 1), Scale(tmp_path, 8), InTurn()
    parts = [("one_worker", one), ("same_rate", scale), ("push_sum", scale)]
    for name, size in parts:
        size.carry_out(name, pool)
    assert pool.made == sum(size.size(name) for name, size in parts) == (3 + 1) + (9 + 3) + (6 + 4)
    (chosen,) = json.loads((tmp_path / "1-lan/one_worker/tuning.json").read_text())["choices"]
    lan, slow = (records_of(tmp_path / f"8-{kind}") for kind in ("lan", "stragglers"))
    rate = chosen["settings"]["optimizer.lr"]
    assert lan["same_rate", "rate kept"].asked.tuned == {"optimizer.lr": rate}
    place = tmp_path / "8-lan/same_rate/runs/compensated/9-ranks/seed-0/experiment.yaml"
    made = load(place)
    assert dict(made.training.optimizer.arguments) == {
        key.removeprefix("optimizer."): value for key, value in chosen["settings"].items()
    }
    assert "lambda0=8.0" in repr(made.strategies["compensated"])
    for label in ("all-reduce", "push"):
        ours, theirs = lan["push_sum", label], slow["push_sum", label]
        assert theirs.learned.parameters_sha256 == ours.learned.parameters_sha256
        assert theirs.asked.tuned == ours.asked.tuned != {}
        assert theirs.time.training is not None
        assert ours.time.training is not None
        assert theirs.time.training > 1.5 * ours.time.training
    again = InTurn()
    for name, size in parts:
        size.carry_out(name, again)
    assert again.made == 0
    print_tables({8: scale.folders}, one.folders["lan"])
    printed = capsys.readouterr().out
    assert printed.count("| push - all-reduce (n = ") == 2
    assert printed.count("| one worker - rate kept (n = ") == 1
    assert "### plain_sgd" not in printed
    assert (
        "compensated - asynchronous | 0.6 to 1.7 points with 4 and 8 workers | not run |" in printed
    )


def records_of(folder: Path) -> Mapping[tuple[str, str], RunRecord]:
    found: dict[Any, RunRecord] = {}
    for place in folder.iterdir():
        found |= {(place.name, record.asked.name): record for record in finished(place)}
    return found

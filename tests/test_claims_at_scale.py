"""The study of claims with more workers: its files, its cluster, and that it goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from studies.claims_at_scale import run as study
from studies.claims_at_scale.claims import claims_of, print_tables
from studies.claims_at_scale.run import CLUSTERS, LAN, SIZES, STRAGGLERS, Scale
from studies.pool import Job, Pool, make

from orchestra.experiments import Experiment, finished, load
from orchestra.experiments.experiment import refusal
from orchestra.records.record import RunRecord

FILES = sorted(study.HERE.glob("*.yaml"))


def test_every_file_is_run_with_five_seeds_in_the_simulation() -> None:
    assert {file.stem for file in FILES} == set(study.STUDIES)
    for file in FILES:
        experiment = load(file)
        assert len(set(experiment.seeds)) == 5
        assert (experiment.tune is None) == (file.stem == study.RATE_OF_ONE)
        assert experiment.training.engine == "simulation"
        assert experiment.training.calibration == "none"


@pytest.mark.parametrize("workers", SIZES)
def test_every_difference_is_of_two_rows_that_are_run(workers: int, tmp_path: Path) -> None:
    for claim in claims_of(workers):
        for pair in claim.pairs:
            for name, label, ranks in (pair.ours, pair.theirs):
                scale = Scale(tmp_path, 1 if name == study.ONE_WORKER else workers)
                experiment = scale.experiment(name, LAN)
                assert experiment.ranks == (ranks,)
                assert refusal(experiment.strategies[label], ranks) is None
                assert claim.figure == "accuracy" or experiment.training.snapshots
    assert {claim.comparison for claim in claims_of(workers)} == set(study.STUDIES)


@pytest.mark.parametrize("kind", CLUSTERS)
def test_the_last_of_all_ranks_is_on_the_server_and_a_quarter_of_the_others_slow(kind: str) -> None:
    *workers, server = study.cluster_of(kind, 8).nodes_of(9)
    assert (server.name, server.speed) == ("server", 1.0)
    slow = [node for node in workers if node.speed != study.SPEED]
    assert len(slow) == (2 if kind == STRAGGLERS else 0)


class InTurn(Pool):
    """A pool without processes of its own; `made` counts."""

    def __init__(self) -> None:
        self.made = 0

    def make(self, jobs: Sequence[Job]) -> list[RunRecord]:
        missing = [job for job in jobs if not finished(job.folder, failed=True)]
        self.made += len(missing)
        for job in missing:
            make(job)
        return [finished(job.folder, failed=True)[0] for job in jobs]


def small(experiment: Experiment) -> Experiment:
    """Half a minute's work in a second."""
    tune = experiment.tune
    if tune is not None:
        tune = replace(tune, settings={key: found[-2:] for key, found in tune.settings.items()})
    training = experiment.training.with_setting("steps", 4)
    return replace(experiment, task="digits()", seeds=(0,), tune=tune, training=training)


def test_it_tunes_once_retimes_what_no_speed_changes_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Scale.experiment
    monkeypatch.setattr(Scale, "experiment", lambda *args: small(whole(*args)))
    one, scale, pool = Scale(tmp_path, 1), Scale(tmp_path, 8), InTurn()
    parts = [("one_worker", one), ("same_rate", scale), ("push_sum", scale)]
    for name, size in parts:
        size.carry_out(name, pool)
    assert pool.made == sum(size.size(name) for name, size in parts) == (2 + 1) + 6 + (4 + 4)
    (chosen,) = json.loads((tmp_path / "1-lan/one_worker/tuning.json").read_text())["choices"]
    records = {kind: records_of(tmp_path / f"8-{kind}") for kind in CLUSTERS}
    for kind in CLUSTERS:
        assert records[kind]["same_rate", "rate kept"].tuned == chosen["settings"]
    for label in ("all-reduce", "push"):
        lan, slow = (records[kind]["push_sum", label] for kind in CLUSTERS)
        assert slow.parameters_sha256 == lan.parameters_sha256
        assert slow.tuned == lan.tuned != {}
        assert slow.train_seconds is not None
        assert lan.train_seconds is not None
        assert slow.train_seconds > 1.5 * lan.train_seconds
    kept = [records[kind]["same_rate", "rate kept"] for kind in CLUSTERS]
    assert kept[0].parameters_sha256 != kept[1].parameters_sha256
    again = InTurn()
    for name, size in parts:
        size.carry_out(name, again)
    assert again.made == 0
    print_tables({8: scale.folders}, one.folders[LAN])
    printed = capsys.readouterr().out
    assert printed.count("| push - all-reduce (n = 1) |") == 2
    assert printed.count("| one worker - rate kept (n = 1) |") == 2
    assert "### plain_sgd" not in printed
    assert "| compensated - asynchronous | not run | not run |" in printed


def records_of(folder: Path) -> Mapping[tuple[str, str], RunRecord]:
    found: dict[Any, RunRecord] = {}
    for place in folder.iterdir():
        found |= {(place.name, record.name): record for record in finished(place)}
    return found

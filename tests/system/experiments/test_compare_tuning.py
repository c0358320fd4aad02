"""Trials before a comparison: as many for every strategy, judged on the validation data alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import run
from tests.support.comparisons import TASK, compared, experiment, files, rows, summary
from tests.support.recorded import recorded

from orchestra.errors import InputError
from orchestra.experiments.experiment import Choice, Criterion, Tune, trials
from orchestra.experiments.file import load, to_yaml
from orchestra.records.record import RunRecord
from orchestra.records.store import collect, finished
from orchestra.report.page import page
from orchestra.report.study import Study
from orchestra.trainer.settings import Target

STRATEGIES = {"one": "Single", "server": "ParameterServer"}  # which one rank is too few for
TUNE = {"settings": {"optimizer.lr": [0.0001, 0.3], "clip_norm": [None, 1.0]}}


def tuning(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "tuning.json").read_text())
    return value


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison whose test data can be read by no trial."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    compared(out, ranks=[1, 2], tune=TUNE, strategies=STRATEGIES)
    return out


def test_every_row_gets_the_same_trials(tuned: Path) -> None:
    document = tuning(tuned)
    assert {key: document[key] for key in ("trials", "by", "metric", "better", "seed")} == {
        "trials": 4,
        "by": "loss",
        "metric": "loss",
        "better": "lower",
        "seed": 1000,
    }
    assert [(choice["name"], choice["ranks"]) for choice in document["choices"]] == [
        ("one", 1), ("one", 2), ("server", 2)
    ]  # fmt: skip
    for choice in document["choices"]:
        assert [trial["settings"] for trial in choice["trials"]] == [
            {"optimizer.lr": rate, "clip_norm": norm}
            for rate in (0.0001, 0.3)
            for norm in (None, 1.0)
        ]
        assert all(trial["status"] == "completed" for trial in choice["trials"])


def test_the_best_on_the_validation_data_is_chosen(tuned: Path) -> None:
    for choice in tuning(tuned)["choices"]:
        scores = [trial["score"] for trial in choice["trials"]]
        assert len(set(scores)) > 1
        assert choice["chosen"] == scores.index(min(scores))
        folder = tuned / "tuning" / choice["name"] / f"{choice['ranks']}-ranks"
        for trial in choice["trials"]:
            (record,) = finished(folder / f"trial-{trial['trial']}")
            assert (record.asked.judged_on, record.asked.seed) == ("validation", 1000)
            assert record.learned.loss == trial["score"] == trial["loss"]


def test_runs_have_the_settings_that_were_chosen(tuned: Path) -> None:
    chosen = {(c["name"], c["ranks"]): c["settings"] for c in tuning(tuned)["choices"]}
    assert [status for *_, status in rows(tuned)] == ["completed"] * 3
    for row in summary(tuned)["runs"]:
        assert row["tuned"] == chosen[row["name"], row["ranks"]]
        assert row["judged_on"] == "test"
        place = tuned / "runs" / row["name"] / f"{row['ranks']}-ranks" / "seed-0"
        made = load(place / "experiment.yaml")
        assert made.training.optimizer.arguments == {"lr": row["tuned"]["optimizer.lr"]}
        assert made.training.clip_norm == row["tuned"]["clip_norm"]
        assert made.tune is None


def test_a_tuned_comparison_goes_on(tuned: Path) -> None:
    before = files(tuned)
    (tuned / "tuning.json").unlink()
    (tuned / "summary.json").unlink()
    changes: dict[str, Any] = {"ranks": [1, 2], "tune": TUNE, "strategies": STRATEGIES}
    assert compared(tuned, **changes).well
    after = files(tuned)
    for name, (_, content) in before.items():
        assert after[name][1] == content
        if "/" in name:
            assert after[name] == before[name], name


def test_a_tuning_all_of_whose_trials_fail(tmp_path: Path) -> None:
    out, mended = tmp_path / "out", tmp_path / "mended"
    strategies = {
        "one": "Single",
        "broken": f"tests.support.comparison_tasks:Failing(mended='{mended}')",
    }
    changes: dict[str, Any] = {
        "strategies": strategies,
        "tune": {"settings": {"optimizer.lr": [0.1, 1e39]}},
        "seeds": [0, 1],
    }
    one, broken, *_ = compared(out, **changes).records
    assert (one.ending.status, one.asked.tuned) == ("completed", {"optimizer.lr": 0.1})
    assert broken.ending.status == "failed"
    assert broken.ending.failure is not None
    assert broken.ending.failure.startswith("every trial of its tuning failed; the first: rank ")
    kept, choice = tuning(out)["choices"]
    assert [trial["status"] for trial in kept["trials"]] == ["completed", "failed"]
    assert (choice["chosen"], choice["settings"]) == (None, None)
    assert not (out / "runs" / "broken").exists()

    mended.touch()
    assert not compared(out, **changes).well, "failed trials are left unless they are retried"
    before = files(out / "tuning" / "one")
    *_, broken = compared(out, retry=True, **changes).records
    assert (broken.ending.status, broken.asked.tuned) == ("completed", {"optimizer.lr": 0.1})
    assert files(out / "tuning" / "one") == before, "a choice with which runs were made stays"


def test_a_task_without_validation_data_cannot_be_tuned(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no validation data to choose by; leave tune out"):
        compared(tmp_path / "out", task=f"{TASK}(validation=False)", tune=TUNE)
    assert not (tmp_path / "out").exists()


def outcome(status: str, loss: float | None, **metrics: float) -> RunRecord:
    return recorded(
        "ring", "AllReduce()", "processes", 2, 2, 0, 1000, status, final_loss=loss, metrics=metrics
    )


NAN = float("nan")


@pytest.mark.parametrize(
    ("records", "target", "by", "best"),
    [
        ([("completed", 2.0, 0.5), ("completed", 1.0, 0.4)], None, None, 1),
        ([("completed", 2.0, 0.5), ("completed", 1.0, 0.4)], "accuracy up", None, 0),
        ([("completed", 2.0, 0.5), ("completed", 1.0, 0.4)], "accuracy up", "loss", 1),
        ([("completed", 2.0, 0.5), ("completed", 1.0, 0.4)], "accuracy down", "target", 1),
        ([("completed", 2.0, 0.5), ("completed", 1.0, 0.5)], "accuracy up", None, 1),
        ([("completed", 1.0, 0.5), ("completed", 1.0, 0.5)], "accuracy up", None, 0),
        ([("failed", None, 0.9), ("completed", 9.0, 0.1)], "accuracy up", None, 1),
        ([("completed", NAN, 0.1), ("completed", 9.0, 0.1)], None, None, 1),
        ([("completed", NAN, NAN), ("failed", None, NAN)], "accuracy up", None, None),
        ([("completed", 2.0, 0.5), ("completed", 1.0, 0.4)], "loss down", None, 1),
    ],
)
def test_what_is_best(
    records: list[tuple[str, float | None, float]],
    target: str | None,
    by: Any,
    best: int | None,
) -> None:
    bound = None
    if target is not None:
        metric, direction = target.split()
        bound = Target(metric, **{"at_least" if direction == "up" else "at_most": 0.5})
    made = experiment(tune={"settings": {"optimizer.lr": [1, 2]}}, strategies={"ring": "AllReduce"})
    criterion = Criterion.of(Tune({"optimizer.lr": (1, 2)}, by), bound)
    outcomes = [outcome(status, loss, accuracy=value) for status, loss, value in records]
    choice = Choice(criterion, list(zip(trials(made), outcomes, strict=True)))
    assert (choice.best and choice.best.number) == best
    assert choice.plain()["chosen"] == best
    json.dumps(choice.plain(), allow_nan=False)


def test_trials_differ_in_their_settings_only() -> None:
    made = experiment(tune={"settings": {"optimizer.lr": [1, 2], "schedule": ["Cosine"]}})
    first, _, third, _ = trials(made)
    assert first.run.judged_on == "validation"
    assert third.run == replace(first.run, training=third.run.training)
    assert third.run.training == first.run.training.with_setting(
        "optimizer", third.run.training.optimizer
    )
    assert repr(third.run.training.optimizer) == "SGD(lr=2)"
    assert repr(third.run.training.schedule).startswith("Cosine(")


def test_train_tunes_nothing_and_may_take_the_seed_of_the_trials(tmp_path: Path) -> None:
    tune = {**TUNE, "seed": 7}
    (tmp_path / "exp.yaml").write_text(to_yaml(experiment(tune=tune, strategies={"one": "Single"})))
    trained = run(["train", "exp.yaml", "--seed", "7", "--out", "out"], tmp_path)
    assert trained.status == 0, trained.err
    (record,) = finished(tmp_path / "out")
    assert (record.asked.seed, record.asked.tuned) == (7, {})


def test_a_strategy_s_settings_are_tried_with_those_that_have_them(tmp_path: Path) -> None:
    strategies = {
        "average": "LocalSGD(2)",
        "outer": "LocalSGD(2, outer=Nesterov())",
    }
    tune = {"settings": {"optimizer.lr": [0.1], "strategy.outer.rate": [1e-6, 0.5]}}
    out = tmp_path / "out"
    assert compared(out, ranks=2, tune=tune, strategies=strategies).well
    document = tuning(out)
    assert document["trials"] == 2
    tried = {
        choice["name"]: [trial["settings"] for trial in choice["trials"]]
        for choice in document["choices"]
    }
    assert tried == {
        "one process": [{"optimizer.lr": 0.1}],
        "average": [{"optimizer.lr": 0.1}],
        "outer": [{"optimizer.lr": 0.1, "strategy.outer.rate": rate} for rate in (1e-6, 0.5)],
    }
    outer = next(row for row in summary(out)["runs"] if row["name"] == "outer")
    assert outer["tuned"] == {"optimizer.lr": 0.1, "strategy.outer.rate": 0.5}
    assert outer["strategy"] == "LocalSGD(2, outer=Nesterov(0.5, 0.9))"
    assert "tuned, at most 2 trials<" in page(Study(collect([out])), [], out)

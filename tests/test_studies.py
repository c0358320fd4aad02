"""The studies of one process on each task."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestra.experiments.file import load
from orchestra.strategies.single import Single

FILES = sorted((Path(__file__).parent.parent / "studies" / "tasks").glob("*.yaml"))


def test_each_task_that_needs_no_files_has_its_study() -> None:
    names = {"characters", "digits", "digits28", "images", "regression"}
    assert {file.stem for file in FILES} == names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_study_is_of_one_process_with_five_seeds_and_a_tuned_rate(file: Path) -> None:
    study = load(file)
    assert study.task == f"{file.stem}()"
    assert list(study.strategies.values()) == [Single()]
    assert len(set(study.seeds)) == 5
    assert study.tune is not None
    assert list(study.tune.settings) == ["optimizer.lr"]

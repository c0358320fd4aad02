"""The examples for Ray Train and Ray Tune, on a Ray of their own on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.support.engines import example, one_loss

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(
    ("strategy", "workers"), [("AllReduce('ring')", "2"), ("ParameterServer", "3")]
)
def test_ray_train(strategy: str, workers: str, tmp_path: Path) -> None:
    """With a dedicated server, too: its function returns as that of the workers does."""
    storage = f"--storage={tmp_path / 'storage'}"
    places = "--workers", workers, "--cpus", "0.5"
    ended = example("ray_train.py", tmp_path, *places, "--strategy", strategy, storage)
    assert ended.status == 0, ended.err
    assert "'epoch': 4" in ended.out.splitlines()[-1]


def test_ray_train_goes_on_from_the_newest_checkpoint_after_a_loss(tmp_path: Path) -> None:
    fault = one_loss(tmp_path, 57 * 27 + 1)  # in epoch 28 of 30
    storage = f"--storage={tmp_path / 'storage'}"
    ended = example("ray_train.py", tmp_path, storage, "--epochs", "30", **fault)
    assert ended.status == 0, ended.err
    assert (tmp_path / "injected").exists()
    assert "'epoch': 30" in ended.out.splitlines()[-1]
    # Ray may not have seen the last reports of a worker that is lost, so these epochs come again.
    saved = list((tmp_path / "storage/digits").glob("checkpoint_*"))
    assert 30 <= len(saved) < 27 + 30


def test_ray_train_without_restarts_ends_when_a_worker_is_lost(tmp_path: Path) -> None:
    storage = f"--storage={tmp_path / 'storage'}"
    ended = example("ray_train.py", tmp_path, storage, "--restarts=0", **one_loss(tmp_path, 60))
    assert ended.status != 0


def test_ray_tune_tries_the_candidates(tmp_path: Path) -> None:
    ended = example("ray_tune.py", tmp_path, f"--storage={tmp_path / 'storage'}")
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[-1].startswith("best: ")
    assert len(list((tmp_path / "storage/digits").glob("trial_*/record/summary.json"))) == 4

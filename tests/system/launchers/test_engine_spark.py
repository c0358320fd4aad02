"""The example for Spark's TorchDistributor, on a Spark of its own on this machine."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from tests.support.engines import example, one_loss

_there = importlib.util.find_spec("pyspark") is not None and shutil.which("java") is not None
pytestmark = [
    pytest.mark.skipif(not _there, reason="needs pyspark and Java"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(
    ("strategy", "workers"), [("AllReduce('ring')", "2"), ("ParameterServer", "3")]
)
def test_spark(strategy: str, workers: str, tmp_path: Path) -> None:
    """With a dedicated server, too: Spark wants a value of each rank."""
    ended = example("spark.py", tmp_path, "--workers", workers, "--strategy", strategy)
    assert ended.status == 0, ended.err
    assert "epoch 4: loss" in ended.out.splitlines()[-1]


def test_each_worker_trains_on_its_own_partitions(tmp_path: Path) -> None:
    """On each row once in an epoch, though one worker has twice as many."""
    given = "--partitions", "3", "--epochs", "2"
    ended = example("spark_partitions.py", tmp_path, *given)
    assert ended.status == 0, ended.err
    told = ended.out + ended.err  # where Spark shows what its tasks print
    assert "worker 0: 2396 rows of the partitions [0, 2], and 0 of others to compare" in told
    assert "worker 1: 1198 rows of the partitions [1], and 4 of others to compare" in told
    assert ended.out.splitlines()[-1].startswith("loss 0.")


def test_a_job_that_lost_a_worker_ends_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder, fault = (
        f"--folder={tmp_path / 'shared'}",
        one_loss(tmp_path, 120),
    )  # in the third of four epochs
    assert example("spark.py", tmp_path, folder, **fault).status != 0
    assert (tmp_path / "injected").exists()
    ended = example("spark.py", tmp_path, folder, **fault)
    assert ended.status == 0, ended.err
    assert "going on after epoch 2" in ended.err  # where Spark shows what its tasks print
    assert "epoch 4: loss" in ended.out.splitlines()[-1]

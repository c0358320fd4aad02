"""Communication goes on while a worker computes, and changes no bit of what it should not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.simulated import simulated
from tests.training import equal, settings, train_threads

from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES

ADAM = "Adam(lr=0.01)"
IN_PARTS = {"bucket_megabytes": 0.001}
SYNCHRONOUS = [
    "ParameterServer(servers=2)",
    "ParameterServer(servers=2, placement='beside')",
    "ParameterServer(placement='beside', returns='gradients')",
]


def chosen(strategy: str) -> Any:
    return parse(strategy, STRATEGIES, where="test")


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_pushed_in_parts_or_whole_the_parameters_are_the_same(
    strategy: str, tmp_path: Path
) -> None:
    """On sockets and in virtual time; the last step leaves one worker without samples."""
    task = "images(samples=84, model='normalised')"
    options: dict[str, Any] = {"optimizer": ADAM, "epochs": 2}
    whole = train_threads(chosen(strategy), 4, tmp_path / "whole", task, **options, overlap=False)
    parts = train_threads(chosen(strategy), 4, tmp_path / "parts", task, **options, **IN_PARTS)
    assert parts.states[0].parts is not None
    assert whole.states[0].parts is None
    assert equal(parts.final, whole.final)
    run = settings(chosen(strategy), 4, task, **options, **IN_PARTS)
    record = simulated(run, tmp_path / "simulated")
    again = simulated(
        settings(chosen(strategy), 4, task, **options, overlap=False), tmp_path / "simulated whole"
    )
    assert record.parameters_sha256 == again.parameters_sha256

"""What only a GPU can show. Run with `pytest -m cuda` where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import orchestra
from orchestra import AllReduce, ParameterServer, Pipeline, Single, Strategy

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        (Single(), 1),
        (AllReduce("native"), 1),
        (Pipeline(), 2),
        (AllReduce("ring"), 2),  # two ranks on one GPU, staged through pinned memory
        (ParameterServer(placement="beside"), 2),
        (ParameterServer(consistency="asynchronous", placement="beside"), 2),
    ],
)
def test_trains_on_a_gpu(strategy: Strategy[object], ranks: int, tmp_path: Path) -> None:
    assert torch.cuda.is_available()
    record = orchestra.train(
        "digits", strategy, ranks, out=tmp_path, device="cuda", epochs=15, optimizer="SGD(lr=0.05)"
    )
    assert record.status == "completed"
    assert record.metrics["accuracy"] > 0.85

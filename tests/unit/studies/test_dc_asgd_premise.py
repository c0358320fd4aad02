"""What the study of DC-ASGD's premise computes, on losses whose Hessian is known."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from tests.support.paths import ROOT
from torch import Tensor

STUDY = ROOT / "studies" / "dc_asgd_premise.py"


@pytest.fixture(scope="module")
def study() -> dict[str, Any]:
    return runpy.run_path(str(STUDY))


def test_the_diagonal_is_that_of_the_hessian(study: dict[str, Any]) -> None:
    matrix = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def quadratic(w: Tensor) -> Tensor:
        return w @ matrix @ w + w.pow(4).sum()

    at = torch.linspace(-1, 2, 6, dtype=torch.float64)
    expected = 2 * matrix.diagonal() + 12 * at.square()
    torch.testing.assert_close(study["hessian_diagonal"](quadratic, at), expected)


def test_the_premise_holds_where_it_has_to(study: dict[str, Any]) -> None:
    """Softmax regression on labels drawn from the model itself: the squares' mean is Fisher's."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4000, 3, dtype=torch.float64, generator=generator)
    w = torch.randn(6, dtype=torch.float64, generator=generator)

    def loss(flat: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(inputs @ flat.view(3, 2), labels)

    probabilities = (inputs @ w.view(3, 2)).softmax(1)
    labels = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
    row = study["look"](7, w, torch.ones(6, dtype=torch.float64), loss, inputs, labels, generator)
    assert row.step == 7
    assert row.samples > 0.999
    assert row.negative == 0
    diagonal = study["hessian_diagonal"](lambda at: loss(at, inputs, labels), w)
    assert row.strength == pytest.approx(float(diagonal.mean()))
    assert row.batch == pytest.approx(float(diagonal.sum() / diagonal.norm() / 6**0.5))

"""Random tensors that depend on nothing but their seed."""

from __future__ import annotations

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

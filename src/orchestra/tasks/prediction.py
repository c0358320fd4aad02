"""Loss and metric for batches of (tokens, those that follow), each of shape (n, tokens)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestra.worker.batches import Batch


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy in nats, the mean over the batch and its places."""
    tokens, following = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def text_scores(model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
    """The cross entropy in bits, the mean over all characters."""
    losses = [
        functional.cross_entropy(model(tokens).transpose(1, 2), following, reduction="none")
        for tokens, following in batches
    ]
    return {"bits_per_character": torch.cat(losses).double().mean().item() / math.log(2)}

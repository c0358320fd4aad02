"""A small GPT: a transformer that predicts each next token from those before it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestra.worker.batches import Batch


class Attention(nn.Module):
    """Causal self-attention of several heads; shape (n, tokens, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Each place sees itself and the places before it."""
        count, tokens, width = x.shape
        parts = self.inward(x).view(count, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.outward(seen.transpose(1, 2).reshape(count, tokens, width))
        return out


class TransformerBlock(nn.Module):
    """Attention and a two-layer network, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.network = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shape (n, tokens, width) to the same."""
        x = x + self.attention(x)
        out: Tensor = x + self.network(x)
        return out


class GPT(nn.Module):
    """GPT-2's form (Radford et al., 2019): learned places, norms first, no weights shared.

    Tokens of shape (n, up to `context`) to logits of shape (n, the same, vocabulary). `width` is a
    multiple of `heads`. Weights begin with standard deviation 0.02.
    """

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of what follows each place."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


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

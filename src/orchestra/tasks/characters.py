"""Text, character by character: the task of language models, and a small GPT for it."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestra.errors import InputError
from orchestra.tasks import Characters
from orchestra.tasks.task import Task, tensor_task
from orchestra.worker.batches import Batch

#: Line feed and printable ASCII; whatever else counts as one more character.
KNOWN = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = len(KNOWN) + 1


def characters(chosen: Characters) -> Task:
    """Return the task: windows in memory, and a GPT."""
    splits = (windows(part, chosen.context) for part in split_text())
    model = partial(GPT, VOCABULARY, chosen.context, chosen.layers, chosen.heads, chosen.width)
    return tensor_task(model, *splits, loss=next_token_loss, metrics=text_scores)


def text() -> str:
    """Return the documentation: topics by name, each paragraph only where it first occurs.

    Several topics repeat others in full. Without that rule, much of the test would stand in the
    training data word for word.
    """
    try:
        topics: Any = importlib.import_module("pydoc_data.topics")
    except ImportError:
        raise InputError(
            "task characters: this Python comes without pydoc_data.topics, the text of the task; "
            "use one with the whole standard library"
        ) from None
    first: dict[str, str] = {}
    for _, topic in sorted(topics.topics.items()):
        for paragraph in topic.split("\n\n"):
            # By its words: it may be indented or wrapped otherwise where it occurs again.
            first.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    return "\n\n".join(paragraph for words, paragraph in first.items() if words)


def text_sha256() -> str:
    """Return the SHA-256 of `text()` in UTF-8: equal on machines that train on the same text."""
    return hashlib.sha256(text().encode()).hexdigest()


def split_text() -> tuple[str, str, str]:
    """Return the texts for training, validation and test: 80%, 10% and 10%, one after the other."""
    whole = text()
    end, start = len(whole) * 8 // 10, len(whole) * 9 // 10
    return whole[:end], whole[end:start], whole[start:]


def windows(part: str, context: int) -> tuple[Tensor, Tensor]:
    """Return characters and those that follow, both (n, context), cut one after the other. Raises
    InputError: the text is shorter than one window."""
    places = {character: place for place, character in enumerate(KNOWN)}
    tokens = torch.tensor([places.get(character, len(KNOWN)) for character in part])
    # The last character has no following one.
    count = (len(tokens) - 1) // context
    if count < 1:
        raise InputError(
            f"Characters.context: {context} is more than the shortest part of the text holds; "
            f"set it to {len(tokens) - 1} or less"
        )
    end = count * context
    return tokens[:end].view(count, context), tokens[1 : end + 1].view(count, context)


class Attention(nn.Module):
    """Causal self-attention of several heads; shape (n, tokens, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each place to itself and the places before it."""
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
        """Map shape (n, tokens, width) to the same shape."""
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
        """Return the logits of what follows each place."""
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
    """Return the cross entropy in nats, the mean over the batch and its places."""
    tokens, following = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def text_scores(model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
    """Return the cross entropy in bits, the mean over all characters."""
    losses = [
        # Summed up over all characters at the end: batches may differ in size.
        functional.cross_entropy(model(tokens).transpose(1, 2), following, reduction="none")
        for tokens, following in batches
    ]
    return {"bits_per_character": torch.cat(losses).double().mean().item() / math.log(2)}

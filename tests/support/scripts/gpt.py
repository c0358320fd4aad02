"""A small GPT over characters, and what a script of the tests is asked to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

LENGTH, WIDTH = 8, 16
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 3

#: strategy, batch, accumulation, epochs, samples, shuffle, dropout, double, device, clip ...
OPTIONS: dict[str, Any] = {
    "strategy": "AllReduce('ring')",
    "batch": 4,
    "accumulation": 3,
    "epochs": 2,
    "samples": 50,
    "shuffle": True,
    "dropout": 0.2,
    "double": False,
    "device": "cpu",
    "clip": 0.5,
    "rate": 0.05,
    "optimizer": "AdamW",
    "raise_on": -1,
    "break_at": 10**9,
    **json.loads(os.environ.get("GPT_OPTIONS", "{}")),
}
RANK = int(os.environ.get("RANK", "0"))


class GPT(nn.Module):
    """Codes [batch, length] to logits [batch, length, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(128, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout=OPTIONS["dropout"], batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        past = nn.Transformer.generate_square_subsequent_mask(LENGTH).to(self.places)
        hidden = self.words(text) + self.places
        logits: Tensor = self.head(self.blocks(hidden, mask=past, is_causal=True))
        return logits


def make() -> GPT:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT().to(OPTIONS["device"])
    return model.double() if OPTIONS["double"] else model


def windows() -> TensorDataset:
    """Windows of the text, with the characters that follow."""
    cut = torch.tensor([ord(letter) for letter in TEXT]).unfold(0, LENGTH + 1, 3)
    cut = cut[: OPTIONS["samples"]].to(OPTIONS["device"])
    return TensorDataset(cut[:, :-1], cut[:, 1:])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    cls = getattr(torch.optim, OPTIONS["optimizer"])
    made: torch.optim.Optimizer = cls(model.parameters(), lr=0.01)
    return made


def save(model: nn.Module) -> None:
    """Into a file a rank, which appears whole."""
    torch.save(model.state_dict(), f"rank-{RANK}.draft")
    Path(f"rank-{RANK}.draft").rename(f"rank-{RANK}.pt")

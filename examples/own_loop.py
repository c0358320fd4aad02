"""A small GPT that learns to write like this file, in a plain PyTorch loop that is distributed.

    python own_loop.py
    torchrun --nproc-per-node 3 own_loop.py

The import and the call of `orchestra.distribute` are all that differs from a loop for one process.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import orchestra

LENGTH, WIDTH = 32, 64


class GPT(nn.Module):
    """Bytes of shape [batch, length] to logits of shape [batch, length, 256]."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        past = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.words(text) + self.places[:length]
        logits: Tensor = self.head(self.blocks(hidden, mask=past, is_causal=True))
        return logits


def windows() -> TensorDataset:
    """Every fourth window of this file, with the bytes that follow."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    cut = text.unfold(0, LENGTH + 1, 4)
    return TensorDataset(cut[:, :-1], cut[:, 1:])


def main() -> None:
    """Train, with accumulation, clipping and a schedule."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--strategy", default="AllReduce('ring')")
    options = parser.parse_args()
    accumulation = 4

    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    batches = DataLoader(windows(), batch_size=8, shuffle=True)
    model, optimizer, batches = orchestra.distribute(
        model, optimizer, batches, options.strategy, accumulation=accumulation
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    for epoch in range(options.epochs):
        losses = []
        for number, (text, following) in enumerate(batches, start=1):
            loss = functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
            (loss / accumulation).backward()
            losses.append(loss.item())
            if number % accumulation == 0 or number == len(batches):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        if losses:  # a rank that serves has none
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()

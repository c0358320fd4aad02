"""A loop of the user's own for the campaign of faults: `torchrun fault_loop.py STRATEGY`.

The first worker saves the state of the training after each epoch, and when SIGTERM ends the loop; a
further start goes on from there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import orchestra
from orchestra.trainer.own_loop import Batches

EPOCHS, SAMPLES, BATCH = 6, 32, 4
STATE = Path("state.pt")


def main() -> None:
    """Train for the epochs that remain."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 16, generator=generator)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)
    model, optimizer, batches = orchestra.distribute(
        model, optimizer, loader, sys.argv[1], patience=8
    )
    if STATE.exists():
        batches.load_state_dict(torch.load(STATE, weights_only=True))
    try:
        while batches.epoch < EPOCHS:
            for given, wanted in batches:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(given), wanted).backward()
                optimizer.step()
            save(batches)
    except orchestra.Stopped:
        save(batches)
        raise


def save(batches: Batches) -> None:
    """Let the first worker save the state of all."""
    state = batches.state_dict()
    if orchestra.is_first():
        torch.save(state, "pending.pt")
        Path("pending.pt").rename(STATE)


if __name__ == "__main__":
    main()

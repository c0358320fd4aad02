"""The first rank evaluates for longer than `patience`: inside a pause, and then outside of one."""

import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import orchestra

PATIENCE = 2.0
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(12, 1)), batch_size=2)
model, optimizer, batches = orchestra.distribute(
    model, optimizer, loader, "AllReduce('ring')", patience=PATIENCE
)


def evaluate(seconds: float) -> None:
    threading.Event().wait(seconds)


for number, (features,) in enumerate(batches):
    optimizer.zero_grad()
    model(features).square().mean().backward()
    optimizer.step()
    if number == 0 and orchestra.is_first():
        with batches.pause():
            evaluate(2 * PATIENCE)
        Path("paused").touch()
    elif number == 1 and orchestra.is_first():
        evaluate(60.0)

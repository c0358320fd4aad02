"""A loop that goes on until SIGTERM ends it, and saves its state then: stopped_loop.py STRATEGY."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import orchestra

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.linspace(-1, 1, 72).view(24, 3))
model, optimizer, batches = orchestra.distribute(
    model, optimizer, DataLoader(data, batch_size=2), sys.argv[1]
)
try:
    for _ in itertools.count():
        for (features,) in batches:
            optimizer.zero_grad()
            model(features).square().mean().backward()
            optimizer.step()
            if batches.taken == 3:
                Path(f"at-{orchestra.rank()}").touch()
except orchestra.Stopped:
    if "asynchronous" not in sys.argv[1]:  # whose workers are at unlike places of the epoch
        state = batches.state_dict()
        if orchestra.is_first():
            torch.save(state, "state.pt")
    raise

"""A loop that rank 1 leaves with its script in the third step of five, or goes on without it."""

from __future__ import annotations

import sys

import torch
from torch import nn

import orchestra

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [torch.ones(2, 3)] * 10
model, optimizer, batches = orchestra.distribute(model, optimizer, loader, sys.argv[1], patience=4)
for step, batch in enumerate(batches):
    here = orchestra.rank() == 1 and step == 2
    if here and sys.argv[2] == "exit":
        sys.exit(0)
    optimizer.zero_grad()
    model(batch).mean().backward()
    if not here:
        optimizer.step()

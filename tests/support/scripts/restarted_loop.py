"""A loop that rank 1 fails in once, while rank 0 is busy until its agent ends it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn

import orchestra

again = Path("busy").exists()
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [torch.ones(2, 3)] * 10
model, optimizer, batches = orchestra.distribute(model, optimizer, loader, "AllReduce('native')")
for step, batch in enumerate(batches):
    if step == 2 and not again:
        if orchestra.is_first():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            Path("busy").touch()
            signal.pause()
        while not Path("busy").exists():
            pass
        raise ArithmeticError("once")
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(f"restarts-{orchestra.rank()}").write_text(restarts)

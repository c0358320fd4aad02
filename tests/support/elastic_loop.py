"""A loop of the user's own whose ranks may be lost, or join: `elastic_loop.py FOLDER EPOCHS`.

Each worker writes the digest of its parameters after each epoch, and a line for each step.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from tests.support.waiting import wait_until
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import orchestra

SAMPLES, BATCH = 72, 4


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Centred(nn.Module):
    """Takes away a running mean, which is a buffer. (BatchNorm wants two samples a worker.)"""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(values.mean(0), 0.1)
        return values - self.mean


def model() -> nn.Module:
    torch.manual_seed(5)
    centred = [] if "WITHOUT_BUFFERS" in os.environ else [Centred()]
    width = int(os.environ.get("WIDTH", "12"))
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), *centred, nn.Linear(width, 1))


def digest_of(module: nn.Module) -> str:
    sha = hashlib.sha256()
    for value in module.state_dict().values():
        sha.update(value.numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    """Train for the epochs that are left."""
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    module = model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    module, optimizer, batches = orchestra.distribute(
        module, optimizer, loader, os.environ.get("STRATEGY", "AllReduce('ring')"),
        min_ranks=int(os.environ.get("LEAST", "1")), entrance=folder / "join.json", patience=20,
    )  # fmt: skip
    batches.register(scheduler=scheduler)
    rank, lines, loss = orchestra.rank(), [], torch.zeros(())
    log = (folder / f"rank-{rank}").open("w")
    for epoch in batches.epochs(epochs):
        for given, wanted in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(given), wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            lines.append(epoch)
            log.write(json.dumps([epoch, given.shape[0], optimizer.param_groups[0]["lr"]]) + "\n")
            log.flush()
            if len(lines) >= 4:
                wait_until(lambda: not (folder / "hold").exists(), "the test lets the ranks go")
        mean = orchestra.mean(float(loss.detach()))
        log.write(json.dumps([epoch, digest_of(module), mean, len(batches.workers)]) + "\n")
        log.flush()
    torch.save(module.state_dict(), folder / f"model-{rank}.pt")


if __name__ == "__main__":
    main()

"""What each rank of a loop of its own draws, averages and counts, written to its file."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import orchestra

features = torch.linspace(-1, 1, 48, dtype=torch.float64).view(16, 3)
loader = DataLoader(TensorDataset(features), batch_size=2)
model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = orchestra.distribute(model, optimizer, loader, sys.argv[1])
rank = orchestra.rank()


def dropped(seed: int) -> list[float]:
    torch.manual_seed(seed)
    found: list[float] = nn.functional.dropout(torch.ones(64)).tolist()
    return found


def running_mean(of: Iterable[Any]) -> list[float]:
    averaged = AveragedModel(model)
    update_bn(of, averaged)
    found: list[float] = averaged.state_dict()["module.0.running_mean"].tolist()
    return found


found = {
    "numbers": [
        orchestra.mean(float(rank), weight=rank + 1.0),
        orchestra.mean(0.5 if rank else float("nan"), weight=rank),
        *orchestra.mean(torch.tensor([[1, rank]])).flatten().tolist(),
    ],
    "same seed": dropped(5),
    "seed of the rank": dropped(5 + rank),
    "running mean of batches": running_mean(batches),
    "running mean of the loader": running_mean(loader),
    "features": features.mean(0).tolist(),
}
Path(f"numbers-{rank}.json").write_text(json.dumps(found))

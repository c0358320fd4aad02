"""The script that Spark's TorchDistributor writes for a function: it wants a value of each rank."""

import json
import pickle as cloudpickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import orchestra


def train(strategy: str) -> dict[str, Any]:
    features = torch.linspace(-1, 1, 48, dtype=torch.float64).view(16, 3)
    data = TensorDataset(features, features.sum(1, keepdim=True))
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = orchestra.distribute(
        model, optimizer, DataLoader(data, 2), strategy
    )
    taken = 0
    for _ in range(3):
        for inputs, targets in batches:
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
            taken += 1
    return {"taken": taken, "weight": model.weight.tolist()}


if __name__ == "__main__":
    fn, args, kwargs = cloudpickle.loads(cloudpickle.dumps((train, sys.argv[1:], {})))
    output = fn(*args, **kwargs)
    Path(f"output-{orchestra.rank()}.json").write_text(json.dumps(output))

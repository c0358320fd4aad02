"""One loop after the other, with dropout and noisy samples; saved in mid-epoch, or resumed there.

saved_loop.py through|resumed STRATEGY ...
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import orchestra

SAVED, EPOCHS, AFTER = "state-{}.pt", 2, 2


class Noisy(TensorDataset):
    """Adds noise from the global generator."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        features, target = (tensor[index] for tensor in self.tensors)
        return features + 0.1 * torch.randn(3), target


features = torch.linspace(-1, 1, 72).view(24, 3).sin()
data = Noisy(features, features.sum(1, keepdim=True))
resumed = sys.argv[1] == "resumed"

for number, strategy in enumerate(sys.argv[2:]):
    torch.manual_seed(number + 100 * resumed)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, batches = orchestra.distribute(model, optimizer, loader, strategy)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    torch.manual_seed(orchestra.rank() + 1000 * resumed)
    if resumed:
        saved = torch.load(SAVED.format(number), weights_only=True)
        batches.load_state_dict(saved["batches"])
        schedule.load_state_dict(saved["schedule"])
    for _ in range(batches.epoch, EPOCHS):
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if (batches.epoch, batches.taken) == (1, AFTER) and not resumed:
                saved = {"batches": batches.state_dict(), "schedule": schedule.state_dict()}
                if orchestra.is_first():
                    torch.save(saved, SAVED.format(number))
        schedule.step()
    torch.save(model.state_dict(), Path(f"{sys.argv[1]}-{number}-{orchestra.rank()}.pt"))

"""DistributedDataParallel over gloo and over shared memory; each rank prints what is not equal.

The argument "average" compares hooks that average by ReduceOp.AVG in place of a division, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import orchestra.shm  # noqa: F401  (registers the backend)


class Model(nn.Module):
    """Layers of several buckets; every other batch leaves one of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 8)
        self.between = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Tanh())

    def forward(self, features: Tensor, through: bool) -> Tensor:
        hidden = torch.tanh(self.first(features))
        output: Tensor = self.last(self.between(hidden) if through else hidden)
        return output


def train(case: str, rank: int) -> list[Tensor]:
    """Train for six steps; under "join" the first rank has fewer batches."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Model(), bucket_cap_mb=1, find_unused_parameters=case == "unused"
    )
    hooks: dict[str, tuple[Any, Callable[..., Any]]] = {
        "fp16": (None, default_hooks.fp16_compress_hook),
        "power": (
            powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
    }
    if case in hooks:
        model.register_comm_hook(*hooks[case])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    random = torch.Generator().manual_seed(rank)
    steps = 4 if case == "join" and rank == 0 else 6
    with Join([model], enable=case == "join"):
        for step in range(steps):
            features = torch.randn(8, 64, generator=random)
            through = case != "unused" or step % 2 == 0
            if case == "accumulate" and step % 2 == 0:
                with model.no_sync():
                    model(features, through).square().mean().backward()
                continue
            model(features, through).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*model.state_dict().values()]


def main() -> None:
    cases = ("plain", "unused", "accumulate", "join", "fp16", "power")
    found, groups = [], []
    for backend in ("gloo", "shm"):
        dist.init_process_group(backend)
        # PowerSGD's callbacks hold the group. Where one of gloo's threads drops the last reference
        # to it, the destructor joins that thread from itself, and the process aborts.
        groups.append(dist.group.WORLD)
        found.append({case: train(case, dist.get_rank()) for case in cases})
        dist.destroy_process_group()
    ours, theirs = found
    differ = [
        case
        for case in cases
        if not all(torch.equal(*pair) for pair in zip(ours[case], theirs[case], strict=True))
    ]
    # One write: lines of two ranks do not mix.
    print(f"trained {len(cases)} differ {differ}\n", end="", flush=True)


if __name__ == "__main__":
    main()

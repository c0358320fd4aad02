"""One rank of `benchmarks.recovery` under torchft: a replica group of its own."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import nn, optim
from torch._C._distributed_c10d import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.recovery import (
    BATCH,
    FATAL_STEP,
    RANKS,
    STEPS,
    VICTIM,
    data,
    die,
    model,
    watch_steps,
)


def main() -> None:
    rank, inside, outside = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    # As torchrun would for each replica group.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    module = model((inside, outside))
    own = optim.SGD(module.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        own.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": own.state_dict()},
        timeout=timedelta(seconds=10), replica_id=f"rank_{rank}", hostname="127.0.0.1",
    )  # fmt: skip
    parallel, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, own)
    inputs, labels = data(BATCH).tensors
    watch_steps(rank)
    complete, calls = False, 0
    while calls < STEPS:
        optimizer.zero_grad()
        manager.wait_quorum()
        # Before all have come some train without the others.
        complete |= manager.num_participants() == RANKS
        calls += complete
        if calls == FATAL_STEP and rank == VICTIM:
            die()
        nn.functional.cross_entropy(parallel(inputs), labels).backward()
        optimizer.step()
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    main()

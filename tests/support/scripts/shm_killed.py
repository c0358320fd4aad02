"""Kill one of several ranks at a random moment of its collectives; what the others raised.

    shm_killed.py FOLDER RANKS TIMES SEED

Prints a line for each time: the victim, and what each other rank raised.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import orchestra.shm  # noqa: F401  (registers the backend)


def reduce_for_ever(rank: int, ranks: int, file: Path, begun: Connection) -> None:
    """Sum vectors of every size until that fails, and tell why."""
    dist.init_process_group(
        "shm",
        init_method=f"file://{file}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    begun.send("begun")
    vectors = [torch.ones(size) for size in (1, 1_000, 100_000, 3_000_000)]
    try:
        while True:
            for vector in vectors:
                dist.all_reduce(vector)
                vector.fill_(1.0)
    except Exception as error:
        begun.send(f"{type(error).__name__}: {error}")
        begun.recv()  # whoever left now could be found gone as well by one that still looks


def once(folder: Path, ranks: int, draw: random.Random) -> str:
    victim, delay = draw.randrange(ranks), draw.uniform(0.0, 0.1)
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=reduce_for_ever, args=(rank, ranks, folder / "store", theirs))
        for rank, (_, theirs) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    for ours, _ in ends:
        assert ours.recv() == "begun"
    pid = processes[victim].pid
    assert pid is not None
    kill = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
    kill.start()
    left = [ours for rank, (ours, _) in enumerate(ends) if rank != victim]
    raised = [ours.recv() for ours in left]
    for ours in left:
        ours.send("leave")
    for process in processes:
        process.join()
    (folder / "store").unlink(missing_ok=True)
    return f"{victim} {sorted(set(raised))}"


def main() -> None:
    folder, ranks, times, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    draw = random.Random(seed)
    for _ in range(times):
        print(once(folder, ranks, draw), flush=True)


if __name__ == "__main__":
    main()

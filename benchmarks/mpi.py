"""All-reduces by MPI, in processes of its own, which `mpirun` starts and a benchmark directs.

Between its blocks a rank waits on a socket: in a receive of MPI it would use its core.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

import numpy as np

INSTALL = "install Open MPI (Debian: openmpi-bin) and mpi4py"
SECONDS = 60.0
"""For `mpirun` to start."""
_AS_ROOT_AND_CROWDED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def is_there() -> bool:
    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


class MPIRanks:
    """The ranks of one `mpirun`, from a process outside."""

    def __init__(self, connections: list[socket.socket]) -> None:
        self._files = [connection.makefile("rw") for connection in connections]

    def block(self, elements: int, tensors: int, calls: int) -> Callable[[], float]:
        """Return what lets all ranks carry out so many all-reduces of float32 vectors, taken in
        turn from so many; it returns the processor seconds of all ranks."""

        def run() -> float:
            for file in self._files:
                file.write(f"{elements} {tensors} {calls}\n")
                file.flush()
            return sum(float(file.readline()) for file in self._files)

        return run


@contextmanager
def mpi_ranks(count: int, folder: str) -> Iterator[MPIRanks]:
    """Start `count` ranks, and end them."""
    path = str(Path(folder) / "mpi")
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(count)
        listener.settimeout(SECONDS)
        command = ["mpirun", "-n", str(count), sys.executable, "-m", "benchmarks.mpi", path]
        ranks = subprocess.Popen(
            command, env={**os.environ, **_AS_ROOT_AND_CROWDED}, stdin=subprocess.DEVNULL
        )
        stack.callback(ranks.wait)
        connections = [stack.enter_context(listener.accept()[0]) for _ in range(count)]
        for connection in connections:
            connection.settimeout(None)
        yield MPIRanks(connections)
        for connection in connections:  # which ends them
            connection.shutdown(socket.SHUT_RDWR)


def serve(path: str) -> None:
    """One rank: carry out what is asked for until the socket ends."""
    from mpi4py import MPI

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        file = connection.makefile("rw")
        made, vectors = (0, 0), cycle([np.zeros(0)])
        for line in file:
            elements, tensors, calls = map(int, line.split())
            if made != (elements, tensors):
                made = elements, tensors
                vectors = cycle([np.full(elements, 0.0, np.float32) for _ in range(tensors)])
            began = time.process_time()
            for _ in range(calls):
                MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, next(vectors))
            file.write(f"{time.process_time() - began}\n")
            file.flush()


if __name__ == "__main__":
    serve(sys.argv[1])

"""Any command on an emulated cluster, once for each rank, as torchrun would start it."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from orchestra.cluster import Cluster
from orchestra.engines.emulation.faults import Schedule, changes_of
from orchestra.engines.emulation.nodes import EmulatedCluster, torchrun_variables
from orchestra.engines.processes.place import Place
from orchestra.errors import RunFailed

_JOIN = 'echo $$ > "$0" && exec "$@"'
_LEAVING_SECONDS = 5.0


def run_command(cluster: Cluster, ranks: int, command: Sequence[str]) -> None:
    """Run `command` once for each of `ranks` ranks, inside its node, until all have ended.

    Each has the environment variables of torchrun. Its output comes line by line, with the rank and
    its node in front. When one fails, the others are ended. Faults count from the start.

    Raises:
        InputError: this machine cannot emulate the cluster.
        RunFailed: names the first command that failed.
    """
    readers: list[threading.Thread] = []
    processes: list[subprocess.Popen[str]] = []
    try:
        with EmulatedCluster(cluster, ranks) as emulated:
            places = emulated.places()
            schedule = Schedule(changes_of(emulated), ranks)
            try:
                for rank, place in enumerate(places):
                    with emulated.network.namespaces[place.node].inside():
                        process = _start(place, command, variables(rank, places))
                    processes.append(process)
                    readers += _readers(process, f"[{rank} {place.node}] ")
                schedule.begin()
                failure = _first_failure(processes)
            finally:
                schedule.close()
                _end(processes)
    finally:  # by now nobody is left who could write
        for reader in readers:
            reader.join()
    if failure is not None:
        rank, how = failure
        raise RunFailed(f"the command of rank {rank} on {places[rank].node} {how}")


def variables(rank: int, places: Sequence[Place]) -> dict[str, str]:
    """What torchrun says of `rank`, and which interface leads to the other nodes."""
    place = places[rank]
    threads = {"OMP_NUM_THREADS": str(place.threads)}
    own = torchrun_variables(rank, len(places), places[0].address, place.interface)
    here = Counter(other.node for other in places)[place.node]
    local = {"LOCAL_RANK": str(place.local_rank), "LOCAL_WORLD_SIZE": str(here)}
    return {**threads, **os.environ, **own, **local}


def _start(
    place: Place, command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    (members,) = place.members
    return subprocess.Popen(
        ["sh", "-c", _JOIN, members, *command], env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,  # Ctrl-C is for this process, which ends them
    )  # fmt: skip


def _readers(process: subprocess.Popen[str], prefix: str) -> list[threading.Thread]:
    found = []
    for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        assert stream is not None
        found.append(threading.Thread(target=_pass_on, args=(stream, out, prefix)))
        found[-1].start()
    return found


def _pass_on(stream: IO[str], out: IO[str], prefix: str) -> None:
    with stream:
        for line in stream:
            out.write(prefix + line.rstrip("\n") + "\n")
            out.flush()


def _first_failure(processes: Sequence[subprocess.Popen[str]]) -> tuple[int, str] | None:
    """Wait for all of them, or for one to fail: which, and how."""
    running = len(processes)
    with selectors.DefaultSelector() as selector:
        for rank, process in enumerate(processes):
            selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)
        try:
            while running:
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    running -= 1
                    status = processes[key.data].wait()
                    if status < 0:
                        return key.data, f"was killed by {signal.Signals(-status).name}"
                    if status > 0:
                        return key.data, f"ended with status {status}"
        finally:
            for key in list(selector.get_map().values()):
                os.close(key.fd)
    return None


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ask those that still run to end, and end them if they do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVING_SECONDS)
        process.kill()
        process.wait()

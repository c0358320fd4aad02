"""The first code of a rank that the launcher started. Imports without torch."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import dataclass
from multiprocessing import forkserver, spawn
from typing import Any

from orchestra.engines.memory import keep_one_arena
from orchestra.engines.processes.seat import Seat
from orchestra.engines.processes.system import die_with_parent

_seated = False


@dataclass(frozen=True)
class Errand:
    """What a rank is to do.

    Attributes:
        payload: the pickled program and argument.
        main: where to import the launcher's main module from, if the payload refers to it.
        environment: the launcher's environment variables of this moment; the fork server's are
            those of the first run.
        store_path: the file through which the process groups of torch.distributed are made.
    """

    payload: bytes
    main: dict[str, str]
    environment: dict[str, str]
    store_path: str

    def load(self) -> Any:
        """The program and its argument."""
        spawn.prepare(self.main)
        return pickle.loads(self.payload)


def inside_a_rank() -> bool:
    """Whether this process is a rank, or just about to become one."""
    return _seated


def enter(seat: Seat, errand: Errand) -> None:
    """Be a rank, from the beginning to the end of this process."""
    global _seated
    _seated = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the launcher too, which decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # as the fork server had it
    _let_fork_server_end()
    die_with_parent()
    os.environ.clear()
    os.environ.update(errand.environment)
    if seat.ranks == 1:
        keep_one_arena()

    from torch._C._distributed_c10d import FileStore

    from orchestra.engines.processes.rank import occupy
    from orchestra.errors import RunFailed

    try:
        occupy(seat, errand.load, lambda: FileStore(errand.store_path, seat.ranks))
    except RunFailed:
        sys.exit(1)  # the launcher says why


def _let_fork_server_end() -> None:
    """Give up this process's share in the pipe that keeps the fork server alive.

    The server then ends with the launcher, and takes its ranks with it; otherwise a rank that is
    stopped would keep it, and so itself, alive for ever.
    """
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None

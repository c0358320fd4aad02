"""What a rank is told by whoever starts it. Imports without torch: launchers use it."""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.engines.verdicts import Limits
from orchestra.transports.tls import TLS


@dataclass(frozen=True)
class Seat:
    """One rank's place in a run.

    Attributes:
        rank: which of the `ranks`.
        local_rank: its index among the ranks of its host.
        watcher: host and port of the control connections.
        host: the address on which this rank listens for the others.
        token: the secret that the members of this run share.
        local: whether the watcher lives in the launcher on this host. Otherwise rank 0 holds it,
            and the end of the run is told on standard error.
        tls: encrypts all connections, where given.
        supervised: whether this process is to leave when its parent process is gone.
        threads: intra-op threads of its program; None: those of `OMP_NUM_THREADS`, or its share of
            the cores.
    """

    rank: int
    ranks: int
    local_rank: int
    watcher: tuple[str, int]
    host: str
    token: str
    limits: Limits
    local: bool = True
    supervised: bool = True
    tls: TLS | None = None
    threads: int | None = None

    @property
    def holds_watcher(self) -> bool:
        """Whether the watcher is a thread of this very process."""
        return not self.local and self.rank == 0

"""What one rank sends to each of the others while its stopwatch runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping


class Meter:
    """Bytes of messages, payload and headers, by the rank that they go to.

    Set-up, checkpoints and evaluation lie outside the stopwatch, as they do in a record. A message
    counts in full when it is sent, one of an all-reduce at once when its rank is through.

    Attributes:
        sent: bytes by rank; a message from a rank to itself crosses no link, and is not in it.
        seconds: for which the stopwatch ran.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.sent: Counter[int] = Counter()
        self.seconds = 0.0
        self._now = now
        self._began: float | None = None

    def run(self, running: bool) -> None:
        """The stopwatch starts or goes on, or it stops."""
        if running:
            self._began = self._now()
        elif self._began is not None:
            self.seconds += self._now() - self._began
            self._began = None

    def count(self, target: int, size: int) -> None:
        """A message of `size` bytes goes to `target`."""
        if self._began is not None:
            self.sent[target] += size

    def count_all(self, sent: Mapping[int, int]) -> None:
        """So many bytes go to each rank."""
        if self._began is not None:
            for target, size in sent.items():
                self.sent[target] += size

"""How a TCP connection starts on a link that is fast and long: slowly."""

from __future__ import annotations

from math import inf

from orchestra.cluster.costs import Tcp

LONG = 1 << 17
"""Bytes: a connection that needs fewer in flight has started within three round trips."""

IDLE = 0.2
"""Seconds beyond a round trip without a message after which a connection starts again: Linux's
least retransmission timeout (RFC 2861; net.ipv4.tcp_slow_start_after_idle)."""


class SlowStart:
    """What one connection may have in flight: at first little, then more with each byte that has
    been acknowledged (RFC 5681, section 3.1).

    Args:
        bandwidth: bytes/s of its way.
        round_trip: seconds until a byte is acknowledged.
    """

    def __init__(self, tcp: Tcp, bandwidth: float, round_trip: float) -> None:
        self._first = tcp.first_window
        self._bandwidth = bandwidth
        self._round_trip = round_trip
        self._window = tcp.first_window
        self._used_at = -inf

    def is_over(self, time: float) -> bool:
        """Whether a message that is sent then has the whole bandwidth."""
        self._forget(time)
        return self._window >= self._bandwidth * self._round_trip

    def stall(self, size: float, time: float) -> float:
        """Seconds for which a message of `size` bytes on the wire, sent then, has to wait for
        acknowledgements in all."""
        self._forget(time)
        self.use(time)
        window, seconds, rest = self._window, 0.0, size
        while window < self._bandwidth * self._round_trip and rest > window:
            seconds += self._round_trip - window / self._bandwidth
            rest -= window
            window *= 2
        self._window = min(self._window + size, self._bandwidth * self._round_trip)
        return seconds

    def use(self, time: float) -> None:
        """It carries something until then."""
        self._used_at = max(self._used_at, time)

    def _forget(self, time: float) -> None:
        if time - self._used_at > self._round_trip + IDLE:
            self._window = self._first

"""Several programs over one transport, whose messages are kept apart by their tags."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from orchestra.transports.passing import PassingTransport
from orchestra.transports.protocol import Handle, Task, Transport

T = TypeVar("T")

TAGS = 1 << 20
"""Of one channel: all that programs use lie below."""


class Channel(PassingTransport):
    """Channel `number` of `inner`, with tags of its own, in background flows too.

    Both ends have to open it under one number. Channel 0 has the tags of `inner` itself.
    """

    def __init__(self, inner: Transport, number: int) -> None:
        super().__init__(inner)
        self._number = number

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        return self.inner.send(tensor, to, self._number * TAGS + tag)

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Handle:
        return self.inner.receive(source, self._number * TAGS + tag, into)

    def spawn(self, function: Callable[[Transport], T]) -> Task[T]:
        @functools.wraps(function)
        def on_channel(transport: Transport) -> T:
            return function(Channel(transport, self._number))

        return self.inner.spawn(on_channel)

"""A transport that passes everything on: the base of those that look at, or change, some of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from orchestra.transports.protocol import AllReduceAtOnce, Handle, Task, Traffic, Transport

T = TypeVar("T")


class PassingTransport:
    """`inner`, under another name; its background flows get transports of their own."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def traffic(self) -> Traffic:
        return self.inner.traffic

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent

    @property
    def all_reduce_at_once(self) -> AllReduceAtOnce | None:
        return self.inner.all_reduce_at_once

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        return self.inner.send(tensor, to, tag)

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Handle:
        return self.inner.receive(source, tag, into)

    def add(self, own: Tensor, *arrived: Tensor) -> None:
        self.inner.add(own, *arrived)

    def now(self) -> float:
        return self.inner.now()

    def spawn(self, function: Callable[[Transport], T]) -> Task[T]:
        return self.inner.spawn(function)

    def lost(self) -> frozenset[int]:
        return self.inner.lost()

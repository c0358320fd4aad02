"""A transport that notes what is sent to whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from orchestra.transports.protocol import Handle, Pending, Transport


@dataclass
class Noted:
    """Everything goes through `inner`; `sent` has (source, target, tag, bytes) of all flows."""

    inner: Transport
    sent: list[tuple[int, int, int, int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def send(self, tensor: Tensor, to: int, tag: int, **options: Any) -> Handle:
        self.sent.append((self.inner.rank, to, tag, tensor.nbytes))
        return self.inner.send(tensor, to, tag, **options)

    def spawn(self, function: Callable[[Any], Any]) -> Pending[Any]:
        return self.inner.spawn(lambda transport: function(Noted(transport, self.sent)))

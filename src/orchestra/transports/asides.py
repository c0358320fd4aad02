"""Small messages by which ranks prepare a collective; they have its tag, and are not counted."""

from __future__ import annotations

import torch

from orchestra.transports.framing import pack_header
from orchestra.transports.large_messages import byte_view
from orchestra.transports.matching import Flow, Receive, Send
from orchestra.transports.progress import ProgressEngine


class Asides:
    """Messages of `tag`, in order with those of its collectives."""

    def __init__(self, engine: ProgressEngine, tag: int) -> None:
        self._engine, self._tag = engine, tag
        self._flow = Flow(engine.rank, engine)  # whose traffic nobody looks at

    def tell(self, rank: int, shown: bytes) -> None:
        # Not waited for: what receives next moves what the kernel has not taken.
        message = torch.frombuffer(bytearray(shown), dtype=torch.uint8)
        header, content = pack_header(message, self._tag), byte_view(message)
        self._engine.send(Send(self._flow, rank, message, header, content, self._tag))

    def hear(self, rank: int) -> bytes:
        receive = Receive(self._flow, rank, self._tag, None)
        self._engine.post(receive)
        return receive.wait().numpy().tobytes()

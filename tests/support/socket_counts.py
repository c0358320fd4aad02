"""What ranks counted of their sockets."""

from __future__ import annotations

from orchestra.transports.protocol import Transport
from orchestra.transports.sockets import SocketTransport
from orchestra.worker.interception import InterceptedTransport

COUNTED = ("bytes_sent", "bytes_received", "messages_sent", "messages_received")


def sockets_of(transport: Transport) -> SocketTransport:
    assert isinstance(transport, InterceptedTransport)
    assert isinstance(transport.inner, SocketTransport)
    return transport.inner

"""Which address of this machine to listen on."""

from __future__ import annotations

import ipaddress
import socket

from orchestra.errors import InputError


def numeric(host: str) -> str:
    """The numeric form of `host`, an address or a name of this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"host {host!r} is unknown: {error}; name an address of this machine"
        ) from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_unspecified:
        raise InputError(f"host {host!r} is every address: name the one that others are to use")
    return address


def towards(host: str, port: int) -> str:
    """The local address of the interface that reaches `host`; loopback for loopback."""
    address = numeric(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # sends nothing
        except OSError as error:
            raise InputError(
                f"no interface of this machine reaches {host}: {error}; name one of its addresses"
            ) from error
        return str(probe.getsockname()[0])

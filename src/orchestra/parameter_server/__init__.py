"""Servers that own slices of the parameters: placement, decisions, the loop, the client."""

from typing import TYPE_CHECKING

from orchestra.settings.registry import lazy_names

if TYPE_CHECKING:
    from orchestra.parameter_server.client import Client, Home, ReplicatedClient
    from orchestra.parameter_server.replicated_server import ReplicatedServer
    from orchestra.parameter_server.server import DelayCompensation, Server
    from orchestra.parameter_server.state import Pause

    __all__ = [
        "Client",
        "DelayCompensation",
        "Home",
        "Pause",
        "ReplicatedClient",
        "ReplicatedServer",
        "Server",
    ]
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "Client": "client",
            "DelayCompensation": "server",
            "Home": "client",
            "ReplicatedClient": "client",
            "ReplicatedServer": "replicated_server",
            "Server": "server",
        },
    )

"""Servers that own slices of the parameters: placement, messages, decisions, the loop."""

from typing import TYPE_CHECKING

from orchestra.settings.notation import lazy_package

if TYPE_CHECKING:
    from orchestra.parameter_server.beside import *  # noqa: F403
    from orchestra.parameter_server.held_slice import *  # noqa: F403
    from orchestra.parameter_server.how import *  # noqa: F403
    from orchestra.parameter_server.messages import *  # noqa: F403
    from orchestra.parameter_server.replicas import *  # noqa: F403
    from orchestra.parameter_server.server import *  # noqa: F403
    from orchestra.parameter_server.state import *  # noqa: F403
    from orchestra.parameter_server.when import *  # noqa: F403
else:
    __getattr__ = lazy_package(
        __name__, "state", "messages", "server", "held_slice", "beside",
        "when", "how", "replicas",
    )  # fmt: skip

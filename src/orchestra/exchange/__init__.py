"""How tensors become averages: scaling, buckets, overlap, buffers.

A name is imported when it is first used: strategies, which are settings too, load without torch.
"""

from typing import TYPE_CHECKING

from orchestra.settings.notation import lazy_package

if TYPE_CHECKING:
    from orchestra.collectives import all_reduce as all_reduce
    from orchestra.collectives import broadcast as broadcast
    from orchestra.exchange.agreement import *  # noqa: F403
    from orchestra.exchange.average import *  # noqa: F403
    from orchestra.exchange.channel import *  # noqa: F403
    from orchestra.exchange.clipping import *  # noqa: F403
    from orchestra.exchange.compression import *  # noqa: F403
    from orchestra.exchange.connection import *  # noqa: F403
    from orchestra.exchange.consensus import *  # noqa: F403
    from orchestra.exchange.control import *  # noqa: F403
    from orchestra.exchange.parts import *  # noqa: F403
    from orchestra.exchange.replicas import *  # noqa: F403
    from orchestra.exchange.servers import *  # noqa: F403
    from orchestra.exchange.shards import *  # noqa: F403
    from orchestra.exchange.slices import *  # noqa: F403
    from orchestra.exchange.stages import *  # noqa: F403
else:
    __getattr__ = lazy_package(
        __name__, "agreement", "average", "compression", "consensus", "servers", "slices", "parts",
        "clipping", "channel", "connection", "replicas", "shards", "control", "stages",
    )  # fmt: skip

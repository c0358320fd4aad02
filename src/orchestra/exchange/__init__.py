"""How tensors become averages: scaling, buckets, overlap, buffers.

Names are imported when first used: strategies, which are settings too, load without torch.
"""

from typing import TYPE_CHECKING

from orchestra.settings.lazy import lazy_names

if TYPE_CHECKING:
    from orchestra.exchange.average import (
        GradientAverage,
        agree_on_parameters,
        broadcast_buffers,
        hand_over_moments,
    )
    from orchestra.exchange.replicas import average_replicas, fragments_of, scaled_copy
    from orchestra.exchange.servers import collect_slices, homes_of, make_server, push_and_pull

    __all__ = [
        "agree_on_parameters",
        "GradientAverage",
        "average_replicas",
        "broadcast_buffers",
        "collect_slices",
        "fragments_of",
        "hand_over_moments",
        "homes_of",
        "make_server",
        "push_and_pull",
        "scaled_copy",
    ]
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "agree_on_parameters": "average",
            "GradientAverage": "average",
            "average_replicas": "replicas",
            "broadcast_buffers": "average",
            "collect_slices": "servers",
            "fragments_of": "replicas",
            "hand_over_moments": "average",
            "homes_of": "servers",
            "make_server": "servers",
            "push_and_pull": "servers",
            "scaled_copy": "replicas",
        },
    )

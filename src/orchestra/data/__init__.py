"""Who reads which samples: one global order or fixed shards, and a plan that is equal everywhere.

Names are imported when first used: shardings, which are settings too, load without torch.
"""

from typing import TYPE_CHECKING

from orchestra.settings.registry import lazy_names

if TYPE_CHECKING:
    from orchestra.data.feed import (
        Feed,
        IterableSamples,
        MapSamples,
        Samples,
        epoch_samples,
        open_samples,
        open_shard,
    )
    from orchestra.data.order import GlobalOrder
    from orchestra.data.own_loop import ShardedLoader, shard_loader
    from orchestra.data.plan import Plan, apportion

    __all__ = [
        "Feed",
        "GlobalOrder",
        "IterableSamples",
        "MapSamples",
        "Plan",
        "Samples",
        "ShardedLoader",
        "apportion",
        "epoch_samples",
        "open_samples",
        "open_shard",
        "shard_loader",
    ]
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "Feed": "feed",
            "GlobalOrder": "order",
            "IterableSamples": "feed",
            "MapSamples": "feed",
            "Plan": "plan",
            "Samples": "feed",
            "ShardedLoader": "own_loop",
            "apportion": "plan",
            "epoch_samples": "feed",
            "open_samples": "feed",
            "open_shard": "feed",
            "shard_loader": "own_loop",
        },
    )

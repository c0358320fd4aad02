"""Who reads which samples: one global order, and a plan of its parts that is equal everywhere."""

from __future__ import annotations

from orchestra.data.feed import (
    Feed,
    IterableSamples,
    MapSamples,
    Samples,
    epoch_samples,
    open_samples,
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
    "shard_loader",
]

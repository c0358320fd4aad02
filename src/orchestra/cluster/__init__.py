"""The description of a cluster: nodes, links, ranks and faults. Pure data."""

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.faults import Death, Delay, Fault, LinkCut, LinkSlow, Pause, SlowDown
from orchestra.cluster.file import load_cluster
from orchestra.cluster.nodes import (
    Channel,
    Drift,
    ExponentialTail,
    Jitter,
    Link,
    LogNormal,
    Node,
    Normal,
    Path,
    Switch,
)
from orchestra.cluster.presets import CLUSTERS

__all__ = [
    "CLUSTERS",
    "Channel",
    "Cluster",
    "Death",
    "Delay",
    "Drift",
    "ExponentialTail",
    "Fault",
    "Jitter",
    "Link",
    "LinkCut",
    "LinkSlow",
    "LogNormal",
    "Node",
    "Normal",
    "Path",
    "Pause",
    "SlowDown",
    "Switch",
    "load_cluster",
]

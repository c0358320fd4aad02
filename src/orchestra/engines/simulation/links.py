"""What each rank sent to whom, and what the links of the cluster carried of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.cluster import Channel, Cluster
from orchestra.cluster.file import cluster_text
from orchestra.records.layout import CLUSTER
from orchestra.records.record import MOST_LINKS, TENTHS, Link, Links, write_atomically, write_links

if TYPE_CHECKING:
    from orchestra.engines.simulation.simulate import Outcome


def keep_links(folder: Path, cluster: Cluster, outcome: Outcome, wire: float) -> None:
    """Write what was simulated, and what its links carried, into the `folder` of the run.

    `wire` are bytes on a link for each byte of a message.
    """
    write_atomically(folder / CLUSTER, cluster_text(cluster))
    write_links(folder, links_of(cluster, outcome.sent, outcome.seconds, wire))


def links_of(
    cluster: Cluster, sent: Sequence[Mapping[int, int]], seconds: float, wire: float
) -> Links:
    """What each link carried, where rank i sent `sent[i]` bytes to each other rank.

    `wire` are bytes on a link for each byte of a message.
    """
    nodes = cluster.nodes_of(len(sent))
    carried = dict.fromkeys((channel.name for channel in _within_reach(cluster, len(sent))), 0)
    for source, targets in enumerate(sent):
        for target, size in targets.items():
            for channel in cluster.path(nodes[source], nodes[target]).channels:
                carried[channel.name] += size
    links = [
        Link(name, bandwidth, size, size * wire / (bandwidth * seconds) if seconds > 0 else 0.0)
        for name, size in carried.items()
        for bandwidth in [cluster.channels[name].bandwidth]
    ]
    tenths = [0] * TENTHS
    for link in links:
        tenths[min(int(link.share * TENTHS), TENTHS - 1)] += 1
    busiest = sorted((link for link in links if link.bytes), key=lambda link: -link.share)
    unused = sum(not link.bytes for link in links)
    return Links(seconds, len(links), unused, tenths, busiest[:MOST_LINKS])


def _within_reach(cluster: Cluster, ranks: int) -> list[Channel]:
    """The channels of nodes with ranks, loopbacks of those with several only, and of switches."""
    on = Counter(node.name for node in cluster.nodes_of(ranks))
    between = {*on, *(switch.name for switch in cluster.switches)} if len(on) > 1 else set()
    found = []
    for channel in cluster.channels.values():
        owner, _, kind = channel.name.rpartition(" ")
        if on[owner] > 1 if kind == "loopback" else owner in between:
            found.append(channel)
    return found

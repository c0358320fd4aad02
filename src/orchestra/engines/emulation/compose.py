"""A compose file for an emulated cluster, for machines on which Docker does what the engine does.

Each container shapes its own ends of its link, inside: what it sends on its interface, and what it
receives on an intermediate one (ifb), through which all that arrives passes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from orchestra.cluster import Cluster, Link, Node
from orchestra.engines.emulation.network import NODE_END, token_bucket
from orchestra.engines.emulation.nodes import require_plain, share_of, torchrun_variables
from orchestra.engines.emulation.quota import quota_and_period
from orchestra.errors import InputError
from orchestra.settings.reading import yaml_text

HEAD = """\
# Cluster {name}, written by `orchestra emulation compose`; docs/emulation.md says what it gives.
# Checked by the schema of the compose specification, and not run by its authors.
#
#   docker compose up --build --abort-on-container-failure
"""
NETWORK, IMAGE, ARRIVING = "cluster", "neural-orchestra", "arriving"


def compose_text(cluster: Cluster, ranks: int, command: Sequence[str]) -> str:
    """The compose file: a service for each node, which runs `command` as its rank.

    Raises:
        InputError: several ranks share a node, or the nodes are not all at one switch.
    """
    nodes = cluster.nodes_of(ranks)
    where = f"cluster {cluster.name}"
    require_plain(cluster, nodes)
    name, most = Counter(node.name for node in nodes).most_common(1)[0]
    if most > 1:
        raise InputError(
            f"{where}: node {name} holds {most} ranks, and a container holds one: give --ranks "
            f"{len(cluster.nodes)} or less, or use orchestra emulation run"
        )
    if len({node.switch for node in nodes}) > 1:
        raise InputError(
            f"{where}: its nodes are at several switches, and compose has no links between "
            "networks: use orchestra emulation run"
        )
    services = {
        service_name(node): _service(rank, nodes, command) for rank, node in enumerate(nodes)
    }
    if len(services) < ranks:
        raise InputError(f"{where}: two nodes differ in upper and lower case alone: rename one")
    document = {
        "name": re.sub(r"[^a-z0-9]+", "-", f"orchestra-{cluster.name}".lower()).strip("-"),
        "services": services,
        "networks": {NETWORK: {"driver": "bridge"}},
    }
    return HEAD.format(name=cluster.name) + yaml_text(document)


def service_name(node: Node) -> str:
    """By which other containers find a node: in lower case, as in host names."""
    return re.sub(r"[^a-z0-9-]", "-", node.name.lower())


def _service(rank: int, nodes: Sequence[Node], command: Sequence[str]) -> dict[str, Any]:
    node = nodes[rank]
    quota, period = quota_and_period(share_of(node))
    threads = {"OMP_NUM_THREADS": str(node.threads(1))}
    environment = torchrun_variables(rank, len(nodes), service_name(nodes[0]), NODE_END)
    return {
        "image": IMAGE,
        "build": ".",
        "cpu_period": period,
        "cpu_quota": quota,
        "cap_add": ["NET_ADMIN"],
        "networks": [NETWORK],
        "volumes": ["./runs:/runs"],
        "environment": {**environment, **threads},
        # A dollar is doubled: compose puts variables in place of single ones.
        "entrypoint": ["sh", "-c", shaping_script(node).replace("$", "$$"), "sh"],
        "command": list(command),
    }


def shaping_script(node: Node) -> str:
    """Shell commands that shape both directions of the node's link, and go on with the command."""
    lines = ["set -e"]
    if node.up is not None and node.down is not None:
        lines += [
            *_shaped(NODE_END, node.up),
            f"ip link add {ARRIVING} type ifb",
            f"ip link set {ARRIVING} up",
            f"tc qdisc add dev {NODE_END} handle ffff: ingress",
            f"tc filter add dev {NODE_END} parent ffff: protocol all u32 match u32 0 0 "
            f"action mirred egress redirect dev {ARRIVING}",
            *_shaped(ARRIVING, node.down),
        ]
    return "; ".join([*lines, 'exec "$@"'])


def _shaped(interface: str, link: Link) -> list[str]:
    lines = [f"tc qdisc add dev {interface} root handle 1: {token_bucket(link.bandwidth)}"]
    if link.latency:
        microseconds = max(1, round(link.latency * 1e6))
        lines.append(
            f"tc qdisc add dev {interface} parent 1:1 handle 10: netem delay {microseconds}us "
            "2> /dev/null || echo without netem there is no latency >&2"
        )
    return lines

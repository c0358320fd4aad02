"""Small clusters for tests of the emulation, and whether this machine can emulate any."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestra.cluster import Cluster, Fault, Link, NetworkSwitch, Node, cluster_text
from orchestra.engines.emulation.network import Namespace
from orchestra.engines.emulation.nodes import require_emulation
from orchestra.errors import InputError


def _cannot() -> str:
    try:
        require_emulation()
    except InputError as error:
        return str(error)
    return ""


REASON = _cannot() if sys.platform == "linux" else "needs Linux"
needs_emulation = pytest.mark.skipif(bool(REASON), reason=REASON)

LINK = Link(50e6, 100e-6)


def small_cluster(
    nodes: int = 3, faults: Sequence[Fault] = (), *, speed: float = 0.6, link: Link = LINK
) -> Cluster:
    """Nodes of one core: a, b, c ... at one switch; the last one at half the speed."""
    speeds = [speed] * (nodes - 1) + [speed / 2]
    return Cluster(
        "small",
        tuple(
            Node("abcdefgh"[i], 1, speed=each, switch="switch", up=link, down=link,
                 loopback=Link(3e9, 1e-5))
            for i, each in enumerate(speeds)
        ),
        (NetworkSwitch("switch"),),
        placement="spread",
        faults=tuple(faults),
    )  # fmt: skip


def output(namespace: Namespace, *command: str) -> str:
    """Return what `command` prints inside `namespace`."""
    with namespace.inside():
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def written(cluster: Cluster, folder: Path) -> str:
    """The path of a file that says `cluster`."""
    path = folder / "cluster.yaml"
    path.write_text(cluster_text(cluster))
    return str(path)

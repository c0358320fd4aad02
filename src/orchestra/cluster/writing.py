"""A cluster as the text of a file, which says everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.costs import Cost, Line, Overhead
from orchestra.cluster.jitter import Drift
from orchestra.cluster.nodes import Link, Node, Switch
from orchestra.cluster.registry import CLUSTERS
from orchestra.cluster.units import BYTES, SECONDS, SECONDS_PER_BYTE
from orchestra.errors import InputError
from orchestra.settings import Settings, write
from orchestra.settings.base import default_of, settings_of
from orchestra.settings.yaml_text import yaml_text


def cluster_text(cluster: Cluster) -> str:
    """The file that says `cluster` in full; `read_cluster` gives an equal one back.

    Raises:
        InputError: its overhead is not made of lines.
    """
    document: dict[str, Any] = {
        "name": cluster.name,
        "nodes": dict(_groups(cluster.nodes)),
        "switches": {switch.name: _plain(switch) for switch in cluster.switches},
        "ranks": cluster.placement if isinstance(cluster.placement, str) else [*cluster.placement],
        "faults": [{type(fault).__name__: _plain(fault)} for fault in cluster.faults],
    }
    if cluster.overhead is not None:
        document["overhead"] = _overhead(cluster.overhead)
    return yaml_text(document)


def alike(nodes: Sequence[Node]) -> list[list[Node]]:
    """`nodes` in their order, those together that follow one another and differ in name alone."""
    return [list(group) for _, group in groupby(nodes, lambda node: replace(node, name="any"))]


def _groups(nodes: Sequence[Node]) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {node.name for node in nodes}
    for group in alike(nodes):
        base = group[0].name.removesuffix("-0")
        counted = [node.name for node in group] == [f"{base}-{i}" for i in range(len(group))]
        if counted and base not in names:
            yield base, {"count": len(group), **_plain(group[0])}
        else:
            for node in group:
                yield node.name, _plain(node)


def _plain(settings: Settings) -> dict[str, Any]:
    """Those settings that differ from their defaults, with units; without the name."""
    found: dict[str, Any] = {}
    for field in settings_of(type(settings)):
        value = getattr(settings, field.name)
        if field.name == "name" or value == default_of(field):
            continue
        unit = field.metadata.get("unit")
        if unit is not None:
            value = unit.write(value)
        elif isinstance(value, Link | Drift):
            value = _plain(value)
        elif isinstance(value, Settings):
            value = write(value, CLUSTERS)
        found[field.name] = value
    if isinstance(settings, Node | Switch) and settings.up is not None:
        up, down = found.pop("up"), found.pop("down")
        found["link"] = up if up == down else {"up": up, "down": down}
    return found


def _overhead(overhead: Overhead) -> dict[str, Any]:
    return {
        "send": _line(overhead.send),
        "receive": _line(overhead.receive),
        "local": _line(overhead.local or Line(0.0, 0.0)),
        "add": SECONDS_PER_BYTE.write(overhead.add),
        "buffer": BYTES.write(overhead.buffer_bytes),
        "wire": overhead.wire,
    }


def _line(line: Cost) -> dict[str, str]:
    if not isinstance(line, Line):
        raise InputError("a measured overhead is no part of a file; leave overhead out")
    return {"fixed": SECONDS.write(line.fixed), "each": SECONDS_PER_BYTE.write(line.each)}

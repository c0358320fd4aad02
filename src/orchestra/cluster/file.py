"""The file of a cluster, read with the place of whatever is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestra.cluster.cluster import Cluster, Part, Unfit
from orchestra.cluster.costs import Line, Overhead
from orchestra.cluster.faults import FAULTS, Fault
from orchestra.cluster.nodes import Link, Node, Switch
from orchestra.cluster.reading import (
    LINE,
    LINK,
    mapping,
    read_field,
    read_settings,
    refuse_others,
    require,
)
from orchestra.cluster.units import BYTES, SECONDS, SECONDS_PER_BYTE, quantity
from orchestra.errors import InputError
from orchestra.settings import MOST_RANKS, REQUIRED, Settings, setting
from orchestra.settings.yaml_text import Entry, read_document

KEYS = ("name", "all_nodes", "nodes", "switches", "ranks", "overhead", "faults")
"""The keys of a file."""

ROOT = "switch"
"""The name of the one switch where a file has no `switches`."""

_NODES = "{worker: {count: 8, cores: 4, speed: 1}}"
_FAULT = "Death: {of: worker-3, at: 90 s}"


@dataclass(frozen=True, repr=False)
class _Cable(Settings):
    """A link whose directions differ."""

    up: Link = setting(REQUIRED, "")
    down: Link = setting(REQUIRED, "")


@dataclass(frozen=True, repr=False)
class _Line(Settings):
    """`Line` with units."""

    fixed: float = quantity(SECONDS, REQUIRED, "", low=0)
    each: float = quantity(SECONDS_PER_BYTE, REQUIRED, "", low=0)


@dataclass(frozen=True, repr=False)
class _Overhead(Settings):
    """`Overhead` with units. None has a default, since none would be true everywhere."""

    send: _Line = setting(REQUIRED, "")
    receive: _Line = setting(REQUIRED, "")
    local: _Line = setting(REQUIRED, "")
    add: float = quantity(SECONDS_PER_BYTE, REQUIRED, "", low=0)
    buffer: float = quantity(BYTES, REQUIRED, "", low=0)
    wire: float = setting(REQUIRED, "", low=1, high=1e3)


def read_cluster(path: Path) -> Cluster:
    """The cluster in the file `path`.

    Raises:
        InputError: one line with the file, the line, the key, what is wrong, and the remedy.
    """
    document = read_document(path, needs="nodes and ranks", example="ranks: spread")
    refuse_others(document, "", KEYS)
    require(document, {"nodes": _NODES, "ranks": "spread"}, str(path))
    places: dict[Part, str] = {("placement", ""): f"{document['ranks'].where} ranks"}
    places["nodes", ""] = f"{document['nodes'].where} nodes"
    values: dict[str, Any] = {
        "name": path.stem,
        "switches": tuple(_switches(document.get("switches"), places)),
        "nodes": tuple(_nodes(document, places)),
        "faults": tuple(_faults(document.get("faults"), places)),
    }
    for key, name in (("name", "name"), ("ranks", "placement")):
        if key in document:
            values[name] = read_field(Cluster, name, document[key], key)
    if "overhead" in document:
        values["overhead"] = _overhead(document["overhead"])
    try:
        return Cluster(**values)
    except Unfit as unfit:
        raise InputError(f"{places[unfit.part]}: {unfit}") from None


def _nodes(document: Mapping[str, Entry], places: dict[Part, str]) -> Iterator[Node]:
    common: Mapping[Any, Entry] = {}
    if "all_nodes" in document:
        common = mapping(document["all_nodes"], "all_nodes", "{cores: 4, speed: 1}")
    switch = None if "switches" in document else ROOT
    for name, group in mapping(document["nodes"], "nodes", _NODES).items():
        key = f"nodes.{name}"
        own = mapping(group, key, "{cores: 4, speed: 1}")
        inside = {**_without_rival(common, own), **own}
        node = _node(str(name), inside, group.where, key, switch)
        for each in [node] if "count" not in own else _copies(node, own["count"], key):
            places["nodes", each.name] = f"{group.where} {key}"
            yield each


def _without_rival(common: Mapping[Any, Entry], own: Mapping[Any, Entry]) -> dict[Any, Entry]:
    """What holds for all nodes, but for the speed where a node says its own, in either unit."""
    rivals = {"speed", "flops"} if {"speed", "flops"} & {*own} else set()
    return {key: entry for key, entry in common.items() if key not in rivals}


def _node(name: str, inside: Mapping[Any, Entry], where: str, key: str, switch: str | None) -> Node:
    given: dict[str, Any] = {"name": name, **_links(inside, key)}
    if "link" in inside and switch is not None:
        given["switch"] = switch
    settings = {name: entry for name, entry in inside.items() if name not in ("count", "link")}
    return read_settings(Node, settings, where, key, given, also=("count", "link"))


def _copies(node: Node, entry: Entry, key: str) -> list[Node]:
    count = entry.value
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_RANKS:
        where = f"{entry.where} {key}.count"
        raise InputError(f"{where}: {count!r} is no number of nodes; write 1 to {MOST_RANKS}")
    return [replace(node, name=f"{node.name}-{index}") for index in range(count)]


def _switches(entry: Entry | None, places: dict[Part, str]) -> Iterator[Switch]:
    if entry is None:
        places["switches", ROOT] = "switches"
        yield Switch(ROOT)
        return
    for name, switch in mapping(entry, "switches", "{core: {}, rack: {to: core}}").items():
        key = f"switches.{name}"
        inside = mapping(switch, key, f"{{to: core, link: {LINK}}}")
        settings = {name: entry for name, entry in inside.items() if name != "link"}
        given = {"name": str(name), **_links(inside, key)}
        places["switches", str(name)] = f"{switch.where} {key}"
        yield read_settings(Switch, settings, switch.where, key, given, also=("link",))


def _links(inside: Mapping[Any, Entry], key: str) -> dict[str, Link | None]:
    """`up` and `down`, from the `link` of a node or switch: one for both, or each by itself."""
    if "link" not in inside:
        return {"up": None, "down": None}
    entry, key = inside["link"], f"{key}.link"
    parts = mapping(entry, key, LINK)
    if not {"up", "down"} & {*parts}:
        both = read_settings(Link, parts, entry.where, key)
        return {"up": both, "down": both}
    cable = read_settings(_Cable, parts, entry.where, key)
    return {"up": cable.up, "down": cable.down}


def _faults(entry: Entry | None, places: dict[Part, str]) -> Iterator[Fault]:
    if entry is None:
        return
    if not isinstance(entry.value, list):
        raise InputError(f"{entry.where} faults: has to be a list, such as [{_FAULT}]")
    for index, item in entry.inside.items():
        named = mapping(item, "faults", _FAULT)
        refuse_others(named, "faults", FAULTS)
        if len(named) != 1:
            raise InputError(f"{item.where} faults: one fault an item, such as - {_FAULT}")
        [(name, settings)] = named.items()
        key = f"faults.{name}"
        places["faults", index] = f"{item.where} {key}"
        inside = mapping(settings, key, "{of: worker-3, at: 90 s}")
        yield read_settings(FAULTS[name], inside, item.where, key)


def _overhead(entry: Entry) -> Overhead:
    inside = mapping(entry, "overhead", f"{{send: {LINE}, receive: {LINE}}}")
    read = read_settings(_Overhead, inside, entry.where, "overhead")
    return Overhead(
        send=Line(read.send.fixed, read.send.each),
        receive=Line(read.receive.fixed, read.receive.each),
        local=Line(read.local.fixed, read.local.each),
        add=read.add,
        buffer_bytes=round(read.buffer),
        wire=read.wire,
    )

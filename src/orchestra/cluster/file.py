"""The file of a cluster: read with the place of every mistake, and written in full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from orchestra.cluster.cluster import Cluster, Part, Unfit
from orchestra.cluster.faults import FAULTS, Fault
from orchestra.cluster.nodes import Jitter, Line, Link, NetworkSwitch, Node
from orchestra.cluster.presets import CLUSTERS, Preset
from orchestra.errors import InputError
from orchestra.settings import MAX_RANKS, Settings, parse, write
from orchestra.settings.base import default_of, settings_of
from orchestra.settings.reading import (
    Entry,
    Reader,
    document_in,
    mapping,
    read_document,
    refuse_others,
    require,
    yaml_text,
)

KEYS = ("name", "all_nodes", "nodes", "switches", "ranks", "tcp", "overhead", "faults")
"""The keys of a cluster file."""

ROOT = "switch"
"""The name of the only switch if a file has no `switches`."""

LINK = "{bandwidth: 1 Gbit/s, latency: 50 us}"
LINE = "{fixed: 20 us, each: 0.3 ns/B}"
LINES = ("send", "receive", "local")

READER: Reader = Reader(
    examples={
        "cores": "4",
        "down": LINK,
        "drift": "{sigma: 0.1, time_constant: 60 s}",
        "factor": "4",
        "price": "3.06 USD/h",
        "in_memory": "{copy: 0.2 ns/B, barrier: 10 us}",
        "local": LINE,
        "loopback": LINK,
        "node": "worker-3",
        "of": "worker-3",
        "receive": LINE,
        "send": LINE,
        "spare": "true",
        "tcp": "true",
        "up": LINK,
        "wire": "1.06",
    },
    special={
        "jitter": lambda entry, key: parse(entry.value, CLUSTERS, where=entry.at(key)),
        "price": lambda entry, key: str(entry.value),
        **dict.fromkeys(LINES, lambda entry, key: READER.read_settings(Line, entry, key)),
    },
)

NEEDED, EXAMPLE = "nodes and ranks", "ranks: spread"
_NODES = "{worker: {count: 8, cores: 4, speed: 1}}"
_FAULT = "Death: {of: worker-3, at: 90 s}"


def load_cluster(text: str, *, where: str, folder: Path) -> Cluster:
    """Return the cluster that `text` names: `lan_1gbit(nodes=8)`, or the path of a YAML file.

    Args:
        where: opens the message of every error about `text` itself.
        folder: what a relative path is relative to.

    Raises:
        InputError: an unknown name or setting, or an error in the file, with its line.
    """
    if is_file(text):
        path = folder / text
        if not path.is_file():
            raise InputError(f"{where}: there is no file {path}; give one, or a preset's name")
        return read_cluster(path)
    preset = parse(text, CLUSTERS, where=where)
    if not isinstance(preset, Preset):
        raise InputError(f"{where}: {text} is no cluster; one of them is lan_1gbit(nodes=8)")
    try:
        return preset.cluster()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def is_file(text: str) -> bool:
    """Return whether `text` is the path of a cluster's file, not the name of a preset."""
    # By its suffix: a preset's notation never ends so
    return isinstance(text, str) and text.endswith((".yaml", ".yml"))


SYNONYMS = {"gpus": "devices", "gpu": "devices", "accelerators": "devices", "cpus": "cores"}
"""Keys of a node that users try, and those that are meant."""


def read_cluster(path: Path) -> Cluster:
    """Return the cluster in the file `path`.

    Raises:
        InputError: one line with the file, the line, the key, what is wrong, and the remedy.
    """
    return cluster_in(cluster_document(path), path)


def cluster_document(path: Path, text: str | None = None) -> dict[str, Entry]:
    """Return the keys of the file `path`, or of the `text` that it would have."""
    if text is None:
        return read_document(path, needs=NEEDED, example=EXAMPLE)
    return document_in(text, str(path), needs=NEEDED, example=EXAMPLE)


def cluster_in(document: Mapping[str, Entry], path: Path) -> Cluster:
    """Return the cluster that the keys of the file `path` describe; raise as `read_cluster`."""
    refuse_others(document, "", KEYS)
    require(document, {"nodes": _NODES, "ranks": "spread"}, str(path))
    # Where each part stands, so that a check of the whole cluster can name the line
    places: dict[Part, str] = {
        ("placement", ""): document["ranks"].at("ranks"),
        ("nodes", ""): document["nodes"].at("nodes"),
    }
    values: dict[str, Any] = {
        "name": path.stem,
        "switches": tuple(_switches(document.get("switches"), places)),
        "nodes": tuple(_nodes(document, places)),
        "faults": tuple(_faults(document.get("faults"), places)),
    }
    for key, name in (("name", "name"), ("ranks", "placement"), ("tcp", "tcp")):
        if key in document:
            values[name] = READER.read_setting(Cluster, name, document[key], key)
    if "overhead" in document:
        entry = document["overhead"]
        inside = mapping(entry, "overhead", f"{{send: {LINE}, receive: {LINE}}}")
        for end in LINES:
            if end in inside:
                mapping(inside[end], f"overhead.{end}", LINE)
        values["overhead"] = READER.read_setting(Cluster, "overhead", entry, "overhead")
        # In a file, no default would be true everywhere.
        require(inside, {"local": LINE}, entry.at("overhead"))
    try:
        return Cluster(**values)
    except Unfit as unfit:
        raise InputError(f"{places[unfit.part]}: {unfit}") from None


def _nodes(document: Mapping[str, Entry], places: dict[Part, str]) -> Iterator[Node]:
    common: Mapping[Any, Entry] = {}
    if "all_nodes" in document:
        common = mapping(document["all_nodes"], "all_nodes", "{cores: 4, speed: 1}")
    for name, group in mapping(document["nodes"], "nodes", _NODES).items():
        key = f"nodes.{name}"
        own = mapping(group, key, "{cores: 4, speed: 1}")
        # A node with a speed of its own, in either unit, has not that of all.
        replaced = {"speed", "flops"} if {"speed", "flops"} & {*own} else set()
        inside = {k: entry for k, entry in common.items() if k not in replaced} | {**own}
        for other in SYNONYMS.keys() & inside.keys():
            hint = f"did you mean {SYNONYMS[other]!r}?"
            raise InputError(f"{inside[other].at(key)}: unknown key {other!r}; {hint}")
        given: dict[str, Any] = {"name": str(name), **_links(inside, key)}
        # A file without switches describes nodes at one switch.
        if "link" in inside and "switches" not in document:
            given["switch"] = ROOT
        node = READER.read_settings(Node, group, key, inside, given, also=("count", "link"))
        nodes = [node]
        if "count" in own:
            count, where = own["count"].value, own["count"].at(f"{key}.count")
            if type(count) is not int or not 1 <= count <= MAX_RANKS:
                reason = f"{count!r} is no number of nodes; write 1 to {MAX_RANKS}"
                raise InputError(f"{where}: {reason}")
            nodes = [replace(node, name=f"{node.name}-{index}") for index in range(count)]
        for each in nodes:
            places["nodes", each.name] = group.at(key)
            yield each


def _switches(entry: Entry | None, places: dict[Part, str]) -> Iterator[NetworkSwitch]:
    if entry is None:
        places["switches", ROOT] = "switches"  # it stands nowhere in the file
        yield NetworkSwitch(ROOT)
        return
    for name, switch in mapping(entry, "switches", "{core: {}, rack: {to: core}}").items():
        key = f"switches.{name}"
        inside = mapping(switch, key, f"{{to: core, link: {LINK}}}")
        given = {"name": str(name), **_links(inside, key)}
        places["switches", str(name)] = switch.at(key)
        yield READER.read_settings(NetworkSwitch, switch, key, inside, given, also=("link",))


def _links(inside: Mapping[Any, Entry], key: str) -> dict[str, Link | None]:
    """Read `up` and `down` from the `link` of a node or switch: one for both, or each by itself."""
    if "link" not in inside:
        return {"up": None, "down": None}
    entry, key = inside["link"], f"{key}.link"
    parts = mapping(entry, key, LINK)
    ends = {"up": LINK, "down": LINK}
    if not {*ends} & {*parts}:
        return dict.fromkeys(ends, READER.read_settings(Link, entry, key))
    refuse_others(parts, key, ends)
    require(parts, ends, entry.at(key))
    return {end: READER.read_settings(Link, parts[end], f"{key}.{end}") for end in ends}


def _faults(entry: Entry | None, places: dict[Part, str]) -> Iterator[Fault]:
    if entry is None:
        return
    if not isinstance(entry.value, list):
        raise InputError(f"{entry.at('faults')}: has to be a list of items such as - {_FAULT}")
    for index, item in entry.inside.items():
        if not isinstance(item.value, Mapping) or len(item.value) != 1:
            raise InputError(
                f"{item.at('faults')}: each item is one fault with its settings, such as - {_FAULT}"
            )
        named = mapping(item, "faults", _FAULT)
        refuse_others(named, "faults", FAULTS)
        [(name, settings)] = named.items()
        key = f"faults.{name}"
        places["faults", index] = item.at(key)
        inside = mapping(settings, key, "{of: worker-3, at: 90 s}")
        yield READER.read_settings(FAULTS[name], item, key, inside)


def cluster_text(cluster: Cluster) -> str:
    """Return the text of a file that holds `cluster` in full; `read_cluster` gives an equal one
    back.

    Raises:
        InputError: its overhead is not made of lines.
    """
    document: dict[str, Any] = {
        "name": cluster.name,
        "nodes": dict(_groups(cluster.nodes)),
        "switches": {switch.name: _plain(switch) for switch in cluster.switches},
        "ranks": cluster.placement if isinstance(cluster.placement, str) else [*cluster.placement],
        "tcp": cluster.tcp,
        "faults": [{type(fault).__name__: _plain(fault)} for fault in cluster.faults],
    }
    if cluster.overhead is not None:
        # A file has to say `local`, as no default would be true everywhere.
        overhead = replace(cluster.overhead, local=cluster.overhead.local or Line(0, 0))
        if not all(isinstance(getattr(overhead, end), Line) for end in LINES):
            raise InputError("a measured overhead is no part of a file; leave overhead out")
        document["overhead"] = _plain(overhead)
    return yaml_text(document)


def alike(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return `nodes` in their order, in groups of neighbours that differ in name alone."""
    return [list(group) for _, group in groupby(nodes, lambda node: replace(node, name="any"))]


def _groups(nodes: Sequence[Node]) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {node.name for node in nodes}
    for group in alike(nodes):
        # Nodes that a `count` has made are written as one again, unless another node has that name.
        base = group[0].name.removesuffix("-0")
        counted = [node.name for node in group] == [f"{base}-{i}" for i in range(len(group))]
        if counted and len(group) > 1 and base not in names:
            yield base, {"count": len(group), **_plain(group[0])}
        else:
            yield from ((node.name, _plain(node)) for node in group)


def _plain(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from their defaults, with units; without the name."""
    found: dict[str, Any] = {}
    for field in settings_of(type(settings)):
        value = getattr(settings, field.name)
        if field.name == "name" or value == default_of(field):
            continue
        unit = field.metadata.get("unit")
        if unit is not None:
            value = unit.write(value)
        elif isinstance(value, Settings):
            value = write(value, CLUSTERS) if isinstance(value, Jitter) else _plain(value)
        found[field.name] = value
    if isinstance(settings, Node | NetworkSwitch) and settings.up is not None:
        up, down = found.pop("up"), found.pop("down")
        found["link"] = up if up == down else {"up": up, "down": down}
    return found

"""The JSON Schema of a cluster file."""

from __future__ import annotations

import inspect

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.faults import FAULTS
from orchestra.cluster.nodes import Line, Link, MemoryCosts, NetworkSwitch, Node, Overhead
from orchestra.settings import MAX_RANKS
from orchestra.settings.base import settings_of
from orchestra.settings.schema import (
    DIALECT,
    Schema,
    described,
    object_schema,
    settings_schema,
)

_NOTATION: Schema = {"type": ["string", "null"]}


def cluster_schema() -> Schema:
    """Return the schema of a cluster file."""
    both_ways = settings_schema(Link)
    each_way = object_schema({"up": both_ways, "down": both_ways}, ("up", "down"))
    link = {"anyOf": [both_ways, each_way], "description": "for both directions, or for each"}
    count = {"type": "integer", "minimum": 1, "maximum": MAX_RANKS, "description": "of such nodes"}
    node = settings_schema(Node, {"jitter": _NOTATION}, ("name", "up", "down"))
    node["properties"] |= {"link": link, "count": count}
    # Any key may stand in `all_nodes` in place of the node's own.
    del node["required"]
    switch = settings_schema(NetworkSwitch, leave_out=("name", "up", "down"))
    switch["properties"] |= {"link": link}
    line = settings_schema(Line)
    memory = settings_schema(MemoryCosts, {"send": line, "receive": line})
    overhead = settings_schema(
        Overhead,
        {"send": line, "receive": line, "local": line, "in_memory": memory},
        ("transfers",),
    )
    overhead["required"] = sorted({*overhead["required"], "local"})
    faults = [
        object_schema({name: settings_schema(fault)}, (name,), inspect.getdoc(fault) or "")
        for name, fault in FAULTS.items()
    ]
    fields = {field.name: field for field in settings_of(Cluster)}
    names = {"type": "array", "items": {"type": "string"}}
    properties = {
        "name": {"type": "string", "description": "in records and figures; else the file's name"},
        "all_nodes": node | {"description": "what holds for every node that says nothing else"},
        "nodes": {"type": "object", "additionalProperties": node, "minProperties": 1},
        "switches": {
            "type": "object",
            "additionalProperties": {"anyOf": [switch, {"type": "null"}]},
        },
        "ranks": described({"anyOf": [{"enum": ["spread", "packed"]}, names]}, fields["placement"]),
        "tcp": described({"type": "boolean"}, fields["tcp"]),
        "overhead": described(overhead, fields["overhead"]),
        "faults": described({"type": "array", "items": {"oneOf": faults}}, fields["faults"]),
    }
    return {"$schema": DIALECT, "title": "A cluster file of Neural Orchestra"} | object_schema(
        properties, ("nodes", "ranks")
    )

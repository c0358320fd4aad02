"""The routes that a zone of a SimGrid platform writes out, and where its zones are entered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestra.cluster.route_tree import Pair
from orchestra.cluster.simgrid_xml import Element

EDGES = {"Floyd", "Dijkstra", "DijkstraCache"}
"""Routings whose routes are single hops, of which the others are made."""


def routes_in(
    element: Element, names: Sequence[str], link_of: Callable[[Element], str]
) -> tuple[dict[Pair, list[str]], dict[Pair, Element]]:
    """The links between each two of `names`, and the element that says so."""
    routes: dict[Pair, list[str]] = {}
    lines: dict[Pair, Element] = {}
    one_way: dict[tuple[str, str], Element] = {}
    for route in element.of("route", "zoneRoute", "ASroute"):
        source, target = (route.attributes.get(key, "") for key in ("src", "dst"))
        if source == target:
            if route.tag != "route":
                route.refuse("leads from a zone to itself")
            continue
        links = [link_of(each) for each in route.of("link_ctn")]
        pair = frozenset((source, target))
        if route.attributes.get("symmetrical", "YES").upper() == "NO":
            one_way[source, target] = route
        if pair in routes and sorted(routes[pair]) != sorted(links):
            route.refuse("has other links than the way back, or than a route before it")
        routes[pair], lines[pair] = links, route
    for (source, target), route in one_way.items():
        if (target, source) not in one_way:
            route.refuse("has no way back")
    if element.attributes.get("routing") in EDGES:
        return _joined(element, names, routes), lines
    return routes, lines


def _joined(
    element: Element, names: Sequence[str], edges: Mapping[Pair, list[str]]
) -> dict[Pair, list[str]]:
    """Return the routes between `names` over `edges`, which have to be a tree."""
    near: dict[str, dict[str, list[str]]] = {}
    for pair, links in edges.items():
        one, other = sorted(pair)
        near.setdefault(one, {})[other] = links
        near.setdefault(other, {})[one] = links
    if len(edges) != len(near) - 1:
        element.refuse("has more than one way between two of its points, or none")
    routes: dict[Pair, list[str]] = {}
    for source in names:
        found: dict[str, list[str]] = {source: []}
        ahead = [source]
        while ahead:
            here = ahead.pop()
            for there, links in near.get(here, {}).items():
                if there not in found:
                    found[there] = found[here] + links
                    ahead.append(there)
        routes |= {frozenset((source, target)): found[target] for target in names
                   if target in found and target != source}  # fmt: skip
    return routes


def gateways_in(element: Element) -> dict[str, str]:
    """Where each zone inside is entered."""
    found: dict[str, str] = {}
    for route in element.of("zoneRoute", "ASroute"):
        for end in ("src", "dst"):
            zone, gateway = (route.attributes.get(key, "") for key in (end, f"gw_{end}"))
            if found.setdefault(zone, gateway) != gateway:
                route.refuse(f"enters {zone} at {gateway}, others at {found[zone]}")
    return found

"""SimGrid's platform files: elements with their lines, quantities, and the tree of the routes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import NoReturn
from xml.parsers import expat

from orchestra.errors import InputError
from orchestra.settings.notation import MAX_NESTED

MAX_BYTES = 32_000_000

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)}
_WORDS = {"kilo": 1e3, "mega": 1e6, "giga": 1e9, "tera": 1e12, "peta": 1e15, "exa": 1e18}
SPEEDS = {f"{prefix}f": value for prefix, value in _PREFIXES.items()}
SPEEDS |= {f"{word}flops": value for word, value in _WORDS.items()} | {"flops": 1.0, "": 1.0}
BANDWIDTHS = {f"{p}Bps": value for p, value in (_PREFIXES | _BINARY).items()}
BANDWIDTHS |= {f"{p}bps": value / 8 for p, value in (_PREFIXES | _BINARY).items()} | {"": 1.0}
NUMBERS = {"": 1.0}
TIMES = {"w": 604800.0, "d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
TIMES |= {"ns": 1e-9, "ps": 1e-12, "": 1.0}
ZONES = {"zone", "AS", "cluster"}
EDGES = {"Floyd", "Dijkstra", "DijkstraCache"}
"""Routings whose routes are single hops, from which all others are composed."""
_QUANTITY = re.compile(
    r"\s*(\d{1,400}(?:\.\d{0,400})?(?:[eE][-+]?\d{1,3})?|\.\d{1,400})\s*([A-Za-z]*)\s*"
)
Pair = frozenset[str]


@dataclass
class Element:
    """A tag with its attributes, what is inside, and where it stands ("platform.xml:7")."""

    tag: str
    attributes: dict[str, str]
    where: str
    inside: list[Element] = field(default_factory=list)

    def of(self, *tags: str) -> list[Element]:
        return [each for each in self.inside if each.tag in tags]

    def walk(self) -> Iterator[Element]:
        yield self
        for each in self.inside:
            yield from each.walk()

    @property
    def id(self) -> str:
        return self.attributes.get("id", "")

    def bandwidth(self, key: str) -> float:
        """Return an attribute in bytes/s."""
        return self.quantity(key, self.attributes.get(key, ""), BANDWIDTHS)

    def latency(self, key: str) -> float:
        """Return an attribute in seconds; 0 where it is not there."""
        return self.quantity(key, self.attributes.get(key, "0"), TIMES)

    def quantity(self, key: str, text: str, units: Mapping[str, float]) -> float:
        """Return the number in `text`, in terms of what its unit stands for."""
        match = _QUANTITY.fullmatch(text)
        if match is None or match[2] not in units:
            self.refuse(f"has a {key} {text!r}, which is no number with a known unit")
        try:
            # As fractions, rounded once: 2 Gbps have to be the same number as 250 MBps.
            return float(Fraction(match[1]) * Fraction(repr(units[match[2]])))
        except OverflowError:
            self.refuse(f"has a {key} {text!r}, which is beyond any machine")

    def refuse(self, reason: str) -> NoReturn:
        name = f" {self.id}" if self.id else ""
        raise InputError(f"{self.where}: <{self.tag}>{name} {reason}") from None


def parse(path: Path) -> Element:
    """Return the root of a platform file; nothing else is fetched, and no entity is expanded.

    Raises:
        InputError: it cannot be read, is no XML, or no platform of version 4.
    """
    parser = expat.ParserCreate()
    stack = [Element("", {}, str(path))]

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, f"{path}:{parser.CurrentLineNumber}")
        stack[-1].inside.append(element)
        stack.append(element)
        if len(stack) > MAX_NESTED:
            element.refuse(f"is nested more than {MAX_NESTED} deep")

    def entity(name: str, *_: object) -> None:
        line = parser.CurrentLineNumber
        raise InputError(f"{path}:{line}: declares an entity ({name}); write it out")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: stack.pop()
    # Entities that expand each other grow exponentially (a "billion laughs"): none is accepted.
    parser.EntityDeclHandler = entity
    try:
        with path.open("rb") as file:
            # One more than allowed, so that a larger file is noticed without being read.
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InputError(f"{path}: has more than {MAX_BYTES:,} bytes")
        parser.Parse(content, True)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except expat.ExpatError as error:
        text = expat.errors.messages[error.code]
        raise InputError(f"{path}:{error.lineno}: not XML: {text}") from None
    (root,) = stack[0].inside
    if root.tag != "platform" or not root.attributes.get("version", "").startswith("4"):
        root.refuse("is no platform of version 4 or 4.1; simgrid_update_xml converts older ones")
    return root


def routes_in(
    element: Element, names: Sequence[str], link_of: Callable[[Element], str]
) -> tuple[dict[Pair, list[str]], dict[Pair, Element]]:
    """Return the links between each two of `names`, and the element that says so."""
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
    near: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for (one, other), links in edges.items():
        near[one][other] = near[other][one] = links
    # A connected graph is a tree if it has one edge less than points.
    if len(edges) != len(near) - 1:
        element.refuse("has more than one way between two of its points, or none")
    routes: dict[Pair, list[str]] = {}
    for source in names:
        found: dict[str, list[str]] = {source: []}
        ahead = [source]
        while ahead:
            here = ahead.pop()
            for there, links in near[here].items():
                if there not in found:
                    found[there] = found[here] + links
                    ahead.append(there)
        routes |= {frozenset((source, target)): found[target] for target in names
                   if target in found and target != source}  # fmt: skip
    return routes


def gateways_in(element: Element) -> dict[str, str]:
    """Return the gateway of each zone inside `element`, by the name of the zone."""
    found: dict[str, str] = {}
    for route in element.of("zoneRoute", "ASroute"):
        for end in ("src", "dst"):
            zone, gateway = (route.attributes.get(key, "") for key in (end, f"gw_{end}"))
            if found.setdefault(zone, gateway) != gateway:
                route.refuse(f"enters {zone} at {gateway}, others at {found[zone]}")
    return found


def require_router(zone: Element, gateway: str | None) -> None:
    if gateway is not None and gateway not in [router.id for router in zone.of("router")]:
        zone.refuse(f"is entered at {gateway}, which is none of its own routers")


def routers_of(zone: Element) -> list[str]:
    """Return the points at which a zone, or one inside it, can be entered."""
    if zone.tag == "cluster":
        return [router_of(zone)]
    inner = [name for each in zone.of(*ZONES) for name in routers_of(each)]
    return [each.id for each in zone.of("router", "host")] + inner


def router_of(cluster: Element) -> str:
    given = cluster.attributes
    own = f"{given.get('prefix', '')}{cluster.id}_router{given.get('suffix', '')}"
    return given.get("router_id") or own


class NoTree(ValueError):
    """The routes form no tree, on account of the route between `pair`."""

    def __init__(self, pair: Pair, reason: str) -> None:
        super().__init__(reason)
        self.pair = pair


@dataclass(frozen=True)
class RouteTree:
    """Branches of a tree, each with the links that lead to it from the branch around it.

    `branches` are the points of each, the largest first; those of two branches are disjoint, or one
    has all of the other's. `trunk` are links on every route, whatever its ends.
    """

    branches: Mapping[frozenset[str], Sequence[str]]
    trunk: Sequence[str]

    def around(self, points: frozenset[str]) -> frozenset[str] | None:
        """Return the smallest branch that has `points` and more; None where it is the whole."""
        return min((each for each in self.branches if points < each), key=len, default=None)


def tree_of(
    points: Sequence[str], routes: Mapping[Pair, Sequence[str]], root: str | None = None
) -> RouteTree:
    """Return the tree of the `routes`, the names of the links between each two of `points`.

    In a tree a link splits the points in two, and is on the routes from one part to the other and
    on no other; links whose splits do not contradict each other form a tree (P. Buneman, 1971).

    Args:
        root: the point that no branch has; without it the first one may be a branch of its own.

    Raises:
        NoTree: there is no route between two of them, or the links are not those of a tree.
    """
    pairs = [frozenset(pair) for pair in combinations(points, 2)]
    users: defaultdict[str, set[Pair]] = defaultdict(set)
    for pair in pairs:
        if pair not in routes:
            raise NoTree(pair, f"there is no route between {' and '.join(sorted(pair))}")
        for link in routes[pair]:
            users[link].add(pair)
    first = root or points[0]
    branches: defaultdict[frozenset[str], list[str]] = defaultdict(list)
    trunk = []
    for link, used in users.items():
        beyond = frozenset(other for other in points if {first, other} in used)
        others = frozenset(points) - beyond
        # The link belongs to a tree if it is on all routes between the two sides, and on no other.
        split = {frozenset((here, there)) for here in others for there in beyond}
        if used == split and beyond:
            # Without a root the first point is a leaf like any other: the link is its own.
            alone = root is None and others == {first}
            branches[others if alone else beyond].append(link)
        elif len(used) == len(pairs):
            trunk.append(link)
        else:
            pair = min(used ^ split, key=sorted)
            raise NoTree(pair, f"link {link} is on routes that form no tree")
    for one, other in combinations(branches, 2):
        # Two splits contradict each other if branches overlap without one containing the other.
        if one & other and not (one <= other or other <= one):
            link = branches[other][0]
            pair = min(users[link], key=sorted)
            raise NoTree(pair, f"link {link} is on routes that form no tree")
    if trunk and any(len(branch) > 1 for branch in branches):
        pair = pairs[0]
        raise NoTree(pair, f"link {trunk[0]} is on all routes, though they part before it")
    ordered = sorted(branches, key=lambda branch: (-len(branch), sorted(branch)))
    return RouteTree({branch: branches[branch] for branch in ordered}, trunk)

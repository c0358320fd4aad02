"""Platform files of SimGrid (XML, version 4) as clusters: what is a tree of switches fits.

A host's speed is what a core sustains, in FLOP/s. A SPLITDUPLEX link is one with two directions; a
SHARED one, whose directions compete, is a switch whose traffic is `shared`; a FATPIPE, which limits
each message by itself, fits where no message could fill it. A cluster's backbone is what its switch
shares, and its latency is split between the links on either side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.nodes import Link, Node, Switch
from orchestra.cluster.simgrid_file import (
    EDGES,
    NUMBERS,
    SPEEDS,
    ZONES,
    Element,
    NoTree,
    gateways_in,
    parse,
    require_router,
    router_of,
    routers_of,
    routes_in,
    tree_of,
)
from orchestra.errors import InputError
from orchestra.settings import MAX_RANKS

LOOPBACK = Link(10e9, 0.0)
"""The link between processes of a host, if the file has none (SimGrid's network/loopback-bw)."""

Policy = Literal["SHARED", "SPLITDUPLEX", "FATPIPE"]
POLICIES: dict[str, Policy] = {
    "SHARED": "SHARED", "FATPIPE": "FATPIPE", "SPLITDUPLEX": "SPLITDUPLEX",
    "FULLDUPLEX": "SPLITDUPLEX",
}  # fmt: skip
_CHANGES = ("speed_file", "availability_file", "state_file", "bandwidth_file", "latency_file")
_IGNORED = {"prop", "config", "disk", "storage", "storage_type", "mount"}
"""Elements that do not affect how long training takes."""
_STARS = {"Cluster", "Star"}


@dataclass(frozen=True)
class Wire:
    """A link of a platform, with the element to name in a message."""

    up: Link
    down: Link
    policy: Policy
    element: Element

    def later(self, seconds: float) -> Wire:
        up, down = (Link(each.bandwidth, each.latency + seconds) for each in (self.up, self.down))
        return replace(self, up=up, down=down)


class Above(NamedTuple):
    """The place where something is attached: the switch above, if any, and the wires to it."""

    switch: str | None = None
    wires: tuple[Wire, ...] = ()


def read_platform(path: Path) -> Cluster:
    """Return the cluster of the hosts in a SimGrid platform file.

    Raises:
        InputError: it is none, or a part does not fit, with its line.
    """
    return _Platform(path).cluster()


class _Platform:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._root = parse(path)
        self._nodes: list[Node] = []
        self._switches: list[Switch] = []
        self._fat: list[Wire] = []
        links = [each for each in self._root.walk() if each.tag in ("link", "backbone")]
        self._wires = {each.id: self._wire(each) for each in links}
        clusters = [each for each in self._root.walk() if each.tag == "cluster"]
        speeds = [each.bandwidth(key) for each in clusters for key in ("bw", "bb_bw")
                  if each.attributes.get(key)]  # fmt: skip
        speeds += [wire.up.bandwidth for wire in self._wires.values()]
        # A link has to have some bandwidth where a zone gives it none; this one never limits.
        self._unlimited = sum(speeds) or LOOPBACK.bandwidth
        """More than any message can have: all links together."""

    def cluster(self) -> Cluster:
        """Return the cluster that the one outermost zone describes."""
        for element in self._root.inside:
            if element.tag not in ZONES | _IGNORED:
                element.refuse("is no part of a platform that can be imported; remove it")
        zones = self._root.of(*ZONES)
        if len(zones) != 1:
            self._root.refuse(f"has {len(zones)} outermost zones; there has to be one")
        self._zone(zones[0], Above(), None)
        if not self._nodes:
            zones[0].refuse("holds no host")
        self._check_fat()
        nodes, switches = tuple(self._nodes), tuple(self._switches)
        if len(nodes) == 1:
            nodes, switches = (replace(nodes[0], switch=None, up=None, down=None),), ()
        try:
            return Cluster(self._path.stem, nodes, switches, placement="spread")
        except InputError as error:
            zones[0].refuse(str(error))

    # Zones

    def _zone(self, element: Element, above: Above, gateway: str | None) -> None:
        """Add what is in a zone; `gateway` is where `above` begins, None for the outermost one."""
        if element.tag == "cluster":
            return self._cluster(element, above, gateway)
        routing = element.attributes.get("routing", "")
        known = {"host", "router", "link", "backbone", "host_link", "route", "zoneRoute", "ASroute"}
        for each in element.inside:
            if each.tag not in known | ZONES | _IGNORED:
                each.refuse("is not among what can be imported")
        if routing in _STARS:
            return self._star(element, above, gateway)
        if routing not in {"Full", "None", *EDGES}:
            what = "Full, Floyd, Dijkstra, Cluster and None"
            element.refuse(f"has the routing {routing}, which is no tree; known: {what}")
        points = element.of("host", *ZONES)
        # A zone around one point adds nothing: no switch for it.
        if len(points) == 1 and gateway in (None, points[0].id, *routers_of(points[0])):
            self._attach(points[0], above, gateway, self._loopbacks(element))
        elif points:
            self._routed(element, points, above, gateway)
        return None

    def _routed(
        self, element: Element, points: Sequence[Element], above: Above, gateway: str | None
    ) -> None:
        """Add hosts and zones whose routes are written out."""
        by_name = {point.id: point for point in points}
        require_router(element, gateway)
        names = [*by_name] if gateway is None else [*by_name, gateway]
        routes, lines = routes_in(
            element, names, lambda each: self._named(each, each.id).element.id
        )
        try:
            tree = tree_of(names, routes, gateway)
        except NoTree as error:
            lines.get(error.pair, element).refuse(str(error))
        gateways = gateways_in(element)
        trunk = [self._wires[name] for name in tree.trunk]
        for wire in trunk:
            if wire.policy == "SPLITDUPLEX":
                reason = f"is on all routes between {len(names)} points, and has two directions; "
                wire.element.refuse(f"{reason}which of them is up is not known")
        top, late = self._middle(element, trunk, above)
        switches: dict[frozenset[str] | None, str] = {None: top}

        def place(branch: frozenset[str]) -> Above:
            chain = self._chain(tree.branches.get(branch, ()), late)
            return Above(switches[tree.around(branch)], chain)

        for number, branch in enumerate(each for each in tree.branches if len(each) > 1):
            switches[branch] = self._switch(
                element, f"{element.id}.{number}", place(branch), None, 0.0
            )
        loopbacks = self._loopbacks(element)
        for name, point in by_name.items():
            self._attach(point, place(frozenset([name])), gateways.get(name), loopbacks)

    def _attach(
        self, point: Element, above: Above, gateway: str | None, loopbacks: Mapping[str, Link]
    ) -> None:
        if point.tag == "host":
            loopback = loopbacks.get(point.id, LOOPBACK)
            self._host(point, point.id, point.attributes, above, loopback)
        else:
            self._zone(point, above, gateway)

    def _chain(self, names: Sequence[str], later: float) -> tuple[Wire, ...]:
        wires = [self._wires[name] for name in names]
        if later and not wires:
            return (self._free(later, self._root),)
        return (wires[0].later(later), *wires[1:]) if wires else ()

    def _free(self, latency: float, element: Element) -> Wire:
        """Return a wire that limits nothing."""
        link = Link(self._unlimited, latency)
        return Wire(link, link, "SPLITDUPLEX", element)

    def _cluster(self, element: Element, above: Above, gateway: str | None) -> None:
        """Add hosts with a link each to one router, perhaps with a backbone between all of them."""
        given = element.attributes
        if given.get("topology", "FLAT") != "FLAT":
            element.refuse(f"has the topology {given['topology']}, which is no tree")
        if gateway not in (None, router_of(element)):
            element.refuse(f"is entered at {gateway}, not at its router")
        wires = [self._wire(element, "bw", "lat", "sharing_policy", "SPLITDUPLEX")]
        if given.get("limiter_link"):
            limit = Link(element.bandwidth("limiter_link"), 0.0)
            wires.append(Wire(limit, limit, "SHARED", element))
        backbone, loopback = [], LOOPBACK
        if given.get("bb_bw"):
            backbone = [self._wire(element, "bb_bw", "bb_lat", "bb_sharing_policy")]
        if given.get("loopback_bw"):
            latency = element.latency("loopback_lat")
            loopback = Link(element.bandwidth("loopback_bw"), latency)
        top, late = self._middle(element, backbone, above)
        place = Above(top, (wires[0].later(late), *wires[1:]))
        for number in _radical(element):
            name = f"{given.get('prefix', '')}{number}{given.get('suffix', '')}"
            self._host(element, name, given, place, loopback)

    def _star(self, element: Element, above: Above, gateway: str | None) -> None:
        """Add hosts with links of their own to one router (`host_link`)."""
        require_router(element, gateway)
        for each in element.of("route", *ZONES):
            each.refuse("does not belong in a zone with the routing Cluster")
        links = {each.id: each for each in element.of("host_link")}
        for further in element.of("backbone")[1:]:
            further.refuse("is a second one of its zone; one is known")
        bones = [self._wires[each.id] for each in element.of("backbone")]
        top, late = self._middle(element, bones, above)
        for host in element.of("host"):
            if host.id not in links:
                host.refuse("has no host_link")
            wire = self._ends(links[host.id]).later(late)
            self._host(host, host.id, host.attributes, Above(top, (wire,)), LOOPBACK)

    def _ends(self, element: Element) -> Wire:
        up, down = (self._named(element, element.attributes.get(key, "")) for key in ("up", "down"))
        if up.element is down.element:
            return up
        return Wire(up.up, down.down, "SPLITDUPLEX", element)

    def _middle(self, element: Element, wires: Sequence[Wire], above: Above) -> tuple[str, float]:
        """Add the switch of a zone, in which are the `wires` that all of its routes cross; return
        its name, and half of their latency, by which the links on either side are later."""
        self._fat += [wire for wire in wires if wire.policy == "FATPIPE"]
        limits = [wire.up.bandwidth for wire in wires if wire.policy == "SHARED"]
        late = sum(wire.up.latency for wire in wires) / 2
        return self._switch(element, element.id, above, min(limits, default=None), late), late

    # Hosts and switches

    def _host(
        self, element: Element, name: str, given: Mapping[str, str], above: Above, loopback: Link
    ) -> None:
        _refuse_changes(element)
        if len(self._nodes) == MAX_RANKS:
            element.refuse(f"is beyond the first {MAX_RANKS} hosts")
        speeds = given.get("speed", "").split(",")
        state = int(element.quantity("pstate", given.get("pstate") or "0", NUMBERS))
        cores = int(element.quantity("core", given.get("core", "1"), NUMBERS))
        if not 0 <= state < len(speeds):
            element.refuse(f"has no speed for its pstate {state}")
        flops = element.quantity("speed", speeds[state], SPEEDS)
        try:
            self._nodes.append(
                Node(
                    name, cores, flops=flops, loopback=loopback,
                    watts=_watts(element, state), **self._link_up(name, "switch", above),
                )
            )  # fmt: skip
        except InputError as error:
            element.refuse(str(error))

    def _switch(
        self, element: Element, name: str, above: Above, shared: float | None, late: float
    ) -> str:
        if above.switch is not None and late:
            # Half of the backbone's latency lies between this switch and the one above.
            above = Above(above.switch, (*above.wires, self._free(late, element)))
        try:
            given = self._link_up(name, "to", above)
            self._switches.append(Switch(name, shared=shared, **given))
        except InputError as error:
            element.refuse(str(error))
        return name

    def _link_up(self, name: str, key: str, above: Above) -> dict[str, Any]:
        """Return the link of a node or switch: its wires as one, below a switch of its own where
        directions share.
        """
        if above.switch is None:
            return {}
        both = [wire for wire in above.wires if wire.policy != "FATPIPE"]
        up, down = (
            Link(
                min((getattr(wire, end).bandwidth for wire in both), default=self._unlimited),
                sum(getattr(wire, end).latency for wire in above.wires),
            )
            for end in ("up", "down")
        )
        self._fat += [wire for wire in above.wires if wire.policy == "FATPIPE"]
        shared = min((w.up.bandwidth for w in both if w.policy == "SHARED"), default=None)
        to = above.switch
        if shared is not None:
            # Directions that compete are one capacity, which only a switch can have.
            to = f"{name}.wire"
            free = {"up": Link(up.bandwidth, 0.0), "down": Link(down.bandwidth, 0.0)}
            self._switches.append(Switch(to, to=above.switch, shared=shared, **free))
        return {key: to, "up": up, "down": down}

    def _check_fat(self) -> None:
        """Refuse a FATPIPE that a single message could fill."""
        widest = max((node.up.bandwidth for node in self._nodes if node.up is not None), default=0)
        for wire in self._fat:
            # A FATPIPE limits each message alone, which a tree of shared links cannot say.
            if wire.up.bandwidth < widest:
                reason = "is a FATPIPE that limits each message by itself, and a link of a host "
                wire.element.refuse(f"{reason}carries more; make it SHARED, or wider")

    # Routes

    def _loopbacks(self, element: Element) -> dict[str, Link]:
        """Return the loopbacks of hosts for which a zone has a route."""
        found = {}
        for route in element.of("route"):
            if (host := route.attributes.get("src")) == route.attributes.get("dst"):
                links = [self._named(each, each.id).up for each in route.of("link_ctn")]
                bandwidth = min((link.bandwidth for link in links), default=LOOPBACK.bandwidth)
                found[host or ""] = Link(bandwidth, sum(link.latency for link in links))
        return found

    def _named(self, element: Element, name: str) -> Wire:
        """Return the link of this name, or the link of which the name means one direction."""
        if name in self._wires:
            return self._wires[name]
        whole = self._wires.get(re.sub(r"_(UP|DOWN)$", "", name))
        if whole is None or whole.policy != "SPLITDUPLEX":
            element.refuse(f"names a link {name} that there is not")
        return whole

    # Texts

    def _wire(
        self,
        element: Element,
        bandwidth: str = "bandwidth",
        latency: str = "latency",
        policy: str = "sharing_policy",
        default: Policy = "SHARED",
    ) -> Wire:
        _refuse_changes(element)
        link = Link(element.bandwidth(bandwidth), element.latency(latency))
        given = element.attributes.get(policy, default).upper()
        if given not in POLICIES:
            element.refuse(f"has the {policy} {given}, which does not fit")
        return Wire(link, link, POLICIES[given], element)


def _radical(element: Element) -> Iterator[int]:
    for part in element.attributes.get("radical", "").split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if ends is None:
            element.refuse(f"has a radical {part!r}, not one such as 0-7,9")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last - first >= MAX_RANKS:
            element.refuse(f"has more than {MAX_RANKS} hosts")
        yield from range(first, last + 1)


def _watts(element: Element, state: int) -> float | None:
    """Return the power of a host with all cores at work, where the file gives it."""
    for prop in element.of("prop"):
        if prop.id == "wattage_per_state":
            states = prop.attributes.get("value", "").split(",")
            try:
                return float(states[state].split(":")[-1])
            except (ValueError, IndexError):
                prop.refuse("is no list of idle:epsilon:all_cores")
    return None


def _refuse_changes(element: Element) -> None:
    for key in _CHANGES:
        if element.attributes.get(key):
            element.refuse(f"changes with time ({key}); write faults by hand instead")

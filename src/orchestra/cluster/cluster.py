"""A cluster as data: the machines, how they are joined, where the ranks are, and the faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from typing import Literal, TypeVar

from orchestra.cluster.faults import (
    Changes,
    Death,
    Delay,
    Fault,
    Join,
    LinkCut,
    LinkSlow,
    Pause,
    SlowDown,
    changes,
    joined,
    rank_of,
)
from orchestra.cluster.nodes import Channel, Link, NetworkSwitch, Node, Overhead, Path
from orchestra.cluster.units import SECONDS
from orchestra.errors import InputError, nearest
from orchestra.settings import REQUIRED, Settings, setting

F = TypeVar("F", bound=Fault)
S = TypeVar("S", Pause, Death)
Part = tuple[str, str | int]
"""The place of something in a cluster: ("nodes", "worker-3"), ("faults", 0), ("placement", "")."""


class Unfit(InputError):
    def __init__(self, part: Part, reason: str) -> None:
        super().__init__(reason)
        self.part = part


@dataclass(frozen=True, repr=False)
class Cluster(Settings):
    """Nodes at the leaves of one tree of switches, full duplex, and the ranks on them."""

    name: str = setting(REQUIRED, "in records and figures")
    nodes: tuple[Node, ...] = setting(REQUIRED, "the machines")
    switches: tuple[NetworkSwitch, ...] = setting(
        (), "the tree that joins them; one node needs none"
    )
    _: KW_ONLY
    placement: Literal["spread", "packed"] | tuple[str, ...] = setting(
        REQUIRED, "of ranks: one a node in turn, node by node as cores last, or names of nodes"
    )
    faults: tuple[Fault, ...] = setting((), "what goes wrong, and which ranks join, and when")
    tcp: bool = setting(True, "whether messages between nodes go by TCP; false: natively")
    overhead: Overhead | None = setting(
        None, "what messages cost beside the links; none: as calibrated"
    )

    def check(self) -> None:
        """Check that all names are known, and that the switches form one tree.

        Raises:
            Unfit: says which part does not fit.
        """
        self._check_names()
        self._check_tree()
        self._check_prices()
        for node in self.nodes:
            part = ("nodes", node.name)
            if node.switch is not None:
                _require(part, node.switch, self._by_switch, "there is no switch")
            elif len(self.nodes) > 1:
                raise Unfit(part, f"{node.name} has no link to a switch; only a single node may")
        for name in () if isinstance(self.placement, str) else self.placement:
            _require(("placement", ""), name, self._by_name, "there is no node")
        for index, fault in enumerate(self.faults):
            self._check_fault(("faults", index), fault)

    # Its links

    @property
    def links(self) -> list[Link]:
        """Both directions of every cable between nodes and switches."""
        ends = (link for part in self._parts for link in (part.up, part.down))
        return [link for link in ends if link is not None]

    def scaled(self, *, bandwidth: float = 1.0, latency: float = 1.0) -> Cluster:
        """Return the cluster with the bandwidths and latencies between its nodes multiplied."""

        def link(old: Link | None) -> Link | None:
            return old and Link(old.bandwidth * bandwidth, old.latency * latency)

        nodes = tuple(replace(n, up=link(n.up), down=link(n.down)) for n in self.nodes)
        switches = tuple(
            replace(s, up=link(s.up), down=link(s.down), shared=s.shared and s.shared * bandwidth)
            for s in self.switches
        )
        return replace(self, nodes=nodes, switches=switches)

    # Where the ranks are

    @cached_property
    def joins(self) -> tuple[Join, ...]:
        """The ranks that join, in the order of their numbers, which follow those of the start."""
        return tuple(sorted(self._faults(Join), key=lambda join: join.at))

    def alone_on(self, name: str) -> Cluster:
        """Return the cluster with one rank, on the node `name`, which nobody joins."""
        faults = tuple(fault for fault in self.faults if not isinstance(fault, Join))
        return replace(self, placement=(name,), faults=faults)

    def nodes_of(self, ranks: int) -> tuple[Node, ...]:
        """Return the node of each rank: of the `ranks` at the start, and of those that join.

        Raises:
            InputError: the placement names another number of ranks, or a fault befalls none.
        """
        # Kept: the simulation asks for every message.
        if ranks not in self._placed:
            self._placed[ranks] = self._place(ranks)
        return self._placed[ranks]

    def threads_of(self, ranks: int, chosen: int | None = None) -> tuple[int, ...]:
        """Return how many threads each rank computes with; see `Node.threads`. Those of the start
        keep theirs, however many join."""
        nodes = self.nodes_of(ranks)
        there = Counter(node.name for node in nodes[:ranks])
        threads = [node.threads(there[node.name], chosen) for node in nodes[:ranks]]
        for node in nodes[ranks:]:
            there[node.name] += 1
            threads.append(node.threads(there[node.name], chosen))
        return tuple(threads)

    def bandwidths_of(self, ranks: int) -> tuple[float, ...]:
        """Return the bytes/s of each rank's part of its node's link (a single node: loopback), once
        all have joined."""
        nodes = self.nodes_of(ranks)
        there = Counter(node.name for node in nodes)
        return tuple(
            # Both directions are needed for an exchange, and ranks of one node share its link.
            min(link.bandwidth for link in (node.up or node.loopback, node.down or node.loopback))
            / there[node.name]
            for node in nodes
        )

    def _place(self, ranks: int) -> tuple[Node, ...]:
        for fault in self.faults:
            for name in fault.names:
                rank = rank_of(name)
                if rank is not None and rank >= ranks + len(self.joins):
                    raise InputError(
                        f"cluster {self.name}: a fault befalls {name}, but ranks are 0 to "
                        f"{ranks + len(self.joins) - 1}; raise ranks or change faults"
                    )
                if isinstance(fault, Pause | Death) and rank is not None:
                    self._require_there(fault, rank, ranks)
        order: Iterable[Node] = self.nodes
        if self.placement == "packed":
            order = (node for node in self.nodes for _ in range(node.slots))
        elif self.placement != "spread":
            order = [self._by_name[name] for name in self.placement]
            if len(self.placement) != ranks:
                raise InputError(
                    f"cluster {self.name} places {len(self.placement)} ranks, but there are "
                    f"{ranks}; name a node for each, or write ranks: spread or packed"
                )
        joining = (self._by_name[join.node] for join in self.joins)
        return (*islice(cycle(order), ranks), *joining)

    def _require_there(self, fault: Pause | Death, rank: int, ranks: int) -> None:
        if not self._is_there(rank, ranks, fault.at):
            raise InputError(
                f"cluster {self.name}: {type(fault).__name__} befalls rank {rank} at "
                f"{SECONDS.write(fault.at)}, before it has joined; change faults"
            )

    def _is_there(self, rank: int, ranks: int, time: float) -> bool:
        """Return whether `rank` has joined before `time`, or began with the run."""
        return rank < ranks or time > self.joins[rank - ranks].at

    # What a message crosses

    def path(self, source: Node, target: Node) -> Path:
        """Return the way from one node to another, or the loopback of one node."""
        key = source.name, target.name
        if key not in self._paths:
            names = self._names_of(source, target)
            channels = tuple(self.channels[name] for name in names if name in self.channels)
            self._paths[key] = Path(channels, sum(channel.latency for channel in channels))
        return self._paths[key]

    @cached_property
    def channels(self) -> dict[str, Channel]:
        """Every capacity that there is, by its name: "worker-3 up", "worker-3 loopback"."""
        links: dict[str, Link | None] = {}
        for part in self._parts:
            if isinstance(part, NetworkSwitch) and part.shared is not None:
                links[f"{part.name} shared"] = Link(part.shared, 0.0)
            links |= {f"{part.name} up": part.up, f"{part.name} down": part.down}
            if isinstance(part, Node):
                links[f"{part.name} loopback"] = part.loopback
        return {
            name: Channel(name, link.bandwidth, link.latency)
            for name, link in links.items()
            if link is not None
        }

    def _names_of(self, source: Node, target: Node) -> Iterator[str]:
        """Yield the names of the channels on the way, with those of switches that share nothing."""
        if source.name == target.name:
            yield f"{source.name} loopback"
            return
        up, down = self._switches_above(source), self._switches_above(target)
        common = next(name for name in up if name in down)
        yield f"{source.name} up"
        for name in up[: up.index(common)]:
            yield from (f"{name} shared", f"{name} up")
        yield f"{common} shared"
        for name in reversed(down[: down.index(common)]):
            yield from (f"{name} down", f"{name} shared")
        yield f"{target.name} down"

    def _switches_above(self, node: Node) -> list[str]:
        found, name = [], node.switch
        while name is not None:
            found.append(name)
            name = self._by_switch[name].to
        return found

    # What changes with time

    def speed_changes(self, node: Node) -> Changes:
        """Return the factors on the speed of `node`; slow-downs at the same time multiply."""
        slow = (fault for fault in self._faults(SlowDown) if fault.node == node.name)
        # Factors are on the speed, while the fault's is on durations.
        return changes((fault, 1 / fault.factor) for fault in slow)

    def bandwidth_changes(self, channel: Channel) -> Changes:
        """Return the factors on the bandwidth of `channel`: 0 while its link is cut."""
        owner, _, kind = channel.name.rpartition(" ")
        if kind not in ("up", "down"):
            return changes(())
        cut = [(fault, 0.0) for fault in self._faults(LinkCut) if fault.of == owner]
        slow = [(fault, 1 / fault.factor) for fault in self._faults(LinkSlow) if fault.of == owner]
        return changes([*cut, *slow])

    def pauses(self, rank: int, ranks: int) -> tuple[tuple[float, float], ...]:
        """Return the times (from, to) at which `rank` is stopped, rising and disjoint."""
        own = self._befalling(Pause, rank, ranks)
        return joined((fault.at, fault.at + fault.seconds) for fault in own)

    def death(self, rank: int, ranks: int) -> float | None:
        """Return when `rank` dies; None if it does not."""
        return min((fault.at for fault in self._befalling(Death, rank, ranks)), default=None)

    def delay(self, source: int, target: int, ranks: int, time: float) -> float:
        """Return the seconds that a message between two ranks arrives later if sent at `time`."""
        return sum(
            fault.seconds
            for fault in self.faults
            if isinstance(fault, Delay)
            and fault.holds(time)
            and self._means(fault.source, source, ranks)
            and self._means(fault.target, target, ranks)
        )

    def _befalling(self, kind: type[S], rank: int, ranks: int) -> list[S]:
        """Return the faults of `kind` of a rank or its node, once the rank is there."""
        return [
            fault
            for fault in self._faults(kind)
            if self._means(fault.of, rank, ranks) and self._is_there(rank, ranks, fault.at)
        ]

    def _faults(self, kind: type[F]) -> list[F]:
        return [fault for fault in self.faults if isinstance(fault, kind)]

    def _means(self, name: str | None, rank: int, ranks: int) -> bool:
        return name in (None, f"rank {rank}", self.nodes_of(ranks)[rank].name)

    # Names

    @cached_property
    def _parts(self) -> list[Node | NetworkSwitch]:
        return [*self.nodes, *self.switches]

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _by_switch(self) -> dict[str, NetworkSwitch]:
        return {switch.name: switch for switch in self.switches}

    @cached_property
    def _paths(self) -> dict[tuple[str, str], Path]:
        return {}

    @cached_property
    def _placed(self) -> dict[int, tuple[Node, ...]]:
        return {}

    # Checks

    def _check_names(self) -> None:
        if not self.nodes:
            raise Unfit(("nodes", ""), "a cluster needs at least one node")
        seen: set[str] = set()
        for kind, parts in (("nodes", self.nodes), ("switches", self.switches)):
            for part in parts:
                if part.name in seen:
                    raise Unfit((kind, part.name), f"the name {part.name} is given twice")
                seen.add(part.name)

    def _check_prices(self) -> None:
        priced = [node for node in self.nodes if node.price is not None]
        for node in priced:
            if node.currency != priced[0].currency:
                reason = f"the price of {node.name} is in {node.currency}, that of {priced[0].name}"
                reason += f" in {priced[0].currency}; give all in one currency"
                raise Unfit(("nodes", node.name), reason)

    def _check_tree(self) -> None:
        roots = [switch.name for switch in self.switches if switch.to is None]
        for switch in self.switches:
            part = ("switches", switch.name)
            if switch.to is not None:
                _require(part, switch.to, self._by_switch, "there is no switch")
            elif switch.name != roots[0]:
                raise Unfit(part, f"{switch.name} and {roots[0]} have no switch above; join them")
        for switch in self.switches:
            above, to = set(), switch.to
            while to is not None:
                if to in above:
                    raise Unfit(("switches", switch.name), f"{switch.name} leads into a circle")
                above.add(to)
                to = self._by_switch[to].to

    def _check_fault(self, part: Part, fault: Fault) -> None:
        if isinstance(fault, LinkCut | LinkSlow):
            linked = [each.name for each in self._parts if each.up is not None]
            _require(part, fault.of, linked, "no link of")
            return
        for name in fault.names:
            if rank_of(name) is None or isinstance(fault, SlowDown | Join):
                _require(part, name, self._by_name, "there is no node")


def _require(part: Part, name: str, known: Iterable[str], absent: str) -> None:
    """Refuse the `part` that names what is not `known`."""
    names = list(known)
    if name not in names:
        hint = nearest(name, names) if names else "there is none at all"
        raise Unfit(part, f"{absent} {name!r}; {hint}")

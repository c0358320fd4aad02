"""Who talks to whom, step by step, and the weights that they mix with. Pure data.

A graph may change from step to step, and then repeats.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

from orchestra.errors import InputError
from orchestra.settings import MAX_RANKS, MAX_SEED, Settings, setting

MAX_LINKS = 2_000_000
MAX_DRAWN = 200_000

Graph = tuple[tuple[int, ...], ...]
"""For each rank, the ranks to which it sends in ascending order, without itself."""

Weights = tuple[Mapping[int, float], ...]
"""W_ij: for each rank i, the weight of the values from each rank j, itself included."""


@dataclass(frozen=True, repr=False)
class Topology(Settings, ABC):
    """Which ranks send to which, for any number of ranks from 1."""

    def period(self, ranks: int) -> int:
        """Return the number of steps after which the graphs repeat."""
        return 1

    @abstractmethod
    def links(self, ranks: int, step: int) -> Graph:
        """Return the graph of step `step` (from 0, below `period`)."""

    def graph(self, ranks: int, step: int) -> Graph:
        """Return the graph of any `step`, from 0."""
        return _links(self, ranks, step % self.period(ranks))

    def graphs(self, ranks: int) -> list[Graph]:
        """Return the graphs of a period."""
        return [self.graph(ranks, step) for step in range(self.period(ranks))]


@lru_cache(maxsize=1024)
def _links(topology: Topology, ranks: int, step: int) -> Graph:
    graph = topology.links(ranks, step)
    wrong = [each for each in (graph, *graph) if not isinstance(each, tuple)]
    if wrong:
        raise InputError(
            f"{type(topology).__name__}.links has to return a tuple of one tuple of ranks for each "
            f"rank, not a {type(wrong[0]).__name__}: write tuple(...) around it"
        )
    return graph


@lru_cache(maxsize=1024)
def sources_of(graph: Graph) -> Graph:
    """Return the ranks that send to each rank, rising."""
    sources: list[list[int]] = [[] for _ in graph]
    for source, targets in enumerate(graph):
        for target in targets:
            sources[target].append(source)
    return tuple(map(tuple, sources))


def connected(graphs: Sequence[Graph]) -> bool:
    """Return whether `graphs`, repeated in turn, carry information of any rank to every other."""
    ranks = range(len(graphs[0]))
    union = tuple(tuple({to for graph in graphs for to in graph[rank]}) for rank in ranks)
    # Whoever rank 0 reaches and is reached by reaches all others through it.
    return all(len(_reached(links)) == len(union) for links in (union, sources_of(union)))


def _reached(links: Sequence[Iterable[int]]) -> set[int]:
    reached, fresh = {0}, {0}
    while fresh:
        fresh = set().union(*(links[rank] for rank in fresh)) - reached
        reached |= fresh
    return reached


def _require_room(ranks: int, degree: int, most: int = MAX_LINKS) -> None:
    if ranks * degree > most:
        raise InputError(
            f"{ranks} ranks with {degree} neighbours each are more than {most:,} links: lower "
            "ranks, or take a topology with fewer neighbours"
        )


def _circulant(ranks: int, distances: set[int]) -> Graph:
    """Return the graph in which each rank sends to those `distances` further on the circle."""
    steps = {distance % ranks for distance in distances} - {0}
    _require_room(ranks, len(steps))
    return tuple(
        tuple(sorted((rank + distance) % ranks for distance in steps)) for rank in range(ranks)
    )


@dataclass(frozen=True, repr=False)
class Ring(Topology):
    """Everyone and both neighbours on a circle; few bytes, slow to spread."""

    def links(self, ranks: int, step: int) -> Graph:
        return _circulant(ranks, {1, -1})


@dataclass(frozen=True, repr=False)
class Exponential(Topology):
    """Everyone sends to the ranks 1, 2, 4, 8 ... further on: directed, spreads in log2(n) steps.

    With `peers` = p the graph changes from step to step (Assran et al., ICML 2019): group i holds
    the distances j (p+1)^i, j = 1 .. p, and the groups take turns. One peer is enough for exact
    agreement after log2(n) steps where n is a power of 2.
    """

    _: KW_ONLY
    peers: int | None = setting(
        None, "ranks that each one sends to in a step, the distances taking turns; none: all",
        low=1, high=MAX_RANKS,
    )  # fmt: skip

    def period(self, ranks: int) -> int:
        """Return the number of groups; 1 where every step uses all distances."""
        return 1 if self.peers is None else len(self._powers(ranks, self.peers + 1))

    def links(self, ranks: int, step: int) -> Graph:
        """Return the graph of a step: rank i sends to i + each distance of the step."""
        if self.peers is None:
            return _circulant(ranks, set(self._powers(ranks, 2)))
        power = self._powers(ranks, self.peers + 1)[step]
        peers = min(self.peers, ranks)  # beyond that they begin again
        return _circulant(ranks, {j * power for j in range(1, peers + 1)})

    @staticmethod
    def _powers(ranks: int, base: int) -> list[int]:
        powers = [1]
        while powers[-1] * base < ranks:
            powers.append(powers[-1] * base)
        return powers


@dataclass(frozen=True, repr=False)
class Star(Topology):
    """Everyone and rank 0, which is in the middle."""

    def links(self, ranks: int, step: int) -> Graph:
        return (tuple(range(1, ranks)), *((0,) for _ in range(1, ranks)))


@dataclass(frozen=True, repr=False)
class Complete(Topology):
    """Everyone with everyone: one step agrees exactly, at the bytes that this takes."""

    def links(self, ranks: int, step: int) -> Graph:
        return _circulant(ranks, set(range(1, ranks)))


@dataclass(frozen=True, repr=False)
class RandomRegular(Topology):
    """A random undirected graph in which everyone has the same number of neighbours.

    Made from a regular circle by exchanging the ends of random pairs of edges. Where ranks x
    degree is odd there is no such graph, and the degree is one higher.
    """

    degree: int = setting(
        3, "neighbours of each rank; all others where there are fewer", low=2, high=MAX_RANKS
    )
    _: KW_ONLY
    seed: int = setting(0, "of the random choice", low=0, high=MAX_SEED)

    def links(self, ranks: int, step: int) -> Graph:
        degree = min(self.degree, ranks - 1)
        # Each edge has two ends, so that ranks x degree has to be even.
        degree += ranks * degree % 2
        _require_room(ranks, degree, MAX_DRAWN)
        distances = list(range(1, degree // 2 + 1))
        circle = {frozenset((i, (i + d) % ranks)) for d in distances for i in range(ranks)}
        if degree % 2:
            circle |= {frozenset((i, i + ranks // 2)) for i in range(ranks // 2)}
        edges = sorted((min(edge), max(edge)) for edge in circle)
        _shuffle_edges(edges, ranks, random.Random(self.seed))
        return tuple(tuple(sorted(own)) for own in _neighbours(edges, ranks))


def _shuffle_edges(edges: list[tuple[int, int]], ranks: int, stream: random.Random) -> None:
    """Exchange ends of pairs of edges, until many were tried and the graph is connected."""
    present, tried = set(edges), 0
    # An exchange may cut the graph in two, so that it goes on until it is connected.
    while tried < 10 * len(edges) or len(_reached(_neighbours(edges, ranks))) < ranks:
        tried += 1
        first, second = stream.randrange(len(edges)), stream.randrange(len(edges))
        (a, b), (c, d) = edges[first], edges[second]
        if stream.random() < 0.5:
            c, d = d, c
        new = [(min(a, d), max(a, d)), (min(c, b), max(c, b))]
        if len({a, b, c, d}) == 4 and present.isdisjoint(new):
            present.difference_update((edges[first], edges[second]))
            present.update(new)
            edges[first], edges[second] = new


def _neighbours(edges: list[tuple[int, int]], ranks: int) -> list[set[int]]:
    neighbours: list[set[int]] = [set() for _ in range(ranks)]
    for a, b in edges:
        neighbours[a].add(b)
        neighbours[b].add(a)
    return neighbours


@lru_cache(maxsize=1024)
def doubly_stochastic(graph: Graph) -> Weights:
    """Return weights whose rows and columns all sum to 1, so that mixing keeps the mean.

    Uniform, 1 / (d + 1), where everyone sends to and hears from d ranks. Else those of
    Metropolis and Hastings, W_ij = 1 / (1 + max(d_i, d_j)), which need links both ways.

    Raises:
        InputError: `graph` is neither regular nor undirected.
    """
    sources = sources_of(graph)
    degrees = {len(peers) for peers in (*graph, *sources)}
    if len(degrees) == 1:
        share = 1.0 / (degrees.pop() + 1)
        return tuple({rank: share, **dict.fromkeys(own, share)} for rank, own in enumerate(sources))
    if sources != graph:
        raise InputError(
            "this graph has one-way links, and not as many for everyone: no simple weights keep "
            "its mean; take StochasticGradientPush, or a regular or undirected topology"
        )
    rows = []
    for rank, peers in enumerate(graph):
        # Metropolis and Hastings: both ends of a link take the same weight.
        row = {peer: 1.0 / (1 + max(len(peers), len(graph[peer]))) for peer in peers}
        rows.append({rank: 1.0 - sum(row.values()), **row})
    return tuple(rows)


def uniform_shares(targets: tuple[int, ...], rank: int, step: int = 0) -> dict[int, float]:
    """Return the shares that `rank` sends to each target, and keeps: equal parts of 1."""
    share = 1.0 / (len(targets) + 1)
    return {rank: share, **dict.fromkeys(targets, share)}


def random_shares(targets: tuple[int, ...], rank: int, step: int, seed: int) -> dict[int, float]:
    """Return the shares that `rank` sends to each target, and keeps: random in each step, sum 1."""
    # A text seeds alike in every process, which `hash` does not.
    stream = random.Random(f"{seed}-{rank}-{step}")
    drawn = {to: stream.uniform(0.1, 1.0) for to in (rank, *targets)}
    total = sum(drawn.values())
    return {to: part / total for to, part in drawn.items()}

"""The tree that the routes between points run along, if they run along one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

Pair = frozenset[str]


class NoTree(ValueError):
    """There is none, on account of the route between `pair`."""

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
    trunk: Sequence[str] = ()

    def around(self, points: frozenset[str]) -> frozenset[str] | None:
        """The smallest branch that has `points` and more; None where it is the whole."""
        return min((each for each in self.branches if points < each), key=len, default=None)


def tree_of(
    points: Sequence[str], routes: Mapping[Pair, Sequence[str]], root: str | None = None
) -> RouteTree:
    """The tree of the `routes`, the names of the links between each two of `points`.

    In a tree a link splits the points in two, and is on the routes from one part to the other and
    on no other; links whose splits do not contradict each other form a tree (P. Buneman, 1971).

    Args:
        root: the point that no branch has; without it the first one may be a branch of its own.

    Raises:
        NoTree: there is no route between two of them, or the links are not those of a tree.
    """
    pairs = [frozenset(pair) for pair in combinations(points, 2)]
    users: dict[str, set[Pair]] = {}
    for pair in pairs:
        if pair not in routes:
            raise NoTree(pair, f"there is no route between {' and '.join(sorted(pair))}")
        for link in routes[pair]:
            users.setdefault(link, set()).add(pair)
    first = root or points[0]
    branches: dict[frozenset[str], list[str]] = {}
    trunk = []
    for link, used in users.items():
        beyond = frozenset(other for other in points if {first, other} in used)
        others = frozenset(points) - beyond
        split = {frozenset((here, there)) for here in others for there in beyond}
        if used == split and beyond:
            alone = root is None and others == {first}
            branches.setdefault(others if alone else beyond, []).append(link)
        elif len(used) == len(pairs):
            trunk.append(link)
        else:
            pair = min(used ^ split, key=sorted)
            raise NoTree(pair, f"link {link} is on routes that form no tree")
    for one, other in combinations(branches, 2):
        if one & other and not (one <= other or other <= one):
            link = branches[other][0]
            pair = min(users[link], key=sorted)
            raise NoTree(pair, f"link {link} is on routes that form no tree")
    if trunk and any(len(branch) > 1 for branch in branches):
        pair = pairs[0]
        raise NoTree(pair, f"link {trunk[0]} is on all routes, though they part before it")
    ordered = sorted(branches, key=lambda branch: (-len(branch), sorted(branch)))
    return RouteTree({branch: branches[branch] for branch in ordered}, trunk)

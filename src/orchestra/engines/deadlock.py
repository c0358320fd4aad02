"""Ranks that wait for each other: found and told."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def stuck(
    waiting: Mapping[int, tuple[int, ...]], alive: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """The ranks of `waiting` that no living rank outside can release.

    Args:
        waiting: for each rank that has been blocked for long, the ranks any of which may
            release it.
        alive: the ranks that still take part.

    Returns:
        The largest part of `waiting` in which every wait leads to a rank of that part, or to
        one that no longer takes part.
    """
    blocked = dict(waiting)
    while True:
        free = [
            rank
            for rank, targets in blocked.items()
            if any(target in alive and target not in blocked for target in targets)
        ]
        if not free:
            return blocked
        for rank in free:
            del blocked[rank]


def tell(
    blocked: Mapping[int, tuple[int, ...]], whats: Mapping[int, str], states: Mapping[int, str]
) -> str:
    """Follow the waits from the first blocked rank, until they repeat or lead to nobody alive."""
    rank, path, lines = min(blocked), set[int](), list[str]()
    while rank in blocked and rank not in path:
        path.add(rank)
        target = next((t for t in blocked[rank] if t in blocked), blocked[rank][0])
        what = f" ({whats[rank]})" if whats.get(rank) else ""
        lines.append(f"rank {rank} waits for rank {target}{what}")
        rank = target
    if rank not in blocked:
        lines.append(f"rank {rank} {states.get(rank, 'is not part of the run')}")
    return ", ".join(lines)

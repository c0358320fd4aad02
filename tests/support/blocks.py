"""Blocks of a benchmark, made up."""

from __future__ import annotations

from benchmarks.turns import Block, Blocks


def blocks_of(**seconds: list[float]) -> Blocks:
    """Blocks whose processor time is twice the wall time."""
    return {name: [Block(each, 2 * each) for each in found] for name, found in seconds.items()}

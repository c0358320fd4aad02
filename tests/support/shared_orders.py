"""Runs whose workers take samples from one queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.training import step_lines

from orchestra.settings import parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES

EIGHT = """
all_nodes:
  cores: 2
  jitter: null
  loopback: {bandwidth: 30 GB/s, latency: 1 us}
  link: {bandwidth: 100 Gbit/s, latency: 1 us}
nodes:
  fast: {count: 6, flops: 10 GFLOP/s}
  slow: {count: 2, flops: 2.5 GFLOP/s}
  server: {flops: 100 GFLOP/s}
ranks: spread
"""
TASK = "images(sample_flops=1e9)"
SPEEDS = 6 * 10 + 2 * 2.5  # samples a second at 1 GFLOP for each


def strategy_of(text: str) -> Strategy:
    strategy: Strategy = parse(text, STRATEGIES, where="test")
    return strategy


def positions(folder: Path, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """[first, end) of each batch that `ranks` took, in the global order."""
    lines = [line for rank in ranks for line in step_lines(folder, rank) if "position" in line]
    return sorted((line["position"], line["position"] + line["samples"]) for line in lines)


def covers(batches: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether `batches` are `start` to `stop`, each sample once."""
    edges = [start, *(end for _, end in batches)]
    return edges[-1] == stop and [first for first, _ in batches] == edges[:-1]

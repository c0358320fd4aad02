"""What sharding saves, and what it costs: peak memory and seconds of a step, by level.

python -m benchmarks.shards
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import orchestra
from orchestra.strategies.sharded_all_reduce import SHARDS

EXAMPLES = Path(__file__).parents[1] / "examples"
MEGABYTE = 1e6


def main() -> None:
    """Print a row for each level and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1250)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    given = parser.parse_args()
    os.chdir(EXAMPLES)
    sys.path.insert(0, str(EXAMPLES))
    task = f"larger_than_memory:network(width={given.width}, layers={given.layers})"
    print("| ranks | shard | by formula | peak | peak of the leader | seconds a step |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ranks in given.ranks:
        for level in SHARDS:
            with tempfile.TemporaryDirectory() as out:
                record = orchestra.train(
                    task,
                    f"AllReduce(shard={level!r})",
                    ranks=ranks,
                    steps=given.steps,
                    batch_size=32 // ranks,
                    bucket_megabytes=5.0,
                    optimizer="Adam(lr=1e-4)",
                    snapshots=0,
                    out=Path(out) / "run",
                    quiet=True,
                )
            formula = sum(record.machine.by_rank[-1].memory.values()) / MEGABYTE
            peaks = (rank.peak_memory_bytes or 0 for rank in record.machine.by_rank)
            leader, *others = (peak / MEGABYTE for peak in peaks)
            seconds = (record.time.training or 0.0) / given.steps
            print(
                f"| {ranks} | {level} | {formula:.0f} MB | {max(others):.0f} MB | {leader:.0f} MB "
                f"| {seconds:.2f} |"
            )


if __name__ == "__main__":
    main()

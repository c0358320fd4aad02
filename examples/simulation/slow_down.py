"""One of eight machines computes four times as slowly for a while: which steps that costs what.

    python examples/simulation/slow_down.py

A gradient takes 0.32 s on a machine of slow_down.yaml. Under a ring all wait for the slow one in
each step; under local SGD, which averages every fourth step, only then. It prints:

    step    ring  local SGD
       1   0.321      0.320
       2   0.749      0.320
       3   1.282      0.320
       4   0.807      2.196
       5   0.321      0.320
       6   0.321      0.320
       7   0.321      0.320
       8   0.321      0.321
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import orchestra

HERE = Path(__file__).parent


def main() -> None:
    """A line for each step: how long it took."""
    ring, local = step_seconds('AllReduce("ring")'), step_seconds("LocalSGD(4)")
    print("step    ring  local SGD")
    for number, (one, other) in enumerate(zip(ring, local, strict=True), start=1):
        print(f"{number:4}  {one:6.3f}  {other:9.3f}")


def step_seconds(strategy: str) -> list[float]:
    """Virtual seconds of each step of the first rank."""
    with tempfile.TemporaryDirectory() as out:
        folder = Path(out) / "run"
        orchestra.train(
            "synthetic(1_000, tensors=1, sample_flops=1e9)", strategy, ranks=8, steps=8,
            batch_size=32, snapshots=0, trace_steps=0, threads=1, engine="simulation",
            cluster=str(HERE / "slow_down.yaml"), calibration="none", out=folder, quiet=True,
        )  # fmt: skip
        lines = next(folder.rglob("steps-rank-0.jsonl")).read_text().splitlines()
    ends = [0.0, *(json.loads(line)["seconds"] for line in lines)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


if __name__ == "__main__":
    main()

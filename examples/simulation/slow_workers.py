"""What slow workers cost, one that always is slow and all by turns, under each kind of strategy.

    python examples/simulation/slow_workers.py

A gradient takes 0.32 s on a machine of lan.yaml, with one thread. In one_slow.yaml one of the eight
needs four times as long, by speed it has a quarter of the others' samples; in varying.yaml each
gradient takes its time times a number drawn by chance, of mean 1. Under the asynchronous server a
worker that is free takes the next batch, so that the others do what the slow one cannot. It prints:

                  equal  one slow  by speed   varying
    ring           6.5445   25.7481    7.3481   10.8874
    local SGD      6.4301   25.6340    7.2340    7.6159
    asynchronous   6.7808    7.7430    7.5038    6.6761
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import orchestra

HERE = Path(__file__).parent
TASK = "synthetic(100_000, tensors=1, sample_flops=1e9)"
STRATEGIES = {
    "ring": 'AllReduce("ring")',
    "local SGD": "LocalSGD(10)",
    "asynchronous": 'ParameterServer(consistency="asynchronous", placement="beside")',
}
BY_SPEED = [1, 1, 1, 1, 1, 1, 1, 0.25]


def main() -> None:
    """A line for each strategy, a column for each cluster: virtual seconds of 20 steps."""
    print("              equal  one slow  by speed   varying")
    for label, strategy in STRATEGIES.items():
        seconds = [
            simulated(strategy, "lan.yaml"),
            simulated(strategy, "one_slow.yaml"),
            simulated(strategy, "one_slow.yaml", shares=BY_SPEED),
            simulated(strategy, "varying.yaml"),
        ]
        print(f"{label:12}" + "".join(f"  {value:8.4f}" for value in seconds)[1:])


def simulated(strategy: str, cluster: str, **settings: object) -> float:
    """Seconds from the first step to the last one's end."""
    with tempfile.TemporaryDirectory() as out:
        record = orchestra.train(
            TASK, strategy, ranks=8, steps=20, batch_size=32, threads=1, engine="simulation",
            tensors="shapes", cluster=str(HERE / cluster), calibration="none",
            out=Path(out) / "run", quiet=True, **settings,
        )  # fmt: skip
    assert record.time.training is not None
    return record.time.training


if __name__ == "__main__":
    main()

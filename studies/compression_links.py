"""What a step takes with each compressor on emulated links of 10, 100 and 1000 Mbit/s, and faster.

    sudo python -m studies.compression_links [--megabits 10,100,1000,100000] [--rounds 3]

Four nodes with 0.45 of a core each train LeNet-5 in batches of 32. All strategies take turns; every
other round runs in reverse. The last bandwidth is more than the kernel carries: there the links are
not the limit. docs/results/compression.md has the table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import orchestra

NODES, SPEED = 4, 0.45
PLAIN = 'AllReduce("ring")'
STRATEGIES = (
    PLAIN,
    *(
        f'AllReduce("ring", compression={compressor})'
        for compressor in (
            "FP16()", "BF16()", "PowerSGD(1)", "PowerSGD(4)", "RandomK(0.01)", "QSGD(7)",
            "QSGD(1, norm='max')", "SignSGD()", "TopK(0.01)", "Threshold(0.01)", "DGC(0.001)",
        )
    ),
)  # fmt: skip
STEPS = {10.0: 15, 100.0: 40}
"""By Mbit/s; elsewhere 80."""


def main() -> None:
    """A line for each strategy and bandwidth."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabits", default="10,100,1000,100000", help="a second, of each link")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("Mbit/s  strategy                                         ms a step  ratio  spread")
    for megabits in map(float, given.megabits.split(",")):
        for line in lines(megabits, given.rounds):
            print(line, flush=True)


def lines(megabits: float, rounds: int) -> list[str]:
    """The milliseconds of a step, and the median of the ratios to the plain ring in a round."""
    seconds: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for number in range(rounds):
        for strategy in STRATEGIES[:: 1 if number % 2 == 0 else -1]:
            seconds[strategy].append(step_seconds(strategy, megabits))
    found = []
    for strategy, each in seconds.items():
        ratios = [a / b for a, b in zip(each, seconds[PLAIN], strict=True)]
        found.append(
            f"{megabits:6g}  {strategy:48} {1e3 * statistics.median(each):9.1f}"
            f"  {statistics.median(ratios):5.2f}  {_range(ratios)}"
        )
    return found


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def step_seconds(strategy: str, megabits: float) -> float:
    """Seconds of a step, from one run."""
    steps = STEPS.get(megabits, 80)
    cluster = (
        f"containers_10mbit(nodes={NODES}, speed={SPEED}, jitter=None, "
        f'bandwidth="{megabits:g} Mbit/s")'
    )
    with tempfile.TemporaryDirectory() as folder:
        record = orchestra.train(
            "digits28", strategy, ranks=NODES, engine="emulation", cluster=cluster,
            out=Path(folder) / "run", quiet=True, batch_size=32, equal="worker_batch", steps=steps,
            snapshots=0, optimizer="SGD(lr=0.1)", threads=1, trace_steps=0,
            # The learning rate is too high for some of them; a step takes as long.
            stop_on_nonfinite=False,
        )  # fmt: skip
    assert record.time.training is not None
    return record.time.training / steps


if __name__ == "__main__":
    main()

"""The published times of the O.N.O. project by workers, beside the simulation's, in ratios to one.

    python -m studies.claims_at_scale.ono

Its report states: LeNet-5 on MNIST, Adam, batches of 64, 48 epochs, containers of one processor on
one host, 10 Mbit/s, one server. Here the same model is simulated, without values, on
`containers_10mbit`; processors have the speed at which one worker takes the published time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import orchestra

EPOCHS, ONE_WORKER = 48, 624.0
"""Seconds of one worker: what the published ratios and seconds of the others agree on."""
PUBLISHED = {  # workers: all-reduce, synchronous server, asynchronous server, Strategy-Switch
    2: (0.95, 0.97, 1.43, 1.50),
    4: (1.67, 1.56, 2.10, 2.12),
    6: (2.14, 1.83, 2.26, 2.30),
    8: (2.11, 1.70, 2.43, 2.34),
    12: (2.15, 1.63, 2.52, 2.41),
    16: (2.16, 1.54, 2.73, 2.59),
}
"""One worker's seconds over those of so many, read off the figures of its report, to about 1 %."""

IMAGES, MNIST = 20_000, 60_000
SERVER = "ParameterServer(consistency='{0}')"
ASYNCHRONOUS = SERVER.format("asynchronous")
ROWS = {  # by label: the strategy, ranks beside the workers, and passes over the images
    "all-reduce": ("AllReduce('ring')", 0, 1),
    "synchronous server": (SERVER.format("synchronous"), 1, 1),
    "asynchronous server": (ASYNCHRONOUS, 1, 1),
    "switch": (f"Switch(AllReduce('ring'), {ASYNCHRONOUS}, when=AfterFraction(0.1))", 0, 1),
    "average once an epoch": ("LocalSGD(None, every_epochs=3)", 0, 3),
}


def seconds(strategy: str, ranks: int, epochs: int, speed: float) -> float:
    """Of as many images as an epoch of MNIST has, on so many containers."""
    with tempfile.TemporaryDirectory() as folder:
        record = orchestra.train(
            "digits28", strategy, ranks, out=folder, quiet=True,
            engine="simulation", tensors="shapes", calibration="none",
            cluster=f"containers_10mbit({ranks}, speed={speed!r})",
            epochs=epochs, batch_size=64, equal="worker_batch", optimizer="Adam(lr=0.01)",
            snapshots=0, trace_steps=0,
        )  # fmt: skip
    assert record.time.training is not None
    return record.time.training * MNIST / IMAGES / epochs


def line(cells: Sequence[object]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the published ratios, and the simulated ones."""
    target = ONE_WORKER / EPOCHS
    speed = seconds("Single()", 1, 1, 1.0) / target
    print(f"Processors of speed {speed:.3f}: one worker takes {target:.1f} s an epoch.\n")
    published = ("all-reduce", "synchronous", "asynchronous", "switch")
    print(line(["workers", *(f"published: {name}" for name in published), *ROWS]))
    print(line(["---"] * (1 + len(published) + len(ROWS))))
    for workers, ratios in PUBLISHED.items():
        rows = ROWS.values()
        ours = [seconds(text, workers + more, epochs, speed) for text, more, epochs in rows]
        cells = [f"{ratio:.2f}" for ratio in (*ratios, *(target / each for each in ours))]
        print(line([workers, *cells]), flush=True)


if __name__ == "__main__":
    main()

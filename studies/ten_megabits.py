"""The cluster of O.N.O., Orchestra's forerunner, and its table of times by workers, beside ours.

    python -m studies.ten_megabits                          simulated: nodes of a whole core each
    python -m studies.ten_megabits --engine emulation       up to 8 nodes, which share this machine

One container with one core for each rank, their sending shaped to 10 Mbit/s, one server, LeNet-5,
Adam, batches of 64. What O.N.O.'s table calls all-reduce averages parameters once an epoch; that,
and an average of the gradients of every step, are here. Servers of O.N.O. exchange once an epoch,
too; Orchestra's do in every step. Times are in ratios to one worker: above 1, the workers were
faster.

Emulated nodes have a quarter of a core each, with links as much thinner, so that computing and
sending take as long beside each other as on whole cores; no fewer bytes are sent. Those that
exchange in each step, which takes seconds there, are emulated for some steps only: enough for their
samples/s, and no accuracy. So is the second half of a switch, whose first half is emulated whole.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orchestra
from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder

SAMPLES, BATCH, EPOCHS = 20_000, 64, 4
ASYNCHRONOUS = 'ParameterServer(consistency="asynchronous", learning_rate="divided")'
SWITCH = f"""Switch(
    LocalSGD({{epoch}}), {ASYNCHRONOUS}, when=AfterSteps({{epoch}}), moments="reset",
)"""
STRATEGIES: dict[str, tuple[str, int]] = {
    "all-reduce, each epoch": ("LocalSGD({epoch})", 0),
    "all-reduce, each step": ('AllReduce("ring")', 0),
    "synchronous server": ("ParameterServer()", 1),
    "asynchronous server": (ASYNCHRONOUS, 1),
    "Strategy-Switch": (SWITCH, 1),
}
"""Notation, and servers beyond the workers."""
THEIRS: dict[str, dict[int, tuple[float, float]]] = {
    "all-reduce, each epoch": {
        2: (0.95, 0.98), 4: (1.67, 0.98), 8: (2.11, 0.98), 16: (2.16, 0.967),
    },
    "synchronous server": {2: (0.97, 0.98), 4: (1.56, 0.98), 8: (1.70, 0.98), 16: (1.54, 0.98)},
    "asynchronous server": {
        2: (1.43, 0.956), 4: (2.10, 0.864), 8: (2.43, 0.078), 16: (2.73, 0.107),
    },
    "Strategy-Switch": {2: (1.50, 0.98), 4: (2.12, 0.98), 8: (2.34, 0.98), 16: (2.59, 0.967)},
}  # fmt: skip
"""Read off the figures of O.N.O.'s report, within 1 %: ratios to one worker, and accuracies on
MNIST (48 epochs)."""
EMULATED_SPEED, EMULATED_STEPS = 0.24, 8
ONCE_AN_EPOCH = "all-reduce, each epoch"


def main() -> None:
    """A line for each strategy and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=("simulation", "emulation"), default="simulation")
    parser.add_argument("--workers", default=None, help="numbers of workers, such as 2,4,8,16")
    given = parser.parse_args()
    most = "2,4,8,16" if given.engine == "simulation" else "2,4,7"
    workers = [int(number) for number in (given.workers or most).split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for line in lines(given.engine, workers, Path(folder)):
            print(line, flush=True)


def lines(engine: str, workers: list[int], folder: Path) -> Iterator[str]:
    """The table; `folder` is for its runs."""
    speed = EMULATED_SPEED if engine == "emulation" else 1.0
    cluster = (
        f"containers_10mbit(nodes={max(workers) + 1}, speed={speed}, jitter=None, "
        f'bandwidth="{10 * speed:g} Mbit/s")'
    )
    one = trained("Single()", 1, engine, cluster, folder / "one")
    assert one.time.samples_per_second
    yield f"one worker: {one.time.training:.1f} s, accuracy {one.learned.metrics['accuracy']:.3f}"
    yield f"{'':24} workers  times as fast (O.N.O.)  accuracy (O.N.O.)"
    for name, (notation, servers) in STRATEGIES.items():
        for count in workers:
            epoch, steps = SAMPLES // (BATCH * count), None
            if engine == "emulation" and name != ONCE_AN_EPOCH:
                steps = EMULATED_STEPS + (epoch if notation == SWITCH else 0)
            text, place = notation.format(epoch=epoch), folder / f"{name}-{count}"
            run = trained(text, count + servers, engine, cluster, place, steps)
            whole = steps is None or notation != SWITCH
            speed = run.time.samples_per_second if whole else speed_of_switch(run, epoch)
            assert speed
            ratio, theirs = THEIRS.get(name, {}).get(count, (None, None))
            own = f"{run.learned.metrics['accuracy']:9.3f}" if steps is None else " " * 9
            yield (
                f"{name:24} {count:7}  {speed / one.time.samples_per_second:8.2f}"
                f"      {f'({ratio:.2f})' if ratio else '':8}"
                f"  {own} {f'({theirs:.3f})' if theirs else ''}"
            )


def speed_of_switch(run: RunRecord, first: int) -> float:
    """Samples/s of all epochs, of which `run` made the `first` steps, those of its first phase, and
    some of its second one, at whose speed the rest goes on.
    """
    by_rank = RunFolder(run.folder).steps.values()
    phase = [line for lines in by_rank for line in lines if line["step"] <= first]
    seconds, consumed = (max(float(line[key]) for line in phase) for key in ("seconds", "consumed"))
    assert run.time.training
    second = (run.learned.samples - consumed) / (run.time.training - seconds)
    samples: int = SAMPLES * EPOCHS
    return samples / (seconds + (samples - consumed) / second)


def trained(
    strategy: str, ranks: int, engine: str, cluster: str, out: Path, steps: int | None = None
) -> RunRecord:
    """The record of one run, of `steps` where they are given."""
    settings: dict[str, Any] = {
        "batch_size": BATCH, "equal": "worker_batch", "snapshots": 1, "threads": 1,
        "optimizer": "Adam(lr=0.004)", "schedule": "Cosine", "trace_steps": 0,
        **({"epochs": EPOCHS} if steps is None else {"steps": steps}),
    }  # fmt: skip
    return orchestra.train(
        "digits28", strategy, ranks=ranks, engine=engine, cluster=cluster, out=out, quiet=True,
        **settings,
    )  # fmt: skip


if __name__ == "__main__":
    main()

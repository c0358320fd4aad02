"""Training from Python, in the words of the experiment file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.engines.processes.training import failed_record, train_run
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.document import Entry
from orchestra.experiments.file import Experiment, load, runs
from orchestra.experiments.folder import claim, finished, fresh_folder, release
from orchestra.optimizers.settings import SCHEDULES, Optimizer
from orchestra.records.record import RunRecord, write_summary
from orchestra.settings import Settings, write
from orchestra.strategies.registry import STRATEGIES
from orchestra.tasks.registry import TASKS

if TYPE_CHECKING:
    from orchestra.strategies.base import Strategy
    from orchestra.tasks.task import Task

PARENT = Path("runs")


def train(
    task: str | Settings | Callable[[], Task],
    strategy: str | Strategy[Any],
    ranks: int = 4,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> RunRecord:
    """Train `task` under `strategy` on processes of this machine, and return the record.

        record = orchestra.train("digits", AllReduce("ring"), ranks=4, epochs=5)
        print(record.metrics["accuracy"], record.train_seconds)

    In a script the call stands under `if __name__ == "__main__":`, since the ranks import it.

    Args:
        task: a name or notation ("digits(channels=8)"), such settings, or a function of a module
            that returns an `orchestra.Task`.
        strategy: a strategy or its notation.
        ranks: processes, servers included.
        seed: of parameters, shuffling and dropout.
        out: the folder of the run's records; a new one in `runs` by default. With the folder of
            the same run, it is resumed; if it was completed, its record is returned.
        quiet: no progress, no notices.
        settings: any key of an experiment file: batch_size=64, epochs=5, steps=100,
            optimizer="Adam(lr=1e-3)", schedule="Cosine(warmup=0.1)", clip_norm=1.0 ...

    Raises:
        InputError: what was asked for cannot be done; nothing was started.
        RunFailed: the run failed; its first line names the first cause.
    """
    experiment = _experiment(task, strategy, ranks, seed, settings)
    (label,) = experiment.strategies
    folder = Path(out) if out is not None else fresh_folder(PARENT, f"{experiment.name}-{label}")
    resumed = claim(folder, experiment)
    if resumed and (records := finished(folder)):
        return records[0]
    (run,) = runs(experiment)
    try:
        record = train_run(run, folder, quiet=quiet)
    except InputError:
        if not resumed:
            release(folder)
        raise
    except RunFailed as failure:
        with contextlib.suppress(OSError):  # on a full disk that is the failure
            write_summary(folder, experiment.name, [failed_record(run, folder, failure)])
        raise
    write_summary(folder, experiment.name, [record])
    return record


def _experiment(
    task: object, strategy: object, ranks: int, seed: int, settings: dict[str, Any]
) -> Experiment:
    notation = _notation(strategy, "strategy")
    given = {
        "task": _notation(task, "task"),
        "strategies": {notation.partition("(")[0].rpartition(":")[2]: notation},
        "seeds": [seed],
        "ranks": ranks,
        **{key: _notation(value, key) for key, value in settings.items()},
    }
    return load(None, (), {key: Entry(value, f"{key}=") for key, value in given.items()})


def _notation(value: Any, key: str) -> Any:
    """The words for what Python gives as an object; plain values as they are."""
    if isinstance(value, Optimizer):
        return repr(value)
    if isinstance(value, Settings):
        registry = {"task": TASKS, "schedule": SCHEDULES}.get(key, STRATEGIES)
        return write(value, registry)
    if callable(value):
        name = getattr(value, "__qualname__", "")
        if not name or "<" in name:
            raise InputError(
                f"{key}: {value!r} cannot be imported by the ranks: give a function of a module"
            )
        return f"{value.__module__}:{name}"
    return value

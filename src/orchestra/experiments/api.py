"""Training, comparing and replaying from Python, with the keys of the experiment file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.engines.run import Callback, train_run
from orchestra.errors import InputError, tell
from orchestra.experiments.comparison import Comparison, carry_out
from orchestra.experiments.experiment import Experiment, only_run
from orchestra.experiments.file import NOTATIONS, load
from orchestra.experiments.run import folder_for, make_run
from orchestra.optimizers.settings import Optimizer
from orchestra.records.files import EXPERIMENT
from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder
from orchestra.settings import Settings, write
from orchestra.settings.reading import Entry
from orchestra.strategies.registry import STRATEGIES
from orchestra.tasks import TASKS

if TYPE_CHECKING:
    from orchestra.strategies.base import Strategy
    from orchestra.tasks.task import Task


def train(
    task: str | Settings | Callable[[], Task],
    strategy: str | Strategy,
    ranks: int = 4,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    quiet: bool = False,
    max_restarts: int = 0,
    callback: Callback | None = None,
    **settings: Any,
) -> RunRecord:
    """Train `task` under `strategy` on processes of this machine, and return the record.

        record = orchestra.train("digits", AllReduce("ring"), ranks=4, epochs=5)
        print(record.learned.metrics["accuracy"], record.time.training)

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
        max_restarts: how often a run that lost a rank goes on by itself, from its newest
            checkpoint; from its beginning without `checkpoint_every`.
        callback: called about twice a second with the progress of the run: its `step`, `samples`,
            `fraction` of the budget and `loss`. If it returns True, the run stops in good order,
            and its record says `stopped_by: "callback"`. Another thread than this one calls it.
        settings: any key of an experiment file: batch_size=64, epochs=5, steps=100,
            optimizer="Adam(lr=1e-3)", schedule="Cosine(warmup=0.1)", clip_norm=1.0 ...

    Raises:
        InputError: what was asked for cannot be done; nothing was started.
        RunFailed: the run failed; its first line names the first cause.
    """
    notation = notation_of(strategy, "strategy")
    strategies = {notation.partition("(")[0].rpartition(":")[2]: notation}
    given = {"task": task, "strategies": strategies, "seeds": [seed], "ranks": ranks}
    experiment = _experiment(None, given | settings)
    run = only_run(experiment, "ranks")
    folder = folder_for(out, f"{experiment.name}-{run.name}")
    training = partial(train_run, quiet=quiet, callback=callback)
    return make_run(
        run, experiment, folder, training, max_restarts=max_restarts,
        notify=(lambda _: None) if quiet else tell,
    )  # fmt: skip


def compare(
    task: str | Path | Settings | Callable[[], Task],
    strategies: Mapping[str, str | Strategy] | None = None,
    ranks: int | Sequence[int] | None = None,
    *,
    seeds: Sequence[int] | None = None,
    tune: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    baseline: str | None = None,
    retry: bool = False,
    report: bool = True,
    quiet: bool = False,
    **settings: Any,
) -> Comparison:
    """Train `task` under each of `strategies`, with each seed, and report on them side by side.

        comparison = orchestra.compare(
            "digits",
            {"ring": AllReduce("ring"), "server": ParameterServer(consistency="asynchronous")},
            ranks=4, seeds=(0, 1, 2), epochs=5,
            tune={"settings": {"optimizer.lr": [0.01, 0.03, 0.1]}},
        )
        for record in comparison.records:
            print(record.asked.name, record.asked.seed, record.time.training)

    A run that fails is a record with the status "failed", and the others go on. One process with
    the same global batch is always among the strategies, as "one process" if it has no label.

    Args:
        task: as for `train`; or, without `strategies`, the path of an experiment file, in which
            the other arguments replace what it says.
        strategies: a strategy or its notation for each label.
        ranks: processes, servers included; several numbers for one row each. 4 by default.
        seeds: one run a strategy for each; (0,) by default.
        tune: as in a file: settings to try, `by` and `seed`. Every strategy gets as many trials.
        out: the folder of the comparison; a new one in `runs` by default. With the folder of the
            same comparison, it goes on: what was completed stays as it is.
        baseline: the label that the report's differences refer to.
        retry: make the runs again that failed before.
        report: write report.html into the folder.
        quiet: no progress, no notices.
        settings: as for `train`.

    Raises:
        InputError: what was asked for cannot be done.
    """
    seeds = None if seeds is None else list(seeds)
    keys = {"strategies": strategies, "ranks": ranks, "seeds": seeds, "tune": tune}
    given = {key: value for key, value in keys.items() if value is not None} | settings
    if "strategies" in given:
        experiment = _experiment(None, {"task": task, **given})
    elif isinstance(task, str | Path):
        experiment = _experiment(Path(task), given)
    else:
        raise InputError("strategies: give a mapping of labels to strategies")
    return carry_out(experiment, out, retry=retry, report=report, baseline=baseline, quiet=quiet)


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay.

    Attributes:
        equal: whether the final parameters are those of the run, bit for bit; None where it was
            stopped before the end, or the run has no final parameters.
        steps: of each worker, how many it has done.
        states: where the replay was stopped: of each worker after its step `until`, and of each
            server when the last worker was there, what a checkpoint keeps ("parameters",
            "buffers", "position", "strategy" ...) and "gradients". Both vectors are flat, in the
            order of the model's parameters.
        folder: where it was written.
    """

    equal: bool | None
    steps: Mapping[int, int]
    states: Mapping[int, Any]
    folder: Path


def replay(
    run: str | Path, until: int | None = None, *, out: str | Path | None = None, quiet: bool = False
) -> Replay:
    """Repeat a run that was recorded with `record_order`, in virtual time, to the same bits.

    Args:
        run: its folder.
        until: a step of each worker, at which to stop; the end by default.
        out: a folder that does not exist yet, for what the replay writes; a new one in `runs` by
            default.
        quiet: no progress.

    Raises:
        InputError: the run was not recorded, or `until` is no step.
        RunFailed: the replay failed.
    """
    source, then = Path(run), RunFolder(Path(run))
    if until is not None and until < 1:
        raise InputError(f"until: {until} is no step; the first is 1")
    if not (source / EXPERIMENT).is_file():
        raise InputError(f"{source}: there is no {EXPERIMENT}; give the folder of one run")
    # The folder of a comparison has an experiment.yaml, too, of several runs.
    if inside := sorted(path.parent for path in source.glob(f"runs/*/*/*/{EXPERIMENT}")):
        raise InputError(f"{source}: is a comparison; give one of its runs, such as {inside[0]}")
    # The task's module may lie in a folder that was on the module path of the original run only.
    with suppress(InputError):
        known = then.environment.get("modules", [])
        sys.path += [folder for folder in known if folder not in sys.path]
    settings = only_run(load(source / EXPERIMENT), str(source / EXPERIMENT))
    if not settings.training.record_order:
        raise InputError(f"{source}: this run was not recorded; make one with --record-order")
    folder = folder_for(out, f"{source.name}-replay", empty=True)
    from orchestra.engines.simulation.replay import STATES, replay_run
    from orchestra.trainer.checkpoints import read_rank

    # The bits of a sum depend on the number of threads, so each rank gets that of the original run.
    record = then.record
    threads = None if record.asked.engine == "simulation" else record.threads_by_rank
    replayed = replay_run(settings, source, folder, until=until, threads=threads, quiet=quiet)
    stopped = replayed.parameters_sha256 is None
    known = record.learned.parameters_sha256
    equal = None if stopped or known is None else replayed.parameters_sha256 == known
    written = len(list((folder / f"{STATES:04d}").glob("rank-*"))) if stopped else 0
    states = {rank: read_rank(folder, STATES, rank) for rank in range(written)}
    return Replay(equal, replayed.steps, states, folder)


def _experiment(path: Path | None, given: Mapping[str, Any]) -> Experiment:
    entries = {key: Entry(notation_of(value, key), f"{key}=") for key, value in given.items()}
    return load(path, (), entries)


def notation_of(value: Any, key: str) -> Any:
    """Return the notation of what Python gives as an object; plain values as they are."""
    if isinstance(value, Mapping):
        # Under a label stands a strategy, and under any other name what is called so
        inside = (lambda _: key) if key == "strategies" else str
        return {name: notation_of(item, inside(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [notation_of(item, key) for item in value]
    if isinstance(value, Optimizer):
        return repr(value)
    if isinstance(value, Settings):
        return write(value, {"task": TASKS, **NOTATIONS}.get(key, STRATEGIES))
    if callable(value):
        name = getattr(value, "__qualname__", "")
        if not name or "<" in name:
            remedy = "give a function of a module"
            raise InputError(f"{key}: {value!r} cannot be imported by the ranks: {remedy}")
        return f"{value.__module__}:{name}"
    return value

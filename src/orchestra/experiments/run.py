"""One run in a folder: the folder is claimed, the run is made, and its record is written.

`make_run` is the only way there: `orchestra train`, `orchestra.train` and a comparison call it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from orchestra.cluster.file import load_cluster
from orchestra.engines.restarts import Restarts
from orchestra.engines.run import failed_record
from orchestra.errors import InputError, RankLost, RunFailed, tell
from orchestra.experiments.experiment import Experiment, alone
from orchestra.experiments.file import to_yaml
from orchestra.experiments.tracking import tracked
from orchestra.records.files import EXPERIMENT, SUMMARY, partial_of, write_atomically
from orchestra.records.live import holder
from orchestra.records.record import Restart, RunRecord
from orchestra.records.store import finished, write_planned, write_summary
from orchestra.settings.reading import read_bytes, yaml_value
from orchestra.trainer.checkpoint_files import newest_whole
from orchestra.trainer.membership import refusal_to_resume
from orchestra.trainer.settings import Run

PARENT = Path("runs")


def make_run(
    run: Run,
    experiment: Experiment,
    folder: Path,
    train: Callable[[Run, Path], RunRecord],
    *,
    tuned: Mapping[str, Any] | None = None,
    on_resume: Callable[[RunRecord | None], None] | None = None,
    max_restarts: int = 0,
    restarts_before: Sequence[Restart] = (),
    notify: Callable[[str], None] = tell,
) -> RunRecord:
    """Claim `folder` for `run`, train, write `summary.json`, release the folder, and return the
    record; that of then where the run was completed there before.

    Args:
        experiment: has the run among its own.
        tuned: the settings that were chosen for the run by trials.
        on_resume: called where the folder has this run already, with its record if completed.
        max_restarts: how often the run goes on from its newest checkpoint after it lost a rank.
        restarts_before: those that a launcher has made.
        notify: called with each line about restarts.

    Raises:
        InputError: as `Restarts`, `held`, `tracked` and `train` do.
        RunFailed: as `train` does; `summary.json` then has a failed record.
    """
    restarts = Restarts(run, folder, max_restarts, notify, restarts_before)
    with held(folder, alone(experiment, run), run) as resumed:
        completed = next(iter(finished(folder)), None) if resumed else None
        if resumed and on_resume is not None:
            on_resume(completed)
        if completed is not None:
            return completed
        # The old summary goes first: a run that is retried and then killed is unfinished, not
        # failed.
        (folder / SUMMARY).unlink(missing_ok=True)
        restarts.begin()
        while True:
            try:
                return _attempt(run, experiment, folder, train, tuned or {}, restarts)
            except RankLost as loss:
                if not restarts.follow(loss):
                    raise
                try:
                    restarts.prepare(loss)
                except KeyboardInterrupt:
                    write_failure(run, folder, experiment.name, loss, restarts)
                    raise
            except InputError as error:
                if not restarts.made:
                    raise
                # The folder holds what was trained before; `held` would remove it.
                failure = RunFailed(str(error))
                write_failure(run, folder, experiment.name, failure, restarts)
                raise failure from None


def _attempt(
    run: Run,
    experiment: Experiment,
    folder: Path,
    train: Callable[[Run, Path], RunRecord],
    tuned: Mapping[str, Any],
    restarts: Restarts,
) -> RunRecord:
    """Train once, and write `summary.json` unless a restart follows."""
    with tracked(run, experiment, folder) as tracking:
        try:
            record = train(run, folder)
        except RunFailed as failure:
            if restarts.follow(failure):
                raise
            last = restarts.concluded(failure)
            write_failure(run, folder, experiment.name, last, restarts)
            raise last from None
        record = restarts.added_to(replace(record, asked=replace(record.asked, tuned=tuned)))
        write_summary(folder, experiment.name, [record])
        if tracking is not None:
            tracking.record = record
    return record


def write_failure(
    run: Run,
    folder: Path,
    experiment: str,
    failure: RunFailed | InputError,
    restarts: Restarts | None = None,
) -> RunRecord:
    """Write the record of a failed run into `folder`, unless the disk is full, and return it."""
    record = failed_record(run, folder, failure)
    if restarts is not None:
        record = restarts.added_to(record)
    with suppress(OSError):  # a full disk is the failure itself
        write_summary(folder, experiment, [record])
    return record


def folder_for(out: str | Path | None, name: str, *, empty: bool = False) -> Path:
    """Return `out`, or a new folder in `runs` where it is None; with `empty` one without files.

    Raises:
        InputError: it cannot be used.
    """
    if out is None:
        return fresh_folder(PARENT, name)
    folder = Path(out)
    if not empty:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(folder.iterdir())
    except OSError as error:
        raise InputError(f"{out}: cannot be used: {error.strerror}") from None
    if taken:
        raise InputError(f"{out}: holds files; choose another --out")
    return folder


def fresh_folder(parent: Path, name: str) -> Path:
    """Return a new folder `name`-1, `name`-2, ... in `parent`, the first that does not exist."""
    for folder in (parent / f"{name}-{number}" for number in count(1)):
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            if not parent.is_dir():
                raise InputError(f"{parent}: is not a folder; choose another --out") from None
        except OSError as error:
            raise InputError(f"{folder}: cannot be made: {error.strerror}") from None
    return folder


def claim(folder: Path, experiment: Experiment, run: Run | None = None) -> bool:
    """Make `folder` that of `experiment`, which is written there; return whether it was before.

    A `run` may have another number of ranks than before where it can go on from a checkpoint.

    Raises:
        InputError: it belongs to a different experiment, holds other files, or cannot be written.
    """
    path, text = folder / EXPERIMENT, to_yaml(experiment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _require_same(path, read_bytes(path).decode(errors="replace"), text, run)
            return True
        # A kill during the write leaves a partial file, which is Orchestra's own.
        if any(file != partial_of(path) for file in folder.iterdir()):
            raise InputError(f"{folder}: holds files, but no {EXPERIMENT}; choose another --out")
        write_atomically(path, text)
    except FileExistsError:
        raise InputError(f"{folder}: is not a folder; choose another --out") from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be used: {error.strerror}") from None
    return False


@contextmanager
def held(
    folder: Path,
    experiment: Experiment,
    run: Run | None = None,
    planned: Mapping[Path, str] | None = None,
) -> Iterator[bool]:
    """Claim the folder, and keep other processes out; give whether it was claimed before.

    In the folder of a comparison, the `planned` runs are listed at once by their folders and names,
    so that others can watch it without reading its experiment.

    Files that a killed process left half written are removed, and a new folder in which nothing
    could be run, for bad input.

    Raises:
        InputError: as `claim` does, or another process uses it.
    """
    resumed = claim(folder, experiment, run)
    with _locked(folder):
        for leftover in folder.glob(partial_of(Path("*")).name):
            leftover.unlink()
        if planned is not None:
            write_planned(folder, planned)
        try:
            yield resumed
        except InputError:
            if not resumed:
                # Nothing was made in it, and its name is free again.
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock of the kernel on the folder, which ends with its holder, however that ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = holder(folder) or "another process"
        os.close(descriptor)
        raise InputError(
            f"{folder}: {who} is using it; wait for its end, or choose another --out"
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)


def clear_others(folder: Path, experiment: Experiment) -> None:
    """Remove a folder inside a comparison's that another experiment left there."""
    path = folder / EXPERIMENT
    if folder.exists() and not (path.exists() and read_bytes(path) == to_yaml(experiment).encode()):
        shutil.rmtree(folder)


def _require_same(path: Path, old_text: str, new_text: str, run: Run | None) -> None:
    if old_text == new_text:
        return
    old, new = yaml_value(old_text, str(path)), yaml_value(new_text)
    differing: list[str] = []
    if isinstance(old, dict) and isinstance(new, dict):
        differing = [key for key in {**new, **old} if new.get(key) != old.get(key)]
    # The shares of other ranks are others.
    if run is not None and set(differing) in ({"ranks"}, {"ranks", "shares"}):
        newest = newest_whole(path.parent / "checkpoints")
        if newest is not None:
            if (why := refusal_to_resume(run, newest[1])) is not None:
                raise InputError(f"{path.parent}: {why}")
            return
    keys = ", ".join(differing) or "its form"
    raise InputError(
        f"{path.parent}: holds a different experiment (in {keys}); "
        "choose another --out, or none for a new folder"
    )


def idle_nodes(planned: Sequence[Run]) -> list[str]:
    """Return a line for each cluster with more nodes than the largest run has ranks to spread."""
    most = max((run.training.ranks for run in planned), default=0)
    described = (run.training.cluster for run in planned if run.training.engine != "processes")
    lines = []
    for name in dict.fromkeys(described):
        cluster = load_cluster(name, where="cluster", folder=Path())
        nodes = len(cluster.nodes)
        if cluster.placement == "spread" and nodes > most:
            lines.append(
                f"cluster {name} has {nodes} nodes, but ranks is {most}: {nodes - most} of them "
                f"stand idle; set ranks={nodes} to use all"
            )
    return lines

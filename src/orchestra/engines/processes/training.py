"""A training run on processes: from its settings to its record. Imports without torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestra.engines.events import Event, Heartbeat, Notice
from orchestra.engines.live import Display, Lines, Progress
from orchestra.engines.processes.environment import Launched
from orchestra.engines.processes.joining import ENTRANCE, Admission, Entrance, Invitation
from orchestra.engines.processes.launch import launch
from orchestra.engines.processes.system import StopWish, UsageMeter
from orchestra.engines.run import Callback, RunProgress, record_of, write_environment
from orchestra.errors import GroupChanged, InputError, PeerLost, tell
from orchestra.records.files import EXPERIMENT, steps_files
from orchestra.records.record import RunRecord
from orchestra.records.report import RankReport
from orchestra.settings.base import from_plain, to_plain
from orchestra.strategies.base import refusal_of, roles_of
from orchestra.trainer.settings import Run
from orchestra.transports.handshake import from_environment
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import PassingReporter, RankActivity, Runtime


def program(
    runtime: Runtime, assignment: tuple[Run, Path], *, entering: RankActivity | None = None
) -> RankReport:
    """Run the program of each rank; it is here so that a launcher names it without torch."""
    from orchestra.trainer.program import train

    meter = UsageMeter()
    report = train(_metered(runtime, meter), assignment, entering=entering)
    return replace(report, usage=meter.usage())


def _metered(runtime: Runtime, meter: UsageMeter) -> Runtime:
    """Return `runtime`, and those of later groups, with a `meter` that runs with the stopwatch."""

    def stopwatch(running: bool) -> None:
        runtime.stopwatch(running)
        meter.running(running)

    def regroup(error: PeerLost | GroupChanged) -> Runtime:
        assert runtime.regroup is not None
        return _metered(runtime.regroup(error), meter)

    return replace(runtime, stopwatch=stopwatch, regroup=regroup if runtime.regroup else None)


def invitation_to(run: Run, folder: Path) -> Invitation | None:
    """Return the invitation for newcomers to `run`; None if the run cannot take in any."""
    path = folder / EXPERIMENT
    if not run.is_elastic or not path.exists():
        return None
    next_rank = 1 + max(steps_files(folder), default=-1)
    refusal = partial(refusal_of, run.strategy)
    given = str(folder.absolute()), path.read_text(), next_rank, refusal
    return Invitation(folder / ENTRANCE, *given)


@dataclass
class _Listener:
    """Tells a callback of the user's how far the run is, and stops the run if it wishes so.

    An error of the callback stops the run, too, and is raised once the ranks are gone.
    """

    callback: Callback
    first: int  # the first worker's rank
    stop: Callable[[], None] = lambda: None
    stopped: bool = False
    error: BaseException | None = None

    def on_start(self, stop: Callable[[], None]) -> None:
        self.stop = stop

    def on_event(self, event: Event | Notice) -> None:
        if self.stopped or not isinstance(event, Heartbeat) or event.rank != self.first:
            return
        if event.step == 0 or event.loss is None:
            return
        progress = RunProgress(event.step, event.samples, event.fraction or 0.0, event.loss)
        try:
            self.stopped = self.callback(progress) is True
        except BaseException as error:
            self.error, self.stopped = error, True
        if self.stopped:
            self.stop()


def train_run(
    run: Run,
    folder: Path,
    *,
    quiet: bool = False,
    progress: Progress | None = None,
    callback: Callback | None = None,
) -> RunRecord:
    """Train `run` on processes of this machine; its records go into `folder`. See
    `orchestra.engines.run.train_run`; raises `InputError` also where GPUs are missing."""
    roles = roles_of(run.strategy, run.training.ranks)
    if (lack := lacking(run)) is not None:
        raise InputError(f"device: {run.strategy!r} {lack}")
    write_environment(folder)
    listener = None if callback is None else _Listener(callback, roles.workers[0])
    with Display(run, roles, quiet=quiet, progress=progress, folder=folder) as display:

        def on_event(event: Event | Notice) -> None:
            display.on_event(event)
            if listener is not None:
                listener.on_event(event)

        outcome = launch(
            program, (run, folder.absolute()), len(roles.shares), patience=run.training.patience,
            threads=run.training.threads, on_event=on_event, grace=run.training.grace,
            min_ranks=run.training.min_ranks or 1, invitation=invitation_to(run, folder),
            on_start=None if listener is None else listener.on_start,
        )  # fmt: skip
    if listener is not None and listener.error is not None:
        raise listener.error
    left_out, notices = outcome.left_out, outcome.notices
    reports = [
        each if rank < len(roles.shares) else from_plain(RankReport | None, each)
        for rank, each in enumerate(outcome.results)
    ]
    record = record_of(
        run, reports, folder, outcome.setup, left_out=left_out, notices=notices,
        terminated=outcome.terminated,
    )  # fmt: skip
    if listener is not None and listener.stopped and record.ending.stopped_by == "Ctrl-C":
        record = replace(record, ending=replace(record.ending, stopped_by="callback"))
    return record


def has_validation(task: str) -> bool:
    """Return whether the task has validation data; asks a rank, as torch stays out of here. Raises
    `InputError` for a task that cannot be made."""
    outcome = launch(_has_validation, task, 1)
    if outcome.stopped:
        raise KeyboardInterrupt
    return bool(outcome.results[0])


def _has_validation(_: Runtime, task: str) -> bool:
    from orchestra.tasks.task import load_task

    return load_task(task).validation is not None


def take_part(
    run: Run,
    folder: Path,
    launched: Launched,
    *,
    completed: RunRecord | None = None,
    on_left: Callable[[str], None] | None = None,
    wish: StopWish | None = None,
) -> RunRecord | bool:
    """Train `run` as one of the processes that torchrun or another launcher started.

    Every rank writes its steps into `folder`; checkpoints need one that all ranks share. Rank 0
    returns the record; each other rank returns whether the run was stopped. Where rank 0 gives the
    record of this run, which was `completed` before, all ranks leave at once. Where rank 0 is gone,
    the others leave their processes, after a call of `on_left` with the reason; so does rank 0
    where its program is stuck.
    `wish`: see `join`.

    Raises `InputError` where as many processes were started as the strategy cannot use, and
    `RunFailed` on every rank, with the first cause.
    """
    from orchestra.engines.processes.rank import join

    roles = roles_of(run.strategy, run.training.ranks)
    if len(roles.shares) != launched.ranks:
        raise InputError(
            f"{launched.launcher} started {launched.ranks} processes, but {run.strategy!r} on "
            f"{run.training.ranks} ranks runs on {len(roles.shares)}: start as many"
        )
    first = launched.rank == 0
    if first and completed is None:
        write_environment(folder)
    watched = folder if first and completed is None else None
    with Display(run, roles, quiet=not first, folder=watched) as display:
        outcome = join(
            program_unless_completed, (run, folder.absolute(), completed is not None), launched,
            patience=run.training.patience, threads=run.training.threads,
            on_event=display.on_event, on_left=on_left, grace=run.training.grace,
            wish=wish, min_ranks=run.training.min_ranks or 1,
            invitation=invitation_to(run, folder) if watched else None,
        )  # fmt: skip
    if completed is not None:
        return completed
    if not first:
        own = outcome.results[launched.rank]  # a `RankReport` as plain data
        return own is not None and bool(own["stopped"])
    reports = [from_plain(RankReport | None, report) for report in outcome.results]
    left_out, notices = outcome.left_out, outcome.notices
    return record_of(
        run, reports, folder, outcome.setup, left_out=left_out, notices=notices,
        terminated=outcome.terminated,
    )  # fmt: skip


def join_run(
    run: Run, folder: Path, entrance: Entrance, place: Admission, *, spare: bool, wish: StopWish
) -> RankReport:
    """Join `run`, which is under way, as a rank at `place`; a `spare` one waits until another is
    lost. See `orchestra.engines.processes.rank.join_run`."""
    from orchestra.engines.processes.rank import join_run

    report = join_run(
        entrance, place, newcomer, (run, folder.absolute(), spare),
        tls=from_environment(os.environ), threads=run.training.threads, wish=wish,
    )  # fmt: skip
    found: RankReport = from_plain(RankReport, report)
    return found


@dataclass
class _Progress(PassingReporter):
    """Shows how far the run is, on standard error, now and then."""

    lines: Lines = field(default_factory=Lines)

    def progress(self, *, fraction: float | None = None, **facts: Any) -> None:
        super().progress(fraction=fraction, **facts)
        self.lines(f"step {facts['step']}", fraction or 0.0)


def newcomer(runtime: Runtime, assignment: tuple[Run, Path, bool]) -> dict[str, Any]:
    """Run the program of a rank that joins a run under way; report as plain data."""
    run, folder, spare = assignment

    def telling(runtime: Runtime) -> Runtime:
        return replace(runtime, regroup=partial(regroup, runtime))

    def regroup(before: Runtime, error: PeerLost | GroupChanged) -> Runtime:
        assert before.regroup is not None
        if before is runtime:
            tell("ready, and waits until a rank is lost" if spare else "ready")
        found = before.regroup(error)
        tell(f"{'taken in: ' * (before is runtime)}{found.ranks} ranks train now")
        return telling(replace(found, reporter=_Progress(found.reporter)))

    entering = RankActivity.SPARE if spare else RankActivity.JOINING
    report = program(telling(runtime), (run, folder), entering=entering)
    plain: dict[str, Any] = to_plain(report)
    return plain


def program_unless_completed(
    runtime: Runtime, assignment: tuple[Run, Path, bool]
) -> dict[str, Any] | None:
    """Run `program`, unless rank 0 knows that this was done before; report as plain data."""
    import torch

    from orchestra.collectives import Group, broadcast

    run, folder, completed = assignment
    known = torch.tensor([float(completed)])
    broadcast(runtime.transport, known, 0, Group(tuple(range(runtime.ranks))), Tag.COMPLETED)
    return None if bool(known) else to_plain(program(runtime, (run, folder)))


def lacking(run: Run) -> str | None:
    """Return what this machine lacks for `run`; None if nothing. Imports torch only if needed."""
    if run.training.device != "cuda":
        return None
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Several ranks can share a GPU, but NCCL wants one for each.
    wanted = run.training.ranks if run.strategy.traits().native else 1
    if there >= wanted:
        return None
    remedy = "name a schedule such as 'ring', whose ranks share one" if there else "use cpu or auto"
    return f"wants {wanted} GPU{'s' * (wanted > 1)}; torch sees {there or 'none'} here: {remedy}"

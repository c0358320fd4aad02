"""What an engine hands to the program of a rank: identity, transport, compute, and a reporter; and
how many intra-op threads a rank computes with. Imports without torch."""

from __future__ import annotations

import enum
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from orchestra.errors import GroupChanged, InputError, PeerLost
from orchestra.records.report import Counters

if TYPE_CHECKING:
    from orchestra.transports.protocol import Transport

T = TypeVar("T")

VARIABLE = "OMP_NUM_THREADS"
MOST_THREADS = 4096
GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class RankActivity(enum.StrEnum):
    """What a rank's program is doing, as its heartbeats say; the failure detector judges by it."""

    SET_UP = "set-up"
    TRAINING = "training"
    SERVING = "serving"  # of a server without data
    PAUSED = "paused"  # the user lets the rank take any time, so that it cannot hang
    EVALUATING = "evaluating"
    LEAVING = "leaving"  # training is over, and the other ranks do not wait for this one
    SCRIPT_OVER = "script over"  # the user's script has ended
    JOINING = "joining"  # a newcomer that is ready to be taken in at once
    SPARE = "spare"  # a newcomer that is ready to replace a lost rank
    RESTING = "resting"  # the program has come to rest, so that newcomers can be taken in


class Work(NamedTuple):
    """A piece of computation: its kind ("gradient", "update", "encode" ...) and its size.

    `amount` counts samples for "gradient", and for the "forward" and "backward" of a stage, and
    elements for everything else; a simulation looks up the calibrated duration by both.
    "step" stands for what a worker does around a gradient of so many samples, from reading the
    batch to writing down the step. `parameters` are the names of those of a stage.
    """

    kind: str
    amount: int
    parameters: tuple[str, ...] = ()


class Compute(Protocol):
    """Computation is charged here and nowhere else."""

    @property
    def seconds(self) -> float:
        """Seconds charged so far on this rank."""

    @property
    def main_seconds(self) -> float:
        """The seconds charged to its main flow."""

    def run(self, work: Work, function: Callable[[], T]) -> T:
        """Run `function`, and let the clock advance by what `work` costs on this engine."""

    def advance_to(self, slot: int) -> None:
        """Inside the backward of a "gradient": parameter `slot` of the layout has its gradient.

        Where time is virtual, the clock advances to that point of the work.
        """

    def wait_before_using(self, slot: int, wait: Callable[[], object]) -> None:
        """Inside the forward of a "gradient": parameter `slot` is needed, and `wait` waits for it.

        The wait is no computation. Where time is virtual, the clock advances to that point first.
        """


class Reporter(Protocol):
    """One way up to the watcher: progress for the display, and facts that its verdicts need."""

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
        counters: Counters | None = None,
    ) -> None:
        """Tell that this rank has finished `step` steps of its own, and consumed `samples`.

        `fraction` is the part of the budget that the cluster has consumed; `counters` the latest.
        """

    def activity(self, activity: RankActivity) -> None:
        """Tell what the rank is doing from now on."""

    def expendable(self, yes: bool) -> None:
        """Tell whether the run can go on without this rank, from now on. It does once no rank sets
        up."""

    def elastic(self, program: str, *, rests: bool = False) -> None:
        """Tell that the program goes on in a new group, of those that are left or with newcomers,
        from now on; `program` is the same on all ranks that can be in one group. Empty: it does
        not. Where it `rests` before newcomers are taken in, it tells by its activity, `RESTING`,
        that it has come to rest.
        """

    def notice(self, text: str) -> None:
        """Show the user one line ("going on without rank 3")."""

    def stop_requested(self) -> bool:
        """Return whether the user asked for an orderly stop (Ctrl-C)."""

    def newcomers_wait(self) -> bool:
        """Return whether the program is to rest, as there are newcomers."""

    def group_is_over(self) -> bool:
        """Return whether this rank is to give up its group, as its next message would tell."""


class SilentReporter:
    """Reports nothing, and never asks the run to stop."""

    def progress(self, *_: Any, **facts: Any) -> None: ...

    def activity(self, activity: RankActivity) -> None: ...

    def expendable(self, yes: bool) -> None: ...

    def elastic(self, program: str, *, rests: bool = False) -> None: ...

    def notice(self, text: str) -> None: ...

    def stop_requested(self) -> bool:
        return False

    def newcomers_wait(self) -> bool:
        return False

    def group_is_over(self) -> bool:
        return False


@dataclass
class PassingReporter:
    """Everything goes on to `inner`."""

    inner: Reporter

    def progress(self, *_: Any, **facts: Any) -> None:
        self.inner.progress(**facts)

    def activity(self, activity: RankActivity) -> None:
        self.inner.activity(activity)

    def expendable(self, yes: bool) -> None:
        self.inner.expendable(yes)

    def elastic(self, program: str, *, rests: bool = False) -> None:
        self.inner.elastic(program, rests=rests)

    def notice(self, text: str) -> None:
        self.inner.notice(text)

    def stop_requested(self) -> bool:
        return self.inner.stop_requested()

    def newcomers_wait(self) -> bool:
        return self.inner.newcomers_wait()

    def group_is_over(self) -> bool:
        return self.inner.group_is_over()


@dataclass(frozen=True)
class Runtime:
    """Everything that a program may know of the engine that runs it.

    Where ranks are lost or join, those of each group are numbered anew; `members` are the numbers
    by which files and watcher know them: those of the start, and further ones.
    """

    rank: int
    ranks: int
    transport: Transport
    compute: Compute
    reporter: Reporter
    seed: Callable[[int], None]  # the global random streams of this rank begin anew
    local_rank: int = 0  # index of this rank among those of its host: which GPU is its own
    clock: str = ""  # ranks with the same one read the same clock
    node: str = ""  # the name of the machine that it is on, where that is known
    share: Callable[[Callable[[], Any]], Any] = lambda make: make()  # one for all ranks here
    warms_up: bool = True  # whether the first step costs more than the others
    stopwatch: Callable[[bool], None] = lambda running: None  # told when this rank's runs or stops
    speeds: tuple[float, ...] = ()  # gradients a second of each rank, where the engine knows them
    bandwidths: tuple[float, ...] = ()  # bytes/s of each rank's link, where the engine knows them
    peak_memory: Callable[[], int | None] = lambda: None  # bytes of this rank's process so far
    threads: int | None = None  # that this rank's time is charged for; None: those that it uses
    members: tuple[int, ...] = ()  # of this group; empty: all of the start
    regroup: Callable[[PeerLost | GroupChanged], Runtime] | None = None
    """Give up this group, after an error of its transport; return the runtime of this rank in the
    next one. Raises `RunAborted` where no group follows. None: the engine makes no groups."""

    @property
    def slot(self) -> int:
        """The number by which files and watcher know this rank."""
        return self.members[self.rank] if self.members else self.rank


# Threads


def allowed_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def usable_cores() -> tuple[int, ...]:
    """Return as many of the allowed cores as this process can keep busy.

    A container's quota (`docker run --cpus 2`, a limit of Kubernetes) is rounded up. With a thread
    for each core of the host, all of them would stand still for most of each period.
    """
    cores, quota = allowed_cores(), cpu_quota()
    return cores if quota is None else cores[: math.ceil(quota)]


def cpu_quota() -> float | None:
    """Return how many cores the control groups (version 1 or 2) of this process let it use; None
    where nothing limits it."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            mount = GROUPS / "cpu" if controllers else GROUPS
            # In a container the path may be the host's, and only the mount itself be there.
            own = mount / group.lstrip("/")
            found += [_quota(each) for each in (own, *own.parents) if each.is_relative_to(mount)]
    return min((quota for quota in found if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """Return the quota of one control group in cores; None if it has none."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((group / name).read_text() for name in names)
        # "max" and -1 stand for no limit
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None


def shares_of_cores(usable: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """Return how many threads each rank gets, at least one.

    Each core is divided among the ranks that may use it. `usable` are host and cores of each rank.
    """
    users = Counter((host, core) for host, cores in usable for core in cores)
    return [
        # Exact fractions: ten float tenths add up to less than 1, and `int` would make 0 of it.
        max(1, int(sum((Fraction(1, users[host, core]) for core in cores), Fraction())))
        for host, cores in usable
    ]


def chosen_threads(environ: Mapping[str, str]) -> int | None:
    """Return what the user asks for with `OMP_NUM_THREADS` (its first number); None: nothing.

    torchrun sets it to 1 itself where it starts several processes and finds it unset. So a 1 in a
    process of torchrun is the user's only where torchrun was started with it.

    Raises:
        InputError: more threads than torch survives.
    """
    first = environ.get(VARIABLE, "").partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return None
    if first == "1" and "TORCHELASTIC_RUN_ID" in environ and not _parent_began_with(VARIABLE):
        return None
    if int(first) > MOST_THREADS:
        raise InputError(f"{VARIABLE}: {first} is above {MOST_THREADS}; set it to fewer threads")
    return int(first)


def _parent_began_with(name: str) -> bool:
    """Return whether the parent process was started with this variable; True if not known."""
    try:
        # As it was when the process started: what torchrun has set since is not in it.
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return any(entry.startswith(f"{name}=".encode()) for entry in entries)

"""What the processes of a node may have of the processor: control groups of version 1 or 2.

    orchestra-4711-a3/               the run; locked by its launcher, and by the guard
    orchestra-4711-a3/worker-3/      a node, with its quota
    orchestra-4711-a3/worker-3/r0/   the processes of a rank

Control groups do not end with the processes in them. A guard, a small process that outlives the
launcher, removes them: as soon as its standard input ends, at the launcher's close or death. Only
where the guard was killed, too, are they left to the next run, or to `orchestra emulation clean`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from orchestra.errors import InputError, RunFailed

PREFIX = "orchestra-"
_PERIOD = 10_000  # microseconds: a slow node is slow within a step
_LEAST_QUOTA, _MOST_PERIOD = 1_000, 1_000_000  # of the kernel

_REMOVE = """
for attempt in $(seq 500); do
    for members in "$0"/*/*/cgroup.procs; do
        [ -e "$members" ] && while read -r process; do
            kill -9 "$process" && echo "$process"
        done < "$members"
    done
    rmdir "$0"/*/* "$0"/* "$0"
    [ -d "$0" ] || exit 0
    sleep 0.02
done
exit 1
"""
_GUARD = f"trap '' INT TERM HUP; cat > /dev/null; {_REMOVE}"


class Quotas:
    """The control groups of a run, until `close`.

    Args:
        cores: how much of the processor each node has, in cores of this machine.
    """

    def __init__(self, cores: Mapping[str, float]) -> None:
        root, self._version = hierarchy()
        sweep(root)
        self.folder, self._lock = _claimed(root)
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, str(self.folder)], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[self._lock],
            start_new_session=True, cwd="/",
        )  # fmt: skip
        try:
            self._delegate(len(cores))
            for node, quota in cores.items():
                (self.folder / node).mkdir()
                self.limit(node, quota)
        except BaseException:
            self.close()
            raise

    def lift(self) -> None:
        """Let all nodes have as much of the processor as they can get."""
        for group in self.folder.glob("*/"):
            if self._version == 2:
                (group / "cpu.max").write_text("max")
            else:
                (group / "cpu.cfs_quota_us").write_text("-1")

    def limit(self, node: str, cores: float) -> None:
        quota, period = quota_and_period(cores)
        group = self.folder / node
        if self._version == 2:
            (group / "cpu.max").write_text(f"{quota} {period}")
            return
        for name, value in (("quota", -1), ("period", period), ("quota", quota)):
            (group / f"cpu.cfs_{name}_us").write_text(str(value))

    def members(self, node: str, rank: int) -> Path:
        """Return the file that takes the processes of `rank`, which is on `node`."""
        group = self.folder / node / f"r{rank}"
        group.mkdir(exist_ok=True)
        return group / "cgroup.procs"

    def signal(self, node: str, rank: int, number: signal.Signals) -> None:
        for process in self.members(node, rank).read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), number)

    def throttled(self, node: str) -> tuple[int, float]:
        """Return how often the quota has held up processes of `node`, and for how many seconds."""
        text = (self.folder / node / "cpu.stat").read_text()
        stat = dict(line.split() for line in text.splitlines())
        if self._version == 2:
            return int(stat["nr_throttled"]), int(stat["throttled_usec"]) / 1e6
        return int(stat["nr_throttled"]), int(stat["throttled_time"]) / 1e9

    def close(self) -> None:
        """End all processes inside, and remove the groups."""
        assert self._guard.stdin is not None
        # The guard removes the groups, as it does when this process dies: there is one way to do
        # it.
        self._guard.stdin.close()
        self._guard.wait()
        os.close(self._lock)
        if self.folder.exists():
            remove(self.folder)

    def _delegate(self, nodes: int) -> None:
        """Beside other programs, weigh as much as one process for each node, not as one in all."""
        if self._version == 2:
            (self.folder / "cgroup.subtree_control").write_text("+cpu")
            (self.folder / "cpu.weight").write_text(str(min(100 * nodes, 10_000)))
        else:
            (self.folder / "cpu.shares").write_text(str(min(1024 * nodes, 1 << 18)))


def quota_and_period(cores: float) -> tuple[int, int]:
    """Return a quota and its period in microseconds, for `cores` cores."""
    # As short as the kernel's least quota allows: with the usual 100 ms a slow node would stand
    # still for longer than most steps take.
    period = min(max(_PERIOD, int(_LEAST_QUOTA / cores)), _MOST_PERIOD)
    return max(_LEAST_QUOTA, round(cores * period)), period


def hierarchy() -> tuple[Path, int]:
    """Return the folder for the groups of runs, and the version of control groups.

    Raises:
        InputError: there are none that limit the processor.
    """
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4])
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup" and "cpu" in options.split(","):
            return mount, 1
        if kind == "cgroup2" and "cpu" in (mount / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):
                (mount / "cgroup.subtree_control").write_text("+cpu")
                return mount, 2
    raise InputError(
        "emulation limits processors by control groups, and none with the controller cpu can be "
        "used here: mount them (in a container: docker run --privileged), or predict the same with "
        "--engine simulation"
    )


def sweep(root: Path | None = None) -> list[str]:
    """Remove what runs have left whose launcher and guard are gone; return what that was."""
    root = root or hierarchy()[0]
    removed = []
    for folder in sorted(root.glob(f"{PREFIX}*")):
        lock = _locked(folder)
        if lock is None:
            continue
        try:
            ended = remove(folder)
        finally:
            os.close(lock)
        removed.append(f"{folder}, with {ended} processes")
    return removed


def remove(folder: Path) -> int:
    """End the processes in the group of a run, and remove it; return how many there were.

    Raises `RunFailed` for one that does not end.
    """
    done = subprocess.run(
        ["sh", "-c", _REMOVE, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RunFailed(f"{folder} cannot be removed: processes in it do not end")
    return len(set(done.stdout.split()))


def _claimed(root: Path) -> tuple[Path, int]:
    """Make a folder that no sweep takes for left over; return it with its lock."""
    while True:
        folder = root / f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        folder.mkdir()
        lock = _locked(folder)
        if lock is not None and folder.exists():  # else a sweep was quicker
            return folder, lock


def _locked(folder: Path) -> int | None:
    """Take the lock of a folder; None while somebody has it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor

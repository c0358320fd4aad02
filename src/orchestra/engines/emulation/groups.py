"""What emulated nodes have of the processor, which control groups of version 1 or 2 limit.

    orchestra-4711-a3/               the run
    orchestra-4711-a3/worker-3/      a node, with its quota
    orchestra-4711-a3/worker-3/r0/   the processes of a rank

Control groups do not end with the processes in them. A guard, a small process that outlives the
launcher, removes them: as soon as its standard input ends, at the launcher's close or death. Only
where the guard was killed, too, are they left to the next run, or to `orchestra emulation clean`.

A file in `REGISTRY` for each run has a line for each group that it has made: its inode, and its
path. Launcher and guard lock the file. Nothing else is ever removed: a group of somebody else's may
have any name, and one that was made again under an old name has another inode.
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

REGISTRY = Path("/run/orchestra/emulation")
"""Gone after a restart of the machine, as control groups are."""
_PERIOD = 10_000  # microseconds: a slow node is slow within a step
_LEAST_QUOTA, _MOST_PERIOD = 1_000, 1_000_000  # of the kernel

# Of the groups in the file $0, the innermost ones come last: they were made last.
_REMOVE = """
for attempt in $(seq 500); do
    left=
    while read -r inode group; do
        [ "$(stat -c %i "$group" 2> /dev/null)" = "$inode" ] || continue
        while read -r process; do
            kill -9 "$process" && echo "$process"
        done < "$group/cgroup.procs"
        rmdir "$group" 2> /dev/null || left=yes
    done << END
$(tac "$0")
END
    [ -n "$left" ] || { rm -f "$0"; exit 0; }
    sleep 0.02
done
exit 1
"""
_GUARD = f"trap '' INT TERM HUP; cat > /dev/null; {_REMOVE}"


class MadeGroups:
    """The control groups that the run `name` makes, listed in a file by which any later process
    can remove them.

    `lock` is the descriptor of the `file`, which nobody else has while it is open.
    """

    def __init__(self, name: str) -> None:
        self.file = REGISTRY / name
        try:
            REGISTRY.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.lock = self._locked()
        except OSError as error:
            raise InputError(
                f"emulation writes down in {REGISTRY} which control groups it has made, and "
                f"cannot: {error.strerror}; make that folder writable, or predict the same with "
                "--engine simulation"
            ) from None

    def make(self, group: Path) -> None:
        """Make a control group, and write it down."""
        group.mkdir()
        os.write(self.lock, f"{group.stat().st_ino} {group}\n".encode())

    def _locked(self) -> int:
        while True:
            lock = os.open(self.file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, mode=0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # A sweep may have removed the file before it was locked.
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)


class Quotas:
    """The control groups of a run, until `close`.

    Args:
        cores: how much of the processor each node has, in cores of this machine.
    """

    def __init__(self, cores: Mapping[str, float]) -> None:
        root, self._version = hierarchy()
        sweep()
        name = f"orchestra-{os.getpid()}-{secrets.token_hex(3)}"
        self.folder = root / name
        self._made = MadeGroups(name)
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, str(self._made.file)], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[self._made.lock],
            start_new_session=True, cwd="/",
        )  # fmt: skip
        try:
            self._made.make(self.folder)
            self._delegate(len(cores))
            for node, quota in cores.items():
                self._made.make(self.folder / node)
                self.limit(node, quota)
        except BaseException:
            self.close()
            raise

    def lift(self) -> None:
        """Let all nodes have as much of the processor as they can get."""
        name, none = ("cpu.max", "max") if self._version == 2 else ("cpu.cfs_quota_us", "-1")
        for group in self.folder.glob("*/"):
            (group / name).write_text(none)

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
        if not group.exists():
            self._made.make(group)
        return group / "cgroup.procs"

    def signal(self, node: str, rank: int, number: signal.Signals) -> None:
        for process in self.members(node, rank).read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), number)

    def throttled(self, node: str) -> tuple[int, float]:
        """Return how often the quota has held up processes of `node`, and for how many seconds."""
        text = (self.folder / node / "cpu.stat").read_text()
        stat = dict(line.split() for line in text.splitlines())
        name, unit = ("throttled_usec", 1e6) if self._version == 2 else ("throttled_time", 1e9)
        return int(stat["nr_throttled"]), int(stat[name]) / unit

    def close(self) -> None:
        """End all processes inside, and remove the groups."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()  # it removes the groups, as it does when this process dies
        self._guard.wait()
        os.close(self._made.lock)
        if self._made.file.exists():
            remove(self._made.file)

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
    """Return the folder for the groups of runs, and the version of control groups. Raises
    `InputError` where this system has no control groups that limit the processor."""
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


def sweep() -> list[str]:
    """Remove what runs have left whose launcher and guard are gone; return what that was."""
    removed = []
    for file in sorted(REGISTRY.glob("*")):
        if (lock := _free(file)) is not None:
            try:
                there = _first_there(file)
                count = remove(file)
            finally:
                os.close(lock)
            if there is not None:
                removed.append(f"{there}, with {count} processes")
    return removed


def remove(file: Path) -> int:
    """End the processes in the groups that `file` lists, and remove these, then the file; return
    how many processes there were. Raises `RunFailed` for one that does not end."""
    done = subprocess.run(
        ["sh", "-c", _REMOVE, str(file)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RunFailed(
            f"groups in {file} cannot be removed: processes in them do not end, or another program "
            "has made groups inside"
        )
    return len(set(done.stdout.split()))


def _first_there(file: Path) -> str | None:
    """Return the outermost group in `file` that still exists; None if all are removed."""
    for line in file.read_text().splitlines():
        inode, _, group = line.partition(" ")
        with contextlib.suppress(OSError):
            if Path(group).stat().st_ino == int(inode):
                return group
    return None


def _free(file: Path) -> int | None:
    """Take the lock of a file; None while somebody has it, or where there is no file."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as held:
        descriptor = os.open(file, os.O_RDONLY)
        held.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.pop_all()
        return descriptor
    return None

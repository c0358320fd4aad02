"""An emulated cluster: where each rank is on it, what goes wrong, and what nodes have of the
processor, which control groups of version 1 or 2 limit.

    orchestra-4711-a3/               the run; locked by its launcher, and by the guard
    orchestra-4711-a3/.emulated/     the mark, without which a group is somebody else's
    orchestra-4711-a3/worker-3/      a node, with its quota
    orchestra-4711-a3/worker-3/r0/   the processes of a rank

Control groups do not end with the processes in them. A guard, a small process that outlives the
launcher, removes them: as soon as its standard input ends, at the launcher's close or death. Only
where the guard was killed, too, are they left to the next run, or to `orchestra emulation clean`.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from orchestra.cluster import Cluster, Node
from orchestra.cluster.faults import Changes
from orchestra.cluster.faults import Delay as DelayFault
from orchestra.engines.emulation.network import NODE_END, Namespace, Network
from orchestra.engines.processes.system import Delay, RankPlace
from orchestra.errors import InputError, RunFailed
from orchestra.worker.runtime import chosen_threads, usable_cores

INSTEAD = "or predict the same with --engine simulation"

PREFIX = "orchestra-"
MARK = ".emulated"  # a group, as a file or an attribute cannot be made in every version's hierarchy
_PERIOD = 10_000  # microseconds: a slow node is slow within a step
_LEAST_QUOTA, _MOST_PERIOD = 1_000, 1_000_000  # of the kernel

_REMOVE = f"""
for attempt in $(seq 500); do
    for members in "$0"/*/*/cgroup.procs; do
        [ -e "$members" ] && while read -r process; do
            kill -9 "$process" && echo "$process"
        done < "$members"
    done
    rmdir "$0"/*/* "$0"/*
    # The mark stays for a later sweep as long as any node does.
    for node in "$0"/*/; do [ -d "$node" ] || rmdir "$0/{MARK}" "$0"; done
    [ -d "$0" ] || exit 0
    sleep 0.02
done
exit 1
"""
_GUARD = f"trap '' INT TERM HUP; cat > /dev/null; {_REMOVE}"


@dataclass(frozen=True)
class Change:
    """`act` is called `at` seconds after the beginning."""

    at: float
    act: Callable[[], None]


class EmulatedCluster:
    """`cluster` with `ranks` ranks on it, until the end of a `with` block.

    Only nodes with ranks are there. `threads` are those that each rank is to compute with; by
    default `OMP_NUM_THREADS`, else its share of the cores of its node.

    `nodes` has that of each rank. Raises `InputError` where this machine cannot emulate it; the
    error says why, and what to do.
    """

    def __init__(self, cluster: Cluster, ranks: int, threads: int | None = None) -> None:
        require_emulation()
        self.cluster, self.ranks = cluster, ranks
        self.nodes = cluster.nodes_of(ranks)
        there = {node.name: node for node in self.nodes}
        require_room(cluster, list(there.values()))
        self._threads = threads or chosen_threads(os.environ)
        with contextlib.ExitStack() as held:
            self.network = Network(cluster, there.values())
            held.callback(self.network.close)
            self.quotas = Quotas({name: share_of(node) for name, node in there.items()})
            held.callback(self.quotas.close)
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def places(self) -> list[RankPlace]:
        """Return the place of each rank."""
        threads = self.cluster.threads_of(self.ranks, self._threads)
        return [
            RankPlace(
                node.name,
                self.network.addresses[node.name],
                NODE_END if node.switch is not None else "lo",
                self.network.namespaces[node.name].path,
                str(self.quotas.members(node.name, rank)),
                min(threads[rank], len(usable_cores())),
                sum(other.name == node.name for other in self.nodes[:rank]),
                tuple(self._latency(node, other) for other in self.nodes),
                tuple(self._delays(rank)),
                node.shared_memory,
            )
            for rank, node in enumerate(self.nodes)
        ]

    def changes(self) -> list[Change]:
        """Return what is changed from outside, by time; ranks delay their messages themselves."""
        found = []
        for node in {node.name: node for node in self.nodes}.values():
            for at, factor in _beginning_as_described(self.cluster.speed_changes(node)):
                limit = partial(self.quotas.limit, node.name, share_of(node) * factor)
                found.append(Change(at, limit))
        for name, end in self.network.ends.items():
            owner, _, kind = name.rpartition(" ")
            was_cut = False
            for at, factor in _beginning_as_described(self.cluster.bandwidth_changes(end.channel)):
                is_cut = factor == 0.0
                if is_cut != was_cut and kind == "down":  # one pull for both directions
                    found.append(Change(at, partial(self.network.cut, owner, cut=is_cut)))
                if not is_cut:
                    found.append(Change(at, partial(self.network.shape, name, factor)))
                was_cut = is_cut
        for rank, node in enumerate(self.nodes):
            send = partial(self.quotas.signal, node.name, rank)
            for begin, end_of_pause in self.cluster.pauses(rank, self.ranks):
                found.append(Change(begin, partial(send, signal.SIGSTOP)))
                found.append(Change(end_of_pause, partial(send, signal.SIGCONT)))
            death = self.cluster.death(rank, self.ranks)
            if death is not None:
                found.append(Change(death, partial(send, signal.SIGKILL)))
        return sorted(found, key=lambda change: change.at)

    def _latency(self, source: Node, target: Node) -> float:
        if self.network.netem or source.name == target.name:
            return 0.0
        return self.cluster.path(source, target).latency

    def _delays(self, rank: int) -> list[Delay]:
        found = []
        for fault in self.cluster.faults:
            if not isinstance(fault, DelayFault):
                continue
            end = math.inf if fault.until is None else fault.until
            found += [
                Delay(other, fault.seconds, fault.at, end)
                for other in range(self.ranks)
                if self._means(fault.source, rank) and self._means(fault.target, other)
            ]
        return found

    def _means(self, name: str | None, rank: int) -> bool:
        """Return whether a fault at `name` concerns `rank`; None means every rank."""
        return name in (None, f"rank {rank}", self.nodes[rank].name)


def _beginning_as_described(changes: Changes) -> Changes:
    """Return `changes` without a first one that changes nothing."""
    return changes[1:] if changes[0] == (0.0, 1.0) else changes


def share_of(node: Node) -> float:
    """Return how much of the processor a node has, in cores of this machine."""
    assert node.speed is not None  # see require_room
    return node.cores * node.speed


def require_emulation() -> None:
    """Raises `InputError` where this system lacks what an emulation needs."""
    if sys.platform != "linux":
        raise InputError(f"emulation needs Linux, not {sys.platform}: run it there, {INSTEAD}")
    if os.geteuid() != 0:
        raise InputError(f"emulation needs root for its networks: run it with sudo, {INSTEAD}")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise InputError(f"emulation needs {program}: install the package iproute2, {INSTEAD}")
    try:
        Namespace().close()
    except OSError as error:
        raise InputError(
            f"emulation cannot make a network namespace: {error.strerror}; in a container run it "
            f"with --privileged, {INSTEAD}"
        ) from None
    hierarchy()


def require_plain(cluster: Cluster, nodes: Sequence[Node]) -> None:
    """Raises `InputError` for what no machine can emulate."""
    where = f"cluster {cluster.name}"
    for node in nodes:
        if node.speed is None:
            raise InputError(
                f"{where}: node {node.name} has flops, and an emulation goes by the cores of this "
                f"machine: give it a speed, {INSTEAD}"
            )
        if node.devices:
            raise InputError(
                f"{where}: node {node.name} has devices, which cannot be emulated: leave them out, "
                f"{INSTEAD}"
            )


def require_room(cluster: Cluster, nodes: Sequence[Node]) -> None:
    """Raises `InputError` for what cannot be emulated, or not on this machine."""
    require_plain(cluster, nodes)
    wanted, there = sum(map(share_of, nodes)), len(usable_cores())
    if wanted > there * (1 + 1e-9):
        factor = math.floor(1000 * there / wanted) / 1000
        raise InputError(
            f"cluster {cluster.name}: its nodes with ranks want {wanted:g} cores (cores x speed); "
            f"this machine has {there}: multiply each speed by {factor:g} or less, {INSTEAD}"
        )


# Control groups


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
        name, none = ("cpu.max", "max") if self._version == 2 else ("cpu.cfs_quota_us", "-1")
        for group in self.folder.glob("[!.]*/"):
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
        name, unit = ("throttled_usec", 1e6) if self._version == 2 else ("throttled_time", 1e9)
        return int(stat["nr_throttled"]), int(stat[name]) / unit

    def close(self) -> None:
        """End all processes inside, and remove the groups."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()  # it removes the groups, as it does when this process dies
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
    """Return the folder for the groups of runs, and the version of control groups. Raises
    `InputError` where there are none that limit the processor."""
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
        if (folder / MARK).is_dir() and (lock := _locked(folder)) is not None:
            try:
                removed.append(f"{folder}, with {remove(folder)} processes")
            finally:
                os.close(lock)
    return removed


def remove(folder: Path) -> int:
    """End the processes in the group of a run, and remove it; return how many there were. Raises
    `RunFailed` for one that does not end."""
    done = subprocess.run(
        ["sh", "-c", _REMOVE, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RunFailed(f"{folder} cannot be removed: processes in it do not end")
    return len(set(done.stdout.split()))


def _claimed(root: Path) -> tuple[Path, int]:
    """Make a folder; return it with its lock, which is taken before a sweep minds the folder."""
    folder = root / f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
    folder.mkdir()
    lock = _locked(folder)
    assert lock is not None
    (folder / MARK).mkdir()
    return folder, lock


def _locked(folder: Path) -> int | None:
    """Take the lock of a folder; None while somebody has it, or where there is no folder."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as held:
        descriptor = os.open(folder, os.O_RDONLY)
        held.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.pop_all()
        return descriptor
    return None

"""What an emulation leaves behind, what it refuses, and its command line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.commands import Started, started
from tests.support.commands import run as run_command_line
from tests.support.emulated import LINK, needs_emulation, output, small_cluster, written
from tests.support.lab import some
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

from orchestra.cluster import (
    Cluster,
    NetworkSwitch,
    read_cluster,
)
from orchestra.engines.emulation import groups as emulation_groups
from orchestra.engines.emulation import nodes as emulation_nodes
from orchestra.engines.emulation.check import check_cluster
from orchestra.engines.emulation.commands import compose_text, shaping_script
from orchestra.engines.emulation.groups import MadeGroups, Quotas, hierarchy, remove, sweep
from orchestra.engines.emulation.network import Namespace
from orchestra.engines.emulation.nodes import EmulatedCluster, require_room
from orchestra.errors import InputError, RunFailed

pytestmark = needs_emulation


# Nothing stays


def groups(launcher: int | None = None) -> set[str]:
    """The control groups of runs that process `launcher` (this one) has started."""
    return {path.name for path in hierarchy()[0].glob(f"orchestra-{launcher or os.getpid()}-*")}


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def children() -> set[str]:
    """Those of this process, zombies among them."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def namespaces(folder: Path) -> dict[int, int]:
    """The network namespaces of living processes whose working folder is `folder`, by process.

    Runs of others have other folders. Guards are in "/": see `children` and `groups`.
    """
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with suppress(OSError):  # it has ended meanwhile, or is a zombie
                if process.joinpath("cwd").readlink() == folder:
                    found[int(process.name)] = process.joinpath("ns/net").stat().st_ino
    return found


@pytest.mark.parametrize("times", [3, pytest.param(200, marks=pytest.mark.lab)])
def test_start_and_stop_leave_nothing(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set[str](), interfaces(), descriptors(), children()
    memory = shared_memory()
    for _ in range(times):
        with EmulatedCluster(small_cluster(), 3) as there:
            assert len(groups()) == 1
            members = there.quotas.members("a", 0)
            command = ["sh", "-c", 'echo $$ > "$0"; exec sleep 1000', str(members)]
            with there.network.namespaces["a"].inside():
                process = subprocess.Popen(command)
            wait_until(lambda path=members: bool(path.read_text()), "it has joined")  # type: ignore[misc]
            assert [*namespaces(tmp_path)] == [process.pid]
        assert process.wait() == -signal.SIGKILL
    assert (groups(), interfaces(), descriptors(), children()) == before
    assert namespaces(tmp_path) == {}
    wait_until(lambda: not shared_memory() - memory, "other tests' segments are gone")


def train_for_long(folder: Path, cluster: Cluster) -> Any:
    arguments = ["train", "--task", "tests.support.tasks_for_tests:images", "--ranks", "3"]
    arguments += ["--strategy", "AllReduce", "--engine", "emulation", "--set", "steps=1000000"]
    return started([*arguments, "--cluster", written(cluster, folder)], folder)


@pytest.mark.parametrize("number", some([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
def test_a_killed_launcher_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with train_for_long(tmp_path, small_cluster()) as command:
        pid = command.process.pid
        steps = [f"runs/*/steps-rank-{rank}.jsonl" for rank in range(3)]
        command.wait_until(lambda: all(any(tmp_path.glob(name)) for name in steps), "training")
        assert len(groups(pid)) == 1
        # Those of three nodes, and the launcher's, whose threads enter a node's for a moment
        command.wait_until(lambda: len({*namespaces(tmp_path).values()}) == 4, "all run")
        os.kill(pid, number)
        ended = command.end()
    assert (ended.status == 0) == (number == signal.SIGTERM)  # which stops it in good order
    wait_until(lambda: not groups(pid), "the guard removes the groups")
    wait_until(lambda: not namespaces(tmp_path), "no process is left, and no namespace")


def test_ctrl_c_ends_a_benchmark_on_emulated_nodes_and_leaves_nothing(tmp_path: Path) -> None:
    arguments = ["--nodes", "2x0.125", "--models", "0.25 MB", "--rounds", "10000"]
    with Started([sys.executable, "-m", "benchmarks.emulated", *arguments], tmp_path) as command:
        pid = command.process.pid
        # Those of two nodes, and the launcher's, once both ranks are there
        command.wait_until(lambda: len({*namespaces(tmp_path).values()}) == 3, "both run")
        assert len(groups(pid)) == 1
        os.kill(pid, signal.SIGINT)
        ended = command.end()
    assert (ended.status, ended.err.splitlines()[-1]) == (1, "orchestra: stopped")
    wait_until(lambda: not groups(pid), "the guard removes the groups")
    wait_until(lambda: not namespaces(tmp_path), "no process is left, and no namespace")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry of this test's own: no other run sweeps what it lists."""
    folder = tmp_path / "registry"
    monkeypatch.setattr(emulation_groups, "REGISTRY", folder)
    return folder


def test_groups_of_others_are_left_alone(registry: Path) -> None:
    """Though their names begin alike, nobody holds them, and one has the name of a group that a
    run had made before, and that was removed meanwhile.
    """
    root = hierarchy()[0]
    other, again = (root / f"orchestra-{os.getpid()}-{name}" for name in ("service", "again"))
    made = MadeGroups("run")
    made.make(again)
    (again / "inside").mkdir()  # so that the next one gets another inode, and is none of the run's
    (again / "inside").rmdir()
    again.rmdir()
    inner = [other / "api" / "main", again / "api" / "main"]
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in inner]
    try:
        for group, process in zip(inner, processes, strict=True):
            group.mkdir(parents=True)
            (group / "cgroup.procs").write_text(str(process.pid))
        os.close(made.lock)
        assert sweep() == []
        assert [process.poll() for process in processes] == [None, None]
        assert list(registry.iterdir()) == []  # nothing of the run is there any more
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for group in inner:
            for path in (group, group.parent, group.parent.parent):
                wait_until(partial(removed, path), "the group is empty")


def test_a_group_in_which_somebody_else_made_one_is_not_removed(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_REMOVE", "_GUARD"):
        script = getattr(emulation_groups, name)
        assert "seq 500" in script
        monkeypatch.setattr(emulation_groups, name, script.replace("seq 500", "seq 2"))
    quotas = Quotas({"a": 0.5})
    foreign = quotas.folder / "a" / "foreign"
    foreign.mkdir()
    try:
        quotas._guard.kill()
        quotas._guard.wait()
        with pytest.raises(RunFailed, match="cannot be removed"):
            quotas.close()
        assert foreign.exists()
    finally:
        foreign.rmdir()
        remove(registry / quotas.folder.name)
    assert not quotas.folder.exists()
    assert list(registry.iterdir()) == []


def removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def test_what_a_guard_left_is_swept(registry: Path) -> None:
    quotas, under_way = Quotas({"a": 0.5}), Quotas({"b": 0.5})
    try:
        join = ["sh", "-c", 'echo $$ > "$0"; exec sleep 1000', str(quotas.members("a", 0))]
        with subprocess.Popen(join) as process:
            wait_until(lambda: bool(quotas.members("a", 0).read_text()), "it has joined")
            quotas._guard.kill()
            assert quotas._guard.stdin is not None
            quotas._guard.stdin.close()  # as if this process were gone, too
            quotas._guard.wait()
            os.close(quotas._made.lock)
            removed: list[str] = []

            def swept() -> bool:
                removed.extend(sweep())
                return bool(removed)

            wait_until(swept, "the lock is free")
        assert process.returncode == -signal.SIGKILL
        assert not quotas.folder.exists()
        assert any(f"{quotas.folder}, with 1 process" in line for line in removed)
        assert under_way.folder.exists()
        assert [file.name for file in registry.iterdir()] == [under_way.folder.name]
    finally:
        under_way.close()


# What cannot be emulated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed": 100.0}, "want 300 cores"),
        ({"speed": None, "flops": 1e9}, "node a has flops"),
        ({"devices": 1}, "node a has devices"),
    ],
)
def test_what_this_machine_cannot_emulate_is_refused(changes: dict[str, Any], message: str) -> None:
    cluster = small_cluster()
    nodes = tuple(replace(node, **changes) for node in cluster.nodes)
    with pytest.raises(InputError, match=message) as error:
        require_room(cluster, nodes)
    assert "--engine simulation" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_remedy_for_too_many_cores_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation_nodes, "usable_cores", lambda: (0, 1))
    nodes = tuple(replace(node, speed=1.5) for node in small_cluster().nodes)
    cluster = replace(small_cluster(), nodes=nodes)
    with pytest.raises(InputError, match=r"want 4.5 cores .* has 2: multiply each speed by 0.444"):
        require_room(cluster, nodes)
    require_room(cluster, [replace(node, speed=1.5 * 0.444) for node in nodes])


def test_the_example_fits_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation_nodes, "usable_cores", lambda: (0, 1))
    path = ROOT / "examples" / "clusters" / "mixed.yaml"
    cluster = read_cluster(path)
    require_room(cluster, cluster.nodes_of(4))


def test_without_root_the_next_best_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match=r"needs root.*sudo, or predict .* --engine simulation"):
        EmulatedCluster(small_cluster(), 3)


# The command line


def test_a_command_runs_on_every_node(tmp_path: Path) -> None:
    place = written(small_cluster(2), tmp_path)
    show = "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME; cat /proc/net/dev"
    ended = run_command_line(["emulation", "run", place, "--", "sh", "-c", show], tmp_path)
    assert (ended.status, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert "[0 a] 0 0 2 10.0.0.1 eth0" in lines
    assert "[1 b] 1 0 2 10.0.0.1 eth0" in lines
    names = {line.split()[2] for line in lines if ":" in line}
    assert names == {"lo:", "eth0:"}


def test_when_one_command_fails_all_end(tmp_path: Path) -> None:
    place = written(small_cluster(2), tmp_path)
    fail = "if [ $RANK = 1 ]; then exit 3; else exec sleep 1000; fi"
    ended = run_command_line(["emulation", "run", place, "--", "sh", "-c", fail], tmp_path)
    assert ended.status == 1
    assert ended.err == "orchestra: the command of rank 1 on b ended with status 3\n"


def test_a_compose_file_is_one(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    place = written(small_cluster(), tmp_path)
    ended = run_command_line(["emulation", "compose", place, "--", "echo", "$RANK"], tmp_path)
    assert (ended.status, ended.err) == (0, "")
    path = tmp_path / "compose.yaml"
    path.write_text(ended.out)
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    assert subprocess.run([*check, str(path)], check=False).returncode == 0
    services = yaml.safe_load(ended.out)["services"]
    assert {*services} == {"a", "b", "c"}
    assert services["c"]["cpu_quota"] / services["c"]["cpu_period"] == pytest.approx(0.3)
    assert services["c"]["environment"]["RANK"] == "2"
    assert services["c"]["environment"]["MASTER_ADDR"] == "a"


def test_a_container_shapes_both_directions() -> None:
    """In a namespace in place of a container."""
    node = small_cluster().nodes[0]
    namespace = Namespace()
    try:
        namespace.ip(["link add name eth0 type veth peer name other", "link set eth0 up"])
        shown = output(namespace, "sh", "-c", shaping_script(node), "sh", "tc", "qdisc", "show")
        filters = output(namespace, "tc", "filter", "show", "dev", "eth0", "parent", "ffff:")
    finally:
        namespace.close()
    shaped = [line.split()[4] for line in shown.splitlines() if "rate 400Mbit" in line]
    assert shaped == ["eth0", "arriving"]
    assert "Redirect to device arriving" in filters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": ("a", "a")}, "node a holds 2 ranks"),
        ({"placement": ("a", "apart")}, "at several switches"),
    ],
)
def test_what_compose_cannot_say_is_refused(changes: dict[str, Any], message: str) -> None:
    small = small_cluster()
    further = replace(small.nodes[0], name="apart", switch="below")
    tree = (*small.switches, NetworkSwitch("below", to="switch", up=LINK, down=LINK))
    cluster = replace(small, nodes=(*small.nodes, further), switches=tree, **changes)
    with pytest.raises(InputError, match=message):
        compose_text(cluster, 2, ["true"])


def test_no_link_carries_more_than_described(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestra.engines.emulation import check

    monkeypatch.setattr(check, "_SENDING_SECONDS", 0.05)
    monkeypatch.setattr(check, "_COMPUTING_SECONDS", 0.3)
    monkeypatch.setattr(check, "_ROUND_TRIPS", 5)
    rows = {row.name: row for row in check_cluster(small_cluster(2), lambda what, part: None)}
    assert {*rows} == {
        "a up", "a down", "b up", "b down", "a to b", "a computes", "b computes"
    }  # fmt: skip
    for name, row in rows.items():
        if name != "a to b":  # on a busy machine it is late
            assert row.off <= 0.1, row

"""How many threads a rank computes with: on processes, and what that means in virtual time."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import rank_programs as programs
from tests.support.calibrations import CALIBRATION, COSTS, TASK, kept, run_of, timing
from tests.support.commands import Started, torchrun
from tests.support.emulated import needs_emulation, small_cluster
from tests.support.free_ports import free_port
from tests.support.lab import in_lab
from tests.support.launchers import ended, started
from tests.support.paths import ROOT
from tests.support.simulated import FREE, cluster, run_ranks, simulated
from tests.support.training import settings, train_processes

from orchestra.cluster import Cluster, Node
from orchestra.cluster.nodes import Sharing
from orchestra.cluster.presets import LOOPBACK
from orchestra.engines.emulation.nodes import EmulatedCluster
from orchestra.engines.processes import launch
from orchestra.engines.simulation.costs import CalibratedCosts
from orchestra.engines.simulation.simulate import Simulation
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.single import Single
from orchestra.tasks.task import load_task
from orchestra.worker import runtime as cores
from orchestra.worker.layout import Layout
from orchestra.worker.runtime import (
    Runtime,
    SilentReporter,
    Work,
    chosen_threads,
    shares_of_cores,
    usable_cores,
)

__all__ = ["started"]
CORES = usable_cores()


@pytest.mark.parametrize(
    ("usable", "shares"),
    [
        ([("a", range(8))], [8]),
        ([("a", range(8))] * 2, [4, 4]),
        ([("a", range(8))] * 3, [2, 2, 2]),
        ([("a", range(2))] * 5, [1] * 5),
        ([("a", [0]), ("a", [1])], [1, 1]),
        ([("a", [0]), ("a", [1, 2])], [1, 2]),
        ([("a", range(4)), ("b", range(4)), ("b", range(4))], [4, 2, 2]),
        ([("a", range(4)), ("a", [0])], [3, 1]),  # they share one core
    ],
)
def test_each_core_is_divided_among_the_ranks_that_may_use_it(
    usable: Sequence[tuple[str, Sequence[int]]], shares: list[int]
) -> None:
    assert shares_of_cores(usable) == shares


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),  # inside a container
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),  # the root of version 2 has no such file
        ("0::/a/b\n", {"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "max 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "150000 100000\n"}, 1.5),
        (
            "5:memory:/x\n3:cpu,cpuacct:/host/path\n",  # a path that only the host has
            {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            4.0,
        ),
        (
            "3:cpu:/\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("5:memory:/x\n", {"cpu/cpu.cfs_quota_us": "1\n", "cpu/cpu.cfs_period_us": "1\n"}, None),
    ],
)
def test_a_containers_quota_is_known(
    membership: str,
    files: dict[str, str],
    quota: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in {"membership": membership, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cores, "GROUPS", tmp_path)
    monkeypatch.setattr(cores, "allowed_cores", lambda: tuple(range(8)))
    assert cores.cpu_quota() == quota
    assert len(usable_cores()) == (8 if quota is None else {0.5: 1, 1.5: 2}.get(quota, quota))


def test_without_control_groups_nothing_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "MEMBERSHIP", Path("/nowhere/cgroup"))
    assert cores.cpu_quota() is None


@needs_emulation
def test_a_rank_under_a_quota_knows_it() -> None:
    with EmulatedCluster(small_cluster(2, speed=0.4), 2) as there:
        outcome = launch(programs.quota_of, None, 2, places=there.places())
    assert outcome.results == (pytest.approx(0.4), pytest.approx(0.2))


@pytest.mark.parametrize(
    ("text", "number"),
    [(None, None), ("", None), ("3", 3), ("1", 1), ("4,2", 4), ("0", None), ("many", None)],
)
def test_what_the_user_asks_for(text: str | None, number: int | None) -> None:
    environ = {} if text is None else {"OMP_NUM_THREADS": text}
    assert chosen_threads(environ) == number


@pytest.mark.parametrize(("began_with", "number"), [({}, None), ({"OMP_NUM_THREADS": "1"}, 1)])
def test_a_one_that_torchrun_has_set_itself_is_not_the_users(
    began_with: dict[str, str], number: int | None
) -> None:
    """As its variables when it was started show; here it is the parent of a process."""
    code = (
        "import os\n"
        "from orchestra.worker.runtime import chosen_threads\n"
        "if os.fork() == 0:\n"
        "    print(chosen_threads({'OMP_NUM_THREADS': '1', 'TORCHELASTIC_RUN_ID': 'x'}))\n"
        "else:\n"
        "    os.wait()\n"
    )
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environ | began_with, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert told.stdout.strip() == str(number)


def test_local_ranks_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting comes first, then the variable, then the share."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch(programs.thread_count, None, 1).results == (len(CORES),)
    assert launch(programs.thread_count, None, 2).results == (max(1, len(CORES) // 2),) * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(programs.thread_count, None, 2).results == (3, 3)
    assert launch(programs.thread_count, None, 2, threads=2).results == (2, 2)


def test_a_background_flow_has_one_thread() -> None:
    assert launch(programs.thread_counts_of_flows, None, 1, threads=3).results == ((3, 1, 3),)


def torchrun_nodes(
    started: list[Started],
    folder: Path,
    cores: Sequence[set[int]],
    program: str = "thread_count",
    ranks: int = 1,
    **variables: str | None,
) -> str:
    """What the ranks returned, where each agent of torchrun may use only these cores."""
    variables = {"OMP_NUM_THREADS": None, **variables}
    port = free_port()
    for node, own in enumerate(cores):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(cores)}"]
        command += [f"--nproc-per-node={ranks}", f"--node-rank={node}", f"--master-port={port}"]
        command += ["--master-addr=127.0.0.1", f"--log-dir={folder}"]
        command += [str(ROOT / "tests" / "support" / "joined.py"), program, str(folder), "60"]
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, own)  # what is started from here inherits it
        try:
            started.append(Started(command, ROOT, variables, fresh=True))
        finally:
            os.sched_setaffinity(0, before)
    for process in started:
        status, error = ended(process)
        assert status == 0, error
    return (folder / "outcome 0").read_text()


needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="there is one core")


@pytest.mark.lab
@needs_two_cores
def test_two_nodes_of_torchrun_with_a_core_each(started: Any, tmp_path: Path) -> None:
    told = torchrun_nodes(started, tmp_path, [{CORES[0]}, {CORES[1]}])
    assert told == "(1, 1)"


@pytest.mark.lab
@needs_two_cores
def test_a_node_of_torchrun_with_two_cores(started: Any, tmp_path: Path) -> None:
    assert torchrun_nodes(started, tmp_path, [set(CORES[:2])]) == "(2,)"


@pytest.mark.lab
@needs_two_cores
def test_two_nodes_of_torchrun_that_share_two_cores(started: Any, tmp_path: Path) -> None:
    assert torchrun_nodes(started, tmp_path, [set(CORES[:2])] * 2) == "(1, 1)"


@pytest.mark.lab
def test_two_nodes_of_torchrun_with_the_users_number(started: Any, tmp_path: Path) -> None:
    told = torchrun_nodes(started, tmp_path, [set(CORES)] * 2, OMP_NUM_THREADS="3")
    assert told == "(3, 3)"


@pytest.mark.parametrize(
    ("variables", "told"),
    in_lab([({}, "None"), ({"OMP_NUM_THREADS": "1"}, "1")]),
)
def test_the_one_that_torchrun_sets_itself_is_not_the_users(
    variables: dict[str, str], told: str, started: Any, tmp_path: Path
) -> None:
    chosen = torchrun_nodes(started, tmp_path, [set(CORES)], "asked_threads", 2, **variables)
    assert chosen == f"({told}, {told})"


OWN_LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import orchestra

torch.set_num_threads(3)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
model, optimizer, loader = orchestra.distribute(model, optimizer, loader, "AllReduce('ring')")
for (inputs,) in loader:
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.get_num_threads())
"""


def test_in_a_loop_of_the_users_own_the_users_number_stays(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(OWN_LOOP)
    with torchrun(script, 2, [], tmp_path) as process:
        told = process.end()
    assert told.status == 0, told.err
    assert told.out.replace("\n", "") == "33"  # two processes write, each its own line


# In virtual time

SECONDS = {1: 1.0, 2: 0.7, 4: 0.5, 8: 0.45}
"""Of a sample's gradient, over threads: far from linear."""
TIMINGS = tuple(timing(threads, each, 0.01, 0.1) for threads, each in SECONDS.items())
MEASURED = CalibratedCosts(CALIBRATION, dataclasses.replace(COSTS, timings=TIMINGS))


def gradients(
    on: str | Cluster, ranks: int, threads: int | None = None, shared_speed: float = 1.0
) -> list[tuple[int | None, float]]:
    """The threads of each rank, and the seconds of a gradient of one sample on all of them."""

    def program(runtime: Runtime) -> tuple[int | None, float]:
        runtime.compute.run(Work("gradient", 1), lambda: None)
        return runtime.threads, runtime.transport.now()

    there = cluster(on) if isinstance(on, str) else on
    outcome = Simulation(
        there, ranks, MEASURED, FREE, SilentReporter(),
        sharing=Sharing(shared_speed), threads=threads,
    ).run(program)  # fmt: skip
    assert outcome.failure is None
    return [(known, float(f"{seconds:.9g}")) for known, seconds in outcome.results]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_with_a_node_for_itself_computes_with_all_its_cores(ranks: int) -> None:
    assert gradients("lan_1gbit(3, cores=4)", ranks) == [(4, 0.5)] * ranks
    assert gradients("lan_1gbit(3, cores=1)", ranks) == [(1, 1.0)] * ranks
    assert gradients("lan_1gbit(3, cores=4)", ranks, threads=2) == [(2, 0.7)] * ranks


def test_ranks_of_a_node_divide_its_cores() -> None:
    assert gradients("one_host(8)", 2) == [(4, 0.5)] * 2
    assert gradients("one_host(8)", 8) == [(1, 1.0)] * 8
    assert gradients("lan_1gbit(2, cores=4)", 3) == [(2, 0.7), (4, 0.5), (2, 0.7)]


def test_unlike_nodes_have_threads_of_their_own() -> None:
    nodes = tuple(Node(f"n{cores}", cores, speed=1, loopback=LOOPBACK) for cores in (1, 2, 8))
    devices = nodes[2].with_setting("devices", 2)
    assert Cluster("one", nodes[:1], placement="packed").threads_of(3) == (1, 1, 1)
    assert Cluster("one", nodes[2:], placement="packed").threads_of(3) == (2, 2, 2)
    assert Cluster("one", (devices,), placement="packed").threads_of(1) == (1,)
    assert Cluster("one", nodes[1:2], placement="packed").threads_of(1, 64) == (2,)


def test_threads_that_want_more_cores_than_there_are_share_them() -> None:
    """Two teams of four on four cores take twice as long; one that is alone does not."""
    assert gradients("one_host(4)", 2, threads=4) == [(4, 1.0)] * 2
    assert gradients("one_host(4)", 1, threads=4) == [(4, 0.5)]


def test_cores_that_are_slower_together_are_so_for_the_threads_of_others_only() -> None:
    """What four threads take while four compute has been measured; not with eight."""
    assert gradients("one_host(8)", 1, shared_speed=0.5) == [(8, 0.45)]
    assert gradients("one_host(8)", 2, shared_speed=0.5) == [(4, 1.0)] * 2


def test_a_background_flow_is_charged_for_one_thread() -> None:
    def program(runtime: Runtime) -> float:
        update = Work("gradient", 1)
        runtime.transport.spawn(lambda _: runtime.compute.run(update, lambda: None)).wait()
        return runtime.transport.now()

    assert run_ranks(1, program, "one_host(4)", costs=MEASURED).results == (pytest.approx(1.0),)


def test_the_record_tells_the_threads_that_were_charged(tmp_path: Path) -> None:
    calibration = CALIBRATION.with_task(dataclasses.replace(COSTS, timings=TIMINGS))
    path = str(kept(calibration, tmp_path))
    known: dict[str, Any] = {"steps": 2, "batch_size": 4, "calibration": path}
    exact = "lan_1gbit(2, cores=4, jitter=None)"
    ring = simulated(run_of(AllReduce(), 2, **known), tmp_path / "a", on=exact)
    assert (ring.machine.threads, ring.threads_by_rank) == (4, [4, 4])
    alone = simulated(run_of(Single(), 2, **known), tmp_path / "b", on=exact)
    assert alone.machine.threads == 4
    elements = Layout.of_module(load_task(TASK).model()).size
    for record, batch in ((ring, 4), (alone, 8)):  # gradients and updates of two steps
        seconds = 2 * (batch * 0.5 + elements * 0.01)
        assert record.time.worker["compute"] == pytest.approx(seconds, rel=1e-6)
    few = simulated(run_of(AllReduce(), 2, threads=2, **known), tmp_path / "c", on="lan_1gbit(2)")
    assert few.threads_by_rank == [2, 2]


def test_the_record_tells_the_threads_that_were_used(tmp_path: Path) -> None:
    run = settings(AllReduce("ring"), 2, "images()", steps=2, threads=2)
    assert train_processes(run, tmp_path).threads_by_rank == [2, 2]


def test_values_are_computed_with_the_threads_of_this_machine_that_are_asked_for() -> None:
    """Whatever the described node has: one by default, as `OMP_NUM_THREADS` says here."""

    def used(arithmetic: Sequence[int] | None) -> tuple[Any, ...]:
        on, reporter = cluster("lan_1gbit(2, cores=4)"), SilentReporter()
        return Simulation(
            on, 2, MEASURED, FREE, reporter,
            arithmetic=arithmetic,
        ).run(lambda _: torch.get_num_threads()).results  # fmt: skip

    assert used(None) == (1, 1)
    assert used([3, 2]) == (3, 2)

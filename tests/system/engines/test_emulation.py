"""The engine `emulation`: real processes on nodes that Linux keeps apart."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.emulated import LINK, needs_emulation, output, small_cluster, written
from tests.support.lab import in_lab
from tests.support.strategy_table import TABLE
from tests.support.training import settings, train_processes
from tests.support.waiting import wait_until

from orchestra.cluster import (
    Cluster,
    Death,
    LinkCut,
    LinkSlow,
    NetworkSwitch,
    Node,
    Pause,
    SlowDown,
)
from orchestra.cluster import Delay as DelayFault
from orchestra.engines.emulation.check import connected
from orchestra.engines.emulation.groups import Quotas
from orchestra.engines.emulation.network import Network
from orchestra.engines.emulation.nodes import Change, EmulatedCluster
from orchestra.engines.emulation.training import TimedChanges, train_run
from orchestra.engines.events import Heartbeat
from orchestra.engines.processes import launch
from orchestra.errors import RunFailed
from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder
from orchestra.settings import parse
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.registry import STRATEGIES
from orchestra.transports.shared_memory import host_key
from orchestra.worker.runtime import RankActivity, Runtime

TASK = "digits_in_one_thread()"
COMPRESSORS = ("FP16()", "TopK(0.05)", "QSGD(7)", "PowerSGD(2)", "SignSGD()")

pytestmark = needs_emulation


def emulated(strategy: Any, folder: Path, cluster: Cluster, **training: Any) -> RunRecord:
    """Train on `cluster`, one rank a node."""
    ranks = training.pop("ranks", len(cluster.nodes))
    training = {"steps": 6, "threads": 1, **training}
    place = written(cluster, folder)
    run = settings(strategy, ranks, TASK, engine="emulation", cluster=place, **training)
    return train_run(run, folder / "run", quiet=True)


def row(label: str) -> Any:
    return next(row for row in TABLE if row.label == label).build()


# Training


def check_counters(folder: Path, counted: int | None = None) -> None:
    """What the transports `counted` has crossed the cables, and little else."""
    found = json.loads((folder / "emulation.json").read_text())
    for direction in ("up", "down"):
        cables = found["cables"].items()
        crossed = sum(cable["payload"] for name, cable in cables if name.endswith(direction))
        assert crossed == pytest.approx(counted or sum(found["sent_by_rank"]), rel=0.05)


def test_a_ring_has_the_bits_of_processes(tmp_path: Path) -> None:
    record = emulated(AllReduce("ring"), tmp_path, small_cluster())
    here = settings(AllReduce("ring"), 3, TASK, steps=6, threads=1)
    beside = train_processes(here, tmp_path / "processes")
    assert record.learned.parameters_sha256 == beside.learned.parameters_sha256
    assert (record.ending.status, record.asked.engine) == ("completed", "emulation")
    assert record.asked.cluster == str(tmp_path / "cluster.yaml")
    assert record.ending.notices == (
        "latencies are added in the transport, as this kernel has no netem",
    )
    check_counters(tmp_path / "run")
    check_links(tmp_path / "run", record)


def check_links(folder: Path, record: RunRecord) -> None:
    """What crossed them while the stopwatch ran, and nearly nothing else."""
    links = RunFolder(folder).links
    assert links is not None
    assert {link.name for link in links.busiest} == {
        f"{n} {d}" for n in "abc" for d in ("up", "down")
    }
    up = sum(link.bytes for link in links.busiest if link.name.endswith("up"))
    assert record.traffic.sent * 0.95 < up < record.traffic.sent * 2
    assert all(link.share > 0 for link in links.busiest)


def test_an_asynchronous_server_beside_a_slow_node(tmp_path: Path) -> None:
    record = emulated(row("asynchronous"), tmp_path, small_cluster())
    assert record.ending.status == "completed"
    check_counters(tmp_path / "run")


MATRIX = [
    pytest.param(row, id=row.label, marks=pytest.mark.lab)
    for row in TABLE
    if 3 in row.sizes and row.label not in ("single", "native")
]


@pytest.mark.parametrize("row", MATRIX)
def test_counters_agree_for_every_strategy(row: Any, tmp_path: Path) -> None:
    emulated(row.build(), tmp_path, small_cluster(), steps=20)
    check_counters(tmp_path / "run")


COMPRESSED = [
    *(f"AllReduce('ring', compression={compressor})" for compressor in COMPRESSORS),
    "AllReduce('halving_doubling', compression=PowerSGD(2))",
    "ParameterServer(compression=FP16())",
    'ParameterServer(consistency="asynchronous", compression=QSGD(7))',
    "LocalSGD(3, outer=Nesterov(0.7, 0.9), compression=TopK(0.05))",
    "Gossip(compression=TopK(0.1), consensus=0.2)",
]


@pytest.mark.lab
@pytest.mark.parametrize("text", COMPRESSED)
def test_counters_agree_where_gradients_are_compressed(text: str, tmp_path: Path) -> None:
    strategy = parse(text, STRATEGIES, where="test")
    emulated(strategy, tmp_path, small_cluster(speed=0.4), steps=20)
    check_counters(tmp_path / "run")


@pytest.mark.lab
@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("Pipeline(schedule='gpipe', microbatches=4)", 3),
        ("Pipeline(2, schedule='gpipe', microbatches=4)", 4),
        ("Pipeline(2, microbatches=4)", 4),
    ],
)
def test_counters_agree_for_pipelines(text: str, nodes: int, tmp_path: Path) -> None:
    strategy = parse(text, STRATEGIES, where="test")
    emulated(strategy, tmp_path, small_cluster(nodes, speed=0.4), steps=20)
    check_counters(tmp_path / "run")


@pytest.mark.lab
def test_counters_agree_with_the_formula_of_native_collectives(tmp_path: Path) -> None:
    """Which is of the steps alone: a hundred of them are nearly all that there is."""
    record = emulated(row("native"), tmp_path, small_cluster(), steps=100)
    check_counters(tmp_path / "run", record.traffic.sent)
    assert "native collectives have no latency" in record.ending.notices[1]


def test_one_process_has_the_best_node(tmp_path: Path) -> None:
    cluster = small_cluster()
    slow_first = replace(cluster, nodes=cluster.nodes[::-1])
    record = emulated(row("single"), tmp_path, slow_first, ranks=3)
    assert record.machine.node == "a"


@pytest.mark.parametrize("strategy", ["ring", *in_lab(["asynchronous"])])
def test_a_killed_rank_is_named(strategy: str, tmp_path: Path) -> None:
    """The fault comes 0.2 s after the beginning of a training that would take minutes."""
    cluster = small_cluster(faults=[Death("b", at=0.2)])
    if strategy == "ring":
        with pytest.raises(RunFailed, match="rank 1 on b was killed by SIGKILL"):
            emulated(row(strategy), tmp_path, cluster, steps=100_000)
    else:  # rank 0 is the server, rank 1 one of two workers
        record = emulated(row(strategy), tmp_path, cluster, steps=300)
        assert list(record.ending.left_out) == ["1"]


def test_switches_form_a_tree_and_share(tmp_path: Path) -> None:
    """Every cable and middle carries what crosses it, and no other; counted by frames' payload."""
    small = small_cluster(4, speed=0.1)
    racks = [replace(node, switch="far" if node.name in "cd" else "near") for node in small.nodes]
    tree = (
        NetworkSwitch("near", shared=25e6),
        NetworkSwitch("far", to="near", up=LINK, down=replace(LINK, bandwidth=10e6)),
    )
    cluster = replace(small, nodes=tuple(racks), switches=tree)
    size = 200_000
    with EmulatedCluster(cluster, 4) as there, ExitStack() as closing:
        for source, target in ((0, 1), (1, 2), (3, 2)):
            one, two = connected(there.network, racks[source], racks[target], closing)
            one.sendall(bytes(size))
            assert len(two.recv(size, socket.MSG_WAITALL)) == size
        carried = {
            name: round(c.payload / size) for name, c in there.network.meters().read().items()
        }
    assert carried == {
        "a up": 1, "a down": 0, "b up": 1, "b down": 1, "c up": 0, "c down": 2, "d up": 1,
        "d down": 0, "far up": 0, "far down": 1, "near shared": 2,
    }  # fmt: skip


# Nodes are apart


def reach(runtime: Runtime, _: None) -> tuple[str, list[str]]:
    """What a rank can reach of what rank 0 has on its loopback; which host it takes itself for."""
    transport, ranks = runtime.transport, range(runtime.ranks)
    reached: list[str] = []
    own, name = socket.create_server(("127.0.0.1", 0)), f"\0orchestra-test-{os.getpid()}"
    local = socket.socket(socket.AF_UNIX)
    local.bind(name)
    local.listen()
    import torch

    about = torch.tensor([own.getsockname()[1], os.getpid()])
    for rank in ranks:
        transport.send(about, rank, 1)
    for rank in ranks:
        port, process = map(int, transport.receive(rank, 1).wait())
        for kind, address in (
            (socket.AF_INET, ("127.0.0.1", port)),
            (socket.AF_UNIX, f"\0orchestra-test-{process}"),
        ):
            with socket.socket(kind) as probe:
                if probe.connect_ex(address) == 0:
                    reached.append(f"{kind.name} of {rank}")
    for rank in ranks:  # nobody closes before all have tried
        transport.send(about, rank, 2)
    for rank in ranks:
        transport.receive(rank, 2).wait()
    return host_key(), reached


def test_no_rank_reaches_another_node_by_loopback() -> None:
    cluster = replace(small_cluster(2), placement=("a", "a", "b"))
    with EmulatedCluster(cluster, 3) as there:
        results = launch(reach, None, 3, places=there.places()).results
    hosts = [host for host, _ in results]
    assert hosts[0] == hosts[1] != hosts[2]  # whose ranks share memory
    near = {f"{kind} of {rank}" for kind in ("AF_INET", "AF_UNIX") for rank in (0, 1)}
    assert [set(reached) for _, reached in results] == [
        near, near, {"AF_INET of 2", "AF_UNIX of 2"}
    ]  # fmt: skip


def test_ranks_know_their_node(tmp_path: Path) -> None:
    cluster = Cluster(
        "wide",
        (Node("a", 2, speed=0.25, switch="s", up=LINK, down=LINK, loopback=LINK),
         Node("b", 1, speed=0.25, switch="s", up=LINK, down=LINK, loopback=LINK)),
        (NetworkSwitch("s"),),
        placement=("a", "b", "b"),
    )  # fmt: skip
    with EmulatedCluster(cluster, 3, threads=None) as there:
        places = there.places()
    assert [(place.node, place.local_rank) for place in places] == [("a", 0), ("b", 0), ("b", 1)]
    assert [place.latencies for place in places] == [
        (0.0, 2e-4, 2e-4), (2e-4, 0.0, 0.0), (2e-4, 0.0, 0.0)
    ]  # fmt: skip


# Quotas


def test_a_quota_holds_up_a_busy_process() -> None:
    quotas = Quotas({"half": 0.5, "tenth": 0.1})
    try:
        busy = 'echo $$ > "$0"; while :; do :; done'
        members = quotas.members("tenth", 0)
        with subprocess.Popen(["sh", "-c", busy, str(members)]) as process:
            wait_until(lambda: quotas.throttled("tenth")[0] >= 5, "the quota is used up")
            assert quotas.throttled("half") == (0, 0.0)
            quotas.close()
        assert process.returncode == -signal.SIGKILL
    finally:
        if quotas.folder.exists():
            quotas.close()


def limits(quotas: Quotas, node: str) -> float:
    """The cores that the kernel gives."""
    folder = quotas.folder / node
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
    return int(quota) / int(period)


@pytest.mark.parametrize("cores", [0.002, 0.05, 0.3, 1.75])
def test_a_quota_is_that_of_the_node(cores: float) -> None:
    quotas = Quotas({"a": cores})
    try:
        assert limits(quotas, "a") == pytest.approx(cores, rel=0.01)
    finally:
        quotas.close()


# Faults


def test_faults_change_quotas_and_cables() -> None:
    faults = [
        SlowDown("a", 4.0, at=1.0, until=5.0),
        LinkSlow("b", 10.0, at=2.0, until=6.0),
        LinkCut("c", at=3.0, until=7.0),
    ]
    with EmulatedCluster(small_cluster(faults=faults), 3) as there:
        changes = there.changes()

        def state() -> tuple[float, bool, bool]:
            slow, b = there.network.ends["b up"], there.network.ends["b down"]
            rates = [output(end.namespace, "tc", "qdisc", "show", "dev", end.interface)
                     for end in (slow, b)]  # fmt: skip
            c = there.network.ends["c up"]
            link = output(c.namespace, "ip", "link", "show", c.interface)
            slowed = ["rate 40Mbit" in text for text in rates]
            assert slowed[0] == slowed[1]
            return round(limits(there.quotas, "a"), 3), slowed[0], "NO-CARRIER" in link

        found = []
        for time in (0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0):
            for change in changes:
                if change.at == time:
                    change.act()
            found.append(state())
    assert found == [
        (0.6, False, False),
        (0.15, False, False),
        (0.15, True, False),
        (0.15, True, True),
        (0.6, True, True),
        (0.6, False, True),
        (0.6, False, False),
    ]


def test_what_is_under_way_goes_on_after_a_cut() -> None:
    cluster = small_cluster(2)
    network = Network(cluster, cluster.nodes)
    a, b = cluster.nodes
    try:
        with ExitStack() as closing:
            one, two = connected(network, a, b, closing)

            def sent_again() -> bool:
                return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[2] > 0

            network.cut("b", cut=True)
            one.sendall(b"message")
            wait_until(sent_again, "TCP has waited for an answer in vain")
            with pytest.raises(BlockingIOError):
                two.recv(7, socket.MSG_DONTWAIT)
            network.cut("b", cut=False)
            assert two.recv(7, socket.MSG_WAITALL) == b"message"
    finally:
        network.close()


def test_a_paused_rank_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """As nobody can do without it, it goes on within the 3 s for which nobody notices."""
    cluster = small_cluster(2, [Pause("rank 1", at=0.1, seconds=0.3)])
    assert emulated(AllReduce(), tmp_path, cluster, steps=60).ending.status == "completed"


def test_delays_are_those_of_the_cluster() -> None:
    faults = [DelayFault(0.5, "b", at=1.0), DelayFault(0.25, None, "rank 0", at=0.0, until=2.0)]
    with EmulatedCluster(small_cluster(faults=faults), 3) as there:
        found = [
            [(d.target, d.seconds, d.begin, d.end) for d in place.delays]
            for place in there.places()
        ]
    late = (0, 0.25, 0.0, 2.0)
    own = [(target, 0.5, 1.0, float("inf")) for target in range(3)]
    assert found == [[late], [*own, late], [late]]


def test_an_error_in_a_change_is_told() -> None:
    def fail() -> None:
        raise OSError("no such cable")

    schedule = TimedChanges([Change(0.0, fail)], 1)
    schedule.begin()
    wait_until(lambda: not schedule._thread.is_alive(), "the change")
    with pytest.raises(OSError, match="no such cable"):
        schedule.close()


def test_quotas_are_lifted_when_all_evaluate() -> None:
    ends: list[str] = []
    schedule = TimedChanges([], 2, at_end=lambda: ends.append("end"))

    def tell(rank: int, activity: str) -> None:
        schedule.on_event(Heartbeat(rank, activity=RankActivity(activity)))

    tell(0, "set-up")
    tell(0, "training")
    tell(0, "evaluating")  # the other one has not even begun
    tell(1, "training")
    tell(0, "leaving")
    tell(0, "evaluating")  # the other one trains
    assert ends == []
    tell(1, "leaving")  # and may still be timed
    assert ends == []
    tell(0, "evaluating")
    tell(0, "evaluating")
    assert ends == ["end"]
    schedule.close()


def test_evaluations_have_the_whole_machine() -> None:
    with EmulatedCluster(small_cluster(), 3) as there:
        quotas = there.quotas
        limits = [
            *quotas.folder.glob("[!.]*/cpu.max"),
            *quotas.folder.glob("[!.]*/cpu.cfs_quota_us"),
        ]
        before = [file.read_text().split()[0] for file in limits]
        quotas.lift()
        after = [file.read_text().split()[0] for file in limits]
    assert len(limits) == 3
    assert all(int(each) > 0 for each in before)
    assert {*after} <= {"max", "-1"}

"""Local SGD beside that of torchft and hivemind, which bring servers of their own."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.utils import parameters_to_vector

from benchmarks.gloo import join_gloo
from benchmarks.options import print_remarks
from benchmarks.peers import EVERY, PeerRow, compare_steps, hold, rows_of
from benchmarks.step import RATE, BenchmarkModel, Contest, block_of, our_step, plain_step
from benchmarks.turns import Blocks, take_turns
from orchestra.calibration.timing import Progress
from orchestra.cli.main import guarded
from orchestra.engines.processes.launch import LOOPBACK
from orchestra.engines.processes.system import die_with_parent
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.outer import Nesterov
from orchestra.worker.runtime import Runtime

OUTER = Nesterov()
LOCAL, DILOCO = f"LocalSGD({EVERY})", f"LocalSGD({EVERY}, outer=Nesterov())"
TORCHFT_LOCAL, TORCHFT_DILOCO, HIVEMIND = "torchft LocalSGD", "torchft DiLoCo", "hivemind"
PAIRS = ((LOCAL, TORCHFT_LOCAL), (DILOCO, TORCHFT_DILOCO), (LOCAL, HIVEMIND))
PACKAGES = {TORCHFT_LOCAL: "torchft", TORCHFT_DILOCO: "torchft", HIVEMIND: "hivemind"}
SECONDS = 60.0
"""Within which hivemind has to find all ranks."""
NOISE, TOLERANCE = 1e-3, 1e-6
"""What parameters differ by before a peer's average is checked, and may differ from it by after."""
DESCRIPTION = f"""\
Time a step of local SGD and of DiLoCo beside those of torchft, and of local SGD beside a loop whose
parameters hivemind averages, in turn, in the same processes. All average every {EVERY} steps.
torchft has a lighthouse in the launcher and a manager in each rank; hivemind has a hash table and
an averager beside each rank, in processes of their own.
"""


@dataclass(frozen=True)
class Peer:
    """A model that a peer averages, and what makes a step of it.

    `gain` is what a first average moves the common parameters by, over what it moves those of
    plain local SGD by.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]
    gain: float = 1.0


def bench_averaging(
    ranks: Sequence[int],
    rounds: int,
    subjects: Sequence[BenchmarkModel],
    on_progress: Progress | None = None,
) -> Iterator[PeerRow]:
    """Measure every subject on every number of ranks, beside those peers that are installed.

    Raises KeyboardInterrupt where the user stopped it.
    """
    pairs = _pairs()
    for subject, count in itertools.product(subjects if pairs else (), ranks):
        with _lighthouse(count):
            results = hold(measure, len(pairs), subject, count, rounds, on_progress)
        yield from rows_of(subject.name, count, results)


def _pairs() -> list[tuple[str, str]]:
    return [(ours, peer) for ours, peer in PAIRS if is_installed(PACKAGES[peer])]


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@contextmanager
def _lighthouse(ranks: int) -> Iterator[None]:
    """Serve torchft's managers, which find the address in the environment, if it is installed."""
    if not is_installed("torchft"):
        yield
        return
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"{LOOPBACK}:0", min_replicas=ranks)
    # It goes by the name of the host, which need not resolve to where it listens
    port = server.address().rpartition(":")[2]
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{LOOPBACK}:{port}"
    try:
        yield
    finally:
        server.shutdown()


def measure(runtime: Runtime, contest: Contest) -> list[Blocks]:
    """On each rank: the blocks of each pair."""
    subject = contest.subject
    join_gloo(runtime, contest.store)
    with ExitStack() as servers:
        peers = {}
        # First, since its processes are forked from this one: what is there before them is slower
        # to write to, in small pages, and threads would be missing in them
        if is_installed("hivemind"):
            dht = _hash_table(runtime, Path(contest.store).parent, servers)
            peers[HIVEMIND] = _hivemind(subject, runtime, dht, servers)
        if is_installed("torchft"):
            manager = _manager(runtime, servers)
            peers[TORCHFT_LOCAL] = _torchft_local(subject, manager)
            peers[TORCHFT_DILOCO] = _torchft_diloco(subject, manager)
        for name, peer in peers.items():
            _require_average(runtime, name, peer)
        steps = {name: peer.step for name, peer in peers.items()}
        steps[LOCAL] = our_step(runtime, subject, LocalSGD(EVERY))
        steps[DILOCO] = our_step(runtime, subject, LocalSGD(EVERY, outer=OUTER))
        blocks = {name: block_of(step, EVERY) for name, step in steps.items()}
        return take_turns(runtime, blocks, contest.rounds, _pairs())


def _require_average(runtime: Runtime, name: str, peer: Peer) -> None:
    """Fail unless a block without learning makes parameters that differ by rank their mean."""
    draws = torch.Generator().manual_seed(runtime.rank)
    start = _parameters(peer)
    with torch.no_grad():
        for parameter in peer.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=NOISE)
    mean = _parameters(peer)
    dist.all_reduce(mean)
    expected = start.lerp(mean / runtime.ranks, peer.gain)
    (group,) = peer.optimizer.param_groups
    group["lr"] = 0.0
    block_of(peer.step, EVERY)()
    group["lr"] = RATE
    apart = (_parameters(peer) - expected).abs().max().item()
    if not apart <= TOLERANCE:
        raise RuntimeError(f"{name}: parameters are {apart:.1e} from their average")


def _parameters(peer: Peer) -> torch.Tensor:
    return parameters_to_vector(peer.model.parameters()).detach()


def _built(subject: BenchmarkModel) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = subject.build()
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def _manager(runtime: Runtime, servers: ExitStack) -> Any:
    """Return torchft's manager of this rank, a replica group of its own. LocalSGD and DiLoCo share
    it, as they take turns and average at the same steps.
    """
    from torchft import Manager, ProcessGroupGloo

    logging.getLogger("torchft.manager").setLevel(logging.ERROR)  # it warns that there is no NCCL
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=runtime.ranks,
        use_async_quorum=False,  # as DiLoCo demands
        init_sync=False,  # all begin with the same parameters
        rank=0, world_size=1, store_addr=LOOPBACK, store_port=store.port,
        replica_id=str(runtime.rank), hostname=LOOPBACK,
    )  # fmt: skip
    # With the store, which serves for as long as somebody has it
    servers.callback(lambda _: manager.shutdown(wait=False), store)
    return manager


def _torchft_local(subject: BenchmarkModel, manager: Any) -> Peer:
    from torchft import local_sgd

    model, optimizer = _built(subject)
    local = local_sgd.LocalSGD(manager, model, optimizer, EVERY)
    local.__enter__()  # left with the process
    return Peer(model, optimizer, plain_step(subject, model, subject.batch_size, optimizer))


def _torchft_diloco(subject: BenchmarkModel, manager: Any) -> Peer:
    from torchft import local_sgd

    model, optimizer = _built(subject)
    outer = torch.optim.SGD(
        model.parameters(), lr=OUTER.rate, momentum=OUTER.momentum, nesterov=True
    )
    # A bucket saves all-reduces, but copies: measured to pay for LeNet-5, not for 25M parameters
    bucket = sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    diloco = local_sgd.DiLoCo(manager, [model], optimizer, outer, EVERY, use_bucketization=bucket)
    diloco.__enter__()  # left with the process
    step = plain_step(subject, model, subject.batch_size, optimizer)
    return Peer(model, optimizer, step, gain=OUTER.rate * (1 + OUTER.momentum))


def _hash_table(runtime: Runtime, folder: Path, servers: ExitStack) -> Any:
    """Return hivemind's hash table of all ranks, on loopback, with its sockets in `folder`."""
    multiprocessing.set_start_method("fork", force=True)  # the only one that it works with
    os.register_at_fork(after_in_child=die_with_parent)
    from hivemind import DHT
    from hivemind.p2p import P2P

    P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"  # else those of a killed process stay in /tmp
    addresses: list[list[str] | None] = [None]
    settings = {"start": True, "auto_nat": False, "nat_port_map": False}
    if runtime.rank == 0:
        dht = DHT(**settings)
        addresses = [[str(address) for address in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(addresses)
    if runtime.rank > 0:
        dht = DHT(initial_peers=addresses[0], **settings)
    servers.callback(dht.shutdown)
    return dht


def _hivemind(subject: BenchmarkModel, runtime: Runtime, dht: Any, servers: ExitStack) -> Peer:
    """Return a loop of our own around hivemind's averager, which changes parameters in place.

    Its optimizer cannot be held to a number of steps: it averages once it has heard that all ranks
    together have seen enough samples.
    """
    from hivemind import DecentralizedAverager

    model, optimizer = _built(subject)
    averager = DecentralizedAverager(
        [parameter.data for parameter in model.parameters()], dht, start=True, prefix="model",
        # Nobody waits any longer once all are there, and none may be missing
        target_group_size=runtime.ranks, min_group_size=runtime.ranks,
        min_matchmaking_time=1.0, request_timeout=0.5, allow_state_sharing=False,
    )  # fmt: skip
    servers.callback(averager.shutdown)
    steps = itertools.count(1)
    control: Any = None

    def average() -> None:
        nonlocal control
        done = next(steps) % EVERY
        if done == 1:  # ranks find each other while they compute, as under hivemind's optimizer
            control = averager.step(wait=False, require_trigger=True, timeout=SECONDS)
        elif done == 0:
            control.allow_allreduce()
            control.result()

    step = plain_step(subject, model, subject.batch_size, optimizer, then=average)
    return Peer(model, optimizer, step)


def main(arguments: list[str]) -> int:
    """Measure, and print the times."""
    compare_steps("averaging", DESCRIPTION, bench_averaging, arguments)
    for package in sorted(set(PACKAGES.values())):
        if not is_installed(package):
            print(f"{package} is not installed: no row for it.")
    print_remarks("Ratios below 1: faster than the peer.")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))

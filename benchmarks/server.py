"""The rate of pushes and pulls of an asynchronous server, beside servers written by hand."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
import selectors
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import rpc

from benchmarks.gloo import join_gloo
from benchmarks.options import (
    PrintedTable,
    bench_parser,
    print_remarks,
    read_options,
    write_figures,
)
from benchmarks.ratios import Ratio
from benchmarks.turns import take_turns, wall
from orchestra.calibration.timing import Progress, run_ranks
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.coordinator.rest import Reason, Rest
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.transports.protocol import Group
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import RankActivity, Runtime
from orchestra.worker.worker import Step, Worker

OURS = ParameterServer(consistency="asynchronous")
GLOO, RPC, RAY, BARE = "gloo", "rpc", "Ray", "bare"
SHAPES = {"0.25 MB": (250, 250), "4 MB": (1_000, 1_000), "40 MB": (2_500, 4_000)}
"""Of the one matrix of each model, in float32."""
BLOCK_BYTES = 100_000_000
"""That each worker pushes in a block, of small models less."""
WAYS = ("memory", "sockets")
"""How large messages go."""
RATE = 0.01
DESCRIPTION = """\
Count the pushes with their pulls a second of an asynchronous ParameterServer with 2 and 4 workers
and models of 0.25, 4 and 40 MB; of the same messages by gloo's send and receive; of a server
behind torch.distributed.rpc; of an actor of Ray where that is installed; and of a bare loop that
copies, adds and wakes, in turn. Then once more with messages over sockets, beside gloo alone.
"""


@dataclass(frozen=True)
class Assignment:
    """What the ranks are to do: `rounds` blocks of each size, of the `peers` too."""

    rounds: int
    store: str
    sizes: tuple[str, ...]
    peers: tuple[str, ...]
    block_bytes: int


@dataclass(frozen=True)
class Peer:
    """A contestant beside ours: its pushes a second, and the ratio within a round; above 1 ours is
    faster."""

    per_second: float
    ratio: Ratio


@dataclass(frozen=True)
class ServerRow:
    """Pushes with their pulls a second, all workers together: medians over the rounds.

    Attributes:
        over: memory or sockets.
        gigabytes_per_second: that ours moves, both ways together.
        peers: by name; beside sockets gloo alone.
    """

    workers: int
    size: str
    over: str
    per_second: float
    gigabytes_per_second: float
    peers: dict[str, Peer]


def bench_server(
    workers: Sequence[int] = (2, 4),
    rounds: int = 7,
    sizes: Sequence[str] = tuple(SHAPES),
    ways: Sequence[str] = WAYS,
    block_bytes: int = BLOCK_BYTES,
    on_progress: Progress | None = None,
) -> list[ServerRow]:
    """Measure a dedicated server with each of these numbers of workers.

    Raises KeyboardInterrupt where the user stopped it.
    """
    rows = []
    for count, way in itertools.product(workers, ways):
        peers = (GLOO, RPC, BARE, *_ray_if_there()) if way == "memory" else (GLOO,)
        with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder:
            assignment = Assignment(rounds, folder, tuple(sizes), peers, block_bytes)
            results = run_ranks(
                measure, assignment, count + 1,
                steps=(1 + len(peers)) * (rounds + 1), what=f"{count} workers over {way}",
                on_progress=on_progress, shared_memory=way == "memory",
            )  # fmt: skip
        # the server's clock: from the first push to the last
        for size, blocks in results[count].items():
            rows.append(_row(count, size, way, blocks, pushes_of(size, block_bytes)))
    return rows


def _row(
    workers: int, size: str, way: str, blocks: Mapping[str, Sequence[float]], pushes: int
) -> ServerRow:
    def rate(name: str) -> float:
        return workers * pushes / statistics.median(blocks[name])

    ours = repr(OURS)
    peers = {
        name: Peer(rate(name), Ratio.of(seconds, blocks[ours]))
        for name, seconds in blocks.items()
        if name != ours
    }
    return ServerRow(workers, size, way, rate(ours), 2e-9 * rate(ours) * bytes_of(size), peers)


def bytes_of(size: str) -> int:
    """Bytes of the model of this size."""
    rows, columns = SHAPES[size]
    return 4 * rows * columns


def pushes_of(size: str, block_bytes: int) -> int:
    """Pushes of each worker in a block."""
    return min(max(block_bytes // bytes_of(size), 3), 200)


def measure(runtime: Runtime, assignment: Assignment) -> dict[str, dict[str, list[float]]]:
    """On each rank, the last being the server: the seconds of each contestant's blocks, by size."""
    runtime.reporter.activity(RankActivity.TRAINING)  # so that memory is kept as it is there
    join_gloo(runtime, str(Path(assignment.store) / "gloo"))
    agents = functools.partial(_rpc_agents, runtime, assignment.store, itertools.count())
    make = {GLOO: _gloo, RPC: _rpc, RAY: _ray, BARE: _bare}
    found = {}
    for size in assignment.sizes:
        pushes = pushes_of(size, assignment.block_bytes)
        contestants = {repr(OURS): _ours(runtime, size, pushes)}
        contestants |= {name: make[name](runtime, size, pushes) for name in assignment.peers}
        (blocks,) = take_turns(runtime, contestants, assignment.rounds, surroundings={RPC: agents})
        found[size] = {name: wall(blocks[name]) for name in blocks}
    return found


def _ours(runtime: Runtime, size: str, pushes: int) -> Callable[[], None]:
    worker = make_worker(runtime, shape=SHAPES[size])
    member = OURS.join(worker)
    if worker.rank in OURS.roles(runtime.ranks).servers:
        return lambda: _served(member.serve())
    member.gradient(torch.ones(1, SHAPES[size][0]))

    def block() -> None:
        for _ in range(pushes):
            worker.begin_step(Step(1, runtime.ranks - 1, rates=(RATE,)))
            member.update()
        member.rest(Rest(Reason.CHECKPOINT))

    return block


def _served(paused: object) -> None:
    assert paused is not None, "the workers pause after each block; they do not leave"


def make_worker(
    runtime: Runtime,
    loss: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] | None = None,
    shape: tuple[int, int] = SHAPES["4 MB"],
) -> Worker:
    """A worker with a model of one matrix; its loss is the mean output unless one is given."""
    model = torch.nn.Linear(*shape, bias=False)
    names = frozenset(name for name, _ in model.named_parameters())
    spec = OptimizerSpec(torch.optim.SGD, {"lr": RATE}, ((names, {}),))
    # Nothing is computed meanwhile, so that there is nothing to overlap with.
    return Worker(runtime, model, spec, loss=loss or mean_output, overlap=False)


def mean_output(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss without a meaning, and a gradient for every parameter."""
    output: torch.Tensor = model(batch)
    return output.mean()


def _gloo(runtime: Runtime, size: str, pushes: int) -> Callable[[], None]:
    """The same messages and the same update, as one would write them by hand on gloo."""
    values = torch.full((bytes_of(size) // 4,), 0.0)
    gradient = torch.zeros_like(values)
    server = runtime.ranks - 1

    def push() -> None:
        for _ in range(pushes):
            dist.send(gradient, server)
            dist.recv(values, server)

    def serve() -> None:
        for _ in range(pushes * server):
            source = dist.recv(gradient)
            values.add_(gradient, alpha=-RATE)
            dist.send(values, source)

    return serve if runtime.rank == server else push


_held: dict[str, torch.Tensor] = {}
"""What the server behind torch.distributed.rpc has, in its process, by size."""
_one_at_a_time = threading.Lock()


def push_and_pull(size: str, gradient: torch.Tensor) -> torch.Tensor:
    """Called by workers in the process of the server; the values after this push."""
    with _one_at_a_time:
        values = _held[size].add_(gradient, alpha=-RATE)
        return values.clone()  # the next push comes while this is still being sent


@contextmanager
def _rpc_agents(runtime: Runtime, store: str, numbers: Iterator[int]) -> Iterator[None]:
    """Have agents of torch.distributed.rpc on all ranks, for one block.

    An agent polls its queues without a pause, also when it has nothing to do: half a core of each
    rank, which is missing from whoever has the next block.
    """
    os.environ.setdefault("TP_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    place = f"file://{store}/rpc-{next(numbers)}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=place)
    rpc.init_rpc(
        str(runtime.rank), rank=runtime.rank, world_size=runtime.ranks, rpc_backend_options=options
    )
    dist.barrier()
    yield
    rpc.shutdown()


def _rpc(runtime: Runtime, size: str, pushes: int) -> Callable[[], None]:
    server = runtime.ranks - 1
    gradient = torch.full((bytes_of(size) // 4,), 0.0)
    if runtime.rank == server:
        _held[size] = gradient

    def push() -> None:
        for _ in range(pushes):
            rpc.rpc_sync(str(server), push_and_pull, args=(size, gradient))

    def block() -> None:
        if runtime.rank != server:
            push()
        dist.barrier()  # so that the server's clock runs until the last push

    return block


def _bare(runtime: Runtime, size: str, pushes: int) -> Callable[[], None]:
    """The least that a push costs on one host: copies, one addition, and a byte that wakes.

    No messages, optimizer, versions or losses: nobody trains with it. It shows what is left to
    gain.
    """
    values = torch.zeros(bytes_of(size) // 4)
    gradient = torch.zeros_like(values)
    server = runtime.ranks - 1
    group = Group(tuple(range(runtime.ranks)))
    like = torch.zeros(server * 2 * values.numel())
    shared = runtime.transport.share(like, group, Tag.SHARED).values
    places = shared.view(server, 2, values.numel())  # of each worker: its gradient, the values
    bells = _bells(runtime)

    def push() -> None:
        (bell,), (given, taken) = bells, places[runtime.rank]
        for _ in range(pushes):
            given.copy_(gradient)
            bell.send(b"!")
            bell.recv(1)
            values.copy_(taken)

    def serve() -> None:
        with selectors.DefaultSelector() as selector:
            for worker, bell in enumerate(bells):
                selector.register(bell, selectors.EVENT_READ, (bell, *places[worker]))
            answered = 0
            while answered < pushes * server:
                for key, _ in selector.select():
                    bell, given, taken = key.data
                    bell.recv(1)
                    values.add_(given, alpha=-RATE)
                    taken.copy_(values)
                    bell.send(b"!")
                    answered += 1

    def block() -> None:
        serve() if runtime.rank == server else push()
        dist.barrier()  # whoever leaves closes its bell, and the server would hear that

    return block


def _bells(runtime: Runtime) -> list[socket.socket]:
    """Unix sockets between each worker and the server, which has them in the order of the ranks."""
    server = runtime.ranks - 1
    number = torch.randint(1 << 62, (1,))
    with socket.socket(socket.AF_UNIX) as listener:
        if runtime.rank == server:
            listener.bind(f"\0orchestra-bench-{int(number)}")
            listener.listen(server)
        dist.broadcast(number, server)
        if runtime.rank != server:
            bell = socket.socket(socket.AF_UNIX)
            bell.connect(f"\0orchestra-bench-{int(number)}")
            bell.send(bytes([runtime.rank]))
            return [bell]
        accepted = [listener.accept()[0] for _ in range(server)]
    return sorted(accepted, key=lambda bell: bell.recv(1))


def _ray_if_there() -> tuple[str, ...]:
    return (RAY,) if importlib.util.find_spec("ray") is not None else ()


class RayServer:
    """An actor; NumPy arrays are what Ray passes on without a copy where it can."""

    def __init__(self, size: str) -> None:
        self._values = np.zeros(bytes_of(size) // 4, np.float32)

    def push_and_pull(self, gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        """The values after this push."""
        self._values -= np.float32(RATE) * gradient
        return self._values


class RayWorker:
    def __init__(self, size: str) -> None:
        self._gradient = np.zeros(bytes_of(size) // 4, np.float32)

    def push(self, server: Any, pushes: int) -> None:
        for _ in range(pushes):
            importlib.import_module("ray").get(server.push_and_pull.remote(self._gradient))


def _ray(runtime: Runtime, size: str, pushes: int) -> Callable[[], None]:
    """Ray has processes of its own: the last rank lets them work, the others wait meanwhile."""
    workers = runtime.ranks - 1
    if runtime.rank != workers:
        return lambda: None
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False)
    # Under its own name: Ray's processes have another __main__.
    own = importlib.import_module("benchmarks.server")
    server = ray.remote(own.RayServer).remote(size)
    clients = [ray.remote(own.RayWorker).remote(size) for _ in range(workers)]

    def block() -> None:
        ray.get([client.push.remote(server, pushes) for client in clients])

    return block


def table_of(rows: Sequence[ServerRow]) -> PrintedTable:
    """Return the table with a line for each number of workers, size and way."""
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    headings = ["workers", "size", "over", "a second", "GB/s"]
    headings += [heading for name in names for heading in (name, "ratio")]
    lines = []
    for row in rows:
        line = [str(row.workers), row.size, row.over, f"{row.per_second:.0f}"]
        line.append(f"{row.gigabytes_per_second:.2f}")
        for name in names:
            line += _shown(row.peers[name]) if name in row.peers else ("", "")
        lines.append(line)
    return PrintedTable("pushes with pulls a second, asynchronous server", headings, lines)


def _shown(peer: Peer) -> tuple[str, str]:
    return f"{peer.per_second:.0f}", str(peer.ratio)


def main(arguments: list[str]) -> int:
    """Measure, and print the rates."""
    options = read_options(
        bench_parser("python -m benchmarks.server", DESCRIPTION, rounds=7), arguments
    )
    with progress_line() as tell:
        rows = bench_server(rounds=options.rounds, on_progress=tell)
    table = table_of(rows)
    table.show()
    print_remarks(
        "Ratios above 1: faster than gloo's send and receive, torch.distributed.rpc, Ray, or the "
        "bare loop; in brackets the 95 % interval."
    )
    if not _ray_if_there():
        print_remarks("No figures of a Ray actor: install ray.")
    write_figures(options.json, "server", rows, [table], options.command)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))

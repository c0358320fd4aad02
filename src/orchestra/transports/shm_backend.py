"""A backend of torch.distributed for the ranks of one host; see `orchestra.shm`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    Work,
    _create_work_from_future,
)
from torch.futures import Future

from orchestra.errors import PeerLost
from orchestra.transports.compiled import SO_FAR, Steps
from orchestra.transports.progress import ProgressEngine
from orchestra.transports.protocol import Handle, Pending, Transport
from orchestra.transports.shared_memory import (
    CHUNK_BYTES,
    SMALL_BYTES,
    SharedMemory,
    connect_host,
    make_memory,
    memory_bytes,
    pass_on,
)
from orchestra.transports.sockets import SocketTransport

Operation = Callable[..., object]
"""operation(one, other, out=out): combines two tensors into `out`, which may be one of them."""

_ALIGNMENT = 64
_NEVER = -1
"""A tag that no message has."""
_COMBINE: dict[Any, Operation] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,  # and divided at the end
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def _combination(operation: Any) -> Operation:
    if operation not in _COMBINE:
        raise ValueError(
            f"the backend shm cannot reduce by {operation}: use gloo or another operation"
        )
    return _COMBINE[operation]


_ProcessGroup: Any = dist.ProcessGroup  # its stubs have overloads that Python code never calls


class ProcessGroupSHM(_ProcessGroup):  # type: ignore[misc]
    """The ranks of one host, or a subgroup of them.

    A collective runs in the thread that calls it, also with `async_op=True`: its work is complete
    when the call returns. So what the callback of a hook calls comes in the same order on all
    ranks, and there is nothing to gain from a thread where all cores compute. Messages go over Unix
    sockets, and a thread moves them meanwhile, from the first one on.

    All raise `PeerLost` where a rank is gone, which it names, on all that are left.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        seconds = timeout.total_seconds()

        def connect(purpose: str) -> tuple[dict[int, socket.socket], bool]:
            return connect_host(
                rank,
                size,
                lambda shown: store.set(f"{purpose} {rank}", shown),
                lambda peer: store.get(f"{purpose} {peer}"),
                seconds,
            )

        engine = ProgressEngine(rank, connect("messages")[0])
        self._messages = SocketTransport(engine)
        self._mover: Pending[None] | None = None
        self._seconds = seconds
        peers, compiled = connect("memory")
        memory = pass_on(peers, make_memory(memory_bytes(size)) if rank == 0 else None)
        self._memory = SharedMemory(rank, peers, memory, timeout=seconds, compiled=compiled)
        engine.side_channels.append(self._memory)  # which it closes

    def getBackendName(self) -> str:
        return "shm"

    # Collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        return self._run(partial(self._all_reduce, tensors, opts.reduceOp.op), tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        run = partial(self._all_reduce, tensors, opts.reduceOp.op, opts.rootRank)
        return self._run(run, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,), root = tensors, opts.rootRank
        rows, wanted = [tensor], []
        if self.rank() != root:
            rows, wanted = [tensor.new_empty(0)], [(root, 0, tensor)]
        return self._copy(rows, wanted, tensor.nbytes, tensors)

    def barrier(self, opts: Any = None) -> Work:
        return self._run(self._memory.barrier, [])

    def allgather(self, into: list[list[Tensor]], own: list[Tensor], opts: Any = None) -> Work:
        wanted = [(source, 0, target) for source, target in enumerate(into[0])]
        return self._copy(own, wanted, own[0].nbytes, into)

    def _allgather_base(self, into: Tensor, own: Tensor, opts: Any = None) -> Work:
        return self.allgather([list(into.view(-1).chunk(self.size()))], [own])

    all_gather_single = _allgather_base

    def gather(self, into: list[list[Tensor]], own: list[Tensor], opts: Any) -> Work:
        targets = into[0] if self.rank() == opts.rootRank else []
        wanted = [(source, 0, target) for source, target in enumerate(targets)]
        return self._copy(own, wanted, own[0].nbytes, into)

    def scatter(self, into: list[Tensor], rows: list[list[Tensor]], opts: Any) -> Work:
        empty = [into[0].new_empty(0)] * self.size()
        shown = rows[0] if self.rank() == opts.rootRank else empty
        wanted = [(opts.rootRank, self.rank(), into[0])]
        return self._copy(shown, wanted, into[0].nbytes, into)

    def alltoall(self, into: list[Tensor], rows: list[Tensor], opts: Any = None) -> Work:
        wanted = [(source, self.rank(), target) for source, target in enumerate(into)]
        return self._run(partial(self._all_to_all, rows, wanted), into)

    def alltoall_base(
        self, into: Tensor, rows: Tensor, into_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> Work:
        parts = [
            list(tensor.split(split) if split else tensor.chunk(self.size()))
            for tensor, split in ((into, into_sizes), (rows, sizes))
        ]
        return self.alltoall(*parts)

    all_to_all_single = alltoall_base

    def _all_to_all(self, rows: list[Tensor], wanted: list[tuple[int, int, Tensor]]) -> None:
        # Rows may differ in length, and all ranks have to go through the same number of pieces.
        longest = torch.tensor([max(row.nbytes for row in rows)])
        self._add_up(longest, torch.maximum)
        self._copy_rows(rows, wanted, int(longest))

    def _copy(
        self,
        rows: Sequence[Tensor],
        wanted: Sequence[tuple[int, int, Tensor]],
        length: int,
        result: Any,
    ) -> Work:
        return self._run(partial(self._copy_rows, rows, wanted, length), result)

    def reduce_scatter(self, into: list[Tensor], rows: list[list[Tensor]], opts: Any) -> Work:
        run = partial(self._reduce_scatter, rows[0], into[0], opts.reduceOp.op)
        return self._run(run, into)

    def _reduce_scatter_base(self, into: Tensor, rows: Tensor, opts: Any) -> Work:
        chunks = rows.view(-1).chunk(self.size())
        return self._run(partial(self._reduce_scatter, chunks, into, opts.reduceOp.op), into)

    reduce_scatter_single = _reduce_scatter_base

    def _run(self, collective: Callable[[], object], result: Any) -> Work:
        with torch.no_grad():
            collective()
        # The collective is over: what torch is given is a future with its result.
        done: Future[Any] = Future()
        done.set_result(result)
        work: Work = _create_work_from_future(done)
        return work

    # Messages

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return self._moving(self._messages.send(_bytes(tensors[0]), to, tag))

    def recv(self, tensors: list[Tensor], source: int | None, tag: int) -> Work:
        return self._moving(self._messages.receive(source, tag, _bytes(tensors[0])))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self.recv(tensors, None, tag)

    def _moving(self, handle: Handle) -> Work:
        # Not before the first message: scripts that only use collectives need no thread.
        if self._mover is None:
            self._mover = self._messages.spawn(_move)
        return _Message(handle)

    def shutdown(self) -> None:
        """Disconnect, once what was sent has gone; the others are not waited for."""
        self._messages.close(self._seconds)
        if self._mover is not None:
            self._mover.wait()

    # In the memory

    def _all_reduce(
        self, tensors: Sequence[Tensor], operation: Any, root: int | None = None
    ) -> None:
        for tensor in tensors:
            self._add_up(tensor.view(-1), _combination(operation), root)
            if operation == dist.ReduceOp.AVG:
                tensor.div_(self.size())

    def _add_up(self, flat: Tensor, combine: Operation, root: int | None = None) -> None:
        """Replace the vector `flat` by the combination of all ranks' vectors in the order of ranks.

        With `root` only that rank is given the result, and the others keep their vectors.
        """
        memory = self._memory
        if flat.nbytes <= SMALL_BYTES:
            here = memory.small(flat.dtype)[:, : len(flat)]
            here[memory.rank].copy_(flat)
            memory.barrier()
            if root in (None, memory.rank):
                _combine(combine, here, flat)
            return
        if (
            combine is torch.add
            and root is None
            and memory.add_up(flat, partial(_in_order, len(flat), memory.size))
        ):
            return

        def form(chunk: Tensor, parts: Tensor, result: Tensor) -> None:
            rank, size = memory.rank, memory.size
            first, end = (each * len(chunk) // size for each in (rank, rank + 1))
            _combine(combine, parts[:, first:end], result[first:end])

        def take(chunk: Tensor, result: Tensor) -> None:
            if root in (None, memory.rank):
                chunk.copy_(result[: len(chunk)])

        memory.pipeline(
            flat.dtype,
            flat.split(CHUNK_BYTES // flat.element_size()),
            lambda chunk, part: part[: len(chunk)].copy_(chunk),
            form,
            take,
        )

    def _reduce_scatter(self, rows: Sequence[Tensor], into: Tensor, operation: Any) -> None:
        """Combine row `rank` of all ranks into `into`, in their order."""
        combine, flat = _combination(operation), into.view(-1)
        for offset, shown in self._exchange([row.reshape(-1) for row in rows], len(flat)):
            piece = flat[offset : offset + shown.shape[2]]
            _combine(combine, shown[:, self.rank(), : len(piece)], piece)
        if operation == dist.ReduceOp.AVG:
            into.div_(self.size())

    def _copy_rows(
        self, rows: Sequence[Tensor], wanted: Sequence[tuple[int, int, Tensor]], length: int
    ) -> None:
        """Copy rows of other ranks: broadcast, gather, scatter and all-to-all in one.

        Args:
            rows: what this rank shows, the same number of rows on every rank, some of them empty.
            wanted: the rank, the number of its row, and the tensor that it is copied to.
            length: the most bytes of any row of any rank.
        """
        targets = [(source, number, _bytes(target)) for source, number, target in wanted]
        for offset, shown in self._exchange([_bytes(row) for row in rows], length):
            for source, number, target in targets:
                piece = target[offset : offset + shown.shape[2]]
                piece.copy_(shown[source, number, : len(piece)])

    def _exchange(self, rows: Sequence[Tensor], length: int) -> Iterator[tuple[int, Tensor]]:
        """Show `rows` to all, a piece of each at a time.

        Args:
            rows: contiguous vectors of one dtype, the same number on every rank; a rank may have
                fewer elements than others, or none.
            length: of the longest vector of any rank.

        Yields:
            The offset of the piece, and what all show of it, shape [ranks, rows, elements], until
            the next one is asked for.
        """
        room = CHUNK_BYTES // rows[0].element_size()
        width = room // len(rows) // _ALIGNMENT * _ALIGNMENT
        for offset in range(0, length, width):
            # Places take turns: the others may still read the piece before, which one barrier each
            # allows.
            parts, _ = self._memory.places(rows[0].dtype)
            shown = parts[:, : len(rows) * width].unflatten(1, (len(rows), width))
            for number, row in enumerate(rows):
                piece = row[offset : offset + width]
                shown[self.rank(), number, : len(piece)].copy_(piece)
            self._memory.barrier()
            yield offset, shown


def _combine(combine: Operation, vectors: Tensor, out: Tensor) -> None:
    """Combine the rows of `vectors` in their order into `out`."""
    if len(vectors) == 1:
        out.copy_(vectors[0])
        return
    combine(vectors[0], vectors[1], out=out)
    for vector in vectors[2:]:
        combine(out, vector, out=out)


@lru_cache(maxsize=64)  # a model has few lengths of buckets
def _in_order(length: int, ranks: int) -> Steps:
    """Return the steps of a sum in the order of the ranks."""
    return Steps((0, length, rank, SO_FAR if rank > 1 else 0) for rank in range(1, ranks))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _move(transport: Transport) -> None:
    """Move the messages of all flows until the transport is closed."""
    with contextlib.suppress(AssertionError):  # it is closed
        while True:
            with contextlib.suppress(PeerLost):  # which the work that it concerns raises
                transport.receive(None, _NEVER).wait()


class _Message(Work):
    """A send or a receive."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._handle.wait()
        return True

    def is_completed(self) -> bool:
        return self._handle.done()

    def _source_rank(self) -> int:
        return self._handle.source


dist.Backend.register_backend("shm", ProcessGroupSHM, devices=["cpu"])

"""A backend of torch.distributed for the ranks of one host; see `orchestra.shm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    Work,
    _create_work_from_future,
)
from torch.futures import Future

from orchestra.transports.host_rendezvous import HostRendezvous, make_memory, second_connections
from orchestra.transports.shared_memory import Operation, memory_bytes, share
from orchestra.transports.unix_messages import UnixMessages

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


def _combine(operation: Any) -> Operation:
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
    ranks, and there is nothing to gain from a thread where all cores compute. Sends and receives
    have threads, so that a rank may begin both before it waits for either.

    Collectives raise `PeerLost` where a rank is gone, which it names, on all that are left.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        seconds = timeout.total_seconds()
        rendezvous = HostRendezvous(
            rank,
            size,
            lambda shown: store.set(str(rank), shown),
            lambda peer: store.get(str(peer)),
            seconds,
        )
        peers = rendezvous.connect()
        self._messages = UnixMessages(second_connections(rank, peers))
        memory = make_memory(memory_bytes(size)) if rank == 0 else None
        self._memory = share(rank, peers, memory, seconds)

    def getBackendName(self) -> str:
        return "shm"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        return self._run(partial(self._all_reduce, tensors, opts.reduceOp.op), tensors)

    allreduce_coalesced = allreduce

    def _all_reduce(
        self, tensors: Sequence[Tensor], operation: Any, root: int | None = None
    ) -> None:
        for tensor in tensors:
            self._memory.all_reduce(tensor, _combine(operation), root)
            if operation == dist.ReduceOp.AVG:
                tensor.div_(self.size())

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
        longest = torch.tensor([max(row.nbytes for row in rows)])
        self._memory.all_reduce(longest, _combine(dist.ReduceOp.MAX))
        self._memory.copy_rows(rows, wanted, int(longest))

    def _copy(
        self,
        rows: Sequence[Tensor],
        wanted: Sequence[tuple[int, int, Tensor]],
        length: int,
        result: Any,
    ) -> Work:
        return self._run(partial(self._memory.copy_rows, rows, wanted, length), result)

    def reduce_scatter(self, into: list[Tensor], rows: list[list[Tensor]], opts: Any) -> Work:
        run = partial(self._reduce_scatter, rows[0], into[0], opts.reduceOp.op)
        return self._run(run, into)

    def _reduce_scatter_base(self, into: Tensor, rows: Tensor, opts: Any) -> Work:
        chunks = rows.view(-1).chunk(self.size())
        return self._run(partial(self._reduce_scatter, chunks, into, opts.reduceOp.op), into)

    reduce_scatter_single = _reduce_scatter_base

    def _reduce_scatter(self, rows: Sequence[Tensor], into: Tensor, operation: Any) -> None:
        self._memory.reduce_scatter(rows, into, _combine(operation))
        if operation == dist.ReduceOp.AVG:
            into.div_(self.size())

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return _work_of(self._messages.send(tensors[0], to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        return _work_of(self._messages.receive(tensors[0], source, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return _Received(self._messages.receive(tensors[0], None, tag))

    def shutdown(self) -> None:
        """Disconnect; the others are not waited for."""
        self._messages.close()
        self._memory.close()

    def _run(self, collective: Callable[[], object], result: Any) -> Work:
        with torch.no_grad():
            collective()
        done: Future[Any] = Future()
        done.set_result(result)
        return _work_of(done)


def _work_of(done: Future[Any]) -> Work:
    work: Work = _create_work_from_future(done)
    return work


class _Received(Work):
    """A receive from any rank, which knows afterwards who sent."""

    def __init__(self, done: Future[Any]) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def _source_rank(self) -> int:
        return int(self._done.value())


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupSHM:
    return ProcessGroupSHM(store, rank, size, timeout)


dist.Backend.register_backend("shm", _create, devices=["cpu"])

"""Every collective and message of torch.distributed over shared memory, beside gloo.

Each rank prints one line: how many tensors it compared, and which of them differ.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import orchestra.shm  # noqa: F401  (registers the backend)

warnings.filterwarnings("ignore", category=FutureWarning)  # names that torch is about to change
OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
SIZES = (0, 1, 1_000, 20_000, 1_100_000)
"""Nothing, what is added by each rank alone, what is added in one piece, and in several."""
LARGE = (torch.float32, torch.bfloat16, torch.int64)
"""The types of which there are vectors of the last size."""


def results(rank: int, size: int) -> Iterator[Tensor]:
    """What collectives gave this rank, from values whose sums are exact."""
    random = torch.Generator().manual_seed(rank)

    def draw(count: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(1, 5, (count,), generator=random).to(dtype)

    for dtype, count in itertools.product(DTYPES, SIZES):
        if count == SIZES[-1] and dtype not in LARGE:
            continue
        operations = ("SUM",) if dtype == torch.bfloat16 else OPERATIONS
        for name in operations if dtype.is_floating_point else (*OPERATIONS, *BITWISE):
            operation = getattr(dist.ReduceOp, name)
            vector = draw(count, dtype)
            dist.all_reduce(vector, op=operation)
            yield vector
            vector = draw(count, dtype)
            dist.reduce(vector, size - 1, op=operation)
            if rank == size - 1:
                yield vector
        vector = draw(count, dtype)
        dist.broadcast(vector, size // 2)
        yield vector
        if count:
            yield from moved(rank, size, lambda n=count, d=dtype: draw(n, d))
        if count and dtype in (torch.float32, torch.int64):
            yield from scattered(rank, size, count, lambda n, d=dtype: draw(n, d))
    yield from others(rank, size)


def moved(rank, size, new) -> Iterator[Tensor]:  # type: ignore[no-untyped-def]
    """Gathered, scattered, and sent around a circle."""
    gathered = [torch.zeros_like(new()) for _ in range(size)]
    dist.all_gather(gathered, new())
    yield from gathered
    whole = torch.cat(gathered)
    dist.all_gather_into_tensor(whole, new())
    yield whole
    dist.gather(new(), gathered if rank == 0 else None, 0)
    yield from gathered if rank == 0 else []
    part = torch.zeros_like(new())
    dist.scatter(part, [new() for _ in range(size)] if rank == 1 else None, 1)
    yield part
    received = torch.zeros_like(part)
    receiving = dist.irecv(received, (rank - 1) % size, tag=3)
    sending = dist.isend(new(), (rank + 1) % size, tag=3)
    for work in (receiving, sending):
        assert work is not None
        work.wait()
    yield received


def scattered(rank, size, count, draw) -> Iterator[Tensor]:  # type: ignore[no-untyped-def]
    """Reduced and scattered, and exchanged in equal and unequal parts."""
    part = torch.zeros_like(draw(count))
    dist.reduce_scatter(part, [draw(count) for _ in range(size)])
    yield part.clone()
    dist.reduce_scatter_tensor(part, draw(count * size))
    yield part
    whole = torch.zeros_like(draw(count * size))
    dist.all_to_all_single(whole, draw(count * size))
    yield whole
    leaving = [(rank + 1) * (other + 1) for other in range(size)]
    arriving = [(other + 1) * (rank + 1) for other in range(size)]
    whole = torch.zeros_like(draw(sum(arriving)))
    dist.all_to_all_single(whole, draw(sum(leaving)), arriving, leaving)
    yield whole


def others(rank: int, size: int) -> Iterator[Tensor]:
    """From any rank; while nobody waits; in a subgroup; several under way at once; objects."""
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=9)
    else:
        senders = []
        for _ in range(size - 1):
            number = torch.zeros(1, dtype=torch.int64)
            sender = dist.recv(number, tag=9)
            assert sender == int(number)
            senders.append(sender)
        yield torch.tensor(sorted(senders))
    message = torch.arange(1_000_000.0)
    leaving = dist.isend(message, 1, tag=5) if rank == 0 else None
    if rank == 1:
        arrived = torch.zeros_like(message)
        dist.recv(arrived, 0, tag=5)
        yield arrived
    dist.barrier()  # the message arrives although nobody waits for its end
    if leaving is not None:
        leaving.wait()
    ends = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        vector = torch.full((5,), rank + 1.0)
        dist.all_reduce(vector, group=ends)
        yield vector
    vectors = [torch.full((4,), float(rank)), torch.full((600_000,), float(rank))]
    under_way = [dist.all_reduce(vector, async_op=True) for vector in vectors]
    for work in under_way:
        work.wait()
    yield from vectors
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": number} for number in range(size)]


def main() -> None:
    found = []
    for backend in ("gloo", "shm"):
        dist.init_process_group(backend)
        found.append(list(results(dist.get_rank(), dist.get_world_size())))
        dist.destroy_process_group()
    differ = [n for n, pair in enumerate(zip(*found, strict=True)) if not torch.equal(*pair)]
    print(f"compared {len(found[0])} differ {differ}\n", end="", flush=True)


if __name__ == "__main__":
    main()

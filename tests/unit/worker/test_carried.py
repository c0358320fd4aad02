"""Buffers that travel in a sum of vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from orchestra.errors import InputError
from orchestra.worker.carried import CarriedBuffers


def buffers_of(rank: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    signed = torch.tensor([0.0, -0.0, torch.inf, 1e-40]) * (1 - 2 * (rank % 2))
    return [
        ("mean", torch.randn(3, 2, generator=generator)),
        ("count", torch.tensor(2**62 + 7 * rank)),
        ("signed", signed),
        ("double", torch.randn(5, generator=generator, dtype=torch.float64)),
        ("mask", torch.tensor([True, False, rank > 0])),
        ("counts", torch.tensor([[rank, -1], [255, 256]])),
        ("half", torch.randn(3, generator=generator).bfloat16()),
        ("wave", torch.tensor([1 + 2j * rank])),
        ("none", torch.empty(0)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("giver", [0, 2])
def test_all_get_the_bits_of_the_one_that_gives(dtype: torch.dtype, giver: int) -> None:
    buffers = [buffers_of(rank) for rank in range(3)]
    carried = [CarriedBuffers(lambda own=own: own, dtype) for own in buffers]  # type: ignore[misc]
    vectors = [torch.full((each.size,), torch.nan, dtype=dtype) for each in carried]
    for rank, (each, vector) in enumerate(zip(carried, vectors, strict=True)):
        each.put(vector, gives=rank == giver)
    total = vectors[1] + vectors[2] + vectors[0]
    for each in carried:
        each.take(total)
    for own in buffers:
        for (name, got), (_, wanted) in zip(own, buffers_of(giver), strict=True):
            assert got.dtype == wanted.dtype
            same = got.reshape(-1).view(torch.uint8).equal(wanted.reshape(-1).view(torch.uint8))
            assert same, name


def test_a_buffer_without_memory_of_its_own_is_refused() -> None:
    expanded = [("shift", torch.zeros(1).expand(4))]
    carried = CarriedBuffers(lambda: expanded, torch.float32)
    with pytest.raises(InputError, match="buffer 'shift' is sparse, or expanded"):
        carried.put(torch.empty(carried.size), gives=True)

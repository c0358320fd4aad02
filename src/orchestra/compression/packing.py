"""Bits, whole numbers and tensors as bytes, with no bit to spare but in the last byte."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
CHUNK = 1 << 18
"""Elements that are worked on at a time, and stay in the cache."""


def to_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, shape [nbytes], sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def from_bytes(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn bytes of `to_bytes` into elements; a copy, aligned as the dtype needs it."""
    return payload.clone().view(dtype)


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` packed numbers of `bits` bits each."""
    return -(-count * bits // 8)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack `bits` (bool), eight in a byte, the first in its highest bit."""
    packed = torch.from_numpy(np.packbits(bits.cpu().numpy()))
    return packed.to(bits.device)


def unpack_bits(payload: Tensor, count: int) -> Tensor:
    """Unpack the first `count` bits, as uint8."""
    return torch.from_numpy(np.unpackbits(payload.cpu().numpy(), count=count)).to(payload.device)


def pack_signs(values: Tensor) -> Tensor:
    """Pack a bit for each of `values`: 1 if it is 0 or more. NumPy is 3 times as fast."""
    if values.is_cuda or values.dtype is torch.bfloat16:
        return pack_bits(values >= 0)
    return torch.from_numpy(np.packbits(values.numpy() >= 0))


def positions_of(bits: Tensor) -> Tensor:
    """Return where `bits` (bool) are true: int64, rising. NumPy is 3 times as fast."""
    return torch.from_numpy(np.flatnonzero(bits.cpu().numpy())).to(bits.device)


def positions_of_large(values: Tensor, least: float) -> Tensor:
    """Return where magnitudes are at least `least` (above 0), or NaN: int64, rising."""
    if values.is_cuda or values.dtype is torch.bfloat16:
        return positions_of(~(values.abs() < least))
    found = []
    for first, part in zip(range(0, len(values), CHUNK), values.split(CHUNK), strict=True):
        # Negated, so that NaN counts, too.
        found.append(np.flatnonzero(~(np.abs(part.numpy()) < least)) + first)
    return torch.from_numpy(np.concatenate(found))


def index_bits(elements: int) -> int:
    """Return the bits of an index into `elements` elements."""
    return max(1, (elements - 1).bit_length())


def positions_bytes(count: int, elements: int) -> int:
    """Return the bytes of `count` positions among `elements`: indices, or a bitmap if shorter."""
    return min(packed_bytes(count, index_bits(elements)), packed_bytes(elements, 1))


def pack_positions(positions: Tensor, elements: int) -> Tensor:
    """Pack rising `positions` (int64) into `positions_bytes`."""
    bits = index_bits(elements)
    if packed_bytes(elements, 1) < packed_bytes(len(positions), bits):
        bitmap = torch.zeros(elements, dtype=torch.bool, device=positions.device)
        bitmap[positions] = True
        return pack_bits(bitmap)
    # Big-endian, so that `unpackbits` gives the bits of a number from the highest to the lowest.
    numbers = positions.cpu().numpy().astype(">u4").view(np.uint8).reshape(-1, 4)
    low = np.unpackbits(numbers, axis=1)[:, 32 - bits :]
    return torch.from_numpy(np.packbits(low)).to(positions.device)


def unpack_positions(payload: Tensor, count: int, elements: int) -> Tensor:
    """Unpack the positions of `pack_positions`: int64, rising."""
    bits = index_bits(elements)
    if packed_bytes(elements, 1) < packed_bytes(count, bits):
        return positions_of(unpack_bits(payload, elements))
    wide = np.zeros((count, 32), np.uint8)
    low = np.unpackbits(payload.cpu().numpy(), count=count * bits)
    wide[:, 32 - bits :] = low.reshape(count, bits)
    numbers = np.packbits(wide, axis=1).view(">u4").astype(np.int64).reshape(-1)
    return torch.from_numpy(numbers).to(payload.device)


def digits_in_a_byte(base: int) -> int:
    """Return how many digits of this base (2 to 256) fit into a byte."""
    count = 1
    while base ** (count + 1) <= 256:
        count += 1
    return count


def pack_digits(digits: Tensor, base: int) -> Tensor:
    """Pack digits (uint8, each below `base`), as many as fit into a byte, the first lowest."""
    each = digits_in_a_byte(base)
    padded = torch.nn.functional.pad(digits, (0, -len(digits) % each)).view(-1, each)
    packed = padded[:, -1].clone()
    for place in reversed(range(each - 1)):
        # Horner's rule, from the highest digit down.
        packed.mul_(base).add_(padded[:, place])
    return packed


def unpack_digits(payload: Tensor, base: int, count: int) -> Tensor:
    """Unpack the first `count` digits, as uint8."""
    digits = np.take(_digits_of_bytes(base), payload.cpu().numpy(), axis=0)
    return torch.from_numpy(digits.reshape(-1)[:count]).to(payload.device)


@functools.cache
def _digits_of_bytes(base: int) -> Bytes:
    """Return the digits of each byte, shape [256, digits in a byte]."""
    numbers = np.arange(256)
    places = base ** np.arange(digits_in_a_byte(base))
    return (numbers[:, None] // places % base).astype(np.uint8)

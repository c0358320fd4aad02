"""Tensors on a byte stream: a header, the dimensions, and the elements as they lie in memory.

    kind (1 byte), dtype (1), dimensions (1), tag (8), payload bytes (8), then 8 bytes a dimension

All integers are little-endian. A farewell is a header of its own kind, without payload.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

MESSAGE = 1
FAREWELL = 2

# The position of a dtype in this list is its code on the wire: only append.
_NAMES = (
    "float32 float64 float16 bfloat16 bool uint8 int8 int16 int32 int64 complex64 complex128 "
    "uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
)
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _NAMES.split())
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_FIXED = struct.Struct("<BBBqQ")


class MalformedFrame(ConnectionError):
    """The other end does not speak this protocol."""


class Header(NamedTuple):
    """What arrives of a message before its first element."""

    kind: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    tag: int
    payload_bytes: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of the whole message on the wire."""
        return header_bytes(len(self.shape)) + self.payload_bytes


def header_bytes(dimensions: int) -> int:
    """Bytes that go before the elements of a tensor."""
    return _FIXED.size + 8 * dimensions


def pack_header(tensor: Tensor, tag: int) -> bytes:
    """The header of a message that carries `tensor`."""
    shape = tensor.shape
    fixed = _FIXED.pack(MESSAGE, _CODES[tensor.dtype], len(shape), tag, tensor.nbytes)
    return fixed + struct.pack(f"<{len(shape)}q", *shape)


def pack_farewell() -> bytes:
    """The frame that says: I leave on purpose."""
    return _FIXED.pack(FAREWELL, 0, 0, 0, 0)


def unpack_header(buffer: memoryview) -> Header | None:
    """The header at the start of `buffer`, or None where more bytes are needed.

    Raises `MalformedFrame` for bytes that no `pack_...` made.
    """
    if len(buffer) < _FIXED.size:
        return None
    kind, code, dimensions, tag, payload_bytes = _FIXED.unpack_from(buffer)
    if kind not in (MESSAGE, FAREWELL) or code >= len(DTYPES):
        raise MalformedFrame(f"a frame of kind {kind} with dtype code {code}")
    if len(buffer) < header_bytes(dimensions):
        return None
    shape = struct.unpack_from(f"<{dimensions}q", buffer, _FIXED.size)
    dtype = DTYPES[code]
    if kind == MESSAGE and math.prod(shape) * dtype.itemsize != payload_bytes:
        raise MalformedFrame(f"{payload_bytes} bytes for {dtype} of shape {shape}")
    return Header(kind, dtype, shape, tag, payload_bytes)


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU `tensor` as writable bytes, without a copy.

    The view keeps the memory alive.
    """
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data

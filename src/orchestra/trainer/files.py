"""Nested data with tensors in it, in files and from rank to rank; writing into a run's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from orchestra.collectives import receive_object, send_object
from orchestra.errors import RunFailed
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag

TENSOR = "$tensor"

Tensors = dict[str, Tensor]
"""By the SHA-256 of type, shape and content."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `RunFailed`, which names `path`, where the disk is full or read-only inside."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunFailed(f"cannot write {path}: {reason}") from None


def save_state(path: Path, module: nn.Module) -> None:
    """All parameters and buffers of `module`, as safetensors."""
    state: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, tensor in module.state_dict().items():
        state[name] = values = tensor.detach().cpu().contiguous()
        if values.data_ptr() in written or values.untyped_storage().nbytes() > values.nbytes:
            state[name] = values.clone()  # what shares memory cannot be written
        written.add(values.data_ptr())
    with writing(path):
        save_file(state, path)


def pack(value: Any, put: Callable[[str, Tensor], str], place: str = "") -> Any:
    """`value`, of nested dicts and sequences, as JSON data: a key in place of each tensor.

    Args:
        put: keeps a contiguous tensor of the CPU's, given where it stood ("/moments/0"); returns
            the key.
    """
    if isinstance(value, Tensor):
        return {TENSOR: put(place, value.detach().cpu().contiguous())}
    if isinstance(value, dict):
        return {key: pack(item, put, f"{place}/{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [pack(item, put, f"{place}/{index}") for index, item in enumerate(value)]
    return value


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` has packed; equal keys give one and the same tensor."""
    if isinstance(tree, dict):
        if TENSOR in tree:
            return tensors[tree[TENSOR]]
        return {key: unpack(item, tensors) for key, item in tree.items()}
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    return tree


def by_content(value: Any, tensors: Tensors) -> Any:
    """`value` as JSON data; its tensors go into `tensors`, those of equal content once."""

    def put(_: str, tensor: Tensor) -> str:
        sha = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        if sha.hexdigest() not in tensors:
            tensors[sha.hexdigest()] = tensor.clone()
        return sha.hexdigest()

    return pack(value, put)


def give(transport: Transport, value: Any, to: int) -> None:
    """Send `value`, plain data with tensors in it, to the rank `to`, which calls `take`."""
    tensors: Tensors = {}
    send_object(transport, [by_content(value, tensors), list(tensors)], to)
    for key in receive_object(transport, to):
        transport.send(tensors[key], to, Tag.PARTS).wait()


def take(transport: Transport, source: int, known: Tensors) -> Any:
    """What the rank `source` gives; tensors that are in `known` do not travel, others get in."""
    tree, keys = receive_object(transport, source)
    wanted = [key for key in keys if key not in known]
    send_object(transport, wanted, source)
    for key in wanted:
        known[key] = transport.receive(source, Tag.PARTS).wait()
    return unpack(tree, known)

"""Plain data with tensors in it, from rank to rank; tensors of equal content travel once."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from orchestra.collectives import Group, gather_objects
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag

TENSOR = "$tensor"

Tensors = dict[str, Tensor]
"""By the SHA-256 of type, shape and content."""


def pack(value: Any, tensors: Tensors) -> Any:
    """`value`, of nested dicts and lists, with a digest in place of each tensor.

    Those that are not yet in `tensors` are copied into it, in the memory of the CPU.
    """
    if isinstance(value, Tensor):
        there = value.detach().cpu().contiguous()
        sha = hashlib.sha256(f"{there.dtype} {tuple(there.shape)}".encode())
        sha.update(there.reshape(-1).view(torch.uint8).numpy().data)
        if sha.hexdigest() not in tensors:
            tensors[sha.hexdigest()] = there.clone()
        return {TENSOR: sha.hexdigest()}
    if isinstance(value, dict):
        return {key: pack(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [pack(item, tensors) for item in value]
    return value


def unpack(tree: Any, tensors: Tensors) -> Any:
    """What `pack` has packed; where contents are equal the tensors are the same ones."""
    if isinstance(tree, dict):
        if TENSOR in tree:
            return tensors[tree[TENSOR]]
        return {key: unpack(item, tensors) for key, item in tree.items()}
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    return tree


def digests(tree: Any) -> list[str]:
    """Of all tensors in what `pack` returned, each once, in their order."""
    if isinstance(tree, dict):
        if TENSOR in tree:
            return [tree[TENSOR]]
        tree = list(tree.values())
    if not isinstance(tree, list):
        return []
    return list(dict.fromkeys(digest for item in tree for digest in digests(item)))


def give(transport: Transport, value: Any, to: int) -> None:
    """Send `value` to the rank `to`, which calls `take`."""
    tensors: Tensors = {}
    gather_objects(transport, pack(value, tensors), Group((transport.rank, to)), to)
    _, wanted = gather_objects(transport, None, Group((transport.rank, to)), transport.rank)
    for digest in wanted:
        transport.send(tensors[digest], to, Tag.PARTS).wait()


def take(transport: Transport, source: int, known: Tensors) -> Any:
    """What the rank `source` gives; tensors that are in `known` do not travel, others get in."""
    group = Group((transport.rank, source))
    _, tree = gather_objects(transport, None, group, transport.rank)
    wanted = [digest for digest in digests(tree) if digest not in known]
    gather_objects(transport, wanted, group, source)
    for digest in wanted:
        known[digest] = transport.receive(source, Tag.PARTS).wait()
    return unpack(tree, known)

"""The all-reduce of torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

The process groups are made directly from a store, and not through torch.distributed's default
group: that one stays free for the user's own program.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from orchestra.errors import RunAborted

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work


@dataclass
class NativeWork:
    """An all-reduce of `tensor` under way."""

    work: Work
    tensor: Tensor

    def wait(self) -> int:
        """Block until it is complete. Returns 0: its buffer is not known. Raises `RunAborted`."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise RunAborted(f"a native collective failed: {error}") from error
        return 0

    def done(self) -> bool:
        return self.work.is_completed()


@dataclass(eq=False)
class Native:
    """All-reduces between all ranks; each is begun by every rank in the same order.

    A process group is made when the first tensor of its kind of device comes by. A collective
    that fails, or a group that cannot be made, raises `RunAborted`: the backends do not say which
    rank is gone, the watcher does.

    Attributes:
        make_store: gives the store through which the ranks find each other.
        rank: this one of `size`.
        host: the address on which gloo listens.
        device: index of the GPU that NCCL uses for this rank.
        timeout: seconds after which a collective, or the set-up of a group, fails.
    """

    make_store: Callable[[], Store]
    rank: int
    size: int
    host: str
    device: int
    timeout: float
    _groups: dict[str, Any] = field(default_factory=dict, init=False)  # by the kind of device
    # gloo's threads must not be the last to hold a work: they need the interpreter to let go
    # of a tensor, and closing the group holds the interpreter and waits for them.
    _recent: deque[NativeWork] = field(default_factory=lambda: deque(maxlen=16), init=False)

    @functools.cached_property
    def _store(self) -> Store:
        return self.make_store()

    def all_reduce(self, tensor: Tensor) -> NativeWork:
        """Begin to replace a contiguous `tensor` by its sum over all ranks."""
        group = self._group(tensor.device.type)
        try:
            work = NativeWork(group.allreduce([tensor]), tensor)
        except RuntimeError as error:
            raise RunAborted(f"a native collective failed: {error}") from error
        self._recent.append(work)
        return work

    def close(self) -> None:
        """Disconnect; nothing may be under way."""
        for group in self._groups.values():
            # Works are let go of after the groups are closed: see `_recent`.
            group.shutdown()
        self._groups.clear()
        self._recent.clear()
        self.__dict__.pop("_store", None)

    def _group(self, device: str) -> Any:
        if device not in self._groups:
            on_gpu = device == "cuda"
            backend: Any = dist.ProcessGroupNCCL if on_gpu else dist.ProcessGroupGloo
            options = backend.Options() if on_gpu else backend._Options()
            options._timeout = timedelta(seconds=self.timeout)
            try:
                if on_gpu:
                    if ip_address(self.host).is_loopback:
                        # NCCL leaves out the loopback when it looks for interfaces by itself.
                        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
                    torch.cuda.set_device(self.device)
                else:
                    options._devices = [backend.create_device(hostname=self.host)]
                # Groups of CPU and GPU tensors use one store, and must not find each other's keys.
                store = PrefixStore(device, self._store)
                self._groups[device] = backend(store, self.rank, self.size, options)
            except RuntimeError as error:
                raise RunAborted(
                    f"torch.distributed could not connect the ranks for tensors on {device}: "
                    f"{error}"
                ) from error
        return self._groups[device]

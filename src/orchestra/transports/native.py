"""The collectives of torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

The process groups are made directly from a store, and not through torch.distributed's default
group: that one stays free for the user's own program.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from orchestra.errors import RunAborted

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work

T = TypeVar("T")


class Group(Protocol):
    """What torch's backends have in common, as far as it is needed here."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work: ...

    def barrier(self) -> Work: ...

    def shutdown(self) -> None: ...


@dataclass
class NativeWork:
    """A collective under way on `tensor`."""

    native: Native
    work: Work
    tensor: Tensor

    def wait(self) -> Tensor:
        """Block until complete; the tensor, in place. Raises `RunAborted` if it failed."""
        self.native._attempt(self.work.wait)
        return self.tensor

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self.work.is_completed()


class Native:
    """Collectives between all ranks; each is called by every rank in the same order.

    A process group is made when the first tensor of its kind of device comes by. A collective
    that fails, or a group that cannot be made, raises `RunAborted`: the backends do not say which
    rank is gone, the watcher does.

    Args:
        make_store: gives the store through which the ranks find each other.
        rank: this rank.
        size: how many ranks there are.
        host: the address on which gloo listens.
        device: index of the GPU that NCCL uses for this rank.
        timeout: seconds after which a collective, or the set-up of a group, fails.
    """

    def __init__(
        self,
        make_store: Callable[[], Store],
        rank: int,
        size: int,
        *,
        host: str,
        device: int,
        timeout: float,
    ) -> None:
        self.calls = 0
        self.waiting = False
        self.rank = rank
        self.size = size
        self._make_store = make_store
        self._host = host
        self._device = device
        self._timeout = timedelta(seconds=timeout)
        self._store: Store | None = None
        self._groups: dict[str, Group] = {}
        self._recent: deque[NativeWork] = deque(maxlen=16)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place of a contiguous `tensor`."""
        return self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> NativeWork:
        """Begin to replace a contiguous `tensor` by its sum over all ranks."""
        group = self._group(tensor.device)
        return self._kept(self._attempt(lambda: group.allreduce([tensor])), tensor)

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """Replace a contiguous `tensor` by that of rank `root`."""
        group = self._group(tensor.device)
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._kept(self._attempt(lambda: group.broadcast([tensor], options)), tensor).wait()

    def barrier(self) -> None:
        """Block until every rank is here."""
        group = self._group(torch.device("cpu"))
        self._attempt(lambda: group.barrier().wait())

    def close(self) -> None:
        """Disconnect; nothing may be under way."""
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()
        self._recent.clear()
        self._store = None

    def _kept(self, work: Work, tensor: Tensor) -> NativeWork:
        """Hold on to the last works, so that gloo's threads are not the last to do so.

        They need the interpreter to let go of a tensor; closing the group holds the interpreter
        and waits for them.
        """
        kept = NativeWork(self, work, tensor)
        self._recent.append(kept)
        return kept

    def _attempt(self, collective: Callable[[], T]) -> T:
        self.waiting = True
        try:
            return collective()
        except RuntimeError as error:
            raise RunAborted(f"a native collective failed: {error}") from error
        finally:
            self.waiting = False
            self.calls += 1

    def _group(self, device: torch.device) -> Group:
        if device.type not in self._groups:
            make = self._nccl if device.type == "cuda" else self._gloo
            self.waiting = True
            try:
                if self._store is None:
                    self._store = self._make_store()
                self._groups[device.type] = make(PrefixStore(device.type, self._store))
            except RuntimeError as error:
                raise RunAborted(
                    f"torch.distributed could not connect the ranks for tensors on {device.type}: "
                    f"{error}"
                ) from error
            finally:
                self.waiting = False
        return self._groups[device.type]

    def _gloo(self, store: Store) -> Group:
        backend: Any = dist.ProcessGroupGloo
        options = backend._Options()
        options._devices = [backend.create_device(hostname=self._host)]
        options._timeout = self._timeout
        group: Group = backend(store, self.rank, self.size, options)
        return group

    def _nccl(self, store: Store) -> Group:
        if ip_address(self._host).is_loopback:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        torch.cuda.set_device(self._device)
        backend: Any = dist.ProcessGroupNCCL
        options = backend.Options()
        options._timeout = self._timeout
        group: Group = backend(store, self.rank, self.size, options)
        return group

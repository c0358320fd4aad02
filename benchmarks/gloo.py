"""torch.distributed's own collectives, between ranks that Orchestra started."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from orchestra.worker.runtime import Runtime


def join_gloo(runtime: Runtime, store: str, interface: str = "") -> None:
    """Join torch.distributed's default group on gloo, through the file `store`, on loopback or
    on the network `interface`.

    The group is never destroyed: that can hang, as it holds the interpreter's lock and joins
    gloo's threads, which may need the lock to release a tensor (torch 2.13).
    """
    # Left to itself gloo goes by the address of the host's name, which need not be one of its own
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if interface or loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface or loopback[0])
    files = FileStore(store, runtime.ranks)
    dist.init_process_group("gloo", store=files, rank=runtime.rank, world_size=runtime.ranks)

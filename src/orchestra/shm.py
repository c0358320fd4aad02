"""Import this to register "shm", a backend of torch.distributed for the ranks of one host.

    import orchestra.shm
    torch.distributed.init_process_group("shm")

Everything that is built on torch.distributed works as with gloo, on tensors on the CPU:
DistributedDataParallel and its hooks, `Join`, subgroups, collectives of objects.
"""

from orchestra.transports import shm_backend as shm_backend

"""Which rank this process is, as its launcher says (torchrun, Slurm, Open MPI, Kubernetes'
PyTorchJob), and the address it listens on. Imports without torch."""

from __future__ import annotations

import ipaddress
import math
import multiprocessing
import os
import re
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from orchestra.errors import InputError

_FIRST_PORT = 15000  # below the ports that systems hand out by themselves
_PORTS = 15000

_SHARED_MEMORY = "ORCHESTRA_SHARED_MEMORY"
JOIN_VARIABLE = "ORCHESTRA_JOIN"  # the file of a run's entrance, which this process is to join
HOST_VARIABLE = "ORCHESTRA_HOST"  # the address of this machine that other ranks are to use
LAUNCHER_VARIABLE = "ORCHESTRA_LAUNCHER"
"""What has set torchrun's variables in place of torchrun, and stays the parent to the end."""
RESTARTS_VARIABLE = "ORCHESTRA_RESTARTS"
"""The restarts that it has made before, as JSON: entries of the record for rank 0."""
LOST_STATUS = 75
"""Exit status of rank 0 under it if the run lost a rank that it needs (EX_TEMPFAIL of sysexits)."""
INTERRUPTED_STATUS = 130
"""Exit status of rank 0 under it if Ctrl-C ended its set-up, which no other rank hears of."""
NODE_VARIABLE = "ORCHESTRA_NODE"  # the name of this host for messages, as its user knows it
NEWS_VARIABLE = "ORCHESTRA_NEWS"
"""The descriptor from which rank 0 reads what that launcher learns of the others: see `Watcher`."""
LATENCIES = "ORCHESTRA_LATENCIES"  # of an emulated node: see `Place`


def memory_is_shared(environ: Mapping[str, str]) -> bool:
    """False if `ORCHESTRA_SHARED_MEMORY` is 0: then ranks of one host use sockets as others do.
    Raises `InputError` where it is something else than 0 or 1."""
    wanted = environ.get(_SHARED_MEMORY, "1")
    if wanted not in ("0", "1"):
        raise InputError(f"{_SHARED_MEMORY} is {wanted!r}: set it to 1, or to 0 for sockets")
    return wanted == "1"


def latencies_of(environ: Mapping[str, str], ranks: int) -> tuple[float, ...]:
    """Return the seconds that a message to each rank waits, as `orchestra emulation run` says.
    Raises `InputError` where they are no such numbers."""
    text = environ.get(LATENCIES, "")
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (-1.0,)
    if found and (len(found) != ranks or not all(0 <= each < math.inf for each in found)):
        raise InputError(
            f"{LATENCIES} is {text!r}, not seconds for each of {ranks} ranks: unset it"
        )
    return found


@dataclass(frozen=True)
class Launched:
    """A process of a run that another launcher started: `rank` of `ranks`."""

    launcher: str  # its name, for messages
    rank: int
    ranks: int
    local_rank: int  # among those of its node
    local_ranks: int
    address: str  # host name or address where rank 0, or the launcher, waits for all
    port: int
    hosted: bool = False  # the launcher already holds a store there
    supervised: bool = False  # the launcher stays the parent of this process to its end

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise InputError(f"{self.launcher} says rank {self.rank} of {self.ranks}")
        if not 0 <= self.local_rank < self.local_ranks <= self.ranks:
            raise InputError(
                f"{self.launcher} says local rank {self.local_rank} of {self.local_ranks}, "
                f"with {self.ranks} ranks in all"
            )
        if not 0 < self.port < 65536:
            raise InputError(f"{self.launcher} says port {self.port}: it has to be 1 to 65535")


def detect(environ: Mapping[str, str]) -> Launched | None:
    """Return this process as the environment variables describe it; None if they do not. Raises
    `InputError` if they are incomplete, or contradict each other."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        if "LOCAL_RANK" in environ:
            return _torchrun(_Variables(environ, "the environment"))
        return _one_a_pod(_Variables(environ, "the environment"), "RANK", "WORLD_SIZE", "")
    if "PET_NODE_RANK" in environ:
        return _one_a_pod(_Variables(environ, "PyTorchJob"), "PET_NODE_RANK", "PET_NNODES", "PET_")
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _open_mpi(_Variables(environ, "Open MPI"))
    # A batch script has the variables of its job, but only a step has processes with ranks.
    if "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ):
        return _slurm(_Variables(environ, "Slurm"))
    return None


_joined: int | None = None  # the number of this process in a run that it has joined


def set_rank(rank: int) -> None:
    """Note the number that a run has given to this process."""
    global _joined
    _joined = rank


def rank() -> int:
    """Return the number of this process among those that the launcher started, from 0.

    0 in a process that nobody launched. Known before `orchestra.distribute` and after it. One that
    joins a run under way learns its number there, which no other one has had; before it is -1.
    """
    if _joined is not None or JOIN_VARIABLE in os.environ:
        return -1 if _joined is None else _joined
    launched = detect(os.environ)
    return 0 if launched is None else launched.rank


def world_size() -> int:
    """Return how many processes the launcher started, servers included; 1 without a launcher."""
    launched = detect(os.environ)
    return 1 if launched is None else launched.ranks


def is_first() -> bool:
    """Return True on rank 0, which is never a dedicated server: the one to log and save.

    With one process, always.
    """
    return rank() == 0


def runs_function() -> bool:
    """Return whether an engine runs this process for the value of a function, which has to return.

    Ray Train calls it in a thread; torch.multiprocessing, the launcher API of torchrun and the
    launchers of notebooks in a child process; Spark's TorchDistributor in a script of its own,
    which unpickles the function as `fn`.
    """
    in_thread = threading.current_thread() is not threading.main_thread()
    in_child = multiprocessing.parent_process() is not None
    return (
        in_thread
        or in_child
        or {"fn", "args", "cloudpickle"} <= vars(sys.modules["__main__"]).keys()
    )


@dataclass(frozen=True)
class _Variables:
    """Environment variables that have to be there, and to be whole numbers where they should."""

    environ: Mapping[str, str]
    launcher: str

    def text(self, *names: str, remedy: str = "start all ranks with one launcher") -> str:
        """Return the first of `names` that is set."""
        for name in names:
            if self.environ.get(name):
                return self.environ[name]
        raise InputError(
            f"{self.launcher} set some of its variables, but not {' or '.join(names)}: {remedy}"
        )

    def number(self, *names: str, **remedy: str) -> int:
        text = self.text(*names, **remedy)
        try:
            return int(text)
        except ValueError:
            raise InputError(f"{' or '.join(names)} is {text!r}, not a whole number") from None

    def default(self, name: str, value: int) -> int:
        return self.number(name) if self.environ.get(name) else value


def _torchrun(variables: _Variables) -> Launched:
    local_rank = variables.default("LOCAL_RANK", 0)
    other = variables.environ.get(LAUNCHER_VARIABLE)
    return Launched(
        other or "torchrun", rank=variables.number("RANK"), ranks=variables.number("WORLD_SIZE"),
        # Where it is not set, the least that LOCAL_RANK allows.
        local_rank=local_rank, local_ranks=variables.default("LOCAL_WORLD_SIZE", local_rank + 1),
        address=variables.text("MASTER_ADDR"), port=variables.number("MASTER_PORT"),
        hosted=variables.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        supervised=other is not None or "TORCHELASTIC_RUN_ID" in variables.environ,
    )  # fmt: skip


def _one_a_pod(variables: _Variables, rank: str, ranks: str, prefix: str) -> Launched:
    """Describe a process of a PyTorchJob without torchrun: one process a pod."""
    processes = variables.environ.get("PET_NPROC_PER_NODE") or "1"
    if processes != "1":
        raise InputError(
            f"PET_NPROC_PER_NODE is {processes!r}, and this process was not started by torchrun: "
            "let the job's command begin with torchrun"
        )
    return Launched(
        "PyTorchJob", variables.number(rank), variables.number(ranks), local_rank=0, local_ranks=1,
        address=variables.text(*dict.fromkeys([f"{prefix}MASTER_ADDR", "MASTER_ADDR"])),
        port=variables.number(*dict.fromkeys([f"{prefix}MASTER_PORT", "MASTER_PORT"])),
    )  # fmt: skip


def _open_mpi(variables: _Variables) -> Launched:
    remedy = "give both to all ranks, as mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<n>"
    return Launched(
        "Open MPI",
        rank=variables.number("OMPI_COMM_WORLD_RANK"),
        ranks=variables.number("OMPI_COMM_WORLD_SIZE"),
        local_rank=variables.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_ranks=variables.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        address=variables.text("MASTER_ADDR", remedy=remedy),
        port=variables.number("MASTER_PORT", remedy=remedy),
    )


def _slurm(variables: _Variables) -> Launched:
    nodes = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_LAUNCH_NODE_IPADDR")
    local_rank = variables.number("SLURM_LOCALID")
    job = variables.number("SLURM_JOB_ID", "SLURM_JOBID")
    return Launched(
        "Slurm",
        rank=variables.number("SLURM_PROCID"),
        ranks=variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=local_rank,
        local_ranks=_slurm_local_ranks(variables, local_rank),
        address=variables.environ.get("MASTER_ADDR") or first_host(variables.text(*nodes)),
        # From the job's number, which all tasks know: jobs on one host seldom get the same port.
        port=variables.default("MASTER_PORT", _FIRST_PORT + job % _PORTS),
    )


def _slurm_local_ranks(variables: _Variables, local_rank: int) -> int:
    """Return the tasks of this node from a list such as "2(x3),1"; without one the least."""
    tasks = variables.environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not tasks:
        return variables.default("SLURM_NTASKS_PER_NODE", local_rank + 1)
    counts: list[int] = []
    for count, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(repeated or 1)
    node = variables.default("SLURM_NODEID", 0)
    if node >= len(counts):
        raise InputError(f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE is {tasks!r}")
    return counts[node]


def first_host(nodes: str) -> str:
    """Return the first of a Slurm list of nodes such as `gpu[03-07,12],cpu1`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodes)
    if match is None:
        raise InputError(f"the list of nodes {nodes!r} names none")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix


def numeric(host: str) -> str:
    """Return the numeric form of `host`, an address or a name of this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"host {host!r} is unknown: {error}; name an address of this machine"
        ) from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_unspecified:
        raise InputError(f"host {host!r} is every address: name the one that others are to use")
    return address


def towards(host: str, port: int) -> str:
    """Return the local address of the interface that reaches `host`; loopback for loopback."""
    address = numeric(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # sends nothing
        except OSError as error:
            raise InputError(
                f"no interface of this machine reaches {host}: {error}; name one of its addresses"
            ) from error
        return str(probe.getsockname()[0])

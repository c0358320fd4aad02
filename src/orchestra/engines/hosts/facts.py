"""What a machine has, as far as it bears on a run. Imports without torch."""

from __future__ import annotations

import array
import fcntl
import functools
import hashlib
import json
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from orchestra.engines.processes.system import machine
from orchestra.worker.runtime import allowed_cores, cpu_quota

COMPILED = (
    "orchestra.transports._compiled",
    "orchestra.transports._executor",
    "orchestra.engines.simulation._evaluate",
)
"""The extension modules that a C compiler makes when Orchestra is installed."""

_SHM = Path("/dev/shm")
_MEMORY = Path("/proc/meminfo")
_INTERFACES6 = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = "00"
_NVIDIA = Path("/proc/driver/nvidia/version")
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES, _ADDRESS_AT = 40, 20  # of a 64-bit Linux: the name, then a sockaddr_in
_DEVICES = """\
import json, torch
names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
print(json.dumps(names))
"""


@dataclass(frozen=True)
class Facts:
    """A machine, seen by the Python that runs there."""

    host: str  # its own name
    machine: str  # equal for processes of one machine; empty if not known
    orchestra: str
    source: str  # a digest of Orchestra's files
    python: str
    torch: str | None
    system: str
    cores: int  # that this process may use
    quota: float | None  # of a control group, in cores
    memory: int | None  # bytes
    available_memory: int | None
    shm: int | None  # bytes of /dev/shm
    open_files: int  # the soft limit; -1 without one
    interfaces: Sequence[tuple[str, str]]  # names and addresses, without loopback
    compiler: str | None
    compiled: Mapping[str, bool]  # which of `COMPILED` are there
    gpu_driver: bool
    time: float  # seconds since 1970, by its clock
    devices: Sequence[str] | None = None  # GPUs that torch sees; None: nobody has asked


def facts_here(*, devices: bool = False) -> Facts:
    """Collect the facts of this machine; with `devices` those that only torch knows, too."""
    memory = _memory()
    return Facts(
        host=socket.gethostname(),
        machine=machine(),
        orchestra=version_of("neural-orchestra") or "of no known version",
        source=source_digest(),
        python=platform.python_version(),
        torch=version_of("torch"),
        system=f"{platform.system()} {platform.release()}",
        cores=len(allowed_cores()),
        quota=cpu_quota(),
        memory=memory.get("MemTotal"),
        available_memory=memory.get("MemAvailable"),
        shm=_shm_bytes(),
        open_files=_open_files(),
        interfaces=[*interfaces()],
        compiler=next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
        compiled={name: find_spec(name) is not None for name in COMPILED},
        gpu_driver=_NVIDIA.exists(),
        time=time.time(),
        devices=_devices() if devices else None,
    )


@functools.cache
def source_digest() -> str:
    """Return a digest of Orchestra's Python files: equal versions may hold unlike code."""
    folder = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def file_digest(path: Path) -> str | None:
    """Return the digest of a file's content, "folder" for a folder, None where nothing is."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except IsADirectoryError:
        return "folder"
    except OSError:
        return None


def interfaces() -> Iterator[tuple[str, str]]:
    """Yield names and addresses of the network interfaces, without loopback and link-local ones."""
    if sys.platform != "linux":
        for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield "", str(entry[4][0])
        return
    yield from _ipv4()
    with suppress(OSError):
        for line in _INTERFACES6.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == _GLOBAL_SCOPE:
                yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _ipv4() -> Iterator[tuple[str, str]]:
    room = array.array("B", bytes(_IFREQ_BYTES * 256))
    address, length = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", length, address)
        used, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    data = room.tobytes()[:used]
    for at in range(0, len(data), _IFREQ_BYTES):
        name = data[at : at + 16].split(b"\0", 1)[0].decode()
        found = socket.inet_ntoa(data[at + _ADDRESS_AT : at + _ADDRESS_AT + 4])
        if not found.startswith("127."):
            yield name, found


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None where it is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _memory() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; none where there is no such file."""
    with suppress(OSError, ValueError):
        lines = (line.split() for line in _MEMORY.read_text().splitlines())
        return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines}
    return {}


def _shm_bytes() -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(_SHM).total
    return None


def _open_files() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def _devices() -> Sequence[str] | None:
    """Ask torch in a process of its own, which leaves nothing of it behind here."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _DEVICES], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return None
    names: list[str] = json.loads(done.stdout)
    return names

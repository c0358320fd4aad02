"""What would go wrong on a machine, by its facts. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterator

from orchestra.engines.hosts.facts import Facts

SHM_BYTES, MEMORY_BYTES, OPEN_FILES = 1 << 30, 1 << 30, 1024
"""Below these a machine is warned of: of /dev/shm, of free memory, of files that may be open."""


def warnings_of(facts: Facts) -> Iterator[str]:
    """Yield a line with a remedy for each fact that slows a run down, or may end it."""
    if facts.torch is None:
        yield "torch is not installed: no run can start here; pip install torch"
    missing = [name.rpartition(".")[2] for name, there in facts.compiled.items() if not there]
    if missing:
        compiler = "install a C compiler (gcc), then " if facts.compiler is None else ""
        yield (
            f"the compiled parts {', '.join(missing)} are missing, so that Python does their work: "
            f"{compiler}install Orchestra again"
        )
    if facts.quota is not None and facts.quota < facts.cores:
        yield (
            f"a quota gives {facts.quota:g} of {facts.cores} cores: raise it "
            "(docker run --cpus, limits of a pod), or start fewer ranks here"
        )
    if facts.shm is not None and facts.shm < SHM_BYTES:
        yield (
            f"/dev/shm has {_size(facts.shm)}, in which a DataLoader with workers keeps batches: "
            "docker run --shm-size 2g, or num_workers=0"
        )
    if 0 <= facts.open_files < OPEN_FILES:
        yield f"a process may have {facts.open_files} files open: ulimit -n {4 * OPEN_FILES}"
    if facts.available_memory is not None and facts.available_memory < MEMORY_BYTES:
        yield f"{_size(facts.available_memory)} of memory are free: end other programs"
    if not facts.interfaces:
        yield "no address but loopback: other machines do not reach it; connect it to a network"
    if facts.gpu_driver and facts.devices == []:
        yield "there is an NVIDIA driver, but torch sees no GPU: install torch for CUDA"


def rows_of(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield what a machine has: names, and values in words."""
    yield "Orchestra", f"{facts.orchestra} ({facts.source})"
    yield "Python", facts.python
    yield "torch", facts.torch or "none"
    yield "system", facts.system
    yield "cores", f"{facts.cores}" + (f", quota {facts.quota:g}" if facts.quota else "")
    if facts.memory is not None and facts.available_memory is not None:
        yield "memory", f"{_size(facts.memory)}, {_size(facts.available_memory)} free"
    if facts.devices is not None:
        yield "GPUs", ", ".join(facts.devices) or "none"
    if facts.shm is not None:
        yield "/dev/shm", _size(facts.shm)
    yield "open files", "no limit" if facts.open_files < 0 else str(facts.open_files)
    addresses = [f"{address} ({name})" for name, address in facts.interfaces]
    yield "addresses", ", ".join(addresses) or "none"
    yield "compiler", facts.compiler or "none"
    there = sum(facts.compiled.values())
    yield (
        "compiled parts",
        "all" if there == len(facts.compiled) else f"{there} of {len(facts.compiled)}",
    )


def _size(count: int) -> str:
    gibibytes = count / (1 << 30)
    return f"{gibibytes:.1f} GiB" if gibibytes >= 1 else f"{count >> 20} MiB"

"""Start the ranks of a run on this machine, and watch over them. Imports without torch.

The ranks are forked from a server that has imported torch already; `enter` is their first code.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import secrets
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import current_process, forkserver, get_context, resource_tracker, spawn
from pathlib import Path
from typing import Any

from orchestra.engines.events import Event, Notice
from orchestra.engines.failure_detector import Limits
from orchestra.engines.processes.control import RankSpec
from orchestra.engines.processes.environment import HOST_VARIABLE, memory_is_shared, numeric
from orchestra.engines.processes.joining import Invitation, opened
from orchestra.engines.processes.system import (
    RankPlace,
    StopWish,
    die_with_parent,
    handling,
    keep_one_arena,
    spaced,
)
from orchestra.engines.processes.watcher import Outcome, Watcher
from orchestra.errors import InputError, RunFailed
from orchestra.transports.handshake import from_environment
from orchestra.worker.runtime import Runtime

PRELOADED = [
    "orchestra.engines.fork_server",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "orchestra.engines.processes.rank",
    "orchestra.trainer.program",
]

LOOPBACK = "127.0.0.1"
OPEN_FILES, OPEN_FILES_PER_RANK = 12, 3  # that a launcher needs, beside those open before
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}

_starting = threading.Lock()
_is_rank = False


@dataclass(frozen=True)
class Job:
    """The program of a rank, and what it needs to start."""

    payload: bytes  # the pickled program and argument
    main: dict[str, str]  # where to import the launcher's main module from, if that refers to it
    environment: dict[str, str]  # the launcher's now; the fork server's is that of the first run
    store_path: str  # of the file through which process groups of torch.distributed are made

    def load(self) -> Any:
        spawn.prepare(self.main)
        return pickle.loads(self.payload)


def enter(spec: RankSpec, job: Job) -> None:
    """Be a rank, from the beginning to the end of this process."""
    global _is_rank
    _is_rank = True
    wish = StopWish()
    _leave_signals_to_launcher(wish)
    # The fork server ends when nobody holds this pipe: with the launcher, and takes its ranks with
    # it. A rank that is stopped would otherwise keep it, and so itself, alive for ever.
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    die_with_parent()
    os.environ.clear()
    os.environ.update(job.environment)
    if spec.ranks == 1:
        keep_one_arena()

    from torch._C._distributed_c10d import FileStore

    from orchestra.engines.processes.rank import run_rank

    try:
        run_rank(spec, job.load, lambda: FileStore(job.store_path, spec.ranks), wish=wish)
    except RunFailed:
        sys.exit(1)  # the launcher says why


def _leave_signals_to_launcher(wish: StopWish) -> None:
    """Let the launcher decide what follows Ctrl-C and SIGTERM. Ctrl-C reaches the launcher as well;
    the `wish` reports SIGTERM to it."""
    number = signal.SIGTERM

    def restore() -> None:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Processes that this rank starts, such as a pool's, have to end when it sends them SIGTERM: so
    # not SIG_IGN, which a new program inherits, and no moment after a fork in which it is ignored.
    signal.signal(number, wish)
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, {number}),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {number}),
        after_in_child=restore,
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the fork server had blocked them


def launch(
    program: Callable[[Runtime, Any], Any],
    argument: Any,
    ranks: int,
    *,
    patience: float = 60.0,
    threads: int | None = None,
    on_event: Callable[[Event | Notice], None] | None = None,
    limit: float | None = None,
    places: Sequence[RankPlace] = (),
    shared_memory: bool = True,
    grace: float = 30.0,
    min_ranks: int = 1,
    invitation: Invitation | None = None,
    injects: bool = True,
    on_start: Callable[[Callable[[], None]], None] | None = None,
) -> Outcome:
    """Run `program(runtime, argument)` on `ranks` processes of this machine.

    Both are pickled by reference: the program is a function of a module. In the main thread,
    Ctrl-C or SIGTERM asks all ranks for an orderly stop, and a second one ends them. SIGTERM to any
    of the ranks asks for the same. What the ranks and the watcher send to each other is encrypted
    where the variables `ORCHESTRA_TLS_...` say so.

    Args:
        patience: seconds without progress after which a rank counts as hung (three times as long
            before its first step), and without a sign of life as unresponsive.
        threads: intra-op threads of each rank; by default `OMP_NUM_THREADS`, or a share of cores.
        on_event: called from another thread with every event and notice.
        limit: seconds after which all ranks are killed, whatever they do; the result of each that
            has delivered none is then None.
        places: the emulated node of each rank; by default all are on this machine as it is.
        shared_memory: whether ranks may share memory, where `ORCHESTRA_SHARED_MEMORY` allows it.
        grace: seconds from SIGTERM until its sender kills all processes. Where the orderly stop
            takes nearly as long, the run ends before, and fails.
        min_ranks: with fewer, the run does not go on after a loss.
        invitation: the facts for newcomers, which find the entrance in the folder that it names.
            The ranks listen on the address `ORCHESTRA_HOST`, if that is set.
        injects: whether the ranks heed `ORCHESTRA_INJECT`, and are no process of a simulation,
            whose own ranks do.
        on_start: called with a function that stops the run as Ctrl-C does, from any thread.

    Raises `InputError` for a program that cannot be sent to a rank, or one that a rank's program
    raised in its phase "set-up", and `RunFailed` with the first cause in its first line; the
    failing rank's traceback follows. Where that is the loss of a rank, it raises `RankLost`.
    """
    _check_may_launch(ranks)
    payload = _pickled(program, argument)
    main = _main_module(payload)
    token, limits = secrets.token_hex(32), Limits(patience=patience, grace=grace)
    tls = from_environment(os.environ)
    shared_memory = shared_memory and memory_is_shared(os.environ)
    host = LOOPBACK
    if invitation is not None:
        host = numeric(os.environ.get(HOST_VARIABLE) or LOOPBACK)
    watcher = Watcher(
        ranks, limits, host=host, token=token, children=True, limit=limit, tls=tls,
        on_event=on_event, min_ranks=min_ranks, invitation=invitation, shared_memory=shared_memory,
    )  # fmt: skip
    door: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if invitation is not None:
        door = opened(invitation.path, watcher.address, token)
    # `timeout` sends SIGTERM to the launcher and to its process group, so twice in a row.
    interrupts = {signal.SIGINT: watcher.interrupt, signal.SIGTERM: spaced(watcher.terminate)}
    with _store_path() as store_path, handling(interrupts), door:
        job = Job(payload, main, dict(os.environ), store_path)
        watcher.start()
        if on_start is not None:
            on_start(watcher.interrupt)
        try:
            for rank in range(ranks):
                spec = RankSpec(
                    rank, ranks, rank, watcher.address, host, token, limits,
                    tls=tls, threads=threads, shared_memory=shared_memory, injects=injects,
                )  # fmt: skip
                if places:
                    place = places[rank]
                    spec = replace(
                        spec, place=place, host=place.address, local_rank=place.local_rank,
                        threads=place.threads, shared_memory=shared_memory and place.shared_memory,
                    )  # fmt: skip
                _start(watcher, spec, job)
            watcher.join()
        except BaseException:
            watcher.abandon()
            raise
    return watcher.outcome(pickle.loads)  # of its own children


def _check_may_launch(ranks: int) -> None:
    if _is_rank:
        raise InputError(
            "a run was started while a rank imports the script that starts it: put the call under "
            "if __name__ == '__main__':"
        )
    if ranks < 1:
        raise InputError(f"ranks is {ranks}: a run needs at least one")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * ranks + len(list(Path("/dev/fd").iterdir()))
    # multiprocessing would find out half-way, and leave its fork server with half a request.
    if 0 <= limit < needed:
        raise InputError(
            f"cannot start {ranks} ranks: this process may have {limit} files open, and needs "
            f"{needed}: raise the limit (ulimit -n)"
        )


def _pickled(program: Callable[..., Any], argument: Any) -> bytes:
    try:
        return pickle.dumps((program, argument))
    except Exception as error:
        name = getattr(program, "__qualname__", repr(program))
        raise InputError(
            f"{name} and its argument cannot be sent to the ranks: {error}; the program has to be "
            "a function of a module, and the argument plain data or objects of importable classes"
        ) from error


def _main_module(payload: bytes) -> dict[str, str]:
    """Return where a rank finds the launcher's main module; empty if it does not need it."""
    if b"__main__" not in payload:
        return {}
    data = spawn.get_preparation_data("rank")
    found = {key: value for key, value in data.items() if key.startswith("init_main_from")}
    if not found:
        raise InputError(
            "what a notebook's cell or an interactive session defines cannot be imported by the "
            "ranks: write the task or strategy into a file (%%writefile own.py in a notebook), and "
            "import it from there"
        )
    return found


def _start(watcher: Watcher, spec: RankSpec, job: Job) -> None:
    context = get_context("forkserver")
    server: Any = forkserver._forkserver
    # multiprocessing's fork server and `__main__` are shared by all threads of this process.
    with _starting, _without_main():
        context.set_forkserver_preload(PRELOADED)
        is_first = server._forkserver_pid is None
        resource_tracker.ensure_running()  # it would lift the block of the signal as it starts
        # A terminal sends a Ctrl-C to the whole process group, as batch systems do with SIGTERM.
        # What starts here never sees them; this process does later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            # Python would put the working folder before installed packages.
            if not sys.flags.safe_path:
                os.environ["PYTHONSAFEPATH"] = "1"
            _start_fork_server()
        finally:
            if not sys.flags.safe_path:
                os.environ.pop("PYTHONSAFEPATH", None)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        watcher.rely_on(server._forkserver_pid)
        process: Any = context.Process(target=enter, args=(spec, job), name=f"rank {spec.rank}")
        try:
            process.start()
        except (EOFError, OSError) as error:
            raise watcher.server_lost(error) from None
        if is_first:  # the fork server took the process when its imports were done
            watcher.imported = watcher.age()
    watcher.adopt(spec.rank, process)


def _start_fork_server() -> None:
    """Start the fork server without a file that a killed launcher would leave behind.

    Folder and socket are reached through open descriptors instead of their names (Linux): names of
    sockets are limited to 107 bytes, and those of temporary folders are not.
    """
    if sys.platform != "linux":
        forkserver.ensure_running()
        return
    config: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    before = config.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        descriptor = os.open(name, os.O_PATH)
        folder = f"/proc/self/fd/{descriptor}"
        config["tempdir"] = folder
        try:
            forkserver.ensure_running()
            server: Any = forkserver._forkserver
            if server._forkserver_address.startswith(f"{folder}/"):
                socket = os.open(server._forkserver_address, os.O_PATH)
                server._forkserver_address = f"/proc/self/fd/{socket}"
        finally:
            config["tempdir"] = before
            os.close(descriptor)


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the main module in each rank.

    The rank does that itself, where it is needed, and reports what goes wrong in it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _store_path() -> Iterator[str]:
    """Provide a file for the rendezvous of process groups that is gone with this process."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("orchestra-store")) as held:
            yield f"/proc/{os.getpid()}/fd/{held.fileno()}"
    else:
        with tempfile.TemporaryDirectory(prefix="orchestra-") as folder:
            yield f"{folder}/store"

"""Take part in a run whose processes another launcher has started, on one machine or on many."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from orchestra.engines.events import Event, Notice
from orchestra.engines.processes.control import RankSpec
from orchestra.engines.processes.environment import Launched, numeric, towards
from orchestra.engines.processes.launch import Outcome, outcome, printing
from orchestra.engines.processes.rank import Program, run_rank
from orchestra.engines.processes.system import handling
from orchestra.engines.processes.watcher import Watcher
from orchestra.engines.verdicts import Limits
from orchestra.errors import InputError, RunFailed
from orchestra.transports.handshake import TLS, from_environment

HOST_VARIABLE = "ORCHESTRA_HOST"
TWICE_SECONDS = 0.5  # a launcher may pass on a Ctrl-C that the terminal has sent already


def join(
    program: Program,
    argument: Any,
    launched: Launched,
    *,
    patience: float = 60.0,
    host: str | None = None,
    tls: TLS | None = None,
    threads: int | None = None,
    on_event: Callable[[Event | Notice], None] | None = None,
    first_is_gone: Callable[[str], None] | None = None,
    on_cause: Callable[[str], None] | None = None,
    quiet: bool = True,
    advice: str = "",
) -> Outcome:
    """Run `program(runtime, argument)` as the rank that `launched` says, with all the others.

    Every process of the run calls this. Rank 0 also holds the watcher, in a thread. What the
    program returns has to be plain data that JSON carries; nothing that arrives is unpickled.

    Args:
        host: the local address that others are to use; by default that of `ORCHESTRA_HOST`, or of
            the interface that reaches the master.
        tls: by default what the variables `ORCHESTRA_TLS_CERTIFICATE`, `ORCHESTRA_TLS_KEY` and
            `ORCHESTRA_TLS_AUTHORITY` name; unencrypted without them.
        patience: see `launch`, as `threads` and the other arguments. `on_event` and `quiet` matter
            on rank 0.
        first_is_gone: called with the reason, from another thread, before this process leaves
            because rank 0 is gone.
        on_cause: called with the first cause, from another thread, when the run ends by it.
        advice: what a user can do about a rank that is taken for hung.

    Returns:
        On rank 0 the outcome of the whole run, on every other rank one with its own result.

    Raises:
        InputError: for an address that is not one of this machine.
        RunFailed: on every rank, with the first cause. A rank whose program does not react to the
            end of the run prints the cause, and leaves its process with status 1.
    """
    limits = Limits(patience=patience, advice=advice)
    tls = tls or from_environment(os.environ)
    chosen = host or os.environ.get(HOST_VARIABLE)
    address = numeric(chosen) if chosen else towards(launched.address, launched.port)
    store = _connect_store(launched, limits, chosen)
    with contextlib.ExitStack() as closing:
        watcher = None
        if launched.rank == 0:
            token = secrets.token_hex(32)
            watcher = Watcher(
                launched.ranks,
                limits,
                host=address,
                token=token,
                children=False,
                tls=tls,
                on_event=on_event if quiet else printing(on_event),
            )
            watcher.start()
            closing.callback(watcher.abandon)
            about = {"address": watcher.address, "token": token, "tls": tls is not None}
            store.set("watcher", json.dumps(about))
        closing.enter_context(_interrupts(watcher))
        spec = replace(_spec(launched, store, address, limits, tls), threads=threads)
        result = _take_part(spec, program, argument, store, watcher, first_is_gone, on_cause)
        if watcher is None:
            own = [None] * launched.ranks
            own[launched.rank] = result
            return Outcome(tuple(own), {}, stopped=False, notices=(), setup={})
        watcher.join()
        return outcome(watcher, range(launched.ranks), json.loads)


def _take_part(
    spec: RankSpec,
    program: Program,
    argument: Any,
    store: Store,
    watcher: Watcher | None,
    first_is_gone: Callable[[str], None] | None,
    on_cause: Callable[[str], None] | None,
) -> Any:
    native = PrefixStore("native", store)
    try:
        return run_rank(spec, lambda: (program, argument), lambda: native, first_is_gone, on_cause)
    except RunFailed as failed:
        if watcher is None:
            raise
        if watcher.verdicts.cause is None:  # it could not even reach its own watcher
            watcher.fail(spec.rank, failed)
        watcher.join()  # it tells the others the cause, and gives them time to leave
        if watcher.verdicts.bad_input is not None:
            raise InputError(watcher.verdicts.bad_input) from failed
        raise RunFailed(watcher.verdicts.cause or str(failed)) from failed


def _connect_store(launched: Launched, limits: Limits, host: str | None) -> Store:
    """The store at the master's address; rank 0 opens it where the launcher has not."""
    opens = launched.rank == 0 and not launched.hosted
    listener = _listen(launched, host) if opens else None
    try:
        store = TCPStore(
            launched.address,
            launched.port,
            launched.ranks,
            is_master=opens,
            timeout=timedelta(seconds=limits.joining),
            wait_for_workers=False,
            multi_tenant=True,  # a process group of the user's own may be in the same store
            # An own socket, since the store itself would listen on every interface.
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except RuntimeError as error:
        raise RunFailed(
            f"rank {launched.rank} cannot reach the store of {launched.launcher} at "
            f"{launched.address}:{launched.port}: {str(error).splitlines()[0]}"
        ) from error
    return PrefixStore(f"orchestra/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _listen(launched: Launched, host: str | None) -> socket.socket | None:
    """The port of the store; None where this process has a store there already."""
    address = numeric(host or launched.address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, launched.port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and dist.is_initialized():
            return None
        raise InputError(
            f"rank 0 cannot listen on {launched.address}:{launched.port}: {error.strerror}; the "
            f"master address has to be one of rank 0's machine (or name one in {HOST_VARIABLE}), "
            "and its port free"
        ) from error


def _spec(launched: Launched, store: Store, host: str, limits: Limits, tls: TLS | None) -> RankSpec:
    try:
        published = json.loads(store.get("watcher"))
    except RuntimeError as error:
        raise RunFailed(
            f"rank {launched.rank} waited {limits.joining:g} s for rank 0, which did not come"
        ) from error
    watcher_host, watcher_port = published["address"]
    if published["tls"] != (tls is not None):
        where = "for rank 0 and not here" if published["tls"] else "here and not for rank 0"
        raise InputError(
            f"rank {launched.rank}: TLS is set up {where}: set ORCHESTRA_TLS_CERTIFICATE, _KEY and "
            "_AUTHORITY on every host, or on none"
        )
    return RankSpec(
        launched.rank,
        launched.ranks,
        launched.local_rank,
        (watcher_host, watcher_port),
        host,
        published["token"],
        limits,
        local=False,
        supervised=launched.supervised,
        tls=tls,
    )


@contextmanager
def _interrupts(watcher: Watcher | None) -> Iterator[None]:
    """While inside, only rank 0 reacts to Ctrl-C and SIGTERM, and the others follow it.

    torchrun sends SIGTERM to all ranks of a node once one of them has died, whose end is the cause.
    """
    pressed_at = -math.inf

    def interrupt() -> None:
        nonlocal pressed_at
        again, pressed_at = time.monotonic() - pressed_at, time.monotonic()
        if watcher is not None and again > TWICE_SECONDS:
            watcher.interrupt()

    with handling({signal.SIGINT: interrupt, signal.SIGTERM: interrupt}):
        yield

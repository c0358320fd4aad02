"""One rank: join the run, connect with the others, run the program, deliver its result.

`launch` calls `run_rank` in the processes that it starts; `join` takes part in a run whose
processes another launcher has started, on one machine or on many.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from orchestra.engines.events import Event, Notice, describe
from orchestra.engines.failure_detector import Limits
from orchestra.engines.injection import LOG, injections
from orchestra.engines.processes.control import Control, RankSpec, Roster, Signs
from orchestra.engines.processes.environment import (
    HOST_VARIABLE,
    NEWS_VARIABLE,
    Launched,
    latencies_of,
    memory_is_shared,
    numeric,
    towards,
)
from orchestra.engines.processes.injection import ProcessInjector
from orchestra.engines.processes.joining import Admission, Entrance, Invitation, opened
from orchestra.engines.processes.system import (
    StopWish,
    TimedCompute,
    handling,
    kernel,
    machine,
    peak_memory,
)
from orchestra.engines.processes.watcher import Outcome, Watcher
from orchestra.engines.random_streams import seed
from orchestra.errors import GroupChanged, InputError, PeerLost, RunEnded, RunFailed
from orchestra.transports import executor
from orchestra.transports.handshake import TLS, address_of, from_environment, listen
from orchestra.transports.matching import Receive, Send
from orchestra.transports.native import Native
from orchestra.transports.shared_memory import host_key
from orchestra.transports.sockets import SocketTransport, connect_mesh
from orchestra.worker.interception import (
    HookedCall,
    HookedFlow,
    Interceptor,
    intercepted,
)
from orchestra.worker.runtime import RankActivity, Runtime, chosen_threads, usable_cores

T = TypeVar("T")

Program = Callable[[Runtime, Any], Any]

ANSWER_SECONDS = 10.0  # within which a store or a watcher answers, where one listens
PROBE_SECONDS = 0.1  # after which a rank looks again whether there is a watcher


class Watched(Interceptor):
    """Knows what the main flow, over `transport`, is blocked on, for the watcher.

    Messages are not intercepted: of those the transport says by itself what it waits for.
    """

    heeds_messages = False

    def __init__(self, transport: SocketTransport) -> None:
        self._transport = transport
        self._others = tuple(rank for rank in range(transport.size) if rank != transport.rank)
        self._completed = 0  # collectives and flows
        self._main = HookedFlow()

    def begin(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        # The first native one makes the process group.
        return self.wait(flow, operation, proceed) if operation.kind == "native" else proceed()

    def wait(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        if flow.name == self._main.name:
            self._main = flow
        before, flow.waiting = flow.waiting, operation
        try:
            return proceed()
        finally:
            flow.waiting = before
            self._completed += 1

    def signs(self) -> Signs:
        """Return how many operations were completed, and what the main flow waits for."""
        completed = self._completed, self._transport.waits
        flow, transport = self._main, self._transport
        # A flow that waits for a background flow waits for whatever that one waits for.
        while flow.waiting is not None and flow.waiting.flow is not None:
            flow = flow.waiting.flow
            assert isinstance(flow.transport, SocketTransport)
            transport = flow.transport
        if (collective := transport.in_collective) is not None:
            awaited = collective.awaited
            return completed, () if awaited is None else (awaited,), "in a collective"
        message = transport.waiting
        if isinstance(message, Receive):
            peers = self._others if message.requested is None else (message.requested,)
            return completed, peers, f"to receive, tag {message.tag}"
        if isinstance(message, Send):
            return completed, (message.to,), f"to send, tag {message.tag}"
        if flow.waiting is None:  # it computes, or a flow behind it is about to begin, or ends
            return completed, (), ""
        native = "native " if flow.waiting.kind == "native" else ""
        return completed, self._others, f"in a {native}collective"


class Connections:
    """This rank's connections with all others, in one group after the other.

    Each group has a mesh of its own: what was under way in the one before ends with its
    connections, so that nothing of it can arrive in the next.
    """

    def __init__(self, spec: RankSpec, control: Control, make_store: Callable[[], Store]) -> None:
        self._spec, self._control, self._make_store = spec, control, make_store
        self._compute = TimedCompute()
        self._latencies = spec.held
        self._transport: SocketTransport | None = None
        self._native: Native | None = None
        self._injector: ProcessInjector | None = None

    def join(self, roster: Roster, listener: socket.socket) -> Runtime:
        """Connect with the others of the group; return what a program works with in it.

        Raises `PeerLost` or `GroupChanged` where one of them is lost meanwhile.
        """
        spec, control, members = self._spec, self._control, roster.members
        torch.set_num_threads(spec.threads or chosen_threads(os.environ) or roster.threads)
        self._transport = transport = connect_mesh(
            roster.rank, roster.addresses, listener, _token(spec, roster.generation),
            tls=spec.tls, timeout=spec.limits.joining, compiled=roster.compiled,
            on_wait=lambda ranks: control.connecting(tuple(members[rank] for rank in ranks)),
            is_over=lambda: control.is_over(roster.generation),
            report=lambda lost: control.accuse(lost, roster),
            # Thread counts are each thread's own; background flows leave the cores to the main flow
            on_flow_start=lambda: torch.set_num_threads(1),
        )  # fmt: skip
        if roster.neighbours:
            transport.share_memory(roster.neighbours)
        if (latencies := self._latencies) is not None:
            transport.hold(lambda rank, now: latencies.seconds(members[rank], now))
        self._native = Native(
            lambda: PrefixStore(f"group-{roster.generation}", self._make_store()), roster.rank,
            len(members), host=spec.host, device=spec.local_rank,
            timeout=4 * spec.limits.patience,  # the watcher decides first
        )  # fmt: skip
        transport.native = self._native.all_reduce
        watched, compute = Watched(transport), self._compute

        def signs() -> Signs:
            """Return what a beat says of the rank: see `Control.attach`."""
            completed, waits_for, what = watched.signs()
            moved = transport.acknowledged_bytes() if sys.platform == "linux" else 0
            slots = tuple(members[rank] for rank in waits_for)
            return (roster.generation, completed, compute.calls, moved), slots, what

        control.attach(transport, roster, signs)
        runtime = Runtime(
            roster.rank, len(members), transport, compute, control, seed,
            local_rank=spec.local_rank, clock=machine(), node=spec.node, peak_memory=peak_memory,
            stopwatch=lambda _: latencies.begin(transport.now()) if latencies else None,
            members=members, regroup=functools.partial(self._regroup, roster),
        )  # fmt: skip
        interceptors: list[Interceptor] = [watched]
        if spec.injects and (faults := injections(os.environ, spec.rank)):
            if self._injector is None:
                self._injector = ProcessInjector(
                    faults, transport, control.connection, spec.watcher,
                    local=spec.local, log=os.environ.get(LOG),
                )  # fmt: skip
            self._injector.transport = transport
            interceptors.append(self._injector)
        return intercepted(runtime, *interceptors)

    def alone(self, listener: socket.socket) -> Runtime:
        """Return what the program of a newcomer works with until it is taken into a group."""
        address, slot = address_of(listener), self._spec.rank
        return self.join(Roster(0, (slot,), (address,), 1, (), False, 0), listener)

    def _regroup(self, roster: Roster, error: PeerLost | GroupChanged) -> Runtime:
        """See `Runtime.regroup`; `roster` is that of the group that has ended by `error`."""
        assert self._transport is not None
        if isinstance(error, PeerLost):
            self._control.accuse(error, roster, waits=True)
        # Until all know that the group is over, some may need what this rank has still to send.
        self._control.wait_for_next(roster.generation)
        # From here on no flow writes into memory that the program goes on to use.
        self._transport.abort(GroupChanged())
        self.close(0.0)
        while True:
            roster, listener = self._control.regroup(lambda: listen(self._spec.host))
            try:
                return self.join(roster, listener)
            except PeerLost as lost:
                self._control.accuse(lost, roster, waits=True)
            except GroupChanged:
                pass  # there is one more

    def close(self, timeout: float = 5.0) -> None:
        """Say farewell within `timeout` seconds, and disconnect."""
        if self._transport is not None:
            self._transport.close(timeout=timeout)
        if self._native is not None:
            self._native.close()


def _token(spec: RankSpec, generation: int) -> bytes:
    """Return the secret of a group: no connection of another one is taken for one of it."""
    return f"{spec.token}/{generation}".encode()


def run_rank(
    spec: RankSpec,
    load: Callable[[], tuple[Program, Any]],
    make_store: Callable[[], Store],
    on_left: Callable[[str], None] | None = None,
    on_cause: Callable[[str], None] | None = None,
    wish: StopWish | None = None,
) -> Any:
    """Be the rank that `spec` describes, and return what its program returned.

    `load` gives the program and its argument; its errors count as the program's. `make_store`
    makes where the ranks of a process group of torch.distributed find each other. For the others
    see `Control`. Raises `RunFailed` with the first cause, wherever it lies.
    """
    with contextlib.ExitStack() as resources:
        control = Control(spec, on_left, on_cause, wish)
        # After the connection to the watcher, which thus stays outside of the emulated network, and
        # before the listener, which is to be inside.
        if spec.place is not None:
            spec.place.enter()
        listener = resources.enter_context(listen(spec.host))
        control.hello(
            pid=os.getpid(), host=spec.node, machine=machine(), kernel=kernel(),
            cores=usable_cores(), address=address_of(listener),
            memory=host_key() if spec.shared_memory else "", uncompiled=_uncompiled(spec),
        )  # fmt: skip
        try:
            result = _run(spec, control, listener, load, make_store, resources)
            delivery = _encoded(result, local=spec.local)
        except BaseException as error:
            cause = control.fail(describe(error))
            raise RunEnded(cause) from error
        control.finish(delivery)
        return result


def _uncompiled(spec: RankSpec) -> str:
    """Return why compiled code cannot move collectives between this rank and others."""
    if spec.tls is not None:
        return "they are encrypted"
    if not executor.is_there():
        return f"the compiled part is not there on {spec.node}"
    return ""


def _run(
    spec: RankSpec,
    control: Control,
    listener: socket.socket,
    load: Callable[[], tuple[Program, Any]],
    make_store: Callable[[], Store],
    resources: contextlib.ExitStack,
) -> Any:
    program, argument = load()
    connections = Connections(spec, control, make_store)
    resources.callback(connections.close)
    if spec.newcomer:
        runtime = connections.alone(listener)
    else:
        runtime = connections.join(control.roster(), listener)
    result = program(runtime, argument)
    control.activity(RankActivity.LEAVING)
    connections.close(spec.limits.patience)
    return result


def _encoded(result: Any, *, local: bool) -> bytes:
    """Encode the result for the watcher; that of another process tree unpickles nothing."""
    try:
        return pickle.dumps(result) if local else json.dumps(result).encode()
    except Exception as error:
        how = "pickled" if local else "written as JSON"
        raise TypeError(f"the result of the program cannot be {how}: {error}") from None


def join(
    program: Program,
    argument: Any,
    launched: Launched,
    *,
    patience: float = 60.0,
    host: str | None = None,
    threads: int | None = None,
    on_event: Callable[[Event | Notice], None] | None = None,
    on_left: Callable[[str], None] | None = None,
    on_cause: Callable[[str], None] | None = None,
    advice: str = "",
    grace: float = 30.0,
    wish: StopWish | None = None,
    min_ranks: int = 1,
    invitation: Invitation | None = None,
) -> Outcome:
    """Run `program(runtime, argument)` as the rank that `launched` says, with all the others.

    Every process of the run calls this. Rank 0 also holds the watcher, in a thread, and returns the
    outcome of the whole run, every other rank one with its own result: plain data that JSON
    carries, since nothing that arrives is unpickled.

    Args:
        patience, threads, on_event, min_ranks, invitation: see `launch`; only rank 0 has events.
        host: the local address that others are to use; by default that of `ORCHESTRA_HOST`, or of
            the interface that reaches the master.
        on_left, on_cause: see `Control`; rank 0 holds the watcher.
        advice: what a user can do about a rank that is taken for hung.
        grace: seconds from SIGTERM until all ranks are killed: see `launch`.
        wish: that of this process to stop in good order, where the caller handles SIGTERM; by
            default this does, in the main thread.

    Raises `InputError` for an address that is not one of this machine, and `RunFailed` on every
    rank, with the first cause. A rank whose program does not react to the end of the run prints the
    cause, and leaves its process with status 1.
    """
    limits = Limits(patience=patience, advice=advice, grace=grace)
    tls = from_environment(os.environ)
    chosen = host or os.environ.get(HOST_VARIABLE)
    address = numeric(chosen) if chosen else towards(launched.address, launched.port)
    store = _connect_store(launched, limits, chosen)
    with contextlib.ExitStack() as closing:
        watcher = None
        if launched.rank == 0:
            token = secrets.token_hex(32)
            watcher = Watcher(
                launched.ranks, limits, host=address, token=token, children=False, tls=tls,
                on_event=on_event, on_cause=on_cause, min_ranks=min_ranks, news=_news(),
                invitation=invitation, shared_memory=memory_is_shared(os.environ),
            )  # fmt: skip
            on_cause = None  # it comes from the watcher
            watcher.start()
            closing.callback(watcher.abandon)
            about = {"address": watcher.address, "token": token, "tls": tls is not None}
            store.set("watcher", json.dumps(about))
            if invitation is not None:
                door = opened(invitation.path, watcher.address, token)
                closing.enter_context(door)
        handlers = {} if wish else {signal.SIGTERM: (wish := StopWish())}
        interrupt = (lambda: None) if watcher is None else watcher.interrupt
        # Ctrl-C reaches all ranks of a terminal; rank 0 reacts to it, and the others follow it.
        closing.enter_context(handling({signal.SIGINT: interrupt, **handlers}))
        spec = _spec(launched, _published(launched, store, limits), address, limits, tls, threads)
        native = PrefixStore(f"native/{spec.token}", store)
        run = functools.partial(
            run_rank, spec, lambda: (program, argument), lambda: native, on_left, on_cause,
            wish,
        )  # fmt: skip
        if watcher is not None:
            return _run_beside(watcher, run)
        results = [None] * launched.ranks
        results[launched.rank] = run()
    return Outcome(tuple(results), {}, stopped=False, terminated=False, notices=(), setup={})


def join_run(
    entrance: Entrance,
    place: Admission,
    program: Program,
    argument: Any,
    *,
    tls: TLS | None = None,
    threads: int | None = None,
    wish: StopWish | None = None,
) -> Any:
    """Take part in a run under way, at the `place` that its watcher has given to this process.

    `program` gets a runtime of this rank alone, whose `regroup` waits until it is taken in. Returns
    its result, as JSON carries it. Raises `RunFailed` with the first cause, `RunEnded` where the
    run takes this rank in no more. A `wish` to stop leaves the run, and ends the process.
    """
    spec = place.spec(entrance, tls, threads)

    def no_store() -> Store:
        raise AssertionError("a run with native collectives takes nobody in")

    result = run_rank(spec, lambda: (program, argument), no_store, wish=wish)
    return json.loads(json.dumps(result))


def _news() -> int | None:
    """Return the descriptor from which rank 0 reads what its launcher tells; None without one."""
    if NEWS_VARIABLE not in os.environ:
        return None
    descriptor = int(os.environ.pop(NEWS_VARIABLE))
    os.set_inheritable(descriptor, False)
    return descriptor


def _run_beside(watcher: Watcher, run: Callable[[], Any]) -> Outcome:
    """Be rank 0, until all ranks are gone."""
    failure = None
    try:
        run()
    except RunFailed as failed:
        failure = failed
        if watcher.detector.cause is None:  # it could not even reach its own watcher
            watcher.fail(0, failed)
    watcher.join()  # it tells the others the cause, and gives them time to leave
    outcome = watcher.outcome(json.loads)
    if failure is not None:
        raise failure
    return outcome


def _connect_store(launched: Launched, limits: Limits, host: str | None) -> Store:
    """Connect to the store at the master's address; rank 0 opens it if the launcher has not."""
    opens = launched.rank == 0 and not launched.hosted
    listener = _listen(launched, host) if opens else None
    connect = functools.partial(
        TCPStore, launched.address, launched.port, launched.ranks, is_master=opens,
        timeout=timedelta(seconds=limits.joining), wait_for_workers=False,
        multi_tenant=True,  # a process group of the user's own may be in the same store
        # An own socket, since the store itself would listen on every interface.
        master_listen_fd=None if listener is None else listener.detach(),
    )  # fmt: skip
    try:
        store = _answered(connect, launched)
    except RuntimeError as error:
        raise RunFailed(
            f"rank {launched.rank} cannot reach the store of {launched.launcher} at "
            f"{launched.address}:{launched.port}: {str(error).splitlines()[0]}"
        ) from error
    return PrefixStore("orchestra", store)


def _answered(connect: Callable[[], Store], launched: Launched) -> Store:
    """Return the store that `connect` makes. Raises RuntimeError where a stranger listens there.

    TCPStore itself would wait for the stranger's answer without an end.
    """
    made: Future[Store] = Future()

    def make() -> None:
        try:
            made.set_result(connect())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=make, name="store", daemon=True).start()
    there = False
    while True:
        try:
            return made.result(ANSWER_SECONDS)
        except TimeoutError:
            if there:  # since the last time, so that a store would have answered
                raise RuntimeError("what listens there is no store: is the port taken?") from None
        with contextlib.suppress(OSError):
            socket.create_connection((launched.address, launched.port), ANSWER_SECONDS).close()
            there = True


def _listen(launched: Launched, host: str | None) -> socket.socket | None:
    """Listen on the port of the store; None if this process has a store there already."""
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


def _published(launched: Launched, store: Store, limits: Limits) -> dict[str, Any]:
    """Return what rank 0 has left in the `store` about its watcher, once that can be reached.

    The store of torchrun outlives a restart, and no variable of torchrun tells attempts apart: its
    count of restarts leaves out those that come from another node. So a rank may find what rank 0
    left in an earlier attempt, whose processes have ended.
    """
    deadline = time.monotonic() + limits.joining
    while True:
        try:
            published: dict[str, Any] = json.loads(store.get("watcher"))
        except RuntimeError as error:
            raise RunFailed(
                f"rank {launched.rank} waited {limits.joining:g} s for rank 0, which did not come"
            ) from error
        try:
            socket.create_connection(tuple(published["address"]), ANSWER_SECONDS).close()
        except (ConnectionRefusedError, TimeoutError):
            if time.monotonic() < deadline:
                time.sleep(PROBE_SECONDS)
                continue
        except OSError:
            pass  # the connection that follows tells why
        return published


def _spec(
    launched: Launched, published: dict[str, Any], host: str, limits: Limits, tls: TLS | None,
    threads: int | None,
) -> RankSpec:  # fmt: skip
    """Describe this rank, with what rank 0 has `published`."""
    if published["tls"] != (tls is not None):
        where = "for rank 0 and not here" if published["tls"] else "here and not for rank 0"
        raise InputError(
            f"rank {launched.rank}: TLS is set up {where}: set ORCHESTRA_TLS_CERTIFICATE, _KEY and "
            "_AUTHORITY on every host, or on none"
        )
    watcher, token = tuple(published["address"]), published["token"]
    return RankSpec(
        launched.rank, launched.ranks, launched.local_rank, watcher, host, token, limits,
        local=False, supervised=launched.supervised, tls=tls, threads=threads,
        shared_memory=memory_is_shared(os.environ),
        latencies=latencies_of(os.environ, launched.ranks),
    )  # fmt: skip

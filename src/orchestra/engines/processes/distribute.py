"""Distribute loops of the user's own, in processes that torchrun or another launcher started."""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader

from orchestra.engines.events import Notice
from orchestra.engines.live import print_notice
from orchestra.engines.processes.environment import (
    JOIN_VARIABLE,
    detect,
    runs_function,
    set_rank,
    world_size,
)
from orchestra.engines.processes.joining import Entrance, Invitation, ask
from orchestra.engines.processes.rank import join, join_run
from orchestra.engines.processes.system import StopWish, TimedCompute
from orchestra.engines.random_streams import seed as begin_streams
from orchestra.errors import (
    GroupChanged,
    InputError,
    PeerLost,
    RunAborted,
    RunEnded,
    RunFailed,
    tell,
)
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import strategy_of_script
from orchestra.trainer.own_loop import Batches, OwnLoop
from orchestra.trainer.own_loop.checks import may_serve
from orchestra.transports.handshake import address_of, from_environment, listen
from orchestra.transports.native import Native
from orchestra.transports.sockets import connect_mesh
from orchestra.transports.tags import Tag
from orchestra.worker.interception import (
    HookedCall,
    HookedFlow,
    Interceptor,
    intercepted,
)
from orchestra.worker.runtime import RankActivity, Runtime, SilentReporter

T = TypeVar("T")
Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

ADVICE = (
    "put what takes longer, such as an evaluation or writing a file, into "
    "`with batches.pause():`, or raise `patience` in orchestra.distribute"
)


def distribute(
    model: Model,
    optimizer: Optimizer,
    batches: DataLoader[Any] | Iterable[Any] | Batches,
    strategy: Strategy | str,
    *,
    accumulation: int = 1,
    seed: int = 0,
    work: Literal["shared", "equal"] = "shared",
    bucket_megabytes: float = 25.0,
    overlap: bool = True,
    patience: float = 60.0,
    grace: float = 30.0,
    host: str | None = None,
    min_ranks: int | None = None,
    entrance: str | Path | None = None,
) -> tuple[Model, Optimizer, Batches]:
    """Train `model` in your own loop under `strategy`, on all processes that were started.

    `loss.backward()` and `optimizer.step()` stay as they are. Under all-reduce the gradients that
    a finished `backward()` leaves are the average over all workers, so that clipping means what
    it means under DistributedDataParallel. Under a parameter server they are this worker's own,
    and `step()` pushes them, with the options that stand in `optimizer.param_groups`.

    Iterate the returned batches once an epoch; the batch size of the loader is that of one
    worker. When an epoch ends, every worker's model holds the agreed parameters.

    A dedicated server serves in here until the workers' scripts are over; then its process ends
    with status 0, so that code behind this call runs on workers alone. Where an engine calls a
    function on each rank and waits for its value (Spark's TorchDistributor, Ray Train,
    torch.multiprocessing), a server returns from here: its iterations over the batches give none,
    and each serves one epoch of the workers.

    A call ends every earlier loop that has begun to train, or that trains the same parameters; its
    batches and its optimizer are then refused. Models that are trained by turns, as in a GAN, are
    all distributed before the first step, each further one with the batches of the first call.

    Args:
        batches: the loader of the whole data set, as for a single machine; do not shard it. Or any
            iterable of batches, such as a list, or iter(get_batch, None) for a function; or the
            batches of an earlier call, on which this model is trained as well.
        strategy: an object such as `AllReduce("ring")`, or its notation as text.
        accumulation: calls of `backward()` for one `step()`; only the last one exchanges.
        seed: of the order of the samples, where there are several workers.
        work: where workers need not step together, "shared" lets one that is free take the next
            batch of a map-style loader without worker processes and `accumulation`, which both
            need to know what follows. "equal" gives each as many, as other loaders always do.
        bucket_megabytes: gradients exchanged at a time, by strategies that exchange them.
        overlap: exchange them while the backward pass goes on.
        patience: seconds without an exchange or a forward pass until a rank counts as hung, unless
            it is inside `with batches.pause():`. The first call of a process decides.
        grace: seconds from SIGTERM until its sender kills the processes. After a common
            step the next batch raises `orchestra.Stopped` on every worker, which ends its script
            with status 0. Not where the script handles SIGTERM by itself. As `patience`.
        host: the local address that the other ranks are to use (default: found out). As `patience`.
        min_ranks: where ranks are lost, the others go on, this many at least, from the last step
            that any of them has completed. Under `AllReduce` without shards, with a DataLoader of a
            map-style data set, and one model. The step under way is void: until the next batch,
            `backward()` exchanges nothing and `step()` does nothing. As `patience`.
        entrance: the file to write while the run can be joined: the same script, started with
            ORCHESTRA_JOIN=FILE, is one rank more. As `patience`.

    Returns the same model and optimizer, and the loader to iterate in place of `batches`. Raises
    `InputError` where what was asked for cannot be done, and `RunFailed` where the ranks did not
    come together.
    """
    loop = _Process.this(patience, host, grace, min_ranks, entrance).begin_loop(
        model, optimizer, batches, strategy_of_script(strategy), accumulation=accumulation,
        seed=seed, work=work, bucket_megabytes=bucket_megabytes, overlap=overlap,
    )  # fmt: skip
    loop.batches.ends_process = not runs_function()
    if loop.batches.ends_process:
        loop.batches.serve_to_the_end()
    return model, optimizer, loop.batches


@overload
def mean(value: float, weight: float = 1.0) -> float: ...


@overload
def mean(value: Tensor, weight: float = 1.0) -> Tensor: ...


def mean(value: Tensor | float, weight: float = 1.0) -> Tensor | float:
    """Collective over the workers: return the mean of their numbers, weighted by `weight`.

    For what a script reports or decides by, such as a validation loss: every worker gets the same
    bits. A rank that a `Switch` has made a server gets NaN. Sums are taken in float64; a tensor
    keeps its shape and device, and its type if that is a floating one.

    Raises `InputError` on several processes before `distribute`, which says who works.
    """
    process = _Process.taken
    batches = None if process is None or process.newest is None else process.newest.batches
    if batches is None and world_size() > 1:
        raise InputError("orchestra.mean(): call orchestra.distribute first, which makes workers")
    numbers = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
    sums = torch.cat([numbers.detach().cpu().double().reshape(-1), torch.ones(1)])
    # Zeros of a worker without weight, whose own number may be NaN
    sums = sums * weight if weight else torch.zeros_like(sums)
    if batches is not None:
        works = batches.is_worker()
        sums = batches.sum_over_workers(sums, Tag.MEAN) if works else sums * math.nan
    found = sums[:-1] / sums[-1]
    if not isinstance(value, Tensor):
        return found.item()
    kind = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    return found.reshape(value.shape).to(value.device, kind)


LEAVING_SECONDS = 10.0  # within which the run has heard that this rank leaves it
TAGS = 1 << 20  # of one channel: all that programs use lie below


@dataclass(eq=False)
class Channel(Interceptor):
    """Keeps the messages of a loop apart from those of others by tags of its own.

    Both ends have to open it under one number. Channel 0 has the tags of the transport itself.
    """

    number: int

    def begin(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        # The messages of a collective have its tag already.
        if operation.kind in ("send", "receive", "collective") and operation.tag < TAGS:
            operation.tag += self.number * TAGS
        return proceed()


def runtime_beside_loops(*, patience: float = 60.0, host: str | None = None) -> Runtime:
    """Collective, over all ranks: return the runtime for what a framework sends beside loops.

    Always the same one. See `distribute` for the arguments.
    """
    return _Process.this(patience, host).beside


def end_loops() -> None:
    """Collective, over all ranks: end every loop; the script goes on with another one."""
    if _Process.taken is not None:
        _Process.taken.end(lambda _: True)


class _Unwatched(SilentReporter):
    """The reporter of a process that nobody watches."""

    def notice(self, text: str) -> None:
        print_notice(Notice(text))


def _alone() -> Runtime:
    """Make the runtime of a single process: no watcher, no threads, no seeds touched."""
    listener = listen()
    transport = connect_mesh(0, [address_of(listener)], listener, b"alone", timeout=1.0)
    native = Native(HashStore, 0, 1, host="127.0.0.1", device=0, timeout=60.0)
    transport.native = native.all_reduce
    return Runtime(0, 1, transport, TimedCompute(), _Unwatched(), begin_streams)


def _wish() -> StopWish:
    """Let SIGTERM ask for an orderly stop, unless the script handles it; Python allows that in the
    main thread only."""
    wish = StopWish()
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, wish)
    return wish


class _Process:
    """This process among those that were started. All loops in it share its connections.

    Its rank runs in a thread, and the user's script works with the rank's runtime. When the script
    ends, the run ends too: in order, or with the script's error.
    """

    taken: _Process | None = None
    _thread: threading.Thread | None = None
    _enters = False  # a run under way

    def __init__(
        self,
        patience: float,
        host: str | None,
        grace: float,
        min_ranks: int | None = None,
        entrance: str | Path | None = None,
    ) -> None:
        self._min_ranks = min_ranks
        self._loops: list[OwnLoop] = []  # that have not ended
        self.newest: OwnLoop | None = None  # of all, ended or not
        self._channels = itertools.count()
        self._error: BaseException | None = None  # of the script
        self._failure: BaseException | None = None  # of the run
        self._told = False
        self._over = threading.Event()
        self._begun: Future[Runtime] = Future()
        take_part: Callable[[], object] | None = None
        self._wish = StopWish()
        threads = torch.get_num_threads()  # the user's, which stays
        if (invited := os.environ.get(JOIN_VARIABLE)) is not None:
            if min_ranks is None:
                raise InputError(f"{JOIN_VARIABLE} is set: give distribute min_ranks, as the run")
            tls, found = from_environment(os.environ), Entrance.read(Path(invited))
            self._wish = _wish()
            place = ask(found, tls)
            set_rank(place.rank)
            self._first_of_node = self._enters = True
            take_part = functools.partial(
                join_run,
                found,
                place,
                self._program,
                None,
                tls=tls,
                threads=threads,
                wish=self._wish,
            )
        elif (launched := detect(os.environ)) is not None:
            self._first_of_node = launched.local_rank == 0
            self._wish = _wish()
            invitation = None
            if entrance is not None and min_ranks is not None:
                invitation = Invitation(Path(entrance).absolute())
            take_part = functools.partial(
                join, self._program, None, launched,
                patience=patience, host=host, advice=ADVICE, grace=grace, wish=self._wish,
                threads=threads, on_event=print_notice, on_cause=self._cause_came,
                min_ranks=min_ranks or 1, invitation=invitation,
            )  # fmt: skip
        if take_part is None:
            self._runtime = _alone()
        else:
            self._thread = threading.Thread(
                target=self._run, args=(take_part,), name="orchestra", daemon=True
            )
            self._thread.start()
            # The rank's program only waits in its thread. The script runs here, in the main thread,
            # where signals and the user's code expect to be.
            self._runtime = self._begun.result()
            self._hook = sys.excepthook
            sys.excepthook = self._note
        atexit.register(self._end)

    def _run(self, take_part: Callable[[], object]) -> None:
        try:
            take_part()
        except BaseException as error:
            self._failure = error
            if not self._begun.done():
                self._begun.set_exception(error)

    def _program(self, runtime: Runtime, _: None) -> None:
        self._begun.set_result(runtime)
        self._over.wait()
        if self._error is not None:
            raise self._error

    def _cause_came(self, cause: str) -> None:
        """Print the cause at once: torchrun may end this process before the script reacts."""
        if self._first_of_node and not self._over.is_set():
            self._tell(cause)

    def _tell(self, cause: str) -> None:
        self._told = True
        tell(cause.splitlines()[0])

    @classmethod
    def this(
        cls,
        patience: float,
        host: str | None,
        grace: float = 30.0,
        min_ranks: int | None = None,
        entrance: str | Path | None = None,
    ) -> _Process:
        """Return this process's object; the first call joins the run."""
        if cls.taken is None:
            cls.taken = cls(patience, host, grace, min_ranks, entrance)
        return cls.taken

    def _regroup(self, channel: Channel, error: PeerLost | GroupChanged) -> Runtime:
        """Return the runtime of a loop in the next group."""
        assert self._runtime.regroup is not None
        self._runtime = self._runtime.regroup(error)
        return intercepted(self._runtime, channel)

    def channel(self) -> Runtime:
        """Return the runtime of the next loop, whose messages no other loop sees."""
        return intercepted(self._runtime, Channel(next(self._channels)))

    @functools.cached_property
    def beside(self) -> Runtime:
        """The runtime for what is sent beside all loops."""
        return self.channel()

    def begin_loop(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Any,
        strategy: Strategy,
        **settings: Any,
    ) -> OwnLoop:
        """Collective: end the loops that are over once `model` is distributed; begin one, with the
        `settings` of `OwnLoop`.

        Raises `InputError` where a loop that goes on, or the new one, has ranks that only serve:
        they do so for one loop at a time.
        """
        parameters = set(model.parameters())
        self.end(lambda loop: loop.begun or loop.trains(parameters), optimizer)
        for each in (strategy, *(loop.strategy for loop in self._loops)):
            if self._loops and may_serve(each, self._runtime.ranks):
                raise InputError(
                    f"{each!r} has ranks that only serve, which do so for one loop at a time: "
                    "train models by turns with placement='beside', or under all-reduce"
                )
        channel = Channel(next(self._channels))
        regroup = None
        if self._min_ranks is not None and self._runtime.regroup is not None:
            if channel.number:
                raise InputError("min_ranks: distribute one model alone, or leave it out")
            regroup = functools.partial(self._regroup, channel)
        loop = OwnLoop(
            intercepted(self._runtime, channel), model, optimizer, batches, strategy,
            regroup=regroup, enters=self._enters, **settings,
        )  # fmt: skip
        self._loops.append(loop)
        self.newest = loop
        return loop

    def end(
        self, is_over: Callable[[OwnLoop], bool], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Collective: end the loops that are over. One of them may hand over its `optimizer`."""
        over = [loop for loop in self._loops if is_over(loop)]
        self._loops = [loop for loop in self._loops if loop not in over]
        for loop in over:
            loop.finish(goes_on=True)
            loop.close(handed_over=loop.optimizer is optimizer)

    def _note(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if self._enters and issubclass(kind, KeyboardInterrupt):
            self._wish()  # the run goes on without this rank, whose process ends by that
            assert self._thread is not None
            self._thread.join(LEAVING_SECONDS)
            os._exit(1)
        self._error = error
        # These only follow from another rank's failure, whose message is printed at the end.
        if not isinstance(error, (PeerLost, RunAborted)):
            self._hook(kind, error, traceback)

    def _end(self) -> None:
        if self._error is None:
            self._runtime.reporter.activity(RankActivity.SCRIPT_OVER)
            try:
                for loop in self._loops:
                    loop.finish()
            except BaseException as error:
                self._error = error
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        if isinstance(self._failure, RunFailed):
            only_here = not isinstance(self._failure, RunEnded)
            if not self._told and (self._first_of_node or only_here):
                self._tell(str(self._failure))
            os._exit(1)  # an exit status cannot be changed otherwise any more

"""All ranks of a run in this process, from their start to what they report."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy
import torch
from torch.utils.data import IterableDataset

from orchestra.cluster import Cluster, Jitter, Node
from orchestra.cluster.nodes import DEFAULT, EVENLY, LogNormal, Overhead, Sharing
from orchestra.engines.events import Failed, Finished, Heartbeat, describe, failed_text
from orchestra.engines.failure_detector import Limits
from orchestra.engines.live import LiveFile
from orchestra.engines.random_streams import RandomStreams, Streams, seed
from orchestra.engines.simulation.contexts import GreenletContext
from orchestra.engines.simulation.costs import ChargedCompute, Costs, SimulatedCompute
from orchestra.engines.simulation.evaluate import is_compiled
from orchestra.engines.simulation.faults import Faults
from orchestra.engines.simulation.kernel import Deadlock, Flow, Kernel
from orchestra.engines.simulation.rendezvous import MAX_FOLLOWED
from orchestra.engines.simulation.transport import SimulatedTransport
from orchestra.engines.simulation.world import World
from orchestra.errors import InputError, RunFailed
from orchestra.records.report import Counters
from orchestra.worker.runtime import (
    PassingReporter,
    Reporter,
    Runtime,
    chosen_threads,
    usable_cores,
)

NOT_COMPILED = (
    "simulating so many ranks is slow, since the compiled part is missing: install Orchestra with "
    "a C compiler on the path"
)

T = TypeVar("T")
Program = Callable[[Runtime], Any]


@dataclass(frozen=True)
class SimulationOutcome:
    """What became of a simulated run."""

    results: tuple[Any, ...]  # what the program returned, by rank; None for one that was left out
    wall_seconds: float  # that the simulation took
    sent: tuple[Mapping[int, int], ...] = ()  # by rank, bytes to each other, by its stopwatch
    seconds: float = 0.0  # of the stopwatch that ran longest
    left_out: dict[int, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    failure: str | None = None  # why the run failed
    bad_input: str | None = None  # why it could not be begun
    node: str | None = None  # of several, that of the only process
    alone: Mapping[str, float] = field(default_factory=dict)  # samples/s of each node by itself

    def check(self) -> None:
        """Raise `InputError` if it could not be begun, `RunFailed` if it failed."""
        if self.bad_input is not None:
            raise InputError(self.bad_input)
        if self.failure is not None:
            raise RunFailed(self.failure)


class Simulation:
    """`ranks` ranks of one program on a cluster, in virtual time, in this process.

    Args:
        outer: where progress and notices go, and where the user's wish to stop comes from.
        seed_number: of the jitter.
        sharing: of cores among threads.
        jitter: of the durations of compute, on nodes that do not say.
        patience: of the watcher, in seconds, where the cluster has faults.
        min_ranks: with which the run goes on after a fault, at least.
        threads: of each rank; None: its share of the cores of its node.
        arithmetic: how many threads of this machine compute each rank's values; by default
            `OMP_NUM_THREADS`, else one, or all cores for a rank that is alone.
        values: whether tensors have any. Without them updates are charged and not carried out, and
            there are no random streams.
        pace: of a rank, by what the duration of compute in each of its steps is multiplied, in
            place of jitter and drift; the last one holds for further steps, 1 for other ranks.
        live: where the ranks' beats are written down for whoever watches the run.
    """

    def __init__(
        self,
        cluster: Cluster,
        ranks: int,
        costs: Costs,
        overhead: Overhead,
        outer: Reporter,
        *,
        seed_number: int = 0,
        sharing: Sharing = EVENLY,
        jitter: Jitter | None = None,
        patience: float = Limits.patience,
        min_ranks: int = 1,
        threads: int | None = None,
        arithmetic: Sequence[int] | None = None,
        values: bool = True,
        pace: Mapping[int, Sequence[float]] | None = None,
        live: LiveFile | None = None,
    ) -> None:
        self._values = values
        self._threads = cluster.threads_of(ranks, threads)
        own = chosen_threads(os.environ) or (1 if ranks > 1 else len(usable_cores()))
        self._arithmetic = arithmetic or [own] * ranks
        self._streams = RandomStreams()
        self._kernel = Kernel(self._on_turn) if values else Kernel(contexts=GreenletContext)
        self._seed, self._jitter = seed_number, jitter
        exact = all(self._jitter_of(node) is None for node in cluster.nodes)
        unfairness = 0.0 if exact else overhead.tcp.unfairness
        self._world = World(
            self._kernel, cluster, ranks, overhead, costs.flops, sharing, self._threads,
            self._shares(unfairness) if unfairness else None,
        )  # fmt: skip
        self._ranks, self._costs, self._outer = ranks, costs, outer
        self._pace, self._live = pace, live
        self._fraction: float | None = None
        self._drifts = {}
        for place, node in enumerate(cluster.nodes):
            if node.drift is not None:  # seeded unlike any rank
                drift_seed = numpy.random.SeedSequence(seed_number, spawn_key=(place,))
                self._drifts[node.name] = node.drift.factors(numpy.random.default_rng(drift_seed))
        self.consumed = 0  # samples, by all ranks together
        self._notices: list[str] = []
        self._beats = 0  # of ranks that compute
        self._results: list[Any] = [None] * ranks
        self._reporters = [SimulatedReporter(outer, rank, self) for rank in range(ranks)]
        self._shared: list[tuple[Any, Streams]] = []
        self._faults: Faults | None = None
        if cluster.faults:
            beat, notice = self._heartbeat, self.notice
            self._faults = Faults(cluster, ranks, self._world, beat, patience, notice, min_ranks)

    def run(self, program: Program) -> SimulationOutcome:
        """Run `program` on every rank, until all have ended or one has failed."""
        began = time.monotonic()
        failure = bad_input = None
        thresholds = gc.get_threshold()
        # many objects live as long as a step of all ranks; without values, as long as the run
        gc.set_threshold(10_000 if self._values else 1_000_000, 10, 10)
        if self._ranks > MAX_FOLLOWED and not is_compiled():
            self.notice(NOT_COMPILED)
        for rank in range(self._ranks):
            self._start(rank, program)
        try:
            self._kernel.run()
        except _RankFailed as failed:
            rank, error = failed.args
            described = describe(error)
            phase = self._reporters[rank].current_phase
            if described.bad_input and (phase == "set-up" or not self._values):
                bad_input = described.message
            else:
                failure = failed_text(f"rank {rank}", described)
        except Deadlock as deadlock:
            failure = f"the run hangs: {deadlock}"
        except RunFailed as failed:
            failure = str(failed)
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
            if failure is not None and self._live is not None:
                self._write(self._live)
            # Also after a good end: background flows may be left, which have to be unwound.
            self._kernel.abort(failure or "the run has ended")
            self._streams.give(None)
        meters = [port.meter for port in self._world.net.ports]
        for meter in meters:
            meter.settle()
        left_out = {} if self._faults is None else self._faults.left_out
        return SimulationOutcome(
            tuple(None if rank in left_out else r for rank, r in enumerate(self._results)),
            time.monotonic() - began,
            sent=tuple(meter.sent for meter in meters),
            seconds=max(meter.seconds for meter in meters),
            left_out=left_out,
            notices=tuple(self._notices),
            failure=failure,
            bad_input=bad_input,
        )

    def notice(self, text: str) -> None:
        """Show the user one line."""
        self._notices.append(text)
        self._outer.notice(text)

    def look(self, fraction: float | None) -> None:
        """Called after a rank's step: from time to time, write down how far all are."""
        self._fraction = fraction
        if self._live is not None and self._live.due():
            self._write(self._live)

    def _write(self, live: LiveFile) -> None:
        """Write the live file, without whom ranks wait for: a flow's turn is under way."""
        for rank, reporter in enumerate(self._reporters):
            beat = Heartbeat(
                rank, step=reporter.current_step, samples=reporter.samples,
                fraction=self._fraction, phase=reporter.current_phase, counters=reporter.counters,
            )  # fmt: skip
            live.on_beat(beat)
            live.slow.on_beat(beat)
        live.write()

    def _start(self, rank: int, program: Program) -> None:
        life = functools.partial(program, self._runtime(rank))
        flow = self._kernel.start(rank, life, self._world.thread(rank, main=True), main=True)
        flow.on_end.append(self._ended)

    def _ended(self, flow: Flow) -> None:
        rank, self._results[flow.rank] = flow.rank, flow.result
        failure = None if flow.error is None else describe(flow.error)
        if self._faults is not None and (failure is None or failure.lost is not None):
            self._faults.ended(Finished(rank) if failure is None else Failed(rank, failure))
        elif flow.error is not None:
            self._kernel.fail(_RankFailed(rank, flow.error))

    def _heartbeat(self, rank: int) -> Heartbeat:
        """Return the heartbeat of `rank`; `activity` changes as long as anything goes on."""
        reporter, wait = self._reporters[rank], self._kernel.wait_of(rank)
        for_ranks, what = wait or ((), "")
        self._beats += wait is None
        moved = self._beats if wait is None else int(self._world.moved(rank))
        return Heartbeat(
            rank,
            step=reporter.current_step,
            phase=reporter.current_phase,
            activity=self._kernel.turns_of[rank] + moved,
            waits_for=for_ranks,
            waits_what=what,
            expendable=reporter.is_expendable,
        )

    def _runtime(self, rank: int) -> Runtime:
        world, node = self._world, self._world.nodes[rank]
        port = world.net.ports[rank]
        factors = self._factors(node) if self._pace is None else self._recorded(rank)
        port.native = functools.cache(lambda: world.native(rank))
        kind = SimulatedCompute if self._values else ChargedCompute
        threads = self._threads[rank]
        compute = kind(self._kernel, self._costs, factors, port.mark_caches_cold, threads)
        return Runtime(
            rank,
            self._ranks,
            SimulatedTransport(port, world.rendezvous),
            compute,
            self._reporters[rank],
            seed if self._values else lambda number: None,
            local_rank=world.local_ranks[rank],
            clock="virtual",
            node=node.name,
            share=self._share,
            warms_up=False,
            stopwatch=port.meter.run,
            threads=threads,
        )

    def _factors(self, node: Node) -> Callable[[Flow], float]:
        """Return what gives the factor of a piece of work that a flow begins on `node`.

        Each flow draws its own, so that it does not matter which one goes on first.
        """
        jitter = self._jitter_of(node)
        drift = self._drifts.get(node.name)

        @functools.cache
        def generator(rank: int, number: int) -> numpy.random.Generator:
            # By rank and flow: the order of turns must not change what is drawn.
            further = (number,) if number else ()
            return numpy.random.default_rng((self._seed, rank, *further))

        def factor(flow: Flow) -> float:
            drawn = 1.0 if jitter is None else jitter.draw(generator(flow.rank, flow.number))
            return drawn if drift is None else drawn * drift(self._kernel.here())

        return factor

    def _jitter_of(self, node: Node) -> Jitter | None:
        return self._jitter if node.jitter == DEFAULT else node.jitter

    def _shares(self, unfairness: float) -> Callable[[int, int], float]:
        """Return what draws the share of a link that a message from one rank to another has."""
        share = LogNormal(unfairness)

        @functools.cache
        def generator(source: int, target: int) -> numpy.random.Generator:
            return numpy.random.default_rng((self._seed, source, target, 1))  # unlike any flow's

        return lambda source, target: share.draw(generator(source, target))

    def _recorded(self, rank: int) -> Callable[[Flow], float]:
        """Return what gives the factor of a piece of work in the step under way of `rank`."""
        assert self._pace is not None
        factors, reporter = self._pace.get(rank) or (1.0,), self._reporters[rank]
        return lambda flow: factors[min(reporter.current_step, len(factors) - 1)]

    def _on_turn(self, flow: Flow) -> None:
        """Set the number of intra-op threads, and a main flow's random streams.

        The counts are those of the arithmetic on this machine, whatever a rank is charged for.
        """
        threads = self._arithmetic[flow.rank]
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if flow.main:
            self._streams.give(flow.rank)

    def _share(self, make: Callable[[], T]) -> T:
        """Make a value once for all ranks; random streams go on as if each had made it.

        An `IterableDataset` keeps its place in itself, so that each rank needs one of its own.
        """
        if self._shared:
            value, streams = self._shared[0]
            if self._values:
                self._streams.go_on_from(streams)
            shared: T = value
            return shared
        value = make()
        if not isinstance(getattr(value, "train", None), IterableDataset):
            self._shared.append((value, self._streams.present()))
        return value


@dataclass
class SimulatedReporter(PassingReporter):
    """One rank's; what it says goes to the `inner` one, that of the process."""

    rank: int
    simulation: Simulation
    current_phase: str = ""
    current_step: int = 0
    samples: int = 0
    is_set_up: bool = False
    is_expendable: bool = False
    counters: Counters | None = None

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.current_step = step
        self.simulation.consumed += samples - self.samples
        self.samples, self.counters = samples, counters
        whole = self.simulation.consumed
        self.inner.progress(step=step, samples=whole, loss=loss, fraction=fraction)
        self.simulation.look(fraction)

    def phase(self, name: str) -> None:
        if name != self.current_phase:
            self.current_phase = name
            if name == "training" and not self.is_set_up:
                self.is_set_up = True
                gc.freeze()  # what was made until now lives as long as the run
            if self.rank == 0:
                self.inner.phase(name)

    def expendable(self, yes: bool) -> None:
        self.is_expendable = yes

    def elastic(self, program: str, *, rests: bool = False) -> None:
        """Do nothing: no groups are made in virtual time."""

    def newcomers_wait(self) -> bool:
        return False

    def group_is_over(self) -> bool:
        return False

    def notice(self, text: str) -> None:
        self.simulation.notice(text)


class _RankFailed(Exception):
    """The rank, and what it raised."""

"""All ranks of a run in this process, from their start to what they report."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import numpy
import torch
from torch.utils.data import IterableDataset

from orchestra.cluster import Cluster, Jitter, Node
from orchestra.cluster.nodes import DEFAULT, EVENLY, LogNormal, Overhead, Sharing
from orchestra.engines.events import Failed, Finished, Heartbeat, describe, failed_text
from orchestra.engines.failure_detector import Limits, Refusal
from orchestra.engines.injection import Inject
from orchestra.engines.live import LiveFile
from orchestra.engines.random_streams import RandomStreams, Streams, seed
from orchestra.engines.simulation.contexts import GreenletContext
from orchestra.engines.simulation.costs import ChargedCompute, Costs, SimulatedCompute
from orchestra.engines.simulation.evaluate import is_compiled
from orchestra.engines.simulation.faults import Faults
from orchestra.engines.simulation.injection import SimulatedInjector
from orchestra.engines.simulation.kernel import Deadlock, Flow, Kernel
from orchestra.engines.simulation.network import Port
from orchestra.engines.simulation.rank import GroupMember, SimulatedReporter
from orchestra.engines.simulation.rendezvous import MAX_FOLLOWED
from orchestra.engines.simulation.transport import SimulatedTransport
from orchestra.engines.simulation.world import World
from orchestra.errors import InputError, RunFailed
from orchestra.worker.interception import intercepted
from orchestra.worker.runtime import (
    RankActivity,
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
Newcomer = Callable[[RankActivity, Runtime], Any]
"""The program of a rank that joins; its first argument is the phase in which it waits."""


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
    """`ranks` ranks of one program on a cluster, and those that join, in virtual time, in this
    process.

    Args:
        outer: where progress and notices go, and where the user's wish to stop comes from.
        seed_number: of the jitter.
        sharing: of cores among threads.
        jitter: of the durations of compute, on nodes that do not say.
        patience: of the watcher, in seconds, where the cluster has faults.
        min_ranks: with which the run goes on after a fault, at least.
        refusal: why it does not go on with so many ranks; None if it does.
        threads: of each rank; None: its share of the cores of its node.
        arithmetic: how many threads of this machine compute each rank's values; by default
            `OMP_NUM_THREADS`, else one, or all cores for a rank that is alone.
        values: whether tensors have any. Without them updates are charged and not carried out, and
            there are no random streams.
        pace: of a rank, by what the duration of compute in each of its steps is multiplied, in
            place of jitter and drift; the last one holds for further steps, 1 for other ranks.
        live: the file of the ranks' beats, for those who watch the run.
        speeds: gradients a second of each rank, where its parts of a step follow from that.
        injections: faults that ranks inject into themselves.
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
        refusal: Refusal = lambda _: None,
        threads: int | None = None,
        arithmetic: Sequence[int] | None = None,
        values: bool = True,
        pace: Mapping[int, Sequence[float]] | None = None,
        live: LiveFile | None = None,
        speeds: tuple[float, ...] = (),
        injections: Mapping[int, list[Inject]] = MappingProxyType({}),
    ) -> None:
        self._values = values
        self._threads, self._joins = cluster.threads_of(ranks, threads), cluster.joins
        slots = len(self._threads)
        own = chosen_threads(os.environ) or (1 if slots > 1 else len(usable_cores()))
        self._arithmetic = arithmetic or [own] * slots
        self._streams = RandomStreams()
        self._kernel = Kernel(self._on_turn) if values else Kernel(contexts=GreenletContext)
        self._seed, self._jitter = seed_number, jitter
        exact = all(self._jitter_of(node) is None for node in cluster.nodes)
        unfairness = 0.0 if exact else overhead.tcp.unfairness
        self._world = World(
            self._kernel, cluster, ranks, overhead, costs.flops, sharing, self._threads,
            self._shares(unfairness) if unfairness else None,
            faults=bool(cluster.faults or injections),
        )  # fmt: skip
        self._ranks, self._costs, self._outer = ranks, costs, outer
        self._pace, self._live = pace, live
        self._speeds, self._bandwidths = speeds, cluster.bandwidths_of(ranks)
        self._fraction: float | None = None
        self._drifts = {}
        for place, node in enumerate(cluster.nodes):
            if node.drift is not None:  # seeded unlike any rank
                drift_seed = numpy.random.SeedSequence(seed_number, spawn_key=(place,))
                self._drifts[node.name] = node.drift.factors(numpy.random.default_rng(drift_seed))
        self.consumed = 0  # samples, by all ranks together
        self._notices: list[str] = []
        self._beats = 0  # of ranks that compute
        self._results: list[Any] = [None] * slots
        self._members = [
            GroupMember(slot, net, self._runtime)
            for slot in range(slots)
            for net in [self._world.net if slot < ranks else self._world.alone(slot)]
        ]
        self._reporters = [SimulatedReporter(outer, member, self) for member in self._members]
        self._computes = [self._compute(member) for member in self._members]
        self._shared: list[tuple[Any, Streams]] = []
        self._faults: Faults | None = None
        self._injectors: dict[int, SimulatedInjector] = {}
        if cluster.faults or injections:
            beat, notice = self._heartbeat, self.notice
            self._faults = Faults(
                cluster, self._members, ranks, self._world, beat, patience, notice, min_ranks,
                refusal,
            )  # fmt: skip
            for slot, faults in injections.items():
                die = functools.partial(self._faults.die, slot)
                hold = functools.partial(self._faults.hold, slot)
                self._injectors[slot] = SimulatedInjector(faults, self._kernel, die, hold)

    def run(self, program: Program, newcomer: Newcomer | None = None) -> SimulationOutcome:
        """Run `program` on every rank, and `newcomer` on those that join, until all have ended or
        one has failed."""
        began = time.monotonic()
        failure = bad_input = None
        thresholds = gc.get_threshold()
        # many objects live as long as a step of all ranks; without values, as long as the run
        gc.set_threshold(10_000 if self._values else 1_000_000, 10, 10)
        if self._ranks > MAX_FOLLOWED and not is_compiled():
            self.notice(NOT_COMPILED)
        for rank in range(self._ranks):
            self._start(rank, program)
        for rank, join in enumerate(self._joins, self._ranks):
            assert newcomer is not None
            entering = functools.partial(
                newcomer, RankActivity.SPARE if join.spare else RankActivity.JOINING
            )
            self._kernel.at(join.at, functools.partial(self._enter, rank, entering))
        try:
            self._kernel.run()
        except _RankFailed as failed:
            rank, error = failed.args
            described = describe(error)
            activity = self._reporters[rank].current_activity
            if described.bad_input and (activity is RankActivity.SET_UP or not self._values):
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
        meters = self._world.meters
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

    def is_first(self, rank: int) -> bool:
        """Return whether `rank` is the first of those that are not lost, whose phase is shown."""
        left_out = {} if self._faults is None else self._faults.left_out
        return all(other in left_out for other in range(rank))

    def look_after_newcomers(self, rank: int) -> None:
        """Called when the state of a rank has changed: see `Faults.look_after_newcomers`."""
        if self._faults is not None:
            self._faults.look_after_newcomers(rank)

    def look(self, fraction: float | None) -> None:
        """Called after a rank's step: from time to time, write down how far all are."""
        self._fraction = fraction
        if self._live is not None and self._live.due():
            self._write(self._live)

    def _write(self, live: LiveFile) -> None:
        """Write the live file, without whom ranks wait for: a flow's turn is under way."""
        for rank, reporter in enumerate(self._reporters):
            if not self._kernel.started_of[rank]:
                continue  # it has not joined yet
            beat = Heartbeat(
                rank, step=reporter.current_step, samples=reporter.samples,
                activity=reporter.current_activity or RankActivity.TRAINING,
                fraction=self._fraction, counters=reporter.counters,
            )  # fmt: skip
            live.on_beat(beat)
            live.slow.on_beat(beat)
        live.write()

    def _enter(self, rank: int, program: Program) -> None:
        """From an event: let `rank` join."""
        assert self._faults is not None
        self._faults.join(rank)
        self._start(rank, program)

    def _start(self, rank: int, program: Program) -> None:
        runtime = self._members[rank].begin()

        def life() -> Any:
            if rank in self._injectors:
                self._injectors[rank].reach("start")
            return program(runtime)

        flow = self._kernel.start(rank, life, self._world.thread(rank, main=True), main=True)
        flow.on_end.append(self._ended)

    def _ended(self, flow: Flow) -> None:
        rank, self._results[flow.rank] = flow.rank, flow.result
        failure = None if flow.error is None else describe(flow.error)
        if self._faults is not None and (
            failure is None or failure.lost is not None or self._faults.is_newcomer(rank)
        ):
            self._faults.ended(Finished(rank) if failure is None else Failed(rank, failure))
        elif flow.error is not None:
            self._kernel.fail(_RankFailed(rank, flow.error))

    def _heartbeat(self, rank: int) -> Heartbeat:
        """Return the heartbeat of `rank`; `progress` changes as long as anything goes on."""
        reporter, wait = self._reporters[rank], self._kernel.wait_of(rank)
        for_ranks, what = wait or ((), "")
        self._beats += wait is None
        moved = self._beats if wait is None else int(self._world.moved(rank))
        return Heartbeat(
            rank,
            step=reporter.current_step,
            activity=reporter.current_activity or RankActivity.TRAINING,
            progress=self._kernel.turns_of[rank] + moved,
            waits_for=for_ranks,
            waits_what=what,
            expendable=reporter.is_expendable,
            elastic=reporter.elastic_program,
            rests=reporter.rests_first,
        )

    def _compute(self, member: GroupMember) -> SimulatedCompute:
        slot = member.slot
        node = self._world.nodes[slot]
        factors = self._factors(node) if self._pace is None else self._recorded(slot)
        kind = SimulatedCompute if self._values else ChargedCompute
        on_step, threads = member.mark_caches_cold, self._threads[slot]
        return kind(self._kernel, self._costs, factors, on_step, threads)

    def _runtime(self, member: GroupMember, port: Port) -> Runtime:
        """Return what the program of `member` works with in the group of `port`."""
        world, slot, members = self._world, member.slot, port.net.members
        regroup = None
        # Without values there is no state to go on from.
        if self._faults is not None and self._values:
            regroup = functools.partial(member.regroup, self._faults)
        runtime = Runtime(
            port.rank,
            len(members),
            SimulatedTransport(port, world.rendezvous),
            self._computes[slot],
            self._reporters[slot],
            seed if self._values else lambda number: None,
            local_rank=world.local_ranks[slot],
            clock="virtual",
            node=world.nodes[slot].name,
            share=self._share,
            warms_up=False,
            stopwatch=port.meter.run,
            speeds=_of(self._speeds, members) if self._speeds else (),
            bandwidths=_of(self._bandwidths, members),
            threads=self._threads[slot],
            members=members,
            regroup=regroup,
        )
        injector = self._injectors.get(slot)
        return runtime if injector is None else intercepted(runtime, injector)

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


@functools.lru_cache(maxsize=4)  # a thousand ranks share one tuple
def _of(values: tuple[float, ...], members: tuple[int, ...]) -> tuple[float, ...]:
    """Return the `values` of the members of a group."""
    return tuple(values[member] for member in members)


class _RankFailed(Exception):
    """The rank, and what it raised."""

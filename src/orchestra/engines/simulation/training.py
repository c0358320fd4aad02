"""A training run in virtual time: from its settings to its record. Imports without torch.

The simulation has a process of its own, which the launcher of real ranks starts and watches over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from orchestra.cluster import Channel, Cluster, Jitter, load_cluster
from orchestra.cluster.file import cluster_text
from orchestra.cluster.nodes import ASSUMED, DEFAULT, EVENLY, Overhead, Sharing
from orchestra.engines.live import Display, LiveFile, Progress, slow_ranks_of
from orchestra.engines.processes.launch import launch
from orchestra.engines.run import record_of, write_environment
from orchestra.engines.simulation.costs import (
    OVERHEAD,
    CalibratedCosts,
    Costs,
    CostSource,
    assumed_costs,
    cost_source_of,
)
from orchestra.records.record import CLUSTER, Link, Links, RunRecord, write_atomically, write_links
from orchestra.records.report import RankReport
from orchestra.strategies.base import roles_of
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run, Training

if TYPE_CHECKING:
    from orchestra.engines.simulation.memory import Memory
    from orchestra.engines.simulation.simulate import SimulationOutcome
    from orchestra.worker.runtime import Reporter, Runtime

Pace: TypeAlias = Mapping[int, Sequence[float]]
"""By rank, the factors on the durations of compute in each of its steps; see `Simulation`."""


def train_run(
    run: Run,
    folder: Path,
    *,
    quiet: bool = False,
    progress: Progress | None = None,
    pace: Pace | None = None,
) -> RunRecord:
    """Train `run` in virtual time, on the cluster that it names; its records go into `folder`.

    `progress` is that of the runs that it is one of; for `pace` see `Simulation`.

    Raises:
        InputError: the strategy cannot run on that many ranks, or there is no such cluster or
            calibration.
        RunFailed: names the first cause; what was recorded until then stays in `folder`.
    """
    assignment = assigned(run, folder, pace)
    write_environment(folder)
    alone = Single().roles(1)
    with Display(run, alone, quiet=quiet, progress=progress) as display:
        launched = launch(
            program, assignment, 1, patience=run.training.patience, on_event=display.on_event,
            injects=False,
        )  # fmt: skip
    (result,) = launched.results
    return record_from(assignment, cast("SimulationOutcome", result))


def record_from(assignment: Assignment, outcome: SimulationOutcome) -> RunRecord:
    """Make the record of a simulated run from its outcome; files go into its folder.

    Raises:
        InputError: it could not be begun.
        RunFailed: names the first cause.
    """
    run, source = assignment.run, assignment.source
    outcome.check()
    cluster = load_cluster(run.training.cluster, where="cluster", folder=Path())
    if outcome.node is not None:
        cluster = replace(cluster, placement=(outcome.node,))
    return record_of(
        run,
        cast("tuple[RankReport | None, ...]", outcome.results),
        assignment.folder,
        {},
        left_out=outcome.left_out,
        notices=outcome.notices,
        wall_seconds=outcome.wall_seconds,
        costs=source.text,
        node=outcome.node,
        nodes=cluster.nodes_of(assignment.ranks),
        alone=outcome.alone,
        costs_doubts=source.doubts,
    )


@dataclass(frozen=True)
class Assignment:
    """What to simulate."""

    run: Run
    folder: Path
    ranks: int
    source: CostSource
    pace: Pace | None = None


def assigned(run: Run, folder: Path, pace: Pace | None = None) -> Assignment:
    """Make the assignment to simulate `run`, whose records are to go into `folder`.

    Raises:
        InputError: the strategy cannot run on that many ranks, or there is no such calibration.
    """
    ranks = len(roles_of(run.strategy, run.training.ranks).shares)
    return Assignment(run, folder.absolute(), ranks, cost_source_of(run), pace)


def program(runtime: Runtime, assignment: Assignment) -> SimulationOutcome:
    """Run the simulation; the program of its process, here so that a launcher can name it."""
    return carried_out(assignment, runtime.reporter)


def carried_out(assignment: Assignment, reporter: Reporter) -> SimulationOutcome:
    """Simulate what is assigned in this process, and return the outcome."""
    run, folder = assignment.run, assignment.folder
    cluster = load_cluster(run.training.cluster, where="cluster", folder=Path())
    roles = roles_of(run.strategy, run.training.ranks)
    live = LiveFile(folder, slow_ranks_of(run, roles, lambda _: None))
    outcome, cluster, wire = simulate_run(
        run, assignment.source, cluster, assignment.ranks, folder, reporter, assignment.pace, live
    )
    if outcome.failure is None:
        live.remove()
    if outcome.failure is None and outcome.bad_input is None:
        keep_links(folder, cluster, outcome, wire)
    alone = assignment.ranks == 1 < len(cluster.nodes)
    return replace(outcome, sent=(), node=cluster.nodes_of(1)[0].name if alone else None)


def simulate_run(
    run: Run,
    source: CostSource,
    cluster: Cluster,
    ranks: int,
    folder: Path,
    reporter: Reporter,
    pace: Pace | None = None,
    live: LiveFile | None = None,
) -> tuple[SimulationOutcome, Cluster, float]:
    """Simulate `run` on `cluster` in this process, on `ranks` processes of it.

    Returns:
        What became of it; the cluster, in which one process has the best node; and the bytes on a
        link for each byte of a message.
    """
    from orchestra.engines.simulation.injection import simulated_injections
    from orchestra.engines.simulation.memory import Memory
    from orchestra.engines.simulation.simulate import Simulation
    from orchestra.trainer.program import train

    costs, overhead, sharing, jitter = _charges(run, source)
    memory = Memory(run)
    if isinstance(run.strategy, Single):
        node = memory.best_node(cluster, costs)
        cluster = replace(cluster, placement=(node.name,))
    memory.require_room(cluster, ranks)
    overhead = cluster.overhead or overhead
    speeds: tuple[float, ...] = ()
    if run.measures_shares:
        speeds = described_speeds(cluster, ranks, costs, overhead, sharing, run.training)

    def rank_program(rank: Runtime) -> RankReport:
        return train(rank, (run, folder))

    outcome = Simulation(
        cluster, ranks, costs, overhead, reporter, seed_number=run.seed,
        sharing=sharing, jitter=jitter, patience=run.training.patience,
        min_ranks=run.training.min_ranks or 1,
        threads=run.training.threads, values=run.training.tensors == "real", pace=pace, live=live,
        speeds=speeds, injections=simulated_injections(ranks),
    ).run(rank_program)  # fmt: skip
    if len(cluster.nodes) > 1:
        outcome = replace(outcome, alone=speeds_alone(memory, cluster, ranks, costs, jitter))
    return outcome, cluster, overhead.wire if cluster.tcp else 1.0


def _charges(run: Run, source: CostSource) -> tuple[Costs, Overhead, Sharing, Jitter]:
    """Return the costs of computing, messages and shared cores, calibrated or assumed."""
    calibration, task = source.calibration, source.task
    if calibration is None or task is None:
        return assumed_costs(run), OVERHEAD, EVENLY, ASSUMED
    return (
        CalibratedCosts(calibration, task, accumulation=run.training.accumulation),
        calibration.overhead(task),
        calibration.sharing(task),
        task.jitter or ASSUMED,
    )


def described_speeds(
    cluster: Cluster,
    ranks: int,
    costs: Costs,
    overhead: Overhead,
    sharing: Sharing,
    training: Training,
) -> tuple[float, ...]:
    """Return the gradients of a batch that each rank computes in a second, all at once.

    Jitter and faults are left out: nobody can plan for them.
    """
    from orchestra.engines.simulation.simulate import Simulation
    from orchestra.worker.runtime import SilentReporter, Work

    steady = replace(
        cluster, nodes=tuple(replace(node, jitter=None) for node in cluster.nodes), faults=()
    )

    def program(runtime: Runtime) -> float:
        began = runtime.transport.now()
        runtime.compute.run(Work("gradient", training.batch_size), lambda: None)
        return runtime.transport.now() - began

    outcome = Simulation(
        steady, ranks, costs, overhead, SilentReporter(),
        sharing=sharing, threads=training.threads, values=False,
    ).run(program)  # fmt: skip
    assert outcome.failure is None
    return tuple(1 / seconds for seconds in outcome.results)


def speeds_alone(
    memory: Memory, cluster: Cluster, ranks: int, costs: Costs, jitter: Jitter
) -> dict[str, float]:
    """Samples/s that each node with any of `ranks` ranks does alone, in the mean: one process with
    all of its cores, or one on each of its devices that has a rank, in steps of the global batch.

    `jitter` is that of nodes that do not say. Slow-downs and faults are left out.
    """
    speeds = {}
    for node, number in Counter(cluster.nodes_of(ranks)).items():
        own = jitter if node.jitter == DEFAULT else node.jitter
        processes = min(number, max(node.devices, 1))
        speed = processes * memory.speed_alone(node, costs)
        speeds[node.name] = speed / (1.0 if own is None else own.expectation)
    return speeds


# What the links carried


def keep_links(folder: Path, cluster: Cluster, outcome: SimulationOutcome, wire: float) -> None:
    """Write what was simulated, and what its links carried, into the `folder` of the run.

    `wire` are bytes on a link for each byte of a message.
    """
    write_atomically(folder / CLUSTER, cluster_text(cluster))
    write_links(folder, links_of(cluster, outcome.sent, outcome.seconds, wire))


def links_of(
    cluster: Cluster, sent: Sequence[Mapping[int, int]], seconds: float, wire: float
) -> Links:
    """Return what each link carried, if rank i sent `sent[i]` bytes to each other rank.

    `wire` are bytes on a link between nodes for each byte of a message.
    """
    nodes = cluster.nodes_of(len(sent))
    carried = dict.fromkeys((channel.name for channel in _within_reach(cluster, len(sent))), 0)
    for source, targets in enumerate(sent):
        for target, size in targets.items():
            for channel in cluster.path(nodes[source], nodes[target]).channels:
                carried[channel.name] += size
    links = [
        Link(name, bandwidth, size, size * each / (bandwidth * seconds) if seconds > 0 else 0.0)
        for name, size in carried.items()
        for bandwidth in [cluster.channels[name].bandwidth]
        for each in [1.0 if name.endswith(" loopback") else wire]
    ]
    return Links.of(seconds, links)


def _within_reach(cluster: Cluster, ranks: int) -> list[Channel]:
    """Return channels of switches, of nodes with ranks, and loopbacks of nodes with several."""
    on = Counter(node.name for node in cluster.nodes_of(ranks))
    between = {*on, *(switch.name for switch in cluster.switches)} if len(on) > 1 else set()
    found = []
    for channel in cluster.channels.values():
        owner, _, kind = channel.name.rpartition(" ")
        if on[owner] > 1 if kind == "loopback" else owner in between:
            found.append(channel)
    return found

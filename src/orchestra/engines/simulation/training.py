"""A training run in virtual time: from its settings to its record. Imports without torch.

The simulation has a process of its own, which the launcher of real ranks starts and watches over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from orchestra.cluster import Channel, Cluster, Jitter, Node, load_cluster
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
from orchestra.errors import InputError
from orchestra.records.files import CLUSTER, steps_file, write_atomically
from orchestra.records.links import LinkLoad, Links
from orchestra.records.record import RunRecord
from orchestra.records.report import RankReport
from orchestra.records.store import write_links
from orchestra.strategies.base import refusal_of, roles_of
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run, Training

if TYPE_CHECKING:
    from orchestra.engines.simulation.memory import Memory
    from orchestra.engines.simulation.simulate import SimulationOutcome
    from orchestra.worker.runtime import RankActivity, Reporter, Runtime

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
        cluster = cluster.alone_on(outcome.node)
    return record_of(
        run,
        cast("tuple[RankReport | None, ...]", outcome.results),
        assignment.folder,
        {},
        left_out=outcome.left_out,
        notices=outcome.notices,
        wall=outcome.wall_seconds,
        costs=source,
        node=outcome.node,
        nodes=used_nodes(cluster, assignment.ranks, outcome),
        alone=outcome.alone,
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
        for rank in range(len(outcome.results)):
            if not was_there(rank, assignment.ranks, outcome):
                steps_file(folder, rank).unlink(missing_ok=True)
    there = cluster.nodes_of(assignment.ranks)
    alone = len(there) == 1 < len(cluster.nodes)
    return replace(outcome, sent=(), node=there[0].name if alone else None)


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
        cluster = cluster.alone_on(node.name)
    require_joinable(run, cluster)
    memory.require_room(cluster, ranks)
    overhead = cluster.overhead or overhead
    speeds: tuple[float, ...] = ()
    if run.measures_shares:
        speeds = described_speeds(cluster, ranks, costs, overhead, sharing, run.training)

    def rank_program(rank: Runtime) -> RankReport:
        return train(rank, (run, folder))

    def newcomer(activity: RankActivity, rank: Runtime) -> RankReport:
        return train(rank, (run, folder), entering=activity)

    outcome = Simulation(
        cluster, ranks, costs, overhead, reporter, seed_number=run.seed,
        sharing=sharing, jitter=jitter, patience=run.training.patience,
        min_ranks=run.training.min_ranks or 1, refusal=partial(refusal_of, run.strategy),
        threads=run.training.threads, values=run.training.tensors == "real", pace=pace, live=live,
        speeds=speeds, injections=simulated_injections(ranks + len(cluster.joins)),
    ).run(rank_program, newcomer)  # fmt: skip
    if len(cluster.nodes) > 1:
        nodes = used_nodes(cluster, ranks, outcome)
        outcome = replace(outcome, alone=speeds_alone(memory, nodes, costs, jitter))
    return outcome, cluster, overhead.wire if cluster.tcp else 1.0


def require_joinable(run: Run, cluster: Cluster) -> None:
    """Raise `InputError` where ranks are to join `run` on `cluster`, and cannot."""
    if not cluster.joins:
        return
    training, what = run.training, f"cluster {cluster.name}: Join"
    if training.min_ranks is None:
        raise InputError(f"{what} needs a run with min_ranks: set it, or leave out Join")
    if training.tensors == "shapes":
        raise InputError(f"{what} hands over values: set tensors to real, or leave out Join")
    if not run.is_elastic:
        raise InputError(
            f"{what} takes a run whose settings hold for another number of ranks: leave out Join, "
            "or what is of each rank by itself (sharding, shares, record_order)"
        )


def costs_of(run: Run) -> Costs:
    """Return what computation costs in a simulation of `run`.

    Raises:
        InputError: there is no such calibration, or the operations cannot be counted.
    """
    return _charges(run, cost_source_of(run))[0]


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
    """Return the gradients of a batch that each rank computes in a second, all at once, those that
    join included.

    Jitter and faults are left out: nobody can plan for them.
    """
    from orchestra.engines.simulation.simulate import Simulation
    from orchestra.worker.runtime import SilentReporter, Work

    there = tuple(node.name for node in cluster.nodes_of(ranks))
    nodes = tuple(replace(node, jitter=None) for node in cluster.nodes)
    steady = replace(cluster, nodes=nodes, placement=there, faults=())

    def program(runtime: Runtime) -> float:
        began = runtime.transport.now()
        runtime.compute.run(Work("gradient", training.batch_size), lambda: None)
        return runtime.transport.now() - began

    outcome = Simulation(
        steady, len(there), costs, overhead, SilentReporter(),
        sharing=sharing, threads=training.threads, values=False,
    ).run(program)  # fmt: skip
    assert outcome.failure is None
    return tuple(1 / seconds for seconds in outcome.results)


def used_nodes(cluster: Cluster, ranks: int, outcome: SimulationOutcome) -> tuple[Node, ...]:
    """Return the node of each of the `ranks` at the start, and of each rank that was taken in."""
    nodes = enumerate(cluster.nodes_of(ranks))
    return tuple(node for rank, node in nodes if was_there(rank, ranks, outcome))


def was_there(rank: int, ranks: int, outcome: SimulationOutcome) -> bool:
    """Return whether `rank` was one of the `ranks` at the start, or was taken in."""
    return rank < ranks or outcome.results[rank] is not None or rank in outcome.left_out


def speeds_alone(
    memory: Memory, nodes: Sequence[Node], costs: Costs, jitter: Jitter
) -> dict[str, float]:
    """Samples/s that each node does alone, in the mean: one process with all of its cores, or one
    on each of its devices that has a rank, in steps of the global batch. `nodes` has that of each
    rank.

    `jitter` is that of nodes that do not say. Slow-downs and faults are left out.
    """
    speeds = {}
    for node, number in Counter(nodes).items():
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
    """Return what each link carried, if rank i sent `sent[i]` bytes to each other rank, those that
    joined included.

    `wire` are bytes on a link between nodes for each byte of a message.
    """
    nodes = cluster.nodes_of(len(sent) - len(cluster.joins))
    carried = dict.fromkeys((channel.name for channel in _within_reach(cluster, nodes)), 0)
    for source, targets in enumerate(sent):
        for target, size in targets.items():
            for channel in cluster.path(nodes[source], nodes[target]).channels:
                carried[channel.name] += size
    links = [
        LinkLoad(name, bandwidth, size, size * each / (bandwidth * seconds) if seconds > 0 else 0.0)
        for name, size in carried.items()
        for bandwidth in [cluster.channels[name].bandwidth]
        for each in [1.0 if name.endswith(" loopback") else wire]
    ]
    return Links.of(seconds, links)


def _within_reach(cluster: Cluster, nodes: Sequence[Node]) -> list[Channel]:
    """Return channels of switches, of nodes with ranks, and loopbacks of nodes with several; each
    rank is on one of `nodes`."""
    on = Counter(node.name for node in nodes)
    between = {*on, *(switch.name for switch in cluster.switches)} if len(on) > 1 else set()
    found = []
    for channel in cluster.channels.values():
        owner, _, kind = channel.name.rpartition(" ")
        if on[owner] > 1 if kind == "loopback" else owner in between:
            found.append(channel)
    return found

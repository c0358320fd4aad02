"""How fast nodes are by what their cluster and the cost model say: the best of them, and all."""

from __future__ import annotations

from dataclasses import replace

from orchestra.cluster import Cluster, Node
from orchestra.cluster.costs import Overhead, Sharing
from orchestra.engines.simulation.costs import Costs
from orchestra.engines.simulation.memory import Memory
from orchestra.engines.simulation.simulate import simulate
from orchestra.trainer.settings import Run
from orchestra.worker.runtime import Runtime, SilentReporter, Work


def best_node(run: Run, cluster: Cluster, memory: Memory, costs: Costs) -> Node:
    """Where a step of the whole batch takes the least time, of the nodes that have room for it.

    A step is the gradient of the global batch, the optimizer's update and what surrounds them, with
    all cores of the node, or one device. Of equal ones the first by name: the order of the nodes in
    a file does not matter. Where none has room, it is the fastest of all.
    """
    if len(cluster.nodes) == 1:
        return cluster.nodes[0]
    batch = run.training.batch_size * run.training.ranks
    works = Work("gradient", batch), Work("update", memory.elements), Work("step", batch)

    def preference(node: Node) -> tuple[bool, float, str]:
        threads = node.threads(1, run.training.threads)
        seconds = sum(costs.seconds(work, threads) for work in works)
        seconds /= node.speed_beside(costs.flops)
        crowded = memory.complaint(node, [0]) is not None
        return crowded, seconds, node.name

    return min(cluster.nodes, key=preference)


def described_speeds(
    cluster: Cluster,
    ranks: int,
    costs: Costs,
    overhead: Overhead,
    sharing: Sharing,
    samples: int,
    threads: int | None,
) -> tuple[float, ...]:
    """Gradients of `samples` samples that each of `ranks` ranks computes in a second, all at once.

    Jitter and faults are left out: nobody can plan for them.
    """
    steady = replace(
        cluster, nodes=tuple(replace(node, jitter=None) for node in cluster.nodes), faults=()
    )

    def program(runtime: Runtime) -> float:
        began = runtime.transport.now()
        runtime.compute.run(Work("gradient", samples), lambda: None)
        return runtime.transport.now() - began

    outcome = simulate(
        program, steady, ranks, costs, overhead, SilentReporter(), sharing=sharing, threads=threads,
        values=False,
    )  # fmt: skip
    assert outcome.failure is None
    return tuple(1 / seconds for seconds in outcome.results)

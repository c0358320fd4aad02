"""The node on which one process is through with a task first."""

from __future__ import annotations

from orchestra.cluster import Cluster, Node
from orchestra.engines.simulation.compute import Costs
from orchestra.engines.simulation.memory import Memory
from orchestra.trainer.settings import Run
from orchestra.worker.runtime import Work


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

"""How fast the ranks of a run are by what their cluster and the cost model say."""

from __future__ import annotations

from dataclasses import replace

from orchestra.cluster import Cluster
from orchestra.cluster.costs import Overhead, Sharing
from orchestra.engines.simulation.compute import Costs
from orchestra.engines.simulation.simulate import simulate
from orchestra.worker.runtime import Runtime, SilentReporter, Work


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

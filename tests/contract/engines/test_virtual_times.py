"""Virtual times and bytes of 30 strategies on five clusters stay as kept in virtual_times.json.

    python -m tests.contract.engines.test_virtual_times

writes the table anew. Do so only where an old time was wrong, and say which and why.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.shapes import COSTLY
from tests.support.simulated import cluster
from tests.support.training import settings

from orchestra.engines.simulation.costs import assumed_costs
from orchestra.engines.simulation.simulate import Simulation
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.program import train
from orchestra.worker.runtime import SilentReporter

TABLE = Path(__file__).with_name("virtual_times.json")
COSTS = replace(COSTLY, handling=0.0)  # the table was kept before there was such a figure
ASYNCHRONOUS = 'consistency="asynchronous"'
ROWS = [
    'AllReduce("ring")',
    'AllReduce("halving_doubling")',
    'AllReduce("butterfly")',
    'AllReduce("tree")',
    'AllReduce("hierarchical", ranks_per_node=2)',
    'AllReduce("ring_gather")',
    'AllReduce("parallel")',
    'AllReduce("reduce_to_one")',
    'AllReduce("native")',
    'AllReduce("ring", shard="optimizer")',
    'AllReduce("ring", backup=1)',
    "ParameterServer()",
    'ParameterServer(servers=2, placement="beside")',
    'ParameterServer(placement="beside", returns="gradients")',
    "ParameterServer(backup=1)",
    f"ParameterServer({ASYNCHRONOUS})",
    f'ParameterServer(servers=2, {ASYNCHRONOUS}, placement="beside")',
    'ParameterServer(consistency="bounded", staleness=1)',
    "ParameterServer(servers=2, replicas=1)",
    "Gossip()",
    "Hop(staleness=4, skip=4)",
    "StochasticGradientPush(overlap=1)",
    "PairwiseAveraging()",
    "Prague(2)",
    "LocalSGD(3)",
    "LocalSGD(4, outer=Nesterov(0.7, 0.9), fragments=2, overlap=1)",
    "LocalSGD(2, outer=Elastic())",
    "ElasticAveraging(3)",
    "Pipeline(2, microbatches=2)",
    f'Switch(AllReduce("ring"), ParameterServer({ASYNCHRONOUS}), when=AfterSteps(4))',
]
CLUSTERS = [
    "infiniband(nodes=4)",
    "stragglers(nodes=4)",
    "two_sites(nodes=4)",
    "one_host(cores=2)",
    "one_host(cores=2, shared_memory=False)",
]


def times_of(strategy: str, on: str, folder: Path) -> dict[str, Any]:
    """The seconds of each rank's stopwatch, and the bytes that it sent to each other one."""
    run = settings(
        parse(strategy, STRATEGIES, where="test"), 4, "images(model='mlp')",
        steps=8, seed=3, bucket_megabytes=0.0005, trace_steps=0,
    )  # fmt: skip
    outcome = Simulation(
        cluster(on),
        len(run.strategy.roles(4).shares),
        assumed_costs(run),
        COSTS,
        SilentReporter(),
        seed_number=run.seed,
    ).run(lambda runtime: train(runtime, (run, folder)))
    assert (outcome.failure, outcome.bad_input) == (None, None), strategy
    sent = [{str(to): size for to, size in sorted(each.items())} for each in outcome.sent]
    return {"seconds": [report.train_seconds for report in outcome.results], "sent": sent}


@pytest.mark.parametrize(
    ("strategy", "on"),
    [
        pytest.param(strategy, on, marks=() if row % len(CLUSTERS) == column else pytest.mark.lab)
        for row, strategy in enumerate(ROWS)
        for column, on in enumerate(CLUSTERS)
    ],
)
def test_as_kept(strategy: str, on: str, tmp_path: Path) -> None:
    kept = json.loads(TABLE.read_text())[on][strategy]
    now = times_of(strategy, on, tmp_path)
    assert now["seconds"] == pytest.approx(kept["seconds"], rel=1e-9)
    assert now["sent"] == kept["sent"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        table = {
            on: {strategy: times_of(strategy, on, Path(folder)) for strategy in ROWS}
            for on in CLUSTERS
        }
    TABLE.write_text(json.dumps(table, indent=1) + "\n")

"""The names of strategies and of their arguments, and which strategies have been seen best.

The latter is a table that `studies.standing` measures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestra.errors import InputError
from orchestra.module_path import admit_working_folder
from orchestra.settings import Registry, parse, write
from orchestra.strategies.base import Strategy


def _places(modules: Mapping[str, str]) -> dict[str, str]:
    """Return where each name is: `modules` has, for a module, the names in it."""
    return {
        name: f"orchestra.{at}:{name}" for at, names in modules.items() for name in names.split()
    }


STRATEGIES = Registry(
    "strategy",
    _places(
        {
            "strategies.all_reduce": "AllReduce",
            "strategies.auto": "Auto",
            "strategies.elastic_averaging": "ElasticAveraging",
            "strategies.gossip": "Gossip",
            "strategies.hogwild": "Hogwild",
            "strategies.hop": "Hop",
            "strategies.local_sgd": "LocalSGD",
            "strategies.pairwise_averaging": "PairwiseAveraging",
            "strategies.parameter_server": "ParameterServer",
            "strategies.pipeline": "Pipeline",
            "strategies.prague": "Prague",
            "strategies.single": "Single",
            "strategies.stochastic_gradient_push": "StochasticGradientPush",
            "strategies.switch": "Switch",
        }
    ),
    group="orchestra.strategies",
    arguments=_places(
        {
            "compression.power_sgd": "PowerSGD",
            "compression.quantization": "BF16 FP16 QSGD SignSGD",
            "compression.sparsification": "DGC RandomK Threshold TopK",
            "parameter_server.how": "PolynomialStaleness",
            "parameter_server.when": "Buffered",
            "strategies.outer": "Average Elastic Nesterov SlowMo",
            "strategies.switch_rules": "AfterDecay AfterFraction AfterSteps Both Either LossStable "
            "NoiseScale Straggler",
            "topologies": "Complete Exponential RandomRegular Ring Star",
        }
    ),
    elsewhere={
        "ADPSGD": "PairwiseAveraging()",
        "DDP": 'AllReduce("native")',
        "DiLoCo": "LocalSGD(16, outer=Nesterov(0.7, 0.9))",
        "DistributedDataParallel": 'AllReduce("native")',
        "FedBuff": "ParameterServer(consistency=Buffered(4), "
        "learning_rate=PolynomialStaleness(0.5))",
        "FSDP": 'AllReduce(shard="parameters")',
        "DPSGD": "Gossip()",
        "EASGD": "ElasticAveraging()",
        "Horovod": 'AllReduce("ring")',
        "PS": "ParameterServer()",
        "SGP": "StochasticGradientPush()",
        "SSP": 'ParameterServer(consistency="bounded")',
        "ZeRO1": 'AllReduce(shard="optimizer")',
        "ZeRO2": 'AllReduce(shard="gradients")',
        "ZeRO3": 'AllReduce(shard="parameters")',
    },
)

NEAR = 1.05
"""As good as the best: at most this many times its seconds to the target."""

Seconds = Mapping[str, Mapping[str, float | None]]
"""To the target, of each strategy in its normal notation, on each of several places.

Of all seeds the median; None: not reached.
"""


@dataclass(frozen=True)
class MeasuredStanding:
    """Seconds of real runs on each task, and of simulated ones on each cluster that comes along.

    `remark` and `simulated_remark` say how these were measured.
    """

    seconds: Seconds
    remark: str
    simulated: Seconds = field(default_factory=dict)
    simulated_remark: str = "not done"

    @classmethod
    def shipped(cls) -> MeasuredStanding:
        """Read the table that comes with Orchestra."""
        table = json.loads(Path(__file__).with_name("standing.json").read_text())
        simulated = table.get("simulated", {"clusters": {}, "remark": cls.simulated_remark})
        seconds, on_clusters = _seconds(table["tasks"]), _seconds(simulated["clusters"])
        return cls(seconds, table["remark"], on_clusters, simulated["remark"])

    def good_on(self, notation: str) -> list[str]:
        """Return the tasks on which this strategy was best in real runs, or within 5 % of that."""
        return _good_on(self.seconds, normal(notation))

    def good_in_simulation(self, notation: str) -> list[str]:
        """Return the clusters on which it was best in simulated runs, or within 5 % of that."""
        return _good_on(self.simulated, normal(notation))


def strategy_of(strategy: Strategy | str) -> Strategy:
    """Return a strategy as it is, or the one that a notation names; else raise InputError."""
    if isinstance(strategy, str):
        strategy = parse(strategy, STRATEGIES, where="strategy")
    if not isinstance(strategy, Strategy):
        raise InputError(f"strategy: expected a strategy or its notation, got {strategy!r}")
    return strategy


def strategy_of_script(strategy: Strategy | str) -> Strategy:
    """As `strategy_of`, for a script that trains.

    As under `orchestra train`, modules are looked for in the working folder, too, which comes last.
    """
    if isinstance(strategy, str) and ":" in strategy:
        admit_working_folder()
    return strategy_of(strategy)


def _seconds(measured: Mapping[str, Mapping[str, Any]]) -> Seconds:
    return {place: found["seconds"] for place, found in measured.items()}


def _good_on(seconds: Seconds, strategy: str) -> list[str]:
    good = []
    for place, measured in seconds.items():
        own, reached = measured.get(strategy), [s for s in measured.values() if s is not None]
        if own is not None and own <= NEAR * min(reached):
            good.append(place)
    return good


def normal(notation: str) -> str:
    """Return the normal notation of a strategy, however it is written."""
    try:
        return write(parse(notation, STRATEGIES, where="standing"), STRATEGIES)
    except InputError:  # a plug-in's that cannot do without arguments
        return notation

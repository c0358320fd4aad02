"""Train a PyTorch model with any distribution strategy; compare the strategies fairly.

    import orchestra
    from orchestra import AllReduce

    record = orchestra.train("digits", AllReduce("ring"), ranks=4)

Names are imported when first used, so that the command line answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from orchestra.compression.power_sgd import PowerSGD
    from orchestra.compression.quantization import BF16, FP16, QSGD, SignSGD
    from orchestra.compression.sparsification import DGC, RandomK, Threshold, TopK
    from orchestra.engines.processes.distribute import distribute, mean
    from orchestra.engines.processes.environment import is_first, rank, world_size
    from orchestra.engines.run import RunProgress
    from orchestra.errors import InputError, OrchestraError, RunFailed, Stopped
    from orchestra.experiments.api import compare, replay, train
    from orchestra.optimizers.settings import Constant, Cosine, StepDecay
    from orchestra.parameter_server.how import PolynomialStaleness
    from orchestra.parameter_server.when import Buffered
    from orchestra.planning.api import plan
    from orchestra.strategies.all_reduce import AllReduce
    from orchestra.strategies.auto import Auto
    from orchestra.strategies.base import Roles, Strategy
    from orchestra.strategies.elastic_averaging import ElasticAveraging
    from orchestra.strategies.gossip import Gossip
    from orchestra.strategies.hogwild import Hogwild
    from orchestra.strategies.hop import Hop
    from orchestra.strategies.local_sgd import LocalSGD
    from orchestra.strategies.member import Member
    from orchestra.strategies.outer import Average, Elastic, Nesterov, SlowMo
    from orchestra.strategies.pairwise_averaging import PairwiseAveraging
    from orchestra.strategies.parameter_server import ParameterServer
    from orchestra.strategies.pipeline import Pipeline
    from orchestra.strategies.prague import Prague
    from orchestra.strategies.single import Single
    from orchestra.strategies.stochastic_gradient_push import StochasticGradientPush
    from orchestra.strategies.switch import Switch
    from orchestra.strategies.switch_rules import (
        AfterDecay,
        AfterFraction,
        AfterSteps,
        Both,
        Either,
        LossStable,
        NoiseScale,
        Straggler,
    )
    from orchestra.tasks.task import Task
    from orchestra.topologies import Complete, Exponential, RandomRegular, Ring, Star

__all__ = [
    "AfterDecay", "AfterFraction", "AfterSteps", "AllReduce", "Auto", "Average", "BF16", "Both",
    "Buffered", "Complete", "Constant", "Cosine", "DGC", "Either", "Elastic",
    "ElasticAveraging", "Exponential", "FP16", "Gossip", "Hogwild", "Hop", "InputError",
    "LocalSGD", "LossStable", "Member", "Nesterov", "NoiseScale", "OrchestraError",
    "PairwiseAveraging", "ParameterServer", "Pipeline", "PolynomialStaleness", "PowerSGD",
    "Prague", "QSGD", "RandomK", "RandomRegular", "Ring", "Roles", "RunFailed", "RunProgress",
    "SignSGD", "Single", "SlowMo", "Star", "StepDecay", "StochasticGradientPush", "Stopped",
    "Straggler", "Strategy", "Switch", "Task", "Threshold", "TopK", "compare", "distribute",
    "is_first", "mean", "plan", "rank", "replay", "train", "world_size",
]  # fmt: skip

_MODULES = {  # of the names that `strategies.registry` does not have
    "engines.processes.distribute": ["distribute", "mean"],
    "engines.processes.environment": ["is_first", "rank", "world_size"],
    "engines.run": ["RunProgress"],
    "errors": ["InputError", "OrchestraError", "RunFailed", "Stopped"],
    "experiments.api": ["compare", "replay", "train"],
    "optimizers.settings": ["Constant", "Cosine", "StepDecay"],
    "planning.api": ["plan"],
    "strategies.base": ["Roles", "Strategy"],
    "strategies.member": ["Member"],
    "tasks.task": ["Task"],
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = next((module for module, names in _MODULES.items() if name in names), None)
        if module is not None:
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        else:
            from orchestra.strategies.registry import STRATEGIES

            found = STRATEGIES.resolve(name, where=__name__)
        globals()[name] = found  # from now on
        return found

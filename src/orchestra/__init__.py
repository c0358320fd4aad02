"""Train a PyTorch model with any distribution strategy; compare the strategies fairly.

    import orchestra
    from orchestra import AllReduce

    record = orchestra.train("digits", AllReduce("ring"), ranks=4)

Names are imported when first used, so that the command line answers at once.
"""

from typing import TYPE_CHECKING

from orchestra.settings.notation import lazy_package

__version__ = "0.1.0"

if TYPE_CHECKING:
    from orchestra.engines.processes.distribute import distribute
    from orchestra.engines.processes.environment import is_first, rank, world_size
    from orchestra.errors import InputError, OrchestraError, RunFailed
    from orchestra.experiments.api import compare, replay, train
    from orchestra.planning.api import plan
    from orchestra.strategies.all_reduce import AllReduce
    from orchestra.strategies.base import Roles, Strategy
    from orchestra.strategies.elastic_averaging import ElasticAveraging
    from orchestra.strategies.gossip import Gossip
    from orchestra.strategies.hogwild import Hogwild
    from orchestra.strategies.hop import Hop
    from orchestra.strategies.local_sgd import LocalSGD
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
        LossStable,
        NoiseScale,
        Straggler,
    )
    from orchestra.tasks.task import Task
    from orchestra.topologies import Complete, Exponential, RandomRegular, Ring, Star

__all__ = [
    "AfterDecay", "AfterFraction", "AfterSteps", "AllReduce", "Average", "Complete", "Elastic",
    "ElasticAveraging", "Exponential", "Gossip", "Hogwild", "Hop", "InputError", "LocalSGD",
    "LossStable", "Nesterov", "NoiseScale", "OrchestraError", "PairwiseAveraging",
    "ParameterServer", "Pipeline", "Prague", "RandomRegular", "Ring", "Roles", "RunFailed",
    "Single", "SlowMo", "Star", "StochasticGradientPush", "Straggler", "Strategy", "Switch", "Task",
    "compare", "distribute", "is_first", "plan", "rank", "replay", "train", "world_size",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = lazy_package(
        __name__, "errors", "topologies", "strategies.base", "strategies.all_reduce",
        "strategies.elastic_averaging", "strategies.gossip", "strategies.hogwild",
        "strategies.hop", "strategies.local_sgd", "strategies.outer",
        "strategies.pairwise_averaging", "strategies.parameter_server", "strategies.pipeline",
        "strategies.prague", "strategies.single", "strategies.switch",
        "strategies.stochastic_gradient_push", "strategies.switch_rules", "experiments.api",
        "planning.api", "engines.processes.environment", "engines.processes.distribute",
        "tasks.task",
        names=__all__,
    )  # fmt: skip

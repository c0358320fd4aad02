"""Train a PyTorch model with any distribution strategy; compare the strategies fairly.

    import orchestra
    from orchestra import AllReduce

    record = orchestra.train("digits", AllReduce("ring"), ranks=4)

Names are imported when first used, so that the command line answers at once.
"""

from typing import TYPE_CHECKING

from orchestra.settings.registry import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from orchestra.engines.processes.environment import is_first, rank, world_size
    from orchestra.engines.processes.own_loop import distribute
    from orchestra.errors import InputError, OrchestraError, RunFailed
    from orchestra.experiments.api import compare, train
    from orchestra.experiments.replay import replay
    from orchestra.strategies.all_reduce import AllReduce
    from orchestra.strategies.base import Roles, Strategy
    from orchestra.strategies.elastic_averaging import ElasticAveraging
    from orchestra.strategies.gossip import Gossip, Hop
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
        "AfterDecay",
        "AfterFraction",
        "AfterSteps",
        "AllReduce",
        "Average",
        "Complete",
        "Elastic",
        "ElasticAveraging",
        "Exponential",
        "Gossip",
        "Hop",
        "InputError",
        "LocalSGD",
        "LossStable",
        "Nesterov",
        "NoiseScale",
        "OrchestraError",
        "PairwiseAveraging",
        "ParameterServer",
        "Pipeline",
        "Prague",
        "RandomRegular",
        "Ring",
        "Roles",
        "RunFailed",
        "Single",
        "SlowMo",
        "Star",
        "StochasticGradientPush",
        "Straggler",
        "Strategy",
        "Switch",
        "Task",
        "compare",
        "distribute",
        "is_first",
        "rank",
        "replay",
        "train",
        "world_size",
    ]
else:
    PLACES = {
        "AfterDecay": "strategies.switch_rules",
        "AfterFraction": "strategies.switch_rules",
        "AfterSteps": "strategies.switch_rules",
        "AllReduce": "strategies.all_reduce",
        "Average": "strategies.outer",
        "Complete": "topologies",
        "Elastic": "strategies.outer",
        "ElasticAveraging": "strategies.elastic_averaging",
        "Exponential": "topologies",
        "Gossip": "strategies.gossip",
        "Hop": "strategies.gossip",
        "InputError": "errors",
        "LocalSGD": "strategies.local_sgd",
        "LossStable": "strategies.switch_rules",
        "Nesterov": "strategies.outer",
        "NoiseScale": "strategies.switch_rules",
        "OrchestraError": "errors",
        "PairwiseAveraging": "strategies.pairwise_averaging",
        "ParameterServer": "strategies.parameter_server",
        "Pipeline": "strategies.pipeline",
        "Prague": "strategies.prague",
        "RandomRegular": "topologies",
        "Ring": "topologies",
        "Roles": "strategies.base",
        "RunFailed": "errors",
        "Single": "strategies.single",
        "SlowMo": "strategies.outer",
        "Star": "topologies",
        "StochasticGradientPush": "strategies.stochastic_gradient_push",
        "Straggler": "strategies.switch_rules",
        "Strategy": "strategies.base",
        "Switch": "strategies.switch",
        "Task": "tasks.task",
        "compare": "experiments.api",
        "distribute": "engines.processes.own_loop",
        "is_first": "engines.processes.environment",
        "rank": "engines.processes.environment",
        "replay": "experiments.replay",
        "train": "experiments.api",
        "world_size": "engines.processes.environment",
    }
    __all__ = list(PLACES)
    __getattr__ = lazy_names(__name__, PLACES)

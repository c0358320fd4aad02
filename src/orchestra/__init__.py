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
    from orchestra.engines.processes.distribute import distribute as distribute
    from orchestra.engines.processes.environment import is_first as is_first
    from orchestra.engines.processes.environment import rank as rank
    from orchestra.engines.processes.environment import world_size as world_size
    from orchestra.errors import InputError as InputError
    from orchestra.errors import OrchestraError as OrchestraError
    from orchestra.errors import RunFailed as RunFailed
    from orchestra.experiments.api import compare as compare
    from orchestra.experiments.api import replay as replay
    from orchestra.experiments.api import train as train
    from orchestra.strategies.all_reduce import AllReduce as AllReduce
    from orchestra.strategies.base import Roles as Roles
    from orchestra.strategies.base import Strategy as Strategy
    from orchestra.strategies.elastic_averaging import ElasticAveraging as ElasticAveraging
    from orchestra.strategies.gossip import Gossip as Gossip
    from orchestra.strategies.gossip import Hop as Hop
    from orchestra.strategies.local_sgd import LocalSGD as LocalSGD
    from orchestra.strategies.outer import Average as Average
    from orchestra.strategies.outer import Elastic as Elastic
    from orchestra.strategies.outer import Nesterov as Nesterov
    from orchestra.strategies.outer import SlowMo as SlowMo
    from orchestra.strategies.pairwise_averaging import PairwiseAveraging as PairwiseAveraging
    from orchestra.strategies.parameter_server import ParameterServer as ParameterServer
    from orchestra.strategies.pipeline import Pipeline as Pipeline
    from orchestra.strategies.prague import Prague as Prague
    from orchestra.strategies.single import Single as Single
    from orchestra.strategies.stochastic_gradient_push import (
        StochasticGradientPush as StochasticGradientPush,
    )
    from orchestra.strategies.switch import Switch as Switch
    from orchestra.strategies.switch_rules import AfterDecay as AfterDecay
    from orchestra.strategies.switch_rules import AfterFraction as AfterFraction
    from orchestra.strategies.switch_rules import AfterSteps as AfterSteps
    from orchestra.strategies.switch_rules import LossStable as LossStable
    from orchestra.strategies.switch_rules import NoiseScale as NoiseScale
    from orchestra.strategies.switch_rules import Straggler as Straggler
    from orchestra.tasks.task import Task as Task
    from orchestra.topologies import Complete as Complete
    from orchestra.topologies import Exponential as Exponential
    from orchestra.topologies import RandomRegular as RandomRegular
    from orchestra.topologies import Ring as Ring
    from orchestra.topologies import Star as Star
else:
    _MODULES = {
        "engines.processes.environment": ("is_first", "rank", "world_size"),
        "engines.processes.distribute": ("distribute",),
        "errors": ("InputError", "OrchestraError", "RunFailed"),
        "experiments.api": ("compare", "replay", "train"),
        "strategies.all_reduce": ("AllReduce",),
        "strategies.base": ("Roles", "Strategy"),
        "strategies.elastic_averaging": ("ElasticAveraging",),
        "strategies.gossip": ("Gossip", "Hop"),
        "strategies.local_sgd": ("LocalSGD",),
        "strategies.outer": ("Average", "Elastic", "Nesterov", "SlowMo"),
        "strategies.pairwise_averaging": ("PairwiseAveraging",),
        "strategies.parameter_server": ("ParameterServer",),
        "strategies.pipeline": ("Pipeline",),
        "strategies.prague": ("Prague",),
        "strategies.single": ("Single",),
        "strategies.stochastic_gradient_push": ("StochasticGradientPush",),
        "strategies.switch": ("Switch",),
        "strategies.switch_rules": (
            "AfterDecay",
            "AfterFraction",
            "AfterSteps",
            "LossStable",
            "NoiseScale",
            "Straggler",
        ),
        "tasks.task": ("Task",),
        "topologies": ("Complete", "Exponential", "RandomRegular", "Ring", "Star"),
    }
    _PLACES = {name: module for module, names in _MODULES.items() for name in names}
    __all__ = list(_PLACES)
    __getattr__ = lazy_names(__name__, _PLACES)

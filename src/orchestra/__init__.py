"""Train a PyTorch model with any distribution strategy; compare the strategies fairly.

    import orchestra
    from orchestra import AllReduce

    record = orchestra.train("digits", AllReduce("ring"), ranks=4)

Names are imported when first used, so that the command line answers at once.
"""

from typing import TYPE_CHECKING

from orchestra.settings.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from orchestra.engines.processes.own_loop import distribute
    from orchestra.errors import InputError, OrchestraError, RunFailed
    from orchestra.experiments.api import train
    from orchestra.strategies.all_reduce import AllReduce
    from orchestra.strategies.base import Roles, Strategy
    from orchestra.strategies.parameter_server import ParameterServer
    from orchestra.strategies.single import Single
    from orchestra.strategies.switch import Switch
    from orchestra.strategies.switch_rules import AfterSteps, LossStable
    from orchestra.tasks.task import Task

    __all__ = [
        "AfterSteps",
        "AllReduce",
        "InputError",
        "LossStable",
        "OrchestraError",
        "ParameterServer",
        "Roles",
        "RunFailed",
        "Single",
        "Strategy",
        "Switch",
        "Task",
        "distribute",
        "train",
    ]
else:
    PLACES = {
        "AfterSteps": "strategies.switch_rules",
        "AllReduce": "strategies.all_reduce",
        "InputError": "errors",
        "LossStable": "strategies.switch_rules",
        "OrchestraError": "errors",
        "ParameterServer": "strategies.parameter_server",
        "Roles": "strategies.base",
        "RunFailed": "errors",
        "Single": "strategies.single",
        "Strategy": "strategies.base",
        "Switch": "strategies.switch",
        "Task": "tasks.task",
        "distribute": "engines.processes.own_loop",
        "train": "experiments.api",
    }
    __all__ = list(PLACES)
    __getattr__ = lazy_names(__name__, PLACES)

"""The names of strategies and of the rules that `Switch` waits for."""

from __future__ import annotations

from orchestra.settings import Registry

STRATEGIES = Registry(
    "strategy",
    {
        "AfterSteps": "orchestra.strategies.switch_rules:AfterSteps",
        "AllReduce": "orchestra.strategies.all_reduce:AllReduce",
        "LossStable": "orchestra.strategies.switch_rules:LossStable",
        "ParameterServer": "orchestra.strategies.parameter_server:ParameterServer",
        "Single": "orchestra.strategies.single:Single",
        "Switch": "orchestra.strategies.switch:Switch",
    },
    group="orchestra.strategies",
)

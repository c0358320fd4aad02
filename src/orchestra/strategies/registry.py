"""The names of strategies and of the rules that `Switch` waits for."""

from __future__ import annotations

from orchestra.settings import Registry

STRATEGIES = Registry(
    "strategy",
    {
        "AfterSteps": "orchestra.strategies.switch_rules:AfterSteps",
        "AllReduce": "orchestra.strategies.all_reduce:AllReduce",
        "Average": "orchestra.strategies.outer:Average",
        "Elastic": "orchestra.strategies.outer:Elastic",
        "LocalSGD": "orchestra.strategies.local_sgd:LocalSGD",
        "LossStable": "orchestra.strategies.switch_rules:LossStable",
        "Nesterov": "orchestra.strategies.outer:Nesterov",
        "ParameterServer": "orchestra.strategies.parameter_server:ParameterServer",
        "Single": "orchestra.strategies.single:Single",
        "SlowMo": "orchestra.strategies.outer:SlowMo",
        "Switch": "orchestra.strategies.switch:Switch",
    },
    group="orchestra.strategies",
)

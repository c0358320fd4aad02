"""The names of strategies and of the rules that `Switch` waits for."""

from __future__ import annotations

from orchestra.settings import Registry

STRATEGIES = Registry(
    "strategy",
    {
        "AfterDecay": "orchestra.strategies.switch_rules:AfterDecay",
        "AfterFraction": "orchestra.strategies.switch_rules:AfterFraction",
        "AfterSteps": "orchestra.strategies.switch_rules:AfterSteps",
        "AllReduce": "orchestra.strategies.all_reduce:AllReduce",
        "Average": "orchestra.strategies.outer:Average",
        "Both": "orchestra.strategies.switch_rules:Both",
        "Complete": "orchestra.topologies.graphs:Complete",
        "Either": "orchestra.strategies.switch_rules:Either",
        "Elastic": "orchestra.strategies.outer:Elastic",
        "ElasticAveraging": "orchestra.strategies.elastic_averaging:ElasticAveraging",
        "Exponential": "orchestra.topologies.graphs:Exponential",
        "Gossip": "orchestra.strategies.gossip:Gossip",
        "Hop": "orchestra.strategies.hop:Hop",
        "LocalSGD": "orchestra.strategies.local_sgd:LocalSGD",
        "LossStable": "orchestra.strategies.switch_rules:LossStable",
        "Nesterov": "orchestra.strategies.outer:Nesterov",
        "NoiseScale": "orchestra.strategies.switch_rules:NoiseScale",
        "PairwiseAveraging": "orchestra.strategies.pairwise_averaging:PairwiseAveraging",
        "ParameterServer": "orchestra.strategies.parameter_server:ParameterServer",
        "Pipeline": "orchestra.strategies.pipeline:Pipeline",
        "Prague": "orchestra.strategies.prague:Prague",
        "RandomRegular": "orchestra.topologies.graphs:RandomRegular",
        "Ring": "orchestra.topologies.graphs:Ring",
        "Single": "orchestra.strategies.single:Single",
        "SlowMo": "orchestra.strategies.outer:SlowMo",
        "Star": "orchestra.topologies.graphs:Star",
        "StochasticGradientPush": (
            "orchestra.strategies.stochastic_gradient_push:StochasticGradientPush"
        ),
        "Straggler": "orchestra.strategies.switch_rules:Straggler",
        "Switch": "orchestra.strategies.switch:Switch",
    },
    group="orchestra.strategies",
)

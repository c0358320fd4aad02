"""The names of strategies, and of what stands in their arguments."""

from __future__ import annotations

from orchestra.settings import Registry

STRATEGIES = Registry(
    "strategy",
    {
        "AllReduce": "orchestra.strategies.all_reduce:AllReduce",
        "ElasticAveraging": "orchestra.strategies.elastic_averaging:ElasticAveraging",
        "Gossip": "orchestra.strategies.gossip:Gossip",
        "Hop": "orchestra.strategies.hop:Hop",
        "LocalSGD": "orchestra.strategies.local_sgd:LocalSGD",
        "PairwiseAveraging": "orchestra.strategies.pairwise_averaging:PairwiseAveraging",
        "ParameterServer": "orchestra.strategies.parameter_server:ParameterServer",
        "Pipeline": "orchestra.strategies.pipeline:Pipeline",
        "Prague": "orchestra.strategies.prague:Prague",
        "Single": "orchestra.strategies.single:Single",
        "StochasticGradientPush": (
            "orchestra.strategies.stochastic_gradient_push:StochasticGradientPush"
        ),
        "Switch": "orchestra.strategies.switch:Switch",
    },
    group="orchestra.strategies",
    arguments={
        "AfterDecay": "orchestra.strategies.switch_rules:AfterDecay",
        "AfterFraction": "orchestra.strategies.switch_rules:AfterFraction",
        "AfterSteps": "orchestra.strategies.switch_rules:AfterSteps",
        "Average": "orchestra.strategies.outer:Average",
        "Both": "orchestra.strategies.switch_rules:Both",
        "Complete": "orchestra.topologies.graphs:Complete",
        "Either": "orchestra.strategies.switch_rules:Either",
        "Elastic": "orchestra.strategies.outer:Elastic",
        "Exponential": "orchestra.topologies.graphs:Exponential",
        "LossStable": "orchestra.strategies.switch_rules:LossStable",
        "Nesterov": "orchestra.strategies.outer:Nesterov",
        "NoiseScale": "orchestra.strategies.switch_rules:NoiseScale",
        "RandomRegular": "orchestra.topologies.graphs:RandomRegular",
        "Ring": "orchestra.topologies.graphs:Ring",
        "SlowMo": "orchestra.strategies.outer:SlowMo",
        "Star": "orchestra.topologies.graphs:Star",
        "Straggler": "orchestra.strategies.switch_rules:Straggler",
    },
    elsewhere={
        "ADPSGD": "PairwiseAveraging()",
        "DDP": 'AllReduce("native")',
        "DiLoCo": "LocalSGD(16, outer=Nesterov(0.7, 0.9))",
        "DistributedDataParallel": 'AllReduce("native")',
        "DPSGD": "Gossip()",
        "EASGD": "ElasticAveraging()",
        "Horovod": 'AllReduce("ring")',
        "PS": "ParameterServer()",
        "SGP": "StochasticGradientPush()",
        "SSP": 'ParameterServer(consistency="bounded")',
        "ZeRO1": 'AllReduce(shard="optimizer")',
    },
)

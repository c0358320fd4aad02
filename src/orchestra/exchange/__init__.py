"""How tensors become averages: scaling, buckets, overlap, buffers.

Names are imported when first used: strategies, which are settings too, load without torch.
"""

from typing import TYPE_CHECKING

from orchestra.settings.lazy import lazy_names

if TYPE_CHECKING:
    from orchestra.exchange.average import (
        GradientAverage,
        agree_on_data,
        agree_on_parameters,
        agree_on_position,
        agree_within,
        broadcast_buffers,
        hand_over_moments,
        start_together,
        wait_for_everyone,
    )
    from orchestra.exchange.collective import Collective, make_collective
    from orchestra.exchange.common_step import CommonStep
    from orchestra.exchange.elastic import look_ahead, pull_on_centre, step_elastically
    from orchestra.exchange.gossip import (
        exact_mean,
        exact_mean_of_buffers,
        keep_gradient,
        mix_with_neighbours,
    )
    from orchestra.exchange.hop import IterationQueues
    from orchestra.exchange.pairwise import PairwiseAverage
    from orchestra.exchange.partial import PartialAverage
    from orchestra.exchange.pipeline import (
        PipelineStep,
        Seat,
        agree_on_loss,
        clip_stages,
        is_stage,
        stage_of,
        sum_tied,
    )
    from orchestra.exchange.prague import GroupAverage
    from orchestra.exchange.push_sum import PushSum, SelfPacedPushSum
    from orchestra.exchange.replicas import (
        average_moments,
        average_replicas,
        fragments_of,
        scaled_copy,
    )
    from orchestra.exchange.servers import (
        collect_slices,
        homes_of,
        make_replicated_server,
        make_server,
        optimizer_parts,
        push_and_pull,
        tell_servers,
    )
    from orchestra.exchange.shards import Shards
    from orchestra.exchange.shared_work import SharedWork, share_work
    from orchestra.exchange.watching import Judge, counted, own_seconds, step_of_round

    __all__ = [
        "agree_on_data",
        "agree_on_loss",
        "agree_on_parameters",
        "agree_on_position",
        "agree_within",
        "CommonStep",
        "Collective",
        "GradientAverage",
        "GroupAverage",
        "IterationQueues",
        "Judge",
        "PartialAverage",
        "PipelineStep",
        "Seat",
        "SelfPacedPushSum",
        "SharedWork",
        "Shards",
        "average_moments",
        "average_replicas",
        "broadcast_buffers",
        "clip_stages",
        "collect_slices",
        "counted",
        "exact_mean",
        "exact_mean_of_buffers",
        "fragments_of",
        "hand_over_moments",
        "homes_of",
        "is_stage",
        "make_collective",
        "keep_gradient",
        "look_ahead",
        "make_replicated_server",
        "make_server",
        "mix_with_neighbours",
        "optimizer_parts",
        "own_seconds",
        "PairwiseAverage",
        "pull_on_centre",
        "push_and_pull",
        "PushSum",
        "scaled_copy",
        "share_work",
        "stage_of",
        "step_elastically",
        "step_of_round",
        "sum_tied",
        "tell_servers",
        "start_together",
        "wait_for_everyone",
    ]
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "agree_on_loss": "pipeline",
            "agree_on_parameters": "average",
            "agree_on_data": "average",
            "agree_on_position": "average",
            "agree_within": "average",
            "CommonStep": "common_step",
            "Collective": "collective",
            "GradientAverage": "average",
            "GroupAverage": "prague",
            "IterationQueues": "hop",
            "Judge": "watching",
            "PartialAverage": "partial",
            "PipelineStep": "pipeline",
            "Seat": "pipeline",
            "SelfPacedPushSum": "push_sum",
            "SharedWork": "shared_work",
            "Shards": "shards",
            "average_moments": "replicas",
            "average_replicas": "replicas",
            "broadcast_buffers": "average",
            "clip_stages": "pipeline",
            "collect_slices": "servers",
            "counted": "watching",
            "exact_mean": "gossip",
            "exact_mean_of_buffers": "gossip",
            "fragments_of": "replicas",
            "hand_over_moments": "average",
            "homes_of": "servers",
            "is_stage": "pipeline",
            "make_collective": "collective",
            "keep_gradient": "gossip",
            "look_ahead": "elastic",
            "make_replicated_server": "servers",
            "make_server": "servers",
            "mix_with_neighbours": "gossip",
            "optimizer_parts": "servers",
            "own_seconds": "watching",
            "PairwiseAverage": "pairwise",
            "pull_on_centre": "elastic",
            "push_and_pull": "servers",
            "PushSum": "push_sum",
            "scaled_copy": "replicas",
            "share_work": "shared_work",
            "stage_of": "pipeline",
            "step_elastically": "elastic",
            "step_of_round": "watching",
            "sum_tied": "pipeline",
            "tell_servers": "servers",
            "start_together": "average",
            "wait_for_everyone": "average",
        },
    )

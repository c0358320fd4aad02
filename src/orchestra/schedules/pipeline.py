"""Schedules of a pipeline: in which order a stage takes its forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Pass(NamedTuple):
    """A pass of one micro-batch through one stage."""

    backward: bool
    microbatch: int


PipelineSchedule = Callable[[int, int, int], tuple[Pass, ...]]
"""The passes of a step, in their order, by the number of stages, the stage, and micro-batches.

Both kinds go through the micro-batches from the first to the last, on every stage alike: messages
between two stages need no numbers, and gradients add up in the same order as without stages.
"""


def gpipe(stages: int, stage: int, microbatches: int) -> tuple[Pass, ...]:
    """All forward passes, then all backward passes (Huang et al., GPipe, NeurIPS 2019).

    Each stage keeps the activations of all micro-batches.
    """
    forward = [Pass(False, number) for number in range(microbatches)]
    return (*forward, *(Pass(True, number) for number in range(microbatches)))


def one_forward_one_backward(stages: int, stage: int, microbatches: int) -> tuple[Pass, ...]:
    """1F1B (Narayanan et al., SC 2021): as soon as it can, each stage takes the two in turns.

    Stage s of S keeps the activations of S - s micro-batches at most. A step takes as long as
    under `gpipe`.
    """
    ahead = min(stages - 1 - stage, microbatches)
    passes = [Pass(False, number) for number in range(ahead)]
    for number in range(ahead, microbatches):
        passes += [Pass(False, number), Pass(True, number - ahead)]
    passes += [Pass(True, number) for number in range(microbatches - ahead, microbatches)]
    return tuple(passes)


PIPELINE: Mapping[str, PipelineSchedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}

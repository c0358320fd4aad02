"""What each rank has to say of a run; plain data, free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestra.records.timeline import Timeline
from orchestra.records.usage import Usage


@dataclass(frozen=True)
class Point:
    """The model at one snapshot: samples consumed by the cluster, seconds on the stopwatch.

    `metrics` are figures on the validation data, or on the test data where there is none; the
    mean loss is among them as "loss". `consensus_distance` is how far the replicas were from their
    mean, which is the model: sqrt(mean_i ||x_i - mean||^2); None where there was but one.
    """

    samples: int
    seconds: float
    metrics: dict[str, float]
    consensus_distance: float | None = None


@dataclass(frozen=True)
class RankReport:
    """One rank's part in a run.

    `setup` are the seconds before the stopwatch by what they went to: task (data and model),
    group (the strategy's start), first_step (the warm-up, and waiting for the others).
    `seconds` are compute, communicate and wait of its main flow while the stopwatch ran;
    `bytes_sent` are those of all its flows; `staleness` counts updates by their staleness.
    `timeline` is None where none was to be kept; `dropped` counts gradients that came too late;
    `usage` is that of the machine while the stopwatch ran, None where it was not real.
    """

    rank: int
    role: str
    steps: int
    samples: int
    setup: dict[str, float]
    train_seconds: float
    seconds: dict[str, float]
    bytes_sent: int
    bytes_estimated: bool
    staleness: dict[str, int]
    peak_buffer_bytes: int
    switched_at_step: int | None
    stopped: bool
    threads: int
    chief: ChiefReport | None = None
    timeline: Timeline | None = None
    dropped: int = 0
    usage: Usage | None = None


@dataclass(frozen=True)
class ChiefReport:
    """What only one rank finds out: the worth of the final parameters, and of those before.

    `final_loss` and `metrics` are on the test data; the last training loss where there is none.
    Where nothing has values there are neither, and no hash.
    """

    final_loss: float | None
    metrics: dict[str, float]
    time_to_target_seconds: float | None
    parameters_sha256: str | None
    curve: list[Point] = field(default_factory=list)

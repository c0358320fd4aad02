"""Event files of TensorBoard, read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

Curves = dict[str, list[tuple[int, float]]]


def read(folder: Path) -> Curves:
    """By name, the steps and values that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def approximately(points: list[tuple[int, float]]) -> Any:
    """TensorBoard keeps 32 bits."""
    return [(at, pytest.approx(value, rel=1e-5)) for at, value in points]

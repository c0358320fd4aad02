"""Where figures of a run can go beside its records, if the library for it is installed."""

from __future__ import annotations

import importlib.util

from orchestra.errors import InputError

TRACKERS = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "Weights & Biases"}
"""By setting, module and extra, which have the same name."""


def require_tracker(name: str) -> None:
    """Raise `InputError` where the library of the setting `name` is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # or a folder of that name in the current one
        raise InputError(
            f"{name}: is true, but {TRACKERS[name]} is not installed: "
            f"pip install 'neural-orchestra[{name}]', or set it to false"
        )

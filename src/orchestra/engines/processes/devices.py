"""Whether this machine has the GPUs that a run asks for."""

from __future__ import annotations

from orchestra.trainer.settings import Run


def lacking(run: Run) -> str | None:
    """What this machine lacks for `run`, None if nothing. Imports torch only where it has to."""
    if run.training.device != "cuda":
        return None
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Several ranks can share a GPU, but NCCL wants one for each.
    wanted = run.training.ranks if "native" in repr(run.strategy) else 1
    if there >= wanted:
        return None
    remedy = "name a schedule such as 'ring', whose ranks share one" if there else "use cpu or auto"
    return f"wants {wanted} GPU{'s' * (wanted > 1)}; torch sees {there or 'none'} here: {remedy}"

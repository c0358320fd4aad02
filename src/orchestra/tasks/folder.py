"""What the tasks that read a user's files share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

#: Which images are held out is part of the task: it stays the same whatever the seed of a run.
SPLIT_SEED = 0


def data_folder(task: str, folder: str, source: str) -> Path:
    """The folder of the files of `task`; `source` says where they come from.

    Raises:
        InputError: there is no such folder.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise InputError(f"task {task}: there is no folder {path.absolute()}; {source}")
    return path


def hold_out(
    task: str, tensors: tuple[Tensor, ...], samples: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Tensors of equal first dimension without `samples` entries, and these; always the same ones.

    Raises:
        InputError: nothing would be left to train on.
    """
    import numpy
    import torch

    count = len(tensors[0])
    if samples >= count:
        raise InputError(
            f"task {task}: validation_samples={samples} leaves none of {count} training images; "
            f"set it below {count}"
        )
    # RandomState: NumPy promises that its stream never changes.
    order = torch.from_numpy(numpy.random.RandomState(SPLIT_SEED).permutation(count))
    held, rest = order[:samples], order[samples:]
    return tuple(tensor[rest] for tensor in tensors), tuple(tensor[held] for tensor in tensors)

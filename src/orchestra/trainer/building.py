"""A model for which this rank has no memory, built all the same."""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from orchestra.trainer.checkpoints import writing

_ONE_AT_A_TIME = threading.Lock()  # torch calls hooks of all threads


@contextmanager
def in_files(folder: Path) -> Iterator[None]:
    """The parameters of modules that are made inside lie in nameless files of `folder`.

    Their initial values are drawn there, to the same bits. The kernel keeps as much of them in
    memory as there is room for. Parameters on other devices than the CPU stay there.
    """
    mapped: list[mmap.mmap] = []
    places: set[int] = set()

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if (
            parameter is None
            or isinstance(parameter, nn.UninitializedParameter)
            or parameter.device.type != "cpu"
            or not parameter.numel()
            or parameter.data_ptr() in places
        ):
            return
        with writing(folder), tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(parameter.nbytes)
            memory = mmap.mmap(file.fileno(), parameter.nbytes)
        if mapped and hasattr(mmap, "MADV_DONTNEED"):
            mapped[-1].madvise(mmap.MADV_DONTNEED)  # what was drawn before stays in its file
        values = torch.frombuffer(memory, dtype=parameter.dtype).view(parameter.shape)
        with torch.no_grad():
            values.copy_(parameter)
        parameter.data = values
        mapped.append(memory)
        places.add(parameter.data_ptr())

    with _ONE_AT_A_TIME:
        hook = register_module_parameter_registration_hook(register)
        try:
            yield
        finally:
            hook.remove()

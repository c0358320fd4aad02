"""Writing into a run's folder: a disk that is full or read-only ends the run in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from orchestra.errors import RunFailed


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `RunFailed`, which names `path`, where writing it fails inside."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunFailed(f"cannot write {path}: {reason}") from None


def save_state(path: Path, module: nn.Module) -> None:
    """All parameters and buffers of `module`, as safetensors."""
    state: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, tensor in module.state_dict().items():
        state[name] = values = tensor.detach().cpu().contiguous()
        if values.data_ptr() in written or values.untyped_storage().nbytes() > values.nbytes:
            state[name] = values.clone()  # what shares memory cannot be written
        written.add(values.data_ptr())
    with writing(path):
        save_file(state, path)

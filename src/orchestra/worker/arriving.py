"""A forward pass that begins with the layers whose parameters are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Arriving(Protocol):
    """Values of the parameters that are on their way."""

    def await_for(self, slot: int) -> None:
        """Return when those of the parameter `slot` of the layout, and of all after it, are there.

        That is the order in which a forward pass needs them.
        """
        ...


class AwaitParameters(TorchDispatchMode):
    """While it is active, an operation on one of `parameters` first waits for its values.

    It sees every operation of torch, whichever module a parameter belongs to: hooks on modules
    would miss one that is used by another module, as attention uses its projections.
    """

    def __init__(self, parameters: Sequence[Tensor], arriving: Arriving) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = {id(parameter): slot for slot, parameter in enumerate(parameters)}
        self._arriving = arriving
        self._needed = len(parameters)  # those from here on are there

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for tensor in tensors_among(args):
            slot = self._slots.get(id(tensor), self._needed)
            if slot < self._needed:
                self._arriving.await_for(slot)
                self._needed = slot
        return func(*args, **(kwargs or {}))


def tensors_among(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors among the arguments of an operation, in lists as well."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_among(value)

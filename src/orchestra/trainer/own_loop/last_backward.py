"""What the last backward pass has left, so that changes of the user's are found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn


class LastBackward:
    """The gradient of each parameter as the last backward pass left it, and the parameters then.

    Every change in place, such as clipping, counts up a tensor's version.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradients: list[tuple[Tensor | None, int]] = []  # each `.grad`, with its version
        self._version = 0  # of the parameters

    def note(self) -> None:
        """Note what there is; called at the end of a backward pass."""
        self._version = self._current_version()
        own = [parameter.grad for parameter in self._parameters]
        self._gradients = [(grad, 0 if grad is None else grad._version) for grad in own]

    def forget(self) -> None:
        """Called when a step was made with the gradient."""
        self._gradients = []

    def _current_version(self) -> int:
        """Return a number that grows with each change of the parameters in place."""
        return sum(parameter._version for parameter in self._parameters)

    @property
    def parameters_changed(self) -> bool:
        """True if parameters were changed in place since."""
        return self._current_version() != self._version

    def changes(self) -> Iterator[bool]:
        """Yield for each parameter whether its gradient is not what was left."""
        for parameter, (before, version) in zip(self._parameters, self._gradients, strict=True):
            grad = parameter.grad
            yield grad is not before or (grad is not None and grad._version != version)

    def is_cleared(self) -> bool:
        """Return whether gradients were cleared after a backward that had no step. Called at the
        first one of a backward: where they add up, that is the only one that has changed."""
        return bool(self._gradients) and sum(self.changes()) > 1

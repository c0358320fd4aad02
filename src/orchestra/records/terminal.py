"""Output on a terminal, on which no text of a user or of a library may act."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from orchestra.errors import visible


class Terminal(Console):
    """A console that leaves out control characters of texts, and takes no text for markup."""

    def __init__(
        self, *, stderr: bool = False, width: int | None = None, no_color: bool | None = None
    ) -> None:
        super().__init__(
            highlight=False, markup=False, stderr=stderr, width=width, no_color=no_color
        )

    def on_broken_pipe(self) -> NoReturn:
        """Leave it to the command: a reader who has seen enough is no failure."""
        raise BrokenPipeError

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as rich does; its own control codes stay."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

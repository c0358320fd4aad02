"""From what a user gives to a `Task`."""

from __future__ import annotations

from typing import Any

from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.tasks.registry import TASKS
from orchestra.tasks.task import Task


def load_task(given: object, *, where: str = "task") -> Task:
    """The task that `given` stands for.

    Args:
        given: a `Task`; settings with a `build()`; a function or class that gives either when it
            is called without arguments; or the notation of one of these as text, such as
            "digits", "digits(dropout=0.5)" or "package.module:function".
        where: opens the message of an error.

    Raises:
        InputError: an unknown name or argument, or something that does not give a `Task`.
    """
    try:
        made = _made(given, where)
    except OSError as error:
        if error.filename is None:
            raise
        reason = f"cannot read {error.filename}: {error.strerror}"
        raise InputError(f"{where}: {given}: {reason}") from error
    if not isinstance(made, Task):
        name = given if isinstance(given, str) else getattr(given, "__qualname__", repr(given))
        raise InputError(
            f"{where}: {name} gives a {type(made).__name__}, not an orchestra.tasks.Task"
        )
    return made


def _made(given: object, where: str) -> Any:
    made = parse(given, TASKS, where=where) if isinstance(given, str) else given
    if isinstance(made, type) or (callable(made) and not hasattr(made, "build")):
        made = made()
    return made.build() if hasattr(made, "build") else made

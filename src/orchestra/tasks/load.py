"""From what a user gives to a `Task`."""

from __future__ import annotations

from typing import Any

from torch import nn

from orchestra.errors import InputError
from orchestra.settings import Settings, parse
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
        model = "a model, " * isinstance(made, nn.Module)
        raise InputError(
            f"{where}: {name} gives {model}a {type(made).__name__}, not an orchestra.tasks.Task: "
            "return Task(model=..., train=..., loss=...), in which model is a function that makes "
            "the model"
        )
    return made


def _made(given: object, where: str) -> Any:
    if isinstance(given, str):
        made = parse(given, TASKS, where=where)
    elif callable(given) and not isinstance(given, nn.Module):
        made = given()
    else:
        made = given
    return made.build() if isinstance(made, Settings) and hasattr(made, "build") else made

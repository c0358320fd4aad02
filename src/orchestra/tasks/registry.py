"""The names of tasks: what is trained, on which data, with which loss and metrics."""

from __future__ import annotations

import ast
import importlib.util
import sys
import typing
from pathlib import Path
from typing import Any

from orchestra.errors import InputError
from orchestra.settings import Call, Registry, Settings, read, replace_setting, write
from orchestra.settings.notation import bound, build


def makes_task(target: Any) -> bool:
    """Whether `target`, a function or a class, says that it gives a `Task`, or settings of one: by
    its annotation, or by that of its method `build`. Nothing is called, and torch not imported."""
    maker = getattr(target, "build", target) if isinstance(target, type) else target
    try:
        made = maker if isinstance(maker, type) else typing.get_type_hints(maker).get("return")
    except (NameError, TypeError):  # names that only a type checker imports
        made = getattr(maker, "__annotations__", {}).get("return")
    if isinstance(made, str):
        return made.rpartition(".")[2] == "Task"
    if not isinstance(made, type):
        return False
    names = {f"{cls.__module__}:{cls.__qualname__}" for cls in made.__mro__}
    return "orchestra.tasks.task:Task" in names or (
        issubclass(made, Settings) and hasattr(made, "build")
    )


TASKS = Registry(
    "task",
    {
        "characters": "orchestra.tasks.settings:Characters",
        "cifar10": "orchestra.tasks.settings:Cifar10",
        "digits": "orchestra.tasks.settings:Digits",
        "digits28": "orchestra.tasks.settings:Digits28",
        "images": "orchestra.tasks.settings:Images",
        "mnist": "orchestra.tasks.settings:Mnist",
        "regression": "orchestra.tasks.settings:Regression",
        "synthetic": "orchestra.tasks.settings:Synthetic",
    },
    group="orchestra.tasks",
    makes=makes_task,
)

_OFFERS = 5  # functions of a module that a message names


def task_text(text: str, *, where: str) -> str:
    """`text`, the notation of a task, in its normal form, checked without importing torch.

    A task with a name is checked to the last setting. Of `package.module:function` only the
    package is looked for; importing it, and checking its arguments, is left to `bound`.

    Raises:
        InputError: not a constructor call, an unknown name or argument, a refused value.
    """
    value = _settings_or_call(text, where)
    return str(value) if isinstance(value, Call) else write(value, TASKS)


def task_name(text: str) -> str:
    """The name of a task without place and arguments: "function" of package.module:function(1)."""
    return read(text, where="task").name.rpartition(":")[2]


def replace_task_setting(text: str, path: str, value: str, *, where: str) -> str:
    """The task `text` with the setting at the dotted `path` replaced by what `value` means."""
    task = _settings_or_call(text, where)
    new = replace_setting(task, path, value, TASKS, where=where)
    return task_text(str(new) if isinstance(new, Call) else write(new, TASKS), where=where)


def _settings_or_call(text: str, where: str) -> Settings | Call:
    call = read(text.removesuffix(".py") if isinstance(text, str) else text, where=where)
    if not TASKS.knows(call.name) and (functions := _functions_of(call.name)):
        offers = " or ".join(f"{call.name}:{name}" for name in functions)
        raise InputError(f"{where}: {call.name} is a module; name a function of it: {offers}")
    package = call.name.partition(":")[0].partition(".")[0]
    if ":" not in call.name:
        target = bound(call, TASKS, where=where)
        if isinstance(target, type) and issubclass(target, Settings):
            task = build(call, TASKS, where=where)
            assert isinstance(task, Settings)
            return task
    elif package not in sys.modules and importlib.util.find_spec(package) is None:
        raise InputError(
            f"{where}: there is no package or module {package!r} in this folder or installed"
        )
    return call


def _functions_of(module: str) -> list[str]:
    """Return the functions of a module that name tasks, else its public ones, without an import."""
    spec = None if module in sys.stdlib_module_names else importlib.util.find_spec(module)
    if spec is None or not (spec.origin or "").endswith(".py"):
        return []
    try:
        body = ast.parse(Path(spec.origin or "").read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    public = [it for it in body if isinstance(it, ast.FunctionDef) and it.name[0] != "_"]
    tasks = [it for it in public if any(map(_names_task, ast.walk(it)))]
    return [it.name for it in tasks or public][:_OFFERS]


def _names_task(node: ast.AST) -> bool:
    return "Task" in (getattr(node, "id", None), getattr(node, "attr", None))

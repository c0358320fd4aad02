"""Names that are imported when first used, so that settings load without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def lazy_names(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that finds each name in the submodule `places` gives for it."""

    modules: dict[str, ModuleType] = {}  # to ask the import system each time takes a while

    def find(name: str) -> Any:
        if name not in modules:
            if name not in places:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            modules[name] = importlib.import_module(f"{package}.{places[name]}")
        return getattr(modules[name], name)

    return find

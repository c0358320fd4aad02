"""Names that are imported when they are first used, so that settings load without torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

from orchestra.errors import InputError, nearest, text_of


class Registry:
    """Known names of one kind, each with its "module:attribute".

    Args:
        kind: what is named, in messages ("strategy").
        known: name -> "module:attribute" of what comes with the package.
        group: entry points of this group add names of installed packages; ours win.
        makes: whether a function, or a class, says that it makes what is named; it may then stand
            behind a name. Otherwise only settings may: a file must not be able to call os:system.
        arguments: name -> place of what stands in their arguments only; no message offers all.
        elsewhere: name -> notation here, of what users know by other names.
    """

    def __init__(
        self,
        kind: str,
        known: Mapping[str, str],
        group: str | None = None,
        *,
        arguments: Mapping[str, str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
        makes: Callable[[Any], bool] | None = None,
    ) -> None:
        self.kind = kind
        self.makes = makes
        self._arguments = dict(arguments or {})
        self._elsewhere = {key.lower(): notation for key, notation in (elsewhere or {}).items()}
        self._known = {**known, **self._arguments}
        self._group = group

    @cached_property
    def _all(self) -> dict[str, str]:
        if self._group is None:
            return self._known
        from importlib.metadata import entry_points

        return {point.name: point.value for point in entry_points(group=self._group)} | self._known

    def names(self) -> list[str]:
        """Return every known name, those of installed packages included."""
        return sorted(self._all)

    def knows(self, name: str) -> bool:
        """Return whether `name` is known, or gives a place to import from."""
        return ":" in name or name in self._known or name in self._all

    def _hint(self, name: str) -> str:
        if notation := self._elsewhere.get(name.lower().replace("-", "").replace("_", "")):
            return f"write {notation}"
        first = [known for known in self._all if known not in self._arguments]
        return nearest(name, first, self._arguments)

    def resolve(self, name: str, *, where: str) -> Any:
        """Import and return the object that `name` stands for.

        Raises:
            InputError: an unknown name, no such module or attribute, or an import that failed.
        """
        place = name if ":" in name else self._known.get(name) or self._all.get(name)
        if place is None:
            raise InputError(f"{where}: unknown {self.kind} {name!r}; {self._hint(name)}")
        module_name, _, attribute = place.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            # The module itself, or a package around it; else something that it imports is missing.
            if missing is not None and f"{module_name}.".startswith(f"{missing}."):
                reason = f"there is no module {module_name!r} in this folder or what is installed"
            else:
                line = "".join(text_of(error).splitlines()[:1])
                reason = f"importing {module_name} failed: {type(error).__name__}: {line}"
            raise InputError(f"{where}: {reason}") from error
        if not hasattr(module, attribute):
            hint = nearest(attribute, [key for key in vars(module) if not key.startswith("_")])
            raise InputError(f"{where}: {module_name} has no {attribute!r}; {hint}")
        return getattr(module, attribute)

    def name_of(self, cls: type) -> str:
        """Return the name under which `resolve` finds `cls`, without importing anything."""
        place = f"{cls.__module__}:{cls.__qualname__}"
        return next((name for name, known in self._all.items() if known == place), place)


class LazyModule:
    """Stands for a module that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self._module), name)
        setattr(self, name, found)  # from now on
        return found


def lazy_package(
    package: str, *modules: str, names: Collection[str] | None = None
) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that finds each name, or each of `names`, in the first of
    its `modules` which has it.
    """

    def find(name: str) -> Any:
        known = not name.startswith("_") if names is None else name in names
        for module in modules if known else ():
            there = importlib.import_module(f"{package}.{module}")
            if hasattr(there, name):
                setattr(sys.modules[package], name, getattr(there, name))  # from now on
                return getattr(there, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find

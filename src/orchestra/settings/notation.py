"""The one notation: a constructor call is the name of an object, in files and on command lines.

    ParameterServer(servers=2, consistency="asynchronous")
    Switch(Single, my_package.rules:Mine(rate=0.5), when=AfterSteps(100))

It is read from Python's syntax tree. Names are looked up in a `Registry`, arguments are literals,
lists, tuples, dicts and further calls; nothing is evaluated.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from orchestra.errors import InputError, nearest, text_of
from orchestra.settings.base import Settings, call_text, settings_of

MAX_NESTED = 40  # the most levels of a text that is read, as notation or as YAML
MAX_DIGITS = 100  # the most digits of a whole number in such a text
MAX_CHARACTERS = 400_000
_PARSING = threading.RLock()


def expression(text: str) -> ast.expr:
    """Return the syntax tree of one expression.

    Raises:
        ValueError: it is none, or too long, too deep, or has a number with too many digits.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has more than {MAX_CHARACTERS:,} characters")
    try:
        # CPython 3.11 counts the depth of the tree for all threads together (its issue 106905).
        with _PARSING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the syntax: an unknown escape stays as it is
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(error.msg) from None
    except (RecursionError, MemoryError):
        raise ValueError(f"it is nested more than {MAX_NESTED} deep") from None
    _check(tree)
    return tree


def _check(tree: ast.expr) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(MAX_NESTED):
        for node in level:
            number = node.value if isinstance(node, ast.Constant) else None
            # Python refuses to print a number of more than 4,300 digits, in a message too.
            if isinstance(number, int) and abs(number) >= 10**MAX_DIGITS:
                raise ValueError(f"a number of more than {MAX_DIGITS} digits is beyond any use")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ValueError(f"it is nested more than {MAX_NESTED} deep")


# A quoted text (kept as it is), or `package.module:Name` (which Python's grammar does not have).
# Each character is looked at once: a text without end is one, and no name begins inside a word.
_REFERENCE = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|['"].*)"""
    r"""|(?P<reference>(?<![\w.])[A-Za-z_][\w.]*:[A-Za-z_]\w*)""",
    re.DOTALL,
)

OPERATORS: Mapping[type[ast.operator], str] = {ast.BitAnd: "Both", ast.BitOr: "Either"}
"""The calls for which `a & b` and `a | b` are short forms."""


@dataclass(frozen=True)
class Call:
    """A call as it is written: a name and its arguments, which may hold further calls."""

    name: str
    positional: tuple[object, ...] = ()
    keywords: Mapping[str, object] = field(default_factory=dict)

    def with_setting(self, name: str, value: object) -> Call:
        return Call(self.name, self.positional, {**self.keywords, name: value})

    def __str__(self) -> str:
        return write(self)


def parse(text: str | Call, registry: Registry, *, where: str) -> Any:
    """Return the object that `text` names; `where` opens the message of every error.

    Raises:
        InputError: not a constructor call, an unknown name or argument, or a refused value.
    """
    return build(read(text, where=where), registry, where=where)


def read(text: str | Call, *, where: str) -> Call:
    """Return the call that `text` spells, with nothing looked up; a bare name is a call."""
    value = text if isinstance(text, Call) else read_any(text, where=where)
    if not isinstance(value, Call):
        raise InputError(f"{where}: {text!r} is not a constructor call such as Name(argument=1)")
    return value


def read_any(text: object, *, where: str) -> object:
    """Return the call or literal, maybe with calls in it, that `text` spells; None if no text."""
    references: dict[str, str] = {}

    def stand_in(match: re.Match[str]) -> str:
        if match["text"]:
            return match["text"]
        name = f"reference_{len(references)}__"
        references[name] = match["reference"]
        return name

    if not isinstance(text, str):
        return None
    try:
        return _value(expression(_REFERENCE.sub(stand_in, text.strip())), references)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except ValueError as error:
        raise InputError(f"{where}: {text.strip()!r} cannot be read: {error}") from None


def _value(node: ast.expr, references: Mapping[str, str]) -> object:
    """Return the value of a tree, in which `references` stand for `package.module:Name`."""

    def inside(*nodes: ast.expr) -> list[object]:
        return [_value(item, references) for item in nodes]

    match node:
        case ast.Constant(value=value) if value is not Ellipsis:
            return value
        case ast.Name() | ast.Attribute():
            return Call(_name(node, references))
        case ast.Call(func=func, args=args, keywords=keywords):
            if any(isinstance(argument, ast.Starred) for argument in args):
                raise InputError("arguments cannot be unpacked with *")
            if any(keyword.arg is None for keyword in keywords):
                raise InputError("arguments cannot be unpacked with **")
            name, positional = _name(func, references), tuple(inside(*args))
            given = inside(*(keyword.value for keyword in keywords))
            return Call(name, positional, _each_once([str(it.arg) for it in keywords], given))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as operator, right=right):
            return Call(OPERATORS[type(operator)], tuple(inside(left, right)))
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return inside(*items) if isinstance(node, ast.List) else tuple(inside(*items))
        case ast.Dict(keys=keys, values=items) if None not in keys:
            names = [key.value for key in keys if isinstance(key, ast.Constant)]
            if len(names) < len(keys):
                raise InputError("the keys of a dict have to be literals")
            return _each_once(names, inside(*items))
    raise InputError(
        f"{ast.unparse(node)!r} is not a literal, a list, a tuple, a dict or a call of a name"
    )


def _each_once(keys: Sequence[Any], values: Iterable[object]) -> dict[Any, object]:
    found: dict[Any, object] = {}
    for key, value in zip(keys, values, strict=True):
        if key in found:
            raise InputError(f"{key} is given twice")
        found[key] = value
    return found


def _name(node: ast.expr, references: Mapping[str, str]) -> str:
    if isinstance(node, ast.Name):
        return references.get(node.id, node.id)
    text = ast.unparse(node)
    if isinstance(node, ast.Attribute):
        module, _, attribute = text.rpartition(".")
        raise InputError(f"{text!r} is not a name; write {module}:{attribute}")
    raise InputError(f"{text!r} cannot be called: only names can")


def calls_in(value: object) -> Iterator[Call]:
    """Yield the outermost calls in `value`, in lists, tuples and dicts too."""
    if isinstance(value, Call):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from calls_in(item)


def build(value: object, registry: Registry, *, where: str) -> Any:
    """Return `value` with each `Call` in it made: looked up, its arguments checked, then called."""
    if isinstance(value, Call):
        target = bound(value, registry, where=where)
        positional = [build(item, registry, where=where) for item in value.positional]
        keywords = {key: build(item, registry, where=where) for key, item in value.keywords.items()}
        try:
            return target(*positional, **keywords)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        except SystemExit as error:
            raise InputError(f"{where}: {value.name} exits: SystemExit: {error}") from error
    if isinstance(value, list | tuple):
        return type(value)(build(item, registry, where=where) for item in value)
    if isinstance(value, dict):
        return {key: build(item, registry, where=where) for key, item in value.items()}
    return value


def bound(call: Call, registry: Registry, *, where: str) -> Callable[..., Any]:
    """Return the callable that `call` names; its arguments fit the signature, values unchecked."""
    target: object = registry.resolve(call.name, where=where)
    if not callable(target):
        raise InputError(f"{where}: {call.name!r} cannot be called")
    if missing := getattr(target, "__abstractmethods__", None):
        names = ", ".join(sorted(missing))
        raise InputError(f"{where}: {call.name} is not complete: it has to define {names}")
    if isinstance(target, type) and issubclass(target, Settings):
        try:
            settings_of(target)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    else:
        # A name in a file may be any function, as os:system: only what says so is called.
        _require_maker(target, call, registry, where)
    signature = inspect.signature(target)
    _require_known_arguments(call, registry, where)
    known = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for name in [] if takes_any else call.keywords:
        if not known:
            raise InputError(f"{where}: {call.name} takes no arguments, but got {name!r}")
        if name not in known:
            hint = nearest(name, known)
            raise InputError(f"{where}: {call.name} has no argument {name!r}; {hint}")
    try:
        # Before anything is made, so that the message can name the arguments.
        signature.bind(*call.positional, **call.keywords)
    except TypeError as error:
        raise InputError(f"{where}: {call.name}({', '.join(known)}): {error}") from None
    return target


def _require_maker(target: object, call: Call, registry: Registry, where: str) -> None:
    kind = registry.kind
    if registry.makes is None:
        raise InputError(f"{where}: {call.name!r} is no {kind}: not a class of settings")
    if not registry.makes(target):
        attribute = call.name.rpartition(":")[2]
        raise InputError(
            f"{where}: {call.name!r} does not say that it makes a {kind}; a function that does is "
            f"written def {attribute}(...) -> {kind.capitalize()}:"
        )


def _require_known_arguments(call: Call, registry: Registry, where: str) -> None:
    for value in (*call.positional, *call.keywords.values()):
        if isinstance(value, Call) and not registry.knows(value.name):
            hint = registry.near(value.name)
            if value == Call(value.name):  # which a text without quotation marks is, too
                quote = f"if it is a text, quote it: {value.name!r}"
                hint = f"{hint} ({quote})" if hint else quote
            hint = hint or "orchestra list shows those that are"
            raise InputError(f"{where}: {value.name!r} in {call.name} is no known name; {hint}")


def write(value: object, registry: Registry | None = None) -> str:
    """Return the notation that `parse` turns back into `value`.

    An object whose class `registry` does not know is written as `package.module:Name(...)`.
    """

    def text(item: object) -> str:
        if isinstance(item, Settings):
            name = None if registry is None else registry.name_of(type(item))
            return call_text(item, text, name)
        if isinstance(item, Call):
            keywords = [f"{key}={text(each)}" for key, each in item.keywords.items()]
            return f"{item.name}({', '.join([*map(text, item.positional), *keywords])})"
        if isinstance(item, tuple):
            return f"({', '.join(map(text, item))}{',' * (len(item) == 1)})"
        if isinstance(item, list):
            return f"[{', '.join(map(text, item))}]"
        if isinstance(item, Mapping):
            pairs = (f"{key!r}: {text(each)}" for key, each in item.items())
            return f"{{{', '.join(pairs)}}}"
        return repr(item)

    return text(value)


@lru_cache(maxsize=1)
def entry_points_on(path: tuple[str, ...]) -> Any:
    """Return all entry points of what is installed on the module path, `path`; they have `select`.

    Every installed package is looked at, so all registries share one search.
    """
    from importlib.metadata import entry_points

    return entry_points()


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
        points = entry_points_on(tuple(sys.path)).select(group=self._group)
        return {point.name: point.value for point in points} | self._known

    def names(self) -> list[str]:
        """Return every known name, those of installed packages included."""
        return sorted(self._all)

    def knows(self, name: str) -> bool:
        """Return whether `name` is known, or gives a place to import from."""
        return ":" in name or name in self._known or name in self._all

    def near(self, name: str) -> str:
        """Return what an unknown name is likely to stand for; empty if nothing is near."""
        if notation := self._elsewhere.get(name.lower().replace("-", "").replace("_", "")):
            return f"write {notation}"
        close = difflib.get_close_matches(name, self._all, n=1, cutoff=0.75)
        return f"did you mean {close[0]!r}?" if close else ""

    def _hint(self, name: str) -> str:
        """Return what to write in place of an unknown name."""
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
        # A script without a main guard may exit where it is imported.
        except (Exception, SystemExit) as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            # The module itself, or a package around it; else something that it imports is missing.
            if missing is not None and f"{module_name}.".startswith(f"{missing}."):
                raise InputError(
                    f"{where}: there is no module {module_name!r} in this folder or what is "
                    "installed"
                ) from None
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

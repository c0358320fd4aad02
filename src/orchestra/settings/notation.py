"""The one notation: a constructor call is the name of an object, in files and on command lines.

    ParameterServer(servers=2, consistency="asynchronous")
    Switch(Single, my_package.rules:Mine(rate=0.5), when=AfterSteps(100))

It is read from Python's syntax tree. Names are looked up in a `Registry`, arguments are literals,
lists, tuples, dicts and further calls; nothing is evaluated.
"""

from __future__ import annotations

import ast
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestra.errors import InputError, nearest
from orchestra.settings.base import (
    MOST_DIGITS,
    MOST_NESTED,
    Settings,
    call_text,
    require_setting,
    type_hints,
    wants_notation,
)
from orchestra.settings.registry import Registry

MOST_CHARACTERS = 400_000
_PARSING = threading.RLock()


def expression(text: str) -> ast.expr:
    """The tree of one expression.

    Raises:
        ValueError: it is none, or too long, too deep, or has a number with too many digits.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    try:
        # CPython 3.11 counts the depth of the tree for all threads together (its issue 106905).
        with _PARSING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the syntax: an unknown escape stays as it is
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(error.msg) from None
    except (RecursionError, MemoryError):
        raise ValueError(f"it is nested more than {MOST_NESTED} deep") from None
    _check(tree)
    return tree


def _check(tree: ast.expr) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(MOST_NESTED):
        for node in level:
            number = node.value if isinstance(node, ast.Constant) else None
            if isinstance(number, int) and abs(number) >= 10**MOST_DIGITS:
                raise ValueError(f"a number of more than {MOST_DIGITS} digits is beyond any use")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ValueError(f"it is nested more than {MOST_NESTED} deep")


# A quoted text (kept as it is), or `package.module:Name` (which Python's grammar does not have).
_REFERENCE = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|(?P<reference>[A-Za-z_][\w.]*:[A-Za-z_]\w*)"""
)

OPERATORS: Mapping[type[ast.operator], str] = {ast.BitAnd: "Both", ast.BitOr: "Either"}
"""What `a & b` and `a | b` are short for."""


@dataclass(frozen=True)
class Call:
    """A call as it is written: a name and its arguments, which may hold further calls."""

    name: str
    positional: tuple[object, ...] = ()
    keywords: Mapping[str, object] = field(default_factory=dict)

    def with_setting(self, name: str, value: object) -> Call:
        """A copy with the keyword argument `name` set."""
        return Call(self.name, self.positional, {**self.keywords, name: value})

    def __str__(self) -> str:
        arguments = [value_text(value, str) for value in self.positional]
        arguments += [f"{key}={value_text(value, str)}" for key, value in self.keywords.items()]
        return f"{self.name}({', '.join(arguments)})"


def parse(text: str, registry: Registry, *, where: str) -> Any:
    """The object that `text` names; `where` opens the message of every error.

    Raises:
        InputError: not a constructor call, an unknown name or argument, or a refused value.
    """
    return build(read(text, where=where), registry, where=where)


def read(text: str, *, where: str) -> Call:
    """The call that `text` spells, with nothing looked up; a bare name is a call."""
    if not isinstance(text, str):
        raise InputError(f"{where}: {text!r} is not a constructor call such as Name(argument=1)")
    value = _Reader(text, where).value()
    if not isinstance(value, Call):
        raise InputError(f"{where}: {text!r} is not a constructor call such as Name(argument=1)")
    return value


def calls_in(value: object) -> Iterator[Call]:
    """The outermost calls in what was read, in lists, tuples and dicts too."""
    if isinstance(value, Call):
        yield value
    elif isinstance(value, Mapping):
        yield from calls_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from calls_in(item)


def literal(text: str) -> object:
    """`text` of a command line as a value: a Python literal, else what YAML makes of it."""
    try:
        return ast.literal_eval(expression(text.strip()))
    except (ValueError, TypeError):
        pass
    from orchestra.settings.reading import yaml_value

    return yaml_value(text)


def build(value: object, registry: Registry, *, where: str) -> Any:
    """`value` with each `Call` in it made: names looked up, arguments checked, then called."""
    if isinstance(value, Call):
        target = bound(value, registry, where=where)
        positional = [build(item, registry, where=where) for item in value.positional]
        keywords = {key: build(item, registry, where=where) for key, item in value.keywords.items()}
        try:
            return target(*positional, **keywords)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    if isinstance(value, list | tuple):
        return type(value)(build(item, registry, where=where) for item in value)
    if isinstance(value, dict):
        return {key: build(item, registry, where=where) for key, item in value.items()}
    return value


def bound(call: Call, registry: Registry, *, where: str) -> Callable[..., Any]:
    """What `call` would call; its arguments are checked against the signature, not their values."""
    target: object = registry.resolve(call.name, where=where)
    if not callable(target):
        raise InputError(f"{where}: {call.name!r} cannot be called")
    if missing := getattr(target, "__abstractmethods__", None):
        names = ", ".join(sorted(missing))
        raise InputError(f"{where}: {call.name} is not complete: it has to define {names}")
    if not (isinstance(target, type) and issubclass(target, Settings)):
        _require_maker(target, call, registry, where)
    signature = inspect.signature(target)
    _no_bare_text(call, registry, where)
    if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        for name in call.keywords:
            if name not in signature.parameters:
                raise InputError(f"{where}: {_unknown_argument(call.name, name, signature)}")
    try:
        signature.bind(*call.positional, **call.keywords)
    except TypeError as error:
        raise InputError(f"{where}: {call.name}{signature_text(signature)}: {error}") from None
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


def _no_bare_text(call: Call, registry: Registry, where: str) -> None:
    for value in (*call.positional, *call.keywords.values()):
        if isinstance(value, Call) and value == Call(value.name) and not registry.knows(value.name):
            raise InputError(
                f"{where}: {value.name!r} in {call.name} is no known {registry.kind}; "
                f"if it is a text, quote it: {value.name!r}"
            )


def signature_text(signature: inspect.Signature) -> str:
    """The names of the arguments: (first, then, when)."""
    return f"({', '.join(signature.parameters)})"


def write(value: object, registry: Registry) -> str:
    """The notation that `parse` turns back into `value`.

    An object whose class `registry` does not know is written as `package.module:Name(...)`.
    """

    def text(item: object) -> str:
        if isinstance(item, Settings):
            return call_text(item, text, registry.name_of(type(item)))
        return value_text(item, text)

    return text(value)


def value_text(value: object, text: Callable[[object], str]) -> str:
    """A list, tuple or dict with its items written by `text`; a literal as Python writes it."""
    if isinstance(value, tuple):
        items = ", ".join(value_text(item, text) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, list):
        return f"[{', '.join(value_text(item, text) for item in value)}]"
    if isinstance(value, Mapping):
        items = ", ".join(f"{key!r}: {value_text(item, text)}" for key, item in value.items())
        return f"{{{items}}}"
    if isinstance(value, Settings | Call):
        return text(value)
    return repr(value)


def replace_setting(value: Any, path: str, text: str, registry: Registry, *, where: str) -> Any:
    """A copy of `value` with the setting at the dotted `path` replaced by what `text` means.

    `text` is a literal, a YAML scalar, or, where the setting holds an object, its notation.

    Raises:
        InputError: no such setting (the nearest one is offered), or a refused value.
    """
    name, _, rest = path.partition(".")
    try:
        if rest:
            inner = _get(value, name)
            new = replace_setting(inner, rest, text, registry, where=where)
        else:
            new = _setting_value(value, name, text, registry, where)
        return {**value, name: new} if isinstance(value, dict) else value.with_setting(name, new)
    except InputError as error:
        message = str(error)
        raise InputError(message if message.startswith(where) else f"{where}: {message}") from None


def _get(value: Any, name: str) -> Any:
    """What `value` holds under `name`: an object with settings of its own."""
    if isinstance(value, Call):
        value = value.keywords
    if isinstance(value, Mapping):
        _require_key(value, name)
        inner = value[name]
    else:
        require_setting(type(value), name)
        inner = getattr(value, name)
    if not isinstance(inner, Settings | Call | dict):
        raise InputError(f"{name} is {inner!r}, which has no settings of its own")
    return inner


def _setting_value(value: Any, name: str, text: str, registry: Registry, where: str) -> object:
    """What `text` means as the setting `name` of `value`."""
    new = literal(text)
    if isinstance(value, Settings):
        wants_object = wants_notation(type_hints(type(value)).get(name, str))
    elif isinstance(value, Mapping):
        _require_key(value, name)
        wants_object = isinstance(value[name], Settings)
    else:
        wants_object = False
    return parse(text, registry, where=where) if wants_object and isinstance(new, str) else new


def _require_key(mapping: Mapping[str, object], name: str) -> None:
    if name not in mapping:
        raise InputError(f"there is no {name!r}; {nearest(name, map(str, mapping))}")


def _unknown_argument(name: str, argument: str, signature: inspect.Signature) -> str:
    if not signature.parameters:
        return f"{name} takes no arguments, but got {argument!r}"
    return f"{name} has no argument {argument!r}; {nearest(argument, signature.parameters)}"


class _Reader:
    """One text on its way into a `Call`."""

    def __init__(self, text: str, where: str) -> None:
        self._text = text.strip()
        self._where = where
        self._references: dict[str, str] = {}

    def value(self) -> object:
        source = _REFERENCE.sub(self._stand_in, self._text)
        try:
            tree = expression(source)
        except ValueError as error:
            raise self._refusal(f"{self._text!r} cannot be read: {error}") from None
        return self._read(tree)

    def _stand_in(self, match: re.Match[str]) -> str:
        if match["text"]:
            return match["text"]
        name = f"reference_{len(self._references)}__"
        self._references[name] = match["reference"]
        return name

    def _refusal(self, message: str) -> InputError:
        return InputError(f"{self._where}: {message}")

    def _read(self, node: ast.expr) -> object:
        match node:
            case ast.Constant(value=value) if value is not Ellipsis:
                return value
            case ast.Name() | ast.Attribute():
                return Call(self._name(node))
            case ast.Call(func=func, args=args, keywords=keywords):
                return self._call(func, args, keywords)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as operator, right=right):
                return Call(OPERATORS[type(operator)], (self._read(left), self._read(right)))
            case ast.List(elts=items):
                return [self._read(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self._read(item) for item in items)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                found: dict[object, object] = {}
                for key, item in zip(map(self._literal_key, keys), values, strict=True):
                    if key in found:
                        raise self._refusal(f"{key!r} is given twice")
                    found[key] = self._read(item)
                return found
        raise self._refusal(
            f"{ast.unparse(node)!r} is not a literal, a list, a tuple, a dict or a call of a name"
        )

    def _call(self, func: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Call:
        for argument in args:
            if isinstance(argument, ast.Starred):
                raise self._refusal("arguments cannot be unpacked with *")
        given: dict[str, object] = {}
        for keyword in keywords:
            if keyword.arg is None:
                raise self._refusal("arguments cannot be unpacked with **")
            if keyword.arg in given:
                raise self._refusal(f"{keyword.arg} is given twice")
            given[keyword.arg] = self._read(keyword.value)
        return Call(self._name(func), tuple(self._read(item) for item in args), given)

    def _name(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return self._references.get(name, name)
            case ast.Attribute():
                name = ast.unparse(node)
                module, _, attribute = name.rpartition(".")
                raise self._refusal(f"{name!r} is not a name; write {module}:{attribute}")
        raise self._refusal(f"{ast.unparse(node)!r} cannot be called: only names can")

    def _literal_key(self, node: ast.expr | None) -> object:
        if isinstance(node, ast.Constant):
            return node.value
        raise self._refusal("the keys of a dict have to be literals")

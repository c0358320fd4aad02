"""Settings from the entries of a file: each message gives the place, the reason and the remedy."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, TypeVar, get_args, get_origin

import yaml

from orchestra.errors import REPEATED, InputError, nearest
from orchestra.settings.base import (
    REQUIRED,
    Settings,
    checked,
    default_of,
    from_plain,
    settings_of,
    type_hints,
)
from orchestra.settings.notation import (
    MAX_DIGITS,
    MAX_NESTED,
    expression,
)

MAX_CHARACTERS = 4_000_000
MAX_BYTES = 1_000_000_000  # of a file of a run; a million steps of a rank have a third of that
MAX_VALUES = 500_000  # the most values of a text, where each alias counts as all that it repeats


class Refused(yaml.MarkedYAMLError):
    """YAML that is beyond the bounds, or gives something twice."""

    def __init__(self, problem: str, at: Any) -> None:
        super().__init__(problem=problem, problem_mark=at.start_mark)


class Loader(yaml.SafeLoader):
    """YAML's core schema (1.2), where PyYAML follows 1.1; constructs plain data only."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise yaml.YAMLError(f"it has more than {MAX_CHARACTERS:,} characters")
        super().__init__(text)
        self._nested = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node as PyYAML does, but not nested without end."""
        if self._nested == MAX_NESTED:
            at = self.peek_event()  # type: ignore[no-untyped-call]
            raise Refused(f"is nested more than {MAX_NESTED} deep", at)
        # PyYAML recurses: a text of brackets would end in a RecursionError, or worse
        self._nested += 1
        node = super().compose_node(parent, index)
        self._nested -= 1
        return node

    def get_single_node(self) -> Any:
        """Return the root, whose keys all differ, and whose aliases fit into memory."""
        root = super().get_single_node()
        if root is not None:
            self._check(root, {})
        return root

    def _check(self, node: yaml.Node, values: dict[int, int]) -> int:
        """Count the values that `node` stands for; `values` has those of the nodes before."""
        if id(node) in values:
            # Its count is not known yet: it is under way above.
            if not values[id(node)]:
                raise Refused("an alias stands inside of what it repeats", node)
            return values[id(node)]
        values[id(node)] = 0
        inside = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            inside = [item for _, item in node.value]
        count = 1 + sum(self._check(item, values) for item in inside)
        # Aliases of aliases grow exponentially, from a few lines (the "billion laughs")
        if count > MAX_VALUES:
            raise Refused(f"with its aliases it has more than {MAX_VALUES:,} values", node)
        values[id(node)] = count
        return count

    def _check_keys(self, mapping: yaml.MappingNode) -> None:
        lines: dict[object, int] = {}
        for node, _ in mapping.value:
            if not isinstance(node, yaml.ScalarNode):
                raise Refused("a key has to be a word", node)
            key = node.value if node.tag.endswith(":merge") else self.construct_object(node)
            # As values and as texts: 1, 0x1 and "1" are one label.
            for name in (key, str(key)):
                if name in lines:
                    raise Refused(f"{node.value!r} stands in line {lines[name]}, too", node)
            lines[key] = lines[str(key)] = node.start_mark.line + 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct as PyYAML does, which leaves it to Python to refuse `!!int x` and its like."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            kind = node.tag.rpartition(":")[2]
            raise Refused(f"{str(node.value)[:REPEATED]!r} is no !!{kind}", node) from None


# PyYAML reads `on` and `no` as booleans and 1e-3 as text; here both are as in YAML 1.2.
_PLAIN = {"tag:yaml.org,2002:" + kind for kind in ("null", "merge")}
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _PLAIN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
):
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:" + _kind, re.compile(f"^(?:{_pattern})$"), list(_first)
    )


def _integer(loader: Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if len(text) > MAX_DIGITS:
        raise Refused(f"a number of {len(text)} digits is beyond any use", node)
    return int(text, 16 if "x" in text else 10)  # 010 is ten, not PyYAML's octal eight


Loader.add_constructor("tag:yaml.org,2002:int", _integer)


class _Dumper(yaml.SafeDumper):
    """Quotes what `Loader` would otherwise not take for text."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def yaml_text(value: object) -> str:
    """Return `value`, of plain data, as YAML in the order given."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def yaml_value(text: str, where: str = "") -> object:
    """Return the value of a YAML text, or the text itself where it is no YAML.

    Raises:
        InputError: it is YAML that is refused; `where`, if given, opens the message.
    """
    try:
        return yaml.load(text, Loader=Loader)
    except Refused as refused:
        raise InputError(f"{where}: {refused.problem}".removeprefix(": ")) from None
    # A notation such as AllReduce("ring") is no YAML, and is read as the text that it is
    except yaml.YAMLError:
        return text


def literal(text: str, where: str = "") -> object:
    """Return `text` of a command line as a value: a Python literal, else the value in YAML.

    Raises:
        InputError: as for `yaml_value`.
    """
    try:
        return ast.literal_eval(expression(text.strip()))
    except (ValueError, TypeError):
        # No literal of Python's; as a number it is refused by the name of its setting.
        if text.strip().lstrip("+-").lower() in ("nan", "inf"):
            return float(text)
        return yaml_value(text, where)


@dataclass(frozen=True)
class Entry:
    """The value of one key, and where it stands.

    Attributes:
        where: opens the message about this entry ("exp.yaml:7").
        inside: by key, or by index, the entries of a value that is a mapping or a list.
    """

    value: Any
    where: str
    inside: Mapping[Any, Entry] = field(default_factory=dict)

    def at(self, key: str) -> str:
        """Return the place of this entry for messages; with its dotted key unless an option."""
        return self.where if self.where.startswith("--") else f"{self.where} {key}".rstrip()


def read_document(path: Path, *, needs: str, example: str) -> dict[str, Entry]:
    """Return the keys of the YAML mapping in `path`, in order.

    `needs` names the keys that it has to have, and `example` is a line of such a file.

    Raises:
        InputError: the file cannot be read, is no YAML, no mapping, or gives a key twice.
    """
    try:
        with path.open(encoding="utf-8") as file:
            # One more than allowed, so that a larger file is noticed without being read.
            text = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not a text file in UTF-8") from None
    return document_in(text, str(path), needs=needs, example=example)


def document_in(text: str, path: str, *, needs: str, example: str) -> dict[str, Entry]:
    """Return the keys of the YAML mapping in `text`, the content of the file `path`; as
    `read_document` does.
    """
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise InputError(f"{path}: is empty; it needs at least {needs}")
        if not isinstance(root, yaml.MappingNode):
            raise InputError(f"{path}: is not a mapping of keys to values, such as {example}")
        return {str(key): entry for key, entry in _inside(loader, root, path).items()}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        kind = "" if isinstance(error, Refused) else "not YAML: "
        raise InputError(f"{path}{line}: {kind}{error.problem or error.context}") from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise InputError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None


def _inside(loader: Loader, node: yaml.Node, name: str) -> dict[Any, Entry]:
    """Return the items of a sequence or a mapping, each with the line of its key."""
    items: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        items = [(index, item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        items = [(loader.construct_object(key, deep=True), key, it) for key, it in node.value]
    return {
        key: Entry(
            loader.construct_object(item, deep=True),
            f"{name}:{place.start_mark.line + 1}",
            _inside(loader, item, name),
        )
        for key, place, item in items
    }


def open_file(path: Path) -> BinaryIO:
    """Open a file of a run to read it; raise `OSError`, or `InputError` if it is no regular one."""
    # A FIFO that nobody writes to would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path}: is damaged: not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file of a run, whose folder others may have written to; unpacked.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file cannot be read, is no regular file, or has more than `MAX_BYTES`.
    """
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise InputError(f"{path}: is damaged: more than {MAX_BYTES // 10**6:,} MB")
            if path.suffix == ".gz":
                return gzip.GzipFile(fileobj=file).read(MAX_BYTES)
            return file.read(MAX_BYTES)
    except FileNotFoundError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: is damaged: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a run's YAML file; raise as `read_bytes` does, and `InputError` if it
    is damaged."""
    try:
        value = yaml_value(read_bytes(path).decode(), f"{path}: is damaged")
    except UnicodeDecodeError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{path}: is damaged: not a mapping in YAML")
    return value


def json_value(text: bytes | str, where: str) -> Any:
    """Return the value of a JSON text; raise `InputError`, which `where` opens, if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise InputError(f"{where}: is damaged: {reason}") from None


def read_json(path: Path, hint: Any) -> Any:
    """Return the value of a run's JSON file, of the annotation `hint`; raise as `read_bytes` does,
    and `InputError` if it is damaged."""
    return plain_value(hint, json_value(read_bytes(path), str(path)), str(path))


def plain_value(hint: Any, value: object, where: str) -> Any:
    """`from_plain`, finite; its complaint becomes an `InputError` that `where` opens."""
    try:
        return from_plain(hint, value, finite=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{where}: is damaged: {error}") from None


S = TypeVar("S", bound=Settings)


def mapping(entry: Entry, key: str, example: str) -> Mapping[Any, Entry]:
    """Return the entries inside `entry`, which has to be a mapping."""
    if not isinstance(entry.value, Mapping):
        raise InputError(f"{entry.at(key)}: has to be a mapping, such as {example}")
    # Values from Python or an option have no lines of their own
    return entry.inside or {name: Entry(item, entry.where) for name, item in entry.value.items()}


def require(inside: Mapping[Any, Entry], examples: Mapping[str, str], where: str) -> None:
    """Refuse a mapping that lacks a key of `examples`, which has an example value of each."""
    for name, example in examples.items():
        if name not in inside:
            raise InputError(f"{where}: {name} is missing; add it, such as {name}: {example}")


def refuse_others(inside: Mapping[Any, Entry], key: str, known: Iterable[str]) -> None:
    """Refuse a mapping, at the dotted `key` of the file or at its root, with an unknown key."""
    names = list(known)
    for name, entry in inside.items():
        if name not in names:
            hint = nearest(str(name), names)
            raise InputError(f"{entry.at(key)}: unknown key {name!r}; {hint}")


@dataclass(frozen=True)
class Reader:
    """Reads the settings of one kind of file.

    A quantity is read with its unit, and settings inside of settings as a mapping.

    Attributes:
        examples: by the name of a setting, what it may look like, for messages.
        special: by the name of a setting, the function that reads its entry; called with the
            entry and its dotted key. None (`null`) and the default are never given to it.
    """

    examples: Mapping[str, str] = field(default_factory=dict)
    special: Mapping[str, Callable[[Entry, str], Any]] = field(default_factory=dict)

    def read_settings(
        self,
        cls: type[S],
        entry: Entry,
        key: str,
        inside: Mapping[Any, Entry] | None = None,
        given: Mapping[str, Any] | None = None,
        also: Iterable[str] = (),
    ) -> S:
        """Return the settings `cls` that the mapping at the dotted `key` spells.

        Args:
            inside: what it holds; by default what `entry` does.
            given: settings that do not come from the mapping.
            also: keys that were read before, for messages.
        """
        where, given = entry.at(key), given or {}
        if inside is None:
            inside = mapping(entry, key, self.examples.get(key.rpartition(".")[2], "{}"))
        fields = {field.name: field for field in settings_of(cls) if field.name not in given}
        refuse_others(inside, key, [*fields, *also])
        required = [field for field in fields.values() if default_of(field) is REQUIRED]
        require(inside, {field.name: self._example(field) for field in required}, where)
        names = [name for name in fields if name in inside]
        values = {n: self.read_setting(cls, n, inside[n], f"{key}.{n}") for n in names}
        try:
            return cls(**given, **values)
        except InputError as error:
            text = str(error).removeprefix(f"{cls.__name__}: ")
            reason = text.removeprefix(f"{key}.")
            # An error inside already begins with the setting's name
            between = ": " if reason == text else "."
            raise InputError(f"{where}{between}{reason}") from None

    def _example(self, field: Field[Any]) -> str:
        unit = field.metadata.get("unit")
        if unit is not None:
            return str(unit.example.split(",")[0].split(" or ")[0])
        return self.examples[field.name]

    def read_setting(self, cls: type[Settings], name: str, entry: Entry, key: str) -> Any:
        """Return the value of `entry` as the setting `name` of `cls` wants it."""
        field = cls.__dataclass_fields__[name]
        value, default = entry.value, default_of(field)
        inner, unit = _settings_in(type_hints(cls)[name]), field.metadata.get("unit")
        # `null` is the default of many settings; whether this one may be None is checked below
        if value is None and default is not REQUIRED:
            pass
        elif name in self.special:
            if value is not None and value != default:
                value = self.special[name](entry, key)
        elif inner is not None:
            return self.read_settings(inner, entry, key)
        elif unit is not None:
            value = unit.read(value, where=entry.at(key))
        try:
            return checked(cls, field, value)
        except InputError as error:
            reason = str(error).removeprefix(f"{cls.__name__}.{name}: ")
            raise InputError(f"{entry.at(key)}: {reason}") from None


def _settings_in(hint: Any) -> type[Settings] | None:
    """Return the class of settings that `hint` is, or is but for None."""
    parts = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    inner = [part for part in parts if part is not type(None)]
    if len(inner) == 1 and isinstance(inner[0], type) and issubclass(inner[0], Settings):
        return inner[0]
    return None

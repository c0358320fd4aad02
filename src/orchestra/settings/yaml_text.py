"""YAML as people mean it: 1e-3 is a number, and `no`, `off` and dates are text.

A text is read within bounds, and a mapping gives each key once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestra.errors import REPEATED, InputError
from orchestra.settings.base import MOST_DIGITS, MOST_NESTED

MOST_CHARACTERS = 4_000_000
MOST_VALUES = 500_000
"""Where each alias stands for all that it repeats."""


class Refused(yaml.MarkedYAMLError):
    """It is YAML, but beyond the bounds, or it says one thing twice."""

    def __init__(self, problem: str, at: Any) -> None:
        super().__init__(problem=problem, problem_mark=at.start_mark)


class Loader(yaml.SafeLoader):
    """YAML's core schema (1.2), where PyYAML follows 1.1; constructs plain data only."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise yaml.YAMLError(f"it has more than {MOST_CHARACTERS:,} characters")
        super().__init__(text)
        self._nested = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """PyYAML's, but not nested without end."""
        if self._nested == MOST_NESTED:
            at = self.peek_event()  # type: ignore[no-untyped-call]
            raise Refused(f"is nested more than {MOST_NESTED} deep", at)
        self._nested += 1
        node = super().compose_node(parent, index)
        self._nested -= 1
        return node

    def get_single_node(self) -> Any:
        """The root, all of whose keys differ, and whose aliases repeat no more than can be held."""
        root = super().get_single_node()
        if root is not None:
            self._check(root, {})
        return root

    def _check(self, node: yaml.Node, values: dict[int, int]) -> int:
        """How many values `node` stands for; `values` has those of the nodes before."""
        known = values.get(id(node))
        if known is not None:
            if not known:
                raise Refused("an alias stands inside of what it repeats", node)
            return known
        values[id(node)] = 0
        count = 1
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            count += sum(self._check(item, values) for _, item in node.value)
        elif isinstance(node, yaml.SequenceNode):
            count += sum(self._check(item, values) for item in node.value)
        if count > MOST_VALUES:
            raise Refused(f"with its aliases it has more than {MOST_VALUES:,} values", node)
        values[id(node)] = count
        return count

    def _check_keys(self, mapping: yaml.MappingNode) -> None:
        lines: dict[object, int] = {}
        for node, _ in mapping.value:
            if not isinstance(node, yaml.ScalarNode):
                raise Refused("a key has to be a word", node)
            key = node.value if node.tag.endswith(":merge") else self.construct_object(node)
            for name in (key, str(key)):  # 1, 0x1 and "1" are one label
                if name in lines:
                    raise Refused(f"{node.value!r} stands in line {lines[name]}, too", node)
            lines[key] = lines[str(key)] = node.start_mark.line + 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """PyYAML's, which leaves it to Python to refuse `!!int x` and its like."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            kind = node.tag.rpartition(":")[2]
            raise Refused(f"{str(node.value)[:REPEATED]!r} is no !!{kind}", node) from None


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
    if len(text) > MOST_DIGITS:
        raise Refused(f"a number of {len(text)} digits is beyond any use", node)
    return int(text, 16 if "x" in text else 10)  # 010 is ten, not PyYAML's octal eight


Loader.add_constructor("tag:yaml.org,2002:int", _integer)


class _Dumper(yaml.SafeDumper):
    """Quotes what `Loader` would otherwise not take for text."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def yaml_text(value: object) -> str:
    """`value`, of plain data, as YAML in the order given."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def yaml_value(text: str) -> object:
    """The value of a YAML text, or the text itself where it is none.

    Raises:
        InputError: it is YAML that is refused.
    """
    try:
        return yaml.load(text, Loader=Loader)
    except Refused as refused:
        raise InputError(str(refused.problem)) from None
    except yaml.YAMLError:
        return text


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
        """Where this entry stands, with its dotted key, unless an option's name says that."""
        return self.where if self.where.startswith("--") else f"{self.where} {key}".rstrip()

    def place_of(self, key: object) -> str:
        """Where `key` stands inside; where this entry does, if that is not known."""
        return self.inside[key].where if key in self.inside else self.where


def read_document(path: Path, *, needs: str, example: str) -> dict[str, Entry]:
    """The keys of the YAML mapping in `path`, in order.

    `needs` names the keys that it has to have, and `example` is a line of such a file.

    Raises:
        InputError: the file cannot be read, is no YAML, no mapping, or gives a key twice.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
        return _entries(text, str(path), needs, example)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not a text file in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        kind = "" if isinstance(error, Refused) else "not YAML: "
        raise InputError(f"{path}{line}: {kind}{error.problem or error.context}") from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise InputError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None


def _entries(text: str, name: str, needs: str, example: str) -> dict[str, Entry]:
    loader = Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise InputError(f"{name}: is empty; it needs at least {needs}")
        if not isinstance(root, yaml.MappingNode):
            raise InputError(f"{name}: is not a mapping of keys to values, such as {example}")
        return {str(key): entry for key, entry in _inside(loader, root, name).items()}
    finally:
        loader.dispose()


def _inside(loader: Loader, node: yaml.Node, name: str) -> dict[Any, Entry]:
    if isinstance(node, yaml.SequenceNode):
        return {
            i: _entry(loader, _place(item, name), item, name) for i, item in enumerate(node.value)
        }
    if isinstance(node, yaml.MappingNode):
        return {
            loader.construct_object(key, deep=True): _entry(loader, _place(key, name), item, name)
            for key, item in node.value
        }
    return {}


def _entry(loader: Loader, where: str, node: yaml.Node, name: str) -> Entry:
    return Entry(loader.construct_object(node, deep=True), where, _inside(loader, node, name))


def _place(node: yaml.Node, name: str) -> str:
    return f"{name}:{node.start_mark.line + 1}"

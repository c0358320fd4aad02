"""A YAML file as entries that know their line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestra.errors import InputError
from orchestra.settings.yaml_text import Loader


@dataclass(frozen=True)
class Entry:
    """The value of one key, and where it stands.

    Attributes:
        where: opens the message about this entry ("exp.yaml:7").
        places: the same for the keys of a value that is a mapping ("exp.yaml:12").
    """

    value: Any
    where: str
    places: Mapping[Any, str] = field(default_factory=dict)


def read_document(path: Path) -> dict[str, Entry]:
    """The keys of the YAML mapping in `path`, in order.

    Raises:
        InputError: the file cannot be read, is no YAML, no mapping, or gives a key twice.
    """
    try:
        return _entries(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not a text file in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise InputError(f"{path}{line}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise InputError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None


def _entries(text: str, name: str) -> dict[str, Entry]:
    loader = Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise InputError(f"{name}: is empty; it needs at least task and strategies")
        if not isinstance(root, yaml.MappingNode):
            raise InputError(f"{name}: is not a mapping of keys to values, such as task: digits")
        _refuse_duplicates(root, name, set())
        return {str(key): entry for key, entry in _items(loader, root, name)}
    finally:
        loader.dispose()


def _items(loader: Loader, root: yaml.MappingNode, name: str) -> Iterator[tuple[Any, Entry]]:
    for key_node, node in root.value:
        places: dict[Any, str] = {}
        if isinstance(node, yaml.MappingNode):
            places = {
                loader.construct_object(inner, deep=True): _place(inner, name)
                for inner, _ in node.value
            }
        value = loader.construct_object(node, deep=True)
        yield (
            loader.construct_object(key_node, deep=True),
            Entry(value, _place(key_node, name), places),
        )


def _place(node: yaml.Node, name: str) -> str:
    return f"{name}:{node.start_mark.line + 1}"


def _refuse_duplicates(node: yaml.Node, name: str, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, name, seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise InputError(f"{name}:{line}: a key has to be a word")
            if key.value in lines:
                first = lines[key.value]
                raise InputError(f"{name}:{line}: {key.value!r} stands in line {first}, too")
            lines[key.value] = line
            _refuse_duplicates(value, name, seen)

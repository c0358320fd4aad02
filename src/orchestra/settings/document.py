"""A YAML file as entries that know their line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestra.errors import InputError
from orchestra.settings.yaml_text import MOST_CHARACTERS, Loader, Refused


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

"""YAML as people mean it: 1e-3 is a number, and `no`, `off` and dates are text."""

from __future__ import annotations

import re

import yaml


class Loader(yaml.SafeLoader):
    """YAML's core schema (1.2), where PyYAML follows 1.1; constructs plain data only."""


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
    return int(text, 16 if "x" in text else 10)  # 010 is ten, not PyYAML's octal eight


Loader.add_constructor("tag:yaml.org,2002:int", _integer)


class _Dumper(yaml.SafeDumper):
    """Quotes what `Loader` would otherwise not take for text."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def yaml_text(value: object) -> str:
    """`value`, of plain data, as YAML in the order given."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def yaml_value(text: str) -> object:
    """The value of a YAML text, or the text itself where it is none."""
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError:
        return text

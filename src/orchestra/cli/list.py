"""`orchestra list`: what can be named, and the settings of each."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from orchestra.cli.arguments import Parser
from orchestra.cli.tables import print_names, print_settings
from orchestra.data.sharding import SHARDINGS
from orchestra.errors import InputError, nearest
from orchestra.experiments import Experiment
from orchestra.experiments.file import TRAINING_KEYS
from orchestra.optimizers.settings import SCHEDULES
from orchestra.settings import Described, Registry, Settings, describe
from orchestra.strategies.outer import Outer
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.switch_rules import Rule
from orchestra.tasks.registry import TASKS
from orchestra.topologies import Topology
from orchestra.trainer.settings import Target, Training

DESCRIPTION = """\
Show the names that an experiment may use, each with one line; or, for one NAME, what it does and
the meaning, values and default of each of its settings.
"""

REGISTRIES = (STRATEGIES, TASKS, SCHEDULES, SHARDINGS)
KINDS: dict[str, type] = {
    "rules, for Switch(..., when=RULE)": Rule,
    "outer optimizers, for LocalSGD(outer=OUTER)": Outer,
    "topologies, for Gossip(TOPOLOGY) and its kin": Topology,
}
GROUPS = Described(
    "parameter_groups", "list of mappings", "[]", "", "match (a pattern of names) and arguments"
)


def main(arguments: Sequence[str]) -> int:
    """List everything, or describe one name."""
    parser = Parser("list", DESCRIPTION)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name, or package.module:Name")
    name = parser.read(arguments).name
    if name is None:
        print_names(_names())
        print("orchestra list NAME shows the settings of one of them.")
    elif name == "experiment":
        _describe_experiment()
    else:
        _describe(name, _find(name))
    return 0


def _names() -> dict[str, list[tuple[str, str]]]:
    titles: dict[str, list[tuple[str, str]]] = {title: [] for title in ("strategies", *KINDS)}
    for name in STRATEGIES.names():
        target = _resolved(STRATEGIES, name)
        titles[_kind(target)].append((name, _first_line(target)))
    for title, registry in (
        ("tasks", TASKS),
        ("schedules of the learning rate", SCHEDULES),
        ("shardings of the data", SHARDINGS),
    ):
        titles[title] = [
            (name, _first_line(_resolved(registry, name))) for name in registry.names()
        ]
    titles["the rest"] = [
        ("experiment", "The keys of an experiment file."),
        ("Target", _first_line(Target)),
    ]
    return titles


def _kind(target: Any) -> str:
    for title, base in KINDS.items():
        if isinstance(target, type) and issubclass(target, base):
            return title
    return "strategies"


def _resolved(registry: Registry, name: str) -> Any:
    """What `name` stands for, or what prevents that: one bad plug-in does not spoil the list."""
    try:
        return registry.resolve(name, where=name)
    except InputError as error:
        return error


def _first_line(target: Any) -> str:
    if isinstance(target, InputError):
        return f"({target})"
    return (inspect.getdoc(target) or "").partition("\n")[0]


def _find(name: str) -> Any:
    if name == "Target":
        return Target
    for registry in REGISTRIES:
        if registry.knows(name):
            return registry.resolve(name, where=f"list {name}")
    known = [known for registry in REGISTRIES for known in registry.names()]
    raise InputError(f"unknown name {name!r}; {nearest(name, [*known, 'experiment', 'Target'])}")


def _describe(name: str, target: Any) -> None:
    print(f"{name}{_signature(target)}\n")
    if doc := inspect.getdoc(target):
        print(f"{doc}\n")
    if isinstance(target, type) and issubclass(target, Settings):
        rows = describe(target)
        print_settings(rows) if rows else print("It has no settings.")


def _signature(target: Any) -> str:
    if isinstance(target, type) and issubclass(target, Settings):
        return f"({', '.join(row.name for row in describe(target))})"
    return str(inspect.signature(target)) if callable(target) else ""


def _describe_experiment() -> None:
    print("The keys of an experiment file; task and strategies are required.\n")
    name, *rows = (row for row in describe(Experiment) if row.name != "training")
    rows += (row for row in describe(Training) if row.name in TRAINING_KEYS)
    print_settings([name._replace(default="the file's"), *rows, GROUPS])

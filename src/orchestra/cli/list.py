"""`orchestra list`: what can be named, and the settings of each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestra.cli.arguments import Parser
from orchestra.cli.tables import print_names, print_settings, print_variants, print_wrapped
from orchestra.cluster import CLUSTERS, Jitter, load_cluster
from orchestra.cluster.jitter import ASSUMED
from orchestra.cluster.presets import is_file
from orchestra.data.sharding import SHARDINGS
from orchestra.errors import InputError, nearest
from orchestra.experiments import Experiment
from orchestra.experiments.file import TRAINING_KEYS
from orchestra.optimizers.settings import SCHEDULES
from orchestra.settings import Described, Registry, Settings, describe
from orchestra.strategies.base import Strategy
from orchestra.strategies.outer import Outer
from orchestra.strategies.registry import STRATEGIES, Standing
from orchestra.strategies.switch_rules import Rule
from orchestra.tasks.registry import TASKS
from orchestra.topologies import Topology
from orchestra.trainer.settings import Target, Training

DESCRIPTION = """\
Show the names that an experiment may use, each with one line; or, for one NAME, what it does and
the meaning, values and default of each of its settings. NAME may be a heading, too: clusters,
tasks, optimizers.

A cluster with its settings, 'lan_1gbit(nodes=8)', or the file of one, is written out in full, as a
file that says the same; or drawn, with --draw.
"""

EPILOG = """\
examples:
  orchestra list ParameterServer
  orchestra list clusters
  orchestra list 'two_sites(nodes=6)' --draw sites.png --ranks 6
"""

REGISTRIES = (STRATEGIES, TASKS, SCHEDULES, SHARDINGS, CLUSTERS)
KINDS: dict[str, type] = {
    "rules, for Switch(..., when=RULE)": Rule,
    "outer optimizers, for LocalSGD(outer=OUTER)": Outer,
    "topologies, for Gossip(TOPOLOGY) and its kin": Topology,
}
JITTER = "jitter, of the nodes of a cluster"
NODES = f"""\
Durations vary on every node: as calibrated, else by {ASSUMED!r}. jitter=None, or null in \
a file, makes them exact. Single() is on the node that is fastest on the task, on one device if \
it has any; other ranks are where the cluster places them. Where a file gives nodes memory, a run \
that has no room is refused. docs/clusters.md has more."""
HOW_IT_IS_COMPUTED = ("capturable", "differentiable", "foreach", "fused")
GROUPS = Described(
    "parameter_groups", "list of mappings", "[]", "", "match (a pattern of names) and arguments"
)


def main(arguments: Sequence[str]) -> int:
    """List everything, or describe one name."""
    parser = Parser("list", DESCRIPTION, EPILOG)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name, or package.module:Name")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw a cluster: .png or .svg")
    parser.add_argument("--ranks", type=int, metavar="N", help="with --draw: show where they are")
    options = parser.read(arguments)
    name: str | None = options.name
    if options.draw is not None or options.ranks is not None:
        _draw(name, options.draw, options.ranks)
    elif name is None:
        print_names(_names())
        print("orchestra list NAME shows the settings of one of them; orchestra list strategies")
        print("shows variants, and which were fastest where.")
    elif name in ("strategies", "strategy"):
        _list_strategies()
    elif name in ("optimizers", "optimizer"):
        print_names({"optimizers, of torch.optim": _optimizers()})
        print("optimizer=Adam(lr=0.003) in an experiment, or --set optimizer.lr=0.1")
    elif heading := {title: rows for title, rows in _names().items() if _is_of(name, title)}:
        print_names(heading)
        if "clusters" in heading:
            print_wrapped(NODES)
    elif name == "experiment":
        _describe_experiment()
    elif "(" in name or is_file(name):
        from orchestra.cluster.file import cluster_text

        print(cluster_text(load_cluster(name, where="list", folder=Path())), end="")
    else:
        _describe(name, _find(name))
    return 0


def _names() -> dict[str, list[tuple[str, ...]]]:
    titles: dict[str, list[tuple[str, ...]]] = {title: [] for title in ("strategies", *KINDS)}
    for name in STRATEGIES.names():
        target = _resolved(STRATEGIES, name)
        uses = (target.use,) if _is_strategy(target) else ()
        titles[_kind(target)].append((name, _first_line(target), *uses))
    for title, registry in (
        ("tasks", TASKS),
        ("schedules of the learning rate", SCHEDULES),
        ("shardings of the data", SHARDINGS),
    ):
        titles[title] = [
            (name, _first_line(_resolved(registry, name))) for name in registry.names()
        ]
    titles["clusters"], titles[JITTER] = [], []
    for name in CLUSTERS.names():
        target = _resolved(CLUSTERS, name)
        title = JITTER if isinstance(target, type) and issubclass(target, Jitter) else "clusters"
        titles[title].append((name, _first_line(target)))
    titles["the rest"] = [
        ("experiment", "The keys of an experiment file."),
        ("optimizers", "Those of torch.optim, with their arguments."),
        ("Target", _first_line(Target)),
    ]
    return titles


def _is_strategy(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, Strategy)


def _list_strategies() -> None:
    found = [(name, _resolved(STRATEGIES, name)) for name in STRATEGIES.names()]
    shown = {name: (_first_line(target), target) for name, target in found if _is_strategy(target)}
    print_strategies(shown)


def _optimizers() -> list[tuple[str, ...]]:
    """The optimizers that can be distributed, with arguments and defaults."""
    from orchestra.optimizers.spec import REFUSED, torch_optimizers

    known = torch_optimizers().items()
    return [(name, _arguments(cls)) for name, cls in known if cls not in REFUSED]


def _arguments(optimizer: type) -> str:
    _, *parameters = inspect.signature(optimizer).parameters.values()
    shown = (each for each in parameters if each.name not in HOW_IT_IS_COMPUTED)
    return ", ".join(f"{each.name}={each.default!r}" for each in shown)


def _is_of(name: str, title: str) -> bool:
    """Whether `name` is the first word of a heading, in the plural or the singular."""
    word = title.partition(" ")[0].rstrip(",")
    return name in (word, word.removesuffix("s"), f"{word.removesuffix('ies')}y")


def _draw(name: str | None, path: Path | None, ranks: int | None) -> None:
    if name is None or path is None:
        raise InputError("give a cluster and a file: orchestra list lan_1gbit --draw lan.png")
    if path.suffix.lower() not in (".png", ".svg"):
        raise InputError(f"--draw {path}: is neither .png nor .svg")
    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks {ranks}: has to be 1 or more")
    cluster = load_cluster(name, where="list", folder=Path())
    from orchestra.report.figures.cluster import cluster_figure
    from orchestra.report.figures.frame import save_as

    figure = cluster_figure(cluster, ranks)
    save_as(figure, path, width=figure.least_width)
    print(path)


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


EXPLANATION = """\
"fast on": best, or within 5 % of the best, by the seconds to a target. A variant without it was \
not fastest on any task in real runs ({real}), nor on any cluster in simulated runs \
({simulated})."""


def print_strategies(strategies: Mapping[str, tuple[str, type[Strategy[Any]]]]) -> None:
    """Of each name its first line, its use, and its variants with their own and their standing."""
    standing = Standing.shipped()
    for name, (first_line, strategy) in strategies.items():
        print_variants(name, [first_line, strategy.use], _rows(name, strategy, standing))
    print_wrapped(EXPLANATION.format(real=standing.remark, simulated=standing.simulated_remark))


def variants_of(name: str, strategy: type[Strategy[Any]]) -> tuple[tuple[str, str], ...]:
    """Notations and when to use them; without any, the strategy as it is."""
    return strategy.variants or ((f"{name}()", strategy.use),)


def _rows(
    name: str, strategy: type[Strategy[Any]], standing: Standing
) -> Iterator[tuple[str, ...]]:
    for notation, use in variants_of(name, strategy):
        own = use if use != strategy.use else ""  # which stands above already
        yield notation, *filter(None, (own, _seen(notation, standing)))


def _seen(notation: str, standing: Standing) -> str:
    """Where it was seen best, in words; nothing if it was not."""
    real, simulated = standing.good_on(notation), standing.good_in_simulation(notation)
    parts = [f"on {', '.join(real)} in real runs"] if real else []
    parts += [f"on {', '.join(simulated)} in simulated runs"] if simulated else []
    return f"fast {' and '.join(parts)}" if parts else ""

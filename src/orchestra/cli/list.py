"""`orchestra list`: the names that an experiment may use, and the settings of each.

The names alone are to answer at once: what the description of one of them needs is imported there.
"""

from __future__ import annotations

import inspect
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestra.cluster import CLUSTERS, Jitter
from orchestra.cluster.nodes import ASSUMED
from orchestra.compression.base import Compressor
from orchestra.data import SHARDINGS
from orchestra.errors import InputError, nearest
from orchestra.module_path import admit_working_folder
from orchestra.optimizers.settings import SCHEDULES
from orchestra.parameter_server.how import Correction
from orchestra.parameter_server.when import When
from orchestra.records.terminal import Terminal
from orchestra.settings import Described, Registry, Settings, describe, parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.outer import Outer
from orchestra.strategies.registry import STRATEGIES, MeasuredStanding
from orchestra.strategies.switch_rules import Rule
from orchestra.tasks import TASKS
from orchestra.topologies import Topology
from orchestra.trainer.balancing import BALANCINGS

HEADINGS: dict[str, tuple[Registry, type | tuple[type, ...] | None]] = {
    "strategies": (STRATEGIES, None),
    "switch rules, for Switch(..., when=RULE)": (STRATEGIES, Rule),
    "server rules, for consistency and learning_rate of ParameterServer": (
        STRATEGIES,
        (When, Correction),
    ),
    "outer optimizers, for LocalSGD(outer=OUTER)": (STRATEGIES, Outer),
    "compressors, for AllReduce(compression=COMPRESSOR) and others": (STRATEGIES, Compressor),
    "topologies, for Gossip(TOPOLOGY) and its kin": (STRATEGIES, Topology),
    "tasks": (TASKS, None),
    "schedules of the learning rate": (SCHEDULES, None),
    "shardings of the data": (SHARDINGS, None),
    "balancing of batches, for shares: RULE": (BALANCINGS, None),
    "clusters": (CLUSTERS, None),
    "jitter, of the nodes of a cluster": (CLUSTERS, Jitter),
}
"""The registry of the names under each heading, and their classes if a registry has several."""
REGISTRIES = {registry: title for title, (registry, base) in HEADINGS.items() if base is None}
NODES = f"""\
Durations vary on every node: as calibrated, else by {ASSUMED!r}. jitter=None, or null in \
a file, makes them exact. Single() is on the node that is fastest on the task, on one device if \
it has any; other ranks are where the cluster places them. Where a file gives nodes memory, a run \
that has no room is refused. docs/reference/clusters.md has more."""
EXPLANATION = """\
"fast on": best, or within 5 % of the best, by the seconds to a target. A variant without it was \
not fastest on any task in real runs ({real}), nor on any cluster in simulated runs \
({simulated})."""
HOW_IT_IS_COMPUTED = ("capturable", "differentiable", "foreach", "fused")
GROUPS = Described(
    "parameter_groups", "list of mappings", "[]", "", "match (a pattern of names) and arguments"
)
_NARROWEST = 20  # columns of text, on however small a terminal


def main(options: Namespace) -> int:
    name: str | None = options.name
    if name is not None and ":" in name:  # a module of the user's own, perhaps in this folder
        admit_working_folder()
    if options.draw is not None or options.ranks is not None:
        _draw(name, options.draw, options.ranks)
    elif name is None:
        _print_names(_names())
        print("orchestra list NAME shows the settings of one of them; orchestra list strategies")
        print("shows variants, and which were fastest where.")
    elif name in ("strategies", "strategy"):
        _print_strategies()
    elif name in ("optimizers", "optimizer"):
        _print_names({"optimizers, of torch.optim": _optimizers()})
        print("optimizer=Adam(lr=0.003) in an experiment, or --set optimizer.lr=0.1")
    elif heading := {title: rows for title, rows in _names().items() if _is_of(name, title)}:
        _print_names(heading)
        if "clusters" in heading:
            _print_indented(NODES, 0)
    elif name in ("instances", "instance"):
        print(_instances())
    elif name == "experiment":
        _describe_experiment()
    else:
        _describe(name)
    return 0


def _draw(name: str | None, path: Path | None, ranks: int | None) -> None:
    if name is None or path is None:
        raise InputError("give a cluster and a file: orchestra list lan_1gbit --draw lan.png")
    if path.suffix.lower() not in (".png", ".svg"):
        raise InputError(f"--draw {path}: is neither .png nor .svg")
    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks {ranks}: has to be 1 or more")
    from orchestra.cluster.file import load_cluster

    cluster = load_cluster(name, where="list", folder=Path())
    from orchestra.report.figures.cluster import cluster_figure
    from orchestra.report.figures.frame import save_as

    figure = cluster_figure(cluster, ranks)
    save_as(figure, path, width=figure.least_width)
    print(path)


def _names() -> dict[str, list[tuple[str, ...]]]:
    """Return under each heading its names, each with a line of meaning and, perhaps, of use."""
    titles: dict[str, list[tuple[str, ...]]] = {title: [] for title in HEADINGS}
    for registry, plain in REGISTRIES.items():
        for name, target in _resolved(registry).items():
            # Rules, compressors and topologies share the strategies' registry, under own headings.
            own = (title for title, (_, base) in HEADINGS.items() if base and _is(target, base))
            uses = (target.use,) if _is(target, Strategy) else ()
            titles[next(own, plain)].append((name, _first_line(target), *uses))
    titles["the rest"] = [
        ("experiment", "The keys of an experiment file."),
        ("optimizers", "Those of torch.optim, with their arguments."),
        ("instances", "Machines of a cloud, for orchestra import."),
        ("Target", "What a training is to reach: target in an experiment file."),
    ]
    return titles


def _instances() -> str:
    from orchestra.cluster.machines import instances

    rows = [f"{'instance':20}{'vCPUs':>6}{'GPUs':>9}{'Gbit/s':>8}{'USD/h':>12}"]
    for name, row in instances().items():
        gpus = f"{row['gpus']} {row['gpu']}" if row["gpu"] else ""
        network, price = f"{int(row['network']) / 1000:g}", row["usd_per_hour"] or "-"
        rows.append(f"{name:20}{row['vcpus']:>6}{gpus:>9}{network:>8}{price:>12}")
    dates = ", ".join(sorted({row["date"] for row in instances().values()}))
    rows.append(f"Linux, on demand, in us-east-1 on {dates}; ask your provider for yours.")
    return "\n".join(rows)


def _resolved(registry: Registry) -> dict[str, Any]:
    """Return the object of each name, or its error: one bad plug-in does not spoil the list."""
    found: dict[str, Any] = {}
    for name in registry.names():
        try:
            found[name] = registry.resolve(name, where=name)
        except InputError as error:
            found[name] = error
    return found


def _is(target: Any, base: type | tuple[type, ...]) -> bool:
    return isinstance(target, type) and issubclass(target, base)


def _first_line(target: Any) -> str:
    if isinstance(target, InputError):
        return f"({target})"
    return (inspect.getdoc(target) or "").partition("\n")[0]


def _is_of(name: str, title: str) -> bool:
    """Return whether `name` is a heading up to its comma, or the first or last word of that, in the
    plural or the singular."""
    phrase = title.partition(",")[0]
    words = (phrase, phrase.split()[0], phrase.split()[-1])
    return any(name in (it, it.removesuffix("s"), f"{it.removesuffix('ies')}y") for it in words)


def _print_strategies() -> None:
    """Print the first line of each, its use, and its variants with their use and standing."""
    standing = MeasuredStanding.shipped()
    for name, strategy in _resolved(STRATEGIES).items():
        if not _is(strategy, Strategy):
            continue
        _print_indented(name, 0, style="bold")
        for line in (_first_line(strategy), strategy.use):
            _print_indented(line, 2)
        for notation, use in variants_of(name, strategy):
            _print_indented(notation, 4)
            own = use if use != strategy.use else ""  # which stands above already
            for line in filter(None, (own, _seen(notation, standing))):
                _print_indented(line, 8, style="dim")
        print()
    remarks = {"real": standing.remark, "simulated": standing.simulated_remark}
    _print_indented(EXPLANATION.format(**remarks), 0)


def variants_of(name: str, strategy: type[Strategy]) -> tuple[tuple[str, str], ...]:
    """Return notations with when to use them; without variants, the strategy as it is."""
    return strategy.variants or ((f"{name}()", strategy.use),)


def _seen(notation: str, standing: MeasuredStanding) -> str:
    """Return where a variant was among the fastest, in words; empty if nowhere."""
    real, simulated = standing.good_on(notation), standing.good_in_simulation(notation)
    parts = [f"on {', '.join(real)} in real runs"] if real else []
    parts += [f"on {', '.join(simulated)} in simulated runs"] if simulated else []
    return f"fast {' and '.join(parts)}" if parts else ""


def _optimizers() -> list[tuple[str, ...]]:
    """Return the optimizers that can be distributed, with arguments and defaults."""
    from orchestra.optimizers.spec import REFUSED, torch_optimizers

    def arguments_of(optimizer: type) -> str:
        _, *parameters = inspect.signature(optimizer).parameters.values()
        shown = (each for each in parameters if each.name not in HOW_IT_IS_COMPUTED)
        return ", ".join(f"{each.name}={each.default!r}" for each in shown)

    known = torch_optimizers().items()
    return [(name, arguments_of(each)) for name, each in known if each not in REFUSED]


def _describe(name: str) -> None:
    from orchestra.cluster.file import cluster_text, is_file, load_cluster

    if "(" in name or is_file(name):
        print(cluster_text(load_cluster(name, where="list", folder=Path())), end="")
        return
    target = _find(name)
    settings = describe(target) if _is(target, Settings) else None
    signature = str(inspect.signature(target)) if callable(target) else ""
    if settings is not None:
        signature = f"({', '.join(row.name for row in settings)})"
    print(f"{name}{signature}\n")
    if doc := inspect.getdoc(target):
        print(f"{doc}\n")
    if _is(target, Strategy):
        _print_after_loss(name, target)
    if settings:
        _print_settings(settings)
    elif settings is not None:
        print("It has no settings.")


def _print_after_loss(name: str, strategy: type[Strategy]) -> None:
    """Print what becomes of a run under each notable variant that has lost a rank."""
    found: dict[str, list[str]] = {}
    for notation, _ in variants_of(name, strategy):
        ends = parse(notation, STRATEGIES, where=f"list {name}").traits().after_loss.value
        found.setdefault(ends, []).append(notation)
    for ends, notations in found.items():
        under = "" if len(found) == 1 else f" under {', '.join(notations)}"
        _print_indented(f"If a rank is lost{under}: {ends}.", 0)
    print()


def _find(name: str) -> Any:
    if name == "Target":
        from orchestra.trainer.settings import Target

        return Target
    for registry in REGISTRIES:
        if registry.knows(name):
            return registry.resolve(name, where=f"list {name}")
    known = [known for registry in REGISTRIES for known in registry.names()]
    raise InputError(f"unknown name {name!r}; {nearest(name, [*known, 'experiment', 'Target'])}")


def _describe_experiment() -> None:
    from orchestra.experiments.experiment import Experiment
    from orchestra.experiments.file import TRAINING_KEYS
    from orchestra.trainer.settings import Training

    print("The keys of an experiment file; task and strategies are required.\n")
    name, *rows = (row for row in describe(Experiment) if row.name != "training")
    rows += (row for row in describe(Training) if row.name in TRAINING_KEYS)
    _print_settings([name._replace(default="the file's"), *rows, GROUPS])


def _print_settings(rows: Sequence[Described]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("setting", "values", "default", "meaning"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "setting")
    for row in rows:
        values = f"{row.type}, {row.range}" if row.range else row.type
        table.add_row(row.name, values, row.default, row.meaning)
    Terminal().print(table)


def _print_names(titles: Mapping[str, Sequence[tuple[str, ...]]]) -> None:
    """Print under each title names with a line of meaning; further lines below that, dim."""
    width = max(len(name) for rows in titles.values() for name, *_ in rows)
    for title, rows in titles.items():
        _print_indented(title, 0, style="bold")
        for name, meaning, *more in rows:
            _print_indented(meaning, 4 + width, f"  {name}")
            for line in more:
                _print_indented(line, 4 + width, style="dim")
        print()


def _print_indented(text: str, indent: int, before: str = "", style: str | None = None) -> None:
    """Print `text` in lines that fit the terminal, `indent` from its edge; `before` the first."""
    console = Terminal()
    width = max(console.width, indent + _NARROWEST)
    wrapper = textwrap.TextWrapper(width, before.ljust(indent), " " * indent)
    # Names such as DC-ASGD stay whole.
    wrapper.break_on_hyphens = False
    for line in wrapper.wrap(text) or [before]:
        console.print(line.rstrip(), style=style, soft_wrap=True)

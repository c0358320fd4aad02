"""Experiment files, cluster files and --set by the thousand, from the settings as declared.

A new setting of a strategy, a task or a training is among them without a word here.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as some
from hypothesis.strategies import SearchStrategy

from orchestra.cluster.faults import FAULTS
from orchestra.cluster.nodes import Jitter, Link, Node
from orchestra.cluster.presets import CLUSTERS, Preset
from orchestra.cluster.units import Unit
from orchestra.compression.base import Compressor
from orchestra.data import SHARDINGS, Sharding
from orchestra.experiments.experiment import Experiment, Tune
from orchestra.optimizers.settings import SCHEDULES, RateSchedule
from orchestra.settings import Call, Registry, Settings, write
from orchestra.settings.base import REQUIRED, NumberRange, default_of, settings_of, type_hints
from orchestra.settings.reading import yaml_text
from orchestra.strategies.base import Strategy
from orchestra.strategies.outer import Outer
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.switch_rules import Rule
from orchestra.tasks import TASKS
from orchestra.topologies import Topology
from orchestra.trainer.settings import Target, Training

KINDS: Mapping[type, Registry] = {
    Strategy: STRATEGIES,
    Rule: STRATEGIES,
    Topology: STRATEGIES,
    Outer: STRATEGIES,
    Compressor: STRATEGIES,
    RateSchedule: SCHEDULES,
    Sharding: SHARDINGS,
    Jitter: CLUSTERS,
    Preset: CLUSTERS,
}
OPTIMIZERS = {
    "SGD": ("lr", "momentum", "weight_decay", "nesterov", "dampening"),
    "Adam": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "RMSprop": ("lr", "alpha", "momentum", "centered"),
    "Rprop": ("lr", "etas", "step_sizes"),
    "Adafactor": ("lr", "eps", "d"),
    "LBFGS": ("lr",),
}
NUMBERS = (0, 0.01, 0.1, 0.5, 0.9, 1, 2)
DEEP = 60


@dataclass(frozen=True)
class Input:
    """An experiment's file, the file `c.yaml` of a cluster beside it, and what follows --set."""

    experiment: str
    cluster: str
    overrides: Sequence[str]


@dataclass(frozen=True)
class Raw:
    """Text that stands in a file as it is."""

    text: str


HOSTILE: tuple[object, ...] = (
    *(-1, 0, 2**31, 10**12, 2**64, 10**99, -(10**99), 1e300, -1e300, 1e-300, 5e-324),
    *(float("nan"), float("inf"), None, True, "", "x", "x" * 5000, "a 'b", "\x00", "\ud800", "\n"),
    *("9" * 5000 + " s", "1e999999999 s", "1e-999999999 s", "1e400 Gbit/s", "-1 s", "0 B", "1 x"),
    *("[1, 2", "{", "!!int x", "1e999", "(" * 300, "None", "~", "Nothing(1)", "a.b:c", ".yaml"),
    *([], [[]], {}, {"a": 1}, [1] * 3000, [1e308, 1e308], {1: 2, "1": 3}),
    Raw("!!int x"),
    Raw("!!float x"),
    Raw("!!timestamp x"),
    Raw("!!binary x"),
    Raw("!!bool x"),
    Raw("!!set {a, b}"),
    Raw("{1: Single, 0x1: Single}"),
    Raw("9" * 5000),
    Raw("0x" + "f" * 5000),
    Raw("1e" + "9" * 50),
    Raw("[" * DEEP + "]" * DEEP),
    Raw("[" * 400 + "]" * 400),
    Raw("{a: " * 400 + "}" * 400),
    Raw("&a [*a]"),
    Raw("{<<: {a: 1}}"),
    Raw("&a [&b [&c [1, 1, 1, 1, 1, 1, 1, 1], *c, *c, *c, *c, *c, *c, *c], *b, *b, *b, *b]"),
)


def values(hint: Any, limits: NumberRange) -> SearchStrategy[Any]:
    """Of the annotation `hint`, inside `limits`."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return some.sampled_from(parts)
    if origin in (Union, types.UnionType):
        return some.one_of(*(values(part, limits) for part in parts))
    if hint is type(None):
        return some.none()
    if hint is bool:
        return some.booleans()
    if hint in (int, float):
        return numbers(hint, limits)
    if hint is str:
        return some.sampled_from(("accuracy", "loss", "worker-0", "10 ms", "1 Gbit/s", "auto"))
    if origin is tuple:
        return some.lists(values(parts[0], limits), min_size=1, max_size=4)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return some.dictionaries(some.sampled_from("abc"), some.sampled_from(NUMBERS), max_size=2)
    kind = origin or hint
    if kind in KINDS:
        return some.deferred(lambda: calls(kind))
    if isinstance(kind, type) and issubclass(kind, Settings):
        return some.deferred(lambda: mappings(kind))
    return some.sampled_from(NUMBERS)


def numbers(hint: type, limits: NumberRange) -> SearchStrategy[Any]:
    """Small ones mostly, and the ends of the range."""
    low = limits.low if limits.low is not None else limits.above or 0.0
    high = limits.high if limits.high is not None else 1e9
    if hint is int:
        few = some.integers(int(low), int(min(high, low + 8)))
        return few | few | some.sampled_from((int(low), int(high)))
    usual = [number for number in (*NUMBERS, low, high) if limits.complaint(number) is None]
    return some.sampled_from(usual)


def named(kind: type) -> list[str]:
    """The names of what is a `kind`."""
    registry = KINDS[kind]
    found = []
    for name in registry.names():
        cls = registry.resolve(name, where="test")
        if kind is RateSchedule or (issubclass(cls, kind) and not inspect.isabstract(cls)):
            found.append(name)
    return found


def calls(kind: type) -> SearchStrategy[Call]:
    """The notation of a `kind` with some of its settings."""
    return some.sampled_from(named(kind)).flatmap(lambda name: call(KINDS[kind], name))


def call(registry: Registry, name: str) -> SearchStrategy[Call]:
    cls = registry.resolve(name, where="test")
    return mappings(cls, most=3).map(lambda given: Call(name, (), given))


def mappings(cls: type[Settings], most: int = 4) -> SearchStrategy[dict[str, Any]]:
    """What is required of `cls`, and some of its other settings, by name."""
    hints = type_hints(cls)
    required: dict[str, SearchStrategy[Any]] = {}
    other: dict[str, SearchStrategy[Any]] = {}
    for field in settings_of(cls):
        unit = field.metadata.get("unit")
        value = values(hints[field.name], field.metadata.get("limits", NumberRange()))
        if unit is not None:
            value = value.map(partial(_written, unit))
        (required if default_of(field) is REQUIRED else other)[field.name] = value
    chosen = some.lists(some.sampled_from(sorted(other) or [""]), max_size=most, unique=True)
    return chosen.flatmap(
        lambda names: some.fixed_dictionaries(
            {**required, **{name: other[name] for name in names if name}}
        )
    )


def _written(unit: Unit, number: float | None) -> str | None:
    return None if number is None else unit.write(float(number))


def text_of(value: Any) -> Any:
    """`value` for a file or a command line: calls become their notation."""
    if isinstance(value, Call):
        return str(value)
    if isinstance(value, Mapping):
        return {key: text_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [text_of(item) for item in value]
    return value


@some.composite
def optimizers(draw: some.DrawFn) -> str:
    name = draw(some.sampled_from(sorted(OPTIMIZERS)))
    names = draw(some.lists(some.sampled_from(OPTIMIZERS[name]), unique=True, max_size=3))
    value = some.sampled_from(NUMBERS) | some.booleans()
    pair = some.tuples(value, value)
    return str(Call(name, (), {key: draw(pair if key.endswith("s") else value) for key in names}))


def _tasks() -> SearchStrategy[str]:
    names = [name for name in TASKS.names() if name not in ("mnist", "cifar10")]
    return some.sampled_from(names).flatmap(lambda name: call(TASKS, name)).map(str)


def keys() -> Mapping[str, SearchStrategy[Any]]:
    """Of each key of an experiment file, what it may say."""
    found: dict[str, SearchStrategy[Any]] = {}
    for cls in (Experiment, Training):
        for field in settings_of(cls):
            limits = field.metadata.get("limits", NumberRange())
            found[field.name] = values(type_hints(cls)[field.name], limits).map(text_of)
    del found["training"]
    group = some.dictionaries(some.sampled_from(("lr", "momentum")), some.sampled_from(NUMBERS))
    presets = calls(Preset).map(str)
    return found | {
        "name": some.sampled_from(("a", "a b", "ü")),
        "task": _tasks(),
        "strategies": some.dictionaries(
            some.sampled_from(("it", "one", "1")), calls(Strategy).map(str), min_size=1, max_size=2
        ),
        "ranks": numbers(int, NumberRange(1, 2**14)) | some.lists(some.integers(1, 9), min_size=1),
        "devices": some.just({}) | some.just({"it": "cpu"}),
        "cluster": presets | some.just("c.yaml"),
        "optimizer": optimizers(),
        "parameter_groups": some.lists(group.map(lambda item: {"match": "bias", **item})),
        "target": some.none() | mappings(Target),
        "tune": some.none() | _tunes(),
        "tensorboard": some.just(False),
        "mlflow": some.just(False),
        "wandb": some.just(False),
    }


def _tunes() -> SearchStrategy[dict[str, Any]]:
    tried = some.lists(some.sampled_from(NUMBERS), min_size=1, max_size=3)
    settings = some.fixed_dictionaries({"optimizer.lr": tried}, optional={"clip_norm": tried})
    return some.fixed_dictionaries({"settings": settings}, optional={"seed": some.integers(0, 9)})


KEYS = keys()
OVERRIDDEN = (
    *(f"optimizer.{name}" for name in ("lr", "momentum", "betas", "unknown")),
    *(f"target.{field.name}" for field in settings_of(Target)),
    *(f"tune.{field.name}" for field in settings_of(Tune)),
    *(
        "schedule.warmup",
        "strategies.it.topology.peers",
        "strategies.it.servers",
        "a.b.c",
        "..",
        "",
    ),
    *(f"strategies.it.{name}" for name in ("every", "backup", "order", "when", "first.servers")),
    *("task.channels", "task.hidden", "sharding.alpha"),
)


@some.composite
def clusters(draw: some.DrawFn) -> dict[str, Any]:
    """A file of a cluster: one switch, a few kinds of nodes, faults."""
    node = mappings(Node)
    nodes = {}
    for name in draw(some.lists(some.sampled_from(("worker", "gpu")), min_size=1, unique=True)):
        own = {key: text_of(value) for key, value in draw(node).items()}
        own = {
            key: value for key, value in own.items() if key not in ("name", "switch", "up", "down")
        }
        own.setdefault("speed", 1)
        own["link"] = draw(mappings(Link))
        if draw(some.booleans()):
            own["count"] = draw(numbers(int, NumberRange(1, 2**14)))
        nodes[name] = own
    faults = [
        {name: text_of(draw(mappings(FAULTS[name])))}
        for name in draw(some.lists(some.sampled_from(sorted(FAULTS)), max_size=2))
    ]
    return {
        "nodes": nodes,
        "ranks": draw(some.sampled_from(("spread", "packed"))),
        "faults": faults,
    }


@some.composite
def inputs(draw: some.DrawFn) -> Input:
    """Half of them as the settings allow; half damaged in one of the three parts, or in two."""
    document: dict[str, Any] = {key: draw(KEYS[key]) for key in ("task", "strategies")}
    document |= {key: draw(KEYS[key]) for key in draw(_some_of(sorted(KEYS), 4))}
    cluster = draw(clusters())
    overrides = [f"{key}={_shown(draw(KEYS[key]))}" for key in draw(_some_of(sorted(KEYS), 2))]
    if draw(some.booleans()):
        return Input(yaml_text(document), yaml_text(cluster), overrides)
    if draw(some.booleans()):
        document[draw(some.sampled_from((*sorted(KEYS), "what")))] = draw(
            some.sampled_from(HOSTILE)
        )
    if draw(some.booleans()):
        _damage(draw, cluster)
        document |= {"cluster": "c.yaml"}
    if draw(some.booleans()):
        key = draw(some.sampled_from((*sorted(KEYS), *OVERRIDDEN)))
        overrides.append(f"{key}={_shown(draw(some.sampled_from(HOSTILE)))}")
    experiment, beside = file_text(document), file_text(cluster)
    if draw(some.integers(0, 3)) == 0:
        experiment = draw(cut(experiment))
    if draw(some.integers(0, 3)) == 0:
        beside = draw(cut(beside))
    damaged: bool = draw(some.booleans())
    if overrides and damaged:
        overrides[0] = draw(cut(overrides[0]))
    return Input(experiment, beside, overrides)


def _some_of(names: Sequence[str], most: int) -> SearchStrategy[list[str]]:
    return some.lists(some.sampled_from(names), max_size=most, unique=True)


def _shown(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    return value if isinstance(value, str) else write(text_of(value))


def _damage(draw: some.DrawFn, mapping: dict[str, Any]) -> None:
    """Something inside of `mapping`, at any depth, becomes hostile."""
    key = draw(some.sampled_from((*sorted(mapping), "what")))
    inner = mapping.get(key)
    if isinstance(inner, dict) and inner and draw(some.integers(0, 3)):
        _damage(draw, inner)
    else:
        mapping[key] = draw(some.sampled_from(HOSTILE))


def file_text(document: Mapping[str, Any]) -> str:
    """YAML, in which a `Raw` stands as it is."""
    raw: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(value.text)
            return f"RAW-{len(raw) - 1}-RAW"
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        return value

    text = yaml_text(marked(document))
    for number, own in enumerate(raw):
        text = text.replace(f"RAW-{number}-RAW", own)
    return text


@some.composite
def cut(draw: some.DrawFn, text: str) -> str:
    """`text` with a part left out, twice there, or replaced."""
    begin = draw(some.integers(0, len(text)))
    end = min(len(text), begin + draw(some.integers(0, 20)))
    new = draw(
        some.sampled_from(("", text[begin:end] * 2, "\t", "&a ", "*a", "]", "{", '"', "=", "\x07"))
        | some.text(max_size=5)
    )
    return text[:begin] + new + text[end:]

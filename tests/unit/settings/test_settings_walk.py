"""Every setting of every strategy, task and the experiment: from Python, from a file, by --set."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from orchestra.compression.base import Compressor
from orchestra.data import SHARDINGS, Sharding
from orchestra.experiments.experiment import Experiment
from orchestra.experiments.file import load, to_yaml
from orchestra.optimizers.settings import SCHEDULES, Optimizer, RateSchedule
from orchestra.parameter_server.how import Correction
from orchestra.parameter_server.when import When
from orchestra.settings import Registry, Settings, write
from orchestra.settings.base import NumberRange, settings_of, type_hints
from orchestra.settings.reading import Entry
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.outer import Outer
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.switch_rules import Rule
from orchestra.tasks import TASKS
from orchestra.topologies import Topology
from orchestra.trainer import settings as trainer_settings
from orchestra.trainer.settings import Target, Training

#: Examples of classes that cannot be made without arguments.
SAMPLES: dict[str, str] = {
    "Auto": "Auto([AllReduce('ring'), LocalSGD(8)])",
    "Switch": "Switch(AllReduce('ring'), ParameterServer, when=LossStable)",
    "Both": "LossStable & AfterSteps(3)",
    "cifar10": "cifar10('folder')",
    "mnist": "mnist('folder')",
    "Either": "LossStable | AfterSteps(3)",
}


#: What holds settings that are part of a strategy, and where.
HOLDERS: dict[type, tuple[str, str]] = {
    Rule: ("Switch(AllReduce, ParameterServer, when={})", "when"),
    Topology: ("Gossip({})", "topology"),
    Outer: ("LocalSGD(outer={})", "outer"),
    Compressor: ("AllReduce(compression={})", "compression"),
    When: ("ParameterServer(consistency={})", "consistency"),
    Correction: (
        "ParameterServer(consistency='asynchronous', learning_rate={})",
        "learning_rate",
    ),
}

#: Settings that make no sense beside the defaults of the others.
ASYNCHRONOUS = "ParameterServer(consistency='asynchronous'"
BESIDE: dict[str, str] = {
    "AllReduce.ranks_per_node": "AllReduce('hierarchical')",
    "ParameterServer.staleness": "ParameterServer(consistency='bounded', staleness=3)",
    "StochasticGradientPush.exchanges": "StochasticGradientPush(overlap=2)",
    "LocalSGD.late": "LocalSGD(overlap=2)",
    "Hop.skip": "Hop(backup=1)",
    "ParameterServer.replicas": "ParameterServer(servers=2)",
    "ParameterServer.learning_rate": f"{ASYNCHRONOUS})",
    "ParameterServer.delay_compensation": f"{ASYNCHRONOUS})",
    "ParameterServer.lambda0": f"{ASYNCHRONOUS}, delay_compensation='constant')",
    "ParameterServer.mean_square": f"{ASYNCHRONOUS}, delay_compensation='adaptive')",
}

#: Values for settings that do not take any of their type.
VALUES: dict[str, object] = {
    "AllReduce.order": (1, 0, 3, 2),
    "Auto.candidates": (LocalSGD(4), AllReduce("tree")),
    "ParameterServer.slices": (2.0,),
    "PowerSGD.min_rate": 8.0,
    "Pipeline.cuts": ("4",),
    "SlowMo.every": 16,
    "Straggler.ratio": 2.375,
    "Training.cluster": "wifi(nodes=3)",
    "Training.shares": (2.0, 1.0, 1.0, 1.0),
    "characters.width": 32,
    "synthetic.parameters": 3_000,
}


def resolved(registry: Registry, name: str) -> Any:
    from orchestra.settings import parse

    return parse(SAMPLES.get(name, name), registry, where="test")


def is_one(name: str, kind: type) -> bool:
    return issubclass(STRATEGIES.resolve(name, where="test"), kind)


STRATEGY_NAMES = [name for name in STRATEGIES.names() if is_one(name, Strategy)]
PART_NAMES = [name for name in STRATEGIES.names() if not is_one(name, Strategy)]


def another(hint: Any, value: object, limits: NumberRange) -> object:
    """A value of the annotation `hint` other than `value`; fails for a kind that is new here."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return next(choice for choice in parts if choice != value)
    if origin in (Union, types.UnionType):
        kinds = [part for part in parts if part is not type(None)]
        return another(kinds[0], value, limits)
    if hint is bool:
        return not value
    if hint is int:
        least = int(limits.low or 0)
        return least + 1 if value != least + 1 else least + 2
    if hint is float:
        return 0.375 if value != 0.375 else 0.25
    if hint is str:
        return "other"
    if origin is tuple:
        return (another(parts[0], None, limits), another(parts[0], 0.375, limits))
    return another_object(hint, value)


def another_object(hint: Any, value: object) -> object:
    kind = get_origin(hint) or hint
    if kind is Optimizer:
        return Optimizer("AdamW", {"lr": 0.25, "betas": (0.5, 0.75)})
    if kind is Target:
        return Target("loss", at_most=0.375)
    if kind is RateSchedule:
        return resolved(SCHEDULES, "Cosine" if type(value).__name__ != "Cosine" else "Constant")
    if kind is Sharding:
        return resolved(SHARDINGS, "IID")
    if kind is Strategy:
        name = "AllReduce('parallel')"
        return resolved(STRATEGIES, name)
    if issubclass(kind, Settings):
        others = (name for name in PART_NAMES if is_one(name, kind) and name not in SAMPLES)
        return resolved(STRATEGIES, next(n for n in others if n != type(value).__name__))
    raise AssertionError(f"say here what another value of {hint} is")


def fields_of(settings: Settings) -> list[tuple[str, Any, NumberRange]]:
    hints = type_hints(type(settings))
    return [
        (field.name, hints[field.name], field.metadata["limits"])
        for field in settings_of(type(settings))
    ]


def text_of(value: object, registry: Registry) -> str:
    """`value` as the right side of --set."""
    named = isinstance(value, Settings) and not isinstance(value, Optimizer)
    return write(value, registry) if named else repr(value)


def experiment(**keys: object) -> Experiment:
    given: dict[str, object] = {"task": "digits", "strategies": {"it": "AllReduce"}, **keys}
    return load(None, (), {key: Entry(value, key) for key, value in given.items()})


def from_file(text: str, folder: Path, overrides: list[str] | None = None) -> Experiment:
    path = folder / "digits.yaml"
    path.write_text(text)
    return load(path, overrides or [])


def assert_reachable(
    key: str, value: object, expected: Experiment, before: Experiment, folder: Path
) -> None:
    """By --set on the file of `before`, and by the file that says `expected`."""
    assert expected != before, f"{key}: nothing has changed"
    assert from_file(to_yaml(before), folder) == before
    assert from_file(to_yaml(before), folder, [f"{key}={value}"]) == expected
    assert from_file(to_yaml(expected), folder) == expected


def walk(registry: Registry, names: list[str]) -> list[Any]:
    """One case for each setting of each class."""
    return [
        pytest.param(name, field, id=f"{name}.{field}")
        for name in names
        for field, _, _ in fields_of(resolved(registry, name))
    ]


def changed_one(registry: Registry, name: str, field: str) -> tuple[Settings, object, Settings]:
    """The settings `name`, another value of `field`, and the settings with it."""
    settings = resolved(registry, BESIDE.get(f"{name}.{field}", name))
    (hint, limits) = next((h, limits) for n, h, limits in fields_of(settings) if n == field)
    value = VALUES.get(f"{name}.{field}") or another(hint, getattr(settings, field), limits)
    return settings, value, settings.with_setting(field, value)


@pytest.mark.parametrize(("name", "field"), walk(STRATEGIES, STRATEGY_NAMES))
def test_strategies(name: str, field: str, tmp_path: Path) -> None:
    settings, value, other = changed_one(STRATEGIES, name, field)
    before = experiment(strategies={"it": write(settings, STRATEGIES)})
    expected = experiment(strategies={"it": write(other, STRATEGIES)})
    assert expected.strategies["it"] == other
    text = text_of(value, STRATEGIES)
    assert_reachable(f"strategies.it.{field}", text, expected, before, tmp_path)


@pytest.mark.parametrize(("name", "field"), walk(STRATEGIES, PART_NAMES))
def test_parts_of_a_strategy(name: str, field: str, tmp_path: Path) -> None:
    settings, value, other = changed_one(STRATEGIES, name, field)
    holder, place = next(text for kind, text in HOLDERS.items() if isinstance(settings, kind))

    def holding(part: Settings) -> Experiment:
        return experiment(strategies={"it": holder.format(write(part, STRATEGIES))})

    before, expected = holding(settings), holding(other)
    text = text_of(value, STRATEGIES)
    assert_reachable(f"strategies.it.{place}.{field}", text, expected, before, tmp_path)


@pytest.mark.parametrize(("name", "field"), walk(TASKS, TASKS.names()))
def test_tasks(name: str, field: str, tmp_path: Path) -> None:
    settings, value, other = changed_one(TASKS, name, field)
    before = experiment(task=write(settings, TASKS), name="digits")
    expected = experiment(task=write(other, TASKS), name="digits")
    assert_reachable(f"task.{field}", repr(value), expected, before, tmp_path)


@pytest.mark.parametrize(("name", "field"), walk(SCHEDULES, SCHEDULES.names()))
def test_schedules(name: str, field: str, tmp_path: Path) -> None:
    settings, value, other = changed_one(SCHEDULES, name, field)
    before = experiment(schedule=write(settings, SCHEDULES))
    expected = experiment(schedule=write(other, SCHEDULES))
    assert_reachable(f"schedule.{field}", repr(value), expected, before, tmp_path)


TRAINING_FIELDS = [field for field, _, _ in fields_of(Training()) if field != "ranks"]


@pytest.mark.parametrize("field", TRAINING_FIELDS)
def test_training(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file and on the command line its settings are keys of the experiment."""
    monkeypatch.setattr(trainer_settings, "require_tracker", lambda name: None)
    training = Training()
    (hint, limits) = next((h, limits) for n, h, limits in fields_of(training) if n == field)
    value = VALUES.get(f"Training.{field}") or another(hint, getattr(training, field), limits)
    before = experiment()
    expected = before.with_setting("training", before.training.with_setting(field, value))
    text: object = text_of(value, SCHEDULES)
    if isinstance(value, Target):
        text = "{metric: loss, at_most: 0.375}"
    if isinstance(value, tuple):
        text = str(list(value))
    assert_reachable(field, text, expected, before, tmp_path)
    assert getattr(expected.training, field) == value


@pytest.mark.parametrize("field", [field.name for field in settings_of(Target)])
def test_target(field: str, tmp_path: Path) -> None:
    targets = {
        "metric": ({"metric": "accuracy", "at_least": 0.5}, {"metric": "loss", "at_least": 0.5}),
        "at_least": ({"metric": "a", "at_least": 0.5}, {"metric": "a", "at_least": 0.75}),
        "at_most": ({"metric": "a", "at_most": 0.5}, {"metric": "a", "at_most": 0.75}),
    }
    first, second = targets[field]
    before, expected = experiment(target=first), experiment(target=second)
    assert_reachable(f"target.{field}", second[field], expected, before, tmp_path)


EXPERIMENT: Mapping[str, tuple[str, object]] = {
    "name": ("other", "other"),
    "task": ("regression(noise=0.25)", "regression(noise=0.25)"),
    "strategies": ("{other: Single}", {"other": "Single"}),
    "ranks": ("[1, 2]", [1, 2]),
    "seeds": ("[3, 4]", [3, 4]),
    "devices": ("{it: auto}", {"it": "auto"}),
    "tune": (
        "{settings: {optimizer.lr: [1, 2]}, by: loss, seed: 3}",
        {"settings": {"optimizer.lr": [1, 2]}, "by": "loss", "seed": 3},
    ),
}


@pytest.mark.parametrize(
    "field", [field.name for field in settings_of(Experiment) if field.name != "training"]
)
def test_experiment(field: str, tmp_path: Path) -> None:
    text, value = EXPERIMENT[field]
    before = experiment(name="digits")
    expected = experiment(**{"name": "digits", field: value})
    assert_reachable(field, text, expected, before, tmp_path)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("settings", "{optimizer.lr: [3]}", {"optimizer.lr": [3]}),
        ("by", "loss", "loss"),
        ("seed", "3", 3),
    ],
)
def test_tune(field: str, text: str, value: object, tmp_path: Path) -> None:
    tune = {"settings": {"optimizer.lr": [1, 2]}}
    before, expected = experiment(tune=tune), experiment(tune={**tune, field: value})
    assert_reachable(f"tune.{field}", text, expected, before, tmp_path)


@pytest.mark.parametrize("argument", ["lr=0.25", "momentum=0.5", "nesterov=True"])
def test_arguments_of_the_optimizer(argument: str, tmp_path: Path) -> None:
    before = experiment(optimizer="SGD(lr=0.5)")
    name, _, value = argument.partition("=")
    arguments = {"lr": "0.5", name: value}
    call = ", ".join(f"{key}={item}" for key, item in arguments.items())
    expected = experiment(optimizer=f"SGD({call})")
    assert_reachable(f"optimizer.{name}", value, expected, before, tmp_path)


def test_parameter_groups(tmp_path: Path) -> None:
    before = experiment()
    expected = experiment(parameter_groups=[{"match": "bias", "lr": 0.5}])
    text = "[{match: bias, lr: 0.5}]"
    assert_reachable("parameter_groups", text, expected, before, tmp_path)

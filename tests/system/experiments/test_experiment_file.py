"""Experiment files: read, changed by --set, written in full; every mistake has one clear line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Started
from tests.support.recorded import changed, recorded

from orchestra.errors import InputError
from orchestra.experiments.experiment import Experiment, Tune, runs
from orchestra.experiments.file import load, to_yaml
from orchestra.experiments.run import claim, fresh_folder
from orchestra.optimizers.settings import Cosine, Optimizer, ParameterGroup
from orchestra.records.record import RunRecord
from orchestra.records.store import finished, write_summary
from orchestra.settings import setting
from orchestra.settings.base import settings_of
from orchestra.settings.reading import Entry, yaml_text
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.member import Member
from orchestra.strategies.outer import SlowMo
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.switch import Switch
from orchestra.strategies.switch_rules import AfterSteps, LossStable
from orchestra.trainer import settings as trainer_settings
from orchestra.trainer.settings import Run, Target, Training
from orchestra.worker.worker import Worker

FULL = """\
# a comment
task: digits(channels=8)
ranks: 4
batch_size: 16
epochs: 2
optimizer: SGD(lr=1e-2, momentum=0.9)
parameter_groups: [{match: "bias|bn", weight_decay: 0.0}]
schedule: Cosine(warmup=0.1)
target: {metric: accuracy, at_least: 0.9}
seeds: [0, 1]
strategies:
  ring: AllReduce("ring")
  switch: Switch(AllReduce, ParameterServer(consistency="asynchronous"), when=LossStable(4))
"""
TUNE = "tune: {{settings: {{{}}}}}\n"
SMALL = "task: digits\nstrategies: {ring: AllReduce}\n"

Write = Callable[[str], Path]


@dataclass(frozen=True, repr=False)
class OwnStrategy(Strategy):
    """A strategy that the package does not know."""

    strength: float = setting(1.0, "how strong", low=0)

    def member(self, worker: Worker) -> Member[Any]:
        """Every worker on its own."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Unfinished(Strategy):
    """A strategy that lacks `member`."""


def own_task(size: int) -> None:
    """A task's place in this file; never called here."""
    raise AssertionError("called")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = Path("exp.yaml")
        path.write_text(text)
        return path

    return write


def test_a_file_becomes_an_experiment(write: Write) -> None:
    experiment = load(write(FULL))
    assert experiment.name == "exp"
    assert experiment.task.startswith("digits(")
    assert "8" in experiment.task
    assert experiment.seeds == (0, 1)
    assert experiment.strategies == {
        "ring": AllReduce("ring"),
        "switch": Switch(
            AllReduce("ring"), ParameterServer(consistency="asynchronous"), when=LossStable(4)
        ),
    }
    assert experiment.training == Training(
        ranks=4,
        batch_size=16,
        epochs=2,
        optimizer=Optimizer(
            "SGD",
            {"lr": 0.01, "momentum": 0.9},
            (ParameterGroup("bias|bn", arguments={"weight_decay": 0.0}),),
        ),
        schedule=Cosine(warmup=0.1),
        target=Target("accuracy", at_least=0.9),
    )


def test_shares_are_those_of_the_ranks_of_the_file(write: Write) -> None:
    loaded = load(write(SMALL + "shares: [1, 2, 3]\nranks: 3\n"))
    assert (loaded.ranks, loaded.training.shares) == ((3,), (1.0, 2.0, 3.0))
    with pytest.raises(InputError, match="shares"):
        load(write(SMALL + "shares: [1, 2, 3]\nranks: 5\n"))
    with pytest.raises(InputError, match="unknown rule of balancing"):  # no folder has such a name
        load(write(SMALL + f"shares: {'a' * 5000}\n"))


def test_its_runs_are_all_strategies_on_all_ranks_with_each_seed(write: Write) -> None:
    experiment = load(write(FULL))
    all_runs = runs(replace(experiment, ranks=(1, 2)))
    assert [(run.name, run.training.ranks, run.seed) for run in all_runs] == [
        ("ring", 1, 0),
        ("ring", 2, 0),
        ("switch", 2, 0),
        ("ring", 1, 1),
        ("ring", 2, 1),
        ("switch", 2, 1),
    ]
    assert runs(experiment)[0] == Run(
        "ring", experiment.task, AllReduce("ring"), 0, training=experiment.training
    )


@pytest.mark.parametrize("text", [FULL, SMALL, SMALL + "steps: 3\ntarget: null\n"])
def test_what_is_written_loads_back(write: Write, text: str) -> None:
    experiment = load(write(text))
    assert load(write(to_yaml(experiment))) == experiment


def test_names_and_values_that_yaml_could_mistake_load_back(write: Write) -> None:
    experiment = replace(
        load(write(SMALL)),
        name="1e-3",
        strategies={"no": AllReduce("ring"), "2026-01-01": AllReduce("native"), "1": AllReduce()},
        training=Training(
            optimizer=Optimizer(
                "SGD",
                {"lr": 1e-7, "x": "a'b", "y": None},
                (ParameterGroup("'\"#: \\d", arguments={"betas": (0.9, 0.99), "flag": True}),),
            )
        ),
    )
    assert load(write(to_yaml(experiment))) == experiment


def test_a_strategy_of_the_users_own_loads_back(write: Write) -> None:
    text = f"task: digits\nstrategies:\n  own: {__name__}:OwnStrategy(2)\n"
    experiment = load(write(text))
    assert type(experiment.strategies["own"]).__name__ == "OwnStrategy"
    assert load(write(to_yaml(experiment))) == experiment


def test_a_strategy_that_lacks_a_half_is_named(write: Write) -> None:
    text = f"task: digits\nstrategies:\n  own: {__name__}:Unfinished\n"
    with pytest.raises(InputError, match="not complete: it has to define member"):
        load(write(text))


def test_a_task_of_the_users_own_is_not_called(write: Write) -> None:
    text = f"task: {__name__}:own_task(3)\nstrategies: {{ring: AllReduce}}\n"
    experiment = load(write(text), ["task.depth=2"])
    assert experiment.task == f"{__name__}:own_task(3, depth=2)"


ERRORS = [
    ("", "exp.yaml: is empty; it needs at least task and strategies"),
    ("- a\n", "exp.yaml: is not a mapping of keys to values, such as task: digits"),
    ("task: [\n", "exp.yaml:2: not YAML: "),
    ("task: a: b\n", "exp.yaml:1: not YAML: mapping values are not allowed here"),
    ("task: !!python/object:os.system x\n", "exp.yaml:1: not YAML: could not determine"),
    ("task: digits\x07\n", "exp.yaml: not YAML: "),
    ("task: digits\n", "exp.yaml: strategies is missing; add it, such as strategies: {ring"),
    ("strategies: {ring: AllReduce}\n", "exp.yaml: task is missing; add it, such as task: digits"),
    ("task: digits\nstrategies:\n", "exp.yaml:2 strategies: expected mapping, got None"),
    ("task: digits\nstrategies: {}\n", "exp.yaml:2 strategies: is empty; give a label"),
    (
        "task: digits\nstrategies: [a]\n",
        "exp.yaml:2 strategies: has to be a mapping, such as {ring",
    ),
    (SMALL + "\nbatchsize: 3\n", "exp.yaml:4: unknown key 'batchsize'; did you mean 'batch_size'"),
    (SMALL + "tune: 3\n", "exp.yaml:3 tune: has to be a mapping, such as {settings"),
    (
        SMALL + "tune: {}\n",
        "exp.yaml:3 tune: settings is missing; add it, such as settings: {optimizer.lr:",
    ),
    (SMALL + "tune:\n  setings: {}\n", "exp.yaml:4 tune: unknown key 'setings'; did you mean"),
    (SMALL + TUNE.format("clip_norm: [1]"), "exp.yaml:3 tune.settings: lacks optimizer.lr"),
    (SMALL + TUNE.format("optimizer.lr: 1"), "exp.yaml:3 tune.settings: expected list of object"),
    (SMALL + TUNE.format("optimizer.lr: []"), "tune.settings.optimizer.lr: there is no value"),
    (SMALL + TUNE.format("optimizer.lr: [1, 1.0]"), "optimizer.lr: [1, 1.0] holds a value twice"),
    (SMALL + TUNE.format("optimizer.lr: [x]"), "optimizer.lr: 'x' is not a number"),
    (
        SMALL + TUNE.format("optimizer.lr: [1], batch_size: [1, 2]"),
        "exp.yaml:3 tune.settings.batch_size: cannot be tuned for each strategy on its own",
    ),
    (
        SMALL + TUNE.format("optimizer.lr: [1], schedule: [Cosin]"),
        "tune.settings.schedule: unknown schedule 'Cosin'; did you mean",
    ),
    (
        SMALL + TUNE.format("optimizer.lr: [1], strategy.every: [2]"),
        "tune.settings.strategy.every: AllReduce has no setting 'every'",
    ),
    (
        SMALL + TUNE.format("optimizer.lr: [1], strategy: [Single]"),
        "tune.settings.strategy: cannot be tuned for each strategy on its own",
    ),
    (
        SMALL + TUNE.format("optimizer.lr: [1], clip_norm: [0]"),
        "tune.settings.clip_norm: Training.clip_norm: 0.0 is not above 0",
    ),
    (
        SMALL + "tune: {settings: {optimizer.lr: [1]}, by: target}\n",
        "exp.yaml: tune.by: there is no target to choose by",
    ),
    (
        SMALL + "tune: {settings: {optimizer.lr: [1]}, by: los}\n",
        "exp.yaml:3 tune.by: 'los' is not known; did you mean 'loss'?",
    ),
    (SMALL + "seeds: [1000]\n" + TUNE.format("optimizer.lr: [1]"), "1000 is among the seeds"),
    (SMALL + "ranks: 2\nranks: 3\n", "exp.yaml:4: 'ranks' stands in line 3, too"),
    ("task: digits\nstrategies:\n  a: Single\n  a: Single\n", "exp.yaml:4: 'a' stands in line 3"),
    (
        "task: digits\nstrategies:\n  a: Sngle\n",
        "exp.yaml:3 strategies.a: unknown strategy 'Sngle'",
    ),
    ("task: digits\nstrategies:\n\n  a: 5\n", "exp.yaml:4 strategies.a: 5 is not a constructor"),
    (
        "task: digits\nstrategies:\n  a: AllReduce('rng')\n",
        "exp.yaml:3 strategies.a: AllReduce.algorithm: 'rng' is not known; did you",
    ),
    (
        "task: digits\nstrategies: {a: AfterSteps}\n",
        "exp.yaml:2 strategies.a: expected Strategy, got",
    ),
    ("task: digits\nstrategies: {a/b: Single}\n", "exp.yaml: 'a/b' cannot be a name"),
    ("task: digit\nstrategies: {a: Single}\n", "exp.yaml:1 task: unknown task 'digit'"),
    ("task: digits(chanels=2)\nstrategies: {a: Single}\n", "did you mean 'channels'?"),
    ("task: nowhere_at_all:f\nstrategies: {a: Single}\n", "no package or module 'nowhere_at_all'"),
    (SMALL + "ranks: four\n", "exp.yaml:3 ranks: expected whole number, got 'four'"),
    (SMALL + "ranks: 0\n", "exp.yaml:3 ranks: 0 is below 1"),
    (SMALL + "ranks: [2, 0]\n", "exp.yaml:3 ranks: 0 is below 1"),
    (SMALL + "ranks: [2, 2]\n", "exp.yaml: ranks: [2, 2] holds a number twice"),
    (SMALL + "ranks: []\n", "exp.yaml: ranks: there is none"),
    (SMALL + "ranks: 2.5\n", "exp.yaml:3 ranks: expected whole number, got 2.5"),
    (SMALL + "seeds: 3\n", "exp.yaml:3 seeds: expected list of whole numbers, got 3"),
    (SMALL + "seeds: [1, 1]\n", "exp.yaml: seeds: [1, 1] holds a seed twice"),
    (SMALL + "seeds: []\n", "exp.yaml: seeds: there is none"),
    (
        SMALL + "precision: bf61\n",
        "exp.yaml:3 precision: 'bf61' is not known; did you",
    ),
    (SMALL + "epochs: 1\nsteps: 1\n", "exp.yaml: epochs and steps are both set; give one"),
    (SMALL + "optimizer: {SGD: 1}\n", "exp.yaml:3 optimizer: {'SGD': 1} is not a constructor call"),
    (SMALL + "optimizer: SGD(0.1)\n", "exp.yaml:3 optimizer: name the arguments of SGD"),
    (SMALL + "schedule: Cosin\n", "exp.yaml:3 schedule: unknown schedule 'Cosin'; did you mean"),
    (SMALL + "target: 0.9\n", "exp.yaml:3 target: has to be a mapping, such as {metric"),
    (SMALL + "target:\n  metric: a\n  atleast: 1\n", "exp.yaml:5 target: unknown key 'atleast'"),
    (
        SMALL + "target: {at_least: 1}\n",
        "exp.yaml:3 target: metric is missing; add it, such as metric: ",
    ),
    (SMALL + "target: {metric: a}\n", "exp.yaml:3 target: give one of at_least and at_most"),
    (SMALL + "parameter_groups: 3\n", "exp.yaml:3 parameter_groups: has to be a list such as"),
    (SMALL + "parameter_groups: [{lr: 1}]\n", "exp.yaml:3 parameter_groups: has to be a list"),
    (
        SMALL + "parameter_groups: [{match: (}]\n",
        "exp.yaml:3 parameter_groups: ParameterGroup.match: '(' is not a regular",
    ),
    (
        "task: digits\nranks: 1\nstrategies: {ps: ParameterServer}\n",
        "exp.yaml: strategies.ps: ParameterServer: ",
    ),
    (
        "task: digits\nranks: [1, 2]\nstrategies: {ps: ParameterServer(servers=2)}\n",
        "exp.yaml: strategies.ps: ParameterServer: ",
    ),
]


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_a_mistake_is_told_in_one_line_with_its_place(
    write: Write, text: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(write(text))
    assert message in str(caught.value)
    assert str(caught.value).startswith("exp.yaml")
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(InputError, match="is not a text file in UTF-8"):
        load(tmp_path / "binary.yaml")


def _training(**changes: Any) -> Callable[[Experiment], Experiment]:
    return lambda experiment: replace(experiment, training=replace(experiment.training, **changes))


def _strategy(label: str, strategy: Strategy) -> Callable[[Experiment], Experiment]:
    return lambda experiment: replace(
        experiment, strategies={**experiment.strategies, label: strategy}
    )


RATES = Tune({"optimizer.lr": (1, 2)})
GROUPS = (ParameterGroup("bias|bn", arguments={"weight_decay": 0.0}),)
ASYNCHRONOUS = ParameterServer(consistency="asynchronous")


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("ranks=[1, 2]", lambda e: replace(e, ranks=(1, 2))),
        ("ranks=2", lambda e: replace(e, ranks=(2,))),
        ("tune={settings: {optimizer.lr: [1, 2]}}", lambda e: replace(e, tune=RATES)),
        ("name=other", lambda e: replace(e, name="other")),
        ("seeds=[3]", lambda e: replace(e, seeds=(3,))),
        ("batch_size=8", _training(batch_size=8)),
        ("steps=7", _training(steps=7, epochs=None)),
        ("epochs=7", _training(epochs=7)),
        ("clip_norm=1e-1", _training(clip_norm=0.1)),
        ("overlap=false", _training(overlap=False)),
        ("target=null", _training(target=None)),
        ("target={metric: loss, at_most: 1}", _training(target=Target("loss", at_most=1.0))),
        ("target.at_least=0.95", _training(target=Target("accuracy", at_least=0.95))),
        ("schedule.warmup=0.5", _training(schedule=Cosine(warmup=0.5))),
        (
            "optimizer.lr=0.5",
            _training(optimizer=Optimizer("SGD", {"lr": 0.5, "momentum": 0.9}, GROUPS)),
        ),
        (
            "optimizer=Adam(lr=0.5)",
            _training(optimizer=Optimizer("Adam", {"lr": 0.5}, GROUPS)),
        ),
        (
            "parameter_groups=[]",
            _training(optimizer=Optimizer("SGD", {"lr": 0.01, "momentum": 0.9})),
        ),
        ("strategies.ring.algorithm=parallel", _strategy("ring", AllReduce("parallel"))),
        ("strategies.ring=ParameterServer", _strategy("ring", ParameterServer())),
        (
            "strategies.switch.when=AfterSteps(5)",
            _strategy("switch", Switch(AllReduce(), ASYNCHRONOUS, when=AfterSteps(5))),
        ),
        (
            "strategies.switch.when.window=5",
            _strategy("switch", Switch(AllReduce(), ASYNCHRONOUS, when=LossStable(5))),
        ),
    ],
)
def test_set_changes_what_it_names_and_nothing_else(
    write: Write, override: str, change: Callable[[Experiment], Experiment]
) -> None:
    path = write(FULL)
    assert load(path, [override]) == change(load(path))


def test_set_reaches_into_the_task(write: Write) -> None:
    path = write(FULL)
    assert load(path, ["task.channels=4"]).task == load(path, ["task=digits(channels=4)"]).task
    assert load(path, ["task.channels=4"]).task != load(path).task


SERVER = "strategies.s.consistency=asynchronous"
TOGETHER = ("strategies.s.delay_compensation=constant", "strategies.s.lambda0=0.1")
"""lambda0 means something with delay compensation only, which needs an asynchronous server."""


@pytest.mark.parametrize("overrides", [*permutations((SERVER, *TOGETHER))])
def test_the_order_of_changes_does_not_matter(write: Write, overrides: tuple[str, ...]) -> None:
    path = write("task: digits\nstrategies: {s: ParameterServer(servers=2)}\n")
    expected = ParameterServer(
        servers=2, consistency="asynchronous", delay_compensation="constant", lambda0=0.1
    )
    assert load(path, overrides).strategies == {"s": expected}


def test_what_does_not_go_together_names_every_change(write: Write) -> None:
    path = write("task: digits\nstrategies: {s: ParameterServer}\n")
    with pytest.raises(InputError) as caught:
        load(path, TOGETHER)
    assert str(caught.value).startswith(
        "--set strategies.s.delay_compensation, strategies.s.lambda0: ParameterServer"
    )


def test_changes_make_a_target_that_the_file_lacks(write: Write) -> None:
    path = write("task: digits\nstrategies: {ring: AllReduce}\n")
    for overrides in permutations(("target.at_least=0.9", "target.metric=accuracy")):
        assert load(path, overrides).training.target == Target("accuracy", at_least=0.9)


def test_a_change_makes_a_setting_of_the_file_valid(write: Write) -> None:
    """The file is checked with all changes, and not before."""
    text = "task: digits\nstrategies: {s: 'ParameterServer(lambda0=0.1)'}\n"
    with pytest.raises(InputError, match="lambda0"):
        load(write(text))
    changed = load(write(text), [SERVER, TOGETHER[0]]).strategies["s"]
    assert isinstance(changed, ParameterServer)
    assert changed.lambda0 == 0.1


def test_a_change_reaches_into_a_default_and_into_arguments_by_position(write: Write) -> None:
    path = write(
        "task: digits\nstrategies: {l: 'LocalSGD(4, outer=SlowMo(0.5))', d: 'LocalSGD(4)'}\n"
    )
    changed = load(path, ["strategies.l.outer.momentum=0.25", "strategies.d.every=2"])
    assert changed.strategies == {"l": LocalSGD(4, outer=SlowMo(0.25)), "d": LocalSGD(2)}


def test_file_set_and_python_make_the_same_experiment(write: Write) -> None:
    keys = {"task": "digits", "strategies": {"s": "AllReduce"}, "schedule": "Cosine(warmup=0.5)"}
    python = load(None, (), {key: Entry(value, f"{key}=") for key, value in keys.items()})
    path = write("task: digits\nstrategies: {s: Single}\n")
    overrides = ["strategies={s: AllReduce}", "schedule=Cosine", "schedule.warmup=0.5"]
    named = [f"name={python.name}"]
    assert load(path, [*reversed(overrides), *named]) == python
    assert load(write(yaml_text(keys)), named) == python


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set steps: has to be key=value"),
        ("=3", "--set =3: has to be key=value"),
        ("batchsize=3", "--set batchsize: unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("batch_size=x", "--set batch_size: expected whole number, got 'x'"),
        ("optimzer.lr=1", "--set optimzer.lr: unknown key 'optimzer'; did you mean 'optimizer'?"),
        ("ranks.x=1", "--set ranks.x: ranks is 4, which has no settings of its own"),
        ("strategies.rin=Single", "--set strategies.rin: there is no 'rin'; did you mean 'ring'?"),
        ("strategies.ring.algoritm=a", "AllReduce has no setting 'algoritm'; did you mean 'algor"),
        ("schedule.at=[1]", "--set schedule.at: Cosine has no setting 'at'; known: final, warmup"),
        ("task.chanels=3", "has no setting 'chanels'; did you mean 'channels'?"),
        ("target.at_most=1", "--set target.at_most: give one of at_least and at_most"),
        ("parameter_groups.0=1", "give parameter_groups as a whole"),
        ("strategies.ring.algorithm=rng", "'rng' is not known; did you mean 'ring'?"),
    ],
)
def test_a_bad_set_is_told_in_one_line(write: Write, override: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(write(FULL), [override])
    assert message in str(caught.value)
    assert str(caught.value).startswith("--set ")


# One other value for every setting of a training: a new setting needs a row here.
OTHER = {
    "ranks": "[1, 5]",
    "devices": "{ring: auto}",
    "tune": "{settings: {optimizer.lr: [0.01, 0.1], schedule: [Cosine]}, by: loss, seed: 7}",
    "batch_size": "7",
    "equal": "worker_batch",
    "shares": "measured",
    "work": "equal",
    "threads": "2",
    "sharding": "Dirichlet(0.25)",
    "accumulation": "2",
    "epochs": "3",
    "steps": "9",
    "optimizer": "Adam(lr=0.5)",
    "schedule": "StepDecay",
    "clip_norm": "0.5",
    "precision": "bf16",
    "engine": "simulation",
    "cluster": "wifi",
    "calibration": "none",
    "device": "auto",
    "snapshots": "3",
    "target": "{metric: loss, at_most: 1}",
    "checkpoint_every": "4",
    "stop_on_nonfinite": "false",
    "patience": "9.5",
    "grace": "12.0",
    "min_ranks": "1",
    "bucket_megabytes": "0.5",
    "overlap": "false",
    "resized_batch": "scaled",
    "tensorboard": "true",
    "mlflow": "true",
    "wandb": "true",
    "record_order": "true",
    "tensors": "shapes",
    "trace_steps": "3",
    "parameter_groups": "[{match: x, lr: 1}]",
    "task": "regression",
    "seeds": "[5]",
    "name": "other",
    "strategies": "{one: Single}",
}


def test_every_key_of_the_file_is_reached_from_file_and_set(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_settings, "require_tracker", lambda name: None)
    fields = [field.name for cls in (Experiment, Training) for field in settings_of(cls)]
    keys = {*fields, "parameter_groups"} - {"training"}
    assert set(OTHER) == keys
    before = load(write(SMALL))
    for key in keys:
        by_set = load(write(SMALL), [f"{key}={OTHER[key]}"])
        lines = {"task": "task: digits", "strategies": "strategies: {ring: AllReduce}"}
        lines[key] = f"{key}: {OTHER[key]}"
        assert load(write("\n".join(lines.values()))) == by_set
        assert to_yaml(by_set) != to_yaml(before), key


def test_given_entries_replace_those_of_the_file(write: Write) -> None:
    given = {"strategies": Entry({"AllReduce": "AllReduce"}, "--strategy")}
    path = write("task: digits\nstrategies: {a: NoSuchThing, b: Single}\n")
    assert load(path, given=given).strategies == {"AllReduce": AllReduce()}


def test_no_file_is_needed_where_enough_is_given() -> None:
    given = {
        "task": Entry(f"{__name__}:own_task(1)", "--task"),
        "strategies": Entry({"ring": "AllReduce"}, "--strategy"),
    }
    experiment = load(None, ["steps=3"], given)
    assert experiment.name == "own_task"
    assert experiment.training == Training(steps=3)


def test_fresh_folders_are_numbered(tmp_path: Path) -> None:
    parent = tmp_path / "runs"
    assert [fresh_folder(parent, "a").name for _ in range(3)] == ["a-1", "a-2", "a-3"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Not a directory"):
        fresh_folder(tmp_path / "file", "a")


def test_a_folder_belongs_to_one_experiment(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "one"
    experiment = load(write(FULL))
    assert claim(folder, experiment) is False
    assert claim(folder, experiment) is True
    assert load(folder / "experiment.yaml") == experiment
    for other in (["batch_size=9"], ["patience=5"], ["seeds=[9]"]):
        with pytest.raises(InputError) as caught:
            claim(folder, load(write(FULL), other))
        assert f"different experiment (in {other[0].partition('=')[0]})" in str(caught.value)
    assert load(folder / "experiment.yaml") == experiment


def test_a_folder_with_other_files_is_not_taken(write: Write, tmp_path: Path) -> None:
    experiment = load(write(SMALL))
    folder = tmp_path / "mine"
    folder.mkdir()
    assert claim(folder, experiment) is False
    (folder / "experiment.yaml").unlink()
    (folder / "thesis.txt").write_text("")
    with pytest.raises(InputError, match=r"holds files, but no experiment\.yaml"):
        claim(folder, experiment)
    with pytest.raises(InputError, match="is not a folder"):
        claim(folder / "thesis.txt", experiment)
    with pytest.raises(InputError, match="cannot be used: "):
        claim(folder / "thesis.txt" / "below", experiment)


def _record(status: str) -> RunRecord:
    return recorded("ring", "AllReduce('ring')", "processes", 2, 2, 0, 0, status)


def test_only_completed_runs_are_finished(tmp_path: Path) -> None:
    assert finished(tmp_path) == []
    write_summary(tmp_path, "exp", [_record("completed"), _record("failed"), _record("stopped")])
    assert [record.ending.status for record in finished(tmp_path)] == ["completed"]
    empty = (
        "notices", "by_rank", "worker_batches", "shares", "batches", "costs_doubts", "stragglers",
        "decisions", "restarts", "regroupings", "ranks_history",
    )  # fmt: skip
    lists: dict[str, Any] = {name: [] for name in empty}
    expected = changed(_record("completed"), folder=tmp_path, **lists)
    assert finished(tmp_path) == [expected]
    assert [r.ending.status for r in finished(tmp_path, failed=True)] == ["completed", "failed"]
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        finished(tmp_path)


def test_a_nested_required_setting_is_demanded_by_name(write: Write) -> None:
    path = write("task: digits\nstrategies: {s: Switch(AllReduce)}\n")
    with pytest.raises(InputError, match="missing a required argument: 'then'"):
        load(path)


SCRIPT = """
from dataclasses import dataclass
import orchestra
from orchestra.tasks import Digits

@dataclass(frozen=True, repr=False)
class Mine(orchestra.LocalSGD):
    pass

def own_digits() -> orchestra.Task:
    return Digits().build()

if __name__ == "__main__":
    orchestra.train(own_digits, Mine(2), 1, steps=1, out="run", quiet=True)
"""


def test_the_file_of_a_script_s_run_repeats_it_from_the_script_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_script.py").write_text(SCRIPT)
    with Started([sys.executable, str(tmp_path / "own_script.py")], tmp_path) as script:
        assert script.end().status == 0
    monkeypatch.syspath_prepend(tmp_path)
    again = load(tmp_path / "run" / "experiment.yaml")
    assert again.task == "own_script:own_digits()"
    (strategy,) = again.strategies.values()
    assert repr(strategy) == "Mine(2)"

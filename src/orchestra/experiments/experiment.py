"""An experiment: one task, trained under each of several strategies, with each of several seeds;
and the trials before it, which choose the settings of each strategy.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from orchestra.errors import CONTROLS, InputError, nearest
from orchestra.optimizers.settings import SCHEDULES
from orchestra.records.files import trial_folder, write_atomically
from orchestra.records.record import RunRecord
from orchestra.report.numbers import count
from orchestra.report.rows import grouped
from orchestra.settings import MAX_RANKS, MAX_SEED, REQUIRED, Settings, parse, setting
from orchestra.settings.base import to_plain
from orchestra.settings.tree import rebuilt
from orchestra.strategies.base import Strategy, refusal_of
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Device, Run, Target, Training

TUNING = "tuning.json"
RATE = "optimizer.lr"
_STRATEGY = "strategy."
MAX_TRIALS = 10_000
_TUNABLE = ("optimizer", "schedule", "clip_norm", "strategy")


@dataclass(frozen=True, repr=False)
class Tune(Settings):
    """A grid of settings: every strategy gets a trial with each combination, on every number of
    ranks. The best on the validation data is what the strategy is compared with.

    Settings of a strategy itself (strategy.lambda0, strategy.outer.rate) are tried with the
    strategies that have them, which so get more trials.
    """

    settings: Mapping[str, tuple[Any, ...]] = setting(
        REQUIRED, "the values to try of each, such as {optimizer.lr: [0.01, 0.1]}"
    )
    by: Literal["target", "loss"] | None = setting(
        None, "the target's metric or the lowest loss; the metric where there is a target"
    )
    seed: int = setting(1000, "of the trials; none of the experiment's seeds", low=0, high=MAX_SEED)

    def check(self) -> None:
        # Strategies need different learning rates, so that a fixed rate would decide the
        # comparison.
        if RATE not in self.settings:
            raise InputError(f"tune.settings: lacks {RATE}, the setting that matters most; add it")
        for key, values in self.settings.items():
            head, _, rest = key.partition(".")
            if head not in _TUNABLE or (head in ("optimizer", "strategy") and not rest):
                raise InputError(
                    f"tune.settings.{key}: cannot be tuned for each strategy on its own: all have "
                    "to have it alike; optimizer.*, schedule, schedule.*, clip_norm and "
                    "strategy.* can be"
                )
            if not values:
                raise InputError(f"tune.settings.{key}: there is no value to try")
            if any(value in values[:place] for place, value in enumerate(values)):
                raise InputError(f"tune.settings.{key}: {list(values)} holds a value twice")
        trials = math.prod(len(values) for values in self.settings.values())
        if trials > MAX_TRIALS:
            raise InputError(f"tune.settings: {trials} trials are more than {MAX_TRIALS}")
        for value in self.settings[RATE]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"tune.settings.{RATE}: {value!r} is not a number")


def grid(tune: Tune, run: Run) -> list[dict[str, Any]]:
    """Return the settings of each trial of `run`, in order."""
    own = {key: values for key, values in tune.settings.items() if _has(run, key, values[0])}
    return [dict(zip(own, values, strict=True)) for values in product(*own.values())]


def tuned(run: Run, settings: Mapping[str, Any]) -> Run:
    """Return `run` with the settings of a trial.

    Raises:
        InputError: there is no such setting, or it cannot have this value.
    """
    where = f"tune.settings.{', '.join(settings)}"
    changes: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in settings.items():
        head, _, rest = key.partition(".")
        changes[head][rest] = value
    strategy, training = run.strategy, run.training
    if own := changes.pop("strategy", None):
        strategy = rebuilt(strategy, own, STRATEGIES, where=where)
    values: dict[str, Any] = {}
    try:
        if arguments := changes.pop("optimizer", None):
            optimizer = training.optimizer
            known = {**optimizer.arguments, **arguments}
            values["optimizer"] = replace(optimizer, arguments=known)
        for name, inside in changes.items():
            held = inside.pop("", getattr(training, name))
            if isinstance(held, str):
                held = parse(held, SCHEDULES, where=where)
            if inside and not isinstance(held, Settings):
                raise InputError(f"{name} is {held!r}, which has no settings of its own")
            values[name] = rebuilt(held, inside, SCHEDULES, where=where) if inside else held
        return replace(run, strategy=strategy, training=replace(training, **values))
    except InputError as error:
        raise InputError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None


def _has(run: Run, key: str, value: object) -> bool:
    """Return whether the setting is the training's, or the strategy has it and takes `value`."""
    if key.startswith(_STRATEGY):
        try:
            tuned(run, {key: value})
        except InputError:
            return False
    return True


ONE_PROCESS = "one process"
LONGEST_NAME = 200  # bytes: file systems take 255, and numbers are added
_LABEL = re.compile(rf"[^\s./\\{CONTROLS}][^/\\{CONTROLS}]*")


@dataclass(frozen=True, repr=False)
class Experiment(Settings):
    """The content of an experiment file, in which settings of `training` are keys, too.

    `training.ranks` is the first of `ranks`.
    """

    name: str = setting(REQUIRED, "of the experiment, and of its folders")
    task: str = setting(REQUIRED, "notation of the task, such as digits(channels=8)")
    strategies: Mapping[str, Strategy] = setting(REQUIRED, "a strategy for each label")
    ranks: tuple[int, ...] = setting(
        (4,),
        "processes, servers included: the budget of a run; one number or several",
        low=1,
        high=MAX_RANKS,
    )
    seeds: tuple[int, ...] = setting((0,), "one run a strategy for each", low=0, high=MAX_SEED)
    devices: Mapping[str, Device] = setting(
        {}, "cpu, cuda or auto for some labels, in place of device; not run where there is none"
    )
    tune: Tune | None = setting(
        None, "settings: {optimizer.lr: [...]}, by, seed: what to choose for each strategy first"
    )
    training: Training = setting(Training(), "everything else")

    def check(self) -> None:
        for label in (self.name, *self.strategies):
            if not _LABEL.fullmatch(label) or len(label.encode()) > LONGEST_NAME:
                raise InputError(f"{label!r} cannot be a name: it has to name a folder, too")
        if not self.strategies:
            raise InputError("strategies: there is none; give a label and a strategy")
        for key, what, values in ("seeds", "seed", self.seeds), ("ranks", "number", self.ranks):
            if not values:
                raise InputError(f"{key}: there is none")
            if len(set(values)) < len(values):
                raise InputError(f"{key}: {list(values)} holds a {what} twice")
        # The settings are frozen; `ranks` is the experiment's, and a training has one number.
        object.__setattr__(self, "training", replace(self.training, ranks=self.ranks[0]))
        for label, strategy in self.strategies.items():
            reasons = [refusal_of(strategy, ranks) for ranks in self.ranks]
            if all(reasons):
                raise InputError(f"strategies.{label}: {reasons[0]}")
        for label in self.devices.keys() - self.strategies.keys():
            hint = nearest(label, self.strategies)
            raise InputError(f"devices: there is no strategy {label!r}; {hint}")
        if self.tune is not None:
            self._check_tune(self.tune)

    def _check_tune(self, tune: Tune) -> None:
        if tune.by == "target" and self.training.target is None:
            raise InputError("tune.by: there is no target to choose by; give one, or by: loss")
        if tune.seed in self.seeds:
            raise InputError(
                f"tune.seed: {tune.seed} is among the seeds; choose another, lest the settings be "
                "chosen on a run that is compared"
            )
        some = [
            Run(label, self.task, strategy, training=self.training)
            for label, strategy in self.strategies.items()
        ]
        for key, values in tune.settings.items():  # some have to have it, with all of its values
            for run in [run for run in some if _has(run, key, values[0])] or some[:1]:
                for value in values:
                    tuned(run, {key: value})


def runs(experiment: Experiment) -> list[Run]:
    """Return the runs of `experiment`: with the first seed all strategies on each number of ranks,
    then with the next seed, so that a machine that grows slower does so for all of them.
    """
    every, device = experiment.training, experiment.training.device
    return [
        Run(label, experiment.task, strategy, seed, replace(every, ranks=ranks, device=own))
        for seed in experiment.seeds
        for ranks in experiment.ranks
        for label, strategy in experiment.strategies.items()
        if refusal_of(strategy, ranks) is None
        for own in [experiment.devices.get(label, device)]
    ]


def on_ranks(run: Run) -> str:
    """Return the row of a run, in words."""
    return f"{run.name}, {count('rank', run.training.ranks)}"


def not_run(experiment: Experiment) -> list[dict[str, Any]]:
    """Return the strategies and numbers of ranks that do not go together, and why."""
    return [
        {"name": label, "ranks": ranks, "reason": reason}
        for ranks in experiment.ranks
        for label, strategy in experiment.strategies.items()
        if (reason := refusal_of(strategy, ranks)) is not None
    ]


def with_one_process(experiment: Experiment) -> Experiment:
    """Return `experiment` with one process, all cores and the same global batch, as a strategy.

    No comparison goes without this row.
    """
    strategies = experiment.strategies
    # A single process on a device of its own is no rival for rows on the CPU.
    there = [strategies[label] for label in strategies if label not in experiment.devices]
    if any(isinstance(strategy, Single) for strategy in there):
        return experiment
    if ONE_PROCESS in strategies:
        raise InputError(
            f"strategies.{ONE_PROCESS}: this label stands for Single(), which every comparison "
            f"contains; rename {strategies[ONE_PROCESS]!r}"
        )
    return replace(experiment, strategies={ONE_PROCESS: Single(), **strategies})


def alone(experiment: Experiment, run: Run) -> Experiment:
    """Return the experiment that consists of `run` only."""
    return replace(
        experiment, strategies={run.name: run.strategy}, ranks=(run.training.ranks,),
        seeds=(run.seed,), devices={}, tune=None, training=run.training,
    )  # fmt: skip


def only_run(experiment: Experiment, source: str) -> Run:
    """Return the run that `train` makes of an experiment: its one strategy on its one number of
    ranks, with the first seed.

    Raises:
        InputError: there are several; `source` opens the message.
    """
    for many, noun, option in (
        (list(experiment.strategies), "strategies", "--strategy"),
        (list(map(str, experiment.ranks)), "numbers of ranks", "--ranks"),
    ):
        if len(many) > 1:
            raise InputError(
                f"{source}: holds {len(many)} {noun} ({', '.join(many)}); train takes one: name "
                f"it with {option} {shlex.quote(many[0])}, or run all with orchestra compare"
            )
    return runs(experiment)[0]


@dataclass(frozen=True)
class TuningTrial:
    """One combination of settings, tried with one strategy on one number of ranks.

    `run` has them, and is judged on the validation data.
    """

    number: int
    settings: Mapping[str, Any]
    run: Run

    @property
    def row(self) -> tuple[str, int]:
        """The label and the number of ranks."""
        return self.run.name, self.run.training.ranks

    def folder(self, comparison: Path) -> Path:
        """Return the folder of the trial in that of the comparison."""
        return trial_folder(comparison, *self.row, self.number)

    def __str__(self) -> str:
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        return f"{on_ranks(self.run)}, trial with {settings}"


@dataclass(frozen=True)
class Criterion:
    """The figure that ranks trials: a metric or "loss", chosen `by`, and if higher is better."""

    by: str
    metric: str
    higher: bool

    @classmethod
    def of(cls, tune: Tune, target: Target | None) -> Criterion:
        """Return the target's metric in its direction, or the loss, as `tune` asks."""
        # Without a target no metric has a direction that the user has asked for
        if target is None or tune.by == "loss":
            return cls("loss", "loss", higher=False)
        return cls("target", target.metric, higher=target.rising)

    def score(self, record: RunRecord) -> float | None:
        """Return the figure of a trial; None where it failed or diverged."""
        if record.ending.status != "completed":
            return None
        loss = record.learned.loss if self.metric == "loss" else None
        # The loss is a field of the record; a task may also have a metric of that name
        value = record.learned.metrics.get(self.metric, loss)
        return value if value is not None and math.isfinite(value) else None

    def cost(self, record: RunRecord) -> tuple[float, float]:
        """Return a key to sort trials by, smaller is better; of equal ones the loss decides."""
        score, loss = self.score(record), record.learned.loss
        if score is None:
            return math.inf, math.inf
        equal = loss if loss is not None and math.isfinite(loss) else math.inf
        # Accuracies on few validation samples are often equal
        return -score if self.higher else score, equal


@dataclass(frozen=True)
class Choice:
    """The trials of one strategy on one number of ranks, in order, with their records."""

    criterion: Criterion
    outcomes: Sequence[tuple[TuningTrial, RunRecord]]

    @property
    def best(self) -> TuningTrial | None:
        """The best trial, the earlier of equals; None where all failed or diverged."""
        # min() keeps the first of equals
        trial, record = min(self.outcomes, key=lambda outcome: self.criterion.cost(outcome[1]))
        return None if self.criterion.score(record) is None else trial

    @property
    def reason(self) -> str:
        """Why there is no best trial."""
        _, first = self.outcomes[0]
        cause = first.ending.failure or f"its {self.criterion.metric} is not a finite number"
        return f"every trial of its tuning failed; the first: {cause}"

    def plain(self) -> dict[str, Any]:
        """Return the entry of the choice in `tuning.json`."""
        name, ranks = self.outcomes[0][0].row
        best = self.best
        entry = {
            "name": name,
            "ranks": ranks,
            "chosen": best and best.number,
            "settings": best and best.settings,
            "trials": [
                {
                    "trial": trial.number,
                    "settings": trial.settings,
                    "status": record.ending.status,
                    "score": self.criterion.score(record),
                    "loss": record.learned.loss,
                    "failure": record.ending.failure,
                }
                for trial, record in self.outcomes
            ],
        }
        plain: dict[str, Any] = to_plain(entry, finite=True)
        return plain


def trials(experiment: Experiment) -> list[TuningTrial]:
    """Return the trials of every strategy and number of ranks, in the order of their runs."""
    tune = experiment.tune
    if tune is None:
        return []
    # One seed for all trials: the seeds of the comparison are looked at once, afterwards
    once = runs(replace(experiment, seeds=(tune.seed,), tune=None))
    every = [
        # The test data stays unseen until the settings are chosen
        TuningTrial(number, settings, replace(tuned(run, settings), judged_on="validation"))
        for run in once
        for number, settings in enumerate(grid(tune, run))
    ]
    # First all rows with the first combination, then all with the second: see `runs`.
    return sorted(every, key=lambda trial: trial.number)


def choose(
    tune: Tune, training: Training, outcomes: Sequence[tuple[TuningTrial, RunRecord]]
) -> dict[tuple[str, int], Choice]:
    """Return the choice of each strategy and number of ranks, by its trials."""
    criterion = Criterion.of(tune, training.target)
    by_row = grouped(outcomes, lambda outcome: outcome[0].row)
    return {row: Choice(criterion, of_row) for row, of_row in by_row.items()}


def write_tuning(
    folder: Path, tune: Tune, training: Training, choices: Mapping[tuple[str, int], Choice]
) -> None:
    """Write `tuning.json`: the criterion, every trial, and the choices."""
    criterion = Criterion.of(tune, training.target)
    document = {
        "trials": max((len(choice.outcomes) for choice in choices.values()), default=0),
        "by": criterion.by,
        "metric": criterion.metric,
        "better": "higher" if criterion.higher else "lower",
        "seed": tune.seed,
        "choices": [choice.plain() for choice in choices.values()],
    }
    write_atomically(folder / TUNING, json.dumps(document, indent=2) + "\n")

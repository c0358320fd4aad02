"""The file of an experiment: read, changed from a command line, written in full."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestra.cluster.file import is_file, load_cluster
from orchestra.data import SHARDINGS, shares_of
from orchestra.errors import InputError, nearest
from orchestra.experiments.experiment import Experiment
from orchestra.module_path import admit
from orchestra.optimizers.settings import OPTIMIZERS, SCHEDULES, Optimizer, ParameterGroup
from orchestra.records.files import SUMMARY
from orchestra.records.store import RunStore
from orchestra.settings import Call, Settings, parse, read, write
from orchestra.settings.base import default_of, settings_of, to_plain
from orchestra.settings.notation import bound, build
from orchestra.settings.reading import (
    Entry,
    Reader,
    document_in,
    literal,
    mapping,
    read_document,
    refuse_others,
    require,
    yaml_text,
    yaml_value,
)
from orchestra.settings.tree import SettingChange, changed_entry
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES
from orchestra.tasks import TASKS, task_name, task_text
from orchestra.trainer.balancing import BALANCINGS
from orchestra.trainer.settings import MEASURED, Training

_HEAD = ("name", "task", "strategies", "ranks", "seeds", "devices", "tune")

#: The settings of a training that are keys of the file; its ranks are the experiment's.
TRAINING_KEYS = tuple(field.name for field in settings_of(Training) if field.name not in _HEAD)

NOTATIONS = {"schedule": SCHEDULES, "sharding": SHARDINGS, "shares": BALANCINGS}
"""The settings of a training that hold an object, and what its notation may name."""

KNOWN_KEYS = (*_HEAD, *TRAINING_KEYS, "parameter_groups")


STANDARD_INPUT = "-"
FOLDER_VARIABLE = "ORCHESTRA_EXPERIMENT_FOLDER"
"""The folder of the experiment that standard input gives, in which its modules are looked up."""


def load(
    path: Path | None,
    overrides: Sequence[str] = (),
    given: Mapping[str, Entry] | None = None,
    *,
    strategy: str | None = None,
    defaults: Mapping[str, Entry] | None = None,
) -> Experiment:
    """Return the experiment in the file `path`, with changes from a command line.

    All changes are applied to what the file says before anything is built and checked.

    From then on, modules in the file's folder can be imported; installed modules take precedence.

    Args:
        path: a YAML file, or `STANDARD_INPUT`; None where `given` says enough.
        overrides: "key=value" each; a dotted key reaches inside ("optimizer.lr=0.1"). Keys
            without a dot are applied before the dotted ones, each in their order.
        given: whole keys that replace the file's.
        strategy: the only one of the experiment: a label of the file, or else in the notation.
        defaults: whole keys for which the file says nothing.

    Raises:
        InputError: one line with the place, what is wrong, and the nearest known key.
    """
    document = dict(defaults or {})
    if path:
        document |= _read(path)
    document = _replaced(document, given or {})
    if strategy is not None:
        document |= _only(document, strategy)
    pairs = [_pair(text) for text in overrides]
    for key, text, where in pairs:
        # Whole keys first: a dotted key may reach inside of one that is given here, too.
        if "." not in key:
            document = _replaced(document, {key: Entry(yaml_value(text, where), where)})
    for key, text, where in pairs:
        if "." in key:
            document[key.partition(".")[0]] = _changed(document, key, literal(text, where), where)
    return _experiment(document, path)


def _read(path: Path) -> dict[str, Entry]:
    """Return the content of the file, and let modules in its folder be imported."""
    needs, example = "task and strategies", "task: digits"
    if str(path) != STANDARD_INPUT:
        admit(str(path.resolve().parent))
        return read_document(path, needs=needs, example=example)
    if folder := os.environ.get(FOLDER_VARIABLE):
        admit(folder)
    return document_in(sys.stdin.read(), "standard input", needs=needs, example=example)


def refuse_task(path: Path) -> None:
    """Raise `InputError` where `path`, for a command that takes --task, is most likely a task."""
    known = path.suffix in (".yaml", ".yml") or str(path) == STANDARD_INPUT or path.exists()
    if not known:
        raise InputError(f"{path}: is no file; for a task write --task {shlex.quote(str(path))}")


def to_yaml(experiment: Experiment) -> str:
    """Return the text of a file that holds `experiment` in full; `load` gives an equal one back."""
    training = experiment.training
    document: dict[str, object] = {
        "name": experiment.name,
        "task": _importable(experiment.task),
        "strategies": {
            label: _importable(write(strategy, STRATEGIES))
            for label, strategy in experiment.strategies.items()
        },
        "ranks": experiment.ranks[0] if len(experiment.ranks) == 1 else list(experiment.ranks),
        "seeds": list(experiment.seeds),
        "devices": dict(experiment.devices),
        "tune": to_plain(experiment.tune),
    }
    document |= {name: getattr(training, name) for name in TRAINING_KEYS}
    document["optimizer"] = repr(training.optimizer)
    document["parameter_groups"] = [
        {"match": group.match, **group.arguments} for group in training.optimizer.groups
    ]
    for name, registry in NOTATIONS.items():
        if isinstance(value := getattr(training, name), Settings):
            document[name] = write(value, registry)
    document["target"] = to_plain(training.target)
    return yaml_text(document)


def _importable(notation: str) -> str:
    """Return `notation` with the name by which another process imports the script under way."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    name = spec.name if spec is not None else Path(file or "").stem
    found = all(part.isidentifier() for part in name.split("."))
    return notation.replace("__main__:", f"{name}:") if found else notation


def _pair(text: str) -> tuple[str, str, str]:
    key, equals, value = map(str.strip, text.partition("="))
    if not equals or not key:
        raise InputError(f"--set {text}: has to be key=value")
    return key, value, f"--set {key}"


def _replaced(document: Mapping[str, Entry], given: Mapping[str, Entry]) -> dict[str, Entry]:
    """Replace the keys of `given` in `document`; `steps` displaces `epochs`, and the reverse."""
    rivals = {"steps": "epochs", "epochs": "steps"}
    displaced = {rivals[key] for key, entry in given.items() if key in rivals and entry.value}
    return {key: entry for key, entry in document.items() if key not in displaced} | dict(given)


def _only(document: Mapping[str, Entry], strategy: str) -> dict[str, Entry]:
    """Return the keys that tell of strategies, with the label `strategy` alone, or a new one."""
    nothing = Entry({}, "--strategy")
    written, devices = document.get("strategies", nothing), document.get("devices", nothing)
    for label, entry in written.inside.items():
        if str(label) == strategy:
            own = mapping(devices, "devices", "{ring: cuda}").get(label)
            return {
                "strategies": replace(written, value={label: entry.value}, inside={label: entry}),
                "devices": nothing if own is None else Entry({label: own.value}, own.where),
            }
    name = read(strategy, where="--strategy").name.rpartition(":")[2]
    return {"strategies": Entry({name: strategy}, "--strategy"), "devices": nothing}


def _experiment(document: Mapping[str, Entry], path: Path | None) -> Experiment:
    source = str(path) if path else "command line"
    refuse_others(document, "", KNOWN_KEYS)
    require(document, {"task": "digits", "strategies": "{ring: AllReduce}"}, source)
    entries = dict(document)
    groups = _groups(entries.pop("parameter_groups", Entry(None, source)))
    values = {
        key: READER.read_setting(Experiment if key in _HEAD else Training, key, entry, key)
        for key, entry in entries.items()
    }
    head: dict[str, Any] = {"name": path.stem if path else task_name(values["task"])}
    head |= {key: values.pop(key) for key in _HEAD if key in values}
    try:
        if head.get("ranks"):  # shares have to fit them
            values["ranks"] = head["ranks"][0]
        training = Training(**values)
        optimizer = replace(training.optimizer, groups=groups)
        return Experiment(**head, training=training.with_setting("optimizer", optimizer))
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _strategies(entry: Entry, key: str) -> dict[str, object]:
    if not (inside := mapping(entry, key, "{ring: AllReduce}")):
        raise InputError(f"{entry.at(key)}: is empty; give a label and a strategy")
    strategies = {}
    for label, item in inside.items():
        where = item.at(f"{key}.{label}")
        call = read(item.value, where=where)
        target = bound(call, STRATEGIES, where=where)
        # Checked before anything is called, because a notation in a file could name any function.
        if not (isinstance(target, type) and issubclass(target, Strategy)):
            raise InputError(f"{where}: expected Strategy, got {call.name}")
        strategies[str(label)] = build(call, STRATEGIES, where=where)
    return strategies


def _groups(entry: Entry) -> tuple[ParameterGroup, ...]:
    groups = []
    items = [] if entry.value is None else entry.value
    for item in items if isinstance(items, list) else [None]:
        where = entry.at("parameter_groups")
        if not isinstance(item, Mapping) or "match" not in item:
            example = "[{match: bias, weight_decay: 0.0}]"
            raise InputError(f"{where}: has to be a list such as {example}")
        arguments = {str(key): value for key, value in item.items() if key != "match"}
        try:
            groups.append(ParameterGroup(item["match"], arguments=arguments))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    return tuple(groups)


def _folder(entry: Entry) -> Path:
    """Return the folder that paths in `entry` start from: that of its file, or the current one."""
    from_option = entry.where.startswith("--")
    return Path() if from_option else Path(entry.where.rpartition(":")[0]).parent


def _cluster(entry: Entry, key: str) -> str:
    """Return the cluster's notation, or the full path of its file, relative to the experiment's."""
    folder = _folder(entry)
    load_cluster(entry.value, where=entry.at(key), folder=folder)
    # In full, as the file that is written into the run's folder lies elsewhere.
    return str((folder / entry.value).resolve()) if is_file(entry.value) else str(entry.value)


def _notation(entry: Entry, key: str) -> object:
    return parse(entry.value, NOTATIONS[key], where=entry.at(key))


def _shares(entry: Entry, key: str) -> Any:
    """Return weights and "measured" as they are; of a notation its rule, of a run its speeds."""
    if isinstance(entry.value, Call):
        return _notation(entry, key)
    if not isinstance(entry.value, str) or entry.value == MEASURED:
        return entry.value
    run = _folder(entry) / entry.value
    is_run = False
    with contextlib.suppress(OSError):  # as of a name that is too long
        is_run = (run / SUMMARY).is_file()
    if is_run:
        return _shares_of(run, entry.at(key))
    if "/" in entry.value:
        raise InputError(f"{entry.at(key)}: {run} is not the folder of a run: it has no {SUMMARY}")
    return _notation(entry, key)


def _shares_of(run: Path, where: str) -> tuple[float, ...]:
    """Return the shares by the speeds of the ranks in a run, or in all runs of a comparison."""
    samples: defaultdict[int, float] = defaultdict(float)
    seconds: defaultdict[int, float] = defaultdict(float)
    numbers = set()
    for record in (each.record for each in RunStore(run).runs):
        if (
            record.ending.status == "completed"
            and record.asked.workers == record.asked.ranks == len(record.machine.by_rank)
        ):
            numbers.add(record.asked.ranks)
            for rank in record.machine.by_rank:
                samples[rank.rank] += rank.samples
                seconds[rank.rank] += rank.seconds["compute"]
    if len(numbers) != 1 or not all(seconds.values()):
        raise InputError(
            f"{where}: {run} tells no speeds: it needs completed runs whose ranks are all workers, "
            "on one number of ranks"
        )
    return shares_of([samples[rank] / seconds[rank] for rank in sorted(samples)])


READER = Reader(
    examples={
        "metric": "accuracy",
        "settings": "{optimizer.lr: [0.01, 0.1]}",
        "target": "{metric: accuracy, at_least: 0.9}",
        "tune": "{settings: {optimizer.lr: [0.01, 0.1]}}",
    },
    special={
        "task": lambda entry, key: task_text(entry.value, where=entry.at(key)),
        "strategies": _strategies,
        "optimizer": lambda entry, key: Optimizer.parse(entry.value, where=entry.at(key)),
        "schedule": _notation,
        "sharding": _notation,
        "shares": _shares,
        "ranks": lambda entry, key: entry.value if isinstance(entry.value, list) else [entry.value],
        "cluster": _cluster,
    },
)


INSIDE = {"task": TASKS, "strategies": STRATEGIES, "optimizer": OPTIMIZERS, **NOTATIONS}
"""The keys whose values hold notations, and what those may name."""


def _changed(document: Mapping[str, Entry], key: str, value: object, where: str) -> Entry:
    """Return the entry of the first name in the dotted `key`, with the change inside of it."""
    head, *inside = key.split(".")
    if head not in KNOWN_KEYS:
        raise InputError(f"{where}: unknown key {head!r}; {nearest(head, KNOWN_KEYS)}")
    if head == "parameter_groups":
        remedy = "give parameter_groups as a whole, --set 'parameter_groups=[...]'"
        raise InputError(f"{where}: {remedy}")
    entry = document.get(head) or Entry(_default(head), where)
    change = SettingChange(tuple(inside), value, where)
    return changed_entry(entry, change, head, INSIDE.get(head), only_known=head == "strategies")


def _default(key: str) -> object:
    """Return what a file would say to give `key` its default."""
    if key in ("target", "tune", "devices"):
        return {}
    cls = Experiment if key in _HEAD else Training
    default = default_of(cls.__dataclass_fields__[key])
    if isinstance(default, Optimizer):
        return repr(default)
    return write(default, INSIDE.get(key)) if isinstance(default, Settings) else default

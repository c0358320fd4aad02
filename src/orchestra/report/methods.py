"""How the figures of a report came about, from the records alone: enough to repeat them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestra.report.collect import Source
from orchestra.report.conditions import worker_batch
from orchestra.report.numbers import count, listed
from orchestra.report.study import Study
from orchestra.settings.reading import yaml_text

HELD_GLOBAL = "the global batch: workers together process ranks x batch_size samples a step"


@dataclass(frozen=True)
class Method:
    """How the runs of one source were made.

    `facts` and `settings` are pairs of a name and a text; `file` is the experiment in full;
    `command` made the runs, `repeat` does from `file`.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    settings: Sequence[tuple[str, str]]
    file: str
    command: str
    repeat: str


@dataclass(frozen=True)
class Ending:
    """The final parameters of the runs with one seed: which rows ended with equal ones."""

    seed: int
    groups: Sequence[tuple[str, str]]


def methods(study: Study) -> list[Method]:
    """One for each source."""
    return [_method(source) for source in study.sources]


def endings(study: Study) -> list[Ending]:
    """By seed, the hash of the final parameters, and the rows that share it."""
    by_seed: dict[int, dict[str, list[str]]] = {}
    for row in study.rows:
        for run in row.completed:
            if digest := run.record.parameters_sha256:
                by_seed.setdefault(run.record.seed, {}).setdefault(digest, []).append(row.name)
    return [
        Ending(seed, [(digest, listed(names)) for digest, names in groups.items()])
        for seed, groups in sorted(by_seed.items())
    ]


def agreement(found: Sequence[Ending]) -> str:
    """Which rows ended with the same parameters, bit for bit, under every seed."""
    shared = [{names for _, names in ending.groups if " and " in names} for ending in found]
    always = set.intersection(*shared) if shared else set()
    if not always:
        return (
            "No two rows ended with the same bits under every seed. Strategies that add in "
            "different orders differ in the last bits, asynchronous ones from run to run."
        )
    groups = "; ".join(sorted(always))
    return f"Bit for bit the same final parameters under every seed: {groups}."


def _method(source: Source) -> Method:
    name = str(source.experiment.get("name", source.folder.name))
    skipped = ("name", "strategies", "task")
    settings = [
        (key, setting_text(value)) for key, value in source.experiment.items() if key not in skipped
    ]
    command = source.environment.get("command") or []
    return Method(
        title=name,
        facts=list(_facts(source)),
        settings=settings,
        file=yaml_text(dict(source.experiment)),
        command=shlex.join([Path(command[0]).name, *command[1:]]) if command else "",
        repeat=_repeat(source),
    )


def _facts(source: Source) -> Iterator[tuple[str, str]]:
    experiment, environment = source.experiment, source.environment
    yield "task and model", str(experiment.get("task", "not known"))
    yield from _data(source)
    yield from _batches(source)
    seeds = sorted({run.record.seed for run in source.runs})
    yield "seeds", ", ".join(str(seed) for seed in seeds)
    engines = sorted({run.record.engine for run in source.runs})
    yield "engine", listed(engines)
    threads = sorted({n for run in source.runs for n in run.record.threads_by_rank})
    if threads:
        yield "threads of a rank", ", ".join(map(str, threads))
    if processor := environment.get("processor"):
        cores = environment.get("cores")
        where = "machine" if "processes" in engines else "simulated by"
        yield where, f"{processor}, {count('core', cores)}" if cores else processor
    if system := environment.get("platform"):
        yield "system", system
    packages = {"Python": environment.get("python"), **environment.get("packages", {})}
    versions = [f"{name} {version}" for name, version in packages.items() if version]
    if versions:
        yield "versions", ", ".join(versions)


def _data(source: Source) -> Iterator[tuple[str, str]]:
    records = [run.record for run in source.runs if run.record.status == "completed"]
    epochs = source.experiment.get("epochs")
    if records and isinstance(epochs, int):
        samples = max(record.samples for record in records) // epochs
        yield "training data", f"{samples} samples a pass; passes: {epochs}"
    if records:
        yield "final figures on", f"the {listed(sorted({r.judged_on for r in records}))} data"


def _batches(source: Source) -> Iterator[tuple[str, str]]:
    """What was held equal, and what that came to."""
    held = source.experiment.get("equal")
    if held is not None:
        yield "held equal", "the batch of each worker" if held == "worker_batch" else HELD_GLOBAL
    groups: dict[str, list[str]] = {}
    for record in (run.record for run in source.runs):
        if record.status == "completed" and record.worker_batches:
            own = worker_batch(record.worker_batches)
            text = f"{record.global_batch} samples{', ' * bool(own)}{own}"
            groups.setdefault(f"{text}, {count('step', record.steps)}", []).append(record.name)
    if groups:
        parts = [f"{text} ({listed([*dict.fromkeys(names)])})" for text, names in groups.items()]
        yield "global batches", "; ".join(parts)


def _repeat(source: Source) -> str:
    several = len(source.runs) > 1 or source.tuning or source.not_run
    return f"orchestra {'compare' if several else 'train'} experiment.yaml --out repeated"


def setting_text(value: object) -> str:
    """A setting as a reader wants it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(
            f"{key} {setting_text(item)}" for key, item in value.items() if item is not None
        )
    if isinstance(value, list):
        return ", ".join(map(setting_text, value)) or "none"
    return str(value)

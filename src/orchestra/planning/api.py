"""Planning, for Python and the command line: from an experiment and a cluster to an answer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestra.cluster import Cluster, load_cluster
from orchestra.engines.emulation.training import on_best_node
from orchestra.engines.processes.system import now
from orchestra.engines.run import train_run
from orchestra.engines.simulation.costs import cost_source_of, sample_operations
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.api import notation_of
from orchestra.experiments.experiment import ONE_PROCESS, Experiment, alone
from orchestra.experiments.file import load, refuse_task, to_yaml
from orchestra.experiments.run import folder_for
from orchestra.planning.answer import (
    RECOMMENDED,
    PlanAnswer,
    Verified,
    answered,
    nodes_of,
    rows_of,
    to_scale,
)
from orchestra.planning.candidates import BATCHES, Space, counted
from orchestra.planning.race import SearchBudget
from orchestra.planning.search import Search, Tell
from orchestra.planning.standing import Length, reached
from orchestra.records.files import write_atomically
from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder
from orchestra.settings import Settings
from orchestra.settings.base import to_plain
from orchestra.settings.reading import Entry
from orchestra.strategies.single import Single
from orchestra.trainer.settings import AUTO, Device, Engine, Run, Target

if TYPE_CHECKING:
    from orchestra.tasks.task import Task

RECORD = "plan.json"
MINUTES = 10.0
CALIBRATION_PART, LEAST_CALIBRATION = 0.2, 30.0
"""The part of the budget for a missing calibration, and the least seconds of a calibration."""
ASSUMED = "durations are assumed: seconds can be off by several times, so compare candidates only"
LAST_PART, LAST_SECONDS = 0.15, 40.0
"""The part of the budget kept for what follows the search (judging runs that were cut off, the
scaling curve, the page), and the most seconds that this needs."""
FEWEST_SNAPSHOTS, MOST_SNAPSHOTS = 10, 40
VERIFIED, SEEDS = 3, 3
"""The most candidates that are trained for real if asked for, and the most seeds of each."""


def plan(
    task: str | Path | Settings | Callable[[], Task],
    cluster: str | Path,
    *,
    minutes: float = MINUTES,
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    verify: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> PlanAnswer:
    """Find the strategy, and its settings, that trains `task` soonest on `cluster`.

        answer = orchestra.plan("own:spam", "four.yaml", minutes=3,
                                target={"metric": "accuracy", "at_least": 0.9})
        print(answer.headline)
        print(answer.command)

    Candidates are simulated without values, for their speed, and with real gradients: always the
    one next whose simulation is worth most for its time. docs/how-to/plan.md says how.

    Args:
        task: a task as for `train`, or the path of an experiment file.
        cluster: a preset such as "lan_1gbit(nodes=8)", or the path of a cluster's file.
        minutes: that the search may take, a calibration included.
        seeds: of the runs that decide, as far as time goes; the file's, else 0, 1, 2 by default.
            Where the first candidates are close, further ones follow, up to 8 in all.
        out: the folder of the plan; a new one in `runs` by default.
        verify: train the first candidates for real afterwards.
        quiet: no progress.
        settings: as for `train`: batch_size=32, epochs=5, target={...} ...

    Raises:
        InputError: the task, the cluster or a setting is refused.
    """
    given = {key: Entry(notation_of(value, key), f"{key}=") for key, value in settings.items()}
    is_file = isinstance(task, Path) or (isinstance(task, str) and task.endswith((".yaml", ".yml")))
    path = Path(str(task)) if is_file else None
    if path is None:
        given["task"] = Entry(notation_of(task, "task"), "task=")
    if seeds is not None:
        given["seeds"] = Entry(list(seeds), "seeds=")
    experiment = planned(path, (), given)
    from orchestra.engines.live import Lines

    tell: Tell = (lambda what, part: None) if quiet else Lines()
    return carry_out(experiment, str(cluster), out, minutes, tell, verified=verify)


def planned(path: Path | None, overrides: Sequence[str], given: Mapping[str, Entry]) -> Experiment:
    """Return the experiment to plan for, in which strategies may be left out."""
    defaults: dict[str, object] = {"strategies": {ONE_PROCESS: "Single()"}, "seeds": [0, 1, 2]}
    if path is None and "task" in given:
        defaults["ranks"] = 1  # batch_size then is that of a step of all workers
    elif path is None:
        raise InputError("give an experiment file or --task; see orchestra plan --help")
    else:
        refuse_task(path)
    own = {key: Entry(value, "plan") for key, value in defaults.items()}
    # No tuning: a plan chooses settings itself
    return load(path, overrides, {**given, "tune": Entry(None, "plan")}, defaults=own)


def carry_out(
    experiment: Experiment,
    cluster_text: str,
    out: str | Path | None,
    minutes: float,
    tell: Tell,
    *,
    report: bool = True,
    verified: bool = False,
) -> PlanAnswer:
    """Search within `minutes`, write the answer into the folder `out`, and return it.

    With `verified` the first candidates are trained for real afterwards, however long that takes.

    Raises:
        InputError: bad input, found before anything is simulated.
    """
    began = now()
    if not 0 < minutes <= 100_000:
        raise InputError(f"minutes: {minutes:g} is not above 0, or above 100000; give 3, or 0.5")
    cluster = load_cluster(cluster_text, where="cluster", folder=Path())
    tell("loading the task", 0.0)
    length = length_of(experiment)
    folder = folder_for(out, f"plan-{experiment.name}", empty=True)
    # The page, and judging runs that were cut off, take a time that does not grow with the budget.
    kept = min(60 * minutes * LAST_PART, LAST_SECONDS)
    budget = SearchBudget(began, began + 60 * minutes - kept)
    on = emulated_nodes(cluster) if verified else None
    experiment, costs, notes = calibrated(experiment, folder, budget, tell, on)
    space = Space(experiment, cluster, folder / "clusters")
    search = Search(
        space.candidates(), experiment.training.target, length, folder / "runs", budget, tell,
        seeds=experiment.seeds,
    )  # fmt: skip
    search.notes += [*notes, *space.refused]
    search.run()
    if (scaled := to_scale(rows_of(search))) is not None:
        others = space.on_other_counts(search.entries[scaled.name].candidate)
        search.add_speeds(others, budget.until + kept / 3)
    devices = [node.name for node in cluster.nodes if node.devices]
    found = answered(search, costs, folder, devices)
    reference = search.entries[ONE_PROCESS].candidate.run
    found = replace(found, sample_flops=counted(reference, sample_operations))
    if verified and not found.stopped:
        real, stopped = verify(found, search, cluster, tell)
        found = replace(found, verified=real, stopped=stopped)
    search.tidy()
    if report:
        from orchestra.planning.page import write_page

        found = replace(found, report=write_page(found, experiment.name))
    best = found.recommended
    run = None if best is None else search.entries[best.name].candidate.run
    write_plan(found, experiment, cluster, run)
    return found


def length_of(experiment: Experiment) -> Length:
    """Return the samples of a whole run of `experiment`, and how many snapshots judge it.

    Raises:
        InputError: the task is refused, or has nothing to judge a model by.
    """
    from torch.utils.data import IterableDataset

    from orchestra.tasks.task import load_task
    from orchestra.trainer.curve import evaluation_data, require_metric
    from orchestra.trainer.setup import budget_of

    task = load_task(experiment.task)
    _, samples = budget_of(task, experiment.training)
    judged = evaluation_data(task)
    if judged is None:
        raise InputError(
            "task: has neither validation nor test data, so that nothing can be judged"
        )
    assert not isinstance(judged, IterableDataset)
    if (target := experiment.training.target) is not None:
        require_metric(target.metric, task, task.model(), judged)
    # An evaluation is a third of a gradient: so judging takes no longer than learning.
    wanted = 3 * samples // max(1, len(judged))  # type: ignore[arg-type]
    return Length(samples, min(MOST_SNAPSHOTS, max(FEWEST_SNAPSHOTS, wanted)))


def emulated_nodes(cluster: Cluster) -> Cluster | None:
    """Return `cluster` if predictions for it are verified on emulated nodes, whose quotas have a
    cost that a calibration has to know; None if it is one node, or cannot be emulated here.
    """
    if len(cluster.nodes) == 1:
        return None
    try:
        on_best_node(cluster, 1)
    except InputError:  # the verification will say why
        return None
    return cluster


def calibrated(
    experiment: Experiment,
    folder: Path,
    budget: SearchBudget,
    tell: Tell,
    emulated: Cluster | None = None,
) -> tuple[Experiment, str, list[str]]:
    """Return `experiment` with the figures of this machine for its task, where it asks for them.

    Missing figures are measured, in a part of the budget. If the budget is too short for that,
    figures are assumed, and the notes say so. For runs on the nodes of an `emulated` cluster
    figures are always measured, on one of its nodes.

    Returns:
        The experiment; where the durations come from; notes.
    """
    training = experiment.training
    run = Run("plan", experiment.task, Single(), training=training)
    source = cost_source_of(run)
    known = source.calibration is not None
    if training.calibration != AUTO or (known and emulated is None):
        return experiment, source.text, list(source.doubts)
    seconds = CALIBRATION_PART * (budget.until - budget.began)
    if seconds < LEAST_CALIBRATION:
        short = f"no calibration: the time is too short for one; {more_time(run, emulated)}"
        return experiment, source.text, [] if known else [short, ASSUMED]
    from orchestra.calibration import CalibrationUnfinished, Workload, calibrate

    whole = training.ranks * training.batch_size
    # Those of one process and of a worker among eight; others are interpolated
    sizes = {max(1, round(whole * times / workers)) for times in BATCHES for workers in (1, 8)}
    work = Workload(
        experiment.task, training.optimizer, training.precision,
        # Of the first one it is measured, too, when each layer is done
        (whole, *sorted({1, *sizes} - {whole})), around=False,
    )  # fmt: skip

    def show(what: str, part: float) -> None:
        tell(f"calibrating: {what}", part * 0.2)

    try:
        measured = calibrate([work], 0.2, show, seconds, emulated)
    except RunFailed as failure:
        why = f"no calibration: {str(failure).splitlines()[0]}"
        if isinstance(failure, CalibrationUnfinished):
            why = f"no calibration: {failure.reason}; {more_time(run, emulated, seconds)}"
        return experiment, source.text, [why] if known else [why, ASSUMED]
    quality = measured.quality_of(measured.tasks[0])
    doubts = quality.doubts
    path = folder / "calibration.json"
    write_atomically(path, (measured.marked() if doubts else measured).to_json())
    training = replace(training, calibration=str(path.absolute()))
    notes = [
        f"the calibration is not to be trusted: {doubt}; all seconds can be off by as much"
        for doubt in doubts
    ]
    text = cost_source_of(replace(run, training=training)).text
    return replace(experiment, training=training), text, notes


def more_time(run: Run, emulated: Cluster | None, seconds: float = 0.0) -> str:
    """Return what helps where a calibration of `seconds` was too short for `run`."""
    from orchestra.calibration import LIMIT

    training, limit = run.training, max(LIMIT, 3 * seconds)
    # Figures of an emulated node are measured anew by each plan
    if emulated is not None:
        return "give more --minutes"
    # Only a file gives `orchestra calibrate` another precision
    of = ["EXPERIMENT.yaml"] if training.precision != "float32" else [
        "--task", run.task, "--optimizer", repr(training.optimizer),
        "--batch-size", str(training.ranks * training.batch_size),
    ]  # fmt: skip
    command = shlex.join(["orchestra", "calibrate", *of, "--limit", f"{limit:.0f}"])
    return f"give more --minutes, or first: {command}"


# What is left behind


def device_of(given: Device, cluster: Cluster, nodes: Sequence[str]) -> Device:
    """Return where the model of a run on `nodes` lives: on their devices, else as `given`."""
    devices = [node.devices for node in cluster.nodes if node.name in nodes]
    assert devices
    # With cuda the command says so where a GPU is missing; with auto it would take the processor
    return "cuda" if all(devices) else "auto" if any(devices) else given


def real_run(experiment: Experiment, run: Run, device: Device = "cpu") -> Experiment:
    """Return the experiment that trains `run` on real processes, with the model on `device`."""
    given = experiment.training
    # What the search has set is undone: the file trains for real, as the user's own would
    kept = ("snapshots", "checkpoint_every", "trace_steps", "record_order", "tensorboard")
    training = replace(
        run.training,
        engine="processes",
        device=device,
        # The plan's cluster is simulated, and has no meaning for processes
        cluster=given.cluster if given.engine == "processes" else "one_host",
        calibration="auto",
        **{name: getattr(given, name) for name in kept},
    )
    return alone(experiment, replace(run, training=training))


def write_plan(
    plan: PlanAnswer, experiment: Experiment, cluster: Cluster, best: Run | None
) -> None:
    """Write the record, and the file of the recommended run, into the plan's folder."""
    if best is not None and plan.recommended is not None:
        device = device_of(best.training.device, cluster, plan.recommended.nodes)
        write_atomically(plan.folder / RECOMMENDED, to_yaml(real_run(experiment, best, device)))
    document = {"schema": 1, "experiment": experiment.name, **to_plain(plan, finite=True)}
    write_atomically(plan.folder / RECORD, json.dumps(document, indent=1, default=str) + "\n")


def verify(
    plan: PlanAnswer, search: Search, cluster: Cluster, tell: Tell
) -> tuple[Sequence[Verified], bool]:
    """Train the first candidates of `plan` for real; return also whether the user stopped.

    Nodes of a `cluster` are emulated on this machine, which may refuse that; a cluster of one node
    is taken to be this machine. Candidates take turns, so that a machine that becomes slower
    favours none of them.
    """
    # Several nodes of a described cluster cannot be had on one machine otherwise.
    engine: Engine = "emulation" if len(cluster.nodes) > 1 else "processes"
    names = [row.name for row in plan.rows if row.seconds is not None][:VERIFIED]
    # Verification uses the seeds of the prediction: a mean over three simulated seeds says nothing
    # about one real run.
    seeds = {name: sorted(search.times(search.entries[name]))[:SEEDS] for name in names}
    found: dict[str, dict[int, Measured]] = {name: {} for name in names}
    failures: dict[str, str] = {}
    stopped = False
    for number, (turn, name) in enumerate(turns := list(product(range(SEEDS), names))):
        tell(f"verifying {name}", number / len(turns))
        if name in failures or turn >= len(seeds[name]):
            continue
        assert search.target is not None
        seed = seeds[name][turn]
        folder = plan.folder / f"verified/{names.index(name) + 1}/seed-{seed}"
        run = replace(search.entries[name].candidate.run, seed=seed)
        if engine == "processes":
            nodes = nodes_of(search.entries[name])
            device = device_of(run.training.device, cluster, nodes)
            run = replace(run, training=run.training.with_setting("device", device))
        try:
            found[name][seed] = carried_out_for_real(
                run, engine, search.length.snapshots, folder, search.target
            )
        except KeyboardInterrupt:
            stopped = True
            break
        except (InputError, RunFailed) as error:
            failures[name] = str(error).splitlines()[0]
    known = [name for name in names if found[name] or name in failures]
    return [
        _verified(search, n, seeds[n], found[n], engine, failures.get(n)) for n in known
    ], stopped


def _verified(
    search: Search,
    name: str,
    seeds: Sequence[int],
    measured: Mapping[int, Measured],
    engine: Engine,
    failure: str | None,
) -> Verified:
    """Return the times of those of the `seeds` with which the candidate was carried out."""
    entry = search.entries[name]
    times = search.times(entry)
    expected = None if entry.record is None else computing(entry.record)
    slower = [each.computing / expected for each in measured.values()] if expected else []
    return Verified(
        name,
        {seed: times[seed].seconds for seed in seeds if seed in measured or failure},
        {seed: each.seconds for seed, each in measured.items()},
        engine,
        failure,
        fmean(slower) if slower else None,
    )


class Measured(NamedTuple):
    """A real run."""

    seconds: float | None  # to the target; None if not reached
    computing: float  # seconds of a worker, for each sample of all workers


def computing(record: RunRecord) -> float:
    """Return the seconds that a worker computed, in the mean, for each sample of all workers."""
    return record.time.worker.get("compute", 0.0) / max(record.learned.samples, 1)


def carried_out_for_real(
    run: Run, engine: Engine, snapshots: int, folder: Path, target: Target
) -> Measured:
    """Train a simulated `run` for real.

    Raises:
        InputError, RunFailed: it could not be carried out.
        KeyboardInterrupt: the user stopped it.
    """
    training = replace(run.training, engine=engine, snapshots=snapshots)
    if engine == "processes":
        training = replace(training, cluster="one_host", calibration="auto")
    record = train_run(replace(run, training=training), folder, quiet=True)
    # Ctrl-C ends all verification, and not one run.
    if record.ending.status == "stopped":
        raise KeyboardInterrupt
    at = reached(RunFolder(record.folder).curve, target)
    return Measured(None if at is None else at.seconds, computing(record))

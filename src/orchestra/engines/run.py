"""One run, on the engine that its settings name, and its record: what its ranks report, and how
well it used its machines. Imports without torch."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.cluster import Node
from orchestra.cluster.units import read_price
from orchestra.data import apportion
from orchestra.errors import InputError, RunFailed
from orchestra.records.combine import combine
from orchestra.records.files import ENVIRONMENT, environment, write_atomically
from orchestra.records.record import Asked, Batching, Ending, Pacing, RunRecord, Spending
from orchestra.records.report import RankReport, StragglerFinding
from orchestra.records.store import write_curve
from orchestra.records.stragglers import LEAST_SECONDS, find
from orchestra.records.trace import write_trace
from orchestra.settings import write
from orchestra.strategies.base import roles_of
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.traits import Dealing, Partition
from orchestra.trainer.settings import Run, target_times

if TYPE_CHECKING:
    from orchestra.engines.live import Progress
    from orchestra.engines.simulation.costs import CostSource


HOUR = 3600.0


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run. A callback of the user's gets it about twice a second."""

    step: int  # of the first worker
    samples: int  # that the first worker has read
    fraction: float  # of the run's budget that all workers have consumed
    loss: float  # of the newest step: all workers' where it travels with gradients, else its own


Callback = Callable[[RunProgress], object]
"""Called while a run goes on. If it returns True, the run stops in good order."""


def train_run(
    run: Run,
    folder: Path,
    *,
    quiet: bool = False,
    progress: Progress | None = None,
    callback: Callback | None = None,
) -> RunRecord:
    """Carry out `run`; its records go into `folder`.

    `progress` is that of the runs that it is one of; a `callback` needs real processes. Raises
    `InputError` where the strategy cannot run on that many ranks, or not on this engine, and
    `RunFailed` with the first cause; what was measured until then stays in `folder`.
    """
    engine = importlib.import_module(f"orchestra.engines.{run.training.engine}.training")
    more: dict[str, Any] = {}
    if callback is not None:
        if run.training.engine != "processes":
            raise InputError(
                f"callback: the engine {run.training.engine} calls none; use processes"
            )
        more["callback"] = callback
    record: RunRecord = engine.train_run(run, folder, quiet=quiet, progress=progress, **more)
    return record


def write_environment(folder: Path) -> None:
    """Write down where a run takes place, into its `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / ENVIRONMENT, json.dumps(environment(), indent=2) + "\n")


def record_of(
    run: Run,
    results: Sequence[RankReport | None],
    folder: Path,
    launch: Mapping[str, float],
    *,
    left_out: Mapping[int, str],
    notices: Sequence[str] = (),
    nodes: Sequence[Node] = (),
    alone: Mapping[str, float] | None = None,
    terminated: bool = False,
    wall: float | None = None,
    node: str | None = None,
    costs: CostSource | None = None,
) -> RunRecord:
    """The record of a run that ended well, from the reports of the ranks that were there at the
    end; its curve and its timeline go into `folder`. `launch` are the seconds before their programs
    began: the import that the first launch of a command waits for is among them, but is no set-up.
    `nodes` are those of the ranks, where they are described; `alone` what each does without the
    others, in samples/s, by default what was measured of its ranks. `terminated`: by SIGTERM. A
    simulation took `wall` seconds and had its durations from `costs`; `node` is that of a single
    process.
    """
    reports = [report for report in results if report is not None]
    # The longest set-up is the one that the others waited for; nobody waited for a newcomer's.
    first = [report for report in reports if report.rank < run.training.ranks] or reports
    longest = max((report.setup for report in first), key=lambda setup: sum(setup.values()))
    setup = {**launch, **longest}
    leader = next(report.leader for report in reports if report.leader is not None)
    # Of each worker in a full step at the start, and the weights behind them.
    training, measured = run.training, reports[0].shares
    shares = roles_of(run.strategy, training.ranks).shares
    weighted = training.weighted(shares, measured or None)
    begun_on = reports[0].begun_on
    samples = apportion(training.global_batch(shares, begun_on), weighted)
    batches = next((report.batches for report in reports if report.batches), [])
    if batches:  # within the bounds of a rule
        samples = tuple(batches[0][1:])
    if alone is None:
        speeds = [gradients * training.batch_size for gradients in reports[0].speeds]
        alone = by_node(speeds, nodes)
    batching = Batching(
        training.global_batch(shares, begun_on),
        [count for count, share in zip(samples, weighted, strict=True) if share],
        measured,
        batches,
    )
    record = combine(reports, _asked(run), _pacing(run), batching)
    stopped_by = "SIGTERM" if terminated else "Ctrl-C"
    write_curve(folder, leader.curve)
    write_trace(folder, reports)
    record = replace(
        record,
        folder=folder,
        ending=replace(
            record.ending,
            left_out={str(rank): reason for rank, reason in left_out.items()},
            notices=notices,
            stopped_by=stopped_by if record.ending.status == "stopped" else None,
        ),
        time=replace(
            record.time,
            setup=sum(setup.values()) - setup.get("import", 0.0),
            setup_parts=setup,
            wall=wall,
        ),
        to_target=target_times(leader.curve, training.target),
        machine=replace(
            record.machine,
            stragglers=stragglers_of(run, reports),
            node=node,
            costs=None if costs is None else costs.text,
            costs_doubts=() if costs is None else costs.doubts,
        ),
    )
    return on_machines(record, nodes, alone)


def stragglers_of(run: Run, reports: Sequence[RankReport]) -> list[StragglerFinding]:
    """Find the stragglers of a run; stages of a model have unlike work and are not compared."""
    if run.strategy.traits().partition is Partition.STAGED:
        return []
    nodes = {report.rank: report.node for report in reports if report.node}
    return find(
        {report.rank: report.counters for report in reports},
        servers={report.rank for report in reports if not report.steps},
        nodes=nodes if len({*nodes.values()}) > 1 else {},
        least_seconds=0.0 if run.training.engine == "simulation" else LEAST_SECONDS,
    )


def failed_record(run: Run, folder: Path, failure: RunFailed | InputError) -> RunRecord:
    shares = roles_of(run.strategy, run.training.ranks).shares
    batching = Batching(run.training.global_batch(shares, None))
    ending = Ending("failed", failure=str(failure))
    return RunRecord(_asked(run), _pacing(run), batching, ending, folder=folder)


def _asked(run: Run) -> Asked:
    roles = roles_of(run.strategy, run.training.ranks)
    return Asked(
        name=run.name,
        strategy=write(run.strategy, STRATEGIES),
        engine=run.training.engine,
        ranks=run.training.ranks,
        workers=len(roles.workers),
        servers=len(roles.servers),
        seed=run.seed,
        cluster=run.training.cluster if run.training.engine != "processes" else None,
        judged_on=run.judged_on,
    )


def _pacing(run: Run) -> Pacing:
    workers = roles_of(run.strategy, run.training.ranks).workers
    traits = run.strategy.traits("shared")
    queued = traits.dealing is Dealing.QUEUE and len(workers) > 1
    return Pacing(
        distributed=traits.distributed,
        switches=bool(traits.phases),
        synchronous=traits.lockstep,
        steps_together=run.steps_together,
        work=run.training.work if queued else None,
    )


# Machines


def on_machines(record: RunRecord, nodes: Sequence[Node], alone: Mapping[str, float]) -> RunRecord:
    """Add to `record` costs, energy and efficiency, from the `nodes` of its ranks.

    `alone` is what each node does by itself, in samples/s.

    A node is paid for, and draws its power, while the stopwatch runs, whatever its ranks do. Where
    the price of one is not known, that of all is not.
    """
    nodes = list({node.name: node for node in nodes}.values())
    seconds, to_target = record.time.training, record.to_target.seconds
    together, speed = sum(alone.values()), record.time.samples_per_second
    prices = [read_price(node.price, where="price") for node in nodes if node.price is not None]
    watts = [node.watts for node in nodes if node.watts is not None]
    rate = power = None
    if nodes and len(prices) == len(nodes):
        rate = sum(amount for amount, _ in prices) / HOUR
    if nodes and len(watts) == len(nodes):
        power = sum(watts)
    return replace(
        record,
        machine=replace(
            record.machine,
            alone=alone,
            heterogeneous_efficiency=speed / together if speed and together else None,
        ),
        spending=Spending(
            cost=_product(rate, seconds),
            cost_to_target=_product(rate, to_target),
            currency=prices[0][1] if rate is not None else None,
            joules=_product(power, seconds),
            joules_to_target=_product(power, to_target),
        ),
    )


def by_node(speeds: Sequence[float], nodes: Sequence[Node]) -> dict[str, float]:
    """Add up the `speeds` of ranks by node; without `nodes` by rank ("rank 0")."""
    found: dict[str, float] = {}
    for rank, speed in enumerate(speeds):
        name = nodes[rank].name if nodes else f"rank {rank}"
        found[name] = found.get(name, 0.0) + speed
    return found


def beside_single(record: RunRecord, single: RunRecord | None) -> RunRecord:
    """Add to `record` its convergence efficiency; `single` is one process on the fastest node:

    (time to target of `single` / of `record`) / (sum of what the nodes do alone / what that of
    `single` does). The latter is that of `record`, where it uses the node.
    """
    alone = record.machine.alone
    if single is None or not alone:
        return record
    fastest = alone.get(single.machine.node or "") or sum(single.machine.alone.values())
    ours, theirs = record.to_target.seconds, single.to_target.seconds
    if not (fastest and ours) or theirs is None:
        return record
    faster = sum(alone.values()) / fastest
    machine = replace(record.machine, convergence_efficiency=theirs / ours / faster)
    return replace(record, machine=machine)


def _product(each_second: float | None, seconds: float | None) -> float | None:
    return None if each_second is None or seconds is None else each_second * seconds

"""The runtime of a rank in wrappers that record, or repeat, what it could not foresee."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from orchestra.errors import InputError
from orchestra.trainer.writing import writing
from orchestra.transports.order import (
    Order,
    RecordedTransport,
    ReplayedTransport,
    Told,
    from_plain,
    plain,
)
from orchestra.worker.reporters import PassingReporter
from orchestra.worker.runtime import Compute, Runtime, Work

T = TypeVar("T")


def recorded(runtime: Runtime, order: Order) -> Runtime:
    """`runtime`; what its rank is told goes into `order`."""
    compute, reporter = runtime.compute, runtime.reporter
    return replace(
        runtime,
        transport=RecordedTransport(runtime.transport, order),
        compute=_RecordedCompute(compute, order),
        reporter=_RecordedReporter(reporter, order),
    )


def replayed(runtime: Runtime, order: Order) -> Runtime:
    """`runtime`, whose rank is told what stands in `order`."""
    rank = f"rank {runtime.rank}"
    seconds = Told(order.seconds, f"{rank} looked at its seconds of computation")
    stop = Told(order.stop, f"{rank} asked whether to stop")
    return replace(
        runtime,
        transport=ReplayedTransport(runtime.transport, order),
        compute=_ReplayedCompute(runtime.compute, seconds),
        reporter=_ReplayedReporter(runtime.reporter, stop),
    )


def order_file(folder: Path, rank: int) -> Path:
    """Where the order of a rank is kept in the folder of its run."""
    return folder / f"order-rank-{rank}.json.gz"


def write_order(folder: Path, rank: int, order: Order) -> None:
    """Keep the order of a rank with the records of its run."""
    path = order_file(folder, rank)
    with writing(path):
        path.write_bytes(gzip.compress(json.dumps(plain(order)).encode(), mtime=0))


def read_order(folder: Path, rank: int) -> Order:
    """The order of a rank that `folder` keeps.

    Raises:
        InputError: there is none, it is damaged, or it begins in the midst of a run.
    """
    path = order_file(folder, rank)
    try:
        order = from_plain(json.loads(gzip.decompress(path.read_bytes())))
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: a run is recorded with --record-order, and a rank that was killed "
            "leaves nothing"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise InputError(f"{path} is damaged ({error}); record the run again") from None
    if order.first_step:
        raise InputError(
            f"{path}: the run was resumed after step {order.first_step}, and what came before is "
            "not in the record; record it in one piece"
        )
    return order


@dataclass
class _PassingCompute:
    inner: Compute

    def run(self, work: Work, function: Callable[[], T]) -> T:
        return self.inner.run(work, function)

    def reached(self, slot: int) -> None:
        self.inner.reached(slot)


@dataclass
class _RecordedCompute(_PassingCompute):
    order: Order

    @property
    def seconds(self) -> float:
        seconds = self.inner.seconds
        self.order.seconds.append(seconds)
        return seconds


@dataclass
class _ReplayedCompute(_PassingCompute):
    told: Told[float]

    @property
    def seconds(self) -> float:
        return next(self.told)


@dataclass
class _RecordedReporter(PassingReporter):
    order: Order

    def stop_requested(self) -> bool:
        stop = self.inner.stop_requested()
        self.order.stop.append(stop)
        return stop


@dataclass
class _ReplayedReporter(PassingReporter):
    told: Told[bool]

    def stop_requested(self) -> bool:
        return next(self.told)

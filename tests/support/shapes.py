"""Runs of shapes, and what they tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.simulated import cluster

from orchestra.cluster.nodes import Line, Overhead
from orchestra.engines.simulation.costs import assumed_costs
from orchestra.engines.simulation.simulate import Simulation
from orchestra.engines.simulation.transport import SimulatedTransport
from orchestra.records.report import RankReport
from orchestra.trainer.program import train
from orchestra.trainer.recorder import Recorder
from orchestra.trainer.settings import Run
from orchestra.worker.runtime import SilentReporter

COSTLY = Overhead(
    send=Line(20e-6, 2e-10),
    receive=Line(15e-6, 1e-10),
    add=2e-10,
    buffer=1 << 12,
    wire=1.06,
    local=Line(8e-6, 1e-10),
    cold=30e-6,
    collective=7e-6,
    handling=5e-6,
)
"""As calibrations are: every figure counts."""


@dataclass(frozen=True)
class Told:
    """What a run told: of each rank, and of its messages while it trained.

    `messages`: of all flows of each rank, sent and received, those to itself included.
    `sent`: by rank, the bytes to each other rank.
    """

    reports: tuple[RankReport, ...]
    messages: dict[int, tuple[int, ...]]
    sent: tuple[Mapping[int, int], ...]


@contextmanager
def counted_messages() -> Iterator[dict[int, list[tuple[int, int]]]]:
    """Of each rank, sent and received, whenever its stopwatch is started or stopped."""
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    transports: dict[int, list[SimulatedTransport]] = defaultdict(list)
    make: Callable[..., None] = SimulatedTransport.__init__

    def made(transport: SimulatedTransport, *arguments: Any) -> None:
        make(transport, *arguments)
        transports[transport.rank].append(transport)

    def noting(name: str) -> Any:
        original: Callable[[Recorder], None] = getattr(Recorder, name)

        def note(recorder: Recorder) -> None:
            original(recorder)
            rank = recorder._worker.rank
            all_of_it = [transport.traffic for transport in transports[rank]]
            sent = sum(traffic.messages_sent for traffic in all_of_it)
            seen[rank].append((sent, sum(traffic.messages_received for traffic in all_of_it)))

        return mock.patch.object(Recorder, name, note)

    with (
        noting("resume"),
        noting("pause"),
        mock.patch.object(SimulatedTransport, "__init__", made),
    ):
        yield seen


def told(run: Run, folder: Path, on: str, overhead: Overhead) -> Told:
    training = run.training
    with counted_messages() as seen:
        outcome = Simulation(
            cluster(on),
            len(run.strategy.roles(training.ranks).shares),
            assumed_costs(run),
            overhead,
            SilentReporter(),
            seed_number=run.seed,
            values=training.tensors == "real",
        ).run(lambda runtime: train(runtime, (run, folder)))
    assert (outcome.failure, outcome.bad_input) == (None, None)
    messages = {
        rank: tuple(after - before for before, after in zip(*marks, strict=True))
        for rank, marks in seen.items()
    }
    return Told(outcome.results, messages, outcome.sent)


def in_shapes(run: Run) -> Run:
    training = replace(run.training, engine="simulation", tensors="shapes")
    return replace(run, training=training)

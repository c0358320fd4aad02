"""What an engine hands to the program of a rank: identity, transport, compute, and a reporter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from orchestra.records.report import Counters
from orchestra.transports.protocol import Transport

T = TypeVar("T")


class Work(NamedTuple):
    """A piece of computation: its kind ("gradient", "update", "encode" ...) and its size.

    `amount` counts samples for "gradient", and for the "forward" and "backward" of a stage, and
    elements for everything else; a simulation looks up the calibrated duration by both.
    "step" stands for what a worker does around a gradient of so many samples, from reading the
    batch to writing down the step. `parameters` are the names of those of a stage.
    """

    kind: str
    amount: int
    parameters: tuple[str, ...] = ()


class Compute(Protocol):
    """Computation is charged here and nowhere else."""

    @property
    def seconds(self) -> float:
        """Seconds charged so far on this rank."""

    @property
    def main_seconds(self) -> float:
        """The seconds charged to its main flow."""

    def run(self, work: Work, function: Callable[[], T]) -> T:
        """Run `function`, and let the clock advance by what `work` costs on this engine."""

    def reached(self, slot: int) -> None:
        """Inside the backward of a "gradient": parameter `slot` of the layout has its gradient.

        Where time is virtual, the clock advances to that point of the work.
        """

    def needs(self, slot: int, wait: Callable[[], object]) -> None:
        """Inside the forward of a "gradient": parameter `slot` is needed, and `wait` waits for it.

        The wait is no computation. Where time is virtual, the clock advances to that point first.
        """


class Reporter(Protocol):
    """One way up to the watcher: progress for the display, and facts that its verdicts need."""

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
        counters: Counters | None = None,
    ) -> None:
        """Tell that this rank has finished `step` steps of its own, and consumed `samples`.

        `fraction` is the part of the budget that the cluster has consumed; `counters` the latest.
        """

    def phase(self, name: str) -> None:
        """Tell what the rank is doing ("set-up", "training", "evaluating", "leaving")."""

    def expendable(self, yes: bool) -> None:
        """Tell whether the run can go on without this rank, from now on."""

    def notice(self, text: str) -> None:
        """Show the user one line ("going on without rank 3")."""

    def stop_requested(self) -> bool:
        """Return whether the user asked for an orderly stop (Ctrl-C)."""


class SilentReporter:
    """Nobody is told anything, and nobody wants to stop."""

    def progress(self, *_: Any, **facts: Any) -> None: ...

    def phase(self, name: str) -> None: ...

    def expendable(self, yes: bool) -> None: ...

    def notice(self, text: str) -> None: ...

    def stop_requested(self) -> bool:
        return False


@dataclass
class PassingReporter:
    """Everything goes on to `inner`."""

    inner: Reporter

    def progress(self, *_: Any, **facts: Any) -> None:
        self.inner.progress(**facts)

    def phase(self, name: str) -> None:
        self.inner.phase(name)

    def expendable(self, yes: bool) -> None:
        self.inner.expendable(yes)

    def notice(self, text: str) -> None:
        self.inner.notice(text)

    def stop_requested(self) -> bool:
        return self.inner.stop_requested()


@dataclass(frozen=True)
class Runtime:
    """Everything that a program may know of the engine that runs it."""

    rank: int
    ranks: int
    transport: Transport
    compute: Compute
    reporter: Reporter
    seed: Callable[[int], None]  # the global random streams of this rank begin anew
    local_rank: int = 0  # index of this rank among those of its host: which GPU is its own
    clock: str = ""  # ranks with the same one read the same clock
    node: str = ""  # the name of the machine that it is on, where that is known
    share: Callable[[Callable[[], Any]], Any] = lambda make: make()  # one for all ranks here
    warms_up: bool = True  # whether the first step costs more than the others
    stopwatch: Callable[[bool], None] = lambda running: None  # told when this rank's runs or stops
    speeds: tuple[float, ...] = ()  # gradients a second of each rank, where the engine knows them
    bandwidths: tuple[float, ...] = ()  # bytes/s of each rank's link, where the engine knows them
    peak_memory: Callable[[], int | None] = lambda: None  # bytes of this rank's process so far
    threads: int | None = None  # that this rank's time is charged for; None: those that it uses

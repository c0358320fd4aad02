"""Faults that a rank injects into itself at an operation that it counts, for tests and campaigns.

The variable `ORCHESTRA_INJECT` has them, separated by semicolons, for all ranks:

    Inject("kill", rank=1, at="send", number=30); Inject("delay", rank=0, at="gradient")

A fault is addressed by its rank and the number of an operation, and never by seconds, so that a run
can be disturbed again at the same place, on every engine. A rank without faults has no interceptor
for them. Before it injects one, the rank adds a line to the file that `ORCHESTRA_INJECT_LOG` names,
if it is set. A fault that the file has is not injected again, in a run that is restarted or
resumed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from orchestra.settings import MAX_RANKS, REQUIRED, Registry, Settings, parse, setting
from orchestra.worker.interception import HookedCall, HookedFlow, Interceptor
from orchestra.worker.runtime import Work

T = TypeVar("T")

VARIABLE, LOG = "ORCHESTRA_INJECT", "ORCHESTRA_INJECT_LOG"


class Injected(ArithmeticError):
    """The exception of the program that the fault "raise" raises."""


@dataclass(frozen=True, repr=False)
class Inject(Settings):
    """A fault of one rank, at the operation of that kind with that number."""

    action: Literal[
        "kill", "stop", "terminate", "interrupt", "raise", "delay", "nan", "cut", "reset",
        "strangers", "full_disk", "truncate",
    ] = setting(
        REQUIRED,
        "kill, stop, terminate, interrupt: SIGKILL, SIGSTOP, SIGTERM, SIGINT to the target; "
        "raise: an exception in the program; delay: the operation begins later; nan: a gradient "
        "(at=gradient) becomes NaN; cut, reset: the connection to the operation's peer, or to the "
        "target, ends; strangers: three connections to the watcher say nothing or nonsense, and "
        "stay open; full_disk: no space is left (at=write); truncate: half of the file under way "
        "is lost, and the rank is killed (at=write)",
    )  # fmt: skip
    _: KW_ONLY
    rank: int = setting(REQUIRED, "the rank that injects it", low=0, high=MAX_RANKS)
    at: Literal["start", "send", "receive", "collective", "wait", "gradient", "step", "write"] = (
        setting("start", "kind of operation; write: a point of the write of a checkpoint")
    )
    number: int = setting(1, "of the operation among this rank's of its kind", low=1, high=10**9)
    target: Literal["rank", "group", "launcher", "fork server", "watcher"] = setting(
        "rank", "the process that gets a signal, or watcher: the connection that ends"
    )
    seconds: float = setting(1.0, "of a delay, or until a stopped rank continues", low=0, high=3600)


INJECTIONS = Registry("fault", {"Inject": f"{__name__}:Inject"})


def injections(environ: Mapping[str, str], rank: int) -> list[Inject]:
    """Return the faults that the environment still has for `rank`. Raises `InputError`."""
    texts = [text for text in environ.get(VARIABLE, "").split(";") if text.strip()]
    found = [parse(text, INJECTIONS, where=VARIABLE) for text in texts]
    done = {line["fault"] for line in injected(Path(environ[LOG]))} if LOG in environ else ()
    return [fault for fault in found if fault.rank == rank and repr(fault) not in done]


def injected(log: Path) -> list[dict[str, Any]]:
    """Return what ranks have injected: `fault` and the `monotonic` time of each."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Injector(Interceptor):
    """Counts the operations of a rank, and injects `faults`. Base of the engines' own.

    `log` is the file that gets a line for each fault.
    """

    def __init__(self, faults: list[Inject], log: str | None) -> None:
        self._faults: dict[tuple[str, int], Inject] = {(f.at, f.number): f for f in faults}
        self._kinds = {fault.at for fault in faults}
        self.heeds_messages = bool(self._kinds & {"send", "receive", "wait"})
        self._counts: dict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._log = log

    @abstractmethod
    def inject(self, fault: Inject, peer: int | None) -> None:
        """Let `fault` happen, at an operation with the rank `peer`. "nan" is seen to already."""

    def begin(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        kind = "collective" if operation.kind == "native" else operation.kind
        self.reach(kind, operation.peer)
        return proceed()

    def wait(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        self.reach("wait", operation.peer)
        return proceed()

    def compute(self, flow: HookedFlow, work: Work, proceed: Callable[[], T]) -> T:
        # A loop of the user's own tells of each forward pass, without samples.
        if work.kind not in ("gradient", "backward") and work != ("forward", 0, ()):
            return proceed()
        fault = self.reach("gradient")
        with not_a_number() if fault and fault.action == "nan" else contextlib.nullcontext():
            return proceed()

    def progress(self, step: int) -> None:
        self.reach("step")

    def reach(self, at: str, peer: int | None = None) -> Inject | None:
        """Count an operation of kind `at`; inject the fault at it, if any, and return that."""
        fault = self._faults.get((at, next(self._counts[at])))
        if fault is not None:
            self._note(fault)
            if fault.action == "raise":
                raise Injected(f"injected at {fault.at} {fault.number}")
            self.inject(fault, peer)
        return fault

    def _note(self, fault: Inject) -> None:
        if self._log is not None:
            line = json.dumps({"fault": repr(fault), "monotonic": time.monotonic()})
            with Path(self._log).open("a") as file:
                file.write(line + "\n")


@contextlib.contextmanager
def not_a_number() -> Iterator[None]:
    """Let the gradient of every output that a module computes inside be NaN."""

    def spoil(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.nan)

    handle = register_module_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()

"""Push-sum whose messages a test can await."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from tests.support.mixing import Given
from torch import Tensor

from orchestra.strategies.stochastic_gradient_push import (
    RECEIVING,
    PushMember,
    StochasticGradientPush,
)
from orchestra.transports.protocol import Transport
from orchestra.worker.worker import Worker

CIRCLE = Given(((1,), (2,), (0,)))


@dataclass
class Asked:
    """In place of the transport of a flow: from whom it receives."""

    source: int | None = None

    def receive(self, source: int | None, tag: int) -> Asked:
        self.source = source
        return self

    def wait(self) -> Tensor:
        return torch.empty(0)


class Patient:
    """A transport on which nothing is ever done before it is waited for."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Any:
        return self.handle(source, self._transport.receive(source, tag, into))

    def in_background(self, function: Callable[[Any], Any], lane: int = 0) -> Any:
        task = self._transport.in_background(function, lane)
        if lane != RECEIVING:
            return task
        asked = Asked()
        function(asked)
        return self.handle(asked.source, task)

    def handle(self, source: int | None, handle: Any) -> PatientHandle:
        return PatientHandle(self, source, handle)

    def waits(self, source: int | None) -> None:
        """The main flow is about to wait for `source`."""

    def waited(self) -> None:
        """It no longer waits."""


@dataclass
class PatientHandle:
    transport: Patient
    source: int | None
    handle: Any

    def done(self) -> bool:
        return False

    def wait(self) -> Tensor:
        self.transport.waits(self.source)
        try:
            result: Tensor = self.handle.wait()
            return result
        finally:
            self.transport.waited()


@dataclass(frozen=True, repr=False)
class PatientPush(StochasticGradientPush):
    """All mass is added exactly `overlap` steps after it was sent."""

    def member(self, worker: Worker) -> PushMember:
        worker.transport = cast(Transport, Patient(worker.transport))
        return super().member(worker)

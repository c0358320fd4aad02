"""What third parties check their own strategies, rules, compressors and topologies with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from examples.own_server_rule import Limited, Majority
from examples.own_strategy import DynamicAveraging, DynamicMember
from tests.support.lab import in_lab
from torch import Tensor

from orchestra import QSGD, Buffered, Exponential, LocalSGD, PowerSGD, RandomK, SignSGD, TopK
from orchestra.compression.base import Context
from orchestra.parameter_server.how import Correction, WorkerMemory
from orchestra.parameter_server.messages import Push
from orchestra.parameter_server.when import When
from orchestra.settings import setting
from orchestra.testing import assert_contract
from orchestra.topologies import Graph, Topology
from orchestra.worker.worker import Worker


@pytest.mark.parametrize(
    "subject",
    [
        TopK(0.1), QSGD(7), Exponential(peers=2), DynamicAveraging(0.1), Limited(4),
        *in_lab([
            SignSGD(False, error_feedback=True), PowerSGD(2), RandomK(0.1), LocalSGD(4), Majority(),
        ]),
    ],
    ids=repr,
)  # fmt: skip
def test_what_keeps_the_contract_passes(subject: Any) -> None:
    assert_contract(subject)


@pytest.mark.lab
def test_a_rule_that_buffers_pushes_of_one_worker_is_excused() -> None:
    assert_contract(Buffered(2), exact=False)


@dataclass(frozen=True, repr=False)
class Forgetful(DynamicAveraging):
    """Draws from a generator that no checkpoint has."""

    def member(self, worker: Worker) -> DynamicMember:
        return ForgetfulMember(self, worker, worker.local_optimizer(), worker.parameters.clone())


GENERATOR = random.Random()


@dataclass(eq=False)
class ForgetfulMember(DynamicMember):
    def update(self) -> None:
        super().update()
        self.worker.parameters.mul_(1 - 1e-3 * GENERATOR.random())


@dataclass(frozen=True, repr=False)
class Longer(TopK):
    """Says that its payloads have a byte less than they have."""

    def size(self, elements: int, itemsize: int, step: int) -> int:
        return super().size(elements, itemsize, step) - 1


@dataclass(frozen=True, repr=False)
class Lossy(TopK):
    """Leaves nothing in the residual."""

    def encode_all(
        self, tensors: Sequence[Tensor], residuals: Sequence[Tensor], contexts: Sequence[Context]
    ) -> list[Tensor]:
        payloads = super().encode_all(tensors, residuals, contexts)
        for residual in residuals:
            residual.zero_()
        return payloads


@dataclass(frozen=True, repr=False)
class Hiding(QSGD):
    """Takes what is no number for 0."""

    def encode(self, values: Tensor, context: Context) -> Tensor:
        return super().encode(torch.nan_to_num(values, 0.0, 0.0, 0.0), context)


@dataclass(frozen=True, repr=False)
class Apart(Topology):
    """Pairs that never meet others."""

    first: int = setting(0, "where pairs begin", low=0, high=1)

    def links(self, ranks: int, step: int) -> Graph:
        pairs = [rank ^ 1 for rank in range(ranks)]
        return tuple((pair,) if pair < ranks else () for pair in pairs)


@dataclass(frozen=True, repr=False)
class Inward(Topology):
    """Everyone sends to itself."""

    def links(self, ranks: int, step: int) -> Graph:
        return tuple((rank,) for rank in range(ranks))


@dataclass(frozen=True, repr=False)
class Lists(Topology):
    """Returns lists."""

    def links(self, ranks: int, step: int) -> Any:
        return [[other for other in range(ranks) if other != rank] for rank in range(ranks)]


@dataclass(frozen=True, repr=False)
class Patient(When):
    """Waits for two, whoever still works."""

    def ready(self, pending: Sequence[Push], working: int) -> list[list[Push]]:
        return [list(pending)] if len(pending) > 1 else []


@dataclass(frozen=True, repr=False)
class Halved(Correction):
    """Halves the rates of all pushes, stale or not."""

    def correct(self, push: Push, gradient: Tensor, values: Tensor, memory: WorkerMemory) -> float:
        return 2.0


@pytest.mark.parametrize(
    ("subject", "broken"),
    [
        (
            Forgetful(0.1),
            "in the simulation: keep all state in fields that the member is made from",
        ),
        pytest.param(
            Halved(), r"than Single\(\) with one worker: .*exact=False", marks=pytest.mark.lab
        ),
        (Longer(0.1), r"makes a payload .* of \d+ bytes, and states \d+"),
        (Lossy(0.1), "loses something of a tensor"),
        (Hiding(7), "turns a gradient with nan into numbers"),
        (Apart(), "leaves ranks apart with 3 ranks"),
        (Inward(), "links rank 0 to itself with 1 ranks"),
        (Lists(), "returns links with 1 ranks that are not all tuples"),
        (Patient(), "leaves pushes behind although nobody works"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_does_not_is_told(subject: Any, broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        assert_contract(subject)


def test_a_setting_that_is_not_in_the_notation_is_told() -> None:
    @dataclass(frozen=True, repr=False)
    class Local(TopK):
        """No module has it."""

    with pytest.raises(Exception, match="Local"):
        assert_contract(replace(Local(0.1)))

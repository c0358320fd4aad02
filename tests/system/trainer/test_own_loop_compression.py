"""Compression in loops of the user's own: what waits for later steps stays bounded and exact."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.support.own_loops import Loop, State, distributed
from tests.support.training import equal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from orchestra.compression.base import Context, Encoder
from orchestra.errors import InputError

RANKS = 2


def noisy(batches: int) -> TensorDataset:
    """64 features and 8 targets, which depend on them but for some noise."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * batches, 64, generator=generator, dtype=torch.float64)
    weight = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(inputs), 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs @ weight + 0.5 * noise)


def regression(batches: int) -> DataLoader[Any]:
    return DataLoader(noisy(batches), batch_size=8)


def matrix() -> nn.Module:
    """A linear model of 520 parameters, which begin at 0."""
    model = nn.Linear(64, 8, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def half_square(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    loss: Tensor = 0.5 * (model(inputs) - targets).square().sum(1).mean()
    return loss


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        half_square(model, batch).backward()
        optimizer.step()


def slow_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


# A compressor whose errors are kept has to be a contraction


@pytest.mark.parametrize(
    "strategy",
    [
        "Gossip(compression=QSGD(7))",
        "AllReduce(compression=QSGD(7, error_feedback=True))",
        pytest.param(
            "ParameterServer(placement='beside', compression=QSGD(1, error_feedback=True))",
            marks=pytest.mark.lab,
        ),
    ],
)
def test_what_a_quantizer_leaves_out_does_not_grow(strategy: str) -> None:
    """The noise alone has a loss of 1, and the model at the beginning one of 257.

    QSGD's error is larger than what it quantizes, in runs of 512 elements: kept for the next step
    without a divisor, it leads to a loss of 2e8 after 60 steps.
    """
    (state, *_) = distributed(
        plain, strategy, lambda: regression(4 * 60), ranks=4, model=matrix, optimizer=slow_sgd
    )
    inputs, targets = noisy(4 * 60).tensors
    predicted = inputs @ state["weight"].T + state["bias"]
    assert 0.5 * float((predicted - targets).square().sum(1).mean()) < 20


@dataclass(frozen=True, repr=False)
class Loud(Encoder):
    """Each element with a chance of 1/8, times 8: unbiased, and no contraction."""

    adds = True

    def size(self, elements: int, itemsize: int, step: int) -> int:
        return elements * itemsize

    def encode(self, values: Tensor, context: Context) -> Tensor:
        drawn = torch.from_numpy(context.random(shared=True).random(len(values)))
        return 8 * values * (drawn < 1 / 8)

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        out.add_(payload, alpha=alpha)


@pytest.mark.parametrize(
    "strategy", ["AllReduce(compression={}(error_feedback=True))", "Gossip(compression={}())"]
)
def test_a_compressor_that_is_no_contraction_is_refused(strategy: str) -> None:
    with pytest.raises(InputError, match=r"Loud.* leaves out more than there was"):
        distributed(
            plain,
            strategy.format(f"{__name__}:Loud"),
            lambda: regression(4),
            ranks=RANKS,
            model=matrix,
        )


# A step that is skipped leaves nothing in what a compressor keeps

BAD = (0, 6)  # batches of the first rank that have infinite targets


def partly_infinite() -> DataLoader[Any]:
    data = noisy(RANKS * 12)
    for number in BAD:
        data.tensors[1][8 * RANKS * number] = torch.inf
    return DataLoader(data, batch_size=8)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    """The scale doubles after every third step, and halves where gradients are infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    for number, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        scaler.scale(half_square(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()


def checked(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for batch in batches:
        half_square(model, batch).backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 1e9).isfinite():
            optimizer.step()
        optimizer.zero_grad()


def without_the_bad(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]
) -> None:
    plain(model, optimizer, (batch for n, batch in enumerate(batches) if n not in BAD))


def trained(loop: Loop, strategy: str, **options: Any) -> list[State]:
    options = {"model": matrix, "optimizer": slow_sgd, **options}
    return distributed(loop, strategy, partly_infinite, ranks=RANKS, **options)


ON_SERVERS = "ParameterServer(placement='beside', returns='gradients', compression=TopK(0.1))"


OTHERS = (
    "SignSGD()", "Threshold(0.1)", "DGC(0.1)", "QSGD(7)", "FP16()",
    "RandomK(0.1, error_feedback=True)", "PowerSGD(2, min_rate=1, error_feedback=False)",
)  # fmt: skip


def of_all_reduce(*compressors: str) -> list[str]:
    return [f"AllReduce(compression={each})" for each in compressors]


@pytest.mark.parametrize(
    "strategy",
    [
        *of_all_reduce("TopK(0.1)", "PowerSGD(2, min_rate=1)"),
        ON_SERVERS,
        *(pytest.param(each, marks=pytest.mark.lab) for each in of_all_reduce(*OTHERS)),
    ],
)  # fmt: skip
def test_compressors_forget_steps_that_a_scaler_skips(strategy: str) -> None:
    """Bit for bit as without the batches whose gradients were infinite, whatever the scale."""
    expected = trained(without_the_bad, strategy)
    for state in trained(scaled, strategy):
        assert equal(state, expected[0])


def test_compressors_forget_steps_that_the_script_skips() -> None:
    strategy = "AllReduce(compression=TopK(0.1))"
    expected = trained(without_the_bad, strategy)
    for state in trained(checked, strategy):
        assert equal(state, expected[0])


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, fused=True)


def test_a_step_that_a_fused_optimizer_skips_is_forgotten_or_refused() -> None:
    strategy = "AllReduce(compression=TopK(0.1))"
    expected = trained(without_the_bad, strategy, optimizer=fused)
    for state in trained(scaled, strategy, optimizer=fused):
        assert equal(state, expected[0])
    with pytest.raises(InputError, match="fused=False"):
        trained(scaled, "ParameterServer(placement='beside')", optimizer=fused)


@pytest.mark.parametrize("after", [BAD[1], 10])
def test_a_state_goes_on_though_a_step_was_skipped_or_the_scale_changed(after: int) -> None:
    """Saved after the batch number `after`: the first has no step, the second doubles the scale."""
    strategy, saved = "AllReduce(compression=TopK(0.1))", dict[int, Any]()

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        first = 0
        if saved:
            state, of_scaler = copy.deepcopy(saved[0])
            batches.load_state_dict(state)
            scaler.load_state_dict(of_scaler)
            first = after + 1
        for number, batch in enumerate(batches, first):
            optimizer.zero_grad()
            scaler.scale(half_square(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            if number == after:
                kept[threading.get_ident()] = copy.deepcopy(
                    (batches.state_dict(), scaler.state_dict())
                )

    kept = dict[int, Any]()
    expected = trained(loop, strategy)
    saved[0] = next(state for state in kept.values() if state[0]["ranks"])
    for state in trained(loop, strategy):
        assert equal(state, expected[0])


# Parameters that are rare


class Rare(nn.Module):
    """In 16 bits, and with parameters that have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.nothing = nn.ParameterList(torch.zeros(0, each) for each in (1, 2, 3))
        self.to(torch.bfloat16)
        with torch.no_grad():
            for each in self.parameters():
                each.fill_(0.125)

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.first(values.bfloat16()) + sum(each.sum() for each in self.nothing)
        return output


@pytest.mark.parametrize(
    "compressor",
    [
        *("TopK(0.5)", "QSGD(7)", "RandomK(0.5)", "PowerSGD(4, min_rate=1)"),
        *(pytest.param(each, marks=pytest.mark.lab) for each in OTHERS),
    ],
)
def test_parameters_of_16_bits_or_without_elements_train(compressor: str) -> None:
    def loss_of(state: State) -> float:
        model = Rare()
        model.load_state_dict(state)
        return float(half_square(model, noisy(RANKS * 12).tensors).detach())

    (state, other) = distributed(
        plain, f"AllReduce(compression={compressor})", lambda: regression(RANKS * 12), ranks=RANKS,
        model=Rare, bucket_megabytes=1e-6,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02),
    )  # fmt: skip
    assert equal(state, other)
    assert loss_of(state) < 0.9 * loss_of(Rare().state_dict())

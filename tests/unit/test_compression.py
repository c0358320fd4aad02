"""Each compressor against a NumPy transcription of its paper, and what all of them keep to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.compression import SHAPE, bench_compression
from hypothesis import given
from hypothesis import settings as within
from hypothesis import strategies as some
from numpy.typing import NDArray
from torch import Tensor

from orchestra.compression import packing
from orchestra.compression.base import Compressor, Context, Encoder
from orchestra.compression.sparsification import largest
from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES

Vector = NDArray[np.float64]
ENCODERS = [
    "FP16()", "BF16()", "TopK(0.1)", "RandomK(0.1)", "RandomK(0.1, error_feedback=True)",
    "QSGD(7)", "QSGD(1, norm='max')", "QSGD(100, run=64)", "SignSGD(True)", "SignSGD(False)",
    "Threshold(0.1)", "DGC(0.1)",
]  # fmt: skip


def made(text: str) -> Any:
    return parse(text, STRATEGIES, where="test")


def context(
    compressor: Compressor, shape: Sequence[int], rank: int = 0, workers: int = 1, step: int = 0
) -> Context:
    memory = compressor.memory(torch.zeros(*shape, dtype=torch.float64), 64)
    return Context(tuple(shape), 64, step, rank, workers, memory)


def drawn(elements: int, seed: int = 0) -> Tensor:
    """Values of very unlike magnitudes, some 0."""
    random = np.random.default_rng(seed)
    values = random.normal(size=elements) * np.exp(random.normal(size=elements))
    return torch.from_numpy(values * (random.random(elements) > 0.1))


def decoded(compressor: Encoder, values: Tensor, there: Context) -> Tensor:
    """What arrives where this worker is the only one that sends."""
    payload = compressor.encode(values.clone(), there)
    out = torch.full_like(values, 7.0)
    compressor.combine([payload], out, there)
    return out


# Bits


@given(
    some.lists(some.integers(0, 2**31), max_size=60),
    some.integers(2, 256),
    some.integers(0, 3000),
)
def test_whatever_is_packed_is_unpacked(numbers: list[int], base: int, more: int) -> None:
    digits = torch.tensor([number % base for number in numbers], dtype=torch.uint8)
    packed = packing.pack_digits(digits, base)
    assert len(packed) == math.ceil(len(digits) / packing.digits_in_a_byte(base))
    assert torch.equal(packing.unpack_digits(packed, base, len(digits)), digits)
    positions = torch.tensor(sorted({number % 70_000 for number in numbers}), dtype=torch.int64)
    elements = int(positions.max()) + 1 + more if len(positions) else 1 + more
    packed = packing.pack_positions(positions, elements)
    assert len(packed) == packing.positions_bytes(len(positions), elements)
    bits = max(1, math.ceil(math.log2(elements)))
    assert len(packed) <= min(math.ceil(len(positions) * bits / 8), math.ceil(elements / 8))
    assert torch.equal(packing.unpack_positions(packed, len(positions), elements), positions)


@pytest.mark.parametrize("text", ENCODERS)
@pytest.mark.parametrize("elements", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_payload_has_the_bytes_that_the_formula_says(
    text: str, elements: int, dtype: torch.dtype
) -> None:
    compressor, values = made(text), drawn(elements).to(dtype)
    there = context(compressor, (elements,))
    there = replace(there, memory=[each.to(dtype) for each in there.memory])
    payload = compressor.encode(values.clone(), there)
    size = compressor.size(elements, dtype.itemsize, 0)
    assert payload.nbytes == size if compressor.sized else payload.nbytes <= size
    assert payload.dim() == 1
    assert compressor.adds or payload.dtype is torch.uint8


# Each against its paper


def numpy_top_k(values: Vector, count: int) -> Vector:
    sent = np.zeros_like(values)
    largest = np.argsort(-np.abs(values), kind="stable")[:count]
    sent[largest] = values[largest]
    return sent


def test_top_k() -> None:
    values = drawn(1000)
    sent = decoded(made("TopK(0.05)"), values, context(made("TopK(0.05)"), (1000,)))
    np.testing.assert_array_equal(sent, numpy_top_k(values.numpy(), 50))


@pytest.mark.parametrize("count", [3, 200, 60_000, 80_000])
def test_the_largest_of_many_are_found_by_way_of_a_sample(count: int) -> None:
    values = drawn(100_000)
    expected = np.sort(np.argsort(-np.abs(values.numpy()), kind="stable")[:count])
    np.testing.assert_array_equal(largest(values, count), expected)
    values.zero_()
    values[::2][:1000] = 1.0  # of which the sample sees none, or all
    assert torch.equal(largest(values, 1000), values.nonzero().flatten())


def test_sixteen_bits() -> None:
    values = drawn(1000).float()
    there = context(made("FP16()"), (1000,))
    half = decoded(made("FP16()"), values, there)
    np.testing.assert_array_equal(half, values.numpy().astype(np.float16).astype(np.float32))
    bits = values.numpy().view(np.uint32).astype(np.uint64)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16  # round half to even
    bf16 = decoded(made("BF16()"), values, there)
    np.testing.assert_array_equal(bf16, even.astype(np.uint32).view(np.float32))


def test_qsgd_is_one_of_two_levels_and_unbiased() -> None:
    """The mean of T draws is within 5 standard errors of each element, at s, in runs of d."""
    levels, run, draws = 3, 16, 1500
    compressor, values = made(f"QSGD({levels}, run={run})"), drawn(40)
    sent = np.stack(
        [
            decoded(compressor, values, context(compressor, (40,), step=step))
            for step in range(draws)
        ]
    )
    norm = np.concatenate(
        [np.full(len(part), np.linalg.norm(part)) for part in np.split(values.numpy(), [16, 32])]
    )
    exact = np.abs(values.numpy()) * levels / norm
    level = np.abs(sent) * levels / norm
    np.testing.assert_allclose(level, np.round(level), atol=1e-5)
    below = np.floor(exact)
    assert np.all((np.round(level) == below) | (np.round(level) == below + 1))
    chance = exact - below
    error = norm / levels * np.sqrt(chance * (1 - chance) / draws)
    assert np.all(np.abs(sent.mean(0) - values.numpy()) <= 5 * error + 1e-6 * norm)


def test_ternary() -> None:
    """TernGrad: s_t sign(g) b with b 1 with probability |g| / s_t, and s_t the largest |g|."""
    draws, compressor, values = 1500, made("QSGD(1, norm='max', run=64)"), drawn(50)
    sent = np.stack(
        [
            decoded(compressor, values, context(compressor, (50,), step=step))
            for step in range(draws)
        ]
    )
    largest = float(values.abs().max())
    assert set(np.unique(np.round(np.abs(sent) / largest, 5))) <= {0.0, 1.0}
    assert np.all(np.sign(sent) * np.sign(values.numpy()) >= 0)
    chance = np.abs(values.numpy()) / largest
    error = largest * np.sqrt(chance * (1 - chance) / draws)
    assert np.all(np.abs(sent.mean(0) - values.numpy()) <= 5 * error + 1e-6 * largest)


@pytest.mark.parametrize(
    ("elements", "keep"),
    [(60, 0.1), pytest.param(7, 0.5, marks=pytest.mark.lab), (50, 0.03)],
)
def test_random_k_is_unbiased(elements: int, keep: float) -> None:
    """Every element is drawn once in a length of its run, and then counts that many times."""
    draws, compressor, values = 1500, made(f"RandomK({keep})"), drawn(elements) + 0.01
    exact = values.numpy()
    sent = np.stack(
        [
            decoded(compressor, values, context(compressor, (elements,), step=step))
            for step in range(draws)
        ]
    )
    count = max(1, round(keep * elements))
    assert np.all((sent != 0).sum(1) == count)
    lengths = np.diff(np.arange(count + 1) * elements // count)
    times = np.repeat(lengths, lengths)
    np.testing.assert_allclose(sent[sent != 0], np.tile(exact * times, (draws, 1))[sent != 0])
    error = np.abs(exact) * np.sqrt((times - 1) / draws)
    assert np.all(np.abs(sent.mean(0) - exact) <= 5 * error + 1e-9)


def test_random_k_of_all_workers_is_that_of_one() -> None:
    compressor = made("RandomK(0.2)")
    values = [drawn(30, seed) for seed in range(3)]
    payloads = [
        compressor.encode(each, context(compressor, (30,), rank))
        for rank, each in enumerate(values)
    ]
    out = torch.empty(30, dtype=torch.float64)
    there = context(compressor, (30,), 2)
    compressor.combine([payloads[0] + payloads[1] + payloads[2]], out, there)
    expected = decoded(compressor, values[0] + values[1] + values[2], there)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("vote", [True, False])
def test_sign_sgd(vote: bool) -> None:
    compressor, values = made(f"SignSGD({vote})"), [drawn(90, seed) for seed in range(4)]
    values[3].zero_()  # a worker without samples: it has no vote
    there = context(compressor, (90,))
    payloads = [compressor.encode(each, there) for each in values]
    out = torch.empty(90, dtype=torch.float64)
    compressor.combine(payloads, out, there)
    signs = [np.where(each.numpy() >= 0, 1.0, -1.0) for each in values[:3]]
    scales = [np.abs(each.numpy()).mean() for each in values[:3]]
    scaled = sum(scale * sign for scale, sign in zip(scales, signs, strict=True))
    expected = np.sign(sum(signs)) * sum(scales) if vote else scaled
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def numpy_threshold(values: NDArray[np.float32], keep: float, sample: int) -> Vector:
    """All elements from the k-th largest magnitude of the sample on, in half precision."""
    some = np.abs(values[:: max(1, len(values) // sample)][:sample])
    count = max(1, math.floor(keep * len(some) + 0.5))
    threshold = np.sort(some)[::-1][count - 1]
    return np.where(np.abs(values) >= threshold, values, 0).astype(np.float16).astype(np.float64)


@pytest.mark.parametrize(("elements", "sample"), [(1000, 16_384), (1000, 300), (50_000, 777)])
@pytest.mark.parametrize("zeros", [0.0, 0.95])
def test_threshold(elements: int, sample: int, zeros: float) -> None:
    """With most elements 0, so is the threshold, and all others are sent."""
    values = drawn(elements).float()
    values[: int(zeros * elements)] = 0.0
    compressor = made(f"Threshold(0.1, sample={sample})")
    sent = decoded(compressor, values, context(compressor, (elements,)))
    np.testing.assert_array_equal(sent, numpy_threshold(values.numpy(), 0.1, sample))


def test_threshold_keeps_about_what_it_says() -> None:
    compressor, values = made("Threshold(0.02, sample=5000)"), drawn(100_000)
    sent = decoded(compressor, values, context(compressor, (100_000,)))
    there = sent != 0
    assert 0.015 < there.double().mean() < 0.025
    assert values[there].abs().min() >= values[~there].abs().max()
    torch.testing.assert_close(sent[there], values[there].half().double())


def test_threshold_sends_all_where_that_is_shorter() -> None:
    compressor, values = made("Threshold(1.0)"), drawn(1000) + 1
    there = context(compressor, (1000,))
    assert compressor.encode(values, there).nbytes == 4 + 2 * 1000
    torch.testing.assert_close(decoded(compressor, values, there), values.half().double())


def test_deep_gradient_compression() -> None:
    """Momentum correction, masking, clipping and warm-up, over some steps."""
    compressor = made("DGC(0.02, momentum=0.7, clip_norm=5.0, warm_up=4)")
    there = context(compressor, (100,), workers=4)
    u, v = np.zeros(100), np.zeros(100)
    for step in range(7):
        gradient = drawn(100, step)
        sent = decoded(compressor, gradient, replace(there, step=step))
        g = gradient.numpy() * min(1.0, 5.0 / 2 / np.linalg.norm(gradient))
        u = 0.7 * u + g
        v = v + u
        count = [25, 6, 2, 2, 2, 2, 2][step]
        expected = numpy_top_k(v, count)
        np.testing.assert_allclose(sent, expected, rtol=1e-6)
        u[expected != 0] = 0
        v[expected != 0] = 0


def summed_by_power_sgd(
    compressor: Compressor, gradients: Sequence[Tensor], contexts: Sequence[Context]
) -> tuple[Tensor, list[Tensor]]:
    """All workers in turn: the sum that they all have, and their residuals."""
    residuals = [torch.zeros_like(each) for each in gradients]
    tensors = [each.clone() for each in gradients]
    rounds = [
        compressor.rounds([values], [residual], [there])
        for values, residual, there in zip(tensors, residuals, contexts, strict=True)
    ]
    while vectors := [vector for each in rounds if (vector := next(each, None)) is not None]:
        total = torch.stack(vectors).sum(0)
        for vector in vectors:
            vector.copy_(total)
    for values in tensors:
        assert torch.equal(values, tensors[0])
    return tensors[0], residuals


def test_power_sgd_over_some_steps() -> None:
    """Algorithm 1 in NumPy: P <- sum M_w Q, orthogonalized by Gram-Schmidt; Q <- sum M_w^T P."""
    compressor, rows, columns = made("PowerSGD(2)"), 12, 10
    contexts = [context(compressor, (rows, columns), rank, 3) for rank in range(3)]
    q = contexts[0].memory[0].numpy().T.copy()
    assert all(torch.equal(each.memory[0], contexts[0].memory[0]) for each in contexts)
    left: Any = [np.zeros((rows, columns)) for _ in range(3)]
    for step in range(4):
        gradients = [
            drawn(rows * columns, 10 * step + rank) + torch.from_numpy(left[rank].reshape(-1))
            for rank in range(3)
        ]
        total, residuals = summed_by_power_sgd(compressor, gradients, contexts)
        matrices = [each.numpy().reshape(rows, columns) for each in gradients]
        p = sum(matrix @ q for matrix in matrices)
        for column in range(2):
            for before in range(column):
                p[:, column] -= p[:, before] @ p[:, column] * p[:, before]
            p[:, column] /= np.linalg.norm(p[:, column])
        q = sum(matrix.T @ p for matrix in matrices)
        np.testing.assert_allclose(total.view(rows, columns), p @ q.T, rtol=1e-9, atol=1e-9)
        left = [matrix - p @ (matrix.T @ p).T for matrix in matrices]
        for residual, expected in zip(residuals, left, strict=True):
            np.testing.assert_allclose(residual.view(rows, columns), expected, atol=1e-9)
        q = contexts[0].memory[0].numpy().T.copy()  # of the same space: the basis may differ


def test_power_sgd_leaves_small_tensors_whole() -> None:
    compressor = made("PowerSGD(2, min_rate=3)")
    for shape in [(100,), (4, 5), ()]:
        assert not compressor.memory(torch.zeros(shape), 0)
    assert [each.shape for each in compressor.memory(torch.zeros(30, 3, 5, 5), 0)] == [(2, 75)]
    values = [drawn(20, rank) for rank in range(2)]
    contexts = [context(compressor, (4, 5), rank, 2) for rank in range(2)]
    total, residuals = summed_by_power_sgd(compressor, values, contexts)
    assert torch.equal(total, values[0] + values[1])
    assert not any(map(torch.any, residuals))


# What all of them keep to


ADDITIVE = [text for text in ENCODERS if not text.startswith(("DGC", "SignSGD(True"))]
"""Without those with a memory of their own, and with a majority, which is no sum."""


@given(text=some.sampled_from(ADDITIVE), seed=some.integers(0, 99), size=some.integers(1, 300))
@within(deadline=None)
def test_what_was_sent_and_what_is_left_is_what_went_in(text: str, seed: int, size: int) -> None:
    compressor, workers = made(text), 3
    contexts = [context(compressor, (size,), rank, workers) for rank in range(workers)]
    values = [drawn(size, seed + rank) for rank in range(workers)]
    residuals = [torch.empty_like(each) for each in values]
    payloads = [
        compressor.encode_all([each], [residual], [there])[0]
        for each, residual, there in zip(values, residuals, contexts, strict=True)
    ]
    arrived, each_alone = torch.empty_like(values[0]), torch.zeros_like(values[0])
    for payload, there in zip(payloads, contexts, strict=True):
        compressor.add(payload, each_alone, there)
    if not compressor.adds:
        compressor.combine(payloads, arrived, contexts[0])
        torch.testing.assert_close(arrived, each_alone, rtol=1e-12, atol=1e-12)
    total = each_alone + torch.stack(residuals).sum(0)
    torch.testing.assert_close(total, torch.stack(values).sum(0), rtol=1e-9, atol=1e-9)


CONTRACTIONS = [
    "FP16()", "TopK(0.1)", "RandomK(0.1)", "SignSGD(True)", "SignSGD(False)", "Threshold(0.1)",
    "DGC(0.1, momentum=0.0)", "PowerSGD(2)",
]  # fmt: skip


@pytest.mark.parametrize("text", CONTRACTIONS)
def test_error_feedback_lets_everything_arrive(text: str) -> None:
    """The same gradient again and again: on average, what arrives is the gradient."""
    compressor = made(text)
    if not compressor.brings_momentum:
        compressor = replace(compressor, error_feedback=True)
    values, there, steps = drawn(300).clamp_(-1, 1), context(compressor, (20, 15)), 400
    residual, arrived = torch.zeros_like(values), torch.zeros_like(values)
    residuals = [residual] if compressor.error_feedback else []
    for step in range(steps):
        p = values + residual
        for _ in compressor.rounds([p], residuals, [replace(there, step=step)]):
            pass  # of one worker: the sum is there
        arrived += p
    error = float((arrived / steps - values).norm() / values.norm())
    assert error < (0.3 if text.startswith("SignSGD") else 0.1), error


@pytest.mark.parametrize("text", [*ENCODERS, "PowerSGD(2)"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_none_stays_none(text: str, bad: float) -> None:
    """A training that diverges has to be seen to."""
    compressor, values = made(text), drawn(300).float()
    values[7] = bad
    there = context(compressor, (20, 15))
    there = replace(there, memory=[each.float() for each in there.memory])
    if isinstance(compressor, Encoder):
        for step in range(3000 if text.startswith("RandomK") else 1):
            out = decoded(compressor, values, replace(there, step=step))
            if not torch.isfinite(out).all():
                break
    else:
        out = values.clone()
        for _ in compressor.rounds([out], [], [there]):
            pass
    assert not torch.isfinite(out).all()


@pytest.mark.parametrize("text", ["DGC(error_feedback=True)", "QSGD(0)", "QSGD(norm='l1')"])
def test_settings_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        made(text)


def test_the_benchmark_tells_bytes_and_errors() -> None:
    cast, factors = bench_compression(["BF16()", "PowerSGD(4)"], rounds=1)
    assert cast.bytes_part == 0.5
    assert 0 < cast.error < 2**-8
    assert factors.bytes_part == 4 * (SHAPE[0] + SHAPE[1]) / (SHAPE[0] * SHAPE[1])
    assert 0.5 < factors.error < 1
    assert min(factors.encode_ms, factors.decode_ms, cast.encode_passes) > 0

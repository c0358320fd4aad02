"""Trainings with compressed gradients: engines alike bit for bit, exact bytes, resumed, refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.gradient_bytes import gradient_bytes
from tests.support.lab import some
from tests.support.quadratic import SIZE, Vector, final, mean_samples, start
from tests.support.resumed import assert_same, kill_launcher, training
from tests.support.shapes import COSTLY, in_shapes, told
from tests.support.simulated import simulated
from tests.support.training import equal, settings, train_processes, train_threads
from torch import Tensor

from orchestra.compression.base import Context
from orchestra.compression.sparsification import TopK
from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.registry import STRATEGIES
from orchestra.tasks import load_task
from orchestra.trainer.settings import Run
from orchestra.worker.layout import Layout

DGC = "DGC(0.05, warm_up=4, clip_norm=1.0)"
ADDING = ["FP16()", "BF16()", "PowerSGD(2)", "RandomK(0.1)", "RandomK(0.1, error_feedback=True)"]
GATHERING = [
    "TopK(0.05)",
    "QSGD(7)",
    "QSGD(1, norm='max')",
    "SignSGD()",
    "SignSGD(False)",
    "Threshold(0.05)",
    "DGC(0.05, warm_up=4, clip_norm=1.0)",
]
BUCKETS: dict[str, Any] = {"bucket_megabytes": 0.001, "optimizer": "SGD(lr=0.05, momentum=0.9)"}


def run_of(text: str, ranks: int = 3, **training: Any) -> Run:
    """A few steps of a small network in several buckets, which leave while backward goes on."""
    built = parse(text, STRATEGIES, where="test")
    if "DGC" in text:
        training.setdefault("optimizer", "SGD(lr=0.05)")
    return settings(built, ranks, "images(samples=96, model='cnn')", **{**BUCKETS, **training})


def ring(compressor: str) -> str:
    return f"AllReduce(compression={compressor})"


# One source, every engine


@pytest.mark.parametrize("compressor", ["PowerSGD(2)", "TopK(0.05)"])
def test_processes_and_simulation_agree_on_every_bit_and_byte(
    compressor: str, tmp_path: Path
) -> None:
    """Of a method whose payloads add, in two rounds, and of one whose payloads are gathered."""
    run = run_of(ring(compressor), accumulation=2)
    real, virtual = train_processes(run, tmp_path / "real"), simulated(run, tmp_path / "virtual")
    assert real.learned.parameters_sha256 == virtual.learned.parameters_sha256
    assert real.traffic.sent == virtual.traffic.sent
    plain = simulated(run_of("AllReduce()", accumulation=2), tmp_path / "plain")
    assert virtual.traffic.sent < 0.4 * plain.traffic.sent


@pytest.mark.parametrize("compressor", some([*ADDING, *GATHERING]))
def test_every_rank_ends_with_the_same_bits(compressor: str, tmp_path: Path) -> None:
    optimizer = "SGD(lr=0.05)" if compressor == DGC else BUCKETS["optimizer"]
    trained = train_threads(
        parse(ring(compressor), STRATEGIES, where="test"), 3, tmp_path,
        "images(samples=96, model='cnn')", **{**BUCKETS, "optimizer": optimizer},
    )  # fmt: skip
    for replica in trained.replicas:
        assert equal(replica, trained.final)


@pytest.mark.parametrize("compressor", some([*ADDING, "TopK(0.05)", "QSGD(7)", "SignSGD()", DGC]))
def test_a_run_of_shapes_tells_the_times_and_bytes_of_one_with_values(
    compressor: str, tmp_path: Path
) -> None:
    same_times_without_values(run_of(ring(compressor), 4, steps=6, trace_steps=0), tmp_path)


def same_times_without_values(run: Run, folder: Path) -> None:
    reports = [
        told(each, folder, "stragglers(nodes=4)", COSTLY).reports for each in (run, in_shapes(run))
    ]
    for real, shapes in zip(*reports, strict=True):
        assert shapes.bytes_sent == real.bytes_sent
        assert shapes.seconds == pytest.approx(real.seconds, rel=1e-9)


@pytest.mark.parametrize("compressor", ["BF16()", "TopK(0.05)", "QSGD(7)", "RandomK(0.1)"])
def test_the_bytes_on_the_wire_are_those_of_the_payloads(compressor: str, tmp_path: Path) -> None:
    """Of two ranks each sends the other one its payload, and the tail, which is not compressed."""
    strategy = parse(ring(compressor), STRATEGIES, where="test")
    layout = Layout.of_module(load_task("tests.support.tasks_for_tests:images(samples=8)").model())
    encoder = strategy.compression
    sizes = [layout.size] if encoder.whole else [slot.size for slot in layout.slots]
    payload = sum(encoder.size(size, layout.dtype.itemsize, 0) for size in sizes)
    plain = gradient_bytes(AllReduce(), 2, tmp_path / "plain")
    sent = gradient_bytes(strategy, 2, tmp_path / "compressed")
    assert set(sent) == {(0, 1), (1, 0)}
    for pair, size in sent.items():
        assert plain[pair] - size == layout.bytes - payload


# Servers

SERVERS = [
    "ParameterServer(compression=FP16())",
    "ParameterServer(servers=2, compression=TopK(0.05))",
    "ParameterServer(servers=2, compression=DGC(0.05, warm_up=4))",
    "ParameterServer(servers=2, replicas=1, compression=QSGD(7))",
    "ParameterServer(placement='beside', returns='gradients', compression=RandomK(0.1))",
]


@pytest.mark.parametrize("text", some([*SERVERS, "ParameterServer(compression=Threshold(0.05))"]))
def test_compressed_pushes_on_real_and_simulated_connections(text: str, tmp_path: Path) -> None:
    run = run_of(text, 4, steps=8)
    virtual = simulated(run, tmp_path / "virtual")
    training = {"steps": 8, "optimizer": run.training.optimizer}
    real = train_threads(
        run.strategy, 4, tmp_path / "real", "images(samples=96, model='cnn')", **training
    )
    assert equal(real.final, load_file(tmp_path / "virtual" / "parameters.safetensors"))
    assert virtual.traffic.sent == sum(report.bytes_sent for report in real.reports)
    plain = parse(re.sub(r",? ?compression=\w+\([^)]*\)", "", text), STRATEGIES, where="test")
    assert (
        virtual.traffic.sent < 0.85 * simulated(replace(run, strategy=plain), tmp_path).traffic.sent
    )


@pytest.mark.parametrize("text", some(SERVERS))
def test_servers_without_values(text: str, tmp_path: Path) -> None:
    same_times_without_values(run_of(text, 4, steps=6, trace_steps=0), tmp_path)


def test_pushes_of_top_k_are_the_equation(tmp_path: Path) -> None:
    """p_w <- g_w + e_w;  x <- x - eta sum_w (s_w / S) top(p_w);  e_w <- p_w - top(p_w)."""
    trained = train_threads(
        parse("ParameterServer(servers=2, compression=TopK(0.34))", STRATEGIES, where="test"), 4,
        tmp_path, "tests.support.quadratic:quadratic()", batch_size=4, optimizer="SGD(lr=0.1)",
    )  # fmt: skip
    x, left = start(), np.zeros((2, SIZE))
    for parts in mean_samples(2, 4):
        total = sum(count for _, count in parts)
        sent = np.zeros_like(left)
        for worker, (mean, _) in enumerate(parts):
            left[worker] += x - mean
            for tensor in (slice(0, 3), slice(3, 5)):
                largest = np.abs(left[worker, tensor]).argmax() + tensor.start
                sent[worker, largest] = left[worker, largest]
        left -= sent
        x = x - 0.1 * sum(c / total * s for (_, c), s in zip(parts, sent, strict=True))
    np.testing.assert_allclose(final(trained.final), x, rtol=1e-12)


# Replicas

REPLICAS = [
    "LocalSGD(3, compression=QSGD(7, norm='max'))",
    "LocalSGD(3, algorithm='tree', compression=PowerSGD(2))",
    "LocalSGD(4, outer=Nesterov(0.7, 0.9), fragments=2, overlap=1, compression=TopK(0.1))",
    "LocalSGD(2, outer=Elastic(), compression=BF16())",
    "Gossip(compression=TopK(0.1))",
    "Gossip(Exponential(), compression=RandomK(0.1), consensus=0.1)",
]


@pytest.mark.parametrize("text", some(REPLICAS))
def test_compressed_averages_of_replicas_on_real_and_simulated_connections(
    text: str, tmp_path: Path
) -> None:
    run = run_of(text, 4, steps=9)
    virtual = simulated(run, tmp_path / "virtual")
    real = train_threads(
        run.strategy, 4, tmp_path / "real", "images(samples=96, model='cnn')",
        steps=9, optimizer=BUCKETS["optimizer"],
    )  # fmt: skip
    assert equal(real.final, load_file(tmp_path / "virtual" / "parameters.safetensors"))
    assert virtual.traffic.sent == sum(report.bytes_sent for report in real.reports)
    plain = parse(re.sub(r",? ?compression=\w+\([^)]*\)", "", text), STRATEGIES, where="test")
    assert (
        virtual.traffic.sent < 0.95 * simulated(replace(run, strategy=plain), tmp_path).traffic.sent
    )


WITHOUT_VALUES = [
    text.replace("overlap=1, compression=TopK(0.1)", "overlap=1, compression=RandomK(0.1)")
    for text in REPLICAS
]
"""With values, a gather in a flow beside the gradient goes message by message; without, at once,
and then the caches are cold at another point."""


@pytest.mark.parametrize("text", some(WITHOUT_VALUES))
def test_replicas_without_values(text: str, tmp_path: Path) -> None:
    same_times_without_values(run_of(text, 4, steps=9, trace_steps=0), tmp_path)


def top(vector: Vector, kept: int) -> Vector:
    """The largest element of each of the quadratic's two tensors."""
    sent = np.zeros_like(vector)
    for tensor in (slice(0, 3), slice(3, 5)):
        largest = np.argsort(-np.abs(vector[tensor]))[:kept] + tensor.start
        sent[largest] = vector[largest]
    return sent


def test_local_sgd_averages_differences(tmp_path: Path) -> None:
    """a <- a + sum_w top((x_w - a) / N + e_w) every second step, where a is the last average."""
    trained = train_threads(
        parse("LocalSGD(2, compression=TopK(0.34))", STRATEGIES, where="test"), 3, tmp_path,
        "tests.support.quadratic:quadratic()", batch_size=4, optimizer="SGD(lr=0.1)", steps=4,
    )  # fmt: skip
    replicas, anchor, left = [start() for _ in range(3)], start(), np.zeros((3, SIZE))
    for step, parts in enumerate(mean_samples(3, 4)[:4], start=1):
        for worker, (mean, _) in enumerate(parts):
            replicas[worker] = replicas[worker] - 0.1 * (replicas[worker] - mean)
        if step % 2 == 0:
            p = [(x - anchor) / 3 + e for x, e in zip(replicas, left, strict=True)]
            sent = [top(each, 1) for each in p]
            left = np.stack(p) - np.stack(sent)
            anchor = anchor + sum(sent)
            replicas = [anchor] * 3
    for state in (trained.final, *trained.replicas):
        np.testing.assert_allclose(final(state), anchor, rtol=1e-12)


def test_choco_is_the_equation_and_keeps_the_mean(tmp_path: Path) -> None:
    """Algorithm 2 on a ring of four, whose weights are 1/3; the mean is that of plain SGD."""
    trained = train_threads(
        parse("Gossip(compression=TopK(0.34), consensus=0.3)", STRATEGIES, where="test"), 4,
        tmp_path, "tests.support.quadratic:quadratic()", batch_size=2, optimizer="SGD(lr=0.1)",
        steps=5,
    )  # fmt: skip
    replicas, copies = np.stack([start()] * 4), np.stack([start()] * 4)
    mean_alone = start()
    weights = np.array([[(i - j) % 4 != 2 for j in range(4)] for i in range(4)]) / 3
    for parts in mean_samples(4, 2)[:5]:
        means = np.stack([mean for mean, _ in parts])
        replicas = replicas - 0.1 * (replicas - means)
        mean_alone = mean_alone - 0.1 * (mean_alone - means.mean(0))
        differences = replicas - copies
        copies = copies + np.stack([top(each, 1) for each in differences])
        replicas = replicas + 0.3 * (weights @ copies - copies)
    np.testing.assert_allclose(replicas.mean(0), mean_alone, rtol=1e-12)
    np.testing.assert_allclose(final(trained.final), replicas.mean(0), rtol=1e-12)
    for rank, state in enumerate(trained.states):
        np.testing.assert_allclose(final_of(state.copies.own), copies[rank], rtol=1e-12)


def final_of(flat: Tensor) -> Vector:
    """The quadratic's point in a flat vector, whose parameters stand in reverse."""
    return np.concatenate([flat[8:11].numpy(), flat[0:2].numpy()])


# Against NumPy, and nothing gets lost


def test_top_k_with_error_feedback_is_the_equation(tmp_path: Path) -> None:
    """p_w <- (s_w / S) g_w + e_w;  x <- x - eta sum_w top(p_w);  e_w <- p_w - top(p_w), a tensor at
    a time, where workers have unequal parts of the samples and the last step is not for all."""
    shares, samples, rate = (1.0, 2.0, 0.5), 59, 0.1
    trained = train_threads(
        parse(ring("TopK(0.34)"), STRATEGIES, where="test"), 3, tmp_path,
        f"tests.support.quadratic:quadratic({samples})", batch_size=4, shares=shares,
        optimizer=f"SGD(lr={rate})", bucket_megabytes=1e-5,
    )  # fmt: skip
    x, left = start(), np.zeros((3, SIZE))
    for parts in mean_samples(3, 4, samples, shares):
        total = sum(count for _, count in parts)
        for worker, (mean, count) in enumerate(parts):
            left[worker] += count / total * (x - mean) if count else 0.0
        sent = np.zeros_like(left)
        for tensor, kept in ((slice(0, 3), 1), (slice(3, 5), 1)):
            for worker in range(3):
                largest = np.argsort(-np.abs(left[worker, tensor]))[:kept] + tensor.start
                sent[worker, largest] = left[worker, largest]
        left -= sent
        x = x - rate * sent.sum(0)
    for state in (trained.final, *trained.replicas):
        np.testing.assert_allclose(final(state), x, rtol=1e-12)


SENT: dict[int, Tensor] = {}


@dataclass(frozen=True, repr=False)
class Noting(TopK):
    """What arrives on the first worker of each tensor, by its place."""

    def combine(self, payloads: Sequence[Tensor], out: Tensor, context: Context) -> None:
        super().combine(payloads, out, context)
        if context.rank == 0:
            SENT[context.first] = SENT.get(context.first, torch.zeros_like(out)) + out


def test_what_waits_of_a_tensor_arrives_though_nobody_uses_the_tensor(tmp_path: Path) -> None:
    """`rarely` is used in some steps; what is left of it then arrives in the others."""
    SENT.clear()
    trained = train_threads(
        AllReduce(compression=Noting(0.01)), 2, tmp_path, "images(samples=480, model='partial')",
        optimizer="SGD(lr=1.0)", batch_size=4,
    )  # fmt: skip
    before = load_task("tests.support.tasks_for_tests:images(samples=480, model='partial')").model()
    layout = Layout.of_module(before)
    began = before.state_dict()
    for slot in layout.slots:
        moved = (began[slot.name] - trained.final[slot.name]).reshape(-1)
        torch.testing.assert_close(moved, SENT[slot.offset], rtol=1e-4, atol=1e-5)
    assert SENT[layout.slots[1].offset].any()


# What a checkpoint holds


@pytest.mark.lab
@pytest.mark.parametrize(
    "strategy",
    [
        f"Switch({ring('DGC(0.05, warm_up=20)')}, {ring('PowerSGD(2)')}, when=AfterSteps(20))",
        pytest.param(
            "Switch(LocalSGD(3, compression=TopK(0.1)), Gossip(compression=TopK(0.1)), "
            "when=AfterSteps(20))",
            marks=pytest.mark.lab,
        ),
        pytest.param(
            "Switch(ParameterServer(compression=TopK(0.1)), LocalSGD(4, outer=SlowMo(0.2), "
            "fragments=2, overlap=1, compression=QSGD(7)), when=AfterSteps(20), moments='reset')",
            marks=pytest.mark.lab,
        ),
    ],
)
def test_killed_twice_and_resumed_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    """In each of two phases: vectors of memory, factors, residuals, anchors and public copies."""
    changes = {"optimizer": "SGD(lr=0.05)", "epochs": 2, "checkpoint_every": 5}
    whole = training(strategy, tmp_path / "whole", **changes).record()
    out = tmp_path / "out"
    kill_launcher(strategy, out, at=2, **changes)
    kill_launcher(strategy, out, at=7, **changes)
    record = training(strategy, out, **changes).record()
    assert_same(out, record, tmp_path / "whole", whole)


# What is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("AllReduce('tree', compression=TopK())", "do not add.*set algorithm='ring'"),
        ("AllReduce(shard='optimizer', compression=BF16())", "leave these out"),
        ("AllReduce(backup=1, compression=BF16())", "leave these out"),
        ("ParameterServer(compression=PowerSGD())", "cannot read a payload of PowerSGD"),
        ("ParameterServer(compression=SignSGD())", "SignSGD with vote=False"),
        ("ParameterServer(backup=1, compression=TopK())", "backup does not go with compression"),
        ("LocalSGD(compression=DGC())", "is for gradients"),
        ("LocalSGD(algorithm='tree', compression=TopK())", "do not add.*set algorithm='ring'"),
        ("Gossip(compression=PowerSGD())", "take TopK or QSGD"),
        ("AllReduce(compression=TopK(0))", "keep: 0.0 is not above 0"),
        ("AllReduce(compression='TopK')", "expected Compressor"),
        ("AllReduce(compression=Ring())", "expected Compressor"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        parse(text, STRATEGIES, where="here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("compressor", "training", "words"),
    [
        ("DGC()", {"optimizer": "SGD(lr=0.1, momentum=0.9)"}, "set optimizer to SGD, without mom"),
        ("DGC()", {"optimizer": "Adam(lr=0.1)"}, "set optimizer to SGD, without momentum"),
        ("Threshold()", {"shapes": True}, "depends on values.*set tensors to real"),
    ],
)
def test_what_a_run_cannot_do_is_refused(
    compressor: str, training: dict[str, Any], words: str, tmp_path: Path
) -> None:
    shapes = training.pop("shapes", False)
    run = run_of(ring(compressor), 2, steps=2, trace_steps=0, **training)
    with pytest.raises(InputError, match=words):
        simulated(in_shapes(run) if shapes else run, tmp_path)


THIRD_PARTY = """
from dataclasses import dataclass
from orchestra.compression.base import Encoder

@dataclass(frozen=True, repr=False)
class EveryOther(Encoder):
    'Even elements in even steps, odd ones in odd steps.'
    adds = True

    def size(self, elements, itemsize, step):
        return len(range(step % 2, elements, 2)) * itemsize

    def encode(self, values, context):
        return values[context.step % 2 :: 2].clone()

    def add(self, payload, out, context, alpha=1.0):
        out[context.step % 2 :: 2].add_(payload, alpha=alpha)
"""


def test_a_compressor_of_an_installed_package_trains_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package has what pip leaves in site-packages: a module, metadata, entry points."""
    packages, about = tmp_path / "packages", tmp_path / "packages" / "every_other-1.0.dist-info"
    about.mkdir(parents=True)
    (packages / "every_other.py").write_text(THIRD_PARTY)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: every-other\nVersion: 1.0\n")
    entry = "[orchestra.strategies]\nEveryOther = every_other:EveryOther\n"
    (about / "entry_points.txt").write_text(entry)
    STRATEGIES.names()  # which remembers them; the end of the test brings them back
    monkeypatch.delitem(vars(STRATEGIES), "_all")
    monkeypatch.syspath_prepend(packages)
    assert "EveryOther" in STRATEGIES.names()
    text = "AllReduce('ring', compression=EveryOther(error_feedback=True))"
    strategy = parse(text, STRATEGIES, where="test")
    assert repr(strategy) == text
    trained = train_threads(
        strategy, 2, tmp_path / "run", "images(samples=96, model='cnn')", steps=4
    )
    plain = train_threads(
        AllReduce("ring"), 2, tmp_path / "plain", "images(samples=96, model='cnn')", steps=4
    )
    for replica in trained.replicas:
        assert equal(replica, trained.final)
    halves = trained.reports[0].bytes_sent / plain.reports[0].bytes_sent
    assert halves == pytest.approx(0.5, abs=0.01)

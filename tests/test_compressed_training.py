"""Trainings with compressed gradients: engines alike bit for bit, exact bytes, resumed, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.simulated import simulated
from tests.test_simulation_shapes import COSTLY, in_shapes, told
from tests.training import equal, settings, train_processes, train_threads

from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run

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
    assert real.parameters_sha256 == virtual.parameters_sha256
    assert real.bytes_sent == virtual.bytes_sent
    plain = simulated(run_of("AllReduce()", accumulation=2), tmp_path / "plain")
    assert virtual.bytes_sent < 0.4 * plain.bytes_sent


@pytest.mark.parametrize("compressor", [*ADDING, *GATHERING])
def test_every_rank_ends_with_the_same_bits(compressor: str, tmp_path: Path) -> None:
    optimizer = "SGD(lr=0.05)" if compressor == DGC else BUCKETS["optimizer"]
    trained = train_threads(
        parse(ring(compressor), STRATEGIES, where="test"), 3, tmp_path,
        "images(samples=96, model='cnn')", **{**BUCKETS, "optimizer": optimizer},
    )  # fmt: skip
    for replica in trained.replicas:
        assert equal(replica, trained.final)


@pytest.mark.parametrize("compressor", [*ADDING, "TopK(0.05)", "QSGD(7)", "SignSGD()", DGC])
def test_a_run_of_shapes_tells_the_times_and_bytes_of_one_with_values(
    compressor: str, tmp_path: Path
) -> None:
    run = run_of(ring(compressor), 4, steps=6, trace_steps=0)
    reports = [
        told(each, tmp_path, "stragglers(nodes=4)", COSTLY).reports
        for each in (run, in_shapes(run))
    ]
    for real, shapes in zip(*reports, strict=True):
        assert shapes.bytes_sent == real.bytes_sent
        assert shapes.seconds == pytest.approx(real.seconds, rel=1e-9)


# What is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("AllReduce('tree', compression=TopK())", "do not add.*set algorithm='ring'"),
        ("AllReduce(shard='optimizer', compression=BF16())", "leave these out"),
        ("AllReduce(backup=1, compression=BF16())", "leave these out"),
        ("AllReduce(compression=TopK(0))", "keep: 0.0 is not above 0"),
        ("AllReduce(compression='TopK')", "expected Compressor"),
        ("AllReduce(compression=Ring())", "expected Compressor"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        parse(text, STRATEGIES, where="here")
    assert "\n" not in str(caught.value)

"""The benchmark on emulated nodes: runs start anew, and their pairs are judged together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks import emulated
from benchmarks.ratios import Ratio
from tests.support.blocks import blocks_of
from tests.support.emulated import needs_emulation


@pytest.mark.lab
@needs_emulation
def test_the_ring_on_emulated_nodes_is_measured_beside_ddp(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = replace(emulated.MODELS["0.25 MB"], steps=1)
    (row,) = emulated.bench_emulated([emulated.Nodes(2, 0.5)], [model], runs=2, rounds=3)
    assert (row.nodes, row.model, len(row.runs), row.ratio.pairs) == ("2x0.5", "0.25 MB", 2, 6)
    assert row.ratio.low is not None
    assert set(row.peers) == {"DDP, 1/5/25/100 MB"}
    emulated.table_of([row]).show()
    assert "2x0.5  0.25 MB" in capsys.readouterr().out


def test_runs_on_emulated_nodes_are_judged_together_and_apart() -> None:
    runs = [
        blocks_of(ring=[1.0, 1.0, 4.0], ddp=[1.0, 2.0, 4.0]),
        blocks_of(ring=[3.0, 4.0, 5.0], ddp=[1.0, 1.0, 1.0]),
    ]
    nodes, model = emulated.Nodes(2, 0.95), replace(emulated.MODELS["30 MB"], steps=2)
    row = emulated.row_of(nodes, model, runs)
    assert row.runs == (1.0, 4.0)
    assert row.ratio == Ratio(2.0, 0.5, 5.0, 6)  # of 0.5, 1, 1, 3, 4, 5
    assert (row.step_seconds, row.peer_seconds) == (1.75, 0.5)


@pytest.mark.parametrize(("name", "megabytes"), [("0.25 MB", 0.25), ("30 MB", 30.0)])
def test_synthetic_models_have_their_size(name: str, megabytes: float) -> None:
    sizes = [parameter.numel() for parameter in emulated.MODELS[name].build().parameters()]
    assert 4e-6 * sum(sizes) == pytest.approx(megabytes)
    assert len(sizes) == emulated.TENSORS

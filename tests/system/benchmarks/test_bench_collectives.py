"""The benchmark of all-reduces: every contestant takes part, over memory and over sockets."""

from __future__ import annotations

import pytest
from benchmarks import collectives, mpi
from benchmarks.collectives import Setup
from benchmarks.turns import Blocks

from orchestra.worker.runtime import Runtime

pytestmark = pytest.mark.lab


def measured_with_small_matrices(
    runtime: Runtime, assignment: collectives.Assignment
) -> list[Blocks]:
    """On a rank; nothing depends on how long it computes between the calls, or how much memory the
    tensors are in."""
    collectives.WIDTH, collectives.ARENA_BYTES = 8, 1_000_000
    return collectives.measure(runtime, assignment)


def test_all_reduces_are_measured_alone_and_between_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives, "measure", measured_with_small_matrices)
    setups = [Setup("memory", "4 KB"), Setup("memory", "4 KB", computing=True)]
    alone, computing = collectives.bench_collectives(setups, (2,), 1)
    assert (alone.size, alone.computing, computing.computing) == ("4 KB", False, True)
    assert alone.algorithm == computing.algorithm == "shm"
    assert alone.gloo_ms > 0 < alone.ms
    assert alone.ratio.median == pytest.approx(alone.ms / alone.gloo_ms)
    assert alone.copy_share is not None
    assert computing.copy_share is None
    assert (alone.mpi_ratio is not None) == mpi.is_there()


def test_schedules_over_sockets_are_measured_beside_gloo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks fail where anything goes through shared memory."""
    monkeypatch.setattr(collectives, "measure", measured_with_small_matrices)
    setups = collectives.setups_of(["sockets"], ["4 KB"], ["ring", "tree"])
    rows = [*collectives.bench_collectives(setups, (2,), 1)]
    assert [(row.over, row.algorithm) for row in rows] == [("sockets", "ring"), ("sockets", "tree")]
    for row in rows:
        assert row.ratio.median == pytest.approx(row.ms / row.gloo_ms)
        assert row.processor_ratio.median == pytest.approx(row.processor_ms / row.gloo_processor_ms)
    for table in collectives.tables_of(rows):
        table.show()
    assert "all-reduces over sockets" in capsys.readouterr().out


def test_a_cold_tensor_comes_again_after_the_whole_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "ARENA_BYTES", 100 * 4 * collectives.PAGE)
    arena = collectives.Arena(1_000)
    places = [arena.take().data_ptr() for _ in range(101)]
    assert len(set(places)) == 100
    assert places[100] == places[0]
    assert {(place - places[0]) % (4 * collectives.PAGE) for place in places} == {0}

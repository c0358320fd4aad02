"""The compiled evaluation of a collective's times has the bits of that in NumPy."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from tests.support.lab import some
from tests.support.paths import ROOT
from tests.support.simulated import run_ranks
from tests.support.simulated_collectives import Trial, staggered

from orchestra.engines.simulation.evaluate import (
    FREED,
    KIND,
    NAME,
    PAIR,
    REDUCES,
    Rows,
    evaluate,
    idle,
    in_numpy,
)
from orchestra.engines.simulation.rendezvous import MAX_FOLLOWED
from orchestra.engines.simulation.simulate import NOT_COMPILED
from orchestra.schedules import ALL_REDUCE, REDUCE, Schedule
from orchestra.transports.compiled import library


def random_rows(schedule: Schedule, seed: int, most: int) -> Rows:
    """Messages of `schedule` with random costs and ways, up to `most` for each transfer.

    The transfers of a round have one size, since who adds to what it sends sends as much.
    """
    draw, rounds = np.random.default_rng(seed), list(schedule.rounds())
    kinds = np.zeros(7, KIND)
    for name in ("setup", "rest", "receive", "add"):
        kinds[name] = draw.random(7) * 1e-5
    kinds["bytes"], kinds["held"] = draw.integers(100, 100_000, 7), draw.integers(0, 2, 7)
    kinds["whole"][:6], kinds["of"] = draw.integers(0, most, 6), 6
    pairs = np.zeros(3, PAIR)
    pairs["latency"], pairs["per_byte"] = draw.random(3) * 1e-4, 1e-9 * (1 + draw.random(3) * 50)
    flags = []
    for transfers in rounds:
        sent = {source: (first, end) for source, _, first, end, _ in transfers.tolist()}
        for _, target, first, end, operation in transfers.tolist():
            freed = sent.get(target) == (first, end)
            flags.append((REDUCES + FREED * freed) * (operation == REDUCE))
    sizes = [len(transfers) for transfers in rounds]
    source, target, *_ = np.concatenate(rounds).T.astype(np.uint16)
    return Rows(
        schedule.ranks,
        np.concatenate([[0], np.cumsum(sizes)]),
        source.copy(),
        target.copy(),
        np.array(flags, np.uint8),
        np.repeat(draw.integers(0, 6, len(rounds)), sizes).astype(np.uint16),
        draw.integers(0, 3, len(source)).astype(np.uint32),
        kinds,
        pairs,
    )


@pytest.mark.skipif(library(NAME) is None, reason="not compiled")
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("ranks", some([2, 3, 5, 8, 17, 64]))
@pytest.mark.parametrize("name", ["ring", "halving_doubling", "butterfly", "ring_gather"])
def test_the_compiled_one_has_the_same_bits(name: str, ranks: int, most: int) -> None:
    """One collective after another, on the links as the last one left them."""
    for seed in range(5):
        rows = random_rows(ALL_REDUCE[name](ranks), seed, most)
        draw = np.random.default_rng(seed)
        state = idle(ranks)
        state["slowness"] = 1 + draw.random(ranks)
        for _ in range(3):
            state["clock"] += draw.random(ranks) * draw.choice([1e-6, 1e-3, 0.1])
            other = state.copy()
            evaluate(rows, state)
            in_numpy(rows, other)
            assert state.tobytes() == other.tobytes()


def test_missing_compiled_code_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRA_COMPILED", "0")
    outcome = run_ranks(MAX_FOLLOWED + 1, lambda runtime: None, "lan_1gbit(nodes=65)")
    assert outcome.notices == (NOT_COMPILED,)
    assert run_ranks(2, lambda runtime: None).notices == ()


def test_without_the_compiled_one_times_are_the_same() -> None:
    """A run in which it is not used, beside this process, in which it is."""
    code = (
        "from tests.support.simulated_collectives import Trial, staggered\n"
        "print(Trial('ring', 7, 5003, staggered(7)).run())"
    )
    without = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=ROOT, env=os.environ | {"ORCHESTRA_COMPILED": "0"},
    ).stdout  # fmt: skip
    assert without == f"{Trial('ring', 7, 5003, staggered(7)).run()}\n"
    assert len(without) > 1000

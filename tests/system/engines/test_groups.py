"""Ranks are lost, and those that are left go on in a new group, on real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.support import elastic_programs as programs
from tests.support.elastic_programs import Losses

from orchestra.engines.processes import launch
from orchestra.errors import RankLost, RunFailed


def expected(losses: Losses, ranks: int) -> list[int]:
    """Before step n all are there that were not lost before."""
    return [
        sum(2**slot for slot in range(ranks) if not any(s == slot and n <= k for s, n in losses.at))
        for k in range(losses.steps)
    ]


@pytest.mark.parametrize(
    ("ranks", "at"),
    [
        (2, ((1, 3),)),
        (3, ((0, 2),)),
        (4, ((3, 1), (1, 4), (0, 9))),
        (4, ((1, 5), (2, 5))),  # at once
    ],
)
@pytest.mark.parametrize(
    "memory", [True, pytest.param(False, marks=pytest.mark.lab)], ids=["memory", "sockets"]
)
def test_those_that_are_left_make_the_step_again(
    ranks: int, at: tuple[tuple[int, int], ...], memory: bool, tmp_path: Path
) -> None:
    losses = Losses(tmp_path, at)
    outcome = launch(programs.sums, losses, ranks, shared_memory=memory)
    left = tuple(rank for rank in range(ranks) if rank not in dict(at))
    for rank in range(ranks):
        assert outcome.results[rank] == ((left, expected(losses, ranks)) if rank in left else None)
    assert sorted(outcome.left_out) == sorted(dict(at))
    first = f"rank {at[0][0]} on "
    assert any(n.startswith(first) and "was killed by SIGKILL; going on with" in n
               for n in outcome.notices)  # fmt: skip


def test_a_rank_that_is_stopped_is_lost(tmp_path: Path) -> None:
    losses = Losses(tmp_path, ((1, 2),), how=signal.SIGSTOP)
    outcome = launch(programs.sums, losses, 3)
    assert outcome.results[0] == ((0, 2), expected(losses, 3))
    assert "is stopped" in outcome.left_out[1]


def test_an_exception_is_no_loss(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"rank 1 on .* failed: ValueError: a mistake") as caught:
        launch(programs.fails_in_a_step, tmp_path, 3)
    assert not isinstance(caught.value, RankLost)

"""Ranks of one process draw what each would draw in a process of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from orchestra.engines.random_streams import RandomStreams, seed


@pytest.fixture
def streams() -> RandomStreams:
    return RandomStreams()


def draws(times: int) -> Iterator[tuple[float, ...]]:
    """From all three; normal numbers come in pairs, of which one is kept for later."""
    for _ in range(times):
        yield (
            float(torch.randn(())),
            random.random(),
            random.gauss(0, 1),
            float(np.random.normal()),
        )


def test_ranks_that_take_turns_draw_as_alone(streams: RandomStreams) -> None:
    alone = []
    for rank in range(3):
        seed(rank)
        alone.append(list(draws(5)))
    seed(9)
    before = list(draws(1))
    for rank in range(3):
        streams.give(rank)
        seed(rank)
    own = [draws(5) for _ in range(3)]
    drawn: list[list[tuple[float, ...]]] = [[], [], []]
    for rank in (0, 1, 1, 2, 0, 2, 1, 0, 0, 2, 1, 2, 0, 1, 2):
        streams.give(rank)
        drawn[rank].append(next(own[rank]))
    streams.give(None)
    after = list(draws(1))
    assert drawn == alone
    seed(9)
    assert before + after == list(draws(2))


def test_a_rank_goes_on_from_where_another_one_stood(streams: RandomStreams) -> None:
    streams.give(0)
    seed(4)
    list(draws(1))
    stood = streams.present()
    expected = list(draws(3))
    streams.give(1)
    seed(5)
    streams.go_on_from(stood)
    drawn = list(draws(3))
    streams.give(None)
    assert drawn == expected


def test_numpys_second_normal_outlives_the_turns_of_others(streams: RandomStreams) -> None:
    """Also where its generator stands at its end, as one does that was seeded and never used."""
    streams.give(0)
    seed(0)
    state: Any = None
    while state is None or state["state"]["pos"] != 624 or not state["has_gauss"]:
        np.random.normal()
        state = np.random.get_state(legacy=False)
    alone = np.random.RandomState()
    alone.set_state(state)
    for _ in range(2):  # in the second turn nothing is drawn
        streams.give(1)
        streams.give(0)
    assert np.random.normal() == alone.normal()
    streams.give(1)
    streams.give(0)
    assert np.random.normal() == alone.normal()
    np.random.set_state(state)  # with the second one of a pair, and nothing is drawn
    alone.set_state(state)
    streams.give(1)
    streams.give(0)
    assert np.random.normal() == alone.normal()
    streams.give(None)

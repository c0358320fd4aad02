"""The drawings of messages are those of the simulation as it is."""

from __future__ import annotations

import pytest
from studies.messages import DRAWINGS, Message, messages_in, svg, timeline_of
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "images" / "messages"


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_command_draws_the_committed_picture(name: str) -> None:
    drawn = svg(DRAWINGS[name])
    assert drawn == (FOLDER / f"{name}.svg").read_text(), (
        "python -m studies.messages docs/images/messages"
    )


def pairs(name: str) -> set[tuple[int, int]]:
    return {(each.source, each.target) for each in messages_in(timeline_of(DRAWINGS[name]))}


def test_messages_go_where_the_strategy_sends_them() -> None:
    assert pairs("ring") == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert pairs("server") == {(w, 3) for w in range(3)} | {(3, w) for w in range(3)}
    assert pairs("pipeline") == {(0, 1), (1, 2), (2, 1), (1, 0)}


def test_an_arrow_ends_after_it_begins() -> None:
    messages: list[Message] = [*messages_in(timeline_of(DRAWINGS["gossip"]))]
    assert messages
    assert all(each.sent < each.received for each in messages)

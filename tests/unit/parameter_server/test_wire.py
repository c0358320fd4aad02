"""Pushes and answers survive the way over the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestra.coordinator.rest import Reason, Rest
from orchestra.parameter_server.messages import (
    Answer,
    Kind,
    Push,
    QuietPoint,
    Request,
    decode_answer,
    decode_quiet_point,
    decode_request,
    encode_reply,
    encode_request,
)
from orchestra.parameter_server.replicas import (
    Addressed,
    ReplicaNotice,
    decode_addressed,
    encode_addressed,
    encode_notice,
)

COUNT = st.integers(0, 2**53)
LOSS = st.floats(allow_nan=False)
FLAGS = st.lists(st.booleans(), max_size=6).map(tuple)
RATES = st.lists(st.floats(0, 10), max_size=4).map(tuple)
POSITION = st.none() | COUNT
OPTIONS = st.text(st.characters(max_codepoint=127), max_size=6)  # JSON


@given(
    st.builds(
        Push,
        COUNT,
        COUNT,
        COUNT,
        COUNT,
        LOSS,
        st.booleans(),
        RATES,
        FLAGS,
        POSITION,
        RATES,
        OPTIONS,
        staleness=st.just(0),  # which the server sets
    )
)
def test_push(push: Push) -> None:
    message = encode_request(Request(push.worker, Kind.PUSH, push))
    assert message.dtype == torch.float64
    assert message[0] == (Kind.OPTIONS if push.options else Kind.PUSH)
    assert decode_request(message, push.worker).push == push


@given(
    st.builds(
        Answer,
        COUNT,
        COUNT,
        COUNT,
        LOSS,
        st.booleans(),
        COUNT,
        COUNT,
        st.booleans(),
        FLAGS,
        st.none(),
    )
)
def test_answer(answer: Answer) -> None:
    message = encode_reply(answer)
    assert message.dtype == torch.float64
    assert decode_answer(answer.worker, message) == answer


def test_a_loss_that_is_not_a_number_arrives_as_such() -> None:
    sent = Request(0, Kind.PUSH, Push(0, 1, 1, 2, float("nan"), False))
    push = decode_request(encode_request(sent), 0).push
    assert push is not None
    assert push.loss != push.loss


@given(st.sampled_from(Reason), st.integers(0, 9), st.booleans())
def test_quiet_point(reason: Reason, level: int, complete: bool) -> None:
    point = QuietPoint(Rest(reason, level), complete)
    assert decode_quiet_point(encode_reply(point)) == point


def test_request() -> None:
    request = Request(3, Kind.PAUSE, step=-1)
    message = encode_request(request)
    assert message.tolist() == [Kind.PAUSE, -1]
    assert decode_request(message, 3) == request


PUSH = Push(3, 1, 1, 1, 0.5, False, (0.1,), (True, False))


@pytest.mark.parametrize(
    "addressed",
    [
        Addressed(1, Request(3, Kind.PAUSE, step=4), points=2, values=True),
        Addressed(1, Request(3, Kind.PUSH, PUSH)),
        Addressed(1, Request(3, Kind.PUSH, PUSH._replace(options="{}"))),
    ],
)
def test_request_about_a_slice_with_a_replica(addressed: Addressed) -> None:
    message = encode_addressed(addressed)
    assert message[:2].tolist() == [1, 3]
    assert decode_addressed(message) == addressed


@pytest.mark.parametrize("notice", ReplicaNotice)
def test_notice_about_a_slice_with_a_replica(notice: ReplicaNotice) -> None:
    assert decode_addressed(encode_notice(notice, 1, 3)) is notice

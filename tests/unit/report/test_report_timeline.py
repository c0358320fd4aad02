"""Figures of timelines: a few steps out of what a run left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.drawn import drawn, drawn_alone, keep, record, traced_reports

from orchestra.errors import InputError
from orchestra.records.files import run_folder
from orchestra.records.trace import read_trace, write_trace
from orchestra.report.figures.timeline import step_windows, timelines


def test_a_timeline_shows_three_steps_of_the_middle_and_their_messages(tmp_path: Path) -> None:
    found, name = drawn_alone(keep(tmp_path, [record("ring")]), timelines), "timeline-ring"
    assert found.figures[name].title == "ring: steps 3 to 5"
    pieces = found.values(name, "kind")
    assert {piece["lane"] for piece in pieces} == {"0", "1", "2", "3"}
    assert len(pieces) == 4 * 3 * 4  # ranks, steps, pieces of a step
    first = next(piece for piece in pieces if piece["kind"] == "compute")
    assert (first["start"], first["end"]) == (0.0, pytest.approx(1.0))  # milliseconds
    messages = found.values(name, "to")
    assert len(messages) == 4 * 3
    assert {(message["lane"], message["to"]) for message in messages} == {
        ("0", "1"), ("1", "2"), ("2", "3"), ("3", "0"),
    }  # fmt: skip
    assert messages[0]["start"] == pytest.approx(1.0)
    assert messages[0]["end"] == pytest.approx(2.2)


def test_background_flows_of_a_name_share_a_lane_and_a_server_is_named(tmp_path: Path) -> None:
    keep(tmp_path, [record("server", ranks=2)], trace=False)
    first, second = traced_reports(2)
    assert first.timeline is not None
    assert second.timeline is not None
    later = [
        piece._replace(flow=2 + piece.args["step"] % 2) for piece in first.timeline.slices[1::5]
    ]
    flows = ("steps", "main", "average", "average")
    first = replace(first, timeline=replace(first.timeline, flows=flows))
    assert first.timeline is not None
    first.timeline.slices.extend(later)
    kept = [piece for piece in second.timeline.slices if piece.category != "step"]
    second = replace(second, role="server", timeline=replace(second.timeline, slices=kept))
    write_trace(run_folder(tmp_path, "server", 2, 0), [first, second])
    pieces = drawn_alone(tmp_path, timelines).values("timeline-server", "kind")
    assert {piece["lane"] for piece in pieces} == {"0", "0 average", "1 server"}


def test_a_crowded_timeline_is_made_shorter(tmp_path: Path) -> None:
    write_trace(tmp_path, traced_reports(130))
    (window,) = step_windows(read_trace(tmp_path / "trace.json.gz"))
    assert (window.first, window.last) == (3, 4)  # 130 x 5 pieces and messages in a step
    write_trace(tmp_path, traced_reports(400))
    (window,) = step_windows(read_trace(tmp_path / "trace.json.gz"))
    assert len(window.pieces) + len(window.messages) <= 2000
    assert window.end < 5 * 3000


def test_steps_that_do_not_follow_each_other_are_timelines_of_their_own(tmp_path: Path) -> None:
    reports = traced_reports(2, steps=8)
    for report in reports:
        timeline = report.timeline
        assert timeline is not None
        kept = [piece for piece in timeline.slices if piece.args["step"] not in (4, 5)]
        timeline.slices[:] = kept
    keep(tmp_path, [record("switch", ranks=2)], trace=False)
    write_trace(run_folder(tmp_path, "switch", 2, 0), reports)
    titles = [figure.title for figure in drawn_alone(tmp_path, timelines).figures.values()]
    assert titles == [
        "switch: steps 1 to 3, before the switch",
        "switch: steps 6 to 8, after the switch",
    ]


def test_a_damaged_timeline_is_told_by_name(tmp_path: Path) -> None:
    keep(tmp_path, [record("ring")])
    path = run_folder(tmp_path, "ring", 4, 0) / "trace.json.gz"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match=r"trace\.json\.gz: is damaged"):
        drawn(tmp_path)


def test_names_that_are_equal_as_file_names_are_told_apart(tmp_path: Path) -> None:
    keep(tmp_path, [record("a/b"), record("a b")])
    names = [name for name in drawn(tmp_path).figures if name.startswith("timeline")]
    assert names == ["timeline-a-b", "timeline-a-b--2"]

"""A time to target is known to the spacing of the snapshots: in tables, sentences and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.answers import headline, plain, source, study, told
from tests.support.drawn import keep, record
from tests.support.recorded import changed

from orchestra.cli.train import print_record
from orchestra.records.record import RunRecord
from orchestra.records.report import Point
from orchestra.records.store import collect, write_curve
from orchestra.report.figures.curves import curves
from orchestra.report.measures import TIME_TO_TARGET
from orchestra.report.numbers import uncertain
from orchestra.report.study import Study
from orchestra.report.table import table
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run, Target, Training

Times = Mapping[str, Sequence[tuple[float, float]]]


def read(times: Times) -> list[RunRecord]:
    """For each strategy and seed a run that reached the target after the one and by the other."""
    return [
        record(label, seed=seed, time_to_target_after_seconds=after, time_to_target_seconds=by)
        for label, of_seeds in times.items()
        for seed, (after, by) in enumerate(of_seeds)
    ]


def test_no_more_digits_are_written_than_are_known() -> None:
    pairs = [(1.1345, 0.0712), (1.1345, 0.1231), (1.1345, 3.2), (1234.5, 38.0), (0.5, 0.0996)]
    written = [plain(uncertain(*pair)) for pair in pairs]
    assert written == ["1.13 ± 0.07", "1.13 ± 0.12", "1 ± 3", "1 230 ± 40", "0.50 ± 0.10"]


NEAR: Times = {  # three seeds, each at the same snapshot: their spread says nothing of when
    "one process": [(1.10, 1.20), (1.101, 1.201), (1.102, 1.202)],
    "ring": [(1.04, 1.13), (1.041, 1.131), (1.042, 1.132)],
}


def test_a_spread_below_the_spacing_of_snapshots_is_not_told() -> None:
    assert headline(source(read(NEAR))) == (
        "Ring on 4 ranks reached accuracy 0.95 first, after 1.13 ± 0.09 s (mean of 3 seeds); one "
        "process with all cores took 1.20 ± 0.10 s, 1.1 times as long, but with snapshots so far "
        "apart the two cannot be told apart: whether distributing pays on this machine stays open."
    )
    cells = [line[3] for line in table(study(source(read(NEAR)))).sheet.lines]
    assert [plain(cell.text) for cell in cells] == ["1.13 ± 0.09", "1.20 ± 0.10"]
    assert plain(" ".join(cells[0].details)) == "-0.07 [-0.16, +0.03]"
    assert {cell.verdict for cell in cells} == {""}


def test_a_spread_beyond_it_is() -> None:
    wide: Times = {
        "one process": [(4.0, 4.1), (4.4, 4.5), (4.8, 4.9)],
        "ring": [(1.9, 2.0), (2.3, 2.4), (2.7, 2.8)],
    }
    assert headline(source(read(wide))) == (
        "Ring on 4 ranks reached accuracy 0.95 first, after 2.4 ± 0.4 s (mean of 3 seeds); one "
        "process with all cores took 4.5 ± 0.4 s, 1.9 times as long: on this machine distributing "
        "paid."
    )


def test_the_spacing_widens_the_interval_of_a_difference() -> None:
    runs = study(source(read(NEAR)))
    rows = {row.label: row for row in runs.rows}
    difference = runs.between(rows["one process"], rows["ring"], TIME_TO_TARGET)
    assert difference is not None
    assert difference.mean == pytest.approx(0.07)
    assert difference.low == pytest.approx(0.07 - 0.1)  # the seeds differ alike: no other width
    assert difference.high == pytest.approx(0.07 + 0.09)
    assert difference.too_coarse
    assert not difference.certain


def test_one_seed_tells_nobody_apart_within_a_snapshot() -> None:
    near = {label: times[:1] for label, times in NEAR.items()}
    assert "cannot be told apart" in headline(source(read(near)))
    far: Times = {"one process": [(1.3, 1.4)], "ring": [(1.0, 1.1)]}
    assert "in these runs, one of each, distributing paid" in headline(source(read(far)))
    detail = plain(" ".join(told(source(read(far))).detail))
    assert "One process minus ring is +0.30 s (n = 1)." in detail


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((1.0234, 1.1331), "reached between 1.02 and 1.13 s"),
        ((0.0, 0.04), "reached between 0.00 and 0.04 s"),
        ((None, None), "not reached"),
    ],
)
def test_the_terminal_tells_the_interval_and_the_nodes(
    times: tuple[float | None, float | None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    after, by = times
    nodes = {
        "replicas": 2,
        "judged": 2,
        "mean": {"loss": 0.25, "swaps": 3.0},
        "worst": {"loss": 0.5},
    }
    ran = record("ring", time_to_target_after_seconds=after, time_to_target_seconds=by, nodes=nodes)
    target = Target("accuracy", at_least=0.9)
    print_record(ran, Run("ring", "digits", Single(), training=Training(target=target)))
    out = capsys.readouterr().out
    assert said in out
    assert "mean loss 0.25 (worst 0.5), swaps 3" in out


def test_the_figure_shows_nodes_from_mean_to_worst_and_their_average(tmp_path: Path) -> None:
    runs = [record("ring"), record("server")]
    keep(tmp_path, runs, trace=False)
    own = [{"0": {"loss": 0.5 / k}, "1": {"loss": 1.5 / k}} for k in (1, 2)]
    points = [
        Point(80 * k, k, {"loss": 1 / k}, 0.1, 0.1, {"loss": 0.25 / k}, nodes, 2)
        for k, nodes in enumerate(own, start=1)
    ]
    write_curve(tmp_path / "runs" / "ring" / "4-ranks" / "seed-0", points)
    sources = collect([tmp_path])
    found = {figure.name: figure for figure in curves(Study(sources))}
    figure = found["loss-against-samples"]
    assert "a model that no node has" in figure.caption
    layers = figure.spec["layer"]

    def data(layer: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = figure.spec["datasets"][layer["data"]["name"]]
        return found

    (band,) = [layer for layer in layers if layer["mark"]["type"] == "area"]
    values = data(band)
    assert [(v["value"], v["worst"]) for v in values] == [(1.0, 1.5), (0.5, 0.75)]
    (dashed,) = [layer for layer in layers if layer["mark"].get("strokeDash") == [4, 3]]
    assert [v["value"] for v in data(dashed)] == [0.25, 0.125]
    assert "mean of nodes" in dashed["encoding"]["x"]["title"][-1]
    assert [layer for layer in layers if layer["mark"]["type"] == "text"] == []
    assert "average" not in found["accuracy-against-samples"].caption


def test_records_from_before_are_read_as_they_were() -> None:
    runs = read({"ring": [(1.0, 1.1)], "one process": [(2.0, 2.1)]})
    old = [changed(run, time_to_target_after_seconds=None) for run in runs]
    assert "after 1.10 s" in headline(source(old))

"""The figures of a report: they show what the records say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import vl_convert
from tests.support.drawn import (
    BATCH,
    STEPS,
    STRATEGIES,
    Drawn,
    all_runs,
    drawn,
    drawn_alone,
    keep,
    record,
)
from tests.support.lab import by_turns

from orchestra.records.files import run_folder
from orchestra.records.record import RunRecord
from orchestra.report.figures.bars import seconds, staleness
from orchestra.report.figures.curves import curves, in_steps
from orchestra.report.figures.frame import for_image, save


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """Everything there is: several seeds and rank counts, a target, servers, a switch, traces."""
    return drawn(keep(tmp_path_factory.mktemp("whole"), all_runs(ranks=(2, 4))))


WHOLE = [
    "time-to-target",
    "metric-against-time",
    "loss-against-seconds",
    "accuracy-against-seconds",
    "loss-against-samples",
    "accuracy-against-samples",
    "training-loss",
    "difference-in-time-to-target",
    "difference-in-final-accuracy",
    "seconds-by-part",
    "seconds-by-rank",
    "setup-seconds",
    "bytes-sent",
    "staleness",
    "speed-against-ranks",
    "time-to-target-against-ranks",
]


def test_every_family_is_drawn_where_there_is_data(whole: Drawn) -> None:
    timelines = [name for name in whole.figures if name.startswith("timeline-")]
    assert {*whole.figures} == {*WHOLE, *timelines}
    assert sorted(timelines) == [
        "timeline-ring-4-ranks",
        "timeline-server-4-ranks",
        "timeline-switch-4-ranks",
    ]


@pytest.mark.parametrize(
    ("name", "dark"), by_turns([*WHOLE, "timeline-ring-4-ranks"], [False, True])
)
def test_a_specification_compiles_without_a_warning(
    whole: Drawn, name: str, dark: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    vl_convert.vegalite_to_vega(dict(whole.figures[name].spec), show_warnings=True)
    spec = for_image(whole.figures[name], 290, dark)
    svg = vl_convert.vegalite_to_svg(spec, show_warnings=True)
    assert capfd.readouterr().err == ""
    assert ("#ececec" in svg) == dark  # the colour of text on a dark ground
    assert whole.figures[name].title in "".join(ElementTree.fromstring(svg).itertext())


def units(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for layer in spec.get("layer", ()):
        yield from units({"data": spec.get("data"), **layer})
    if "mark" in spec:
        yield spec


def test_all_data_of_a_strategy_is_hidden_by_the_parameter(whole: Drawn) -> None:
    for figure in whole.figures.values():
        assert {"name": "hidden", "value": []} in figure.spec["params"]
        for unit in units(figure.spec):
            values = figure.spec["datasets"][unit["data"]["name"]]
            filters = [step.get("filter") for step in unit.get("transform", ())]
            of_strategy = ["strategy" in value for value in values]
            assert all(of_strategy) or not any(of_strategy)
            assert ("indexof(hidden, datum.strategy) < 0" in filters) == all(of_strategy)


@pytest.mark.parametrize("name", ["loss-against-seconds", "bytes-sent", "time-to-target"])
def test_hiding_a_strategy_takes_its_marks_away(whole: Drawn, name: str) -> None:
    label = "ring (4 ranks)"
    spec = for_image(whole.figures[name])
    marks = f"strategy: {label}"
    assert marks in vl_convert.vegalite_to_svg(spec)
    hide = [{**p, "value": [label]} if p["name"] == "hidden" else p for p in spec["params"]]
    assert marks not in vl_convert.vegalite_to_svg({**spec, "params": hide})


def test_zoom_needs_a_key_or_a_mouse_so_that_the_page_scrolls(whole: Drawn) -> None:
    zooms = [
        param
        for figure in whole.figures.values()
        for param in figure.spec["params"]
        if param["name"] == "zoom"
    ]
    assert len(zooms) >= 9
    for zoom in zooms:
        assert zoom["bind"] == "scales"
        assert zoom["select"]["zoom"] == "wheel![event.ctrlKey || event.shiftKey]"
        assert "event.pointerType === 'mouse'" in zoom["select"]["translate"]
        assert zoom["select"]["clear"] == "dblclick"


def runs_of(whole: Drawn) -> dict[tuple[str, int], RunRecord]:
    return {
        (row.name, run.record.asked.seed): run.record for row in whole.rows for run in row.completed
    }


def test_time_to_target_is_that_of_the_records_best_first(whole: Drawn) -> None:
    dots = whole.values("time-to-target", "seed", "seconds")
    assert {(dot["strategy"], dot["seed"]): dot["seconds"] for dot in dots} == {
        key: pytest.approx(run.to_target.seconds, rel=1e-4) for key, run in runs_of(whole).items()
    }
    texts = whole.values("time-to-target", "text")
    assert texts[0]["strategy"] == "one process (2 ranks)"
    assert texts[-1]["strategy"] == "switch (4 ranks)"


def test_final_metric_and_seconds_are_those_of_the_records(whole: Drawn) -> None:
    points = [v for v in whole.values("metric-against-time", "seed") if "mean" not in v["seed"]]
    runs = runs_of(whole)
    assert len(points) == 12
    for point in points:
        run = runs[point["strategy"], int(point["seed"])]
        assert point["seconds"] == pytest.approx(run.time.training, rel=1e-4)
        assert point["value"] == pytest.approx(run.learned.metrics["accuracy"], rel=1e-4)


def test_curves_are_the_snapshots_and_their_mean_over_the_seeds(whole: Drawn) -> None:
    values = whole.values("loss-against-samples", "seed")
    ring = [v for v in values if v["strategy"] == "ring (4 ranks)"]
    (row,) = (row for row in whole.rows if row.name == "ring (4 ranks)")
    of_seeds = [point.metrics["loss"] for run in row.completed for point in run.curve]
    assert [value["value"] for value in ring[:12]] == pytest.approx(of_seeds, rel=1e-4)
    means = [sum(of_seeds[part::4]) / 3 for part in range(4)]
    assert [value["value"] for value in ring[12:]] == pytest.approx(means, rel=1e-4)
    assert [value["seed"] for value in ring[12:]] == [3] * 4  # seeds behind each mean


def test_only_the_most_ranks_of_a_strategy_have_a_curve(whole: Drawn) -> None:
    shown = {value["strategy"] for value in whole.values("loss-against-seconds", "strategy")}
    assert shown == {f"{label} (4 ranks)" for label in STRATEGIES}


@pytest.mark.parametrize("axis", ["seconds", "samples"])
def test_a_switch_is_marked_on_the_line_of_its_seed(whole: Drawn, axis: str) -> None:
    marks = whole.values(f"accuracy-against-{axis}", "step")
    assert [mark["seed"] for mark in marks] == [0, 1, 2]
    for mark in marks:  # step 5 of 20 is the first of four snapshots
        assert (mark["step"], mark["samples"]) == (5, 5 * BATCH)
        assert mark["value"] == pytest.approx(0.2 + mark["seed"] / 100, rel=1e-4)


def test_a_switch_between_two_snapshots_lies_on_the_line_between(tmp_path: Path) -> None:
    keep(
        tmp_path, [record("switch", switched_at_step=8, switched_at_sample=8 * BATCH)], trace=False
    )
    found = drawn_alone(tmp_path, curves)
    (mark,) = found.values("accuracy-against-samples", "step")
    assert mark["samples"] == 8 * BATCH
    assert mark["value"] == pytest.approx(0.2 + 0.2 * 3 / 5)  # snapshots at steps 5 and 10
    (mark,) = found.values("loss-against-samples", "step")
    assert mark["value"] == pytest.approx(3.0 * 0.125 ** (3 / 5), rel=1e-4)  # a logarithmic axis


def test_the_target_is_a_rule_of_its_metric_only(whole: Drawn) -> None:
    assert whole.values("accuracy-against-seconds", "target") == [{"target": 0.8}]
    assert whole.values("loss-against-seconds", "target") == []


def line_of(found: Drawn, strategy: str) -> list[dict[str, Any]]:
    """The training loss of a strategy, without the places at which its shape is shown again."""
    values = [v for v in found.values("training-loss", "low") if v["strategy"] == strategy]
    return list({value["samples"]: value for value in values}.values())


def test_equal_lines_of_training_loss_show_the_shapes_of_each(tmp_path: Path) -> None:
    runs = [record(label, steps=400, samples=400 * BATCH) for label in ("a", "b", "c")]
    keep(tmp_path, runs, trace=False)
    for run in runs:
        _long_steps(run_folder(tmp_path, run.asked.name, 4, 0), 400)
    figure = drawn_alone(tmp_path, in_steps).figures["training-loss"]
    signs = min(figure.spec["datasets"].values(), key=len)
    assert {sign["strategy"] for sign in signs} == {"a", "b", "c"}
    assert len({sign["samples"] for sign in signs}) == len(signs) > 20


def test_training_loss_is_the_mean_over_steps_workers_and_seeds(whole: Drawn) -> None:
    values = line_of(whole, "ring (4 ranks)")
    assert len(values) == STEPS // 4  # a part is four batches at the least
    first = [2.0 / step + 0.0015 for step in range(1, 5)]
    assert values[0]["low"] == pytest.approx(sum(first) / 4, rel=1e-4)
    assert values[0]["value"] == pytest.approx(sum(first) / 4 + 0.01, rel=1e-4)
    assert values[0]["high"] == pytest.approx(sum(first) / 4 + 0.02, rel=1e-4)


def _long_steps(folder: Path, steps: int) -> None:
    lines = [
        {"step": s, "seconds": s, "samples": BATCH, "consumed": s * BATCH, "loss": 1.0}
        for s in range(1, steps + 1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "steps-rank-0.jsonl").write_text(text)


def test_long_training_is_two_hundred_parts_and_the_rest_joins_the_last(tmp_path: Path) -> None:
    run = record("ring", steps=4010, samples=4010 * BATCH)
    keep(tmp_path, [run], trace=False)
    _long_steps(run_folder(tmp_path, "ring", 4, 0), 4010)
    values = line_of(drawn_alone(tmp_path, in_steps), "ring")
    assert len(values) == 200
    assert values[-1]["samples"] == 199.5 * 20 * BATCH


def test_seconds_are_those_of_the_records_with_the_rest_as_other(whole: Drawn) -> None:
    name = "server (2 ranks)"
    runs = [run for (row, _), run in runs_of(whole).items() if row == name]
    parts = {
        value["part"]: value["seconds"]
        for value in whole.values("seconds-by-part", "part")
        if value["strategy"] == name
    }
    for part in ("compute", "communicate", "wait"):
        mean = sum(run.time.worker[part] for run in runs) / 3
        assert parts[part] == pytest.approx(mean, rel=1e-4)
    total = sum(run.time.training or 0 for run in runs) / 3
    assert sum(parts.values()) == pytest.approx(total, rel=1e-4)


def test_seconds_by_rank_mark_the_server_and_leave_out_one_process(whole: Drawn) -> None:
    values = whole.values("seconds-by-rank", "rank")
    assert "one process (4 ranks)" not in {value["strategy"] for value in values}
    servers = {v["lane"][-8:] for v in values if v["role"] == "server"}
    assert servers == {"3 server"}
    compute = [
        v["seconds"]
        for v in values
        if (v["strategy"], v["rank"], v["part"]) == ("ring (4 ranks)", 2, "compute")
    ]
    mean = sum(2 * (1 + seed / 10) * 1.04 / 4 for seed in range(3)) / 3
    assert compute == [pytest.approx(mean, rel=1e-4)]


def test_setup_is_that_of_the_records(whole: Drawn) -> None:
    parts = [v for v in whole.values("setup-seconds", "part") if v["strategy"] == "ring (4 ranks)"]
    assert {v["part"]: v["seconds"] for v in parts} == {
        "processes": 0.4, "group": 0.1, "first_step": 0.2,
    }  # fmt: skip


def test_setup_is_drawn_without_the_first_launchs_import(tmp_path: Path) -> None:
    setup = {"import": 5.0, "processes": 0.4, "group": 0.1}
    found = drawn_alone(keep(tmp_path, [record("ring", setup=setup)], trace=False), seconds)
    assert sum(v["seconds"] for v in found.values("setup-seconds", "part")) == 0.5
    (text,) = [v["text"] for v in found.values("setup-seconds", "text")]
    assert text == "0.500\u202fs"


def test_bytes_are_those_of_the_records_and_estimates_say_so(whole: Drawn) -> None:
    values = {v["strategy"]: v for v in whole.values("bytes-sent", "sent")}
    assert values["server (4 ranks)"]["sent"] == pytest.approx(3.000001, rel=1e-4)
    per_sample = pytest.approx(3_000_001 / (STEPS * BATCH), rel=1e-4)
    assert values["server (4 ranks)"]["per_sample"] == per_sample
    texts = {v["strategy"]: v["text"] for v in whole.values("bytes-sent", "text")}
    assert texts["one process (4 ranks)"] == "none"
    assert texts["ring (4 ranks)"].startswith("≈")
    assert not texts["server (4 ranks)"].startswith("≈")


def test_staleness_is_in_shares_with_the_gaps_filled(whole: Drawn) -> None:
    values = [v for v in whole.values("staleness", "share") if v["strategy"] == "server (4 ranks)"]
    assert [(v["staleness"], v["share"], v["updates"]) for v in values] == [
        (0, 0.25, 15), (1, 0.0, 0), (2, 0.75, 45),
    ]  # fmt: skip
    assert {v["strategy"] for v in whole.values("staleness", "share")} == {
        "server (4 ranks)", "switch (4 ranks)",
    }  # fmt: skip


def test_a_long_tail_of_staleness_is_one_point(tmp_path: Path) -> None:
    tail = record("server", staleness_histogram={"0": 500, "2": 497, "40": 1, "90": 2})
    found = drawn_alone(keep(tmp_path, [tail], trace=False), staleness)
    values = found.values("staleness", "share")
    assert [(v["updates_between"], v["updates"]) for v in values] == [
        ("0", 500), ("1", 0), ("2", 497), ("3 or more", 3),
    ]  # fmt: skip
    assert "the largest was 90" in found.figures["staleness"].caption


def test_scaling_has_a_line_for_each_strategy_over_its_ranks(whole: Drawn) -> None:
    values = whole.values("speed-against-ranks", "line")
    ring = {v["ranks"]: v["value"] for v in values if v["line"] == "ring"}
    runs = runs_of(whole)
    for ranks in (2, 4):
        speeds = [
            runs[f"ring ({ranks} ranks)", seed].time.samples_per_second or 0 for seed in range(3)
        ]
        assert ring[ranks] == pytest.approx(sum(speeds) / 3, rel=1e-4)
    ideal = [v for v in whole.values("speed-against-ranks", "ranks") if "line" not in v]
    assert [v["ranks"] for v in ideal] == [2, 4]
    assert ideal[1]["value"] == pytest.approx(2 * ideal[0]["value"], rel=1e-4)
    assert ideal[0]["value"] == ring[2]  # the fastest that is distributed


@pytest.mark.lab
def test_differences_are_paired_by_seed_against_the_baseline(tmp_path: Path) -> None:
    keep(tmp_path, all_runs(), trace=False)
    to_single = drawn(tmp_path).values("difference-in-final-accuracy", "pairs")
    assert {v["strategy"]: v["mean"] for v in to_single} == {
        "ring": pytest.approx(0.01), "server": pytest.approx(0.02), "switch": pytest.approx(0.03),
    }  # fmt: skip
    to_ring = drawn(tmp_path, "ring").values("difference-in-time-to-target", "pairs")
    single = next(v for v in to_ring if v["strategy"] == "one process")
    assert single["mean"] == pytest.approx(-0.5 * 1.1 * 1.04, rel=1e-4)
    assert single["low"] < single["mean"] < single["high"] < 0
    assert single["certain"]


def test_files_are_written_whole(whole: Drawn, tmp_path: Path) -> None:
    figure = whole.figures["loss-against-seconds"]
    save(figure, tmp_path / "figures")
    svg, png = (tmp_path / "figures" / f"{figure.name}.{kind}" for kind in ("svg", "png"))
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") >= 2 * 680  # its width: twice the figure's
    assert len(content) > 20_000
    text = "".join(ElementTree.fromstring(svg.read_text(encoding="utf-8")).itertext())
    assert figure.title in text
    assert "one process" in text
    assert sorted(path.name for path in png.parent.iterdir()) == [png.name, svg.name]


@pytest.mark.lab
def test_two_drawings_of_the_same_runs_are_equal(tmp_path: Path) -> None:
    keep(tmp_path, all_runs(seeds=(0, 1)))
    first, second = drawn(tmp_path), drawn(tmp_path)
    assert {n: f.spec for n, f in first.figures.items()} == {
        n: f.spec for n, f in second.figures.items()
    }

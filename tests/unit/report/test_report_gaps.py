"""Figures of runs that lack something, and styles of many: nothing empty, nothing alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.drawn import STRATEGIES, all_runs, drawn, drawn_alone, keep, record
from tests.support.recorded import changed

from orchestra.records.files import run_folder
from orchestra.records.store import RunStore, collect
from orchestra.report.figures.bars import staleness
from orchestra.report.figures.curves import curves
from orchestra.report.figures.results import time_to_target
from orchestra.report.study import INK, Study


def some_study(labels: Sequence[str], tmp_path: Path) -> Study:
    keep(tmp_path, [record(label) for label in labels], trace=False)
    return Study(collect([tmp_path]))


def test_sixteen_strategies_can_be_told_apart_without_colour(tmp_path: Path) -> None:
    styles = some_study([f"strategy {n}" for n in range(16)], tmp_path).styles
    assert len({(style.dash, style.shape) for style in styles.values()}) == 16
    assert len({(style.colour, style.dash) for style in styles.values()}) == 16


def test_one_process_has_the_colour_of_text_and_a_shape_of_its_own(tmp_path: Path) -> None:
    styles = some_study([*STRATEGIES], tmp_path).styles
    assert [name for name, style in styles.items() if style.colour == INK] == ["one process"]
    assert len({style.shape for style in styles.values()}) == 4


def test_a_style_is_that_of_the_strategy_at_any_ranks_and_place(tmp_path: Path) -> None:
    (source,) = collect([keep(tmp_path, all_runs(ranks=(2, 4), seeds=(0,)))])
    styles = Study([source]).styles
    assert styles["ring (2 ranks)"] == styles["ring (4 ranks)"]
    again = RunStore(tmp_path)
    again.runs = source.runs[::-1]
    assert Study([again]).styles == styles


def test_without_a_completed_run_there_is_no_figure(tmp_path: Path) -> None:
    failed = record("ring", status="failed", failure="rank 1 was killed")
    assert not drawn(keep(tmp_path, [failed])).figures


def test_a_failed_run_leaves_the_others_figures(tmp_path: Path) -> None:
    failed = changed(record("ring", seed=1), status="failed", bytes_sent=0, train_seconds=None)
    found = drawn(keep(tmp_path, [record("ring"), failed, record("one process")]))
    seeds = {v["seed"] for v in found.values("time-to-target", "seed")}
    assert seeds == {0}
    assert found.values("bytes-sent", "sent")[0]["sent"] in (0.0, 2.0)


def test_updates_that_were_never_stale_are_not_drawn(tmp_path: Path) -> None:
    fresh = record("ring", staleness_histogram={"0": 20})
    found = drawn_alone(keep(tmp_path, [fresh, record("server")], trace=False), staleness)
    assert {v["strategy"] for v in found.values("staleness", "share")} == {"server"}
    assert "not drawn" in found.figures["staleness"].caption


def test_one_seed_has_no_intervals_and_one_rank_count_no_scaling(tmp_path: Path) -> None:
    found = drawn(keep(tmp_path, all_runs(seeds=(0,)))).figures
    assert not [name for name in found if "difference" in name or "against-ranks" in name]
    assert "thin" not in found["loss-against-seconds"].caption


def test_without_a_target_no_figure_speaks_of_one(tmp_path: Path) -> None:
    keep(tmp_path, all_runs(ranks=(2, 4)), trace=False)
    (tmp_path / "experiment.yaml").write_text("{name: sample}")
    found = drawn(tmp_path)
    assert not [name for name in found.figures if "target" in name]
    assert not [f for f in found.figures.values() if "target" in f.caption.lower()]
    assert "difference-in-training" in found.figures


def test_strategies_that_missed_the_target_are_last_and_say_so(tmp_path: Path) -> None:
    runs = [
        record("one process", time_to_target_seconds=None),
        record("one process", seed=1, time_to_target_seconds=None),
        record("ring", time_to_target_seconds=None),
        record("ring", seed=1),
        record("switch"),
        record("switch", seed=1),
    ]
    folder = keep(tmp_path, runs, trace=False)
    texts = drawn_alone(folder, time_to_target).values("time-to-target", "text")
    assert [text["strategy"] for text in texts] == ["switch", "ring", "one process"]
    assert "seeds" not in texts[0]["text"]
    assert texts[1]["text"].endswith("(1 of 2 seeds)")
    assert texts[2]["text"] == "not reached"


def test_runs_without_what_lies_beside_the_record_still_have_figures(tmp_path: Path) -> None:
    bare = record("ring", staleness_histogram={}, setup={}, by_rank=(), bytes_sent=0)
    keep(tmp_path, [bare], trace=False)
    for path in run_folder(tmp_path, "ring", 4, 0).iterdir():
        path.unlink()
    assert [*drawn(tmp_path).figures] == [
        "time-to-target",
        "metric-against-time",
        "seconds-by-part",
    ]


def test_a_loss_that_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    keep(tmp_path, [record("ring")], trace=False)
    folder = run_folder(tmp_path, "ring", 4, 0)
    text = (folder / "curve.jsonl").read_text()
    broken = text.replace('"loss": 3.0', '"loss": null')
    assert broken != text
    (folder / "curve.jsonl").write_text(broken)
    values = drawn_alone(tmp_path, curves).values("loss-against-seconds", "seed")
    assert len(values) == 2 * 3  # three snapshots of the seed, and of the mean


def test_no_layer_is_without_a_value(tmp_path: Path) -> None:
    """An axis over nothing is a warning in the browser."""
    keep(tmp_path, all_runs(), trace=False)
    found = drawn(tmp_path).figures
    for figure in found.values():
        assert all(figure.spec["datasets"].values())
    for layer in found["difference-in-time-to-target"].spec["layer"]:
        assert len(layer.get("transform", ())) <= 1  # that which hides

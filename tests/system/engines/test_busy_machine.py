"""What other programs took of the machine while runs were made: found, recorded and told; and the
head of a report, which says where its runs took place."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.drawn import drawn_alone, keep, record
from tests.support.pages import Page
from tests.support.training import settings

from orchestra.cli import compare
from orchestra.cluster import load_cluster
from orchestra.cluster.file import cluster_text
from orchestra.engines.processes import launch
from orchestra.engines.processes.system import busy_seconds
from orchestra.engines.processes.training import program
from orchestra.experiments.comparison import Comparison
from orchestra.records.combine import combine
from orchestra.records.files import CLUSTER, run_folder
from orchestra.records.record import Asked, Batching, Pacing, RunRecord
from orchestra.records.report import Usage, busy_with_others
from orchestra.report import page as report_page
from orchestra.report.figures.cluster import clusters
from orchestra.strategies.all_reduce import AllReduce
from orchestra.trainer.settings import Run

STAT = """\
cpu  600 6 60 9000 70 1 2 3 0 0
cpu0 100 1 10 1000 20 1 0 3 50 0
cpu1 200 2 20 3000 20 0 0 0 0 0
cpu2 300 3 30 5000 30 0 2 0 0 0
intr 7 0
"""


def test_the_seconds_of_all_programs_are_those_of_the_cores_that_may_be_used() -> None:
    assert busy_seconds(STAT, (0, 1), ticks=100) == pytest.approx((115 + 222) / 100)
    assert busy_seconds(STAT, (2,), ticks=100) == pytest.approx(3.35)


def used(machine: str, own: float, busy: float | None, passed: float = 10.0) -> Usage:
    return Usage(machine, 4, passed, own, busy)


@pytest.mark.parametrize(
    ("usages", "part"),
    [
        ([used("a", 10, 20), used("a", 10, 20)], 0.0),
        ([used("a", 10, 28), used("a", 8, 27, passed=9.0)], 0.25),
        ([used("a", 10, 9)], 0.0),  # ticks are coarse
        ([used("a", 10, 12), used("b", 10, 30)], 0.5),  # the busiest of two machines
        ([used("a", 0.0, 0.4, passed=0.1)], None),
        ([used("a", 1, None)], None),
        ([None, None], None),
    ],
)
def test_what_others_took(usages: list[Usage | None], part: float | None) -> None:
    assert busy_with_others(usages) == (None if part is None else pytest.approx(part))


def test_each_rank_reports_what_it_used_while_its_stopwatch_ran(tmp_path: Path) -> None:
    run = settings(AllReduce(), 2, "images()", steps=3, batch_size=4)
    reports = launch(program, (run, tmp_path), 2).results
    for report in reports:
        assert report.usage.passed > 0
        assert report.usage.own > 0
    if sys.platform == "linux":
        assert all(report.usage.busy is not None for report in reports)
    long = [replace(r, usage=replace(r.usage, passed=2.0, own=1.0, busy=3.0)) for r in reports]
    cores = reports[0].usage.cores
    assert combine(long, *about(run)).machine.busy_with_others == pytest.approx(
        0.5 / cores, abs=1e-3
    )


def about(run: Run) -> tuple[Asked, Pacing, Batching]:
    """What ranks do not know of their record."""
    return Asked(run.name, "", "processes", 2, 2, 0, 0), Pacing(), Batching()


def printed(
    folder: Path, records: list[RunRecord], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Page]:
    """On the terminal and on the page, of a comparison with these runs."""
    keep(folder, records, trace=False)
    console = Console(record=True, width=1000, highlight=False)
    monkeypatch.setattr(compare, "Terminal", lambda: console)
    compare.print_comparison(Comparison(records, folder, None, len(records), (), False))
    monkeypatch.setattr(report_page, "figures", lambda _: [])
    return console.export_text(), Page(report_page.write_report([folder], out=folder))


def test_a_busy_machine_is_told_on_the_terminal_and_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [record("ring", busy_with_others=0.43), record("server", busy_with_others=0.05)]
    terminal, page = printed(tmp_path, records, monkeypatch)
    for text in (terminal, " ".join(page.text.split())):
        assert "The machine was busy: in 1 of 2 runs (ring)" in text
    assert page.data["rows"][0]["runs"][0]["busy_with_others"] == 0.43


def test_a_quiet_machine_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record("ring", busy_with_others=0.05), record("server")]
    terminal, page = printed(tmp_path, records, monkeypatch)
    assert "busy" not in terminal
    assert "The machine was busy" not in page.text


def simulated_record(label: str, **changes: Any) -> RunRecord:
    costs = "assumed: 20 GFLOP/s; this machine is not calibrated"
    facts: dict[str, Any] = {
        "engine": "simulation",
        "cluster": "two_sites(4)",
        "costs": costs,
        **changes,
    }
    return record(label, **facts)


def test_a_simulated_report_begins_with_its_cluster_and_cost_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = simulated_record("ring")
    inner = run_folder(tmp_path, "ring", 4, 0)
    keep(tmp_path, [ring], trace=False)
    cluster = load_cluster("two_sites(4)", where="test", folder=Path())
    (inner / CLUSTER).write_text(cluster_text(cluster))
    found = drawn_alone(tmp_path, clusters).figures
    (name,) = found
    monkeypatch.setattr(report_page, "figures", lambda _: [*found.values()])
    page = Page(report_page.write_report([tmp_path], out=tmp_path))
    head, _, rest = page.source.partition("</header>")
    assert f'data-figure="{name}"' in head
    assert f'data-figure="{name}"' not in rest
    assert f"width: {found[name].least_width}px" in head
    assert "<dt>cost model</dt><dd>assumed: 20 GFLOP/s; this machine is not calibrated" in head
    assert "<dt>simulated cluster</dt><dd>two_sites(4)" in head
    assert "<dt>machine</dt>" not in page.source


def test_a_cost_model_that_is_not_to_be_trusted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubts = ["other programs took 68% of the processor time"]
    records = [simulated_record("ring", costs="calibrated: abacus", costs_doubts=doubts)]
    terminal, page = printed(tmp_path, records, monkeypatch)
    assert "cost model: calibrated: abacus; NOT to be trusted\n" in terminal
    for text in (terminal, " ".join(page.text.split())):
        assert "The cost model is not to be trusted" in text
    assert '<dd class="doubtful">calibrated: abacus' in page.source


def test_a_simulation_tells_its_cost_model_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, _ = printed(tmp_path, [simulated_record("ring")], monkeypatch)
    assert "cost model: assumed: 20 GFLOP/s; this machine is not calibrated\n" in terminal

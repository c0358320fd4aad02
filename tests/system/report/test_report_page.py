"""The page of a report: its numbers are those of the records, and nothing in it can do harm."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from scipy import stats
from tests.support.drawn import all_runs, keep, record
from tests.support.pages import Page, Shown

from orchestra.cli.main import main
from orchestra.errors import InputError
from orchestra.records.store import collect, write_summary
from orchestra.report.page import write_report
from orchestra.report.study import Study

EVIL = "<img src=x onerror=alert(1)>'\""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with everything, reported on."""
    folder = keep(tmp_path_factory.mktemp("whole"), all_runs())
    write_report([folder], folder)
    return folder


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everywhere but in `whole`: neither images nor the plotting library, which take seconds."""
    monkeypatch.setattr("orchestra.report.page.save", lambda figure, folder: None)
    monkeypatch.setattr("orchestra.report.page.library", lambda: "")


def summary(folder: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())["runs"]
    return runs


FIGURES: Mapping[str, Callable[[dict[str, Any]], float | None]] = {
    "ranks": lambda run: run["ranks"],
    "global_batch": lambda run: run["global_batch"],
    "time_to_target_seconds": lambda run: run["time_to_target_seconds"],
    "metrics.accuracy": lambda run: run["metrics"]["accuracy"],
    "final_loss": lambda run: run["final_loss"],
    "train_seconds": lambda run: run["train_seconds"],
    "samples_per_second": lambda run: run["samples_per_second"],
    "setup_seconds": lambda run: run["setup_seconds"],
    "bytes_sent": lambda run: run["bytes_sent"] / 1e6,
    "staleness_mean": lambda run: run["staleness"] and run["staleness"]["mean"],
    "switched_at_step": lambda run: run["switched_at_step"],
}
COMPARED = ("time_to_target_seconds", "metrics.accuracy", "final_loss", "train_seconds")


def half_a_digit(shown: str) -> float:
    """How far a number may be from the one that it was rounded from."""
    number = shown.split()[0].split("e")
    decimals = len(number[0].partition(".")[2]) - (int(number[1]) if number[1:] else 0)
    return 0.5 * 10.0**-decimals * (1 + 1e-9)


def of_label(runs: list[dict[str, Any]], label: str, key: str) -> dict[int, float]:
    read = {run["seed"]: FIGURES[key](run) for run in runs if run["name"] == label}
    return {seed: value for seed, value in read.items() if value is not None}


@pytest.mark.parametrize("key", FIGURES)
def test_every_number_of_the_table_is_that_of_the_records(whole: Path, key: str) -> None:
    runs, page = summary(whole), Page(whole / "report.html")
    assert {*page.table} == {run["name"] for run in runs}
    for label, cells in page.table.items():
        values = [*of_label(runs, label, key).values()]
        shown = cells[key]
        if not values:
            assert "data-value" not in shown.attributes
            continue
        assert float(shown.attributes["data-value"]) == pytest.approx(statistics.fmean(values))
        if key == "switched_at_step":
            assert shown.text == "5, 5 and 5"
            continue
        mean, *spread = shown.numbers()
        assert abs(mean - statistics.fmean(values)) <= half_a_digit(shown.text), label
        if key not in ("ranks", "global_batch"):
            assert float(shown.attributes["data-spread"]) == statistics.stdev(values)
            expected = pytest.approx(statistics.stdev(values), abs=half_a_digit(shown.text))
            assert spread == [expected], label


@pytest.mark.parametrize("key", COMPARED)
def test_differences_are_paired_by_seed_with_an_interval(whole: Path, key: str) -> None:
    runs, page = summary(whole), Page(whole / "report.html")
    base = of_label(runs, "one process", key)
    for label, cells in page.table.items():
        if label == "one process":
            assert cells[key].details == []
            continue
        differences = [value - base[seed] for seed, value in of_label(runs, label, key).items()]
        mean, interval = cells[key].details[-2:]
        (shown,), limits = cells[key].numbers(mean), cells[key].numbers(interval)
        step = half_a_digit(interval.strip("[]").split(",")[0])
        assert shown == pytest.approx(statistics.fmean(differences), abs=step)
        test = stats.ttest_1samp(differences, 0) if len({*differences}) > 1 else None
        if test is not None:
            expected = test.confidence_interval(0.95)
            assert limits == pytest.approx([expected.low, expected.high], abs=step)
    assert "over n = 3 pairs" in page.text
    compared = sum(
        any(text.startswith("[") for text in cell.details)
        for row in page.table.values()
        for cell in row.values()
    )
    expected = f"of these {compared} comparisons chance alone marks {compared / 20:.1f}"
    assert expected in page.text


def test_the_page_holds_the_records_themselves(whole: Path) -> None:
    data = Page(whole / "report.html").data
    held = [run for row in data["rows"] for run in row["runs"]]
    order = [(run["name"], run["seed"]) for run in held]
    assert sorted(held, key=json.dumps) == sorted(summary(whole), key=json.dumps)
    assert len({*order}) == len(order) == 12
    ring = next(row for row in data["rows"] if row["name"] == "ring")
    difference = ring["figures"]["train_seconds"]["difference"]
    assert difference["n"] == 3
    assert difference["low"] < difference["mean"] < difference["high"]


def test_the_table_says_what_is_special(whole: Path) -> None:
    page = Page(whole / "report.html")
    assert page.table["ring"]["bytes_sent"].details == ["estimated"]
    assert page.table["server"]["staleness_mean"].details == ["at most 2"]
    assert page.table["server"]["ranks"].details == ["3\u202fworkers", "1\u202fserver"]
    assert "Mean ± standard deviation over 3 seeds." in page.text
    assert "completed" not in page.table["ring"]  # as all rows did
    assert "switched after step 5, after 25\u202f% of the samples" in page.text
    assert page.text.index("NOT tuned") < page.text.index("All figures, best first")


def test_every_figure_is_there_with_words_and_files(whole: Path) -> None:
    page = Page(whole / "report.html")
    names = page.of("figure", "data-figure")
    assert "loss-against-seconds" in names
    assert {*json.loads(page.scripts["orchestra-figures"])} == {*names}
    files = {path.name for path in (whole / "figures").iterdir()}
    assert files == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    labels = [label for label in page.of("div", "aria-label") if ". " in label]
    assert len(labels) == len(names)


def test_nothing_is_fetched(whole: Path) -> None:
    page = Page(whole / "report.html")
    assert page.of("script", "src") == []
    assert page.of("link", "href") == []
    assert all(not link.startswith("http") for link in page.of("a", "href"))
    (policy,) = [text for text in page.of("meta", "content") if "default-src" in text]
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_links_lead_to_files_beside_the_page(whole: Path, tmp_path: Path) -> None:
    path = write_report([whole], tmp_path / "elsewhere" / "deep")
    links = [link for link in Page(path).of("a", "href") if link.endswith("gz")]
    assert len(links) == 9
    assert all((path.parent / unquote(link)).exists() for link in links)


def test_timelines_travel_inside_the_page(whole: Path) -> None:
    page = Page(whole / "report.html")
    copies = page.of("button", "data-trace")
    assert len(copies) == 3  # of the first seed of each strategy with several workers
    assert b"traceEvents" in gzip.decompress(base64.b64decode(copies[0]))


def test_timelines_stay_outside_where_they_are_large(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestra.report.page.ROOM", 100)
    page = Page(write_report([whole], tmp_path))
    assert page.of("button", "data-trace") == []
    assert any(link.endswith("trace.json.gz") for link in page.of("a", "href"))


def test_labels_and_messages_are_text_and_nothing_else(tmp_path: Path) -> None:
    label = EVIL.replace("/", "")
    runs = [
        record(label, strategy=f"Mine({EVIL!r})", notices=(EVIL,)),
        record("two", status="failed", failure=f"{EVIL}\n</script>{EVIL}"),
        record("</script><script>alert(2)", left_out={"1": "</script>"}),
    ]
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "experiment.yaml").write_text("{name: '</title><script>alert(3)</script>'}")
    write_summary(folder, "evil", runs)
    page = Page(write_report([folder], folder))
    assert [tag for tag, _ in page.tags].count("script") == 3 + bool(page.of("figure", "id"))
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert label in page.table
    assert EVIL in page.text
    assert json.loads(page.scripts["orchestra-data"])


def test_what_failed_and_what_was_not_run_is_told(tmp_path: Path) -> None:
    runs = [record("one process"), record("ring", status="failed", failure="rank 1 died\nTrace 7")]
    keep(tmp_path, runs)
    not_run = [{"name": "server", "ranks": 1, "reason": "needs a worker"}]
    write_summary(tmp_path, "sample", runs, not_run)
    page = Page(write_report([tmp_path], tmp_path))
    text = " ".join(page.text.split())
    assert "ring, seed 0, failed: rank 1 died all of it rank 1 died Trace 7" in text
    assert "server (1 ranks), not run: needs a worker" in text
    assert page.table["ring"]["completed"].text == "0 of 1"
    assert page.table["ring"]["train_seconds"].text == "–"
    assert [*page.table] == ["one process", "ring"]


def test_a_rule_that_never_fired_is_told(tmp_path: Path) -> None:
    runs = [record("switch", switched_at_step=None), record("switch", seed=1, switched_at_step=9)]
    page = Page(write_report([keep(tmp_path, runs)], tmp_path))
    assert page.table["switch"]["switched_at_step"].text == "9"
    assert page.table["switch"]["switched_at_step"].details == ["never in the others"]
    assert "never switched" in page.text


def test_all_failed_is_still_a_report(tmp_path: Path) -> None:
    keep(tmp_path, [record("ring", status="failed", failure="boom")])
    page = Page(write_report([tmp_path], tmp_path))
    assert "There is no answer: none of 1 run was completed" in page.text
    assert page.of("figure", "id") == []


def test_tuning_is_shown_trial_by_trial(tmp_path: Path) -> None:
    keep(tmp_path, [record("ring")])
    trial = {"status": "completed", "loss": 0.5, "failure": None}
    choice = {
        "name": "ring", "ranks": 4, "chosen": 1, "settings": {"optimizer.lr": 0.2},
        "trials": [
            {"trial": 0, "settings": {"optimizer.lr": 0.1}, "score": 0.8, **trial},
            {"trial": 1, "settings": {"optimizer.lr": 0.2}, "score": 0.9125, **trial},
            {"trial": 2, "settings": {"optimizer.lr": 9.0}, "score": None, **trial,
             "status": "failed"},
        ],
    }  # fmt: skip
    tuning = {"trials": 3, "by": "target", "metric": "accuracy", "better": "higher", "seed": 1000}
    (tmp_path / "tuning.json").write_text(json.dumps({**tuning, "choices": [choice]}))
    text = " ".join(Page(write_report([tmp_path], tmp_path)).text.split())
    assert "tuned, 3 trials" in text
    assert "optimizer.lr 0.2 0.9125 0.5000 chosen" in text.replace(" ring 4", "")
    assert "optimizer.lr 9.0 failed" in text


def test_the_methods_are_enough_to_repeat_it(whole: Path, tmp_path: Path) -> None:
    place = whole / "runs" / "ring" / "4-ranks" / "seed-0"
    environment = {"processor": "A fine one", "cores": 2, "command": ["/bin/orchestra", "compare"]}
    first = whole / "runs" / "one process" / "4-ranks" / "seed-0" / "environment.json"
    first.write_text(json.dumps(environment))
    assert place.is_dir()
    text = Page(write_report([whole], tmp_path)).text
    assert "A fine one, 2 cores" in text
    assert "orchestra compare experiment.yaml --out repeated" in text
    assert "/bin" not in text
    assert "metric: accuracy" in text


def test_equal_final_parameters_are_named(tmp_path: Path) -> None:
    runs = [
        record(label, seed=seed, parameters_sha256=f"{digest}{seed}")
        for label, digest in (("one process", "a"), ("ring", "b"), ("server", "b"))
        for seed in (0, 1)
    ]
    text = Page(write_report([keep(tmp_path, runs)], tmp_path)).text
    assert "Bit for bit the same final parameters under every seed: ring and server." in text
    assert "seed 1: ring and server" in text


def test_a_row_whose_name_has_an_and_is_one_row(tmp_path: Path) -> None:
    runs = [
        record(label, parameters_sha256=digest)
        for label, digest in (("one process", "a"), ("ring and tree", "b"))
    ]
    text = Page(write_report([keep(tmp_path, runs)], tmp_path)).text
    assert "No two rows ended with the same bits under every seed." in text


def test_a_training_is_reported_on_like_a_comparison(tmp_path: Path) -> None:
    folder = tmp_path / "training"
    keep(folder, [record("ring")])
    inner = folder / "runs" / "ring" / "4-ranks" / "seed-0"
    (inner / "experiment.yaml").write_text((folder / "experiment.yaml").read_text())
    write_summary(inner, "sample", [record("ring")])
    page = Page(write_report([inner], tmp_path / "out"))
    assert [*page.table] == ["ring"]
    assert "loss-against-seconds" in page.of("figure", "data-figure")


def test_energy_is_in_the_table_where_the_watts_are_known(tmp_path: Path) -> None:
    known = record("ring", energy_joules=2500.0, energy_to_target_joules=1250.0)
    folder = keep(tmp_path / "known", [known, record("gossip")], trace=False)
    page = Page(write_report([folder], tmp_path / "out"))
    ring, gossip = page.table["ring"], page.table["gossip"]
    assert ring["energy_joules"].numbers() == [2.5]
    assert ring["energy_to_target_joules"].numbers() == [1.25]
    assert gossip["energy_joules"].text == "\N{EN DASH}"
    assert "energykJ" in page.text  # the head of the column, and its unit
    unknown = keep(tmp_path / "unknown", [record("ring")], trace=False)
    assert "energykJ" not in Page(write_report([unknown], tmp_path / "out-2")).text


def test_sources_that_differ_are_named_first(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    keep(first, [record("ring")])
    keep(second, [record("ring"), record("one process")])
    (first / "experiment.yaml").write_text("{name: one, batch_size: 32}")
    (second / "experiment.yaml").write_text("{name: other, batch_size: 64}")
    page = Page(write_report([first, second], tmp_path / "out"))
    assert {*page.table} == {"ring [first]", "ring [second]", "one process"}
    answer = page.text.index("This is not one fair comparison, for the runs differ in batch_size:")
    warning = page.text.index("The runs differ in batch_size: 32 (first); 64 (second).")
    assert answer < warning < page.text.index("All figures, best first")


def test_files_that_are_missing_leave_gaps_only(tmp_path: Path) -> None:
    keep(tmp_path, [record("ring"), record("one process")], trace=False)
    for path in [*tmp_path.rglob("curve.jsonl"), *tmp_path.rglob("steps-*")]:
        path.unlink()
    page = Page(write_report([tmp_path], tmp_path))
    assert page.table["ring"]["train_seconds"].text
    assert "loss-against-seconds" not in page.of("figure", "data-figure")
    assert page.of("button", "data-trace") == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    keep(tmp_path, [record("ring")])
    path = next(tmp_path.rglob("curve.jsonl"))
    path.write_text('{"samples": 1')
    with pytest.raises(InputError, match=r"curve\.jsonl:1: is damaged"):
        write_report([tmp_path], tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_step_that_was_cut_off_while_it_was_written_is_passed_over(tmp_path: Path) -> None:
    keep(tmp_path, [record("ring")])
    path = next(tmp_path.rglob("steps-rank-0.jsonl"))
    whole = path.read_text()
    path.write_text(whole + '{"step": 21, "sec')
    write_report([tmp_path], tmp_path)
    path.write_text('{"step": 21, "sec\n' + whole)
    with pytest.raises(InputError, match=r"steps-rank-0\.jsonl:1: is damaged"):
        write_report([tmp_path], tmp_path)


def test_lines_of_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    keep(tmp_path, [record("ring")])
    path = next(tmp_path.rglob("steps-rank-0.jsonl"))
    lines = path.read_text().splitlines(keepends=True)
    for mixed in ([*lines, *lines], [lines[0], *lines], [lines[1], lines[0], *lines[2:]]):
        path.write_text("".join(mixed))
        with pytest.raises(InputError, match=r"rank-0\.jsonl:\d+: step \d+ stands after step \d+"):
            write_report([tmp_path], tmp_path)


def test_a_report_replaces_the_one_before_whole(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    path = write_report([whole], tmp_path, baseline="ring")
    assert path == tmp_path / "report.html"
    assert "the row ring of the same seed" in path.read_text()
    assert [file for file in tmp_path.rglob("*") if file.name.endswith("partial")] == []


def test_not_a_number_does_not_reach_the_page(tmp_path: Path) -> None:
    runs = [record("ring", final_loss=math.nan, metrics={"accuracy": math.inf})]
    page = Page(write_report([keep(tmp_path, runs)], tmp_path))
    assert "NaN" not in page.scripts["orchestra-data"]
    assert "final_loss" not in page.table["ring"], "a column in which nothing stands is left out"
    assert page.table["ring"]["train_seconds"].text != "–"


def test_the_command_writes_into_the_folder_itself(
    whole: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep(tmp_path / "one", [record("ring")])
    assert main(["report", "one"]) == 0
    assert capsys.readouterr().out == "one/report.html\n"
    assert (tmp_path / "one" / "report.html").exists()
    assert main(["report", "one", str(whole)]) == 0
    assert capsys.readouterr().out == "report/report.html\n"
    keep(tmp_path / "two", [record("server")])
    assert main(["report", "one", "two", "--baseline", "one", "--out", "both"]) == 0
    assert Study(collect([Path("one"), Path("two")]), "one").baseline == "ring"
    assert main(["report", "one", "--out", "there"]) == 0
    assert (tmp_path / "there" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        (["one", "--baseline", "rong"], "--baseline: no row 'rong'; did you mean 'ring'?"),
        (["one", "--out", "file"], "file: cannot be made: Not a directory; choose another --out"),
    ],
)
def test_bad_input_is_answered_in_a_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    keep(tmp_path / "one", [record("ring")])
    assert main(["report", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    folder = keep(tmp_path / "one", [record("ring")], trace=False)
    code = (
        "import sys; from orchestra.cli.main import main; "
        f"main(['report', {str(folder)!r}, '--out', {str(tmp_path)!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_shown_numbers_are_read_back() -> None:
    assert Shown({}, "1\u202f234.5 ± 0.2").numbers() == [1234.5, 0.2]
    assert Shown({}).numbers("[\u22121.5, +2.0]") == [-1.5, 2.0]


def test_the_table_as_csv_and_latex(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(whole), "--out", str(tmp_path), "--csv", "--latex"]) == 0
    names = ["report.html", "table.csv", "table.tex"]
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in names]
    with (tmp_path / "table.csv").open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert [*rows] == ["one process", "ring", "server", "switch"]  # best first
    times = of_label(summary(whole), "ring", "train_seconds").values()
    assert float(rows["ring"]["train_seconds"]) == pytest.approx(statistics.fmean(times))
    assert float(rows["ring"]["train_seconds_sd"]) == pytest.approx(statistics.stdev(times))
    assert float(rows["ring"]["train_seconds_low"]) < float(
        rows["ring"]["train_seconds_difference"]
    )
    assert (rows["ring"]["train_seconds_n"], rows["ring"]["staleness_mean"]) == ("3", "")
    assert rows["one process"]["train_seconds_difference"] == ""
    lines = (tmp_path / "table.tex").read_text().splitlines()
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert [line.partition(" & ")[0] for line in body] == [*rows]
    columns = lines[1].count("r", lines[1].index("{l"))
    assert {line.count(" & ") for line in body} == {columns}
    assert all(r"$\pm$" in line and line.endswith(r" \\") for line in body)


def test_no_label_breaks_the_latex(tmp_path: Path) -> None:
    name = r"50% & a_b #1 $x {y}"
    write_report([keep(tmp_path, [record(name)], trace=False)], tmp_path, tables=["latex"])
    text = (tmp_path / "table.tex").read_text()
    assert r"50\% \& a\_b \#1 \$x \{y\} & " in text

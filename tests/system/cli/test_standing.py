"""When to use which strategy, and where it was seen best, in `orchestra list`."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT

from orchestra.cli.list import variants_of
from orchestra.cli.main import main
from orchestra.cluster import CLUSTERS
from orchestra.experiments.file import load
from orchestra.settings import write
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES, MeasuredStanding, normal
from orchestra.tasks import TASKS

COMPARED = [
    write(strategy, STRATEGIES)
    for strategy in load(ROOT / "examples" / "strategies.yaml", [], {}).strategies.values()
]
KNOWN = [(name, STRATEGIES.resolve(name, where="here")) for name in STRATEGIES.names()]
SHIPPED = {name: target for name, target in KNOWN if issubclass(target, Strategy)}
TABLE = MeasuredStanding(
    {
        "one": {"Single()": 2.0, "AllReduce('ring')": 2.1, "LocalSGD(8)": 2.11, "Gossip()": None},
        "other": {"Single()": None, "AllReduce('ring')": 3.2, "PairwiseAveraging(Complete())": 3.1},
        "too hard": {"Gossip(Ring())": None},
    },
    "measured by hand",
    {
        "lan": {
            "Single()": 2.0,
            "AllReduce('ring')": 1.0,
            "Gossip(Ring())": 1.04,
            "LocalSGD(8)": None,
        }
    },
    "simulated by hand",
)


@pytest.fixture(scope="module")
def study() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "studies" / "standing.py"))


def test_best_is_the_fastest_and_what_is_within_5_percent_of_it() -> None:
    assert TABLE.good_on("Single()") == ["one"]
    assert TABLE.good_on("AllReduce") == ["one", "other"]  # however it is written
    assert TABLE.good_on("PairwiseAveraging()") == ["other"]
    assert TABLE.good_on("LocalSGD()") == TABLE.good_on("Gossip()") == []
    assert TABLE.good_in_simulation("AllReduce") == TABLE.good_in_simulation("Gossip") == ["lan"]
    assert TABLE.good_in_simulation("LocalSGD()") == TABLE.good_in_simulation("Single()") == []


def test_every_strategy_says_when_to_use_it_and_what_is_compared_is_listed() -> None:
    listed = []
    for name, strategy in SHIPPED.items():
        assert strategy.use
        for notation, use in variants_of(name, strategy):
            assert use
            assert normal(notation).startswith(f"{name}(")
            listed.append(normal(notation))
    assert len(listed) == len(set(listed))
    assert set(COMPARED) <= set(listed)


def test_the_strategies_with_their_variants_and_where_each_was_fast(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MeasuredStanding, "shipped", lambda: TABLE)
    monkeypatch.setenv("COLUMNS", "200")  # so that no line is broken
    assert main(["list", "strategies"]) == 0
    text = capsys.readouterr().out
    lines = [line.strip() for line in text.splitlines()]
    for notation, seen in (
        ('AllReduce("ring")', "fast on one, other in real runs and on lan in simulated runs"),
        ("Single()", "fast on one in real runs"),
        ("Gossip()", "fast on lan in simulated runs"),
        ("PairwiseAveraging()", "fast on other in real runs"),
    ):
        place = lines.index(notation)
        assert seen in lines[place + 1 : place + 3]
    assert text.count("   fast on ") == 4
    assert "measured by hand" in text
    assert "simulated by hand" in text
    assert "digits28" not in text


def test_the_shipped_table_is_of_the_strategies_and_tasks_that_there_are() -> None:
    table = json.loads((ROOT / "src/orchestra/strategies/standing.json").read_text())
    clusters = table.get("simulated", {"clusters": {}})["clusters"]
    assert set(table["tasks"]) <= set(TASKS.names())
    assert set(clusters) <= set(CLUSTERS.names())
    for measured in (*table["tasks"].values(), *clusters.values()):
        assert list(measured["seconds"]) == COMPARED
        assert any(measured["seconds"].values())
        assert measured["seeds"]
    assert MeasuredStanding.shipped().good_on("Single()")


def test_the_study_takes_the_median_and_knows_every_task(study: dict[str, Any]) -> None:
    labels = load(ROOT / study["EXPERIMENT"], [], {}).strategies
    times = {label: [3.0, 1.0, 2.00049] for label in labels}
    times["ring"] = [None, 1.0, None]  # type: ignore[list-item]
    times["tree"] = [None, 1.0, 5.0]  # type: ignore[list-item]
    runs = [
        {"name": label, "time_to_target_seconds": time}
        for label, of_seeds in times.items()
        for time in of_seeds
    ]
    found = study["seconds_to_target"](runs)
    assert list(found) == COMPARED
    assert found["AllReduce('ring')"] is None
    assert found["AllReduce('tree')"] == 5.0
    assert found["Single()"] == 2.0
    for task in study["TASKS"]:
        experiment = load(ROOT / study["EXPERIMENT"], study["changes"](task), {})
        assert experiment.task.startswith(f"{task}(")
        assert experiment.training.target is not None


def test_the_study_simulates_every_preset_and_keeps_the_other_part(
    study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"lan_1gbit", "one_host", "stragglers"} < set(study["PRESETS"]) < set(CLUSTERS.names())
    for cluster in study["PRESETS"]:
        experiment = load(ROOT / study["EXPERIMENT"], study["changes"](cluster), {})
        assert experiment.training.cluster.startswith(cluster)
        assert experiment.training.engine == "simulation"
    found = {"command": "x", "seeds": [0], "seconds": {"Single()": 1.0}}
    inside = study["main"].__globals__
    monkeypatch.setitem(inside, "measured", lambda *_: found)
    monkeypatch.setitem(inside, "simulated", lambda names, *_: dict.fromkeys(names, found))
    path = tmp_path / "table.json"
    for words in ([], ["--clusters", "wifi"], ["--tasks", "digits"], ["--clusters"]):
        monkeypatch.setattr("sys.argv", ["standing.py", "--table", str(path), *words])
        study["main"]()
    table = json.loads(path.read_text())
    assert list(table["tasks"]) == ["digits"]
    assert list(table["simulated"]["clusters"]) == study["PRESETS"]

"""Which techniques paid: rows that differ in one setting, and the bandwidth at which it pays."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.comparisons import experiment, summary

from orchestra.compression.quantization import BF16
from orchestra.compression.sparsification import TopK
from orchestra.engines.simulation import trials
from orchestra.engines.simulation.costs import cost_source_of
from orchestra.engines.simulation.trials import (
    FURTHEST_FACTOR,
    Question,
    Rival,
    find_break_even,
    search,
)
from orchestra.experiments.comparison import carry_out
from orchestra.experiments.experiment import runs
from orchestra.experiments.techniques import Technique, techniques
from orchestra.records.store import collect
from orchestra.report.page import page
from orchestra.report.study import Study
from orchestra.report.table import verdicts
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.worker.runtime import SilentReporter


def test_pairs_differ_in_one_setting_which_has_its_default_in_one_of_them() -> None:
    strategies: dict[str, Any] = {
        "ring": AllReduce(),
        "tree": AllReduce("tree"),
        "bf16": AllReduce(compression=BF16()),
        "tree bf16": AllReduce("tree", compression=BF16()),
        "top": AllReduce(compression=TopK(0.1)),
        "local": LocalSGD(4),
        "longer": LocalSGD(32),
    }
    assert techniques(strategies) == [
        Technique("tree", "ring", "algorithm='tree'"),
        Technique("bf16", "ring", "compression=BF16()"),
        Technique("tree bf16", "tree", "compression=BF16()"),
        Technique("tree bf16", "bf16", "algorithm='tree'"),
        Technique("top", "ring", "compression=TopK(0.1)"),
    ]


@pytest.mark.parametrize("at", [0.003, 0.4, 1.7, 300.0])
def test_search_finds_where_it_changes(at: float) -> None:
    for side in ("below", "above"):
        found = search(lambda factor: (factor < at) is (side == "below"))  # noqa: B023
        assert isinstance(found, tuple)
        assert found[0] == side
        assert found[1] == pytest.approx(at, rel=0.05)


def test_search_ends_where_nothing_changes() -> None:
    tried: list[float] = []

    def never(factor: float) -> bool:
        tried.append(factor)
        return False

    assert search(never) is False
    assert search(lambda factor: not never(factor)) is True
    assert (min(tried), max(tried)) == (1 / FURTHEST_FACTOR, FURTHEST_FACTOR)


CLUSTER = """\
nodes:
  node:
    count: 2
    cores: 1
    speed: 1
    loopback: {{bandwidth: 3 GB/s, latency: 15 us}}
    switch: switch
    link: {{bandwidth: {bandwidth} bit/s, latency: 50 us}}
switches:
  switch: {{}}
ranks: spread
"""


def simulated(folder: Path, bandwidth: float, search: float = 60.0, **changes: Any) -> Path:
    """Simulate SMALL on two nodes with links of so many bit/s."""
    cluster = folder / f"{bandwidth:.0f}.yaml"
    cluster.write_text(CLUSTER.format(bandwidth=bandwidth))
    out = folder / f"{bandwidth:.0f}"
    settings = {
        "engine": "simulation",
        "cluster": str(cluster),
        "calibration": "none",
        "tensors": "shapes",
        "task": "synthetic(300_000, samples=96)",
        "strategies": {"ring": "AllReduce", "bf16": "AllReduce(compression=BF16())"},
        **changes,
    }
    made = experiment(**settings)
    carry_out(made, out, report=False, search_seconds=search, quiet=True)
    return out


def test_runs_at_bandwidths_on_both_sides_agree_with_the_search(tmp_path: Path) -> None:
    out = simulated(tmp_path, 1e8)
    (judged,) = json.loads((out / "techniques.json").read_text())["techniques"]
    assert judged["technique"] == {"name": "bf16", "plain": "ring", "setting": "compression=BF16()"}
    found = judged["break_even"]
    assert (found["pays"], found["equal"]) == ("below", True)
    for ratio, pays in ((0.8, True), (1.25, False)):
        there = simulated(tmp_path, 8 * found["bandwidth"] * ratio, search=0.0)
        seconds = {run["name"]: run["train_seconds"] for run in summary(there)["runs"]}
        assert (seconds["bf16"] < seconds["ring"]) is pays
    (verdict,) = verdicts(Study(collect([out])))
    assert (verdict.answer, verdict.row.label, verdict.plain.label) == ("paid", "bf16", "ring")
    text = page(Study(collect([out])), [], out)
    assert "Which techniques paid" in text
    assert re.search(r"below links of [\d.]+ Gbit/s", text)


def test_what_was_found_is_kept_and_the_rest_is_searched_again(tmp_path: Path) -> None:
    out = simulated(tmp_path, 1e8)
    path = out / "techniques.json"
    before = json.loads(path.read_text())
    before["techniques"][0]["break_even"]["factor"] = 7.0  # would be found anew
    path.write_text(json.dumps(before))
    simulated(tmp_path, 1e8)
    assert json.loads(path.read_text()) == before
    before["techniques"][0]["break_even"] |= {"pays": None, "reason": "not found within 30 s"}
    path.write_text(json.dumps(before))
    simulated(tmp_path, 1e8)
    assert json.loads(path.read_text())["techniques"][0]["break_even"]["pays"] == "below"


def test_strategies_that_read_values_are_searched_with_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "FURTHEST", 1)
    own = "tests.support.tasks_for_tests:ReadsValues"
    made = experiment(
        engine="simulation", cluster="lan_1gbit(nodes=2)", calibration="none", steps=4,
        task="synthetic(3000, samples=16)",
        strategies={"often": f"{own}(1e-6, every=1)", "rare": f"{own}(1e-6)"},
    )  # fmt: skip
    often, rare = (Rival(run, 4.0, cost_source_of(run)) for run in list(runs(made))[:2])
    found = find_break_even(
        cast(Any, SimpleNamespace(reporter=SilentReporter())), Question(often, rare, 60.0)
    )
    assert found.pays == "never", found


def test_real_gradients_count_to_the_target(tmp_path: Path) -> None:
    out = simulated(
        tmp_path,
        1e7,
        task="digits",
        tensors="real",
        steps=12,
        snapshots=12,
        target={"metric": "loss", "at_most": 100.0},  # the first snapshot reaches it
        strategies={
            "ring": "AllReduce",
            "stale": "LocalSGD(4)",
            "bf16": "AllReduce(compression=BF16())",
        },
    )
    (judged,) = json.loads((out / "techniques.json").read_text())["techniques"]
    assert judged["break_even"]["pays"] == "below"
    (verdict,) = verdicts(Study(collect([out])))
    assert verdict.seconds[0] != verdict.seconds[1]
    assert verdict.finals is not None

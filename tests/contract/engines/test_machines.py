"""Unlike nodes: what each does alone, how well they were used together, what they cost and drew."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.drawn import drawn_alone, keep, record
from tests.support.recorded import changed
from tests.support.unlike_nodes import LINK, made

from orchestra.cluster import ExponentialTail, Node, load_cluster
from orchestra.cluster.file import cluster_text
from orchestra.engines.run import beside_single, by_node, on_machines
from orchestra.errors import InputError
from orchestra.records.record import RunRecord
from orchestra.records.store import collect
from orchestra.report.answer import answer
from orchestra.report.figures.results import combinations
from orchestra.report.study import Study

NODES = {
    "fast": "{cores: 1, flops: 100 GFLOP/s, price: 2.00 USD/h, watts: 300",
    "slow": "{cores: 1, flops: 20 GFLOP/s, price: 0.50 USD/h, watts: 100",
}
"""A sample of the task takes 1 GFLOP: 100 and 20 samples/s on their one core."""


def written(path: Path, **nodes: str) -> str:
    lines = [f"  {name}: {text}, {LINK}}}" for name, text in nodes.items()]
    common = "all_nodes: {jitter: null, loopback: {bandwidth: 3 GB/s, latency: 15 us}}"
    path.write_text("\n".join([common, "nodes:", *lines, "ranks: spread", ""]))
    return str(path)


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    return written(tmp_path / "mixed.yaml", **NODES)


def test_a_run_knows_what_its_nodes_do_alone(mixed: str, tmp_path: Path) -> None:
    single = made(tmp_path / "single", mixed, steps=16, ranks=2)
    ring = made(tmp_path / "ring", mixed, "AllReduce('ring')", ranks=2)
    assert ring.machine.alone == pytest.approx({"fast": 100, "slow": 20}, rel=0.01)
    assert single.machine.alone == {"fast": ring.machine.alone["fast"]}
    assert single.time.samples_per_second == pytest.approx(single.machine.alone["fast"], rel=1e-3)
    assert single.machine.heterogeneous_efficiency == pytest.approx(1, rel=1e-3)
    # equal parts: both wait for the slow one, which does 20 samples/s, so that 40 of 120 are done
    assert ring.machine.heterogeneous_efficiency == pytest.approx(1 / 3, rel=0.02)
    assert (single.machine.mixed, ring.machine.mixed) == (False, True)


def test_parts_by_speed_use_what_the_nodes_do_alone(mixed: str, tmp_path: Path) -> None:
    ring = made(tmp_path / "ring", mixed, "AllReduce('ring')", ranks=2, shares="measured")
    assert ring.machine.heterogeneous_efficiency == pytest.approx(1, rel=0.05)


def test_a_node_with_devices_does_alone_what_those_with_ranks_do(tmp_path: Path) -> None:
    cards = "{cores: 4, devices: 3, flops: 100 GFLOP/s"
    on = written(tmp_path / "cards.yaml", cards=cards, slow=NODES["slow"])
    ring = made(tmp_path / "ring", on, "AllReduce('ring')", ranks=4)
    assert ring.machine.alone == pytest.approx({"cards": 200, "slow": 20}, rel=0.01)


def test_jitter_counts_with_its_mean(tmp_path: Path) -> None:
    tail = {name: f"{text}, jitter: ExponentialTail(1)" for name, text in NODES.items()}
    ring = made(tmp_path / "ring", written(tmp_path / "c.yaml", **tail), "AllReduce('ring')")
    assert ring.machine.alone == pytest.approx({"fast": 50, "slow": 10}, rel=0.01)
    factors = [ExponentialTail(1).factor((i + 0.5) / 10_000) for i in range(10_000)]
    assert sum(factors) / len(factors) == pytest.approx(ExponentialTail(1).expectation, rel=1e-3)


def test_a_run_costs_what_its_nodes_do_by_the_hour(mixed: str, tmp_path: Path) -> None:
    ring = made(tmp_path / "ring", mixed, "AllReduce('ring')", ranks=2)
    assert ring.time.training is not None
    assert ring.spending.cost == pytest.approx(2.5 * ring.time.training / 3600)
    assert ring.spending.joules == pytest.approx(400 * ring.time.training)
    assert (ring.spending.currency, ring.spending.cost_to_target) == ("USD", None)
    single = made(tmp_path / "single", mixed, ranks=2)
    assert single.time.training is not None
    assert single.spending.cost == pytest.approx(
        2 * single.time.training / 3600
    )  # one node is rented


def node(name: str, price: str | None = None, watts: float | None = None) -> Node:
    cluster = load_cluster("lan_1gbit(1)", where="test", folder=Path())
    return replace(cluster.nodes[0], name=name, price=price, watts=watts)


def test_the_cost_is_not_known_where_one_price_is_not() -> None:
    run = record("ring", train_seconds=3600.0, time_to_target_seconds=1800.0)
    found = on_machines(run, [node("a", "1 EUR/h", 10), node("b", None, 20)], {})
    assert (found.spending.cost, found.spending.cost_to_target, found.spending.currency) == (
        None,
        None,
        None,
    )
    assert (found.spending.joules, found.spending.joules_to_target) == (108_000, 54_000)
    found = on_machines(
        run, [node(n, f"{p} EUR/h") for n, p in (("a", 1), ("b", 0.25), ("a", 1))], {}
    )
    assert (found.spending.cost, found.spending.cost_to_target, found.spending.currency) == (
        1.25,
        0.625,
        "EUR",
    )
    assert found.spending.joules is None
    nothing = on_machines(run, [], {})
    assert (nothing.spending.cost, nothing.spending.joules) == (None, None)


def test_convergence_efficiency_is_beside_one_process_on_the_fastest_node() -> None:
    single = record("one process", time_to_target_seconds=60.0, alone={"fast": 100.0})
    ring = record("ring", time_to_target_seconds=40.0, alone={"fast": 100.0, "slow": 50.0})
    assert beside_single(ring, single).machine.convergence_efficiency == pytest.approx(1.5 / 1.5)
    late = changed(ring, time_to_target_seconds=80.0)
    assert beside_single(late, single).machine.convergence_efficiency == pytest.approx(0.75 / 1.5)
    for ours, theirs in (
        (ring, None),
        (changed(ring, time_to_target_seconds=None), single),
        (ring, changed(single, time_to_target_seconds=None)),
        (changed(ring, alone={}), single),
        (ring, changed(single, alone={})),
    ):
        assert beside_single(ours, theirs).machine.convergence_efficiency is None
    # measured of the ranks, and of no single process
    measured = changed(single, alone={}, node="fast")
    assert beside_single(ring, measured).machine.convergence_efficiency == pytest.approx(1.5 / 1.5)


def test_measured_speeds_belong_to_the_nodes_of_their_ranks() -> None:
    assert by_node([3.0, 2.0], []) == {"rank 0": 3.0, "rank 1": 2.0}
    on = [node(name) for name in "aba"]
    assert by_node([3.0, 2.0, 1.0], on) == {"a": 4.0, "b": 2.0}


@pytest.mark.parametrize(
    ("price", "message"),
    [
        ("3.06", r"c\.yaml:\d nodes\.slow.*price: '3\.06' is no price; write an amount"),
        ("3.06 USD", r"c\.yaml:\d nodes\.slow.*price: '3\.06 USD' is no price; write an amount"),
        ("-1 USD/h", r"is no price"),
        ("1 EUR/h", r"c\.yaml:\d nodes\.slow: the price of slow is in EUR, that of fast in USD;"),
    ],
)
def test_a_price_is_an_amount_an_hour_in_one_currency(
    tmp_path: Path, price: str, message: str
) -> None:
    slow = NODES["slow"].replace("0.50 USD/h", price)
    with pytest.raises(InputError) as refused:
        load_cluster(
            written(tmp_path / "c.yaml", fast=NODES["fast"], slow=slow), where="x", folder=tmp_path
        )
    assert re.search(message, str(refused.value))
    assert "\n" not in str(refused.value)


def test_prices_are_written_and_read_again(mixed: str, tmp_path: Path) -> None:
    cluster = load_cluster(mixed, where="test", folder=tmp_path)
    (tmp_path / "again.yaml").write_text(cluster_text(cluster))
    assert load_cluster("again.yaml", where="test", folder=tmp_path) == cluster


# The report

UNLIKE = {"fast": 100.0, "slow": 50.0}


def study_of(folder: Path, *runs: RunRecord) -> Study:
    return Study(collect([keep(folder, runs, trace=False)]))


def test_the_report_tells_of_unlike_nodes_and_costs(tmp_path: Path) -> None:
    ring = record(
        "ring", cluster="mixed.yaml", engine="simulation", alone=UNLIKE, currency="USD", cost=0.02,
        heterogeneous_efficiency=0.5, convergence_efficiency=0.25, cost_to_target=0.01,
        time_to_target_seconds=0.1,
    )  # fmt: skip
    server = record("server", alone=UNLIKE, currency="USD", cost=0.01, cost_to_target=0.005)
    study = study_of(tmp_path / "runs", ring, server)
    keys = [measure.key for measure in study.of_machines]
    assert keys == ["heterogeneous_efficiency", "convergence_efficiency", "cost_to_target", "cost"]
    text = " ".join(answer(study).detail).replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert "The 2 nodes of ring on 4 ranks do 150 samples/s if each works alone" in text
    assert "together they came to 50.0 % of that (heterogeneous efficiency)" in text
    assert "to 25.0 % of what their speed is beside that of the fastest" in text
    assert "The least cost to the target was that of server on 4 ranks, 0.00500 USD" in text


def test_the_report_is_silent_where_nodes_are_alike_and_have_no_price(tmp_path: Path) -> None:
    alike = {"worker-0": 100.0, "worker-1": 100.0}
    ring = record("ring", alone=alike, heterogeneous_efficiency=0.5, convergence_efficiency=0.25)
    study = study_of(tmp_path / "runs", ring)
    assert study.of_machines == []
    assert "works alone" not in " ".join(answer(study).detail).lower()


def test_costs_in_several_currencies_are_not_set_side_by_side(tmp_path: Path) -> None:
    ring = record("ring", currency="USD", cost=0.02)
    server = record("server", currency="EUR", cost=0.01)
    assert study_of(tmp_path / "runs", ring, server).of_machines == []


def test_efficiencies_are_drawn_over_combinations_of_machines(tmp_path: Path) -> None:
    nodes = {"fast": 100.0, "slow-0": 50.0, "slow-1": 50.0}
    runs = [
        record(
            "ring", ranks, cluster="mixed.yaml", heterogeneous_efficiency=1 / ranks,
            convergence_efficiency=0.5 / ranks, alone=dict(list(nodes.items())[:ranks]),
        )
        for ranks in (3, 1, 2)
    ]  # fmt: skip
    made = drawn_alone(keep(tmp_path / "runs", runs, trace=False), combinations)
    for key, of_one in (("heterogeneous_efficiency", 100), ("convergence_efficiency", 50)):
        points = made.values(f"{key}-of-machines", "machines", "value")[:3]
        names = ["fast", "fast + slow", "fast + 2 slow"]
        assert [p["machines"] for p in points] == names
        expected = [of_one / number for number in (1, 2, 3)]
        assert [p["value"] for p in points] == pytest.approx(expected, rel=1e-4)
    alike = [record("ring", n, cluster="lan_1gbit", heterogeneous_efficiency=0.5,
                    alone={f"w-{i}": 1.0 for i in range(n)}) for n in (1, 2)]  # fmt: skip
    assert drawn_alone(keep(tmp_path / "alike", alike, trace=False), combinations).figures == {}

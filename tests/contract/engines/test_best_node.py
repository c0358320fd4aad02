"""One process of a simulation runs on the best node; nobody runs where there is no room."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.lab import in_lab, some
from tests.support.unlike_nodes import LINK, made
from torch import Tensor, nn

from orchestra.engines.simulation.memory import saved_bytes
from orchestra.errors import InputError
from orchestra.experiments import api
from orchestra.optimizers.settings import Optimizer
from orchestra.settings import parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.traits import Footprint

NODES = {
    "old": "{cores: 2, flops: 5 GFLOP/s, memory: 1 GB",
    "wide": "{cores: 16, flops: 10 GFLOP/s, memory: 64 GB",
    "quick": "{cores: 4, flops: 50 GFLOP/s, memory: 1 GB",
    "cards": "{cores: 64, devices: 8, flops: 120 GFLOP/s, memory: 500 MB",
}
"""160 GFLOP/s in all on wide, 200 on quick, and 120 on one device of cards."""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(names: tuple[str, ...] = tuple(NODES), **changes: str) -> str:
        nodes = {name: changes.get(name, NODES[name]) for name in names}
        lines = [f"  {name}: {text}, {LINK}}}" for name, text in nodes.items()]
        common = "all_nodes: {jitter: null, loopback: {bandwidth: 3 GB/s, latency: 15 us}}"
        path = tmp_path / "machines.yaml"
        path.write_text("\n".join([common, "nodes:", *lines, "ranks: spread", ""]))
        return str(path)

    return written


def test_one_process_is_on_the_best_node_in_whatever_order_they_are(
    write: Write, tmp_path: Path
) -> None:
    orders = list(itertools.permutations(NODES))
    records = [made(tmp_path / "run", write(order)) for order in orders[:: len(NODES) + 1]]
    assert {record.machine.node for record in records} == {"quick"}
    (seconds,) = {record.time.training for record in records}
    serial = 4 * 0.05 + 0.95  # of a gradient, what is done by one of four threads takes as long
    assert seconds == pytest.approx(serial * 4 * 4 * 32 * 1e9 / 200e9, rel=0.01)
    assert {order[0] for order in orders[:: len(NODES) + 1]} == {*NODES}


def test_of_many_devices_one_process_has_one(write: Write, tmp_path: Path) -> None:
    on = write(("old", "cards"))
    alone = made(tmp_path / "run", on, steps=16)
    assert alone.machine.node == "cards"
    assert alone.time.training == pytest.approx(4 * 16 * 32 * 1e9 / 120e9, rel=0.01)
    packed = Path(on).read_text().replace("spread", "[cards, cards, cards, cards]")
    Path(on).write_text(packed)
    four = made(tmp_path / "run", on, "AllReduce()", steps=16)
    assert four.machine.node is None
    assert alone.time.training == pytest.approx(4 * (four.time.training or 0), rel=0.05)


def test_the_fastest_node_without_room_is_not_the_best(write: Write, tmp_path: Path) -> None:
    large = "synthetic(100_000_000, sample_flops=1e9)"  # 400 MB of parameters, as much of gradients
    assert made(tmp_path / "run", write(), task=large).machine.node == "quick"
    on = write(quick="{cores: 4, flops: 50 GFLOP/s, memory: 700 MB")
    assert made(tmp_path / "run", on, task=large).machine.node == "wide"


def test_what_has_no_room_is_refused_with_the_sum(write: Write, tmp_path: Path) -> None:
    large = "synthetic(100_000_000, sample_flops=1e9)"
    on = write(("old", "wide"), old="{cores: 2, flops: 5 GFLOP/s, memory: 1.5 GB")
    message = (
        r"memory: old has 1.5 GB, but its 2 ranks would need 3.2 GB: parameters 800 MB \+ "
        r"gradients 800 MB \+ state of SGD 800 MB \+ further copies 800 MB.*more memory"
    )
    momentum = Optimizer("SGD", {"lr": 0.1, "momentum": 0.9})
    with pytest.raises(InputError, match=message):
        made(tmp_path / "run", on, "LocalSGD(8)", task=large, optimizer=momentum)


@pytest.mark.parametrize(
    ("strategy", "copies", "fits"),
    some(
        [
            ("AllReduce()", 4, False),  # parameters, gradients, and two of Adam
            ('AllReduce(shard="optimizer")', 2.5, True),
            # 1.75, and two buckets of 26 MB
            *in_lab([('AllReduce(shard="gradients")', 1.8, True)]),
            ('AllReduce(shard="parameters")', 1.11, True),  # 1, and four
            ("ParameterServer()", 7, False),  # the server: 4, and a push of each of 3 workers
            *in_lab([("ParameterServer(servers=2)", 3, True), ("Gossip()", 7, False)]),
        ]
    ),
)
def test_strategies_keep_their_own_multiples(
    strategy: str, copies: float, fits: bool, write: Write, tmp_path: Path
) -> None:
    nodes = dict.fromkeys(NODES, f"{{cores: 1, speed: 1, memory: {copies - 0.2} GB")
    adam, large = Optimizer("Adam", {"lr": 0.1}), "synthetic(250_000_000, sample_flops=1e9)"
    with pytest.raises(InputError, match=f"need {copies:g} GB: parameters"):
        made(tmp_path / "run", write(**nodes), strategy, task=large, optimizer=adam)
    nodes = dict.fromkeys(NODES, f"{{cores: 1, speed: 1, memory: {copies + 0.2} GB")
    made(tmp_path / "run", write(**nodes), strategy, task=large, optimizer=adam)


def test_activations_are_what_autograd_saves() -> None:
    """Of a layer its input, of the ReLU its output, each once, wherever it is used."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def loss(module: nn.Module) -> Tensor:
        answers: Tensor = module(torch.zeros(5, 8, device=next(module.parameters()).device))
        return answers.square().mean()

    floats = 5 * 8 + 5 * 16 + 5 * 4
    assert saved_bytes(model, loss) == 4 * floats
    assert saved_bytes(model.to("meta"), loss) == 4 * floats


def test_a_stage_of_a_pipeline_is_a_part_of_the_model(write: Write, tmp_path: Path) -> None:
    """Of the activations, the first of two stages keeps two micro-batches of four, half of all."""
    on = write(**dict.fromkeys(NODES, "{cores: 1, speed: 1, memory: 1 kB"))
    sizes: list[dict[str, float]] = []
    for strategy in ("Pipeline(2)", "Pipeline(2, schedule='gpipe')", "AllReduce()"):
        with pytest.raises(InputError) as refused:
            made(tmp_path / "run", on, strategy, task="digits()", tensors="real")
        parts = re.findall(r"([a-z]+)(?: of \d+ samples)? ([\d.]+) kB", str(refused.value))
        sizes.append({name: float(size) for name, size in parts})
    stage, filled, whole = sizes
    assert 0 < stage["parameters"] == stage["gradients"] < whole["parameters"]
    assert filled["activations"] == pytest.approx(whole["activations"], rel=0.01)
    assert stage["activations"] == pytest.approx(whole["activations"] / 2, rel=0.01)


def test_activations_grow_with_the_batch(write: Write, tmp_path: Path) -> None:
    digits, on = "digits()", write(("old",), old="{cores: 2, speed: 1, memory: 6 MB")
    made(tmp_path / "run", on, task=digits, batch_size=8, steps=1)
    message = (
        r"rank 0 would need .* MB: parameters .* \+ activations of 1024 samples .*lower batch_size"
    )
    with pytest.raises(InputError, match=message):
        made(tmp_path / "run", on, task=digits, batch_size=256, steps=1)
    made(tmp_path / "run", on, task=digits, batch_size=256, accumulation=32, steps=1)
    unknown = write(("old",), old="{cores: 2, speed: 1")
    made(tmp_path / "run", unknown, task=digits, batch_size=256, steps=1)


def test_in_a_comparison_it_is_a_row_that_failed(write: Write, tmp_path: Path) -> None:
    on = write(("old",), old="{cores: 2, speed: 1, memory: 20 MB")
    compared = api.compare(
        "synthetic(1_000_000, sample_flops=1e6)",
        {"ring": "AllReduce()", "one": "Single()"},
        ranks=4, steps=2, batch_size=1, engine="simulation", cluster=on, calibration="none",
        tensors="shapes", out=tmp_path / "out", quiet=True,
    )  # fmt: skip
    ring, one = sorted(compared.records, key=lambda record: record.asked.name != "ring")
    assert (ring.ending.status, one.ending.status) == ("failed", "completed")
    assert "old has 20 MB, but its 4 ranks would need 32 MB" in (ring.ending.failure or "")


def test_a_switch_keeps_the_most_of_both_phases() -> None:
    switch = parse("Switch(AllReduce(), LocalSGD(8, outer=SlowMo()))", STRATEGIES, where="test")
    assert isinstance(switch, Strategy)
    assert switch.traits().memory(1, 4) == Footprint(copies=3)

"""Whose figures a curve tells where each node has a model of its own; when a target is reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.d_psgd import STEPS, d_psgd
from tests.support.decentralized import BATCH, CURVATURE, Matrix, quadratic, train_recorded
from tests.support.simulated import simulated
from tests.support.training import settings, train_processes

from orchestra.records.record import RunRecord, ToTarget
from orchestra.records.report import Point
from orchestra.records.store import RunFolder
from orchestra.settings import parse
from orchestra.strategies.gossip import Gossip
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.outer import Elastic
from orchestra.strategies.registry import STRATEGIES
from orchestra.tasks import load_task
from orchestra.tasks.task import evaluate
from orchestra.topologies import Ring, Star
from orchestra.trainer.curve import MAX_EVALUATED_REPLICAS
from orchestra.trainer.settings import Target, Training, target_times

RANKS = 3


def gossiping(**training: Any) -> Any:
    """A run of `d_psgd`."""
    changes = {"batch_size": BATCH, "optimizer": "SGD(lr=0.1)", "snapshots": 1, **training}
    task = f"tests.support.decentralized:quadratic({RANKS * STEPS * BATCH})"
    return settings(Gossip(Star()), RANKS, task, steps=STEPS, **changes)


def loss_at(x: Matrix) -> float:
    (_, points) = quadratic(RANKS * STEPS * BATCH).test.tensors  # type: ignore[union-attr]
    return float(0.5 * ((torch.from_numpy(x) - points).square() * CURVATURE).sum(1).mean())


def last_point(record: RunRecord) -> Point:
    return RunFolder(record.folder).curve[-1]


@pytest.mark.parametrize("train", [train_processes, simulated])
def test_each_node_and_the_average_by_hand(train: Any, tmp_path: Path) -> None:
    record = train(gossiping(), tmp_path)
    point, replicas = last_point(record), d_psgd(Star(), RANKS)
    own = [loss_at(replica) for replica in replicas]
    told = [point.nodes[str(rank)]["loss"] for rank in range(RANKS)]
    assert told == pytest.approx(own, rel=1e-12)
    assert point.metrics["loss"] == pytest.approx(np.mean(own), rel=1e-12)
    assert (point.worst("loss"), point.replicas) == (max(told), RANKS)
    mean = replicas.mean(0)
    assert point.average == {"loss": record.learned.loss}
    assert record.learned.loss == pytest.approx(loss_at(mean), rel=1e-12)
    assert loss_at(mean) < np.mean(own)  # the loss is convex
    distance = np.sqrt(np.square(replicas - mean).sum(1).mean())
    assert point.consensus_distance == pytest.approx(distance, rel=1e-12)
    assert point.relative_distance == pytest.approx(distance / np.linalg.norm(mean), rel=1e-12)
    assert record.learned.nodes == {
        "replicas": RANKS,
        "judged": RANKS,
        "mean": point.metrics,
        "worst": {"loss": max(told)},
    }


def test_a_node_is_judged_with_its_own_buffers(tmp_path: Path) -> None:
    task = "images(64, 'normalised', 'float64')"
    run = settings(LocalSGD(None), 2, task, snapshots=2, optimizer="SGD(lr=0.1)")
    trained = train_recorded(run, tmp_path)  # its replicas are those before the average at the end
    loaded = load_task(run.task)
    (leader,) = (report.leader for report in trained.reports if report.leader is not None)
    assert len(leader.curve) == 2
    for rank, replica in enumerate(trained.replicas):
        module = loaded.model()
        module.load_state_dict(replica)
        assert loaded.test is not None
        assert leader.curve[-1].nodes[str(rank)] == evaluate(loaded, module, loaded.test, 512)
    assert leader.curve[-1].average == {"loss": leader.final_loss, **leader.metrics}
    assert len({json.dumps(own) for own in leader.curve[-1].nodes.values()}) == 2


def test_replicas_round_a_centre(tmp_path: Path) -> None:
    """What a node has is not the centre, which is the model in the end."""
    run = settings(LocalSGD(2, outer=Elastic(0.6)), 3, "images(96, 'mlp', 'float64')", snapshots=1)
    trained = train_recorded(run, tmp_path)
    loaded = load_task(run.task)
    (leader,) = (report.leader for report in trained.reports if report.leader is not None)
    (point,) = leader.curve
    assert point.average == {"loss": leader.final_loss, **leader.metrics}
    flat = []
    for rank, replica in enumerate(trained.replicas):
        module = loaded.model()
        module.load_state_dict(replica)
        assert loaded.test is not None
        assert point.nodes[str(rank)] == evaluate(loaded, module, loaded.test, 512)
        flat.append(np.concatenate([value.numpy().reshape(-1) for value in replica.values()]))
    x = np.stack(flat)
    distance = np.sqrt(np.square(x - x.mean(0)).sum(1).mean())
    assert point.consensus_distance == pytest.approx(distance, rel=1e-12)


@pytest.mark.parametrize("strategy", ["AllReduce()", "ParameterServer()", "LocalSGD()"])
def test_nothing_of_nodes_where_all_have_the_same(strategy: str, tmp_path: Path) -> None:
    ranks = 1 if strategy == "LocalSGD()" else 3
    named = parse(strategy, STRATEGIES, where="here")
    run = settings(named, ranks, "images(48, 'mlp')", snapshots=2)
    record = simulated(run, tmp_path)
    for point in RunFolder(record.folder).curve:
        assert (point.nodes, point.average, point.consensus_distance) == ({}, None, None)
    assert record.learned.nodes is None
    assert record.to_target.worst_node is None


def many(seed: int, folder: Path) -> RunRecord:
    """More replicas than are judged."""
    ranks, steps = MAX_EVALUATED_REPLICAS + 2, 6
    task = f"tests.support.decentralized:quadratic({ranks * steps * BATCH})"
    run = settings(
        Gossip(Ring()), ranks, task, steps=steps, batch_size=BATCH, snapshots=3, seed=seed
    )
    return simulated(run, folder, f"lan_1gbit(nodes={ranks})")


def test_of_many_nodes_some_are_judged_and_the_average_is_of_all(tmp_path: Path) -> None:
    drawn = set()
    for seed in (0, 1):
        record = many(seed, tmp_path / str(seed))
        point = last_point(record)
        assert (len(point.nodes), point.replicas) == (
            MAX_EVALUATED_REPLICAS,
            MAX_EVALUATED_REPLICAS + 2,
        )
        assert record.learned.nodes is not None
        assert (record.learned.nodes["judged"], record.learned.nodes["replicas"]) == (16, 18)
        assert point.average == {"loss": record.learned.loss}
        drawn.add(tuple(point.nodes))
    assert len(drawn) == 2


def test_the_same_seed_gives_the_same_curve_byte_for_byte(tmp_path: Path) -> None:
    records = [many(3, tmp_path / name) for name in ("one", "other")]
    one, other = ({**record.summary(), "wall_seconds": None} for record in records)
    assert one == other
    curves = [(record.folder / "curve.jsonl").read_bytes() for record in records]
    assert curves[0] == curves[1]


# When the target was reached


def point(seconds: float, *nodes: float, average: float | None = None) -> Point:
    """With the accuracies of nodes; of one, it is the model's."""
    mean = {"accuracy": float(np.mean(nodes))}
    if len(nodes) == 1:
        return Point(10, seconds, mean)
    own = {str(rank): {"accuracy": each} for rank, each in enumerate(nodes)}
    assert average is not None
    return Point(10, seconds, mean, 0.1, 0.1, {"accuracy": average}, own, len(nodes))


def times(*points: Point, at_least: float = 0.8) -> tuple[float | None, ...]:
    found = target_times(points, Target("accuracy", at_least=at_least))
    return found.seconds, found.after, found.worst_node, found.average


def test_a_target_is_reached_by_the_nodes_mean_between_two_snapshots() -> None:
    curve = [
        point(1.0, 0.6, 0.7, average=0.75),
        point(2.0, 0.7, 0.8, average=0.85),
        point(3.0, 0.75, 0.85, average=0.9),
        point(4.0, 0.8, 0.9, average=0.9),
    ]
    assert times(*curve) == (3.0, 2.0, 4.0, 2.0)
    assert times(*curve, at_least=0.86) == (None, None, None, 3.0)
    assert times(*curve, at_least=0.6) == (1.0, 0.0, 1.0, 1.0)


def test_a_model_of_all_has_no_worst_node() -> None:
    assert times(point(1.0, 0.5), point(2.0, 0.9)) == (2.0, 1.0, None, None)
    assert times() == (None,) * 4
    assert target_times([point(1.0, 0.9)], None) == ToTarget()


def test_snapshots_are_close_enough_for_a_target() -> None:
    target = Target("accuracy", at_least=0.5)
    assert len(Training().snapshots_due(1000, 8)) == 10
    assert Training(target=target).snapshots_due(1000, 8) == list(range(20, 1001, 20))
    assert len(Training(target=target, snapshots=7).snapshots_due(1000, 8)) == 7
    # 4 GB hold 25 copies of 10M parameters on each of 4 ranks, and never fewer than 10 are taken
    assert len(Training(target=target, ranks=4).snapshots_due(1000, 40_000_000)) == 25
    assert len(Training(target=target, ranks=4).snapshots_due(1000, 4_000_000_000)) == 10

"""Checkpoints whose manifest is right and whose content does not fit the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.support.simulated import run_ranks
from tests.support.training import settings

from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer import checkpoint_files
from orchestra.trainer.program import train

MOMENTS = "/strategy/member/optimizer/0"
Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def trained(folder: Path, strategy: str = "AllReduce('ring')") -> Any:
    chosen = parse(strategy, STRATEGIES, where="test")
    run = settings(
        chosen, 2, "images(samples=64)", checkpoint_every=1, optimizer="Adam(lr=0.01)", snapshots=2
    )
    return run_ranks(2, lambda runtime: train(runtime, (run, folder)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped after its third step, in effect: its newest checkpoint
    is that of step 4 of 4."""
    folder = tmp_path_factory.mktemp("whole")
    assert trained(folder).failure is None
    return folder


def change(folder: Path, edit: Edit) -> Path:
    """Edit rank 1's file of the checkpoint in `folder`, and make its manifest right again."""
    path = folder / checkpoint_files.rank_file(1)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tree = json.loads(file.metadata()["tree"])
    edit(tree, tensors)
    save_file(tensors, path, metadata={"tree": json.dumps(tree)})
    sign(path)
    return path


def parameters(folder: Path) -> bytes:
    return (folder / "parameters.safetensors").read_bytes()


def sign(path: Path) -> None:
    manifest = path.parent / checkpoint_files.MANIFEST
    content = json.loads(manifest.read_text())
    content["files"][path.name] = checkpoint_files.digest(path)
    manifest.write_text(json.dumps(content))


def put(place: str, value: Any) -> Edit:
    """Put `value` at a place of the tree such as "position/steps"."""

    def edit(tree: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        *path, last = place.split("/")
        for key in path:
            tree = tree[key]
        tree[last] = value

    return edit


def tensor(place: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Change the tensor at `place`."""

    def edit(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[place] = changed(tensors[place])

    return edit


def drop(place: str) -> Edit:
    def edit(tree: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        *path, last = place.split("/")
        for key in path:
            tree = tree[key]
        del tree[last]

    return edit


USUAL: list[tuple[Edit, str]] = [
    (put("position/steps", -1), "position: steps: -1 is below 0"),
    (
        tensor("/parameters", lambda values: values[:1].clone()),
        "parameters is torch.float32 (1,), and torch.float32 (",
    ),
    (drop("totals"), "lacks totals"),
]
MORE: list[tuple[Edit, str]] = [
    (put("position/steps", 10**12), "position: steps: 1000000000000 is not from 0 to 64"),
    (put("position/steps", "4"), "position: steps: expected whole number, got '4'"),
    (put("position/consumed", 32.5), "position: consumed: expected whole number, got 32.5"),
    (put("rate_scale", -1.0), "rate_scale: -1.0 is below 0"),
    (put("rate_scale", float("nan")), "rate_scale: nan is below 0"),
    (put("parameters", 5), "parameters: expected Tensor, got 5"),
    (put("parameters", {"$tensor": "/none"}), "KeyError: '/none'"),
    (tensor("/parameters", torch.Tensor.half), "parameters is torch.float16"),
    (put("measures", []), "measures: expected a mapping, got list"),
    (put("random/python", [3]), "ValueError"),
    (put("snapshots", [{"index": 0}]), "snapshots: lacks offset, samples, seconds, values, weight"),
]


@pytest.mark.parametrize(
    ("edit", "why"), [*USUAL, *(pytest.param(*each, marks=pytest.mark.lab) for each in MORE)]
)
def test_content_that_does_not_fit_is_refused_and_the_one_before_is_used(
    edit: Edit, why: str, whole: Path, tmp_path: Path
) -> None:
    """By all ranks, though only one has it; the run ends with the same parameters."""
    assert why in refused_for(edit, whole, tmp_path / "run")


def refused_for(edit: Edit, whole: Path, folder: Path) -> str:
    """Return why a run refuses its newest checkpoint after `edit`, and uses the one before."""
    shutil.copytree(whole, folder)
    path = change(folder / "checkpoints" / "0004", edit)
    outcome = trained(folder)
    assert (outcome.failure, outcome.bad_input) == (None, None)
    refused, resumed = map(str, outcome.notices)
    assert refused.startswith(f"checkpoint refused: {path}: ")
    assert resumed == "resumed from checkpoint 3, step 3"
    assert parameters(folder) == parameters(whole)
    return refused.removeprefix(f"checkpoint refused: {path}: ")


def test_files_of_two_ranks_that_were_swapped_are_refused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    first, second = (
        folder / "checkpoints" / "0004" / checkpoint_files.rank_file(rank) for rank in range(2)
    )
    first.rename(tmp_path / "first")
    second.rename(first)
    (tmp_path / "first").rename(second)
    sign(first)
    sign(second)
    *refused, resumed = trained(folder).notices
    assert sorted(refused) == [
        f"checkpoint refused: {first}: it is of rank 1, checkpoint 4",
        f"checkpoint refused: {second}: it is of rank 0, checkpoint 4",
    ]
    assert resumed == "resumed from checkpoint 3, step 3"


STATES: list[tuple[Edit, str]] = [
    (
        tensor(f"{MOMENTS}/exp_avg", torch.Tensor.half),
        "0/exp_avg is torch.float16 (4,), and",
    ),
    (
        tensor(f"{MOMENTS}/exp_avg", lambda values: values[:1].clone()),
        "0/exp_avg is torch.float32 (1",
    ),
    (put("strategy", 5), "strategy is a number, and a mapping in this run"),
    (
        put("strategy/member/optimizer", {"99": {}}),
        "strategy/optimizer has moments of '99', with ",
    ),
    (
        drop("strategy/member/optimizer/0/exp_avg_sq"),
        "strategy/optimizer/0 lacks exp_avg_sq",
    ),
    (put("strategy/member/optimizer/0/step", "many"), "strategy/optimizer/0/step is a text"),
]


@pytest.mark.parametrize(("edit", "why"), STATES)
def test_a_strategys_state_that_does_not_fit_is_refused_and_the_one_before_is_used(
    edit: Edit, why: str, whole: Path, tmp_path: Path
) -> None:
    """It shows only once the strategy has begun on all ranks, and it begins again."""
    reason = refused_for(edit, whole, tmp_path / "run")
    assert reason.startswith("strategy")
    assert why in reason


def test_a_run_whose_checkpoints_do_not_fit_begins_anew(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for index in ("0003", "0004"):
        change(folder / "checkpoints" / index, tensor(f"{MOMENTS}/exp_avg", torch.Tensor.half))
    outcome = trained(folder)
    assert (outcome.failure, outcome.bad_input) == (None, None)
    assert len(outcome.notices) == 2
    assert all(notice.startswith("checkpoint refused: ") for notice in outcome.notices)
    assert parameters(folder) == parameters(whole)


@pytest.mark.parametrize(
    "strategy",
    [
        "ParameterServer(servers=2, placement='beside')",
        "Switch(AllReduce('ring'), LocalSGD(1), when=AfterSteps(2))",
        *(
            pytest.param(each, marks=pytest.mark.lab)
            for each in (
                "AllReduce('ring', shard='optimizer')",
                "AllReduce('ring', shard='parameters')",
                "AllReduce('ring', compression=TopK(0.1))",
                "AllReduce('ring', backup=1)",
                "ParameterServer",
                "ParameterServer(consistency='asynchronous')",
                "LocalSGD(2, overlap=1)",
                "ElasticAveraging",
                "Gossip",
                "PairwiseAveraging",
                "StochasticGradientPush(overlap=1)",
                "Prague",
                "Hop",
                "Pipeline",
                "Switch(Switch(AllReduce('ring'), LocalSGD(1), when=AfterSteps(1)), Gossip, "
                "when=AfterSteps(2))",
                "Switch(AllReduce('ring'), ParameterServer, when=AfterSteps(4))",
                "Auto((AllReduce('ring'), LocalSGD(2)))",
            )
        ),
    ],
)
def test_every_strategy_begins_again_with_the_checkpoint_before(
    strategy: str, tmp_path: Path
) -> None:
    assert trained(tmp_path, strategy).failure is None
    newest = max((tmp_path / "checkpoints").glob("[0-9]*"))

    def edit(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        own = [name for name in tensors if name.startswith("/strategy") and tensors[name].dim()]
        name = next((each for each in own if each.endswith("exp_avg")), own[0])
        tensors[name] = tensors[name].half()

    path = change(newest, edit)
    outcome = trained(tmp_path, strategy)
    assert (outcome.failure, outcome.bad_input) == (None, None)
    refused, resumed = outcome.notices
    assert refused.startswith(f"checkpoint refused: {path}: strategy")
    assert "torch.float16" in refused
    assert resumed.startswith(f"resumed from checkpoint {int(newest.name) - 1}, step ")

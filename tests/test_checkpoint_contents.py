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
from tests.simulated import run_ranks
from tests.training import settings

from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer import checkpoints
from orchestra.trainer.program import train

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
    """Edit rank 1's file of the newest checkpoint, and make its manifest right again."""
    path = folder / "checkpoints" / "0004" / checkpoints.rank_file(1)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tree = json.loads(file.metadata()["tree"])
    edit(tree, tensors)
    save_file(tensors, path, metadata={"tree": json.dumps(tree)})
    sign(path)
    return path


def sign(path: Path) -> None:
    manifest = path.parent / checkpoints.MANIFEST
    content = json.loads(manifest.read_text())
    content["files"][path.name] = checkpoints.digest(path)
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
        del tree[place]

    return edit


USUAL: list[tuple[Edit, str]] = [
    (put("position/steps", -1), "position/steps is -1, which is not from 0 to 64"),
    (
        tensor("/parameters", lambda values: values[:1].clone()),
        "parameters is torch.float32 (1,), and torch.float32 (",
    ),
    (drop("totals"), "it cannot be read (KeyError: 'totals')"),
]
MORE: list[tuple[Edit, str]] = [
    (put("position/steps", 10**12), "position/steps is 1000000000000, which"),
    (put("position/steps", "4"), "Mismatch: expected whole number, got '4'"),
    (put("position/consumed", 32.5), "Mismatch: expected whole number, got 32.5"),
    (put("rate_scale", -1.0), "rate_scale is -1.0, which"),
    (put("rate_scale", float("nan")), "rate_scale is nan, which"),
    (put("parameters", 5), "parameters is int, and torch.float32"),
    (put("parameters", {"$tensor": "/none"}), "KeyError: '/none'"),
    (tensor("/parameters", torch.Tensor.half), "parameters is torch.float16"),
    (put("measures", []), "Measures has "),
    (put("random/python", [3]), "ValueError"),
    (put("snapshots", [{"index": 0}]), "TypeError"),
]


@pytest.mark.parametrize(
    ("edit", "why"), [*USUAL, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MORE)]
)
def test_content_that_does_not_fit_is_refused_and_the_one_before_is_used(
    edit: Edit, why: str, whole: Path, tmp_path: Path
) -> None:
    """By all ranks, though only one has it; the run ends with the same parameters."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = change(folder, edit)
    outcome = trained(folder)
    assert (outcome.failure, outcome.bad_input) == (None, None)
    refused, resumed = outcome.notices
    assert refused.startswith(f"checkpoint refused: {path}: ")
    assert why in refused
    assert resumed == "resumed from checkpoint 3, step 3"
    ends = [(each / "parameters.safetensors").read_bytes() for each in (whole, folder)]
    assert ends[0] == ends[1]


def test_files_of_two_ranks_that_were_swapped_are_refused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    first, second = (
        folder / "checkpoints" / "0004" / checkpoints.rank_file(rank) for rank in range(2)
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


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (tensor("/strategy/optimizer/0/exp_avg", torch.Tensor.half), "exp_avg is torch.float16"),
        (tensor("/strategy/optimizer/0/exp_avg", lambda values: values[:1].clone()), "(1,)"),
        (put("strategy", 5), "TypeError"),
    ],
)
def test_a_strategys_state_that_does_not_fit_is_one_line(
    edit: Edit, why: str, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = change(folder, edit)
    outcome = trained(folder)
    assert outcome.bad_input is not None
    assert "\n" not in outcome.bad_input
    assert outcome.bad_input.startswith(f"{path} does not fit this run: ")
    assert why in outcome.bad_input
    assert outcome.bad_input.endswith("remove its folder to go on from the checkpoint before it")

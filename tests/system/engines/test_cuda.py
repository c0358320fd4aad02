"""What only a GPU can show. Run with `pytest -m cuda` where there is one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.commands import started, torchrun
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

import orchestra
from orchestra import AllReduce, Pipeline, Single, Strategy
from orchestra.experiments.file import load
from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder

pytestmark = pytest.mark.cuda

EXAMPLES: dict[str, Strategy] = dict(load(ROOT / "examples/strategies.yaml").strategies)
SETTINGS: dict[str, Any] = {"steps": 80, "batch_size": 16, "optimizer": "SGD(lr=0.05)"}
RANKS = 4


def needs_one_gpu_each(strategy: Strategy) -> bool:
    """NCCL takes no two ranks on one GPU."""
    return strategy == AllReduce("native")


def test_there_is_a_gpu() -> None:
    assert torch.cuda.is_available()


@pytest.mark.parametrize("label", EXAMPLES)
def test_every_strategy_trains_on_a_gpu(label: str, tmp_path: Path) -> None:
    """Ranks share the GPU; messages are staged through pinned memory."""
    strategy = EXAMPLES[label]
    alone = isinstance(strategy, Single) or needs_one_gpu_each(strategy)
    ranks = 1 if alone else RANKS
    records = {
        device: orchestra.train(
            "digits", strategy, ranks, out=tmp_path / device, device=device, quiet=True, **SETTINGS
        )
        for device in ("cuda", "cpu")
    }
    assert records["cuda"].ending.status == "completed"
    assert records["cuda"].learned.metrics["accuracy"] > 0.2  # 0.1 untrained
    if strategy.traits().lockstep and not strategy.traits().depends_on_speed:
        there, here = (
            load_file(tmp_path / device / "parameters.safetensors") for device in ("cuda", "cpu")
        )
        for name, tensor in here.items():
            torch.testing.assert_close(there[name], tensor, rtol=0, atol=5e-3)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("strategy", [AllReduce("native"), Single()])
def test_one_rank_with_a_precision(strategy: Strategy, precision: str, tmp_path: Path) -> None:
    record = orchestra.train(
        "digits", strategy, 1, out=tmp_path, device="cuda", precision=precision, quiet=True,
        epochs=15, batch_size=32, optimizer="SGD(lr=0.05, momentum=0.9)",
    )  # fmt: skip
    assert record.learned.metrics["accuracy"] > 0.9


def test_a_pipeline_of_two_stages(tmp_path: Path) -> None:
    record = orchestra.train(
        "digits", Pipeline(), 2, out=tmp_path, device="cuda", quiet=True,
        epochs=15, optimizer="SGD(lr=0.05)",
    )  # fmt: skip
    assert record.learned.metrics["accuracy"] > 0.85


@pytest.mark.parametrize(
    "strategy", ["AllReduce('ring')", "ParameterServer", "LocalSGD(4, outer=Nesterov(0.7, 0.9))"]
)
def test_a_killed_run_goes_on_bit_for_bit(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, whose random state is the GPU's, and deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def command(out: Path) -> list[str]:
        settings = {"epochs": 4, "batch_size": 16, "checkpoint_every": 7, "device": "cuda"}
        task = "tests.support.tasks_for_tests:deterministic_digits"
        words = ["train", "--task", task, "--strategy", strategy, "--ranks", "3"]
        for key, value in settings.items():
            words += ["--set", f"{key}={value}"]
        return [*words, "--out", str(out)]

    def checkpoints() -> list[Path]:
        return list((tmp_path / "killed" / "checkpoints").glob("0*"))

    with started(command(tmp_path / "killed"), tmp_path) as launched:
        wait_until(lambda: bool(checkpoints()) or launched.process.poll() is not None, "checkpoint")
        launched.process.kill()
        assert launched.end().status == -signal.SIGKILL
    digests = []
    for name in ("killed", "whole"):
        with started(command(tmp_path / name), tmp_path) as launched:
            ended = launched.end()
        assert ended.status == 0, ended.err
        digests.append(_only(tmp_path / name).learned.parameters_sha256)
    assert digests[0] == digests[1]


def _only(folder: Path) -> RunRecord:
    return RunFolder(folder).record


@pytest.mark.parametrize(
    ("ranks", "workers", "strategy"),
    [
        (1, 1, "AllReduce('native')"),
        (2, 2, "AllReduce('ring')"),
        (2, 2, "LocalSGD(2)"),
        (3, 2, "ParameterServer(consistency='asynchronous')"),
    ],
)
def test_a_loop_of_ones_own(
    ranks: int, workers: int, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ROOT / "tests/support/scripts/gpt_distributed.py"
    options = {"strategy": strategy, "device": "cuda", "accumulation": 1, "samples": 48}
    monkeypatch.setenv("GPT_OPTIONS", json.dumps(options))
    with torchrun(script, ranks, [], tmp_path) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    states = [torch.load(path) for path in sorted(tmp_path.glob("*.pt"))]
    assert len(states) == workers  # a server's script ends in `distribute`
    for state in states:
        for name, tensor in state.items():
            assert tensor.is_cuda
            assert torch.equal(tensor, states[0][name]), name


def test_more_ranks_with_native_than_gpus_are_told_so(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there are several GPUs")
    with started(
        ["train", "--task", "digits", "--strategy", "AllReduce('native')", "--ranks", "2",
         "--set", "device=cuda", "--set", "steps=4", "--out", os.fspath(tmp_path / "out")],
        tmp_path,
    ) as launched:  # fmt: skip
        ended = launched.end()
    assert ended.status == 2
    assert "GPU" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("strategy", ["AllReduce('ring')", "LocalSGD(4)", "Gossip()"])
def test_those_that_are_left_go_on(strategy: str, tmp_path: Path) -> None:
    """Copies to go back to are on the GPU, and states of its random streams among them."""
    task = "tests.support.failing_tasks:lost('2@21', model='normalised')"
    record = orchestra.train(
        task, strategy, 3, out=tmp_path, device="cuda", min_ranks=2, steps=40, batch_size=8,
        optimizer="Adam(lr=0.01)", quiet=True,
    )  # fmt: skip
    assert record.ending.status == "completed"
    (change,) = record.ending.regroupings
    assert (change.lost, change.ranks) == ((2,), 2)
    assert record.learned.samples == 40 * 3 * 8

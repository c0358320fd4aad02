"""Trainers of Hugging Face Transformers under Orchestra, beside what they do by themselves.

The library takes seconds to import, so that tests do it where they need it.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.commands import torchrun
from tests.support.paths import ROOT, SCRIPTS

from orchestra.errors import InputError

SCRIPT = SCRIPTS / "trainer_runs.py"

FULL: dict[str, Any] = {
    "num_train_epochs": 2,  # of 10 batches on each of 2 workers: groups of 4, 4 and 2
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0.5,
    "bf16": True,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "include_num_input_tokens_seen": True,
}
PLAIN: dict[str, Any] = {
    "num_train_epochs": 2,
    "max_grad_norm": 0,
    "average_tokens_across_devices": False,
    "eval_strategy": "epoch",
}
SGD = {**PLAIN, "optim": "sgd", "learning_rate": 0.1}
IN_ORDER = {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
STREAM = {"stream": True, "dropout": 0, "max_steps": 4, "gradient_accumulation_steps": 2}
LOCAL = {
    **PLAIN,
    **IN_ORDER,
    "strategy": "LocalSGD(3)",
    "optim": "adamw_torch",
    "save_strategy": "steps",
    "save_steps": 7,
    "include_num_input_tokens_seen": True,
}
BESIDE = "ParameterServer(placement='beside', returns='gradients')"
SWITCH = f"Switch(AllReduce('ring'), {BESIDE}, when=AfterSteps(4))"
ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"

SWITCH_ASYNCHRONOUS = (  # the rule watches the loss
    f"Switch(AllReduce('ring'), {ASYNCHRONOUS[:-1]}, placement='beside'), when=LossStable)"
)

Found = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _offline() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def launch(runs: list[dict[str, Any]], ranks: int, folder: Path) -> str:
    """The runs one after the other, in the same processes; what was printed."""
    with torchrun(SCRIPT, ranks, [json.dumps(runs)], folder) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    return ended.out


def found(folder: Path, name: str, rank: int = 0) -> Found:
    loaded: Found = torch.load(folder / f"{name}-{rank}.pt", weights_only=True)
    return loaded


def logged(run: Found, key: str) -> list[float]:
    return [line[key] for line in run["history"] if key in line]


def equal(folder: Path, one: str, other: str) -> bool:
    """Whether both have trained the same, bit for bit, on each of two workers."""
    return all(
        torch.equal(found(folder, one, rank)["vector"], found(folder, other, rank)["vector"])
        for rank in range(2)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what the library's own DistributedDataParallel comes to on two ranks."""
    path = tmp_path_factory.mktemp("trainers")
    runs = [{"name": "ddp", **FULL}, {"name": "ddp-sgd", **SGD}, {"name": "ddp-stream", **STREAM}]
    launch(runs, 2, path)
    return path


AVERAGED = [
    {"name": "ring", "strategy": "AllReduce('ring')", **FULL},
    {"name": "beside", "strategy": BESIDE, **FULL},
    {"name": "switch", "strategy": SWITCH, **FULL},
    {"name": "resumed", "strategy": SWITCH, "resume": "out-switch/checkpoint-4", **FULL},
    {"name": "stream", "strategy": "AllReduce('ring')", **STREAM},
    {"name": "taken-over", "strategy": BESIDE, "resume": "out-ddp/checkpoint-2", **FULL},
]
APART = [
    {"name": "every-step", "strategy": "LocalSGD(1)", **SGD},
    {"name": "own", "strategy": "LocalSGD(3)", "rate": 0.1, "epochs": 2},
    {"name": "as-own", "strategy": "LocalSGD(3)", **SGD, **IN_ORDER, "eval_strategy": "no"},
    {"name": "local", **LOCAL},
    {"name": "stopped", **LOCAL, "max_steps": 7},
    {"name": "local-resumed", "resume": "out-stopped/checkpoint-7", **LOCAL},
    {"name": "async", "strategy": SWITCH_ASYNCHRONOUS, **SGD},
]
UNEVEN: dict[str, Any] = {
    "samples": 37,
    "dropout": 0,
    "optim": "sgd",
    "learning_rate": 0.1,
    "max_grad_norm": 0.5,
}


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """By the same under Orchestra on two ranks, whose results are in the folder then."""
    uneven = {"name": "uneven", "strategy": "AllReduce('ring')", "num_train_epochs": 1, **UNEVEN}
    return launch([*AVERAGED, *APART, uneven], 2, folder)


@pytest.mark.parametrize("name", [run["name"] for run in AVERAGED])
def test_gradients_averaged_are_those_of_ddp(name: str, folder: Path, printed: str) -> None:
    """With accumulation, clipping, bf16, a schedule, dropout, another number of labels in each
    batch; of a stream without a length; from checkpoints in the midst of an epoch, also DDP's."""
    reference = "ddp-stream" if name == "stream" else "ddp"
    assert equal(folder, reference, name)
    ours, theirs = (found(folder, run) for run in (name, reference))
    for key in ("loss", "grad_norm", "learning_rate", "step", "epoch"):
        assert logged(ours, key) == logged(theirs, key), key
    # The library divides by the labels of other ranks' batches, too, where it evaluates.
    torch.testing.assert_close(
        logged(ours, "eval_loss"), logged(theirs, "eval_loss"), rtol=5e-3, atol=0
    )


def test_the_first_rank_logs_and_saves(folder: Path, printed: str) -> None:
    assert printed.count("train_loss") == len([*AVERAGED, *APART])  # one has no Trainer
    for rank in range(2):
        ring = found(folder, "ring", rank)
        assert ring["world_size"] == 2
        assert ring["first"] == [rank == 0] * 3
        assert set(logged(ring, "eval_rank")) == {0.0}  # all go by the first worker's metrics
    files = {path.name for path in (folder / "out-ring" / "checkpoint-4").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "orchestra.pt", "rng_state_1.pth"} <= files


@pytest.mark.parametrize(("ours", "theirs"), [("every-step", "ddp-sgd"), ("as-own", "own")])
def test_workers_apart(ours: str, theirs: str, folder: Path, printed: str) -> None:
    """An average after every step of SGD is that of gradients; rounds are those of a loop of one's
    own. A mean of parameters is rounded otherwise than one of gradients."""
    for rank in range(2):
        torch.testing.assert_close(
            found(folder, ours, rank)["vector"],
            found(folder, theirs, rank)["vector"],
            rtol=1e-4,
            atol=2e-6,
        )


def test_tokens_are_counted_over_all_workers(folder: Path, printed: str) -> None:
    key = "num_input_tokens_seen"
    for name in ("ring", "beside", "switch"):
        assert logged(found(folder, name), key) == logged(found(folder, "ddp"), key)
    assert logged(found(folder, "resumed"), key) == logged(found(folder, "ddp"), key)
    # In a run that goes on in the middle of a round, too: 2 texts of 8 tokens on each of 2 workers
    for name in ("local", "local-resumed"):
        assert logged(found(folder, name), key)[-1] == 2 * 10 * 2 * 16


def test_evaluation_is_that_of_ddp(folder: Path, printed: str) -> None:
    ours, theirs = (found(folder, name) for name in ("every-step", "ddp-sgd"))
    torch.testing.assert_close(
        logged(ours, "eval_loss"), logged(theirs, "eval_loss"), rtol=1e-5, atol=0
    )


def test_resumed_in_the_middle_of_a_round(folder: Path, printed: str) -> None:
    assert equal(folder, "local", "local-resumed")


def test_asynchronous_servers_beside(folder: Path, printed: str) -> None:
    assert improves(folder, "async")


def test_unequal_last_batches(folder: Path, printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of one process with the batch of both workers, label by label."""
    from tests.support.scripts import trainer_runs

    monkeypatch.chdir(folder)
    trainer_runs.run("alone", num_train_epochs=1, per_device_train_batch_size=4, **UNEVEN)
    alone, both = found(folder, "alone"), found(folder, "uneven")
    torch.testing.assert_close(both["vector"], alone["vector"], rtol=1e-4, atol=2e-6)
    assert len(logged(both, "loss")) == 10


def improves(folder: Path, name: str) -> bool:
    """Whether both workers end with the same parameters, and the loss has come down."""
    ours, other = (found(folder, name, rank) for rank in range(2))
    losses = logged(ours, "loss")
    return torch.equal(ours["vector"], other["vector"]) and losses[-1] < 0.9 * losses[0]


@pytest.mark.lab
def test_dedicated_servers(folder: Path) -> None:
    """They come back for the next Trainer, and end well, also one that was a worker before. First
    the example, whose files are there then."""
    dedicated = "ParameterServer(returns='gradients')"
    switch = f"Switch(AllReduce('ring'), {ASYNCHRONOUS}, when=AfterSteps(3))"
    resumed = {"resume": "out-dedicated/checkpoint-2", "strategy": dedicated}
    launch(
        [
            {"arguments": ["--epochs", "1", "--strategy", "LocalSGD(8)"]},
            {"name": "dedicated", "strategy": dedicated, **FULL},
            {"name": "dedicated-resumed", **FULL, **resumed},
            {"name": "dedicated-async", "strategy": ASYNCHRONOUS, **SGD},
            {"name": "to-servers", "strategy": switch, **SGD},
        ],
        3,
        folder,
    )
    assert (folder / "transformers-trainer" / "checkpoint-6" / "orchestra.pt").exists()
    assert equal(folder, "ddp", "dedicated")
    assert equal(folder, "ddp", "dedicated-resumed")
    assert found(folder, "dedicated")["world_size"] == 2
    assert improves(folder, "dedicated-async")
    assert improves(folder, "to-servers")
    assert not (folder / "to-servers-2.pt").exists()


def test_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "orchestra.integrations.transformers"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install '\.\[transformers\]'"):
        importlib.import_module(name)


def test_what_would_distribute_twice_is_refused(tmp_path: Path) -> None:
    import transformers
    from tests.support.scripts import trainer_runs

    from orchestra.integrations.transformers import distribute

    settings = {"accelerator_config": {"split_batches": True}}
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", **settings
    )
    trainer = transformers.Trainer(trainer_runs.model(), arguments)
    with pytest.raises(InputError, match="split_batches does not go with Orchestra"):
        distribute(trainer, "AllReduce")
    with pytest.raises(InputError, match="expected a strategy or its notation, got 3"):
        distribute(trainer, 3)  # type: ignore[arg-type]


def test_few_lines_of_a_script_change() -> None:
    lines = (ROOT / "examples" / "transformers_trainer.py").read_text().splitlines()
    assert 0 < sum("distribute" in line for line in lines if not line.startswith("The ")) <= 5

"""`orchestra.integrations.lightning`, against Lightning's own DistributedDataParallel.

The library takes seconds to import, so that the test that needs it does it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.commands import Started, torchrun
from tests.support.paths import ROOT, SCRIPTS
from tests.support.threads import run_ranks

from orchestra.errors import InputError
from orchestra.integrations.worker_group import WorkerGroup
from orchestra.worker.runtime import Runtime

# Lightning says so wherever Slurm is installed.
pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command is available")

SCRIPT = SCRIPTS / "lightning_fits.py"
EXAMPLE = ROOT / "examples" / "lightning_trainer.py"

Results = dict[str, Any]


def launched(program: str, ranks: int, workers: int, folder: Path) -> list[Results]:
    """What the fits of `program` trained on each worker, all ranks having ended well."""
    with torchrun(SCRIPT, ranks, [program, str(folder)], folder) as process:
        process.process.wait(150.0)  # each one imports Lightning, which a busy machine feels
        ended = process.end()
    assert ended.status == 0, ended.err
    assert len(list(folder.glob(f"{program}-*.pt"))) == workers
    files = [folder / f"{program}-{rank}.pt" for rank in range(workers)]
    return [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fits")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Results]:
    """Of two workers."""
    return launched("two_workers", 2, 2, folder)


@pytest.fixture(scope="module")
def served(folder: Path) -> list[Results]:
    """Of two workers; a third rank serves."""
    return launched("one_serves", 3, 2, folder)


def equal(one: Results, other: Results) -> bool:
    """Whether parameters and buffers are, bit by bit."""
    return all(torch.equal(one["state"][name], other["state"][name]) for name in other["state"])


@pytest.mark.parametrize("options", ["", "-full", "-bf16"])
def test_all_reduce_is_distributed_data_parallel(options: str, two: list[Results]) -> None:
    """Also with accumulation, clipping, Adam and a schedule, or with mixed precision."""
    for mine in two:
        ours, theirs = mine["ring" + options], mine["ddp" + options]
        assert equal(ours, theirs)
        assert ours["metrics"] == theirs["metrics"]
        assert (ours["steps"], ours["rate"]) == (theirs["steps"], theirs["rate"])
    assert not equal(two[0]["ddp"], two[0]["ddp" + (options or "-full")])


@pytest.mark.parametrize("options", ["", "-full"])
def test_servers_beside_are_distributed_data_parallel(options: str, two: list[Results]) -> None:
    for mine in two:
        assert equal(mine["beside" + options], mine["ddp" + options])
        assert mine["beside" + options]["metrics"] == mine["ddp" + options]["metrics"]


@pytest.mark.parametrize("options", ["", pytest.param("-full", marks=pytest.mark.lab)])
def test_a_dedicated_server_is_distributed_data_parallel(
    options: str, two: list[Results], served: list[Results]
) -> None:
    for mine in served:
        assert equal(mine["dedicated" + options], two[0]["ddp" + options])
        assert mine["dedicated" + options]["metrics"] == two[0]["ddp" + options]["metrics"]


@pytest.mark.parametrize("name", ["asynchronous", "switch"])
def test_workers_of_an_asynchronous_server_agree(name: str, served: list[Results]) -> None:
    """One of three ranks serves from the start, or from the middle of an epoch on; the whole of
    the evaluation is dealt out to the others."""
    first, second = (mine[name] for mine in served)
    assert equal(first, second)
    assert first["metrics"] == second["metrics"]
    assert all(bool(tensor.isfinite().all()) for tensor in first["state"].values())
    assert not equal(first, served[0]["dedicated"])


def test_local_sgd_after_each_step_is_distributed_data_parallel(two: list[Results]) -> None:
    """But for rounding: mean(p - r g) is not p - r mean(g) to the last bit."""
    for mine in two:
        for name, tensor in mine["ddp"]["state"].items():
            torch.testing.assert_close(mine["local-1"]["state"][name], tensor)


@pytest.mark.parametrize("name", ["local-3", "switch"])
def test_replicas_are_those_of_a_plain_loop(name: str, two: list[Results]) -> None:
    for mine in two:
        assert equal(mine[name], mine["plain-" + name])
        assert not equal(mine[name], mine["ddp"])
        assert mine[name]["metrics"] == two[0][name]["metrics"]


@pytest.mark.parametrize("place", ["step=4", "epoch=0", "step=8"])
@pytest.mark.parametrize("name", ["ring", "beside", "dedicated", "local", "switch"])
def test_a_fit_goes_on_from_a_checkpoint_bit_for_bit(
    name: str, place: str, two: list[Results], served: list[Results]
) -> None:
    """With Adam, a schedule and a shuffled order; in mid-epoch, too."""
    for mine in served if name == "dedicated" else two:
        whole, resumed = mine[f"{name}-resumed"], mine[f"{name}-resumed-{place}"]
        assert equal(resumed, whole)
        for key in ("mean", "worst"):
            assert resumed["metrics"][key] == whole["metrics"][key]
        assert (resumed["steps"], resumed["rate"]) == (whole["steps"], whole["rate"])


def test_lightning_alone_goes_on_from_a_checkpoint_of_servers(two: list[Results]) -> None:
    """Their moments are in it."""
    assert equal(two[0]["ddp-resumed"], two[0]["beside-resumed"])


def test_epochs_cut_short_leave_one_model_that_the_first_rank_alone_saves(
    two: list[Results], folder: Path
) -> None:
    """With evaluations between two averages, early stopping, and the best checkpoint."""
    first, second = (mine["cut-short"] for mine in two)
    assert equal(first, second)
    assert first["metrics"] == second["metrics"]
    assert first["best"] == first["validated"] == second["validated"]
    assert first["path"] == second["path"]
    assert first["steps"] == 8  # in the middle of an epoch
    assert {path.name for path in (folder / "own-0" / "checkpoints").iterdir()} >= {"last.ckpt"}
    assert (folder / "own-0" / "lightning_logs" / "version_0" / "metrics.csv").exists()
    assert not (folder / "own-1").exists()


def test_a_stream_is_dealt_out(two: list[Results]) -> None:
    for mine in two:
        assert mine["stream"]["steps"] == 10
        assert equal(mine["stream"], mine["ddp"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("clipping", "returns='gradients'"),
        ("reload", "reload_dataloaders_every_n_epochs"),
        ("batchnorm", "GroupNorm"),
        ("loaders", "one training loader"),
        ("optimizers", "orchestra.distribute"),
        ("average", "EMAWeightAveraging: under LocalSGD(3) workers' models differ"),
        ("rates", "LearningRateFinder: a search trains"),
        ("sizes", "BatchSizeFinder: a search trains"),
        ("frozen", "BackboneFinetuning: the optimizer has to hold all parameters"),
    ],
)
def test_what_cannot_be_done_is_refused(name: str, words: str, two: list[Results]) -> None:
    for mine in two:
        assert words in mine[name]


def test_devices_without_a_launcher_are_refused() -> None:
    import lightning.pytorch as lightning

    from orchestra.integrations.lightning import OrchestraStrategy

    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=OrchestraStrategy("AllReduce"), logger=False
    )
    with pytest.raises(InputError, match="torchrun --nproc-per-node 2"):
        trainer.strategy.setup_environment()


def test_a_group_of_workers_reduces_gathers_and_broadcasts() -> None:
    """Of three ranks the last only serves, and is a group of its own."""

    def program(runtime: Runtime) -> Any:
        group = WorkerGroup(runtime.transport, lambda: (0, 1))
        own = torch.arange(2) + runtime.rank
        group.barrier()
        return (
            {name: group.reduce(own, name).tolist() for name in ("mean", "sum", "max", "MIN")},
            [part.tolist() for part in group.gather(own[: 1 + runtime.rank % 2])],
            group.broadcast({"path": f"of {runtime.rank}"}, 1 if runtime.rank < 2 else 0),
            group.is_several(),
        )

    reduced = {"mean": [0.5, 1.5], "sum": [1, 3], "max": [1, 2], "MIN": [0, 1]}
    alone = {name: [2, 3] for name in reduced}
    together = (reduced, [[0], [1, 2]], {"path": "of 1"}, True)
    assert run_ranks(3, program) == [together, together, (alone, [[2]], {"path": "of 2"}, False)]


def test_only_plain_data_is_broadcast() -> None:
    def program(runtime: Runtime) -> None:
        group = WorkerGroup(runtime.transport, lambda: (0, 1))
        if runtime.rank == 0:
            group.broadcast(object())

    with pytest.raises(InputError, match="object is no JSON data"):
        run_ranks(2, program)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "orchestra.integrations.lightning"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(InputError, match=r"pip install '\.\[lightning\]'"):
        importlib.import_module(name)


def test_the_example_runs_in_one_process_and_differs_by_two_lines(tmp_path: Path) -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len([line for line in lines if "Strategy" in line and "--" not in line]) == 2
    with Started([sys.executable, str(EXAMPLE), "--epochs=1"], tmp_path) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    assert "accuracy 0." in ended.out

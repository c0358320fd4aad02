"""Fits with Lightning's Trainer, one after the other in one process; what they trained is saved."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

import orchestra
from orchestra.errors import InputError
from orchestra.integrations.lightning import OrchestraStrategy

BATCH, BATCHES, EPOCHS = 4, 5, 2
RANK = int(os.environ.get("RANK", "0"))
RESULTS: dict[str, Any] = {}
PLACES = ("step=4", "epoch=0", "step=8")
BF16: dict[str, Any] = {"precision": "bf16-mixed"}
FULL: dict[str, Any] = {
    "accumulate_grad_batches": 3,
    "gradient_clip_val": 0.05,
    "optimizer": "Adam",
}


def data(workers: int = 2, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(BATCH * BATCHES * workers, 4, generator=generator)
    return TensorDataset(features, features.sum(1, keepdim=True).sin())


class Stream(IterableDataset[Any]):
    """The same samples, of which nobody knows how many there are."""

    def __iter__(self) -> Iterator[Any]:
        return (data()[index] for index in range(len(data())))


def evaluated() -> DataLoader[Any]:
    return DataLoader(data(1, seed=2), batch_size=3)


class Model(LightningModule):
    """With a schedule in steps, and metrics of both kinds."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.name = optimizer
        self.mean = MeanMetric()
        self.automatic_optimization = optimizer != "two"

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        losses = (self.layers(batch[0]) - batch[1]).square()
        self.mean.update(losses)
        self.log("mean", self.mean, on_epoch=True)
        self.log("worst", losses.max(), reduce_fx="max", sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.name == "two":
            return [
                torch.optim.SGD(layer.parameters()) for layer in (self.layers[0], self.layers[2])
            ]
        kind = getattr(torch.optim, self.name)
        optimizer = kind(self.parameters(), lr=0.05, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    name: str,
    strategy: Any,
    *,
    optimizer: str = "SGD",
    loader: DataLoader[Any] | None = None,
    resume: Any = None,
    **options: Any,
) -> Trainer:
    """Fit on all workers; keep what it trained under `name`."""
    seed_everything(3, verbose=False)
    module = Model(optimizer)
    arguments: dict[str, Any] = {"max_epochs": EPOCHS, "logger": False, **options}
    arguments.setdefault("enable_checkpointing", False)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy if strategy == "ddp" else OrchestraStrategy(strategy),
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    loader = DataLoader(data(), BATCH) if loader is None else loader
    trainer.fit(module, loader, evaluated(), ckpt_path=resume)
    RESULTS[name] = {
        "state": {key: value.clone() for key, value in module.state_dict().items()},
        "metrics": dict(trainer.callback_metrics),
        "steps": trainer.global_step,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
    }
    return trainer


class DealtOut(DistributedSampler[Any]):
    """Deals out batches as Orchestra does: the first of two workers gets the first half of each
    global batch."""

    def __iter__(self) -> Iterator[int]:
        whole = torch.arange(len(self.dataset)).view(-1, self.num_replicas, BATCH)  # type: ignore[arg-type]
        return iter(whole[:, self.rank].flatten().tolist())


def plain_loop(name: str, strategy: str) -> None:
    """What `fit` does, in a loop that `orchestra.distribute` distributes."""
    seed_everything(3, verbose=False)
    module = Model()
    [optimizer], [schedule] = module.configure_optimizers()
    _, _, batches = orchestra.distribute(module, optimizer, DataLoader(data(), BATCH), strategy)
    for _ in range(EPOCHS):
        for features, targets in batches:
            optimizer.zero_grad()
            functional.mse_loss(module.layers(features), targets).backward()
            optimizer.step()
            schedule["scheduler"].step()
    RESULTS[name] = {"state": module.state_dict()}


def two_workers(folder: Path) -> None:
    """Against DistributedDataParallel, which comes last since it makes a process group."""
    ring, beside = "AllReduce('ring')", "ParameterServer(placement='beside'{})"
    switch = "Switch(AllReduce('ring'), LocalSGD(2), when=AfterSteps(4))"
    # As where the variables were set by hand: Lightning then deletes one of them after a fit
    elastic = os.environ.pop("TORCHELASTIC_RUN_ID")
    fit("ring", ring)
    fit("ring-full", ring, **FULL)
    os.environ["TORCHELASTIC_RUN_ID"] = elastic
    fit("ring-bf16", ring, **BF16)
    fit("beside", beside.format(""))
    fit("beside-full", beside.format(", returns='gradients'"), **FULL)
    fit("local-1", "LocalSGD(1)")
    for name, strategy in {"local-3": "LocalSGD(3)", "switch": switch}.items():
        fit(name, strategy)
        plain_loop(f"plain-{name}", strategy)
    interrupted(folder, "ring-resumed", ring)
    interrupted(folder, "beside-resumed", beside.format(""), shuffle=False)
    interrupted(folder, "local-resumed", "LocalSGD(3)")
    interrupted(folder, "switch-resumed", switch)
    cut_short(folder)
    refusals()
    sampler = DealtOut(data(), num_replicas=2, rank=RANK)
    runs: dict[str, Any] = {"": {}, "-full": FULL, "-bf16": BF16}
    for name, options in runs.items():
        loader = DataLoader(data(), BATCH, sampler=sampler)
        fit("ddp" + name, "ddp", loader=loader, devices=2, **options)
    of_servers = folder / "beside-resumed" / "epoch=0.ckpt"
    loader = DataLoader(data(), BATCH, sampler=sampler)
    fit("ddp-resumed", "ddp", loader=loader, devices=2, optimizer="Adam", resume=of_servers)


def interrupted(folder: Path, name: str, strategy: str, *, shuffle: bool = True) -> None:
    """In one piece, then from checkpoints in the middle of an epoch and at its end."""

    def go_on(name: str, resume: Path | None) -> None:
        place = folder / name
        callbacks = [
            ModelCheckpoint(place, "{step}", every_n_train_steps=4, save_top_k=-1),
            ModelCheckpoint(place, "{epoch}", every_n_epochs=1, save_top_k=-1),
        ]
        loader = DataLoader(data(), BATCH, shuffle=shuffle)
        trainer = {"enable_checkpointing": True, "callbacks": callbacks}
        fit(name, strategy, optimizer="Adam", loader=loader, resume=resume, **trainer)

    go_on(name, None)
    for place in PLACES:
        go_on(f"{name}-{place}", folder / name / f"{place}.ckpt")


def cut_short(folder: Path) -> None:
    """Epochs that end early, evaluations in the middle, checkpoints and logs."""
    own = folder / f"own-{RANK}"
    best = ModelCheckpoint(own / "checkpoints", monitor="mean", save_last=True)
    trainer = fit(
        "cut-short",
        "LocalSGD(4)",
        max_epochs=9,
        limit_train_batches=3,
        val_check_interval=2,
        log_every_n_steps=1,
        enable_checkpointing=True,
        callbacks=[best, EarlyStopping("mean", min_delta=10.0, patience=2)],
        logger=CSVLogger(own),
    )
    found = trainer.validate(ckpt_path="best", verbose=False, dataloaders=evaluated())
    RESULTS["cut-short"] |= {
        "best": best.best_model_score,
        "path": best.best_model_path,
        "validated": found[0]["mean"],
    }
    fit("stream", "AllReduce('ring')", loader=DataLoader(Stream(), BATCH))


def refusals() -> None:
    """What is said about what cannot be done."""

    def refused(name: str, strategy: str = "AllReduce", **options: Any) -> None:
        try:
            fit(name, strategy, **options)
        except InputError as error:
            RESULTS[name] = str(error)

    refused("clipping", "ParameterServer(placement='beside')", gradient_clip_val=0.1)
    refused("reload", reload_dataloaders_every_n_epochs=1)
    refused("batchnorm", sync_batchnorm=True)
    refused("loaders", loader=[DataLoader(data(), BATCH), DataLoader(data(), BATCH)])
    refused("optimizers", optimizer="two")
    refused("average", "LocalSGD(3)", callbacks=[EMAWeightAveraging()])
    refused("rates", callbacks=[LearningRateFinder()])
    refused("sizes", callbacks=[BatchSizeFinder()])
    refused("frozen", callbacks=[BackboneFinetuning()])


def one_serves(folder: Path) -> None:
    """Two workers; the third rank serves, and comes back for the next fit."""
    fit("dedicated", "ParameterServer")
    fit("dedicated-full", "ParameterServer(returns='gradients')", **FULL)
    interrupted(folder, "dedicated-resumed", "ParameterServer")
    fit("asynchronous", "ParameterServer(consistency='asynchronous')")
    switch = (
        "Switch(AllReduce('ring'), ParameterServer(consistency='asynchronous'), when=AfterSteps(4))"
    )
    fit("switch", switch, loader=DataLoader(data(3), BATCH))


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    globals()[sys.argv[1]](folder)
    torch.save(RESULTS, folder / f"{sys.argv[1]}-{RANK}.pt")

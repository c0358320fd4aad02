"""Handwritten digits with Lightning's Trainer, distributed by Orchestra.

    python lightning_trainer.py
    torchrun --nproc-per-node 3 lightning_trainer.py --strategy "ParameterServer(servers=1)"

The import and `strategy=` are all that differs from a script for one process.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from orchestra.integrations.lightning import OrchestraStrategy


class Digits(LightningModule):
    """Images of 8 x 8 pixels, flattened, to ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        logits = self.layers(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("loss", functional.cross_entropy(logits, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]


def main() -> None:
    """Train, evaluate and save, or go on from a checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--strategy", default="AllReduce('ring')")
    parser.add_argument("--resume", help="a checkpoint")
    options = parser.parse_args()

    seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, validation = torch.utils.data.random_split(data, [0.8, 0.2])
    trainer = Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        strategy=OrchestraStrategy(options.strategy),
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint("checkpoints", monitor="accuracy", mode="max", save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        Digits(),
        DataLoader(train, batch_size=16, shuffle=True),
        DataLoader(validation, batch_size=64),
        ckpt_path=options.resume,
    )
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()

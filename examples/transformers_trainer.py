"""A small GPT-2 that learns to write like this file, with a Trainer that is distributed.

    python transformers_trainer.py
    torchrun --nproc-per-node 2 transformers_trainer.py --strategy "LocalSGD(8)"

The import and the call of `distribute` are all that differs from a script for one process, or for
DistributedDataParallel.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from orchestra.integrations.transformers import distribute

LENGTH = 32


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Every fourth window of this file."""

    def __init__(self) -> None:
        text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
        self._windows = text.unfold(0, LENGTH, 4)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._windows[index], "labels": self._windows[index]}


def main() -> None:
    """Train, with accumulation, clipping, a schedule and checkpoints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--strategy", default="AllReduce('ring')")
    parser.add_argument("--folder", default="transformers-trainer")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4)
    arguments = TrainingArguments(
        options.folder,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_grad_norm=1.0,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=5,
        save_strategy="epoch",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Windows())
    trainer = distribute(trainer, options.strategy)
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()

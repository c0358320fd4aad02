"""Trainers of Hugging Face Transformers, one after the other: with a strategy, under Orchestra;
without one as the library distributes them itself. Writes what each one has come to.

    torchrun ... trainer_runs.py '[{"name": "ring", "strategy": "AllReduce", "max_steps": 4}]'
"""

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import orchestra
from orchestra.integrations.transformers import distribute

LENGTH, WORDS = 8, 16


class Texts(Dataset[dict[str, Tensor]]):
    """Counting upwards from anywhere; every sample has another number of labels."""

    def __init__(self, samples: int) -> None:
        numbers = torch.arange(samples)[:, None] * 5 + torch.arange(LENGTH)
        self._inputs = numbers % WORDS
        labelled = torch.arange(LENGTH) < 3 + torch.arange(samples)[:, None] % 5
        self._labels = torch.where(labelled, self._inputs, -100)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._inputs[index], "labels": self._labels[index]}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same, with no length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        texts = Texts(40)
        return (texts[index] for index in range(40))


def model(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, **drops))


def run(
    name: str,
    strategy: str | None = None,
    samples: int = 40,
    dropout: float = 0.1,
    stream: bool = False,
    resume: str | None = None,
    **settings: Any,
) -> None:
    usual = {
        "learning_rate": 0.01,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    arguments = TrainingArguments(
        f"out-{name}", use_cpu=True, report_to="none", disable_tqdm=True, **{**usual, **settings}
    )
    trainer = Trainer(
        model(dropout),
        arguments,
        train_dataset=Stream() if stream else Texts(samples),
        eval_dataset=Texts(24),
        compute_metrics=lambda _: {"rank": float(orchestra.rank())},
    )
    if strategy is not None:
        trainer = distribute(trainer, strategy)
    trainer.train(resume_from_checkpoint=resume)
    place = {
        "world_size": arguments.world_size,
        "first": [arguments.should_save, arguments.should_log, trainer.is_world_process_zero()],
    }
    write(name, trainer.model, history=trainer.state.log_history, **place)


def own_loop(name: str, strategy: str, rate: float, epochs: int) -> None:
    """What a Trainer without schedule and shuffling does, as a loop of one's own."""
    mine = model()
    optimizer = torch.optim.SGD(mine.parameters(), lr=rate)
    loader = DataLoader(Texts(40), batch_size=2, collate_fn=default_data_collator)
    mine, optimizer, batches = orchestra.distribute(mine, optimizer, loader, strategy, work="equal")
    mine.train()
    set_seed(TrainingArguments.seed)  # of dropout
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            items = batch["labels"].ne(-100).sum()
            mine(**batch, num_items_in_batch=items).loss.backward()
            optimizer.step()
    write(name, mine)


def write(name: str, trained: torch.nn.Module, **found: Any) -> None:
    vector = torch.nn.utils.parameters_to_vector(trained.parameters()).detach()
    torch.save({"vector": vector, **found}, f"{name}-{orchestra.rank()}.pt")


def example(arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    path = Path(__file__).parents[3] / "examples" / "transformers_trainer.py"
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    for settings in json.loads(sys.argv[1]):
        if "rate" in settings:
            own_loop(**settings)
        elif "arguments" in settings:
            example(**settings)
        else:
            run(**settings)

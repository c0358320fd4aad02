"""A task of one's own: a model, its data, its loss and its metrics, in one function.

cd examples && orchestra train own_task.yaml
cd examples && orchestra train --task 'own_task:spam(words=500)' --strategy 'AllReduce("ring")'
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from orchestra import Task

Mails = tuple[Tensor, Tensor]


def spam(words: int = 200, hidden: int = 32) -> Task:
    """Tell spam from other mail by how often each of `words` words occurs in it."""
    mails = made_up_mails(words)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(words, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    return Task(
        model=model,
        train=TensorDataset(*(part[:3000] for part in mails)),
        test=TensorDataset(*(part[3000:] for part in mails)),
        loss=loss,
        metrics=metrics,
    )


def loss(model: nn.Module, batch: Mails) -> Tensor:
    """The mean over the samples of the batch."""
    counts, labels = batch
    return functional.cross_entropy(model(counts), labels)


def metrics(model: nn.Module, batches: Iterator[Mails]) -> dict[str, float]:
    """Figures of the model on a whole split; any names, any numbers."""
    caught = spam_mails = right = total = 0
    for counts, labels in batches:
        found = model(counts).argmax(1)
        right += int((found == labels).sum())
        caught += int((found * labels).sum())
        spam_mails += int(labels.sum())
        total += len(labels)
    return {"accuracy": right / total, "recall": caught / spam_mails}


def made_up_mails(words: int) -> Mails:
    """Counts of words, [4000, words], and labels, [4000]; spam prefers some of the words."""
    generator = torch.Generator().manual_seed(0)  # every rank has to see the same data
    labels = torch.randint(2, (4000,), generator=generator)
    usual = torch.rand(words, generator=generator)
    liking = 1 + 0.5 * torch.randn(words, generator=generator).abs()
    rates = usual * liking ** labels[:, None]
    return torch.poisson(rates, generator=generator), labels

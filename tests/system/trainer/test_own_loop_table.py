"""docs/reference/own-loop-patterns.md, row by row."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import itertools
import json
import random
import re
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.commands import torchrun
from tests.support.own_loops import (
    BATCH,
    RANKS,
    Loop,
    Stream,
    alone,
    close,
    distributed,
    in_order,
    mean_square,
    samples,
    sgd,
    small_model,
)
from tests.support.paths import ROOT, SCRIPTS
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from orchestra.data.loaders import shard_loader
from orchestra.errors import InputError

Optimizer = torch.optim.Optimizer
TABLE = ROOT / "docs" / "reference" / "own-loop-patterns.md"
COUNT = 9
ROWS: dict[str, Callable[[], None]] = {}

ELSEWHERE: dict[str, dict[str, Sequence[str]]] = {
    "test_own_loop_backward.py": {
        "several `backward()` for one `step()`": ("test_it_trains_as_one_process",),
        "several `step()` for one batch": ("test_it_trains_as_one_process",),
        "the next batch taken before `backward()`": (
            "test_it_trains_as_one_process",
            "test_taking_ahead_is_refused_where_the_last_batch_would_come_too_late",
        ),
        "a loss that reaches no parameter on one worker": (
            "test_a_loss_that_reaches_no_parameter_is_a_gradient_of_0",
        ),
        "clipping, or other changes of gradients": (
            "test_it_trains_as_one_process",
            "test_local_clipping_before_an_average_is_refused",
        ),
    },
    "test_own_loop_optimizers.py": {
        "steps in two halves": (
            "test_changes_beside_the_step_are_exact_where_all_have_the_gradient",
            "test_changes_beside_the_step_are_refused_elsewhere",
        ),
    },
    "test_own_loop_groups.py": {
        "options of the optimizer that change": (
            "test_options_that_the_loop_changes_travel_to_where_the_update_is",
        ),
        "learning rates or other options that differ": (
            "test_rates_that_follow_a_workers_own_loss_are_refused",
            "test_rates_may_follow_a_workers_own_loss_where_each_push_is_a_step",
            "test_steps_at_unlike_batches_are_refused",
        ),
        "a parameter group added later": (
            "test_a_group_may_be_added_where_the_users_optimizer_steps",
            "test_a_group_that_others_do_not_know_of_is_refused",
        ),
        "an optimizer that keeps state in its groups": (
            "test_an_optimizer_with_state_in_its_groups_steps_where_the_user_sees_it",
            "test_an_optimizer_with_state_in_its_groups_is_refused_elsewhere",
        ),
    },
    "test_own_loop_hooks.py": {
        "training in evaluation mode, or by calls of a part of the model": (
            "test_training_that_no_hook_sees_is_that_of_the_whole_model",
        ),
    },
    "test_own_loop_state.py": {
        "`batches.state_dict()`, `batches.load_state_dict()`": ("test_resumed",),
        "a state of another strategy": ("test_states_of_something_else_are_refused",),
        "a state saved between `backward()` and `step()`": (
            "test_there_is_no_state_in_the_midst_of_a_step_or_of_a_shared_epoch",
        ),
        "model and optimizer loaded before `distribute`": (
            "test_what_is_loaded_counts",
            "test_moments_on_one_rank_only_are_refused",
        ),
        "model and optimizer loaded after `distribute`": (
            "test_what_is_loaded_counts",
            "test_no_strategy_goes_back_to_what_was_before_a_load",
        ),
        "`optimizer.state_dict()`": ("test_moments_are_saved_where_they_are",),
        "the same optimizer in a further `distribute`": ("test_moments_go_into_the_next_loop",),
    },
}
"""Rows that are shown by tests of other files: file, beginning of the row, tests."""


def row(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Mark the test of the row that begins with `name`."""

    def add(test: Callable[[], None]) -> Callable[[], None]:
        ROWS[name] = test
        return test

    return add


def plain(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        mean_square(model, batch).backward()
        optimizer.step()


def union(count: int = COUNT) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=RANKS * BATCH)


def exact(loop: Loop, *strategies: str) -> None:
    expected = alone(loop, union())
    for strategy in strategies:
        for state in distributed(loop, strategy, lambda: in_order(COUNT)):
            close(state, expected)


def refused(words: str, loop: Loop = plain, strategy: str = "AllReduce", **options: Any) -> None:
    loader = options.pop("loader", lambda: in_order(8))
    with pytest.raises(InputError, match=words):
        distributed(loop, strategy, loader, ranks=2, **options)


@row("a loss that is a mean over something else than samples")
def weighted() -> None:
    def masked(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            kept = batch[2] % 3 > 0
            if not isinstance(batches, DataLoader):
                batches.weight(int(kept.sum()))
            losses = (model(batch[0]) - batch[1]).square()[kept]
            (losses.sum() / max(len(losses), 1)).backward()
            optimizer.step()

    def stream() -> DataLoader[Any]:
        return DataLoader(Stream(samples(COUNT)), BATCH)

    exact(masked, "AllReduce", "ParameterServer(placement='beside')")
    for state in distributed(masked, "AllReduce", stream):
        close(state, alone(masked, union()))
    first, *others = distributed(masked, "LocalSGD(2)", lambda: in_order(COUNT))
    for other in others:
        close(first, other)
    distributed(masked, "PairwiseAveraging", lambda: in_order(COUNT))  # batches from a queue

    def late(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for batch in batches:
            mean_square(model, batch).backward()
            batches.weight(1)

    def negative(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for _ in batches:
            batches.weight(-1)

    refused(r"batches.weight\(\): call it after a batch was taken and before", late)
    refused("expected a whole number from 0, got -1", negative)


@row("a loss that is a sum")
def summed() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss = (model(batch[0]) - batch[1]).square().sum()
            if not isinstance(batches, DataLoader):
                loss = loss * batches.weight(len(batch[0])) / len(batch[0])
            loss.backward()
            optimizer.step()

    exact(loop, "AllReduce", "ParameterServer(placement='beside')")


@functools.cache
def numbers_of_workers() -> list[dict[str, list[float]]]:
    """What `scripts/own_numbers.py` writes on two workers, beside a server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = SCRIPTS / "own_numbers.py"
        with torchrun(script, 3, ["ParameterServer"], folder) as process:
            ended = process.end()
        assert ended.status == 0, ended.err
        return [json.loads((folder / f"numbers-{rank}.json").read_text()) for rank in range(2)]


@row("a number of your own")
def own_number() -> None:
    for found in numbers_of_workers():
        assert found["numbers"] == [2 / 3, 0.5, 1.0, 0.5]


@row("`torch.manual_seed(n)` on every worker")
def equal_seeds() -> None:
    first, second = numbers_of_workers()
    assert first["same seed"] == second["same seed"]
    assert first["seed of the rank"] != second["seed of the rank"]


@row("`update_bn(batches, averaged)`")
def batch_norm_of_an_average() -> None:
    first, second = numbers_of_workers()
    assert first["running mean of batches"] != second["running mean of batches"]
    for found in (first, second):
        mean, expected = found["running mean of the loader"], found["features"]
        torch.testing.assert_close(torch.tensor(mean), torch.tensor(expected))


@row("`Auto`, `Pipeline`, `Hogwild`, `backup` workers")
def without_own_loops() -> None:
    for strategy in (
        "Auto([AllReduce, LocalSGD(4)], samples=[9, 1])",
        "Pipeline",
        "Hogwild",
        "AllReduce(backup=1)",
        "ParameterServer(backup=1)",
        "AllReduce(shard='parameters')",
    ):
        with pytest.raises(InputError, match=r"own loop|a loop of your own"):
            distributed(plain, strategy, lambda: in_order(8))


@row("all batches of a step taken before its first `backward()`")
def groups() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        rest = iter(batches) if isinstance(batches, DataLoader) else None
        pairs = iter(lambda: list(itertools.islice(rest, 2)), []) if rest else batches.groups(2)
        for group in pairs:
            optimizer.zero_grad()
            for batch in group:
                (mean_square(model, batch) / len(group)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    expected = alone(loop, union(18))  # two steps, the second of one batch
    for strategy in ("AllReduce", "ParameterServer(placement='beside', returns='gradients')"):
        for state in distributed(loop, strategy, lambda: in_order(18)):
            close(state, expected)
    first, *others = distributed(loop, "LocalSGD(2)", lambda: in_order(18))
    for other in others:
        close(first, other)


@row("an epoch that is to end, or begin, in the midst of the batches")
def parts_of_an_epoch() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        mine = isinstance(batches, DataLoader)
        plain(model, optimizer, itertools.islice(batches, 2))
        if not mine:
            batches.end_epoch()
            batches.start_at(1)
        plain(model, optimizer, itertools.islice(batches, 1, None) if mine else batches)

    expected = alone(loop, union(18))
    for strategy in ("AllReduce", "ParameterServer(placement='beside')"):
        for state in distributed(loop, strategy, lambda: in_order(18)):
            close(state, expected)
    first, *others = distributed(loop, "LocalSGD(8)", lambda: in_order(18))
    for other in others:
        close(first, other)


@row("a `backward()` on no batch of `batches`")
def no_batch() -> None:
    def loop(model: nn.Module, *_: Any) -> None:
        mean_square(model, next(iter(in_order(4)))).backward()

    refused("pass the first call's batches", loop)


@row("`step()` without `backward()`")
def no_backward() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        optimizer.step()
        plain(model, optimizer, batches)

    exact(loop, "AllReduce")


@row("`optimizer.step(closure)`")
def closure() -> None:
    refused("LBFGS", optimizer=lambda model: torch.optim.LBFGS(model.parameters()))


@row("a GradScaler, or a script, that skips a step")
def skipped_steps() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            scaler.scale(mean_square(model, batch) * (1.0, torch.inf)[number == 1]).backward()
            scaler.step(optimizer)
            scaler.update()

    exact(loop, "AllReduce", "ParameterServer(placement='beside', returns='gradients')")


@row("parameters unfrozen later")
def unfrozen() -> None:
    def frozen() -> nn.Module:
        model = small_model()
        model.get_parameter("bias").requires_grad_(False)
        return model

    def unfreeze(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        model.get_parameter("bias").requires_grad_(True)
        plain(model, optimizer, batches)

    def freeze_for_a_time(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        for epoch in range(3):
            model.get_parameter("bias").requires_grad_(epoch == 1)
            plain(model, optimizer, batches)

    refused("'bias' needs a gradient now", unfreeze, model=frozen)
    exact(freeze_for_a_time, "AllReduce", "ParameterServer(placement='beside')")


@row("parameters of the optimizer that the model does not have")
def foreign_parameters() -> None:
    def with_another(model: nn.Module) -> Optimizer:
        return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], lr=0.1)

    def added(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
        plain(model, optimizer, batches)

    refused(r"shape \(7,\) that the model does not have", optimizer=with_another)
    refused(r"shape \(7,\) after distribute", added)


@row("`parameter.data = ...`, `model.to(...)`, or another parameter in its place")
def other_memory() -> None:
    def moved(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        weight = model.get_parameter("weight")
        weight.data = weight.data.clone()
        plain(model, optimizer, batches)

    def replaced(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        model.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        plain(model, optimizer, batches)

    def copied(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        with torch.no_grad():
            model.get_parameter("weight").copy_(torch.ones(1, 3))
        model.load_state_dict(model.state_dict())
        model.to("cpu")
        plain(model, optimizer, batches)

    refused("'weight' got other memory", moved)
    refused("'bias' was replaced", replaced)
    exact(copied, "AllReduce")


@row("loaders that give other batches on each worker")
def unlike_loaders() -> None:
    ranks = itertools.count()

    def own_seed() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(next(ranks))
        sampler = WeightedRandomSampler([1.0] * 64, 64, generator=generator)
        return DataLoader(samples(64), batch_size=BATCH, sampler=sampler)

    def dealt_out_already() -> DataLoader[Any]:
        return DataLoader(Stream(TensorDataset(*samples(9)[next(ranks) % 3 :: 2])), BATCH)

    def split_without_a_seed() -> DataLoader[Any]:
        part, _ = random_split(samples(64), [32, 32], torch.Generator().manual_seed(next(ranks)))
        return DataLoader(part, BATCH, shuffle=True)

    def subset_of_the_rank() -> DataLoader[Any]:
        return DataLoader(Subset(samples(24), range(next(ranks) % 3, 24, 3)), BATCH, num_workers=1)

    def unlike_lengths() -> DataLoader[Any]:
        return DataLoader(TensorDataset(*samples(24)[: 24 - next(ranks) % 3]), BATCH)

    def parting_later() -> DataLoader[Any]:
        last = [next(ranks) % 3] * BATCH
        return DataLoader(samples(24), batch_sampler=[[n, n + 1] for n in range(18)] + [last])

    def longer_stream() -> DataLoader[Any]:
        return DataLoader(Stream(TensorDataset(*samples(24)[: 24 - 8 * (next(ranks) % 3)])), BATCH)

    everywhere = [own_seed, split_without_a_seed, unlike_lengths, parting_later]
    in_some = [subset_of_the_rank, dealt_out_already, longer_stream]
    for strategy in ("AllReduce", "LocalSGD(2)", "ParameterServer(consistency='asynchronous')"):
        for loader in everywhere if strategy[0] != "A" else everywhere + in_some:
            with pytest.raises(InputError, match="other batches on other workers"):
                distributed(plain, strategy, loader)


class Changing(Dataset[Any]):
    """As many samples as `count` says."""

    count = 12

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return samples(24)[index]


@row("a data set that grows or shrinks between epochs")
def other_length() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for count in (24, 7):
            plain(model, optimizer, batches)
            whole: Any = batches if isinstance(batches, DataLoader) else batches.loader
            whole.dataset.count = count
        plain(model, optimizer, batches)

    expected = alone(loop, DataLoader(Changing(), RANKS * BATCH))
    for state in distributed(loop, "AllReduce", lambda: DataLoader(Changing(), BATCH)):
        close(state, expected)
    with pytest.raises(InputError, match="12 samples when distribute was called, and has 24"):
        distributed(loop, "PairwiseAveraging", lambda: DataLoader(Changing(), BATCH))


@dataclasses.dataclass
class Pair:
    """A batch with names."""

    features: Any
    targets: Any


def dataclass_of(items: Any) -> Pair:
    return Pair(*default_collate(items)[:2])


def object_of(items: Any) -> types.SimpleNamespace:
    features, targets, _ = default_collate(items)
    return types.SimpleNamespace(features=features, targets=targets)


def arrays(items: Any) -> Pair:
    features, targets, _ = default_collate(items)
    return Pair(features.numpy(), targets.numpy())


def time_major(items: Any) -> Pair:
    return Pair(*(tensor.expand(7, *tensor.shape) for tensor in default_collate(items)[:2]))


def on_pairs(model: nn.Module, optimizer: Optimizer, batches: Any, weight: bool = False) -> None:
    for batch in batches:
        optimizer.zero_grad()
        features, targets = torch.as_tensor(batch.features), torch.as_tensor(batch.targets)
        if weight and hasattr(batches, "weight"):
            batches.weight(features.shape[-2])
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()


@row("a batch whose first dimension is not the batch")
def odd_batches() -> None:
    weighted = functools.partial(on_pairs, weight=True)
    for collate in (dataclass_of, object_of, arrays, time_major):
        expected = alone(on_pairs, DataLoader(samples(9), RANKS * BATCH, collate_fn=collate))
        listed = DataLoader(samples(9), BATCH, collate_fn=collate)
        streamed = DataLoader(Stream(samples(9)), BATCH, collate_fn=collate)
        for loop, loader in ((on_pairs, listed), (on_pairs, streamed), (weighted, list(listed))):
            for state in distributed(loop, "AllReduce", lambda it=loader: it):  # type: ignore[misc]
                close(state, expected)
    refused("call batches.weight", on_pairs, loader=lambda: [object_of(samples(2))] * 4)


def without_some(items: Any) -> Any:
    return default_collate([item for item in items if int(item[2]) not in (1, 4)])


@row("a `collate_fn` that drops samples")
def dropped_samples() -> None:
    def weighted(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            if hasattr(batches, "weight"):
                batches.weight(len(batch[0]))
            mean_square(model, batch).backward()
            optimizer.step()

    kept: dict[str, Any] = {"collate_fn": without_some}
    expected = alone(plain, DataLoader(samples(COUNT), RANKS * BATCH, **kept))
    dropping, streamed = (DataLoader(d, BATCH, **kept) for d in (samples(9), Stream(samples(9))))
    for loop, loader in ((weighted, dropping), (plain, streamed)):
        for state in distributed(loop, "AllReduce", lambda it=loader: it):  # type: ignore[misc]
            close(state, expected)
    refused("smaller than what the sampler chose", loader=lambda: dropping)


def batches_of(count: int) -> list[Any]:
    return list(in_order(count))


@row("a list of batches as a loader")
def list_of_batches() -> None:
    expected = alone(plain, union())
    for strategy in ("AllReduce", "ParameterServer(placement='beside')"):
        for state in distributed(plain, strategy, lambda: batches_of(COUNT)):
            close(state, expected)


@row("a loop without a DataLoader")
def without_loader() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for _, batch in zip(range(3), batches, strict=False):
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()
        if hasattr(batches, "agree"):
            batches.agree()
            model.state_dict()

    def endless() -> Any:
        numbers = itertools.count()
        data = samples(6 * BATCH)

        def get_batch() -> list[Tensor]:
            first = BATCH * (next(numbers) % 6)
            return [tensor[first : first + BATCH] for tensor in data.tensors]

        return iter(get_batch, None)

    expected = alone(loop, itertools.cycle(DataLoader(samples(6 * BATCH), 3 * BATCH)))
    for state in distributed(loop, "AllReduce", endless):
        close(state, expected)
    states = distributed(loop, "LocalSGD(2)", endless)
    for state in states:
        close(state, states[0])


@row("a data set, or a function, as a loader")
def no_loader() -> None:
    refused("wrap it in a DataLoader", loader=lambda: samples(4))
    refused(r"iter\(get_batch, None\)", loader=lambda: lambda: 1)
    refused("expected a DataLoader, or an iterable", loader=lambda: 1)


@row("`break`, then saving")
def break_and_save() -> None:
    def unagreed(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()
            break
        model.state_dict()

    saved: list[Tensor] = []

    def agreed(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for _, batch in zip(range(1), batches, strict=False):
            mean_square(model, batch).backward()
            optimizer.step()
        batches.agree()
        saved.append(model.state_dict()["weight"].clone())

    refused(r"batches.agree\(\)", unagreed, "LocalSGD(8)")
    distributed(unagreed, "AllReduce", lambda: in_order(COUNT))
    distributed(agreed, "LocalSGD(8)", lambda: in_order(18))
    assert all(torch.equal(weight, saved[0]) for weight in saved)


class Normed(nn.Module):
    """With buffers."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.inner, self.norm = small_model(), norm(3).double()

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.inner(self.norm(values))
        return output


@row("BatchNorm's buffers when an epoch ends")
def buffers() -> None:
    at_the_end: list[Tensor] = []

    def loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        plain(model, optimizer, batches)
        at_the_end.append(model.state_dict()["norm.running_mean"].clone())

    for strategy in (
        "AllReduce",
        "LocalSGD(2)",
        "ParameterServer(consistency='asynchronous', placement='beside')",
    ):
        at_the_end.clear()
        distributed(loop, strategy, lambda: in_order(12), model=Normed)
        assert len(at_the_end) == RANKS
        for mean in at_the_end:
            assert torch.equal(mean, at_the_end[0])
            assert mean.any()


@row("SyncBatchNorm")
def sync_batch_norm() -> None:
    refused("'norm' is a SyncBatchNorm", model=lambda: Normed(nn.SyncBatchNorm))


@row("a model in DistributedDataParallel or DataParallel")
def wrapped() -> None:
    refused("model.module", model=lambda: nn.DataParallel(small_model()))


@row("sparse gradients, complex parameters")
def odd_parameters() -> None:
    refused("sparse=False", model=lambda: nn.Embedding(4, 2, sparse=True))
    refused("complex", model=lambda: nn.Linear(2, 2, dtype=torch.complex64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(small_model())
    refused("TorchScript", model=lambda: scripted)

    for odd in (torch.eye(2).to_sparse(), torch.ones(1).expand(3)):

        def with_buffer(odd: torch.Tensor = odd) -> nn.Module:
            model = small_model()
            model.register_buffer("odd", odd)
            return model

        refused("buffer 'odd' is sparse, or expanded", model=with_buffer)


@row("`torch.save(model)`, `copy.deepcopy(model)`")
def whole_model_saved() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        for batch in batches:
            file = io.BytesIO()
            torch.save(model, file)
            assert b"orchestra" not in file.getvalue()
            file.seek(0)
            for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
                before = other.state_dict()["weight"].clone()
                mean_square(other, batch).backward()
                sgd(other).step()
                assert not torch.equal(other.state_dict()["weight"], before)
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()

    distributed(loop, "PairwiseAveraging", lambda: in_order(COUNT))

    def once(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        copy.deepcopy(model)(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        plain(model, optimizer, batches)

    exact(once, "AllReduce")


@row("saving a part of the model")
def saved_part() -> None:
    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 20_000), nn.Linear(20_000, 1)).double()

    def loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        plain(model, optimizer, batches)
        assert isinstance(model, nn.Sequential)
        file = io.BytesIO()
        torch.save({"bias": model[1].bias, **model[1].state_dict()}, file)
        assert len(file.getvalue()) < 20_000 * 8 + 5_000

    distributed(loop, "AllReduce", lambda: in_order(4), ranks=2, model=large)


class Shuffled:
    """A sampler of batches that draws from Python's global generator."""

    def __iter__(self) -> Any:
        order = random.sample(range(24), 24)
        return iter([order[first : first + 2] for first in range(0, 24, 2)])

    def __len__(self) -> int:
        return 12


class ShuffledStream(Stream):
    """A stream in the order of NumPy's global generator."""

    def __iter__(self) -> Any:
        return (self._data[index] for index in np.random.permutation(24))


@row("an own sampler without a seed")
def unseeded_sampler() -> None:
    """One worker after the other: the state of the global generators is another one for each."""
    data = samples(24)
    weighted = WeightedRandomSampler([1.0] * 24, 24, replacement=False)
    loaders: list[DataLoader[Any]] = [
        DataLoader(data, batch_size=BATCH, sampler=weighted),
        DataLoader(data, batch_sampler=Shuffled()),
        DataLoader(ShuffledStream(data), batch_size=BATCH),
    ]
    for loader in loaders:
        sharded = [shard_loader(loader, RANKS, index, seed=5) for index in range(RANKS)]
        epochs = []
        for _ in range(2):
            read = [int(n) for one in sharded for part in one for n in part.batch[2]]
            assert sorted(read) == list(range(24))
            epochs.append(read)
        assert epochs[0] != epochs[1]


def test_each_row_has_a_test() -> None:
    lines = re.findall(r"^\| (.*?) \| .* \|$", TABLE.read_text(), re.MULTILINE)
    rows = [line for line in lines if line not in ("pattern", "---")]
    tested = {*ROWS, *(name for found in ELSEWHERE.values() for name in found)}
    missing = [line for line in rows if not any(line.startswith(name) for name in tested)]
    assert rows
    assert not missing
    assert len(rows) == len(tested)
    for file, found in ELSEWHERE.items():
        text = Path(__file__).with_name(file).read_text()
        for test in itertools.chain(*found.values()):
            assert f"def {test}(" in text, test


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str) -> None:
    ROWS[name]()

"""Flat parameters, flat gradients, batches of any nest, and copies taken in passing."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from tests.support.tensors import randn
from torch import Tensor, nn

from orchestra.errors import InputError
from orchestra.worker.batches import batch_samples, map_tensors, split_batch, tensors_of
from orchestra.worker.gradients import Gradients
from orchestra.worker.layout import FlatModel, Layout, buffer_places
from orchestra.worker.snapshots import Snapshots

ALIGNMENT = 64  # bytes


class Tied(nn.Module):
    """Two layers that share a weight, one that is never used, one that is frozen, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(3, 7)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.relu(self.first(x)))
        out: Tensor = self.scale * self.frozen(hidden)
        return out


# Layout


def named(layout: Layout, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors inside `vector` by name."""
    names = (slot.name for slot in layout.slots)
    return dict(zip(names, layout.views(vector), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_tensor_begins_on_a_64_byte_boundary(dtype: torch.dtype) -> None:
    module = Tied().to(dtype)
    layout = Layout.of_module(module)
    vector = layout.allocate(extra=3)
    assert vector.numel() == layout.size + 3
    assert vector.dtype == dtype
    assert vector.data_ptr() % ALIGNMENT == 0
    end = 0
    for slot, view in zip(layout.slots, layout.views(vector), strict=True):
        assert view.data_ptr() % ALIGNMENT == 0
        assert slot.offset >= end
        assert slot.offset - end < ALIGNMENT // dtype.itemsize
        assert (slot.size, slot.shape) == (view.numel(), view.shape)
        end = slot.offset + slot.size
    assert end <= layout.size < end + ALIGNMENT // dtype.itemsize


def test_slots_are_the_trainable_parameters_in_reverse_each_once() -> None:
    module = Tied()
    assert [slot.name for slot in Layout.of_module(module).slots] == [
        "unused.bias",
        "unused.weight",
        "second.bias",
        "first.bias",
        "first.weight",
        "scale",
    ]


def test_adopted_parameters_keep_values_ties_and_identity() -> None:
    module, x = Tied(), randn(4, 5)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    identities = {name: id(p) for name, p in module.named_parameters()}
    output = module(x).detach()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    flat = FlatModel(module)
    layout, vector = flat.layout, flat.parameters
    assert {name: id(p) for name, p in module.named_parameters()} == identities
    assert module.second.weight is module.first.weight
    assert torch.equal(module(x).detach(), output)
    for name, view in named(layout, vector).items():
        assert torch.equal(view, before[name])
    assert not torch.cat(_gaps(layout, vector)).any()
    backward(module, x)
    optimizer.step()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(named(layout, vector)[name], parameter.detach())
    assert not torch.equal(named(layout, vector)["first.weight"], before["first.weight"])
    vector.zero_()
    assert not module.first.weight.any()
    assert torch.equal(module.frozen.weight, before["frozen.weight"])


def _gaps(layout: Layout, vector: Tensor) -> list[Tensor]:
    """The elements between the tensors."""
    ends = [slot.offset + slot.size for slot in layout.slots]
    starts = [slot.offset for slot in layout.slots[1:]] + [layout.size]
    return [vector[end:start] for end, start in zip(ends, starts, strict=True)]


def test_mixed_dtypes_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(
        InputError, match=r"'1\.weight' is torch\.float64|'0\.bias' is torch\.float32"
    ):
        Layout.of_module(module)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to train"):
        Layout.of_module(nn.Linear(2, 2).requires_grad_(False))


def test_buffers_are_those_of_the_state() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    names = [name for name, _, _ in buffer_places(module)]
    assert names == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]


# Gradients


def flat_model(ranks: int = 1) -> tuple[Tied, Layout, Gradients]:
    module = Tied()
    flat = FlatModel(module)
    return module, flat.layout, Gradients(module, flat.layout, ranks, flat.carried())


def backward(module: nn.Module, x: Tensor) -> None:
    torch.autograd.backward(module(x).square().mean())


def expected_gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    loss = module(x).square().mean()
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_collected_gradients_lie_in_the_flat_vector(scale: float) -> None:
    module, layout, gradients = flat_model()
    for seed in range(2):  # the second step begins with what the first has left
        x = randn(4, 5, seed=seed)
        expected = expected_gradients(module, x)
        gradients.clear()
        backward(module, x)
        gradients.collect_rest(scale)
        flat = named(layout, gradients.vector)
        for slot, parameter in zip(layout.slots, gradients.parameters, strict=True):
            gradient = expected[slot.name]
            wanted = torch.zeros(slot.shape) if gradient is None else gradient * scale
            assert torch.equal(flat[slot.name], wanted)
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == flat[slot.name].data_ptr()
        assert gradients.used == [expected[slot.name] is not None for slot in layout.slots]
        assert not torch.cat(_gaps(layout, gradients.vector)).any()


def test_what_autograd_added_to_a_view_is_scaled_in_place() -> None:
    """As in a loop of the user's own that zeroes gradients in place."""
    module, layout, gradients = flat_model()
    x = randn(4, 5)
    expected = expected_gradients(module, x)
    gradients.collect_rest()
    module.zero_grad(set_to_none=False)
    gradients.forget()
    backward(module, x)
    gradients.collect_rest(0.5)
    for name, view in named(layout, gradients.vector).items():
        gradient = expected[name]
        assert torch.equal(view, torch.zeros(view.shape) if gradient is None else gradient * 0.5)


def test_gradients_left_in_place_are_copied_when_somebody_looks() -> None:
    module, layout, gradients = flat_model()
    x = randn(4, 5)
    expected = expected_gradients(module, x)
    gradients.clear()
    backward(module, x)
    gradients.leave_in_place()
    assert not gradients.vector.any()
    for slot, parameter in zip(layout.slots, gradients.parameters, strict=True):
        gradient = expected[slot.name]
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    for name, view in named(layout, gradients.current()).items():
        gradient = expected[name]
        assert torch.equal(view, torch.zeros(view.shape) if gradient is None else gradient)
    gradients.clear()
    assert gradients.current().any(), "nothing was left in place since, so that nothing is copied"


def test_without_samples_the_gradient_is_zero() -> None:
    _, _, gradients = flat_model()
    gradients.vector.fill_(7.0)
    gradients.clear()
    gradients.collect_rest()
    assert not any(view.any() for view in gradients.views)
    assert not any(gradients.used)


def test_what_no_rank_used_has_no_gradient() -> None:
    module, _, gradients = flat_model()
    gradients.clear()
    backward(module, randn(4, 5))
    gradients.collect_rest()
    assert all(p.grad is not None for p in gradients.parameters), "a view of zeros, at first"
    gradients.forget_unused()
    unused = {id(module.unused.weight), id(module.unused.bias)}
    for parameter in gradients.parameters:
        assert (parameter.grad is None) == (id(parameter) in unused)


def test_a_slot_is_collected_once_a_step() -> None:
    module, _, gradients = flat_model()
    gradients.clear()
    backward(module, randn(4, 5))
    gradients.collect(0, 1.0)
    with pytest.raises(InputError, match=r"'unused\.bias' received its gradient twice"):
        gradients.collect(0, 1.0)
    gradients.collect_rest()
    gradients.forget()
    gradients.collect(0, 1.0)


def test_what_another_rank_used_has_a_gradient_here() -> None:
    """The tails are summed, as an all-reduce of the storage does."""
    models = [flat_model(ranks=3) for _ in range(3)]
    count = len(models[0][1].slots)
    shares = [(0.25, 4.0), (0.75, 2.0), (0.0, float("nan"))]
    ranks = [gradients for _, _, gradients in models]
    for rank, (gradients, (weight, loss)) in enumerate(zip(ranks, shares, strict=True)):
        gradients.clear()
        gradients.used = [index == rank for index in range(count)]
        gradients.fill_tail(rank, weight, loss, stop=rank == 2)
    total = torch.stack([gradients.storage for gradients in ranks]).sum(0)
    for gradients in ranks:
        gradients.storage.copy_(total)
        assert gradients.publish() == (2.5, (4.0, 2.0, 0.0), True)
        assert gradients.used == [index < 2 for index in range(count)]
        assert [p.grad is not None for p in gradients.parameters] == gradients.used


def test_the_tail_lies_behind_the_gradient() -> None:
    _, layout, gradients = flat_model(ranks=4)
    assert gradients.storage.numel() == layout.size + 2 + 4 + len(layout.slots)
    gradients.fill_tail(0, 1.0, 3.0, stop=True)
    assert not gradients.vector.any()
    assert gradients.tail.tolist() == [1, 3, 3, 0, 0, 0] + [0] * len(layout.slots)
    gradients.fill_tail(1, 0.0, 5.0, stop=False)
    assert not gradients.tail.any(), "a rank without samples has nothing to say"


def test_a_callback_hears_of_each_gradient_in_the_last_backward() -> None:
    module, _, gradients = flat_model()
    ready: list[int] = []
    gradients.on_ready = lambda first, _: ready.append(first)
    gradients.last_backward = False
    backward(module, randn(4, 5))
    assert ready == []
    gradients.last_backward = True
    backward(module, randn(4, 5))
    assert sorted(ready) == [index for index, used in enumerate(gradients.used) if used]
    gradients.on_ready = None
    backward(module, randn(4, 5))
    assert len(ready) == sum(gradients.used)


# Batches

Pair = namedtuple("Pair", ["image", "label"])


def nested(samples: int) -> dict[str, Any]:
    return {
        "x": randn(samples, 3),
        "more": [Pair(randn(samples, seed=1), torch.arange(samples)), (randn(samples, 2, seed=2),)],
        "name": "text stays",
        "none": None,
    }


@pytest.mark.parametrize("samples", [1, 2, 5, 12])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 20])
def test_splitting_is_even_and_loses_nothing(samples: int, parts: int) -> None:
    batch = nested(samples)
    split = split_batch(batch, parts)
    assert len(split) == min(parts, samples)
    counts = [count for _, count in split]
    assert sum(counts) == samples
    assert max(counts) - min(counts) <= 1
    for part, count in split:
        assert {len(tensor) for tensor in tensors_of(part)} == {count} == {batch_samples(part)}
        assert type(part["more"][0]) is Pair
        assert type(part["more"]) is list
        assert type(part["more"][1]) is tuple
        assert (part["name"], part["none"]) == ("text stays", None)
    pieces = zip(*(tensors_of(part) for part, _ in split), strict=True)
    for whole, joined in zip(tensors_of(batch), map(torch.cat, map(list, pieces)), strict=True):
        assert torch.equal(whole, joined)


def test_splitting_what_has_no_rows_for_all_is_refused() -> None:
    with pytest.raises(InputError, match="not every tensor in it has 4 rows; set accumulation"):
        split_batch((randn(4, 2), randn(3)), 2)
    with pytest.raises(InputError, match="not every tensor"):
        split_batch((randn(4, 2), torch.tensor(1.0)), 2)
    whole = (randn(4, 2), torch.tensor(1.0))
    assert split_batch(whole, 1)[0] == (whole, 4)


def test_samples_are_counted_by_the_first_tensor_with_rows() -> None:
    assert batch_samples({"scale": torch.tensor(1.0), "x": [randn(6, 2), randn(3)]}) == 6
    with pytest.raises(InputError, match="no tensor with a first dimension"):
        batch_samples({"scale": torch.tensor(1.0), "x": "text"})


def test_mapping_keeps_the_nest() -> None:
    doubled = map_tensors(nested(2), lambda tensor: 2 * tensor)
    assert torch.equal(doubled["more"][0].label, torch.tensor([0, 2]))
    assert doubled["name"] == "text stays"


# Snapshots


def test_snapshots_are_copies_taken_at_the_first_offer_past_a_due_point() -> None:
    snapshots = Snapshots([10, 20, 30], now=iter([101.0, 103.0]).__next__)
    snapshots.started = 100.0
    values = torch.zeros(2)
    for samples in (4, 9, 12, 16, 33, 40):
        values.fill_(samples)
        snapshots.offer(samples, values)
    taken = [(p.index, p.samples, p.seconds, p.values.tolist()) for p in snapshots.parts]
    assert taken == [(0, 12, 1.0, [12, 12]), (2, 33, 3.0, [33, 33])]


def test_each_slice_and_kind_has_its_own_due_points() -> None:
    snapshots = Snapshots([10], now=lambda: 0.0)
    values = torch.zeros(2)
    for _ in range(2):
        snapshots.offer(11, values)
        snapshots.offer(12, values, offset=2)
        snapshots.offer(13, values, kind="buffers", weight=0.5)
    taken = [(p.offset, p.samples, p.kind, p.weight) for p in snapshots.parts]
    assert taken == [
        (0, 11, "parameters", 1.0),
        (2, 12, "parameters", 1.0),
        (0, 13, "buffers", 0.5),
    ]


def test_a_run_that_resumes_skips_what_lies_behind_it() -> None:
    snapshots = Snapshots([10, 20], now=lambda: 0.0)
    snapshots.skip(10)
    snapshots.offer(12, torch.zeros(1))
    assert snapshots.parts == []
    snapshots.offer(20, torch.zeros(1))
    assert [part.index for part in snapshots.parts] == [1]

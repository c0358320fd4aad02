"""Optimizers as specs, their state as data, and the promise that a tensor may be cut."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.support.tensors import randn
from torch import Tensor, nn

from orchestra.errors import InputError
from orchestra.optimizers import capture, restore
from orchestra.optimizers.settings import Optimizer, ParameterGroup
from orchestra.optimizers.spec import (
    ELEMENTWISE,
    REFUSED,
    OptimizerSpec,
    export_moments,
    get_rates,
    install_moments,
    set_rates,
)
from orchestra.parameter_server.placement import place

TORCH_CLASSES = {
    name: value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True},
        {"lr": 0.1, "momentum": 0.9, "fused": True},
    ],
    "Adam": [
        {},
        {"weight_decay": 0.01, "amsgrad": True},
        {"weight_decay": 0.01, "fused": True},
        {"foreach": True},
    ],
    "AdamW": [{}, {"amsgrad": True}, {"fused": True}],
    "Adamax": [{}, {"weight_decay": 0.01}],
    "NAdam": [{}, {"weight_decay": 0.01, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"weight_decay": 0.01, "decoupled_weight_decay": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.01}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.01}, {"fused": True}],
    "Adadelta": [{}, {"weight_decay": 0.01}],
    "ASGD": [{}, {"weight_decay": 0.01, "t0": 2}],
    "Rprop": [{}, {"etas": (0.4, 1.3)}],
}
EVERY_VARIANT = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """With several, torch cuts the work of a kernel itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spec_of(name: str, arguments: Mapping[str, Any], *names: str) -> OptimizerSpec:
    return OptimizerSpec.from_settings(Optimizer(name, arguments), names or ("w",))


def step(optimizer: torch.optim.Optimizer, gradients: Mapping[Tensor, Tensor]) -> None:
    for tensor, gradient in gradients.items():
        tensor.grad = gradient.clone()
    optimizer.step()


# Which classes there are


@pytest.mark.parametrize("name", TORCH_CLASSES)
def test_every_class_of_torch_builds_or_is_refused_with_the_reason(name: str) -> None:
    cls = TORCH_CLASSES[name]
    if cls in REFUSED:
        with pytest.raises(InputError, match=f"{name} cannot be distributed: {REFUSED[cls]}"):
            spec_of(name, {})
        return
    spec = spec_of(name, {})
    tensor = randn(6, 4)
    optimizer = spec.build({"w": tensor})
    assert type(optimizer) is cls
    assert spec.base_rates == get_rates(optimizer)
    before = tensor.clone()
    step(optimizer, {tensor: randn(6, 4, seed=1)})
    assert not torch.equal(tensor, before)


def test_the_table_of_variants_is_that_of_the_classes_that_may_be_cut() -> None:
    assert {TORCH_CLASSES[name] for name in VARIANTS} == ELEMENTWISE
    assert {name for name, cls in TORCH_CLASSES.items() if cls in REFUSED} == {
        "LBFGS",
        "SparseAdam",
    }


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_other_classes_get_whole_tensors(name: str) -> None:
    assert not spec_of(name, {}).elementwise


def test_a_class_of_the_users_own_gets_whole_tensors_whatever_it_inherits() -> None:
    class Mine(torch.optim.SGD):
        pass

    parameter = nn.Parameter(torch.zeros(3))
    assert not OptimizerSpec.from_instance(Mine([parameter]), {id(parameter): "w"}).elementwise


# Cutting


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "arguments"), EVERY_VARIANT)
def test_a_cut_tensor_is_updated_as_a_whole_one_bit_for_bit(
    name: str, arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    """With the cuts of `place`, between neighbours whose sizes are no multiple of anything."""
    spec = spec_of(name, arguments)
    offset, elements, size = 48, 1003, 1200
    for servers in (2, 3, 7):
        slices = place([(0, 40), (offset, elements), (1056, 144)], size, servers, divisible=True)
        bounds = [
            (p.first - offset, p.end - offset) for s in slices for p in s.pieces if p.tensor == 1
        ]
        assert len(bounds) > 1
        whole = randn(elements).to(dtype)
        parts = [whole[first:end].clone() for first, end in bounds]
        one = spec.build({"w": whole})
        many = [spec.build({"w": part}) for part in parts]
        for number in range(4):
            gradient = randn(elements, seed=number + 1).to(dtype)
            step(one, {whole: gradient})
            for optimizer, part, (first, end) in zip(many, parts, bounds, strict=True):
                step(optimizer, {part: gradient[first:end]})
            assert torch.equal(torch.cat(parts), whole)


def test_a_tensor_of_adafactor_must_not_be_cut() -> None:
    """What the table says, the other way round: its update depends on the other elements."""
    spec, whole, gradient = spec_of("Adafactor", {}), randn(8, 64), randn(8, 64, seed=1)
    parts = [whole[:4].clone(), whole[4:].clone()]
    step(spec.build({"w": whole}), {whole: gradient})
    for part, piece in zip(parts, (gradient[:4], gradient[4:]), strict=True):
        step(spec.build({"w": part}), {part: piece})
    assert not torch.equal(torch.cat(parts), whole)


# Groups


def test_a_parameter_belongs_to_the_first_group_that_matches() -> None:
    groups = (
        ParameterGroup("bias$", arguments={"weight_decay": 0.0}),
        ParameterGroup("head", arguments={"lr": 0.5}),
    )
    settings = Optimizer("SGD", {"lr": 0.1, "weight_decay": 0.01}, groups)
    names = ["body.weight", "body.bias", "head.weight", "head.bias"]
    spec = OptimizerSpec.from_settings(settings, names)
    assert spec.base_rates == (0.1, 0.1, 0.5)
    tensors = {name: torch.zeros(2) for name in names}
    groups_built = spec.build(tensors).param_groups
    of_group = [
        [name for p in group["params"] for name in names if tensors[name] is p]
        for group in groups_built
    ]
    assert of_group == [["body.weight"], ["body.bias", "head.bias"], ["head.weight"]]
    assert [group["weight_decay"] for group in groups_built] == [0.01, 0.0, 0.01]
    assert [group["lr"] for group in groups_built] == [0.1, 0.1, 0.5]


def test_groups_keep_their_numbers_where_none_of_their_parameters_is() -> None:
    settings = Optimizer("SGD", {"lr": 0.1}, (ParameterGroup("b", arguments={"lr": 0.2}),))
    spec = OptimizerSpec.from_settings(settings, ["a", "b"])
    for present in ({"b": torch.zeros(2)}, {"a": torch.zeros(2)}, {}):
        optimizer = spec.build(present)
        assert get_rates(optimizer) == (0.1, 0.2)
        set_rates(optimizer, (1.0, 2.0))
        assert get_rates(optimizer) == (1.0, 2.0)


@pytest.mark.parametrize("patterns", [["nothing"], ["weight", "head.weight"]])
def test_a_pattern_without_a_parameter_is_refused(patterns: list[str]) -> None:
    settings = Optimizer("SGD", {"lr": 0.1}, tuple(ParameterGroup(pattern) for pattern in patterns))
    with pytest.raises(InputError, match=f"'{patterns[-1]}' matches no parameter") as refusal:
        OptimizerSpec.from_settings(settings, ["head.weight", "head.bias"])
    assert "head.weight, head.bias" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Adm", {}, "did you mean 'Adam'"),
        ("SGD", {"rate": 0.1}, "SGD.*rate"),
        ("Adam", {"lr": -1.0}, "Adam.*-1.0"),
        ("Adam", {"fused": True, "foreach": True}, "Adam.*fused"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        spec_of(name, arguments)


# The optimizer of a user's own loop


@pytest.mark.parametrize("name", [name for name, c in TORCH_CLASSES.items() if c not in REFUSED])
def test_the_spec_of_an_instance_builds_its_equal(name: str) -> None:
    """With a tensor's worth of groups, and rates changed since it was made."""
    originals = [nn.Parameter(randn(4, 3, seed=i)) for i in range(2)]
    groups: list[dict[str, Any]] = [
        {"params": [originals[0]]},
        {"params": [originals[1]], "lr": 0.5, "weight_decay": 0.1},
    ]
    if name == "Rprop":
        del groups[1]["weight_decay"]
    instance = TORCH_CLASSES[name](groups, lr=0.25)  # type: ignore[call-arg]
    instance.param_groups[0]["lr"] = 0.125
    spec = OptimizerSpec.from_instance(instance, {id(p): f"p{i}" for i, p in enumerate(originals)})
    assert spec.base_rates == (0.125, 0.5)
    twins = [p.detach().clone() for p in originals]
    built = spec.build({f"p{i}": twin for i, twin in enumerate(twins)})
    for group, other in zip(instance.param_groups, built.param_groups, strict=True):
        assert {**group, "params": 0} == {**other, "params": 0}
    for number in range(3):
        gradients = [randn(4, 3, seed=10 * number + i) for i in range(2)]
        step(instance, dict(zip(originals, gradients, strict=True)))
        step(built, dict(zip(twins, gradients, strict=True)))
    for original, twin in zip(originals, twins, strict=True):
        assert torch.equal(original.detach(), twin)


def test_an_instance_that_cannot_be_distributed_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.raises(InputError, match="LBFGS cannot be distributed"):
        OptimizerSpec.from_instance(torch.optim.LBFGS([parameter]), {id(parameter): "w"})


# Moments


@pytest.mark.parametrize(("name", "arguments"), [*EVERY_VARIANT, ("Adafactor", {}), ("Muon", {})])
def test_moments_go_on_in_another_optimizer(name: str, arguments: dict[str, Any]) -> None:
    spec = spec_of(name, arguments)
    tensor = randn(10, 4)
    optimizer = spec.build({"w": tensor})
    for number in range(3):
        step(optimizer, {tensor: randn(10, 4, seed=number)})
    heir_tensor = tensor.clone()
    heir = spec.build({"w": heir_tensor})
    install_moments(heir, {"w": (heir_tensor, 0)}, export_moments(optimizer, {"w": tensor}))
    for number in range(3, 6):
        gradient = randn(10, 4, seed=number)
        step(optimizer, {tensor: gradient})
        step(heir, {heir_tensor: gradient})
        assert torch.equal(heir_tensor, tensor)


@pytest.mark.parametrize(("name", "arguments"), EVERY_VARIANT)
def test_moments_are_cut_with_their_tensor(name: str, arguments: dict[str, Any]) -> None:
    spec, tensor = spec_of(name, arguments), randn(32, 10)
    optimizer = spec.build({"w": tensor})
    for number in range(3):
        step(optimizer, {tensor: randn(32, 10, seed=number)})
    moments = export_moments(optimizer, {"w": tensor})
    bounds = [(0, 64), (64, 256), (256, 320)]
    parts = [tensor.reshape(-1)[first:end].clone() for first, end in bounds]
    heirs = [spec.build({"w": part}) for part in parts]
    for heir, part, (first, _) in zip(heirs, parts, bounds, strict=True):
        install_moments(heir, {"w": (part, first)}, moments)
    gradient = randn(32, 10, seed=9)
    step(optimizer, {tensor: gradient})
    for heir, part, (first, end) in zip(heirs, parts, bounds, strict=True):
        step(heir, {part: gradient.reshape(-1)[first:end]})
    assert torch.equal(torch.cat(parts), tensor.reshape(-1))


def test_a_parameter_that_was_never_updated_has_no_moments() -> None:
    spec = spec_of("Adam", {}, "used", "unused")
    tensors = {"used": randn(3), "unused": randn(3)}
    optimizer = spec.build(tensors)
    step(optimizer, {tensors["used"]: randn(3)})
    moments = export_moments(optimizer, tensors)
    assert list(moments) == ["used"]
    heir = spec.build(tensors)
    install_moments(heir, {name: (tensor, 0) for name, tensor in tensors.items()}, moments)
    assert tensors["unused"] not in heir.state
    assert heir.state[tensors["used"]]["exp_avg"] is not moments["used"]["exp_avg"]


# State as data


@dataclass
class Inner:
    weights: Tensor
    count: int = 0
    losses: list[float] = field(default_factory=list)
    pair: tuple[int, ...] = ()
    note: str | None = None


@dataclass
class Saver:
    """Anything with a `state_dict`."""

    number: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "tensor": torch.full((2,), float(self.number))}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.number = saved["number"] + int(saved["tensor"][0])


@dataclass
class Outer:
    inner: Inner
    optimizer: torch.optim.Optimizer
    saver: Saver
    table: dict[str, int]
    open_files: list[str] = field(init=False)
    flow: object = field(init=False, default=None)


def outer(seed: int) -> tuple[Outer, Tensor]:
    tensor = randn(5, seed=seed)
    optimizer = torch.optim.Adam([tensor], lr=0.1)
    inner = Inner(randn(3, seed=seed), seed, [0.5] * seed, (seed,) * seed, "x" * seed or None)
    made = Outer(inner, optimizer, Saver(seed), {"a": seed})
    made.open_files = [f"file {seed}"]
    return made, tensor


def test_capture_and_restore_nested_dataclasses_and_optimizers() -> None:
    before, tensor = outer(2)
    step(before.optimizer, {tensor: randn(5, seed=3)})
    saved = copy.deepcopy(capture(before))
    assert set(saved) == {"inner", "optimizer", "saver", "table"}
    assert_plain(saved)
    after, other = outer(0)
    weights = after.inner.weights
    with torch.no_grad():
        other.copy_(tensor)
    assert restore(after, saved) is after
    assert after.inner.weights is weights, "tensors are changed in place"
    assert torch.equal(weights, before.inner.weights)
    assert capture(after.inner) | {"weights": 0} == capture(before.inner) | {"weights": 0}
    assert after.inner.pair == (2, 2)
    assert after.saver.number == 4
    assert after.table == {"a": 2}
    assert after.open_files == ["file 0"]
    for optimizer, target in ((before.optimizer, tensor), (after.optimizer, other)):
        step(optimizer, {target: randn(5, seed=4)})
    assert torch.equal(other, tensor)


def assert_plain(value: Any) -> None:
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        for item in value.values():
            assert_plain(item)
    elif isinstance(value, list):
        for item in value:
            assert_plain(item)
    else:
        assert value is None or isinstance(value, (Tensor, bool, int, float, str))


@pytest.mark.parametrize(("name", "arguments"), [*EVERY_VARIANT, ("Adafactor", {}), ("Muon", {})])
def test_every_optimizer_goes_on_from_what_was_captured(
    name: str, arguments: dict[str, Any]
) -> None:
    spec = spec_of(name, arguments)
    tensor = randn(6, 4)
    optimizer = spec.build({"w": tensor})
    for number in range(3):
        step(optimizer, {tensor: randn(6, 4, seed=number)})
    again = tensor.clone()
    other = spec.build({"w": again})
    restore(other, copy.deepcopy(capture(optimizer)))
    for number in range(3, 6):
        gradient = randn(6, 4, seed=number)
        step(optimizer, {tensor: gradient})
        step(other, {again: gradient})
        assert torch.equal(again, tensor)


def test_what_is_no_data_cannot_be_kept() -> None:
    with pytest.raises(AssertionError, match="cannot be kept in a checkpoint"):
        capture({"lock": object()})

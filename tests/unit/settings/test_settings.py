"""Settings check, convert and describe themselves; schedules have the values they promise."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

import pytest

from orchestra.errors import InputError
from orchestra.optimizers.settings import Constant, Cosine, Optimizer, ParameterGroup, StepDecay
from orchestra.settings import REQUIRED, Settings, describe, setting
from orchestra.trainer.settings import Target, Training


@dataclass(frozen=True, repr=False)
class Inner(Settings):
    window: int = setting(6, "how many", low=2)


@dataclass(frozen=True, repr=False)
class Example(Settings):
    algorithm: Literal["ring", "parallel"] = setting("ring", "which way")
    rate: float = setting(0.5, "how fast", above=0, high=2)
    _: KW_ONLY
    count: int | None = setting(None, "how many", low=1)
    every: int | Literal["epoch"] = setting(1, "how often")
    flag: bool = setting(True, "whether")
    points: tuple[float, ...] = setting((0.5,), "where", low=0, high=1)
    pair: tuple[int, str] = setting((1, "a"), "both")
    options: Mapping[str, object] = setting({}, "anything")
    inner: Inner | None = setting(Inner(), "more")
    level: Literal[1, 2] = setting(1, "how deep")
    free: object = setting([], "whatever")

    def check(self) -> None:
        if self.count == 13:
            raise InputError("Example.count: 13 brings bad luck")


@dataclass(frozen=True, repr=False)
class Needy(Settings):
    inner: Inner = setting(REQUIRED, "has to be given")


def test_values_are_converted_where_nothing_is_lost() -> None:
    example = Example(rate=1, points=[0, 1], pair=[2, "b"])  # type: ignore[arg-type]
    assert type(example.rate) is float
    assert example.points == (0.0, 1.0)
    assert type(example.points[0]) is float
    assert example.pair == (2, "b")


def test_numpy_numbers_become_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    example = Example(rate=numpy.float32(0.5), count=numpy.int64(3))
    assert (type(example.rate), type(example.count)) == (float, int)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "rng"}, "Example.algorithm: 'rng' is not known; did you mean 'ring'?"),
        ({"algorithm": 3}, "Example.algorithm: 3 is not one of 'ring', 'parallel'"),
        ({"rate": 0}, "Example.rate: 0.0 is not above 0"),
        ({"rate": 2.5}, "Example.rate: 2.5 is above 2"),
        ({"rate": math.nan}, "Example.rate: nan is not a finite number"),
        ({"rate": "1"}, "Example.rate: expected number, got '1'"),
        ({"rate": True}, "Example.rate: expected number, got True"),
        ({"count": 0}, "Example.count: 0 is below 1"),
        ({"count": 1.5}, "Example.count: expected whole number, got 1.5"),
        ({"count": 13}, "Example.count: 13 brings bad luck"),
        ({"every": "epoc"}, "Example.every: 'epoc' is not known; did you mean 'epoch'?"),
        ({"every": 1.5}, "Example.every: expected whole number or 'epoch', got 1.5"),
        ({"flag": 1}, "Example.flag: expected true or false, got 1"),
        ({"points": (0.5, 2)}, "Example.points: 2.0 is above 1"),
        ({"points": 0.5}, "Example.points: expected list of numbers, got 0.5"),
        ({"pair": (1,)}, "Example.pair: (1,) has 1 values, not 2"),
        ({"options": 1}, "Example.options: expected mapping, got 1"),
        ({"level": True}, "Example.level: True is not one of 1, 2"),
        ({"inner": "x"}, "Example.inner: expected Inner, got 'x'"),
    ],
)
def test_a_bad_value_is_refused_with_place_and_reason(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        Example(**arguments)
    assert str(caught.value) == message


def test_a_setting_without_default_has_to_be_given() -> None:
    with pytest.raises(TypeError, match="inner"):
        Needy()
    assert Needy(Inner(3)).inner.window == 3


def test_repr_is_the_constructor_call() -> None:
    assert repr(Example()) == "Example('ring', 0.5)"
    shown = Example("parallel", count=2, inner=Inner(7))
    assert repr(shown) == "Example('parallel', 0.5, count=2, inner=Inner(7))"
    assert eval(repr(shown)) == shown


def test_mutable_defaults_are_not_shared() -> None:
    assert Example().options == {}
    assert Example().options is not Example().options
    assert Example().free is not Example().free


def test_settings_can_be_copied_compared_and_sent() -> None:
    example = Example(count=2, options={"a": 1})
    assert pickle.loads(pickle.dumps(example)) == example
    assert replace(example, count=3) != example
    assert len({Inner(2), Inner(2), Inner(3)}) == 2
    with pytest.raises(AttributeError):
        example.count = 5  # type: ignore[misc]


def test_a_setting_is_replaced_and_checked_by_name() -> None:
    assert Example().with_setting("count", 4) == Example(count=4)
    with pytest.raises(InputError, match="no setting 'cont'; did you mean 'count'"):
        Example().with_setting("cont", 4)
    with pytest.raises(InputError, match="0 is below 1"):
        Example().with_setting("count", 0)


def test_describe_gives_each_setting_in_words() -> None:
    rows = {row.name: row for row in describe(Example)}
    assert list(rows)[:2] == ["algorithm", "rate"]
    assert rows["algorithm"].type == "'ring' or 'parallel'"
    assert rows["rate"][1:] == ("number", "0.5", "above 0, at most 2", "how fast")
    assert rows["count"].type == "whole number or none"
    assert rows["count"].range == "at least 1"
    assert describe(Needy)[0].default == "required"


def test_training_has_one_length() -> None:
    assert (Training().epochs, Training().steps) == (10, None)
    assert (Training(steps=5).epochs, Training(steps=5).steps) == (None, 5)
    with pytest.raises(InputError, match="both set"):
        Training(steps=5, epochs=1)
    by_steps = Training(epochs=3).with_setting("steps", 7)
    assert (by_steps.epochs, by_steps.steps) == (None, 7)
    by_epochs = by_steps.with_setting("epochs", 2)
    assert (by_epochs.epochs, by_epochs.steps) == (2, None)


def test_training_refuses_more_micro_batches_than_samples() -> None:
    assert Training(batch_size=4, accumulation=4).accumulation == 4
    with pytest.raises(InputError, match="a batch of 4 cannot be split into 5"):
        Training(batch_size=4, accumulation=5)


def test_a_target_has_one_bound() -> None:
    assert Target("accuracy", at_least=0.9).reached(0.9)
    assert not Target("accuracy", at_least=0.9).reached(0.89)
    assert Target("loss", at_most=0.1).reached(0.1)
    assert not Target("loss", at_most=0.1).reached(0.11)
    for bounds in ({}, {"at_least": 1.0, "at_most": 2.0}):
        with pytest.raises(InputError, match="give one of at_least and at_most"):
            Target("accuracy", **bounds)


def test_an_optimizer_is_its_call() -> None:
    optimizer = Optimizer.parse("Adam(lr=1e-3, betas=(0.9, 0.99))", where="x")
    assert optimizer == Optimizer("Adam", {"lr": 0.001, "betas": (0.9, 0.99)})
    assert repr(optimizer) == "Adam(lr=0.001, betas=(0.9, 0.99))"
    assert Optimizer.parse("SGD", where="x") == Optimizer("SGD")
    assert repr(optimizer.with_setting("lr", 0.5)) == "Adam(lr=0.5, betas=(0.9, 0.99))"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SGD(0.1)", "x: name the arguments of SGD"),
        ("SGD(lr=fast)", "x: SGD.lr: fast is not a literal; quote it: 'fast'"),
        ("SGD(betas=(a, 1))", "x: SGD.betas: a is not a literal"),
        ("SGD(lr=", "x: 'SGD(lr=' cannot be read"),
        ("torch.optim:SGD(lr=1)", "is not the name of a class"),
    ],
)
def test_an_optimizer_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Optimizer.parse(text, where="x")
    assert message in str(caught.value)


def test_an_optimizer_takes_only_what_a_file_can_say() -> None:
    with pytest.raises(InputError, match=r"SGD\.lr: <object"):
        Optimizer("SGD", {"lr": object()})


def test_a_group_needs_a_regular_expression() -> None:
    with pytest.raises(InputError, match="is not a regular expression"):
        ParameterGroup("(")


def test_constant_schedule() -> None:
    assert [Constant().factor(x) for x in (0, 0.5, 1)] == [1, 1, 1]
    assert [Constant(warmup=0.2).factor(x) for x in (0, 0.1, 0.2, 1)] == [0, 0.5, 1, 1]


def test_step_decay() -> None:
    decay = StepDecay((0.5, 0.75), 0.1)
    values = [decay.factor(x) for x in (0, 0.49, 0.5, 0.74, 0.75, 1)]
    assert values == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    warm = StepDecay((0.1,), 0.5, warmup=0.2)
    assert [warm.factor(x) for x in (0.05, 0.1, 0.2)] == pytest.approx([0.25, 0.25, 0.5])


def test_cosine() -> None:
    assert [Cosine().factor(x) for x in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])
    cosine = Cosine(0.1, warmup=0.2)
    values = [cosine.factor(x) for x in (0, 0.1, 0.2, 0.6, 1.0, 1.5)]
    assert values == pytest.approx([0, 0.5, 1, 0.55, 0.1, 0.1])
    assert Cosine(0.3, warmup=1.0).factor(1.0) == pytest.approx(0.3)

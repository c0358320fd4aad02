"""A constructor call as text becomes an object and back; nothing in it is evaluated."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from orchestra.errors import InputError
from orchestra.settings import (
    Call,
    Registry,
    Settings,
    parse,
    read,
    setting,
    write,
)
from orchestra.settings.reading import literal, yaml_text, yaml_value
from orchestra.settings.tree import rebuilt
from orchestra.strategies.registry import STRATEGIES


@dataclass(frozen=True, repr=False)
class Leaf(Settings):
    kind: str = setting("ring", "which")
    _: KW_ONLY
    numbers: tuple[int, ...] = setting((), "some")
    table: Mapping[str, object] = setting({}, "more")


@dataclass(frozen=True, repr=False)
class Twig(Leaf):
    pass


@dataclass(frozen=True, repr=False)
class Pair(Settings):
    first: Leaf = setting(Leaf(), "one")
    then: Leaf = setting(Leaf(), "another")
    _: KW_ONLY
    label: str = setting("", "text")


def function(size: int = 1) -> int:
    return size


HERE = __name__
KNOWN = {"Leaf": f"{HERE}:Leaf", "Pair": f"{HERE}:Pair", "function": f"{HERE}:function"}
NAMES = Registry("thing", KNOWN)
CALLABLES = Registry("thing", KNOWN, makes=lambda target: target is function)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Leaf", Leaf()),
        ("Leaf()", Leaf()),
        ("  Leaf('x')  ", Leaf("x")),
        ('Leaf("a:b")', Leaf("a:b")),
        ("Leaf(numbers=[1, -2])", Leaf(numbers=(1, -2))),
        ("Leaf(numbers=(1,))", Leaf(numbers=(1,))),
        ("Leaf(table={'a': [Leaf, 1.5], 'b': None})", Leaf(table={"a": [Leaf(), 1.5], "b": None})),
        ("Pair(Leaf, then=Leaf('y'), label='z')", Pair(Leaf(), Leaf("y"), label="z")),
        (f"{HERE}:Leaf('x')", Leaf("x")),
        (f"Pair({HERE}:Leaf('x'))", Pair(Leaf("x"))),
        (f"Pair({HERE}:Leaf('x'), {HERE}:Twig)", Pair(Leaf("x"), Twig())),
    ],
)
def test_a_text_becomes_the_object_that_it_names(text: str, expected: object) -> None:
    assert parse(text, NAMES, where="here") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Laef", "here: unknown thing 'Laef'; did you mean 'Leaf'?"),
        ("Leaf(knd='x')", "here: Leaf has no argument 'knd'; did you mean 'kind'?"),
        ("Leaf(1, 2)", "here: Leaf(kind, numbers, table): too many positional arguments"),
        ("Leaf(3)", "here: Leaf.kind: expected text, got 3"),
        ("Leaf(kind=ring)", "here: 'ring' in Leaf is no known name; if it is a text, quote it: "),
        (
            "Pair(Laef())",
            "here: 'Laef' in Pair is no known name; did you mean 'Leaf'? (if it is a",
        ),
        ("Pair(Laef(1))", "here: 'Laef' in Pair is no known name; did you mean 'Leaf'?"),
        ("Pair(Tree(1))", "here: 'Tree' in Pair is no known name; orchestra list shows those that"),
        ("Leaf(1 + 1)", "here: '1 + 1' is not a literal, a list, a tuple, a dict or a call"),
        ("Leaf(numbers=[x for x in y])", "is not a literal"),
        ("Leaf(f'{x}')", "is not a literal"),
        ("Leaf(lambda: 0)", "is not a literal"),
        ("Leaf(*[1])", "here: arguments cannot be unpacked with *"),
        ("Leaf(**{})", "here: arguments cannot be unpacked with **"),
        ("Leaf('a', kind='b')", "multiple values for argument 'kind'"),
        ("Leaf(", "here: 'Leaf(' cannot be read: '(' was never closed"),
        ("", "here: '' cannot be read"),
        ("3", "here: '3' is not a constructor call"),
        ("os.system('x')", "here: 'os.system' is not a name; write os:system"),
        ("Leaf()()", "cannot be called: only names can"),
        ("nowhere.at_all:Leaf", "here: there is no module 'nowhere.at_all'"),
        (f"{HERE}:Leave", f"here: {HERE} has no 'Leave'; did you mean 'Leaf'?"),
        (f"{HERE}:KNOWN", f"here: '{HERE}:KNOWN' cannot be called"),
        ("function", "here: 'function' is no thing: not a class of settings"),
        ("os:getcwd", "here: 'os:getcwd' is no thing: not a class of settings"),
        ("(" * 300 + ")" * 300, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, NAMES, where="here")
    assert message in str(caught.value)
    assert str(caught.value).startswith("here: ")
    assert "\n" not in str(caught.value)


def test_a_file_may_hold_no_number_for_an_expression() -> None:
    with pytest.raises(InputError, match="here: 5 is not a constructor call"):
        parse(5, NAMES, where="here")  # type: ignore[arg-type]


def test_functions_are_called_where_the_registry_allows_it() -> None:
    assert parse("function(size=3)", CALLABLES, where="here") == 3
    with pytest.raises(InputError, match="function has no argument 'sise'; did you mean 'size'"):
        parse("function(sise=3)", CALLABLES, where="here")
    with pytest.raises(InputError, match=r"'os:getcwd' does not say that it makes a thing; "):
        parse("Pair(os:getcwd)", CALLABLES, where="here")


def test_a_failing_import_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_plug_in.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as caught:
        parse("broken_plug_in:Thing", NAMES, where="here")
    assert str(caught.value) == (
        "here: importing broken_plug_in failed: ModuleNotFoundError: "
        "No module named 'no_such_dependency'"
    )


def test_what_is_written_is_read_back() -> None:
    pair = Pair(Leaf("x", numbers=(1,)), Leaf(table={"k": Leaf("y")}), label="a'b\"c")
    assert write(pair, NAMES) == repr(pair)
    assert parse(write(pair, NAMES), NAMES, where="here") == pair


def test_an_unregistered_class_is_written_with_its_place() -> None:
    nothing = Registry("thing", {"Pair": f"{HERE}:Pair"})
    text = write(Pair(Leaf("x")), nothing)
    assert text == f"Pair({HERE}:Leaf('x'), {HERE}:Leaf('ring'))"
    assert parse(text, nothing, where="here") == Pair(Leaf("x"))


@given(some.text(), some.text())
def test_any_text_survives_the_notation(first: str, second: str) -> None:
    pair = Pair(Leaf(first), label=second)
    assert parse(write(pair, NAMES), NAMES, where="here") == pair


def test_a_call_is_read_without_looking_anything_up() -> None:
    call = read("a.b:f(1, x=g, y=[h(2)])", where="here")
    assert call == Call("a.b:f", (1,), {"x": Call("g"), "y": [Call("h", (2,))]})
    assert str(call) == "a.b:f(1, x=g(), y=[h(2)])"
    assert read(str(call), where="here") == call


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("label", "new", Pair(label="new")),
        ("label", "Leaf", Pair(label="Leaf")),
        ("first.kind", "Leaf('x')", Pair(Leaf("Leaf('x')"))),
        ("first.numbers", "[1, 2]", Pair(Leaf(numbers=(1, 2)))),
        ("first", "Leaf('x')", Pair(Leaf("x"))),
        ("then", "Leaf", Pair()),
    ],
)
def test_a_nested_setting_is_replaced_by_its_path(path: str, text: str, expected: Pair) -> None:
    assert rebuilt(Pair(), {path: literal(text)}, NAMES, where="--set") == expected


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("frist.kind", "x", "--set: Pair has no setting 'frist'; did you mean 'first'?"),
        ("first.knd", "x", "--set: Leaf has no setting 'knd'; did you mean 'kind'?"),
        ("label.kind", "x", "--set: label is '', which has no settings of its own"),
        ("first", "Laef", "--set: unknown thing 'Laef'; did you mean 'Leaf'?"),
        ("first", "3", "--set: Pair.first: expected Leaf, got 3"),
        ("first.numbers", "x", "--set: Leaf.numbers: expected list of whole numbers, got 'x'"),
        ("first.numbers", "[x]", "--set: Leaf.numbers: expected whole number, got 'x'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        rebuilt(Pair(), {path: literal(text)}, NAMES, where="--set")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "a" * 390_000,
        "a." * 190_000,
        "Pair('" + r"\'" * 190_000,
        "Pair(" + ",".join(f"a{number}=1" for number in range(30_000)) + ")",
    ],
    ids=["a word", "a path", "a text without an end", "arguments"],
)
def test_a_long_text_is_read_in_linear_time(text: str) -> None:
    """Quadratic time would be hours, and beyond any test's deadline."""
    with contextlib.suppress(InputError):
        assert isinstance(read(text, where="here"), Call)


def test_installed_packages_add_names(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        EntryPoint(name, f"{HERE}:Leaf", group)
        for name, group in (("Foreign", "some.group"), ("Other", "another.group"))
    )
    monkeypatch.setattr("orchestra.settings.notation.entry_points_on", lambda path: points)
    registry = Registry("thing", {"Pair": f"{HERE}:Pair"}, "some.group")
    assert registry.names() == ["Foreign", "Pair"]
    assert parse("Foreign('x')", registry, where="here") == Leaf("x")
    assert write(Leaf("x"), registry) == "Foreign('x')"


def test_every_strategy_and_rule_is_where_the_registry_says() -> None:
    for name in STRATEGIES.names():
        assert STRATEGIES.resolve(name, where=name).__name__ == name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("010", 10),
        ("0x1f", 31),
        (".5", 0.5),
        ("5.", 5.0),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("null", None),
        ("~", None),
        ("a: b: c", "a: b: c"),
    ],
)
def test_yaml_is_read_as_people_mean_it(text: str, value: object) -> None:
    read_value = yaml_value(text)
    assert read_value == value
    assert type(read_value) is type(value)


@given(some.text(alphabet=some.characters(codec="utf-8", exclude_categories=("C", "Z"))))
def test_yaml_text_stays_text(text: str) -> None:
    assert yaml_value(yaml_text({"key": text})) == {"key": text}


@given(some.floats(allow_nan=False, allow_infinity=False) | some.integers())
def test_yaml_numbers_stay_numbers(number: float) -> None:
    assert yaml_value(yaml_text([number])) == [number]

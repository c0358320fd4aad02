"""Whatever a file, a cluster or --set says: it is accepted, or refused in one clear line."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import pkgutil
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.support.inputs import Input, inputs

import orchestra
from orchestra.cli.main import main
from orchestra.cluster import load_cluster
from orchestra.engines.events import describe
from orchestra.engines.simulation import evaluate
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.experiment import runs
from orchestra.experiments.file import load, to_yaml
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.settings import Settings, parse
from orchestra.settings.base import settings_of, type_hints
from orchestra.strategies.registry import STRATEGIES
from orchestra.transports import compiled, executor

SMALL = "task: digits\nstrategies: {ring: AllReduce}\n"
ONE = "task: digits\nstrategies: {it: %s}\n"
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in itertools.pairwise("abcdefghi")
)
REFUSED = {
    "ranks": (SMALL + "ranks: 1000000000\n", "ranks: 1000000000 is above 16384"),
    "a tag": (SMALL + "batch_size: !!int x\n", "e.yaml:3: 'x' is no !!int"),
    "digits": (SMALL + f"batch_size: {'9' * 5000}\n", "a number of 5000 digits"),
    "hexadecimal": (SMALL + f"batch_size: 0x{'f' * 5000}\n", "a number of 5002 digits"),
    "not a float": (SMALL + f"patience: {'9' * 90}\n", "is above 500000"),
    "nested": (SMALL + f"seeds: {'[' * 400 + ']' * 400}\n", "e.yaml:3: is nested more than 40"),
    "seed": (SMALL + "seeds: [18446744073709551616]\n", "18446744073709551616 is above"),
    "patience": (SMALL + "patience: 1e300\n", "patience: 1e+300 is above"),
    "shares": (SMALL + "ranks: 2\nshares: [1e308, 1e308]\n", "shares: 1e+308 is above"),
    "small shares": (SMALL + "ranks: 2\nshares: [1e-320, 1e-320]\n", "is below 1e-12"),
    "betas": (SMALL + "optimizer: Adam(betas=(0.9,))\n", "optimizer Adam refuses"),
    "rate of a group": (SMALL + "parameter_groups: [{match: b, lr: x}]\n", "optimizer SGD: "),
    "negative rate": (SMALL + "parameter_groups: [{match: b, lr: -1}]\n", "learning rate: -1"),
    "argument of a group": (SMALL + "parameter_groups: [{match: b, lt: 1}]\n", "'lt'"),
    "infinite rate": (SMALL + "optimizer: SGD(lr=1e999)\n", "SGD.lr: inf is not a finite number"),
    "aliases": (BOMB + SMALL, "with its aliases it has more than 500,000 values"),
    "alias of itself": (SMALL + "seeds: &a [*a]\n", "an alias stands inside of what it repeats"),
    "peers": (ONE % "'Gossip(Exponential(peers=999999999))'", "peers: 999999999 is above"),
    "links": (ONE % "PairwiseAveraging" + "ranks: 16384\n", "are more than 2,000,000 links"),
    "random links": (
        ONE % "'Gossip(RandomRegular(degree=999))'" + "ranks: 1000\n",
        "1000 ranks with 999 neighbours each are more than 200,000 links",
    ),
    "snapshots": (SMALL + "snapshots: 999999999999\n", "snapshots: 999999999999 is above 100000"),
    "samples": (SMALL + "steps: 1000000000\nbatch_size: 16777216\nranks: 1024\n", "give fewer"),
    "trials": (
        SMALL
        + f"tune: {{settings: {{optimizer.lr: {[*range(101)]}, clip_norm: {[*range(1, 101)]}}}}}",
        "10100 trials are more than 10000",
    ),
    "cores": (SMALL + "cluster: one_host(cores=999999999999)\n", "cores: 999999999999 is above"),
    "argument twice": (ONE % "'AllReduce(backup=1, backup=0)'", "backup is given twice"),
    "key twice": (ONE % "'digits(a={1: 2, 1: 3})'", "1 is given twice"),
    "labels": ("task: digits\nstrategies: {1: AllReduce, 0x1: Single}\n", "'0x1' stands in line 2"),
    "a label as text": ("task: digits\nstrategies: {1: Single, '1': Single}\n", "in line 2, too"),
    "name": (SMALL + f"name: {'x' * 300}\n", "cannot be a name"),
    "surrogate": (ONE % """'AllReduce("\\ud800")'""", "is not known"),
    "notation": (ONE % f"Both({'(' * 300}1{')' * 300})", "cannot be read"),
    "operators": (ONE % f"{'a & ' * 300}a", "it is nested more than 40 deep"),
}
OVERRIDES = {
    "argument of the optimizer": ("optimizer.momentun=0.5", "'momentun'"),
    "digits": ("batch_size=" + "9" * 5000, "--set batch_size: a number of 5000 digits"),
    "digits inside": ("optimizer.lr=" + "9" * 5000, "--set optimizer.lr: a number of 5000"),
    "nested": ("seeds=" + "[" * 400 + "]" * 400, "--set seeds: is nested more than 40 deep"),
    "nested inside": ("strategies.ring.order=" + "[" * 90 + "]" * 90, "more than 40 deep"),
    "labels": ("strategies={1: AllReduce, 0x1: Single}", "--set strategies: '0x1' stands in line"),
    "argument twice": ("strategies.ring=AllReduce(backup=1, backup=0)", "backup is given twice"),
}
ROOM_BYTES = 2**30
LONGEST_LINE = 2000
NAMES = ("0.weight", "0.bias")


@pytest.fixture(autouse=True)
def _bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, with so much more memory than before; the time is pytest's."""
    monkeypatch.chdir(tmp_path)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def placed(given: Input) -> Path:
    for name, text in (("e.yaml", given.experiment), ("c.yaml", given.cluster)):
        Path(name).write_bytes(text.encode("utf-8", "surrogatepass"))
    return Path("e.yaml")


def assert_one_line(message: str) -> None:
    assert len(message.splitlines()) == 1, message
    assert len(message) < LONGEST_LINE, message


def read(given: Input) -> str | None:
    """Why it was refused; None where it was accepted, and then said again in full."""
    try:
        experiment = load(placed(given), given.overrides)
        for run in runs(experiment):
            if run.training.cluster.endswith(".yaml"):
                cluster = load_cluster(run.training.cluster, where="cluster", folder=Path())
                cluster.nodes_of(run.training.ranks)
            OptimizerSpec.from_settings(run.training.optimizer, NAMES)
    except InputError as error:
        assert_one_line(str(error))
        return str(error)
    Path("again.yaml").write_text(to_yaml(experiment), encoding="utf-8")
    assert load(Path("again.yaml"), ["name=" + experiment.name]) == experiment
    return None


@pytest.mark.parametrize("name", REFUSED)
def test_what_once_ended_in_a_traceback_or_never_is_refused(name: str) -> None:
    text, message = REFUSED[name]
    assert message in str(read(Input(text, "", ())))


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_that_cannot_be_is_refused(name: str) -> None:
    override, message = OVERRIDES[name]
    assert message in str(read(Input(SMALL, "", (override,))))


@pytest.mark.parametrize(
    ("count", "latency", "message"),
    [
        ("999999999999", "1 us", "999999999999 is no number of nodes; write 1 to 16384"),
        ("2", "1e999999999 s", "unknown unit 'e999999999 s' of time"),
        ("2", f"{'9' * 5000} s", "unknown unit '999"),
        ("2", "1e300 s", "1e+300 is above 1000000000000.0"),
    ],
)
def test_a_cluster_beyond_what_can_be_simulated_is_refused(
    count: str, latency: str, message: str
) -> None:
    link = f"{{bandwidth: 1 Gbit/s, latency: {latency}}}"
    node = f"{{count: {count}, cores: 4, speed: 1, loopback: {link}, link: {link}}}"
    given = Input(SMALL + "cluster: c.yaml\n", f"nodes: {{worker: {node}}}\nranks: spread\n", ())
    assert message in str(read(given))


LONG = ["x" * 5000, [1] * 5000, "a 'b" * 900, "x y " * 900, ["it's"] * 900]


@pytest.mark.parametrize("value", LONG)
def test_a_message_repeats_200_characters_of_an_input(value: object) -> None:
    message = str(InputError(f"here: {value!r} isn't one of the user's; say 'x'"))
    assert message.startswith("here: ")
    assert message.endswith(" isn't one of the user's; say 'x'")
    assert len(message) == len("here:  isn't one of the user's; say 'x'") + 200
    assert str(InputError(f"there: {message}")) == f"there: {message}"


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_that_cannot_say_what_it_is_is_named_by_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe(_Mute()).headline == "_Mute"
    (tmp_path / "mute.py").write_text(
        "from tests.system.cli.test_inputs import _Mute\nraise _Mute\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="importing mute failed: _Mute"):
        parse("mute:Thing", STRATEGIES, where="here")


def _kinds(cls: type[Settings]) -> Iterator[type[Settings]]:
    for kind in cls.__subclasses__():
        yield kind
        yield from _kinds(kind)


def test_every_number_among_the_settings_has_a_least_and_a_most() -> None:
    for module in pkgutil.walk_packages(orchestra.__path__, "orchestra."):
        if module.name not in (compiled.NAME, evaluate.NAME, executor.NAME):  # libraries for ctypes
            importlib.import_module(module.name)
    for kind in filter(lambda kind: kind.__module__.startswith("orchestra."), _kinds(Settings)):
        for field in settings_of(kind):
            hint = type_hints(kind)[field.name]
            if {int, float} & {hint, *get_args(hint), *map(_item, get_args(hint)), _item(hint)}:
                limits = field.metadata["limits"]
                where = f"{kind.__name__}.{field.name}: {limits}"
                assert limits.high is not None, where
                assert limits.low is not None or limits.above is not None, where


def _item(hint: object) -> object:
    return get_args(hint)[0] if get_origin(hint) is tuple else None


USUAL = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)


def test_an_input_is_accepted_or_refused_in_one_line() -> None:
    outcomes: list[str | None] = []

    @settings(USUAL, max_examples=60, derandomize=True)
    @given(inputs())
    def each(given: Input) -> None:
        outcomes.append(read(given))

    each()
    accepted = outcomes.count(None)
    assert 5 < accepted < len(outcomes) - 5


@pytest.mark.lab
@pytest.mark.parametrize("number", range(20))
def test_a_campaign_through_the_command_line(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 times 100; nothing is trained."""

    def nothing(*_: object, **__: object) -> None:
        raise RunFailed("not started")

    monkeypatch.setattr("orchestra.engines.run.train_run", nothing)

    @seed(number)
    @settings(USUAL, max_examples=100)
    @given(inputs())
    def each(given: Input) -> None:
        sets = [word for text in given.overrides for word in ("--set", text)]
        with contextlib.redirect_stderr(io.StringIO()) as told:
            status = main(["train", str(placed(given)), *sets])
        lines = told.getvalue()
        assert status in (1, 2)
        assert lines.startswith("orchestra: ")
        assert_one_line(lines)
        assert ("not started" in lines) == (status == 1), lines
        reason = read(given)  # ranks look at optimizers; a single training does not look at `tune`
        later = reason is None or reason.startswith(("optimizer", "parameter_groups"))
        assert status == 2 or later or " tune" in str(reason), reason

    each()

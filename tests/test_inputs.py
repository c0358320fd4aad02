"""Whatever a file, a cluster or --set says: it is accepted, or refused in one clear line."""

from __future__ import annotations

import contextlib
import io
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.inputs import Input, inputs

from orchestra.cli.main import main
from orchestra.cluster import load_cluster
from orchestra.errors import InputError, RunFailed
from orchestra.experiments import load, runs, to_yaml
from orchestra.optimizers.spec import OptimizerSpec

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


@pytest.mark.matrix
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
        reason = read(given)
        assert status == 2 or reason is None or reason.startswith("optimizer"), reason

    each()

"""Any phase after any other, with checkpoints at the change and elsewhere, resumed from each."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.lab import by_turns, in_lab
from tests.support.simulated import run_ranks
from tests.support.stops import stop_at
from tests.support.training import settings, step_lines, train_threads

from orchestra.collectives import Group, all_reduce
from orchestra.engines.processes import launch
from orchestra.records.report import RankReport
from orchestra.settings import parse
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.gossip import Gossip
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.switch import Switch
from orchestra.strategies.switch_rules import AfterSteps
from orchestra.trainer import checkpoint_files, checkpoints
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime

RANKS, STEPS, SAMPLES = 4, 6, 6 * 4 * 8
ASYNCHRONOUS = "consistency='asynchronous'"
PHASES = [
    "AllReduce('ring')",
    "AllReduce(shard='optimizer')",
    "AllReduce(backup=1)",
    "ParameterServer()",
    "ParameterServer(servers=2)",
    "ParameterServer(placement='beside')",
    "ParameterServer(returns='gradients')",
    "ParameterServer(backup=1)",
    "ParameterServer(servers=2, replicas=1)",
    f"ParameterServer({ASYNCHRONOUS})",
    f"ParameterServer({ASYNCHRONOUS}, servers=2)",
    f"ParameterServer({ASYNCHRONOUS}, placement='beside')",
    "ParameterServer(consistency='bounded', staleness=1)",
    "ParameterServer(consistency='bounded', staleness=1, placement='beside')",
    "ElasticAveraging(2)",
    "ElasticAveraging(2, placement='beside')",
    "LocalSGD(2)",
    "LocalSGD(4, outer=SlowMo(0.2), fragments=2, overlap=1)",
    "LocalSGD(2, outer=Elastic())",
    "Gossip()",
    "StochasticGradientPush()",
    "StochasticGradientPush(overlap=1)",
    "PairwiseAveraging()",
    "Hop()",
    "Hop(staleness=4, skip=4)",
    "Prague(2)",
]


def switch(first: str, then: str, step: int = 3) -> str:
    return f"Switch({first}, {then}, when=AfterSteps({step}), moments='reset')"


def pairs() -> list[Any]:
    """All, with checkpoints every 2 and every 3 steps, where the first phase has 3.

    Every second phase comes once, first or second; the other pairs are in the lab.
    """
    mixed = random.Random(14).sample(PHASES, len(PHASES))
    couples = zip(mixed[::4], mixed[1::4], strict=False)
    usual = {(*pair, 2 + i % 2) for i, pair in enumerate(couples)}
    every_pair = itertools.product(PHASES, PHASES, (2, 3))
    return [
        pytest.param(*pair, marks=() if pair in usual else (pytest.mark.lab,))
        for pair in every_pair
    ]


@pytest.fixture(autouse=True)
def all_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And need not outlast the machine."""
    monkeypatch.setattr(checkpoints, "KEEP", 100)
    monkeypatch.setattr(checkpoints, "_sync", lambda path: None)


def run_of(text: str, **options: Any) -> Run:
    strategy = parse(text, STRATEGIES, where="test")
    options = {"steps": STEPS, "optimizer": "SGD(lr=0.05, momentum=0.9)", "snapshots": 3, **options}
    return settings(strategy, RANKS, f"images(samples={SAMPLES})", **options)


def trained(text: str, folder: Path, **options: Any) -> list[RankReport]:
    """What the ranks told of a run in virtual time."""
    run = run_of(text, **options)

    def program(runtime: Runtime) -> RankReport:
        return train(runtime, (run, folder))

    outcome = run_ranks(RANKS, program)
    assert (outcome.failure, outcome.bad_input) == (None, None)
    return list(outcome.results)


def consumed(folder: Path, ranks: int = RANKS) -> int:
    return sum(line["samples"] for rank in range(ranks) for line in step_lines(folder, rank))


def told(reports: list[RankReport]) -> list[Any]:
    """What does not depend on time."""
    (leader,) = (report.leader for report in reports if report.leader is not None)
    points = [(point.samples, point.metrics) for point in leader.curve]
    first = reports[0]
    return [
        (first.switched_at_step, first.switched_at_sample),
        sum(report.samples for report in reports),
        [report.steps for report in reports],
        leader.parameters_sha256,
        points,
    ]


def resumed_from_each(text: str, folder: Path, **options: Any) -> int:
    """How many checkpoints the run leaves; it goes on from each of them."""
    strategy = parse(text, STRATEGIES, where="test")
    whole = told(trained(text, folder / "whole", **options))
    there = sorted(checkpoint_files.complete(folder / "whole" / "checkpoints"))
    for index in there:
        name = f"checkpoints/{index:04d}"
        shutil.copytree(folder / "whole" / name, folder / str(index) / name)
        again = told(trained(text, folder / str(index), **options))
        sure = 2 if strategy.traits().depends_on_speed else len(whole)
        assert again[:sure] == whole[:sure], f"resumed from checkpoint {index} of {len(there)}"
    return len(there)


@pytest.mark.parametrize(("first", "then", "every"), pairs())
def test_any_phase_follows_any_other_and_every_checkpoint_is_gone_on_from(
    first: str, then: str, every: int, tmp_path: Path
) -> None:
    assert resumed_from_each(switch(first, then), tmp_path, checkpoint_every=every)
    assert consumed(tmp_path / "whole") == SAMPLES


RESET = "moments='reset'"
SERVER_FIRST = f"Switch(ParameterServer(), %s, when=AfterSteps(2), {RESET})"
NESTED = [
    switch(SERVER_FIRST % "AllReduce()", "LocalSGD(2)", 4),
    switch(SERVER_FIRST % "Gossip()", "ParameterServer(servers=2)", 4),
    switch(SERVER_FIRST % "AllReduce()", "Gossip()", 2),  # both end at the same step
    switch(SERVER_FIRST % f"ParameterServer({ASYNCHRONOUS})", "AllReduce()", 4),
    switch(switch("ParameterServer(servers=2)", "AllReduce()", 2), "ParameterServer()", 4),
    switch("ParameterServer()", switch("AllReduce()", "ParameterServer(servers=2)", 2), 2),
]


@pytest.mark.parametrize(
    ("text", "work"),
    [
        *by_turns(NESTED[:3], ["shared", "equal"]),
        *in_lab(itertools.product(NESTED[3:], ["shared", "equal"])),
    ],
)
def test_a_rank_that_has_served_counts_as_the_others_do(
    text: str, work: str, tmp_path: Path
) -> None:
    """The rule outside counts the steps of a phase inside, in which that rank took none."""
    trained(text, tmp_path / "without", work=work)
    assert consumed(tmp_path / "without") == SAMPLES
    assert resumed_from_each(text, tmp_path, work=work, checkpoint_every=2) >= 2


def test_a_rank_that_has_served_hears_what_the_others_saw(tmp_path: Path) -> None:
    """A rule that observes: the third loss of four is of the phase in which it served."""
    inner = SERVER_FIRST % "AllReduce()"
    text = f"Switch({inner}, LocalSGD(2), when=LossStable(window=4, threshold=9.0), {RESET})"
    reports = trained(text, tmp_path / "run")
    assert reports[0].switched_at_step == 4
    assert resumed_from_each(text, tmp_path, checkpoint_every=1) >= 6


ON_PROCESSES = {
    "worker to server": switch("AllReduce('ring')", f"ParameterServer({ASYNCHRONOUS})", 4),
    "server to worker": switch("ParameterServer()", "AllReduce('ring')", 4),
    "server stays": switch("ParameterServer()", f"ParameterServer({ASYNCHRONOUS})", 4),
    "another server": switch("ElasticAveraging(2)", "ParameterServer(servers=2)", 4),
    "beside workers": switch("Gossip()", "ParameterServer(placement='beside')", 4),
    "there and back": switch(SERVER_FIRST % "Gossip()", "ParameterServer()", 4),
}


def _one_after_the_other(runtime: Runtime, folder: Path) -> dict[str, list[RankReport]]:
    """Each run and what follows each of its checkpoints, all on the ranks of one launch."""
    checkpoints.KEEP = 100
    reports: dict[str, list[RankReport]] = {}
    for label, text in ON_PROCESSES.items():
        run = run_of(text, checkpoint_every=2)
        whole = folder / label / "whole" / "checkpoints"
        reports[label] = [train(runtime, (run, whole.parent))]
        for index in sorted(checkpoint_files.complete(whole)):
            there = folder / label / str(index)
            if runtime.rank == 0:
                shutil.copytree(whole / f"{index:04d}", there / "checkpoints" / f"{index:04d}")
            everyone = Group(tuple(range(runtime.ranks)))
            all_reduce(runtime.transport, torch.zeros(1), "ring", everyone, Tag.READY)
            reports[label].append(train(runtime, (run, there)))
    return reports


def test_roles_change_at_a_checkpoint_on_processes(tmp_path: Path) -> None:
    by_rank = launch(_one_after_the_other, tmp_path, RANKS).results
    for label, text in ON_PROCESSES.items():
        runs = [told(list(reports)) for reports in zip(*(r[label] for r in by_rank), strict=True)]
        depends = parse(text, STRATEGIES, where=label).traits().depends_on_speed
        sure = 2 if depends else len(runs[0])
        assert len(runs) >= 3, label
        assert all(again[:sure] == runs[0][:sure] for again in runs), label
        assert consumed(tmp_path / label / "whole") == SAMPLES


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (AllReduce(), ParameterServer(consistency="asynchronous")),
        (ParameterServer(), AllReduce()),
        (Gossip(), ParameterServer(servers=2)),
    ],
    ids=repr,
)
def test_a_wish_to_stop_that_meets_the_switch_is_heard_after_it(
    first: Any, then: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stop together, and every sample is seen once in the two runs."""
    seen: list[int] = []
    for at in (5, 1000):
        strategy = Switch(first, then, when=AfterSteps(5), moments="reset")
        with monkeypatch.context() as stopping:
            stop_at(stopping, at)
            result = train_threads(strategy, RANKS, tmp_path, "scripted(samples=803)")
        assert any(report.stopped for report in result.reports) == (at == 5)
        seen += [sample for module in result.modules for batch in module.seen for sample in batch]
    assert sorted(seen) == list(range(803))

"""Runs that go on from a checkpoint on another number of ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.support.commands import run, started
from tests.support.lab import some
from tests.support.simulated import run_ranks
from tests.support.training import TASKS, settings, step_lines
from tests.support.waiting import wait_until

from orchestra.data import Contiguous, DataPlan
from orchestra.data.feed import Feed, open_samples
from orchestra.optimizers.settings import Optimizer
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.records.report import Membership
from orchestra.settings import parse
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy, refusal_of, roles_of
from orchestra.strategies.registry import STRATEGIES
from orchestra.tasks import load_task
from orchestra.trainer import checkpoint_files, checkpoints
from orchestra.trainer.checkpoint_files import Manifest
from orchestra.trainer.members import MemberFiles
from orchestra.trainer.membership import refusal_to_resume
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run

SAMPLES = 240  # of an epoch
BUDGET = 2 * SAMPLES
BATCH = 60  # of all workers
NORMALISED = f"images(samples={SAMPLES}, model='normalised')"
PLAIN = f"images(samples={SAMPLES})"


@pytest.fixture(autouse=True)
def all_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "KEEP", 1000)


def run_of(
    strategy: str, ranks: int, begun_on: int = 0, task: str = NORMALISED, **changes: Any
) -> Run:
    chosen = parse(strategy, STRATEGIES, where="test")
    return settings(
        chosen, ranks, task, epochs=2, batch_size=BATCH // (begun_on or ranks),
        **{
            "checkpoint_every": 1, "snapshots": 4, "equal": "global_batch",
            "optimizer": "Adam(lr=0.01)", **changes,
        },
    )  # fmt: skip


def trained(folder: Path, strategy: str, ranks: int, begun_on: int = 0, **changes: Any) -> Any:
    """The outcome of a run of 8 steps of 60 samples, which goes on with what is in `folder`; the
    steps are those of a run that has `begun_on` another number of ranks."""
    return gone_on(run_of(strategy, ranks, begun_on, **changes), folder)


def gone_on(run: Run, folder: Path) -> Any:
    processes = len(roles_of(run.strategy, run.training.ranks).shares)
    outcome = run_ranks(processes, lambda runtime: train(runtime, (run, folder)))
    assert (outcome.failure, outcome.bad_input) == (None, None)
    return outcome


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "parameters.safetensors")


def only(source: Path, index: int, folder: Path) -> Path:
    """Copy checkpoint `index` of the run in `source`, as if it had been killed then."""
    name = f"{index:04d}"
    shutil.copytree(source / "checkpoints" / name, folder / "checkpoints" / name)
    return folder


def assert_equal(one: Path, other: Path, tolerance: float = 0.0) -> None:
    ours, theirs = parameters(one), parameters(other)
    for name, values in ours.items():
        assert values.dtype == theirs[name].dtype
        assert float((values - theirs[name]).abs().max()) <= tolerance, name


EQUAL = {
    "ring": "AllReduce('ring')",
    "compressed": "AllReduce('ring', compression=TopK(0.5))",
    "zero 1": "AllReduce('ring', shard='optimizer')",
    "zero 2": "AllReduce('ring', shard='gradients')",
    "zero 3": "AllReduce('ring', shard='parameters')",
    "server": "ParameterServer",
    "two servers": "ParameterServer(servers=2)",
    "beside": "ParameterServer(servers=2, placement='beside')",
    "averages": "ParameterServer(placement='beside', returns='gradients')",
    "pipelines": "Pipeline(stages=2)",
    "switch": "Switch(AllReduce('ring'), ParameterServer, when=AfterSteps(2))",
}
DIFFERENT = {
    "local": "LocalSGD(3)",
    "diloco": "LocalSGD(3, outer=Nesterov(), fragments=2)",
    "elastic rounds": "LocalSGD(2, outer=Elastic())",
    "gossip": "Gossip(Exponential(peers=1))",
    "choco": "Gossip(compression=TopK(0.5))",
    "push-sum": "StochasticGradientPush",
    "asynchronous": "ParameterServer(consistency='asynchronous', delay_compensation='adaptive')",
    "elastic": "ElasticAveraging(2)",
    "pairwise": "PairwiseAveraging",
    "prague": "Prague",
    "hop": "Hop",
}


OPTIMIZERS = [
    "Adam(lr=0.01)",
    pytest.param("SGD(lr=0.1, momentum=0.9)", marks=pytest.mark.lab),
]


def usual(*labels: str, of: Iterable[str] = (*EQUAL, *DIFFERENT)) -> list[Any]:
    """All labels, those that are not named only in the lab."""
    others = [label for label in of if label not in labels]
    return [*labels, *(pytest.param(label, marks=pytest.mark.lab) for label in others)]


def on(strategy: str, workers: int) -> int:
    """The setting `ranks` with which `strategy` has so many workers."""
    chosen = parse(strategy, STRATEGIES, where="test")
    return next(n for n in range(1, 9) if len(_workers(chosen, n)) == workers)


def _workers(strategy: Strategy, ranks: int) -> tuple[int, ...]:
    return () if refusal_of(strategy, ranks) else roles_of(strategy, ranks).workers


@pytest.mark.parametrize("workers", [(2, 4), pytest.param((4, 2), marks=pytest.mark.lab)])
@pytest.mark.parametrize("label", some(usual("zero 3", "two servers", "switch", "local")))
def test_the_model_is_taken_over_and_the_budget_completed(
    label: str, workers: tuple[int, int], tmp_path: Path
) -> None:
    """From the end of the budget no step is left: the model is that which the others had learnt."""
    strategy = {**EQUAL, **DIFFERENT}[label]
    before, after = (on(strategy, count) for count in workers)
    whole, folder = tmp_path / "whole", tmp_path / "checkpoints"
    trained(whole, strategy, before)
    indices = sorted(checkpoint_files.complete(whole / "checkpoints"))
    manifests = {n: checkpoint_files.verify(whole / "checkpoints", n) for n in indices}
    for index in (indices[-1], next(n for n in indices if manifests[n].consumed >= 2 * BATCH)):
        run = only(whole, index, folder / str(index))
        outcome = trained(run, strategy, after, begun_on=before)
        text = f"resumed from checkpoint {index} of {before} ranks, on {after}, step "
        assert any(notice.startswith(text) for notice in outcome.notices)
        assert sum(report.samples for report in outcome.results) == BUDGET
        assert [m.ranks for m in outcome.results[0].history] == [before, after]
        if manifests[index].consumed == BUDGET:
            assert_equal(whole, run, 0.0 if label in EQUAL else 1e-6)
    assert label not in EQUAL or manifests[indices[-1]].consumed == BUDGET


# Bit for bit


def by_hand(spans: list[tuple[int, int]], optimizer: str) -> dict[str, torch.Tensor]:
    """What a loop by hand learns in these numbers of steps with so many workers, 2 at most."""
    task = load_task(f"{TASKS}{PLAIN}")
    module, samples = task.model(), open_samples(task.train, 0, task.collate)
    spec = OptimizerSpec.from_settings(
        Optimizer.parse(optimizer, where="test"), [name for name, _ in module.named_parameters()]
    )
    steps, start = spec.build(dict(module.named_parameters())), 0
    for count, workers in spans:
        plan = DataPlan(start, BUDGET, BATCH, (1.0,) * workers)
        feeds = [Feed(samples, plan, rank) for rank in range(workers)]
        for step in range(count):
            gradients = []
            for feed in feeds:
                module.zero_grad()
                batch, size = feed.next(step)
                task.loss(module, batch).backward()
                own = [p.grad for p in module.parameters() if p.grad is not None]
                gradients.append([gradient * (size / BATCH) for gradient in own])
            for parameter, *each in zip(module.parameters(), *gradients, strict=True):
                parameter.grad = sum(each[1:], each[0])
            steps.step()
        start += count * BATCH
    return {name: values.detach() for name, values in module.state_dict().items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "label", usual("zero 3", "server", of=("ring", "zero 1", "zero 2", "averages"))
)
def test_parameters_are_those_of_a_loop_by_hand(label: str, optimizer: str, tmp_path: Path) -> None:
    """One worker, then two, then one: bit for bit, moments and position included."""
    strategy, begun_on = EQUAL[label], 0
    source = tmp_path / "0"
    for number, workers in enumerate((1, 2, 1)):
        ranks = on(strategy, workers)
        begun_on = begun_on or ranks
        trained(source, strategy, ranks, begun_on, task=PLAIN, optimizer=optimizer)
        source = only(source, newest(source, 3 + 2 * number), tmp_path / str(number + 1))
    final, expected = parameters(tmp_path / "2"), by_hand([(3, 1), (2, 2), (3, 1)], optimizer)
    for name, values in expected.items():
        assert torch.equal(final[name], values), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_goes_on_as_a_run_of_these_ranks_would_from_that_state(
    optimizer: str, tmp_path: Path
) -> None:
    """Such a run has three ranks from its beginning; parameters and moments are put into it."""
    strategy, two, three = "AllReduce('ring')", tmp_path / "two", tmp_path / "three"
    trained(two, strategy, 2, optimizer=optimizer)
    trained(three, strategy, 3, optimizer=optimizer)
    own, theirs = only(two, 3, tmp_path / "own"), only(three, 3, tmp_path / "theirs")
    state = ("/parameters", "/buffers", "/strategy/member/optimizer")
    given = load_file(own / "checkpoints" / "0003" / "rank-0.safetensors")
    for rank in range(3):
        path = theirs / "checkpoints" / "0003" / f"rank-{rank}.safetensors"
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        put = {key: values for key, values in given.items() if key.startswith(state)}
        assert put.keys() <= tensors.keys()
        save_file({**tensors, **put}, path, metadata=metadata)
        sign(path)
    trained(own, strategy, 3, begun_on=2, optimizer=optimizer)
    trained(theirs, strategy, 3, optimizer=optimizer)
    assert_equal(own, theirs)


def sign(path: Path) -> None:
    """Make the manifest right again after `path`, a rank's file, was edited."""
    manifest = path.parent / checkpoint_files.MANIFEST
    content = json.loads(manifest.read_text())
    content["files"][path.name] = checkpoint_files.digest(path)
    manifest.write_text(json.dumps(content))


def newest(folder: Path, steps: int) -> int:
    """The number of the checkpoint after so many steps, or of the last one."""
    there = sorted(checkpoint_files.complete(folder / "checkpoints"))
    manifests = {n: checkpoint_files.read_manifest(folder / "checkpoints", n) for n in there}
    return next((n for n in there if manifests[n].consumed == steps * BATCH), there[-1])


def test_what_any_member_could_have_kept_is_taken_over(tmp_path: Path) -> None:
    """The outer momentum of DiLoCo, and the count of steps: rounds end where they would have."""
    strategy = "LocalSGD(4, outer=Nesterov())"
    trained(tmp_path / "whole", strategy, 2)
    run = only(tmp_path / "whole", 6, tmp_path / "run")
    before = checkpoints.read_rank(run / "checkpoints", 6, 0)["strategy"]["member"]
    trained(run, strategy, 3, begun_on=2)
    after = checkpoints.read_rank(run / "checkpoints", 7, 2)["strategy"]["member"]
    assert (before["steps"], after["steps"]) == (6, 7)
    ours, theirs = after["fragments"][0], before["fragments"][0]
    assert ours["averages"] == theirs["averages"] == 1
    assert torch.equal(ours["outer"]["velocity"], theirs["outer"]["velocity"])
    assert float(ours["outer"]["velocity"].abs().max()) > 0
    assert ours["samples"] == BATCH // 3  # of the round: since the replicas are equal


def test_the_mean_of_the_workers_moments_is_taken_over(tmp_path: Path) -> None:
    """Replicas that differ have moments that differ."""
    trained(tmp_path / "whole", "LocalSGD(4)", 2, optimizer="SGD(lr=0.1, momentum=0.9)")
    run = only(tmp_path / "whole", 2, tmp_path / "run")
    manifest = checkpoint_files.verify(run / "checkpoints", 2)
    members = MemberFiles(run / "checkpoints", 2, manifest)
    name = members.first.tree["handed"]["moments"][0]["name"]
    shape = {name: load_task(f"{TASKS}{NORMALISED}").model().state_dict()[name]}
    own = [file.unpacked("handed", "moments")[0]["state"] for file in members.files.values()]
    one, other = (state["momentum_buffer"] for state in own)
    assert not torch.equal(one, other)
    mean = members.moments(shape, elementwise=True)[name]["momentum_buffer"]
    assert torch.equal(mean, ((one.double() + other.double()) / 2).float())


def test_tensors_of_a_member_are_written_once(tmp_path: Path) -> None:
    """What it hands over is its state; parameters of a slice are those of the server."""
    for label in ("ring", "local", "server", "zero 3", "push-sum"):
        strategy = {**EQUAL, **DIFFERENT}[label]
        trained(tmp_path / label, strategy, 2)
        for path in (tmp_path / label / "checkpoints" / "0002").glob("rank-?.safetensors"):
            assert not any(key.startswith("/handed") for key in load_file(path))


# What cannot be


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sharding": Contiguous()}, "sharding: Contiguous() gives each of 2 workers samples"),
        ({"equal": "worker_batch"}, "equal: with worker_batch a step has "),
        ({"record_order": True}, "record_order: a replay has one number of ranks"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    run = run_of("ParameterServer", 4, **{"sharding": None, **changes})
    manifest = Manifest(
        1, ("worker", "server"), global_batch=60, begun_on=3, history=(Membership(3, 2, 0),)
    )
    assert str(refusal_to_resume(run, manifest)).startswith(why)


def test_what_does_not_fit_is_not_lost(tmp_path: Path) -> None:
    """Another model, say: the run ends, where one of the same ranks would begin anew."""
    trained(tmp_path, "AllReduce('ring')", 2)
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    run = run_of("AllReduce('ring')", 3, begun_on=2, task="pairs")
    outcome = run_ranks(3, lambda runtime: train(runtime, (run, tmp_path)))
    assert outcome.bad_input is not None
    assert outcome.bad_input.endswith("set ranks to 2 to go on from it")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before


# On real processes


def command(ranks: int, out: Path, **changes: Any) -> list[str]:
    """The command line of a run of 40 steps, which says what `SETTINGS` say."""
    words = ["train", "--task", DIGITS, "--strategy", "AllReduce('ring')", "--ranks", str(ranks)]
    for key, value in {**SETTINGS, **changes}.items():
        words += ["--set", f"{key}={value}"]
    return [*words, "--out", str(out)]


DIGITS = "digits(dropout=0.3, channels=4, hidden=16)"
SETTINGS: dict[str, Any] = {
    "steps": 40,
    "batch_size": 24,
    "optimizer": "Adam(lr=0.01)",
    "checkpoint_every": 2,
    "snapshots": 2,
}


def killed(ranks: int, out: Path, at: int) -> None:
    """Kill the command, and its ranks with it, once checkpoint `at` is there."""
    with started(command(ranks, out), out.parent) as launched:
        folder = out / "checkpoints"
        wait_until(lambda: (folder / f"{at:04d}").exists(), f"checkpoint {at}")
        launched.process.kill()
        launched.end()


def test_two_ranks_three_ranks_two_ranks(tmp_path: Path) -> None:
    """On processes that are killed; in virtual time the same goes the same way, bit for bit."""
    out, budget = tmp_path / "out", 40 * 2 * 24
    killed(2, out, at=3)
    killed(3, out, at=9)
    ended = run(command(2, out), tmp_path)
    assert ended.status == 0, ended.err
    (entry,) = json.loads((out / "summary.json").read_text())["runs"]
    one, three, two = entry["ranks_history"]
    assert [each["ranks"] for each in (one, three, two)] == [2, 3, 2]
    first, second = three["checkpoint"], two["checkpoint"]
    assert 0 < three["sample"] < two["sample"] < budget
    assert f"resumed from checkpoint {second} of 3 ranks, on 2, step " in ended.err
    assert (entry["samples"], entry["global_batch"], entry["steps"]) == (budget, 48, 40)
    lines = [line for rank in range(3) for line in step_lines(out, rank)]
    assert sum(line["samples"] for line in lines) == budget

    part = tmp_path / "simulated"
    for ranks, index in ((2, first), (3, second), (2, 0)):
        changes = {**SETTINGS, "equal": "global_batch"}
        chosen = settings(AllReduce("ring"), ranks, PLAIN, **changes)
        gone_on(replace(chosen, task=DIGITS), part)
        if index:
            part = only(part, index, tmp_path / str(index))
    assert_equal(out, part)


def test_other_settings_are_still_another_experiment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed(2, out, at=2)
    before = sorted(path.name for path in out.rglob("*"))
    refused = run(command(3, out, batch_size=12), tmp_path)
    assert refused.status == 2
    assert "holds a different experiment (in ranks, batch_size)" in refused.err
    (out / "checkpoints").rename(tmp_path / "moved")
    refused = run(command(3, out), tmp_path)
    assert refused.status == 2
    assert "holds a different experiment (in ranks)" in refused.err
    (tmp_path / "moved").rename(out / "checkpoints")
    assert sorted(path.name for path in out.rglob("*")) == before

"""Runs that lose ranks and go on with those that are left, on real processes."""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Started
from tests.support.free_ports import free_port
from tests.support.lab import in_lab, some
from tests.support.training import step_lines

import orchestra
from orchestra.errors import InputError, RankLost
from orchestra.records.record import RunRecord
from orchestra.trainer.checkpoint_files import complete, newest_whole, verify
from orchestra.trainer.checkpoints import read_rank
from orchestra.trainer.members import MemberFiles


def train(folder: Path, strategy: str, deaths: str, **options: Any) -> RunRecord:
    task = f"tests.support.failing_tasks:lost({deaths!r}, model='normalised')"
    given: dict[str, Any] = {
        "ranks": 4, "min_ranks": 2, "steps": 20, "batch_size": 8, "threads": 1,
        "optimizer": "Adam(lr=0.01)", **options,
    }  # fmt: skip
    return orchestra.train(task, strategy, out=folder, quiet=True, **given)


@pytest.mark.parametrize(
    "strategy",
    [
        "AllReduce('ring')",
        pytest.param(
            "AllReduce('halving_doubling', compression=PowerSGD(2))", marks=pytest.mark.lab
        ),
        "AllReduce('ring', compression=TopK(0.1))",
    ],
)
def test_those_that_are_left_go_on_together(strategy: str, tmp_path: Path) -> None:
    record = train(tmp_path, strategy, "2@5,0@9", checkpoint_every=3)
    assert record.ending.status == "completed"
    assert record.ending.left_out == {"2": "was killed by SIGKILL", "0": "was killed by SIGKILL"}
    assert record.learned.samples == 20 * 4 * 8
    first, second = record.ending.regroupings
    assert (first.lost, first.ranks, first.step) == ((2,), 3, 4)
    # From step 5 on each rank computes two gradients per step. Its ninth one is of step 6 if it had
    # begun step 5 before the first loss, and of step 7 if it learned of the loss in time.
    assert (second.lost, second.ranks) == ((0,), 2)
    assert second.step in (5, 6)
    # None where a rank learns of the loss before it begins its step
    assert all(loss.steps_voided <= 1 for loss in record.ending.regroupings)
    one, other = (
        [(line["step"], line["consumed"], line["loss"]) for line in step_lines(tmp_path, rank)]
        for rank in (1, 3)
    )
    assert one == other
    consumed = [0, *(consumed for _, consumed, _ in one)]
    assert consumed == sorted(set(consumed))
    seconds = [line["seconds"] for line in step_lines(tmp_path, 1)]
    assert seconds == sorted(seconds)
    assert record.time.training is not None
    assert first.noticed + first.seconds <= second.noticed < record.time.training
    assert consumed[-1] == record.learned.samples


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [
        pytest.param("AllReduce('ring')", 3, marks=pytest.mark.lab),
        pytest.param("AllReduce('tree')", 0, marks=pytest.mark.lab),
        ("ParameterServer", 1),
        pytest.param("ParameterServer(returns='gradients')", 0, marks=pytest.mark.lab),
        ("Switch(ParameterServer, AllReduce('ring'), when=AfterSteps(4), moments='reset')", 0),
    ],
)
def test_it_equals_a_run_that_is_resumed_with_the_same_members(
    strategy: str, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: whether those that are left go on at once, or from a checkpoint of the step
    before."""
    fault = f"Inject('kill', rank={lost}, at='gradient', number=5)"
    monkeypatch.setenv("ORCHESTRA_INJECT", fault)
    at_once = train(tmp_path / "at once", strategy, "", checkpoint_every=4)
    (loss,) = at_once.ending.regroupings
    assert (loss.step, loss.steps_voided) == (4, 1)
    with pytest.raises(RankLost):
        train(tmp_path / "resumed", strategy, "", checkpoint_every=4, min_ranks=None)
    monkeypatch.delenv("ORCHESTRA_INJECT")
    options: dict[str, Any] = {"checkpoint_every": 4, "min_ranks": None}
    resumed = train(tmp_path / "resumed", strategy, "", ranks=3, **options)
    assert [part.ranks for part in resumed.ending.ranks_history] == [4, 3]
    assert resumed.learned.samples == at_once.learned.samples
    assert resumed.learned.parameters_sha256 == at_once.learned.parameters_sha256


LATER, EARLIER = (
    f"Switch(ParameterServer, AllReduce('ring'), when=AfterSteps({steps}), moments='reset')"
    for steps in (9, 3)
)


@pytest.mark.parametrize(
    ("strategy", "fault"),
    some(
        [
            ("ParameterServer", "rank=0, at='gradient', number=7"),
            ("ParameterServer", "rank=3, at='send', number=30"),
            pytest.param(
                "ParameterServer(servers=2)", "rank=2, at='send', number=13", marks=pytest.mark.lab
            ),
            ("ParameterServer(servers=3, placement='beside')", "rank=2, at='gradient', number=7"),
            *in_lab(
                [
                    (
                        "ParameterServer(servers=2, placement='beside')",
                        "rank=1, at='send', number=31",
                    ),
                    ("ParameterServer(returns='gradients')", "rank=3, at='send', number=30"),
                    ("ParameterServer(compression=TopK(0.1))", "rank=1, at='gradient', number=7"),
                ]
            ),
            pytest.param(LATER, "rank=1, at='gradient', number=7", marks=pytest.mark.lab),
            (EARLIER, "rank=0, at='gradient', number=7"),
        ]
    ),
)
def test_with_servers_they_go_on_from_the_step_under_way(
    strategy: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is lost, a worker or a server, and without a checkpoint."""
    monkeypatch.setenv("ORCHESTRA_INJECT", f"Inject('kill', {fault})")
    record = train(tmp_path, strategy, "", min_ranks=3)
    assert record.ending.status == "completed"
    assert record.learned.samples == 20 * 4 * 8
    (change,) = record.ending.regroupings
    assert change.step >= 2
    assert change.steps_voided <= 1
    before, after = record.ending.ranks_history
    assert (before.ranks, after.ranks, after.sample) == (4, 3, change.step * 32)
    for rank in range(4):
        lines = step_lines(record.folder, rank)
        for key in ("consumed", "step"):
            found = [line[key] for line in lines]
            assert found == sorted(set(found))


ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"


@pytest.mark.parametrize(
    ("strategy", "faults"),
    some(
        [
            (ASYNCHRONOUS, "Inject('kill', rank=3, at='send', number=40)"),
            (
                "ParameterServer(servers=2, consistency='asynchronous')",
                "Inject('kill', rank=2, at='send', number=41)",
            ),
            (
                ASYNCHRONOUS,  # first in place
                "Inject('kill', rank=1, at='gradient', number=3);"
                "Inject('kill', rank=3, at='send', number=60)",
            ),
            (
                "ParameterServer(consistency='bounded', staleness=1)",
                "Inject('kill', rank=3, at='send', number=40)",
            ),
        ]
    ),
)
def test_queue_of_a_lost_server_goes_on_where_workers_know_it_to_be(
    strategy: str, faults: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkpoint before. No batch is made twice, and none is left out."""
    monkeypatch.setenv("ORCHESTRA_INJECT", faults)
    record = train(
        tmp_path,
        strategy,
        "",
        min_ranks=3 if "servers=2" in strategy else 2,
        optimizer="SGD(lr=0.05)",
    )
    assert record.ending.status == "completed"
    assert record.learned.samples == 20 * 4 * 8
    (change,) = record.ending.regroupings
    after = record.ending.ranks_history[-1]
    assert 5 * 8 <= after.sample < 20 * 4 * 8
    assert change.samples_again <= 32
    made = [
        sample
        for rank in range(4)
        for line in step_lines(record.folder, rank)
        for sample in range(line["position"], line["position"] + line["samples"])
    ]
    assert len(made) == len(set(made))
    if strategy == ASYNCHRONOUS and len(record.ending.left_out) == 1:
        assert set(made) == set(range(20 * 4 * 8))


def test_the_speaker_of_a_checkpoint_stands_for_all(tmp_path: Path) -> None:
    """After a loss a worker with a lower number may be a step behind."""
    train(tmp_path, "AllReduce('ring')", "", ranks=2, steps=4, checkpoint_every=2)
    folder = tmp_path / "checkpoints"
    newest = newest_whole(folder)
    assert newest is not None
    index, manifest = newest
    for speaker, expected in ((None, 0), (1, 1)):
        told = replace(manifest, speaker=speaker)
        assert told.each_can_resume == (speaker is None)
        members = MemberFiles(folder, index, told)
        assert members.first is members.files[expected]


def test_moments_of_a_lost_server_are_those_of_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slice's values are those of a worker."""
    monkeypatch.setenv("ORCHESTRA_INJECT", "Inject('kill', rank=3, at='send', number=34)")
    told = "the moments of a lost server's slice begin anew"
    for name, every in (("there", 3), ("not there", None)):
        record = train(tmp_path / name, "ParameterServer", "", checkpoint_every=every, steps=7)
        assert any(told in notice for notice in record.ending.notices) == (every is None)
        folder = tmp_path / name / "checkpoints"
        (index,) = (each for each in complete(folder) if verify(folder, each).speaker is not None)
        handed = [read_rank(folder, index, rank)["handed"]["moments"] for rank in range(3)]
        assert any(handed) == (every is not None)


@pytest.mark.parametrize(
    ("optimizer", "factor"), [("SGD(lr=0.01)", 3 / 4), ("AdamW(lr=0.01)", math.sqrt(3 / 4))]
)
def test_the_batch_and_the_rate_may_shrink_with_the_ranks(
    optimizer: str, factor: float, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "checkpoint_every": 4, "resized_batch": "scaled", "optimizer": optimizer,
    }  # fmt: skip
    at_once = train(tmp_path / "at once", "AllReduce('ring')", "3@5", **options)
    lines = [
        (line["step"], line["consumed"], line["rates"])
        for line in step_lines(tmp_path / "at once", 0)
    ]
    assert lines[3] == (4, 4 * 32, [0.01])
    assert lines[4] == (5, 4 * 32 + 24, [0.01 * factor])
    assert at_once.learned.samples == 20 * 4 * 8
    assert at_once.batching.global_batch == 4 * 8
    options["min_ranks"] = None
    with pytest.raises(RankLost):
        train(tmp_path / "resumed", "AllReduce('ring')", "3@5", **options)
    resumed = train(tmp_path / "resumed", "AllReduce('ring')", "3@5", ranks=3, **options)
    assert resumed.learned.parameters_sha256 == at_once.learned.parameters_sha256


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("LocalSGD(4)", marks=pytest.mark.lab),
        "LocalSGD(4, outer=Nesterov(0.7, 0.9))",
        pytest.param("LocalSGD(4, outer=SlowMo(momentum=0.6))", marks=pytest.mark.lab),
    ],
)
def test_replicas_that_are_averaged_by_rounds_go_back_to_the_last_average(
    strategy: str, tmp_path: Path
) -> None:
    """It equals a run that is resumed with the same members from a checkpoint there, bit for bit,
    as long as local optimizers have no moments."""
    options: dict[str, Any] = {"checkpoint_every": 4, "optimizer": "SGD(lr=0.05)"}
    at_once = train(tmp_path / "at once", strategy, "3@11", **options)
    (change,) = at_once.ending.regroupings
    assert (change.lost, change.ranks, change.step) == ((3,), 3, 8)
    assert 1 <= change.steps_voided <= 4
    assert change.samples_again == 32 * change.steps_voided
    assert at_once.learned.samples == 20 * 4 * 8
    for rank in range(3):
        steps = [line["step"] for line in step_lines(at_once.folder, rank)]
        assert steps == list(range(1, 21))
    options["min_ranks"] = None
    with pytest.raises(RankLost):
        train(tmp_path / "resumed", strategy, "3@11", **options)
    resumed = train(tmp_path / "resumed", strategy, "3@11", ranks=3, **options)
    assert [part.sample for part in resumed.ending.ranks_history] == [0, 8 * 32]
    assert resumed.learned.parameters_sha256 == at_once.learned.parameters_sha256


@pytest.mark.parametrize(
    "strategy",
    [
        "Gossip(Ring())",
        pytest.param("Gossip(Ring(), compression=TopK(0.5))", marks=pytest.mark.lab),
        *in_lab(["StochasticGradientPush", "LocalSGD(4, fragments=2)"]),
        pytest.param("LocalSGD(4, outer=Elastic())", marks=pytest.mark.lab),
    ],
)
def test_replicas_that_are_never_equal_go_on_from_their_mean(strategy: str, tmp_path: Path) -> None:
    """The lost rank had made 24 steps, and the last copies of all are of the 16th."""
    record = train(
        tmp_path, strategy, "3@25", steps=40, optimizer="SGD(lr=0.05)", checkpoint_every=7
    )
    (change,) = record.ending.regroupings
    assert (change.lost, change.ranks, change.step) == ((3,), 3, 16)
    assert 8 <= change.steps_voided <= 12
    assert record.learned.samples == 40 * 4 * 8
    for rank in range(3):
        lines = step_lines(record.folder, rank)
        assert [line["step"] for line in lines] == list(range(1, 41))
        consumed = [line["consumed"] for line in lines]
        assert consumed == sorted(set(consumed))


SEVENTH = "gradient", 7
SENDS = "send", 40  # of a server, which sends each of 3 workers two messages a step
SWITCH = (
    "Switch(AllReduce('ring'), ParameterServer(consistency='asynchronous'), when=AfterSteps(9))"
)


@pytest.mark.parametrize(
    ("strategy", "lost", "at"),
    some([
        ("AllReduce('ring', shard='parameters')", 3, SEVENTH),
        ("LocalSGD(4, overlap=1)", 0, SEVENTH),
        ("ParameterServer", 0, SEVENTH),
        ("ElasticAveraging(1)", 3, SENDS),
        pytest.param("AllReduce('ring', shard='optimizer')", 1, SEVENTH, marks=pytest.mark.lab),
        pytest.param("AllReduce('ring', backup=1)", 1, SEVENTH, marks=pytest.mark.lab),
        pytest.param(
            "ParameterServer(servers=2, placement='beside')", 1, SENDS, marks=pytest.mark.lab
        ),
        pytest.param("PairwiseAveraging", 2, SEVENTH, marks=pytest.mark.lab),
        pytest.param("Prague(2)", 2, SEVENTH, marks=pytest.mark.lab),
        pytest.param("Hop(staleness=2)", 2, SEVENTH, marks=pytest.mark.lab),
        pytest.param("StochasticGradientPush(overlap=1)", 2, SEVENTH, marks=pytest.mark.lab),
        pytest.param("Hogwild", 2, SEVENTH, marks=pytest.mark.lab),
        pytest.param(SWITCH, 1, SEVENTH, marks=pytest.mark.lab),
    ]),
)  # fmt: skip
def test_others_go_on_from_the_newest_checkpoint(
    strategy: str, lost: int, at: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = f'Inject("kill", rank={lost}, at="{at[0]}", number={at[1]})'
    monkeypatch.setenv("ORCHESTRA_INJECT", fault)
    record = train(tmp_path, strategy, "", checkpoint_every=2, optimizer="SGD(lr=0.05)")
    assert record.ending.status == "completed"
    assert not record.ending.restarts
    (change,) = record.ending.regroupings
    assert change.lost == (lost,)
    before, after = record.ending.ranks_history
    assert (before.ranks, after.ranks) == (4, 3)
    assert after.sample in range(2 * 32, 8 * 32)
    text = f"was killed by SIGKILL; going on with {change.ranks} ranks"
    assert text in record.ending.notices[0]
    if record.pacing.synchronous:
        lines = [step_lines(record.folder, rank) for rank in range(4) if rank != lost]
        steps = list(range(1, 21))
        assert all([line["step"] for line in each] in (steps, []) for each in lines)
        assert sum(map(bool, lines)) == record.asked.workers - 1


def test_there_are_checkpoints_after_a_loss_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = (
        'Inject("kill", rank=1, at="gradient", number=3); '
        'Inject("kill", rank=3, at="send", number=80)'
    )
    monkeypatch.setenv("ORCHESTRA_INJECT", faults)
    strategy = "ParameterServer(consistency='asynchronous')"
    with pytest.raises(RankLost, match="rank 3"):
        train(tmp_path, strategy, "", min_ranks=None, checkpoint_every=2)
    newest = newest_whole(tmp_path / "checkpoints")
    assert newest is not None
    assert newest[1].members == ("worker", "lost", "worker", "server")
    monkeypatch.delenv("ORCHESTRA_INJECT")
    record = train(tmp_path, strategy, "", min_ranks=None, checkpoint_every=2)
    assert record.ending.status == "completed"
    assert [part.sample for part in record.ending.ranks_history] == [0, newest[1].consumed]
    assert record.learned.samples == 20 * 4 * 8
    consumed = sum(line["samples"] for rank in range(4) for line in step_lines(tmp_path, rank))
    # Rank 1 died in its third step: the lines of the two before it may not have been written yet.
    assert 20 * 4 * 8 - 2 * 11 <= consumed <= 20 * 4 * 8


@pytest.mark.lab
def test_a_pipeline_goes_on_with_fewer_stages(tmp_path: Path) -> None:
    record = train(tmp_path, "Pipeline", "1@7", ranks=2, min_ranks=1, checkpoint_every=4)
    assert [part.ranks for part in record.ending.ranks_history] == [2, 1]


def test_without_the_folder_on_all_ranks_they_cannot(tmp_path: Path) -> None:
    """As on machines that share nothing: each rank has a folder of its own."""
    command = [
        sys.executable, "-m", "orchestra", "train",
        "--task", "tests.support.failing_tasks:lost('')", "--out", "run",
        "--strategy", "AllReduce('ring', shard='optimizer')",
        "--set", "steps=3", "--set", "min_ranks=1",
    ]  # fmt: skip
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(2):
            (place := tmp_path / str(rank)).mkdir()
            variables = {"RANK": str(rank), **common}
            started.append(stack.enter_context(Started(command, place, variables)))
        ended = [each.end() for each in started]
    assert [each.status for each in ended] == [0, 0], ended
    told = "rank 1 does not have the run's folder: a loss ends the run, and nobody can join it"
    assert told in ended[0].err


def test_without_a_checkpoint_they_begin_anew(tmp_path: Path) -> None:
    record = train(tmp_path, "LocalSGD(4, overlap=1)", "3@7", checkpoint_every=None)
    assert record.ending.status == "completed"
    (change,) = record.ending.regroupings
    assert (change.ranks, change.step, record.learned.samples) == (3, 0, 20 * 4 * 8)
    assert "there are none: set checkpoint_every" in record.ending.notices[0]
    for rank in range(4):
        steps = [line["step"] for line in step_lines(record.folder, rank)]
        assert steps == (list(range(1, 21)) if rank != 3 else [])


def test_where_no_rank_may_be_missing_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match=r"rank 3 on .* was killed by SIGKILL; 3 ranks are left"):
        train(tmp_path, "LocalSGD(4, overlap=1)", "3@7", checkpoint_every=4, min_ranks=4)


def test_fewer_than_wanted_end_the_run(tmp_path: Path) -> None:
    message = r"rank 2 on .* was killed by SIGKILL; 3 ranks are left, of 4 at least"
    with pytest.raises(RankLost, match=message):
        train(tmp_path, "AllReduce('ring')", "2@5", min_ranks=4)


def test_a_single_rank_goes_on_alone(tmp_path: Path) -> None:
    record = train(tmp_path, "AllReduce('ring')", "0@3", ranks=2, min_ranks=1)
    assert record.ending.regroupings[0].ranks == 1
    assert record.learned.samples == 20 * 2 * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_ranks": 5}, "min_ranks: 5 are more than ranks, 4"),
        ({"sharding": "IID"}, "min_ranks: sharding is of 4 ranks"),
        ({"shares": (1.0, 1.0, 2.0, 2.0)}, "min_ranks: shares is of 4 ranks"),
        ({"record_order": True}, "min_ranks: record_order is of 4 ranks"),
        ({"engine": "simulation", "tensors": "shapes"}, "min_ranks: a run of shapes under"),
    ],
)
def test_what_fewer_ranks_could_not_go_on_with_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(tmp_path, "AllReduce('ring')", "2@5", **options)

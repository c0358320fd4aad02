"""Checkpoint files: whole or not there, refused by name where damaged, and free of code."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.support.simulated import run_ranks
from tests.support.training import settings

from orchestra.errors import RunFailed
from orchestra.records.report import Membership
from orchestra.strategies.all_reduce import AllReduce
from orchestra.trainer import checkpoint_files, checkpoints
from orchestra.trainer.checkpoint_files import DamagedCheckpoint, Manifest
from orchestra.trainer.checkpoints import RunAttempt
from orchestra.trainer.program import train
from orchestra.trainer.recorder import Recorder, Totals
from orchestra.worker.worker import Worker

RANKS = 2


def member_of(rank: int, index: int = 0) -> dict[str, Any]:
    return {
        "none": None,
        "numbers": [1, -2.5, True, float("inf")],
        "text": "é\n",
        "empty": {"dict": {}, "list": [], "tensor": torch.zeros(0, 3)},
        "tensors": [
            torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)),
            {"0": torch.tensor(7.0, dtype=torch.float64), "half": torch.ones(2).bfloat16()},
            torch.tensor([True, False]),
            torch.arange(5, dtype=torch.uint8),
            torch.arange(6.0).view(2, 3).t(),
        ],
        "index": index,
    }


def manifest_of(ranks: int = RANKS) -> Manifest:
    return Manifest(0, ("worker",) * ranks, history=(Membership(ranks, ranks, 0),))


def write(folder: Path, index: int, *states: Any, attempt: RunAttempt | None = None) -> None:
    """Write a checkpoint of the ranks that have these `states`, and make it count."""
    attempt = attempt or RunAttempt.begin(folder)
    files = {
        checkpoint_files.rank_file(rank): checkpoints.write_rank(attempt, index, rank, state)
        for rank, state in enumerate(states or [member_of(rank, index) for rank in range(RANKS)])
    }
    checkpoints.commit(attempt, index, replace(manifest_of(len(files)), files=files))
    attempt.end()


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        for item, other_item in zip(one, other, strict=True):
            assert_same(item, other_item)
    else:
        assert one == other


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, 1)
    checkpoint_files.verify(tmp_path, 1)
    for rank in range(RANKS):
        assert_same(checkpoints.read_rank(tmp_path, 1, rank), member_of(rank, 1))


def test_a_state_without_tensors(tmp_path: Path) -> None:
    write(tmp_path, 3, {"a": [1]})
    assert checkpoints.read_rank(tmp_path, 3, 0) == {"a": [1]}


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    write(tmp_path, 0, {"whole": whole, "part": whole[1:3]})
    read = checkpoints.read_rank(tmp_path, 0, 0)
    assert torch.equal(read["whole"], whole)
    assert torch.equal(read["part"], whole[1:3])


@pytest.mark.parametrize("place", [0, 9, 100, -1])
@pytest.mark.parametrize("rank", range(RANKS))
def test_one_flipped_bit_is_found_and_named(tmp_path: Path, rank: int, place: int) -> None:
    write(tmp_path, 1)
    path = tmp_path / "0001" / checkpoint_files.rank_file(rank)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=f"0001/rank-{rank}.safetensors: its checksum"):
        checkpoint_files.verify(tmp_path, 1)


def test_a_file_cut_short_is_found_and_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / "0001" / checkpoint_files.rank_file(1)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedCheckpoint, match=r"rank-1\.safetensors: its checksum"):
        checkpoint_files.verify(tmp_path, 1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "0001" / checkpoint_files.rank_file(1)).unlink()
    with pytest.raises(DamagedCheckpoint, match=r"rank-1\.safetensors: missing"):
        checkpoint_files.verify(tmp_path, 1)


def test_a_file_of_no_member_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    place = tmp_path / "0001"
    shutil.copy(place / checkpoint_files.rank_file(1), place / checkpoint_files.rank_file(2))
    with pytest.raises(DamagedCheckpoint, match=r"rank-2\.safetensors: the manifest names no such"):
        checkpoint_files.verify(tmp_path, 1)


def test_a_manifest_whose_files_are_not_those_of_its_members_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / "0001" / checkpoint_files.MANIFEST
    content = json.loads(path.read_text())
    del content["files"][checkpoint_files.rank_file(1)]
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: its files are not those"):
        checkpoint_files.verify(tmp_path, 1)


def test_another_format_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / "0001" / checkpoint_files.MANIFEST
    path.write_text(json.dumps({"schema": 1, "files": {}}))
    with pytest.raises(DamagedCheckpoint, match="of format 1, and this version of orchestra reads"):
        checkpoint_files.verify(tmp_path, 1)


def test_a_manifest_tells_what_it_was_given(tmp_path: Path) -> None:
    told = Manifest(
        7, ("worker", "server"), {"optimizer": "sharded"}, consumed=64, budget=640,
        global_batch=32, history=(Membership(4, 3, 0), Membership(2, 1, 32, 1)),
        files={checkpoint_files.rank_file(rank): "" for rank in range(2)},
    )  # fmt: skip
    attempt = RunAttempt.begin(tmp_path)
    checkpoints.commit(attempt, 1, told)
    assert checkpoint_files.read_manifest(tmp_path, 1) == replace(told, generation=1)
    assert told.ranks == 2


def test_the_file_of_a_rank_that_was_lost_after_it_had_written_does_not_stay(
    tmp_path: Path,
) -> None:
    attempt = RunAttempt.begin(tmp_path)
    written = [checkpoints.write_rank(attempt, 1, rank, member_of(rank, 1)) for rank in range(2)]
    told = replace(manifest_of(2), members=("worker", checkpoint_files.LOST))
    checkpoints.commit(attempt, 1, replace(told, files={"rank-0.safetensors": written[0]}))
    assert checkpoint_files.verify(tmp_path, 1).present == [0]


# Attempts


def test_each_attempt_has_a_later_number_than_all_before_it(tmp_path: Path) -> None:
    first = RunAttempt.begin(tmp_path)
    second = RunAttempt.begin(tmp_path)  # the first was killed
    assert (first.number, second.number) == (1, 2)
    write(tmp_path, 1, attempt=second)
    shutil.rmtree(second.place, ignore_errors=True)
    assert RunAttempt.begin(tmp_path).number == 3


def test_a_machine_without_the_shared_folder_is_told_so(tmp_path: Path) -> None:
    leader = RunAttempt.begin(tmp_path / "here")
    elsewhere = RunAttempt(tmp_path / "there", leader.number)
    with pytest.raises(RunFailed, match="give all ranks a folder that their machines share"):
        checkpoints.write_rank(elsewhere, 1, 1, {"of": "another machine"})


def test_an_attempt_that_another_one_followed_changes_nothing(tmp_path: Path) -> None:
    """Its machine was cut off: it goes on to write, and to make what it wrote count."""
    zombie = RunAttempt.begin(tmp_path)
    checkpoints.write_rank(zombie, 1, 0, {"of": "the zombie"})
    write(tmp_path, 1, {"of": "the next"})
    for index in (1, 2):
        with pytest.raises(RunFailed, match="another process has gone on with this run meanwhile"):
            checkpoints.write_rank(zombie, index, 0, {"of": "the zombie"})
        with pytest.raises(RunFailed, match="another process has gone on"):
            checkpoints.commit(zombie, index, manifest_of(1))
    with pytest.raises(OSError, match="No such file"):  # it was cut off in the midst of a commit
        zombie.discard(tmp_path / "0001")
    assert list(checkpoint_files.complete(tmp_path)) == [1]
    checkpoint_files.verify(tmp_path, 1)
    assert checkpoints.read_rank(tmp_path, 1, 0) == {"of": "the next"}


def test_nothing_is_left_of_an_attempt_without_checkpoints(tmp_path: Path) -> None:
    RunAttempt.begin(tmp_path / "checkpoints").end()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", "{}", '{"files": 5}', "\xff", "[" * 100_000]
)
def test_a_manifest_that_is_missing_or_damaged_is_named(
    tmp_path: Path, content: str | None
) -> None:
    write(tmp_path, 1)
    manifest = tmp_path / "0001" / checkpoint_files.MANIFEST
    if content is None:
        manifest.unlink()
    else:
        manifest.write_text(content, encoding="latin-1")
    with pytest.raises(DamagedCheckpoint, match=r"0001/manifest\.json"):
        checkpoint_files.verify(tmp_path, 1)


def test_what_was_interrupted_does_not_count_and_is_written_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    killed = RunAttempt.begin(tmp_path)
    checkpoints.write_rank(killed, 2, 0, {"interrupted": torch.ones(3)})
    assert list(checkpoint_files.complete(tmp_path)) == [1]
    write(tmp_path, 2)
    assert sorted(checkpoint_files.complete(tmp_path)) == [1, 2]
    checkpoint_files.verify(tmp_path, 2)
    assert not killed.place.exists()


def test_a_damaged_one_is_written_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "0001" / checkpoint_files.rank_file(0)).write_bytes(b"damaged")
    write(tmp_path, 1)
    checkpoint_files.verify(tmp_path, 1)


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for index in range(5):
        write(tmp_path, index)
        assert (
            sorted(checkpoint_files.complete(tmp_path))
            == [max(0, index - 1), index][-(index + 1) :]
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0003", "0004"]


def test_what_a_run_that_begins_anew_writes_is_kept_and_later_numbers_go(tmp_path: Path) -> None:
    """It found the later ones damaged. They have to go: they are no use to a run that resumes."""
    for index in (4, 5, 1):
        write(tmp_path, index)
    assert list(checkpoint_files.complete(tmp_path)) == [1]


def test_no_folder_holds_no_checkpoints(tmp_path: Path) -> None:
    assert list(checkpoint_files.complete(tmp_path / "none")) == []


def test_files_hold_tensors_and_json_and_nothing_to_run(tmp_path: Path) -> None:
    """A safetensors file: the header's length, a header in JSON, and the tensors' bytes."""
    write(tmp_path, 1)
    names = sorted(path.name for path in (tmp_path / "0001").iterdir())
    assert names == ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"]
    content = (tmp_path / "0001" / "rank-0.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    json.loads(header.pop("__metadata__")["tree"])
    ends = [entry["data_offsets"][1] for entry in header.values()]
    assert 8 + length + max(ends) == len(content)


def test_what_a_killed_run_left_half_deleted_is_in_nobodys_way(tmp_path: Path) -> None:
    for index in (1, 2):
        write(tmp_path, index)
    killed = RunAttempt.begin(tmp_path)
    (tmp_path / "0001").rename(killed.place / "0001.deleted")
    assert sorted(checkpoint_files.complete(tmp_path)) == [2]
    write(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0002", "0003"]


def test_what_has_not_the_name_of_one_is_none_and_is_written_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for name in ("\u00b2", "2", "00003", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "0002").write_text("a file")
    assert list(checkpoint_files.complete(tmp_path)) == [1]
    assert {path.name for path in checkpoint_files.others(tmp_path)} == {
        "\u00b2", "2", "00003", "notes", "0002"
    }  # fmt: skip
    write(tmp_path, 2)
    assert sorted(checkpoint_files.complete(tmp_path)) == [1, 2]
    checkpoint_files.verify(tmp_path, 2)


def test_a_run_that_goes_on_names_what_is_odd_and_removes_what_is_unfinished(
    tmp_path: Path,
) -> None:
    run = settings(AllReduce(), 2, "images(samples=64)", checkpoint_every=1)

    def notices() -> tuple[str, ...]:
        outcome = run_ranks(2, lambda runtime: train(runtime, (run, tmp_path)))
        assert (outcome.failure, outcome.bad_input) == (None, None)
        return outcome.notices

    assert notices() == ()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["0003", "0004"]
    (folder / "0005").write_text("a file")
    (folder / "\u00b2").mkdir()
    (folder / ".attempt-1" / "0001").mkdir(parents=True)
    (folder / ".0002.deleted").mkdir()
    (folder / "0004" / checkpoint_files.MANIFEST).write_text("[" * 100_000)
    found = notices()
    refused = [notice.split(": ")[1] for notice in found[:3]]
    manifest = folder / "0004" / checkpoint_files.MANIFEST
    assert refused == [str(folder / "0005"), str(folder / "\u00b2"), str(manifest)]
    assert found[3:] == ("resumed from checkpoint 3, step 3",)
    assert not list(folder.glob(".*"))
    checkpoint_files.verify(folder, 4)


def test_lines_of_steps_are_kept_by_their_number(tmp_path: Path) -> None:
    """Where lines are missing, or one was left half written, those after the checkpoint go."""
    path = tmp_path / "steps-rank-0.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in (11, 12, 13, 14)]
    path.write_text("".join(lines) + '{"step": 1')
    Recorder(cast(Worker, None), path, Totals(), steps=12)
    assert path.read_text() == "".join(lines[:2])

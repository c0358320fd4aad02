"""Snapshots in checkpoints: written once, shared by checkpoints, and dispensable where damaged."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.simulated import run_ranks
from tests.support.training import settings

from orchestra.optimizers.state import capture
from orchestra.records.report import Membership, Point
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer import checkpoint_files, checkpoints
from orchestra.trainer.program import train
from orchestra.worker.snapshots import Snapshots

RANKS = 2
Whole = Callable[[str], tuple[Path, list[Point]]]
STRATEGIES_HERE = {
    "one rank has all": "AllReduce('ring')",
    "replicas": "Gossip",
    "slices": "ParameterServer(servers=2, placement='beside')",
}


def trained(
    folder: Path, strategy: str = "Gossip", snapshots: int = 6
) -> tuple[list[Point], tuple[str, ...]]:
    """The curve and the notices of a run of 12 steps of 16 samples, with checkpoints after steps 5
    and 10. It goes on with what is in `folder`."""
    chosen = parse(strategy, STRATEGIES, where="test")
    task = "images(samples=192, model='normalised')"
    run = settings(chosen, RANKS, task, checkpoint_every=5, snapshots=snapshots)
    outcome = run_ranks(RANKS, lambda runtime: train(runtime, (run, folder)))
    assert (outcome.failure, outcome.bad_input) == (None, None)
    (leader,) = (report.leader for report in outcome.results if report.leader is not None)
    return [replace(point, seconds=0.0) for point in leader.curve], outcome.notices


def interrupted(folder: Path, whole: Path) -> Path:
    """Copy the run in `whole` as it was between its two checkpoints; return the copy."""
    shutil.copytree(whole, folder)
    shutil.rmtree(place_of(folder, 2))
    return folder


def place_of(folder: Path, index: int) -> Path:
    return folder / "checkpoints" / f"{index:04d}"


def files_in(folder: Path, index: int) -> dict[str, Path]:
    """The files of snapshots in a checkpoint."""
    return {path.name: path for path in place_of(folder, index).glob("rank-?-*")}


def parts_of(folder: Path, index: int, rank: int) -> list[dict[str, Any]]:
    """What the file of a rank says about its contributions."""
    saved = checkpoints.read_rank(folder / "checkpoints", index, rank)
    return list(saved["snapshots"])


def file_of(folder: Path, index: int, rank: int, samples: int) -> Path:
    """The file of the parameters that `rank` gave to the snapshot at `samples`."""
    (sha,) = (
        part["sha256"]
        for part in parts_of(folder, index, rank)
        if (part["samples"], part["kind"]) == (samples, "parameters")
    )
    return place_of(folder, index) / f"rank-{rank}-{sha}.safetensors"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The folder and curve of an uninterrupted run, which is made when it is first asked for."""

    @functools.cache
    def made(strategy: str) -> tuple[Path, list[Point]]:
        folder = tmp_path_factory.mktemp("whole")
        curve, notices = trained(folder, strategy)
        assert notices == ()
        assert len(curve) == 6
        return folder, curve

    return made


def test_the_files_of_ranks_do_not_grow_with_the_number_of_snapshots(tmp_path: Path) -> None:
    for number in (0, 12):
        trained(tmp_path / str(number), snapshots=number)
    for rank in range(RANKS):
        none, ten = (
            (place_of(tmp_path / number, 2) / checkpoint_files.rank_file(rank)).stat().st_size
            for number in ("0", "12")
        )
        assert len(parts_of(tmp_path / "12", 2, rank)) == 20  # parameters and buffers
        assert ten - none < 20 * 300  # bytes, of JSON that names them
        assert file_of(tmp_path / "12", 2, rank, samples=16).stat().st_size > 2000


@pytest.mark.parametrize("strategy", STRATEGIES_HERE.values(), ids=STRATEGIES_HERE)
def test_each_is_written_once_also_by_a_run_that_goes_on(
    strategy: str, whole: Whole, tmp_path: Path
) -> None:
    folder, curve = whole(strategy)
    first, last = files_in(folder, 1), files_in(folder, 2)
    assert first
    assert first.keys() < last.keys()
    assert all(path.samefile(last[name]) for name, path in first.items())
    interrupted(tmp_path / "run", folder)
    before = {name: path.stat() for name, path in files_in(tmp_path / "run", 1).items()}
    again, notices = trained(tmp_path / "run", strategy)
    assert notices == ("resumed from checkpoint 1, step 5",)
    assert again == curve
    after = files_in(tmp_path / "run", 2)
    assert after.keys() == last.keys()
    for name, stat in before.items():
        found = after[name].stat()
        assert (found.st_ino, found.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)


@pytest.mark.parametrize("damage", ["changed", "missing"])
@pytest.mark.parametrize("strategy", STRATEGIES_HERE.values(), ids=STRATEGIES_HERE)
def test_a_damaged_one_is_left_out_by_all_ranks(
    strategy: str, damage: str, whole: Whole, tmp_path: Path
) -> None:
    """The others' contributions to it are whole. Both checkpoints that are kept need the file."""
    _, curve = whole(strategy)
    folder = tmp_path / "run"
    shutil.copytree(whole(strategy)[0], folder)
    rank = 0 if strategy.startswith("AllReduce") else 1
    for index in (1, 2):
        path = file_of(folder, index, rank, samples=64)
        flip(path) if damage == "changed" else path.unlink()
    again, notices = trained(folder, strategy)
    assert notices == (
        f"a snapshot is left out of the curve: {path} is missing or damaged",
        "resumed from checkpoint 2, step 10",
    )
    assert again == [point for point in curve if point.samples != 64]


def test_a_damaged_one_does_not_keep_a_run_from_an_older_checkpoint(
    whole: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole("Gossip")[0], folder)
    path = file_of(folder, 1, rank=1, samples=32)
    flip(path)
    flip(refused := place_of(folder, 2) / checkpoint_files.rank_file(0))
    again, notices = trained(folder)
    assert notices == (
        f"checkpoint refused: {refused}: its checksum is not that of the manifest",
        f"a snapshot is left out of the curve: {path} is missing or damaged",
        "resumed from checkpoint 1, step 5",
    )
    assert again == [point for point in whole("Gossip")[1] if point.samples != 32]
    # What is lost is in no later checkpoint, and all of those are whole.
    again, notices = trained(folder)
    assert notices == ("resumed from checkpoint 2, step 10",)
    assert again == [point for point in whole("Gossip")[1] if point.samples != 32]


def test_a_file_system_without_hard_links_has_copies(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    curve, _ = trained(tmp_path)
    assert curve == whole("Gossip")[1]
    first, last = files_in(tmp_path, 1), files_in(tmp_path, 2)
    assert first.keys() < last.keys()
    assert not any(path.samefile(last[name]) for name, path in first.items())
    shutil.rmtree(place_of(tmp_path, 2))
    assert trained(tmp_path)[0] == curve


def complete(
    folder: Path, files: checkpoints.SnapshotFiles, parts: list[dict[str, Any]], index: int
) -> None:
    """Write a checkpoint that has nothing but `parts`."""
    attempt = checkpoints.RunAttempt.begin(folder)
    files.write(parts, attempt.make(index), index - 1)
    history = (Membership(1, 1, 0),)
    checkpoints.commit(attempt, index, checkpoint_files.Manifest(0, history=history))
    attempt.end()


def test_a_file_that_was_deleted_during_the_run_is_written_again(tmp_path: Path) -> None:
    snapshots = Snapshots((10,), lambda: 0.0)
    snapshots.offer(10, torch.ones(3))
    files = checkpoints.SnapshotFiles(tmp_path, 0, print)
    for index in (1, 2):
        parts = capture(snapshots.parts)
        complete(tmp_path, files, parts, index)
        path = tmp_path / f"{index:04d}" / f"rank-0-{parts[0]['sha256']}.safetensors"
        assert checkpoint_files.digest(path) == parts[0]["sha256"]
        path.unlink()


def test_one_that_was_renewed_is_written_again_and_the_old_file_stays(tmp_path: Path) -> None:
    snapshots = Snapshots((10, 20), lambda: 0.0)
    snapshots.offer(10, torch.ones(3))
    files = checkpoints.SnapshotFiles(tmp_path, 0, print)
    written = {}
    for index in (1, 2, 3):
        written[index] = capture(snapshots.parts)
        complete(tmp_path, files, written[index], index)
        snapshots.renew(10, torch.full((3,), 2.0))
        if index == 2:
            assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
    for index, value in ((2, 2.0), (3, 2.0)):
        files.read({0: written[index]}, index)
        assert files.lost == set()
        assert [part["values"].tolist() for part in written[index]] == [[value] * 3]


def test_equal_contributions_of_a_rank_are_in_one_file(tmp_path: Path) -> None:
    snapshots = Snapshots((10, 20), lambda: 0.0)
    for samples in (10, 20):
        snapshots.offer(samples, torch.ones(3))
    files = checkpoints.SnapshotFiles(tmp_path, 0, print)
    for index in (1, 2):
        complete(tmp_path, files, capture(snapshots.parts), index)
    (one, other) = tmp_path.glob("*/*.safetensors")
    assert one.samefile(other)

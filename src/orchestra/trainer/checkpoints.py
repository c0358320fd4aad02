"""Checkpoints, taken by all ranks of a run: atomic, checksummed, read without running any code.

    checkpoints/0002/manifest.json          members, layout, budget, checksums; written last
                     rank-0.safetensors     tensors; the rest as JSON in the file's metadata
                     rank-0-SHA.safetensors a contribution to a snapshot, by its own SHA-256
                .attempt-3/0004/            a checkpoint that attempt 3 at the run is writing

A checkpoint is written into a hidden folder of the attempt, and moved when it is complete. A
contribution is written once: later checkpoints have hard links to its file. The rank's file has its
checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from orchestra import exchange
from orchestra.collectives import all_reduce, broadcast, receive_object, send_object
from orchestra.errors import InputError, PeerLost, RunFailed
from orchestra.optimizers.state import capture, random_state, restore, restore_random_state
from orchestra.settings.base import Mismatch, to_plain
from orchestra.strategies.base import Strategy
from orchestra.strategies.phases import Phases
from orchestra.trainer.checkpoint_files import (
    FORMAT,
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    complete,
    digest,
    others,
    rank_file,
    read_manifest,
    surplus_files,
    verify,
)
from orchestra.transports.protocol import Transport, send_unless_lost
from orchestra.transports.tags import Tag
from orchestra.worker.snapshots import Contribution
from orchestra.worker.worker import Worker

# The newest one, and one to fall back on where a file of that is damaged.
KEEP = 2
_ATTEMPT = ".attempt-"
TENSOR = "$tensor"

S = TypeVar("S")

Tensors = dict[str, Tensor]
"""Tensors by the SHA-256 of their type, shape and content."""


@dataclass(frozen=True)
class RunAttempt:
    """An attempt at a run, which writes checkpoints into `folder`.

    Checkpoints that it has not completed lie in a folder of its own. The next attempt removes that
    folder. So an attempt that still goes on, because its machine was only cut off, fails when it
    writes, and cannot replace the files of the next attempt.
    """

    folder: Path
    number: int

    @staticmethod
    def begin(folder: Path) -> RunAttempt:
        """Begin the next attempt. Called by one rank, before it looks for checkpoints."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            number = 1 + max(_numbers_of(folder), default=0)
            while True:
                attempt = RunAttempt(folder, number)
                try:
                    attempt.place.mkdir()
                    break
                except FileExistsError:  # another process has just begun this one
                    number += 1
            for path in folder.glob(".*"):
                if path != attempt.place:
                    _remove(path)
        return attempt

    @property
    def place(self) -> Path:
        """The folder of what is not complete."""
        return self.folder / f"{_ATTEMPT}{self.number}"

    def pending(self, index: int) -> Path:
        """Return the folder of checkpoint `index` until it is complete."""
        return self.place / f"{index:04d}"

    def make(self, index: int) -> Path:
        """Make the folder of checkpoint `index`, if need be, and return it.

        Raises:
            RunFailed: a later attempt has begun, or this rank has another folder than the leader,
                which has made the one of the attempt.
        """
        pending = self.pending(index)
        with writing(pending):
            if not self.place.is_dir():
                cause = (
                    "another process has gone on with this run meanwhile"
                    if self.folder.is_dir()
                    else "rank 0 has made this folder elsewhere; give all ranks a folder that "
                    "their machines share, or leave out checkpoint_every"
                )
                raise RunFailed(f"cannot write {pending}: {cause}")
            pending.mkdir(exist_ok=True)
        return pending

    def discard(self, path: Path) -> None:
        """Remove checkpoint `path`. Renamed first, since half of one would seem damaged."""
        doomed = self.place / f"{path.name}.deleted"
        path.rename(doomed)
        _remove(doomed)

    def end(self) -> None:
        """Remove the folder of this attempt, and the folder of checkpoints if it is empty."""
        _remove(self.place)
        with contextlib.suppress(OSError):  # it holds checkpoints
            self.folder.rmdir()


def _numbers_of(folder: Path) -> Iterator[int]:
    """Yield the numbers of attempts that have left something in `folder`."""
    for path in folder.glob(f"{_ATTEMPT}*"):
        if (number := path.name.removeprefix(_ATTEMPT)).isdecimal():
            yield int(number)
    for index in complete(folder):
        with contextlib.suppress(DamagedCheckpoint):
            yield read_manifest(folder, index).generation


def write_rank(attempt: RunAttempt, index: int, rank: int, state: Any) -> str:
    """Write one rank's `state` (as `capture` gives it); return the file's SHA-256, in hex."""
    tensors: dict[str, Tensor] = {}
    known: dict[int, list[tuple[str, Tensor]]] = {}  # by storage

    def put(place: str, tensor: Tensor) -> Any:
        assert place not in tensors, f"two tensors of a checkpoint are called {place}"
        there = known.setdefault(tensor.untyped_storage().data_ptr(), [])
        for name, other in there:
            if (first := _place_in(other, tensor)) is not None:
                return [name, first, *tensor.shape]
        there.append((place, tensor))
        # safetensors refuses tensors that share memory, as views of the flat vector do.
        tensors[place] = tensor.cpu().contiguous().clone()
        return place

    tree = json.dumps(pack(state, put))
    path = attempt.make(index) / rank_file(rank)
    with writing(path):
        save_file(tensors, path, metadata={"tree": tree})
        _sync(path)
        return digest(path)


def _place_in(other: Tensor, tensor: Tensor) -> int | None:
    """Return the element of `other`, on the same storage, at which `tensor` begins; None if it
    has others."""
    first = int(tensor.storage_offset()) - int(other.storage_offset())
    inside = tensor.numel() > 0 and first >= 0 and first + tensor.numel() <= other.numel()
    whole = tensor.is_contiguous() and other.is_contiguous() and tensor.dtype == other.dtype
    return first if inside and whole else None


def commit(attempt: RunAttempt, index: int, manifest: Manifest) -> None:
    """Make checkpoint `index` count once all ranks have written; keep it and the one before it."""
    folder, pending = attempt.folder, attempt.make(index)
    final, path = folder / pending.name, pending / MANIFEST
    content = {"format": FORMAT, **to_plain(manifest), "generation": attempt.number}
    for surplus in surplus_files(pending, manifest):
        surplus.unlink()  # of a rank that was lost after it had written
    with writing(path):
        path.write_text(json.dumps(content, indent=1))
        _sync(path)
        # Contents and names have to reach the disk before the rename makes the checkpoint count.
        _sync(pending)
        if final.exists():
            # Where one of this number exists it is damaged: the run went on from the one before it.
            attempt.discard(final)
        pending.rename(final)
        _sync(folder)
        for other in list(complete(folder)):
            # A run that found later ones damaged, and went on before them, has no use for them.
            if not index - KEEP < other <= index:
                attempt.discard(folder / f"{other:04d}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_rank(folder: Path, index: int, rank: int) -> Any:
    """Return the state that `rank` wrote into checkpoint `index`."""
    with safe_open(folder / f"{index:04d}" / rank_file(rank), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return unpack(json.loads(file.metadata()["tree"]), tensors)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SnapshotFiles:
    """The values of one rank's contributions to snapshots, each in a file that is named after its
    content. It is written once, and the file system deletes it with the last checkpoint that has a
    link to it."""

    def __init__(self, folder: Path, rank: int, notice: Callable[[str], None]) -> None:
        self._folder, self._rank, self._notice = folder, rank, notice
        self._written: dict[Tensor, str] = {}  # values in the newest checkpoint -> SHA-256
        self.lost: set[int] = set()  # indices of snapshots, found by `read`

    def write(self, parts: list[dict[str, Any]], place: Path, newest: int) -> None:
        """Write `parts`, as `capture` gives them, into the folder `place` of a checkpoint that is
        not complete; link those that checkpoint `newest` has. A SHA-256 takes the place of the
        values."""
        written: dict[Tensor, str] = {}
        with writing(place):
            for part in parts:
                values = part.pop("values")
                sha = self._written.get(values)
                if sha is None or not self._link(sha, self._folder / f"{newest:04d}", place):
                    sha = self._write(values, place)
                written[values] = part["sha256"] = sha
        self._written = written

    def _link(self, sha: str, source: Path, place: Path) -> bool:
        path = place / self._name(sha)
        # The file may have been deleted, and some file systems have no hard links.
        with contextlib.suppress(OSError):
            path.hardlink_to(source / path.name)
        return path.exists()

    def _write(self, values: Tensor, place: Path) -> str:
        unnamed = place / f".rank-{self._rank}"
        save_file({"values": values}, unnamed)
        _sync(unnamed)
        sha = digest(unnamed)
        unnamed.rename(place / self._name(sha))
        return sha

    def read(self, members: Mapping[int, list[dict[str, Any]]], index: int) -> None:
        """Undo `write`, of the parts of `members`, by rank. A snapshot is lost where the file of
        one of its parts is not whole."""
        self._written, self.lost = {}, set()
        for rank, parts in members.items():
            for part in parts:
                sha = part.pop("sha256")
                path = self._folder / f"{index:04d}" / _snapshot_file(rank, sha)
                with contextlib.suppress(OSError):
                    if digest(path) == sha:
                        part["values"] = load_file(path)["values"]
                        if rank == self._rank:
                            self._written[part["values"]] = sha
                        continue
                part["values"] = torch.empty(0)  # the part stays, so that its index is checked
                self.lost.add(part["index"])
                self._notice(f"a snapshot is left out of the curve: {path} is missing or damaged")

    def _name(self, sha: str) -> str:
        return _snapshot_file(self._rank, sha)


def _snapshot_file(rank: int, sha: str) -> str:
    return f"rank-{rank}-{sha}.safetensors"


class CollectiveCheckpoints:
    """The checkpoints in `folder`; `index` numbers the newest one that counts, from 1."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        self.index = 0
        self._worker = worker
        self._folder = folder
        self._attempt: RunAttempt | None = None
        self._has_folder = True
        self._ranks = range(worker.runtime.ranks)
        self._snapshots = SnapshotFiles(folder, worker.rank, worker.reporter.notice)

    def moved(self, worker: Worker) -> CollectiveCheckpoints:
        """Return the checkpoints of the same attempt for `worker`, this rank in another group."""
        moved = CollectiveCheckpoints(worker, self._folder)
        moved.index, moved._attempt = self.index, self._attempt
        return moved

    def begin_attempt(self, leader: int) -> None:
        """Collective, in a new group: begin an attempt, since another group may have left files of
        lost ranks, and go on from the newest checkpoint that any rank knows."""
        worker = self._worker
        if worker.rank == leader:
            self._attempt = RunAttempt.begin(self._folder)
        number = 0 if self._attempt is None else self._attempt.number
        known = exchange.gather_numbers(worker, (self.index, number), worker.everyone)
        self.index = int(max(index for index, _ in known))
        self._attempt = RunAttempt(self._folder, int(known[leader][1]))
        self.all_have_folder("with it the run writes no checkpoints")

    def all_have_folder(self, else_told: str) -> bool:
        """Collective: return whether all ranks see the folder; a rank that does not tells that, and
        what follows."""
        assert self._attempt is not None
        worker = self._worker
        self._has_folder = self._attempt.place.is_dir()
        if not self._has_folder:
            slot = worker.runtime.slot
            worker.reporter.notice(f"rank {slot} does not have the run's folder: {else_told}")
        return not exchange.wait_for_everyone(worker, int(not self._has_folder))

    def newest(
        self, leader: int, read: Callable[[int, Manifest], S], below: int | None = None
    ) -> S | None:
        """Collective: return what `read` makes of the newest checkpoint that is whole and fits the
        run, or None.

        The leader looks for whole ones, with a number below `below` if given. `read` is given its
        number and manifest, and raises an exception if it does not fit this rank.

        Raises:
            InputError: it is of another number of ranks, and does not fit. To begin anew would lose
                it.
        """
        worker, attempt = self._worker, 0
        found: Iterator[int] = iter(())
        if worker.rank == leader:
            if self._attempt is None:
                self._attempt = RunAttempt.begin(self._folder)
            found, attempt = self._whole(below), self._attempt.number
        while True:
            # Both numbers in one, so that ranks agree on them by one message.
            chosen = torch.tensor([attempt << 32 | next(found, 0)])
            broadcast(worker.transport, chosen, leader, worker.everyone, Tag.CHECKPOINT)
            attempt, index = divmod(int(chosen), 1 << 32)
            self._attempt = RunAttempt(self._folder, attempt)
            if not index:
                return None
            saved = self._fitting(index, read)
            if not exchange.wait_for_everyone(worker, int(saved is None)):
                self.index = index
                return saved
            self.require_own(index)

    def without_lost(self, parts: list[Contribution]) -> list[Contribution]:
        """Collective, after `newest`: return the `parts` of the snapshots that are complete: no
        rank lost its part. An average over the ranks that are left would be another figure."""
        worker = self._worker
        lost = torch.zeros(len(worker.snapshots.due) + 1, dtype=torch.int32)
        lost[list(self._snapshots.lost)] = 1
        all_reduce(worker.transport, lost, "butterfly", worker.everyone, Tag.AGREE)
        return [part for part in parts if not lost[part.index]]

    def refuse(self, index: int, error: Exception) -> None:
        """Give notice that this rank's file in checkpoint `index` cannot be used, and why."""
        path = self._folder / f"{index:04d}" / rank_file(self._worker.rank)
        why = (str(error).splitlines() or [""])[0]
        if not isinstance(error, DamagedCheckpoint | Mismatch):
            why = f"it cannot be read ({type(error).__name__}: {why})"
        self._worker.reporter.notice(f"checkpoint refused: {path}: {why}")

    def own(self, index: int) -> dict[str, Any]:
        """Return this rank's state in checkpoint `index`, which its ranks have written.

        Raises:
            DamagedCheckpoint: its file is of another rank or checkpoint.
        """
        own = self._worker.rank
        saved: dict[str, Any] = read_rank(self._folder, index, own)
        place = saved.pop("rank"), saved.pop("checkpoint")
        if place != (own, index):
            raise DamagedCheckpoint(f"it is of rank {place[0]}, checkpoint {place[1]}")
        self.read_snapshots({own: saved.get("snapshots", [])}, index)
        return saved

    def read_snapshots(self, members: Mapping[int, list[dict[str, Any]]], index: int) -> None:
        """Read the values of contributions to snapshots, which `members` gave, by rank."""
        self._snapshots.read(members, index)

    def require_own(self, index: int) -> None:
        """Raise `InputError` where checkpoint `index`, which does not fit, is of another number of
        ranks: to begin anew would lose it."""
        try:
            written_by = read_manifest(self._folder, index).ranks
        except DamagedCheckpoint:
            return
        if written_by != (ranks := self._worker.budget_ranks):
            raise InputError(
                f"{self._folder}: checkpoint {index} is of {written_by} ranks, and does not fit "
                f"{ranks}: set ranks to {written_by} to go on from it"
            )

    def _fitting(self, index: int, read: Callable[[int, Manifest], S]) -> S | None:
        """Return what `read` makes of checkpoint `index`; None, with a notice, if it is unfit."""
        try:
            return read(index, read_manifest(self._folder, index))
        except InputError:
            raise
        except Exception as error:  # anything may be in a file that something else has written
            self.refuse(index, error)
            return None

    def take(self, state: Any, manifest: Manifest, leader: int, *, whole: bool = True) -> bool:
        """Collective, at a quiet point: write `state`, and return whether the checkpoint counts:
        all ranks that are not lost have written, and say that it is `whole`.

        `manifest` lacks the files, and is the leader's.
        """
        index, digest, attempt = self.index + 1, None, self._attempt
        assert attempt is not None
        if self._has_folder and whole:
            saved = capture(state) | {"rank": self._worker.rank, "checkpoint": index}
            self._snapshots.write(saved["snapshots"], attempt.make(index), self.index)
            digest = write_rank(attempt, index, self._worker.rank, saved)
        counts = self._commit(attempt, index, digest, manifest, leader)
        if counts:
            self.index = index
        return counts

    def close(self, leader: int) -> None:
        """End the attempt, on the `leader`."""
        if self._attempt is not None and self._worker.rank == leader:
            self._attempt.end()

    def _whole(self, below: int | None) -> Iterator[int]:
        """Yield the numbers of the whole checkpoints, the newest first."""
        notice = self._worker.reporter.notice
        for path in others(self._folder) if below is None else ():
            notice(f"checkpoint refused: {path}: not the folder of one")
        there = (each for each in complete(self._folder) if below is None or each < below)
        for index in sorted(there, reverse=True):
            try:
                verify(self._folder, index)
            except DamagedCheckpoint as damage:
                notice(f"checkpoint refused: {damage}")
            else:
                yield index

    def _commit(
        self, attempt: RunAttempt, index: int, digest: str | None, manifest: Manifest, leader: int
    ) -> bool:
        """Return whether checkpoint `index` counts, as the leader decides; all wait for that."""
        transport = self._worker.transport
        if self._worker.rank != leader:
            send_object(transport, digest, leader)
            return bool(transport.receive(leader, Tag.CHECKPOINT).wait())
        files: dict[str, str] = {}
        for rank in self._ranks:
            with contextlib.suppress(PeerLost):
                written = digest if rank == leader else receive_object(transport, rank)
                if written is not None:
                    files[rank_file(rank)] = str(written)
        whole = len(files) == len(manifest.present)
        if whole:
            commit(attempt, index, replace(manifest, files=files))
        for rank in self._ranks:
            if rank != leader:
                send_unless_lost(transport, torch.tensor([whole]), rank, Tag.CHECKPOINT)
        return whole


def rank_state(phases: Phases, parameters: Any) -> dict[str, Any]:
    """Return the state from which a rank can go on; `resume` puts it back, but for `parameters`."""
    worker = phases.worker
    return {
        "parameters": parameters,
        "buffers": dict(worker.buffers),
        "strategy": phases.state,
        "rate_scale": worker.rate_scale,
        "rates": worker.step.rates,
        "random": random_state(),
    }


def resume(
    worker: Worker, strategy: Strategy, saved: Mapping[str, Any], *, common: bool = False
) -> Phases:
    """Collective: put back a `rank_state`, but for the parameters; return the phases. For `common`
    see `Phases`."""
    for name, buffer in worker.buffers:
        if name in saved["buffers"]:
            restore(buffer, saved["buffers"][name])
    # An average that is still on its way is applied at the rates of the last step, and a run that
    # resumes at the end of its budget has no step any more.
    worker.step.rates = tuple(saved["rates"])
    phases = Phases(strategy, worker, saved["strategy"], common=common)
    worker.rate_scale = saved["rate_scale"]
    restore_random_state(saved["random"])
    return phases


# Files, and plain data with tensors in it


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `RunFailed`, which names `path`, where the disk is full or read-only inside."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunFailed(f"cannot write {path}: {reason}") from None


def save_state(path: Path, module: nn.Module) -> None:
    """Write all parameters and buffers of `module`, as safetensors."""
    state: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, tensor in module.state_dict().items():
        state[name] = values = tensor.detach().cpu().contiguous()
        if values.data_ptr() in written or values.untyped_storage().nbytes() > values.nbytes:
            state[name] = values.clone()  # tensors that share memory cannot be written
        written.add(values.data_ptr())
    with writing(path):
        save_file(state, path)


def parameters_hash(module: nn.Module) -> str:
    """Return the SHA-256 over names and values of the parameters, in the order of the names."""
    sha = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        sha.update(name.encode())
        # As bytes, since NumPy has no bfloat16.
        sha.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def pack(value: Any, put: Callable[[str, Tensor], Any], place: str = "") -> Any:
    """Return `value`, of nested dicts and sequences, as JSON data: a key in place of each tensor.
    `put`: keeps a tensor, from a place ("/moments/0"); returns its key."""
    if isinstance(value, Tensor):
        return {TENSOR: put(place, value.detach())}
    if isinstance(value, dict):
        return {key: pack(item, put, f"{place}/{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [pack(item, put, f"{place}/{index}") for index, item in enumerate(value)]
    return value


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `pack`: return the value with its tensors; equal keys give the same memory."""
    if isinstance(tree, dict):
        if TENSOR in tree:
            key = tree[TENSOR]
            if isinstance(key, str):
                return tensors[key]
            place, first, *shape = key  # a part of another one
            return tensors[place].view(-1)[first : first + math.prod(shape)].view(shape)
        return {key: unpack(item, tensors) for key, item in tree.items()}
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    return tree


class Unpacked(Mapping[str, Any]):
    """A dict of `pack` whose items are unpacked when they are asked for."""

    def __init__(self, tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._tree, self._tensors = tree, tensors

    def __getitem__(self, key: str) -> Any:
        item = self._tree[key]
        if isinstance(item, dict) and TENSOR not in item:
            return Unpacked(item, self._tensors)
        return unpack(item, self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)


def by_content(value: Any, tensors: Tensors) -> Any:
    """Return `value` as JSON data; its tensors go into `tensors`, those of equal content once."""

    def put(_: str, tensor: Tensor) -> str:
        tensor = tensor.cpu().contiguous()
        sha = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        if sha.hexdigest() not in tensors:
            tensors[sha.hexdigest()] = tensor.clone()
        return sha.hexdigest()

    return pack(value, put)


def send_state(transport: Transport, value: Any, to: int) -> None:
    """Send `value`, plain data with tensors, to the rank `to`, which calls `receive_state`."""
    tensors: Tensors = {}
    send_object(transport, [by_content(value, tensors), list(tensors)], to)
    for key in receive_object(transport, to):
        transport.send(tensors[key], to, Tag.PARTS).wait()


def receive_state(transport: Transport, source: int, known: Tensors) -> Any:
    """Return the value that the rank `source` sends with `send_state`. Tensors that `known` has
    already do not travel; others are added to it."""
    tree, keys = receive_object(transport, source)
    wanted = [key for key in keys if key not in known]
    send_object(transport, wanted, source)
    for key in wanted:
        known[key] = transport.receive(source, Tag.PARTS).wait()
    return unpack(tree, known)

"""Checkpoints as all ranks of a run take and choose them, together."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from orchestra.collectives import Group, broadcast, gather_objects
from orchestra.errors import PeerLost
from orchestra.optimizers.state import capture
from orchestra.trainer import checkpoints
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


class CollectiveCheckpoints:
    """The checkpoints in `folder`; `index` numbers the newest one that counts, from 1."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        self.index = 0
        self._worker = worker
        self._folder = folder
        self._ranks = range(worker.runtime.ranks)

    def newest(self, chief: int) -> Any | None:
        """What this rank wrote into the newest whole checkpoint, which the chief looks for."""
        worker = self._worker
        chosen = torch.full((1,), -1, dtype=torch.int64)
        if worker.rank == chief:
            chosen[0] = self._newest_whole()
        broadcast(worker.transport, chosen, chief, worker.everyone, Tag.CHECKPOINT)
        if int(chosen) < 0:
            return None
        self.index = int(chosen)
        return checkpoints.read_rank(self._folder, self.index, worker.rank)

    def take(self, state: Any, chief: int) -> None:
        """At a quiet point: write `state`; it counts only if all ranks have written."""
        index, digest = self.index + 1, None
        if not self._worker.transport.lost():
            plain = capture(state)
            digest = checkpoints.write_rank(self._folder, index, self._worker.rank, plain)
        if self._commit(index, digest, chief):
            self.index = index

    def _newest_whole(self) -> int:
        checkpoints.remove_unfinished(self._folder)
        for path in checkpoints.others(self._folder):
            self._worker.reporter.notice(f"checkpoint refused: {path}: not the folder of one")
        for index in sorted(checkpoints.complete(self._folder), reverse=True):
            try:
                checkpoints.verify(self._folder, index, len(self._ranks))
            except checkpoints.DamagedCheckpoint as damage:
                self._worker.reporter.notice(f"checkpoint refused: {damage}")
            else:
                return index
        return -1

    def _commit(self, index: int, digest: str | None, chief: int) -> bool:
        """Whether checkpoint `index` counts, as the chief decides; nobody goes on before that."""
        transport, own = self._worker.transport, self._worker.rank
        if own != chief:
            gather_objects(transport, digest, Group((own, chief)), chief)
            return bool(transport.receive(chief, Tag.CHECKPOINT).wait())
        digests = {rank: digest if rank == chief else self._digest_of(rank) for rank in self._ranks}
        files = {checkpoints.rank_file(rank): text for rank, text in digests.items() if text}
        whole = len(files) == len(digests)
        if whole:
            checkpoints.commit(self._folder, index, files)
        for rank in self._ranks:
            with contextlib.suppress(PeerLost):
                if rank != chief:
                    transport.send(torch.tensor([whole]), rank, Tag.CHECKPOINT).wait()
        return whole

    def _digest_of(self, rank: int) -> str | None:
        """What `rank` has written; None if it is lost, or knows that another one is."""
        own = self._worker.rank
        try:
            _, digest = gather_objects(self._worker.transport, None, Group((own, rank)), own)
        except PeerLost:
            return None
        return None if digest is None else str(digest)

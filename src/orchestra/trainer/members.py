"""A checkpoint for another number of ranks: what members hand over, and what a rank takes over.

Each member's file says what it contributes to the model (`Member.kept`), and which moments it
has. These are tensors of its state, which are in the file anyway. A rank of another number reads
what it needs from the files of all members, in the order of their ranks: nothing is sent, and ranks
that read the same get the same bits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from orchestra.exchange import Learnt
from orchestra.optimizers.spec import OptimizerPart, join_moments
from orchestra.settings.base import Mismatch, from_plain, to_plain
from orchestra.strategies.base import Roles
from orchestra.strategies.phases import Phases
from orchestra.trainer.checkpoint_files import DamagedCheckpoint, Manifest, rank_file
from orchestra.trainer.checkpoints import TENSOR, Unpacked, unpack
from orchestra.trainer.loop import Position
from orchestra.trainer.recorder import SECONDS, Spent, Totals
from orchestra.worker.snapshots import ModelRange
from orchestra.worker.worker import Measures


@dataclass(frozen=True)
class Survivors:
    """What a loss has left of a group in lockstep, by the numbers that ranks had in the group.

    The `speaker` is a worker with the newest state; the `lost` ranks are gone.
    """

    speaker: int
    lost: frozenset[int] = frozenset()


def handed_over(
    phases: Phases, *, in_parts: bool, survivors: Survivors | None = None
) -> dict[str, Any]:
    """Return what this rank's member contributes to a run on another number of ranks.

    If all replicas are equal, one worker speaks for all: the first one, or the speaker of the
    `survivors`. If each rank has a part of the model (`in_parts`), each speaks for its own. The
    speaker of survivors also hands over its copy of the slices of lost servers.
    """
    worker, lockstep = phases.worker, phases.traits.lockstep
    survivors = survivors or Survivors(worker.workers.ranks[0])
    kept, works = phases.member.kept(), worker.rank in worker.workers.ranks
    speaks = works and (in_parts or not lockstep or worker.rank == survivors.speaker)
    if in_parts:
        # Where its part lies in the whole model is what snapshots go by, too.
        parts = worker.snapshots.conclude("parameters", worker.parameters)
        learnt = [Learnt(part.offset, part.values) for part in parts]
    else:
        learnt = [each for each in kept.learnt if each.owner in (None, worker.rank)]
        learnt += [
            replace(each, weight=1.0)
            for each in kept.learnt
            if worker.rank == survivors.speaker and each.owner in survivors.lost
        ]
    parts_of_moments = list(kept.parts)
    if kept.optimizer is not None and not kept.parts and speaks:
        named = worker.named_parameters().items()
        whole = {name: (parameter, 0) for name, parameter in named}
        parts_of_moments.append(OptimizerPart(kept.optimizer, whole))
    return {
        "learnt": [
            {
                "offset": each.offset,
                "size": each.values.numel(),
                "values": each.values,
                "weight": each.weight,
                "summed": each.summed,
            }
            for each in learnt
        ],
        "moments": [each for part in parts_of_moments for each in part.moments()],
        "buffers_weight": kept.buffers_weight if speaks else 0.0,
    }


class MemberFile(Mapping[str, Tensor]):
    """The file of one member: `tree` is its state, as `pack` gives it; the tensors by key."""

    def __init__(self, path: Path) -> None:
        opened: Any = safe_open
        self._file = opened(path, framework="pt")
        self.tree: dict[str, Any] = json.loads(self._file.metadata()["tree"])

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())

    def elements(self, packed: Any, first: int, end: int) -> Tensor:
        """Return elements `first` to `end` of a flat tensor, which `pack` made `packed` of; no
        others are read."""
        key = packed[TENSOR]
        name, start = (key, 0) if isinstance(key, str) else key[:2]
        values: Tensor = self._file.get_slice(name)[start + first : start + end]
        return values

    def unpacked(self, *path: str) -> Any:
        """Return what is at `path` of the tree, with its tensors."""
        tree = self.tree
        for key in path:
            tree = tree[key]
        return unpack(tree, self)


class MemberFiles:
    """The files of the members of checkpoint `index`, by rank, whose manifest is `manifest`.

    Raises:
        DamagedCheckpoint: a file is of another rank or checkpoint.
    """

    def __init__(self, folder: Path, index: int, manifest: Manifest) -> None:
        place = folder / f"{index:04d}"
        self.manifest = manifest
        self.files = {rank: MemberFile(place / rank_file(rank)) for rank in manifest.present}
        for rank, file in self.files.items():
            if (file.tree["rank"], file.tree["checkpoint"]) != (rank, index):
                raise DamagedCheckpoint(f"{place / rank_file(rank)}: it is of another checkpoint")
        self.first = self.files[manifest.first_worker]
        self._equal = manifest.layout["replicas"] == "equal"

    def _handed(self) -> Iterator[tuple[MemberFile, dict[str, Any]]]:
        for file in self.files.values():
            yield file, file.tree["handed"]

    # The model

    def fill(self, vector: Tensor, ranges: Sequence[ModelRange]) -> None:
        """Set `vector`, flat, to the model that the members have learnt.

        `ranges` say which elements of the model lie where in `vector`.

        Raises:
            Mismatch: the members' model has others.
        """
        learnt = [(file, each) for file, handed in self._handed() for each in handed["learnt"]]
        if not learnt:  # all replicas are equal
            whole = {"offset": 0, "size": ranges[-1].offset + ranges[-1].end - ranges[-1].first}
            learnt = [(self.first, {**whole, "values": self.first.tree["parameters"]})]
        for part in ranges:
            with torch.no_grad():
                vector[part.first : part.end] = self._mean(learnt, part)

    def _mean(self, learnt: Sequence[tuple[MemberFile, Any]], part: ModelRange) -> Tensor:
        """Return the weighted mean of the members' values in `part`, in float64."""
        size = part.end - part.first
        total = torch.zeros(size, dtype=torch.float64)
        weights = torch.zeros(size, dtype=torch.float64)
        for file, each in learnt:
            start = each["offset"] - part.offset  # of the values, counted from the part's first
            first, end = max(start, 0), min(start + each["size"], size)
            if first >= end:
                continue
            weight = each.get("weight", 1.0)
            own = file.elements(each["values"], first - start, end - start).double()
            total[first:end] += own if each.get("summed") else weight * own
            weights[first:end] += weight
        if not bool((weights > 0).all()):
            raise Mismatch("parameters: the members of the checkpoint have not all of this model's")
        return total / weights

    def buffers(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the buffers `named`: the weighted mean of the workers' where they are floating."""
        found = {}
        for name, own in named:
            given = [
                (file.unpacked("buffers", name), handed["buffers_weight"])
                for file, handed in self._handed()
                if handed["buffers_weight"] > 0 and name in file.tree["buffers"]
            ]
            if not given:
                found[name] = own
            elif self._equal or len(given) == 1 or not own.is_floating_point():
                found[name] = given[0][0]
            else:
                total = sum(weight for _, weight in given)
                mean = sum(values.double() * (weight / total) for values, weight in given)
                found[name] = torch.as_tensor(mean).to(own.dtype)
        return found

    def moments(self, parameters: Mapping[str, Tensor], *, elementwise: bool) -> HeldMoments:
        """Return the optimizer's moments of whole `parameters`."""
        parts: dict[str, list[tuple[MemberFile, dict[str, Any]]]] = {}
        for file, handed in self._handed():
            for part in handed["moments"]:
                parts.setdefault(part["name"], []).append((file, part))
        there = {name: shape for name, shape in parameters.items() if name in parts}
        return HeldMoments(parts, there, elementwise=elementwise, equal=self._equal)

    # Figures of the run

    def figures(self, rank: int, roles: Roles) -> dict[str, Any]:
        """Return position, totals and measures from which `rank` goes on, of ranks with `roles`.

        What is counted over the workers is divided evenly; seconds are the mean of the workers.
        """
        manifest = self.manifest
        works = rank in roles.workers
        # As many for all, and no worker makes a step of that number again
        steps = max(self.steps(rank) for rank in self.files) if works else 0
        owed = tuple((first, end) for first, end in self.first.tree["position"].get("owed", ()))
        position = Position(steps, manifest.consumed, manifest.consumed, owed=owed)
        return {
            "position": to_plain(position),
            "totals": to_plain(self._totals(rank, roles)),
            "measures": to_plain(self._measures(is_first=rank == roles.workers[0])),
        }

    def _totals(self, rank: int, roles: Roles) -> Totals:
        totals: list[Totals] = [
            from_plain(Totals, file.tree["totals"]) for file in self.files.values()
        ]
        workers = [each for each in totals if each.samples] or totals
        count = len(roles.shares)
        spent = Spent(bytes_sent=_even(sum(t.spent.bytes_sent for t in totals), rank, count))
        for name in SECONDS:
            mean = sum(getattr(each.spent, name) for each in workers) / len(workers)
            setattr(spent, name, mean)
        samples = 0
        if rank in roles.workers:
            place = roles.workers.index(rank)
            done = sum(t.samples for t in totals)
            if not self.manifest.each_can_resume:  # a lost rank's samples are in no account
                done = max(done, self.manifest.consumed)
            samples = _even(done, place, len(roles.workers))
        loss = self.first.tree["totals"]["loss"]
        return Totals(max(each.elapsed for each in totals), spent, samples, loss)

    def _measures(self, *, is_first: bool) -> Measures:
        own: Measures = from_plain(Measures, self.first.tree["measures"])
        own.staleness, own.dropped, own.native_bytes = {}, 0, 0
        if is_first:  # what others have counted, too
            every: list[Measures] = [
                from_plain(Measures, file.tree["measures"]) for file in self.files.values()
            ]
            own.staleness = dict(sum((Counter(each.staleness) for each in every), Counter()))
            own.dropped = sum(each.dropped for each in every)
            own.native_bytes = sum(each.native_bytes for each in every)
        return own

    def state(self) -> Mapping[str, Any]:
        """Return the state of the phases on the first worker; its member's is read if needed."""
        saved = self.first.tree["strategy"]
        others = {key: value for key, value in saved.items() if key != "member"}
        return {**unpack(others, self.first), "member": Unpacked(saved["member"], self.first)}

    def assigned(self, rank: int, ranks: int) -> list[int]:
        """Return the members whose snapshots and records `rank` of `ranks` answers for now."""
        return list(self.files)[rank::ranks]

    def steps(self, rank: int) -> int:
        """Return the steps that member `rank` had made."""
        steps: int = self.files[rank].tree["position"]["steps"]
        return steps


def _even(total: int, place: int, count: int) -> int:
    """Return the part of `total` that falls to `place` of `count`."""
    return total // count + (place < total % count)


class HeldMoments(Mapping[str, dict[str, Any]]):
    """The moments of parameters by name, put together when they are asked for: one at a time.

    `parts` are those of all members. Where several have the same part, it is the mean of theirs,
    or, where they are `equal`, the first one's.
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[tuple[MemberFile, dict[str, Any]]]],
        parameters: Mapping[str, Tensor],
        *,
        elementwise: bool,
        equal: bool,
    ) -> None:
        self._parts, self._parameters = parts, parameters
        self._elementwise, self._equal = elementwise, equal

    def __getitem__(self, name: str) -> dict[str, Any]:
        states: dict[int, list[dict[str, Any]]] = {}  # by the first element
        for file, part in self._parts[name] if name in self._parameters else ():
            same = states.setdefault(part["first"], [])
            if not (same and self._equal):
                same.append(unpack(part["state"], file))
        if not states:
            raise KeyError(name)
        parts = [
            {"name": name, "first": first, "state": _mean_of_states(same)}
            for first, same in states.items()
        ]
        return join_moments(parts, self._parameters, elementwise=self._elementwise)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _mean_of_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of the workers' moments of one parameter; values without a mean are the first
    worker's."""
    if len(states) == 1:
        return states[0]
    found = {}
    for key, value in states[0].items():
        own = [state[key] for state in states if key in state]
        if isinstance(value, Tensor) and value.is_floating_point():
            total = sum(each.double() for each in own)
            found[key] = torch.as_tensor(total / len(own)).to(value.dtype)
        elif type(value) in (int, float):  # rounded down where the optimizer keeps whole numbers
            found[key] = type(value)(sum(own) / len(own))
        else:
            found[key] = value
    return found

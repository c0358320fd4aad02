"""Check whether a run has room in the memory of the nodes that it is simulated on."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from orchestra.cluster import Cluster, Node
from orchestra.cluster.units import BYTES
from orchestra.engines.simulation.costs import Costs, first_batch
from orchestra.errors import InputError
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.optimizers.state import undisturbed
from orchestra.strategies.base import ModelPart, Strategy, refusal_of, roles_of
from orchestra.tasks.task import Task, load_task
from orchestra.trainer.settings import Run
from orchestra.trainer.setup import Sizes, kept_bytes, meta_model, sizes_of
from orchestra.worker.layout import Layout
from orchestra.worker.runtime import Work

ACTIVATIONS = "activations"


class Memory:
    """What the ranks of `run` keep in memory, in bytes.

    Parameters, gradients, the optimizer's state and the strategy's own copies follow from the model
    and `Traits.memory`. Activations are what autograd saves for the backward pass of one batch
    of the task, on the meta device where the model can be there, in float32, and in proportion to
    the samples. What a kernel needs for a moment is not counted.
    """

    def __init__(self, run: Run) -> None:
        assert isinstance(run.strategy, Strategy)
        self._run, self._strategy = run, run.strategy

    @functools.cached_property
    def _task(self) -> Task:
        return load_task(self._run.task)

    def require_room(self, cluster: Cluster, ranks: int) -> None:
        """Raise `InputError`, with the sum, where ranks need more than a node of theirs has, at the
        start or once all have joined."""
        nodes = cluster.nodes_of(ranks)
        self._require_room_on(nodes[:ranks])
        if len(nodes) > ranks and refusal_of(self._strategy, len(nodes)) is None:
            training = replace(self._run.training, ranks=len(nodes))
            Memory(replace(self._run, training=training))._require_room_on(nodes)

    def _require_room_on(self, nodes: Sequence[Node]) -> None:
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, node in enumerate(nodes):
            ranks_of[node.name].append(rank)
        for node in dict.fromkeys(nodes):
            if (complaint := self._complaint(node, ranks_of[node.name])) is not None:
                raise InputError(complaint)

    def _complaint(self, node: Node, ranks: Sequence[int]) -> str | None:
        """Say why `ranks` have no room on `node`; None if they have, or its memory is not known."""
        if node.memory is None:
            return None
        devices = max(1, node.devices)
        for device in range(min(devices, len(ranks))):
            here = ranks[device::devices]  # as many on each device as can be
            needed = sum((self._of(rank) for rank in here), Counter[str]())
            if needed.total() > node.memory:
                place = f"a device of {node.name}" if node.devices else node.name
                return self._explained(place, node.memory, here, needed)
        return None

    def best_node(self, cluster: Cluster, costs: Costs) -> Node:
        """Return the node with room where a step of the whole batch takes the least time.

        A step is the gradient of the global batch, the optimizer's update and what surrounds them,
        with all cores of the node, or one device. Of equal ones the first by name: the order of the
        nodes in a file does not matter. Where none has room, it is the fastest of all.
        """
        if len(cluster.nodes) == 1:
            return cluster.nodes[0]

        def preference(node: Node) -> tuple[bool, float, str]:
            crowded = self._complaint(node, [0]) is not None
            return crowded, -self.speed_alone(node, costs), node.name

        return min(cluster.nodes, key=preference)

    def fastest_first(self, cluster: Cluster, costs: Costs) -> list[Node]:
        """Return the nodes, those first that train fastest with all of their cores or devices; of
        equal ones in the order of the file."""
        return sorted(
            cluster.nodes,
            key=lambda node: -max(node.devices, 1) * self.speed_alone(node, costs),
        )

    def speed_alone(self, node: Node, costs: Costs) -> float:
        """Return samples/s of one process on `node` that takes steps of the global batch.

        It has all cores, or one device. Durations are the cost model's, without jitter.
        """
        training = self._run.training
        threads = node.threads(1, training.threads)
        seconds = sum(costs.seconds(work, threads) for work in self._step)
        return training.batch_size * training.ranks * node.speed_beside(costs.flops) / seconds

    @functools.cached_property
    def _step(self) -> tuple[Work, ...]:
        """The work of a step of the global batch."""
        batch = self._run.training.batch_size * self._run.training.ranks
        size = Layout.of_module(self._module).size
        return Work("gradient", batch), Work("update", size), Work("step", batch)

    def _explained(
        self, place: str, there: float, ranks: Sequence[int], needed: Counter[str]
    ) -> str:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"its {len(ranks)} ranks"
        samples = f" of {sum(map(self._samples, ranks)):g} samples"
        parts = " + ".join(
            f"{name}{samples * (name == ACTIVATIONS)} {BYTES.rounded(size)}"
            for name, size in needed.items()
            if size
        )
        remedy = "; lower batch_size or raise accumulation" if needed[ACTIVATIONS] else ""
        return (
            f"memory: {place} has {BYTES.rounded(there)}, but {who} would need "
            f"{BYTES.rounded(needed.total())}: {parts}{remedy}; "
            "choose another strategy, or nodes with more memory"
        )

    def _of(self, rank: int) -> Counter[str]:
        """Return the bytes of one rank, by what they are for."""
        kept = kept_bytes(self._run, rank, *self._sizes(rank))
        samples = self._samples(rank)
        kept[ACTIVATIONS] = round(samples * self._sample_activations) if samples else 0
        return kept

    def _samples(self, rank: int) -> float:
        """Return the samples whose activations a rank holds at a time."""
        training = self._run.training
        batches = self._strategy.traits(training.work).memory(rank, training.ranks).batches
        return batches * training.batch_size / training.accumulation

    def _sizes(self, rank: int) -> tuple[Sizes, Layout]:
        """Return the sizes of what `rank` trains, and its layout."""
        ranks = len(roles_of(self._strategy, self._run.training.ranks).shares)
        held = self._strategy.place(self._module, lambda model: self._loss(model), rank, ranks)
        return self._sizes_of(held.module) if isinstance(held, ModelPart) else self._whole

    @functools.cached_property
    def _whole(self) -> tuple[Sizes, Layout]:
        return self._sizes_of(self._module)

    def _sizes_of(self, module: nn.Module) -> tuple[Sizes, Layout]:
        names = [name for name, p in self._module.named_parameters() if p.requires_grad]
        spec = OptimizerSpec.from_settings(self._run.training.optimizer, names)
        return sizes_of(module, spec), Layout.of_module(module)

    @functools.cached_property
    def _module(self) -> nn.Module:
        try:
            return meta_model(self._task)
        except InputError:  # with real tensors it can be trained all the same
            with undisturbed():
                return self._task.model()

    @functools.cached_property
    def _loss(self) -> Callable[[nn.Module], Tensor]:
        return self._loss_beside(self._module)

    def _loss_beside(self, model: nn.Module) -> Callable[[nn.Module], Tensor]:
        """Return a function: the loss of a module on one batch, on the device of `model`."""
        batch = first_batch(self._run, self._task, model)
        return lambda module: self._task.loss(module, batch)

    @functools.cached_property
    def _sample_activations(self) -> float:
        """Bytes that autograd saves for the backward pass, but for the model's own tensors."""
        try:
            saved = saved_bytes(self._module, self._loss)
        except (NotImplementedError, RuntimeError):  # the loss reads values
            with undisturbed():
                model = self._task.model()
            saved = saved_bytes(model, self._loss_beside(model))
        return saved / self._run.training.batch_size


def saved_bytes(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> int:
    """Count the bytes that autograd keeps between forward and backward of `loss`.

    Each storage counts once; those of the parameters and buffers of `module` do not.
    """
    storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no two have one address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with undisturbed(), saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(module)
    for own in (*module.parameters(), *module.buffers()):
        storages.pop(own.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in storages.values())

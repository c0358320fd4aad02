"""One rank in a loop of the user's own: what it trains, and its state, saved and loaded."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from orchestra import exchange
from orchestra.collectives import all_reduce
from orchestra.coordinator.batches import WorkSource
from orchestra.errors import InputError, PeerLost
from orchestra.optimizers import spec
from orchestra.optimizers.state import capture, restore
from orchestra.strategies.base import Roles, Strategy
from orchestra.strategies.phases import Phases
from orchestra.strategies.traits import Partition
from orchestra.trainer import checkpoints
from orchestra.trainer.own_loop.model import LOADED, Hook, Ledger
from orchestra.transports.protocol import send_unless_lost
from orchestra.transports.tags import Tag
from orchestra.worker.batches import map_tensors
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import QueueOf, Worker


class Command(enum.IntEnum):
    """The first worker's word to ranks that serve, as all workers leave: what follows."""

    OVER = 0  # the script is over
    GOES_ON = 1  # it goes on with another loop
    RESTART = 2  # the strategy starts anew, with what the user has loaded
    RESUME = 3  # it goes on from a state
    HANDS_OVER = 4  # as GOES_ON; first all optimizers get the moments that lie in parts


class OwnRank:
    """This rank's model and optimizer under a strategy, and the strategy's state.

    Parameters and moments that were loaded count from the next step on: where a strategy keeps
    copies of its own, as servers do, it starts anew with them.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        queue_of: QueueOf | None,
        **options: Any,
    ) -> None:
        self.strategy, self.optimizer = strategy, optimizer
        self.steps = 0  # that were made
        self.taken = 0  # batches of the epoch under way that this worker has had
        self.ended = False  # all workers have left
        self._loaded_model = self._loaded_moments = self._restoring = False
        self._collected = False  # since the last step: the first worker's optimizer has all moments
        self.ledger = Ledger(optimizer)
        self._sizes = self._group_sizes()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._queue_of = queue_of
        self.worker = Worker(runtime, model, self._spec(), own_optimizer=optimizer, **options)
        if self.worker.layout.device.type != "meta":
            for parameter in self.worker.gradients.parameters:
                # torch.save writes whole storages, of a view the whole model: each parameter gets a
                # storage of its own in the memory of the flat vector.
                parameter.data = from_dlpack(parameter.data)
        self._prepare_start()
        self._agree_on_moments()
        self.phases = Phases(strategy, self.worker)
        self.kept = exchange.Kept()  # at the last rest
        self._inherited = bool(self.worker.inherited)
        self._release_moments()
        self.worker.inherited = {}
        self._written = self.worker.optimizer.written_options()
        self._check_optimizer()
        loaded = Hook(self._model_loaded, LOADED)
        self._hooks: list[Any] = [
            optimizer.register_state_dict_pre_hook(self._may_be_saved),
            optimizer.register_load_state_dict_post_hook(self._optimizer_loaded),
            *(module.register_load_state_dict_post_hook(loaded) for module in model.modules()),
        ]

    def _spec(self) -> spec.OptimizerSpec:
        """Return how to make an optimizer with the options that the user's has now."""
        return spec.OptimizerSpec.from_instance(self.optimizer, self._names)

    def _prepare_start(self) -> None:
        """Undo what a strategy that has started, and may have changed its phase, has set."""
        worker = self.worker
        worker.set_workers(self.strategy.roles(worker.runtime.ranks).workers)
        worker.queue_of = self._queue_of
        worker.rate_scale = 1.0

    def _agree_on_moments(self) -> None:
        """Collective over all ranks, before `start`: let it inherit what `optimizer` has loaded."""
        worker = self.worker
        worker.inherited = spec.export_moments(self.optimizer, worker.named_parameters())
        if not self.strategy.traits(worker.work).lockstep:
            return
        tensors: checkpoints.Tensors = {}
        checkpoints.by_content(capture(worker.inherited), tensors)
        if list(tensors) != exchange.agree_on_data(worker, list(tensors), worker.everyone.ranks[0]):
            raise InputError(
                "the optimizer has other moments than on the first rank: load the same state on "
                "every rank before distribute, or clear it (optimizer.state.clear())"
            )

    def close(self) -> None:
        """Let go of model and optimizer."""
        for hook in self._hooks:
            hook.remove()
        self.worker.gradients.close()
        self.worker.reporter.expendable(False)

    # Its place among the others

    @property
    def roles(self) -> Roles:
        """The roles in the phase under way."""
        return self.phases.roles

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that have data now; the others serve."""
        return self.roles.workers

    def is_worker(self) -> bool:
        """Return whether this rank has data in the phase under way."""
        return self.worker.rank in self.workers

    @property
    def synchronous(self) -> bool:
        """True if the workers step together now, on the average of their gradients."""
        return self.phases.traits.lockstep

    def source(self) -> WorkSource | None:
        """Return the queue from which workers take batches now, or None where these are dealt out.

        Workers that take batches from a queue have unlike numbers of them.
        """
        return self.worker.source

    def sum_over_workers(self, numbers: Tensor, tag: Tag = Tag.COUNT) -> Tensor:
        """Collective over the workers: return sums of their `numbers`, in float64 on the CPU."""
        worker = self.worker
        sums = numbers.detach().to("cpu", torch.float64, copy=True)
        all_reduce(worker.transport, sums, "ring", worker.workers, tag)
        return sums

    def alike(self, number: int) -> bool:
        """Collective over the workers: return whether all have the same `number`, of 32 bits."""
        worker = self.worker
        numbers = torch.zeros(len(worker.workers), dtype=torch.float64)
        # float64 holds numbers of 32 bits exactly, and each worker has a place of its own.
        numbers[worker.workers.index(worker.rank)] = number
        return bool((self.sum_over_workers(numbers) == number).all())

    # What the user does with model and optimizer

    @property
    def whole(self) -> bool:
        """True if the user's optimizer has the moments, on a worker."""
        return getattr(self.phases.member, "optimizer", None) is self.optimizer

    def _release_moments(self) -> None:
        """Let the user's optimizer make room for moments that lie elsewhere."""
        if not self.whole:
            self.optimizer.state.clear()

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def _check_optimizer(self) -> None:
        """Refuse an optimizer that keeps state in its groups where other optimizers make its steps.

        Also one whose `eval` reads its moments, where the user's has none or workers' differ.
        """
        has_eval = callable(getattr(self.optimizer, "eval", None))
        apart = has_eval and not self.synchronous and len(self.workers) > 1
        if self.is_worker() and (apart or ((has_eval or self._written) and not self.whole)):
            written = self._written and f"writes {', '.join(self._written)} into its groups"
            raise InputError(
                f"optimizer {type(self.optimizer).__name__} {written or 'has eval()'}, but under "
                f"{self.strategy!r} other optimizers make its steps, or workers have unlike "
                "moments: take AllReduce without shards, or synchronous servers with "
                "returns='gradients'"
            )

    def _may_be_saved(self, _: torch.optim.Optimizer) -> None:
        first = self.worker.workers.ranks[0]
        if self._restoring or self.whole or self.ended or not (self.steps or self._inherited):
            return
        if not self._collected:
            raise InputError(
                f"optimizer.state_dict(): under {self.strategy!r} other ranks have the moments, or "
                "parts of them: save batches.state_dict() in its place; every worker calls that, "
                "and the first one's optimizer has all moments then, until the next step"
            )
        if self.worker.rank != first:
            raise InputError(
                f"optimizer.state_dict(): batches.state_dict() has collected the moments on rank "
                f"{first}: save them there (if orchestra.is_first())"
            )

    def _optimizer_loaded(self, _: torch.optim.Optimizer) -> None:
        self._loaded_moments |= not self._restoring

    def _model_loaded(self, *_: Any) -> None:
        self._loaded_model = True

    def begin_update(self) -> None:
        """Release moments that were collected; refuse changes that no other rank learns of."""
        self._check_optimizer()
        if (sizes := self._group_sizes()) != self._sizes:
            if not self.whole or self.strategy.traits().phases:
                raise InputError(
                    "the optimizer's parameter groups have other parameters than when distribute "
                    f"was called, which other ranks under {self.strategy!r} do not know of: make "
                    "all groups before, with lr=0 where they are to wait"
                )
            self._sizes, self.worker.optimizer = sizes, self._spec()
        if self._collected:
            self._collected = False
            self._release_moments()

    def take_over(self) -> bool:
        """Collective over the workers, before a step: take over what the user has loaded.

        Return whether the strategy has started anew.
        """
        model, moments = self._loaded_model, self._loaded_moments
        self._loaded_model = self._loaded_moments = False
        if not self.is_worker() or self.ended:
            return False
        moved = moments and not self.whole  # to where the strategy keeps them
        if not moved and not (model and not (self.whole and self.synchronous)):
            return False
        if self.taken and self.source() is not None:
            raise InputError(
                "load_state_dict(): workers take unlike numbers of batches, so that no step is "
                "known from which it would count: load before the epoch, or set work='equal' in "
                "distribute"
            )
        parameters = self.worker.named_parameters()
        self.tell(Command.RESTART)
        self._restart(spec.export_moments(self.optimizer, parameters) if moved else None)
        return True

    def _restart(self, moments: spec.Moments | None) -> None:
        """Collective: start anew, with `moments`, or those that there were."""
        worker = self.worker
        consumed, groups = worker.step.consumed, spec.get_options(self.optimizer)
        put_back = worker.keep()

        def renew(kept: exchange.Kept) -> None:
            self.kept = kept
            own = [moments, consumed, groups]
            loaded, worker.step.consumed, options = self._hand_out(lambda _: own)
            put_back()
            self._set_options(options)
            if loaded is None and self.phases.traits.optimizer is not Partition.REPLICATED:
                loaded = self._all_moments()
            worker.inherited = loaded or {}

        self.phases.begin_anew(renew)
        self._inherited |= moments is not None or bool(worker.inherited)
        self._release_moments()
        worker.inherited = {}

    def _set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set weight decay and the like, also of optimizers that are made elsewhere or later."""
        spec.set_options(self.optimizer, groups)
        self.worker.optimizer = self._spec()

    # Saving

    def collect(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Collective over all ranks, with nothing in flight: return all states on the first worker.

        `order` holds the generators from which this rank's order of the samples follows.
        """
        worker = self.worker
        parameters = worker.named_parameters() if self.is_worker() else {}
        own = capture(checkpoints.rank_state(self.phases, parameters))
        own |= {"moments": self._own_moments(), "order": order}
        if not self.is_worker():
            own["buffers"] = {}
        self._collected = True
        ranks = self._gather(own, worker.workers.ranks[0])
        if ranks and not self.whole:  # until the next step
            self._install(self._joined(each["moments"] for each in ranks.values()))
        return {str(rank): each for rank, each in ranks.items()}

    def _gather(self, own: Any, first: int) -> dict[int, Any]:
        """Collective over all ranks: return the data of each by rank on `first`, else nothing."""
        worker = self.worker
        if worker.rank != first:
            checkpoints.send_state(worker.transport, own, first)
            return {}
        known: checkpoints.Tensors = {}
        return {
            rank: checkpoints.unpack(checkpoints.by_content(own, known), known)
            if rank == first
            else checkpoints.receive_state(worker.transport, rank, known)
            for rank in worker.everyone.ranks
        }

    def _own_moments(self) -> list[dict[str, Any]]:
        return [each for part in self.kept.parts for each in part.moments()]

    def _joined(self, ranks: Iterable[Sequence[Any]]) -> spec.Moments:
        parts = [part for parts in ranks for part in parts]
        elementwise = self.worker.optimizer.elementwise
        return spec.join_moments(parts, self.worker.named_parameters(), elementwise=elementwise)

    def _install(self, moments: spec.Moments) -> None:
        parameters = self.worker.named_parameters()
        for name, state in moments.items():
            # Moments of equal content travelled as one tensor, and an optimizer changes them.
            self.optimizer.state[parameters[name]] = map_tensors(state, Tensor.clone)

    # Going on from a state

    def load(self, state: Mapping[str, Any]) -> None:
        """Collective over the workers, and the ranks that serve: go on from a `state` that fits."""
        self._loaded_model = self._loaded_moments = self._collected = False
        self.tell(Command.RESUME)
        self._resume(state["ranks"], [state["position"]["consumed"], state["groups"]])
        self.steps = state["position"]["steps"]

    def _resume(self, ranks: Mapping[str, Any], common: Any) -> None:
        worker = self.worker
        self.phases.finish()
        exchange.wait_for_everyone(worker)
        own, (consumed, groups) = self._hand_out(lambda rank: [ranks[str(rank)], common])
        parameters = worker.named_parameters()
        for name, values in own["parameters"].items():
            restore(parameters[name], values)
        worker.step.consumed = consumed
        self._prepare_start()
        self._set_options(groups)
        self._restoring = True
        try:
            copied = map_tensors(own["strategy"], Tensor.clone)  # an optimizer goes on with them
            self.phases = checkpoints.resume(worker, self.strategy, own | {"strategy": copied})
        finally:
            self._restoring = False
        self._inherited = True

    # Ranks that serve

    def tell(self, command: Command) -> None:
        """Let the first worker tell ranks that serve what follows; called before workers stop."""
        first, serving = self._places()
        if self.worker.rank == first:
            for rank in serving:
                send_unless_lost(self.worker.transport, torch.tensor([command]), rank, Tag.GOES_ON)

    def hear(self) -> Command:
        """On a rank that serves and has stopped: return what follows; restart or resume here."""
        first, _ = self._places()
        try:
            command = Command(int(self.worker.transport.receive(first, Tag.GOES_ON).wait()))
        except PeerLost:
            return Command.OVER
        if command is Command.RESTART:
            self._restart(None)
        elif command is Command.RESUME:
            self._resume({}, None)
        return command

    def _places(self) -> tuple[int, list[int]]:
        """Return the first worker, and the ranks that serve, of those that are there."""
        workers, everyone = self.workers, self.worker.everyone.ranks
        first = next(rank for rank in workers if rank in everyone)
        return first, [rank for rank in everyone if rank not in workers]

    def _hand_out(self, part_of: Callable[[int], Any]) -> Any:
        """Return this rank's part; the first worker gives it to each rank that serves."""
        transport, (first, serving) = self.worker.transport, self._places()
        if self.worker.rank in serving:
            return checkpoints.receive_state(transport, first, {})
        if self.worker.rank == first:
            for rank in serving:
                checkpoints.send_state(transport, part_of(rank), rank)
        return part_of(self.worker.rank)

    # The end

    def leave(self, *, goes_on: bool) -> Command:
        """Stop the strategy; return what follows. What was loaded last stays in the model."""
        works, command = self.is_worker(), Command.GOES_ON if goes_on else Command.OVER
        if works:
            if goes_on and not self.whole and not self._loaded_moments:
                command = Command.HANDS_OVER
            self.tell(command)
        put_back = self.worker.keep() if self._loaded_model else None
        self.kept = self.phases.finish()
        if put_back is not None:
            put_back()
        return command if works else self.hear()

    def hand_over(self) -> None:
        """Collective, after the end: every rank's optimizer gets all moments."""
        self._install(self._all_moments())

    def _all_moments(self) -> spec.Moments:
        """Collective: return the moments of all parts, as they were at the last rest."""
        worker, first = self.worker, self._places()[0]
        gathered = self._gather(self._own_moments(), first)
        if worker.rank != first:
            received: spec.Moments = checkpoints.receive_state(worker.transport, first, {})
            return received
        joined = self._joined(gathered.values())
        for rank in gathered.keys() - {first}:
            checkpoints.send_state(worker.transport, joined, rank)
        return joined

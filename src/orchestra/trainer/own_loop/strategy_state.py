"""The state of a strategy in a loop of the user's own: begun, saved, loaded, begun anew, ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestra import exchange
from orchestra.coordinator.rest import Reason, Rest
from orchestra.errors import InputError
from orchestra.optimizers import spec
from orchestra.optimizers.state import capture, restore
from orchestra.strategies.phases import Phases
from orchestra.strategies.traits import Partition
from orchestra.trainer import checkpoints
from orchestra.trainer.own_loop.checks import LOADED, Hook
from orchestra.trainer.own_loop.rank import OwnRank
from orchestra.worker.batches import map_tensors


class StrategyState:
    """What a strategy keeps on a `rank`, its member and the optimizer's moments, begin to end.

    Parameters and moments that were loaded count from the next step on: where a strategy keeps
    copies of its own, as servers do, it starts anew with them.
    """

    def __init__(self, rank: OwnRank, model: nn.Module) -> None:
        self._rank, self._optimizer = rank, rank.optimizer
        self._sizes = self._group_sizes()
        self._loaded_model = self._loaded_moments = self._restoring = False
        self._collected = False  # since the last step: the first worker's optimizer has all moments
        self._agree_on_moments()
        rank.phases = Phases(rank.strategy, rank.worker)
        self._kept = exchange.Kept()  # at the last rest
        self._inherited = bool(rank.worker.inherited)
        self._release_moments()
        rank.worker.inherited = {}
        self._written = rank.worker.optimizer.written_options()
        self._check_optimizer()
        loaded = Hook(self._model_loaded, LOADED)
        self._hooks: list[Any] = [
            self._optimizer.register_state_dict_pre_hook(self._may_be_saved),
            self._optimizer.register_load_state_dict_post_hook(self._optimizer_loaded),
            *(module.register_load_state_dict_post_hook(loaded) for module in model.modules()),
        ]

    def _agree_on_moments(self) -> None:
        """Collective over all ranks, before `join`: let it inherit what the optimizer has."""
        worker = self._rank.worker
        worker.inherited = spec.export_moments(self._optimizer, worker.named_parameters())
        if not self._rank.strategy.traits(worker.work).lockstep:
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
        self._rank.worker.gradients.close()
        self._rank.worker.reporter.expendable(False)

    # What the user does with model and optimizer

    def _release_moments(self) -> None:
        """Let the user's optimizer make room for moments that lie elsewhere."""
        if not self._rank.whole:
            self._optimizer.state.clear()

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _check_optimizer(self) -> None:
        """Refuse an optimizer that keeps state in its groups where other optimizers make its steps.

        Also one whose `eval` reads its moments, where the user's has none or workers' differ.
        """
        rank = self._rank
        has_eval = callable(getattr(self._optimizer, "eval", None))
        apart = has_eval and not rank.synchronous and len(rank.workers) > 1
        if rank.is_worker() and (apart or ((has_eval or self._written) and not rank.whole)):
            written = self._written and f"writes {', '.join(self._written)} into its groups"
            raise InputError(
                f"optimizer {type(self._optimizer).__name__} {written or 'has eval()'}, but under "
                f"{rank.strategy!r} other optimizers make its steps, or workers have unlike "
                "moments: take AllReduce without shards, or synchronous servers with "
                "returns='gradients'"
            )

    def _may_be_saved(self, _: torch.optim.Optimizer) -> None:
        rank = self._rank
        first = rank.worker.workers.ranks[0]
        if self._restoring or rank.whole or rank.ended or not (rank.steps or self._inherited):
            return
        if not self._collected:
            raise InputError(
                f"optimizer.state_dict(): under {rank.strategy!r} other ranks have the moments, or "
                "parts of them: save batches.state_dict() in its place; every worker calls that, "
                "and the first one's optimizer has all moments then, until the next step"
            )
        if rank.worker.rank != first:
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
        rank = self._rank
        self._check_optimizer()
        if (sizes := self._group_sizes()) != self._sizes:
            if not rank.whole or rank.strategy.traits().phases:
                raise InputError(
                    "the optimizer's parameter groups have other parameters than when distribute "
                    f"was called, which other ranks under {rank.strategy!r} do not know of: make "
                    "all groups before, with lr=0 where they are to wait"
                )
            self._sizes, rank.worker.optimizer = sizes, rank.optimizer_spec()
        if self._collected:
            self._collected = False
            self._release_moments()

    def take_over(self, *, mid_epoch: bool) -> bool:
        """Collective over the workers, before a step: take over what the user has loaded.

        `mid_epoch`: this worker has had batches of the epoch. Return whether the strategy has
        started anew.
        """
        rank, model, moments = self._rank, self._loaded_model, self._loaded_moments
        self._loaded_model = self._loaded_moments = False
        if not rank.is_worker() or rank.ended:
            return False
        moved = moments and not rank.whole  # to where the strategy keeps them
        if not moved and not (model and not (rank.whole and rank.synchronous)):
            return False
        if mid_epoch and rank.source() is not None:
            raise InputError(
                "load_state_dict(): workers take unlike numbers of batches, so that no step is "
                "known from which it would count: load before the epoch, or set work='equal' in "
                "distribute"
            )
        parameters = rank.worker.named_parameters()
        self._restart(spec.export_moments(self._optimizer, parameters) if moved else None)
        return True

    def _restart(self, moments: spec.Moments | None) -> None:
        """Collective: start anew, with `moments`, or those that there were."""
        rank, worker = self._rank, self._rank.worker
        consumed, groups = worker.step.consumed, spec.get_options(self._optimizer)
        put_back = worker.keep()

        def renew(kept: exchange.Kept) -> None:
            self._kept = kept
            own = [moments, consumed, groups]
            loaded, worker.step.consumed, options = rank.hand_out(lambda _: own)
            put_back()
            self._set_options(options)
            if loaded is None and self._moments_are_apart:
                loaded = self._all_moments()
            worker.inherited = loaded or {}

        rank.phases.begin_anew(renew)
        self._inherited |= moments is not None or bool(worker.inherited)
        self._release_moments()
        worker.inherited = {}

    def _set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set options of the groups, also of optimizers that are made elsewhere or later."""
        spec.set_options(self._optimizer, groups)
        self._rank.worker.optimizer = self._rank.optimizer_spec()

    # Coming to rest, agreeing and saving

    def rest(self, reason: Reason) -> None:
        """Wait until nothing is in flight anywhere; from workers servers learn the `reason`."""
        self._kept = self._rank.phases.rest(reason)

    def agree(self) -> None:
        """Collective over all ranks, at rest: let all have the model that was learnt, and go on."""
        rank = self._rank
        rank.phases.agree(self._kept)
        # Replicas that differ have averaged buffers; others take the first one's.
        exchange.broadcast_buffers(rank.worker, rank.worker.everyone)

    def collect(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Collective over all ranks, at rest: return the states of all on the first worker; go on.

        `order` holds the generators from which this rank's order of the samples follows.
        """
        rank, worker = self._rank, self._rank.worker
        parameters = worker.named_parameters() if rank.is_worker() else {}
        own = capture(checkpoints.rank_state(rank.phases, parameters))
        own |= {"moments": self._own_moments(), "order": order}
        if not rank.is_worker():
            own["buffers"] = {}
        self._collected = True
        ranks = rank.gather(own, worker.workers.ranks[0])
        if ranks and not rank.whole:  # until the next step
            self._install(self._joined(each["moments"] for each in ranks.values()))
        rank.phases.go_on()
        return {str(number): each for number, each in ranks.items()}

    def _own_moments(self) -> list[dict[str, Any]]:
        return [each for part in self._kept.parts for each in part.moments()]

    def _joined(self, ranks: Iterable[Sequence[Any]]) -> spec.Moments:
        worker = self._rank.worker
        parts = [part for parts in ranks for part in parts]
        elementwise = worker.optimizer.elementwise
        return spec.join_moments(parts, worker.named_parameters(), elementwise=elementwise)

    def _install(self, moments: spec.Moments) -> None:
        parameters = self._rank.worker.named_parameters()
        for name, state in moments.items():
            # Moments of equal content travelled as one tensor, and an optimizer changes them.
            self._optimizer.state[parameters[name]] = map_tensors(state, Tensor.clone)

    # Going on from a state

    def load(self, state: Mapping[str, Any]) -> None:
        """Collective over the workers, and the ranks that serve: go on from a `state` that fits."""
        self._loaded_model = self._loaded_moments = self._collected = False
        self._resume(state["ranks"], [state["position"]["consumed"], state["groups"]])
        self._rank.steps = state["position"]["steps"]

    def _resume(self, ranks: Mapping[str, Any], common: Any) -> None:
        rank, worker = self._rank, self._rank.worker
        rank.phases.finish(Reason.RESUME)
        exchange.wait_for_everyone(worker)
        own, (consumed, groups) = rank.hand_out(lambda number: [ranks[str(number)], common])
        parameters = worker.named_parameters()
        for name, values in own["parameters"].items():
            restore(parameters[name], values)
        worker.step.consumed = consumed
        rank.prepare_start()
        self._set_options(groups)
        self._restoring = True
        try:
            copied = map_tensors(own["strategy"], Tensor.clone)  # an optimizer goes on with them
            rank.phases = checkpoints.resume(worker, rank.strategy, own | {"strategy": copied})
        finally:
            self._restoring = False
        self._inherited = True

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Go on with the moments of another rank's optimizer, which no strategy has to learn of."""
        self._restoring = True
        try:
            self._optimizer.load_state_dict(state)
        finally:
            self._restoring = False

    # Ranks that serve

    def serve(self) -> Reason:
        """On a rank without data, serve until all workers rest; return why they do.

        Where the strategy changes its phase, begins anew, goes on from a state, or ends, that is
        done here.
        """
        phases = self._rank.phases
        paused = phases.member.serve()
        # At the end of a script workers leave without a rest: others may still train.
        rest = Rest(Reason.END) if paused is None else paused.rest
        reason = rest.reason
        if reason is Reason.PHASE:
            phases.change(rest)
        elif reason is Reason.RESTART:
            self._restart(None)
        elif reason is Reason.RESUME:
            self._resume({}, None)
        elif reason in (Reason.END, Reason.NEXT_LOOP):
            self.end(reason)
        else:
            self.rest(reason)
        return reason

    # The end

    def end(self, reason: Reason) -> None:
        """Collective over all ranks: end the strategy; what was loaded last stays in the model.

        Before the NEXT_LOOP every rank's optimizer gets all moments.
        """
        rank = self._rank
        put_back = rank.worker.keep() if self._loaded_model else None
        self._kept = rank.phases.finish(reason)
        if put_back is not None:
            put_back()
        if reason is Reason.NEXT_LOOP and self._moments_are_apart:
            self._install(self._all_moments())

    @property
    def _moments_are_apart(self) -> bool:
        """True if no worker's optimizer has all moments; the same on all ranks."""
        return self._rank.phases.traits.optimizer is not Partition.REPLICATED

    def _all_moments(self) -> spec.Moments:
        """Collective: return all moments, as they were at the last rest, or were loaded since."""
        rank, worker = self._rank, self._rank.worker
        first = rank.places()[0]
        gathered = rank.gather(self._own_moments(), first)
        if worker.rank != first:
            received: spec.Moments = checkpoints.receive_state(worker.transport, first, {})
            return received
        moments = self._joined(gathered.values())
        if self._loaded_moments:
            moments = spec.export_moments(self._optimizer, worker.named_parameters())
        for other in gathered.keys() - {first}:
            checkpoints.send_state(worker.transport, moments, other)
        return moments

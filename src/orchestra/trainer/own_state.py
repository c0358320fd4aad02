"""The state of a loop of the user's own: collected on the first worker, and handed out again."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestra import exchange
from orchestra.data.random_state import random_state, restore_random_state
from orchestra.errors import InputError, PeerLost
from orchestra.optimizers.spec import get_options, set_options
from orchestra.optimizers.state import Moments, capture, export_moments, join_moments, restore
from orchestra.strategies.base import Strategy
from orchestra.trainer.checkpoints import Tensors, by_content, give, take, unpack
from orchestra.trainer.own_model import Hook, check_fits, settings_of
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker

if TYPE_CHECKING:
    from orchestra.trainer.own_loop import OwnLoop

LOADED: tuple[object, str] = contextlib.nullcontext(), "__exit__"
"""Takes anything, and does nothing."""


class Word(enum.IntEnum):
    """What the first worker tells ranks that serve, as all workers leave."""

    OVER = 0  # the script is over
    GOES_ON = 1  # it goes on with another loop
    RESTART = 2  # the strategy starts anew, with what the user has loaded
    RESUME = 3  # it goes on from a state
    HANDS_OVER = 4  # as GOES_ON; first all optimizers get the moments that lie in parts


def agree_on_moments(
    worker: Worker, optimizer: torch.optim.Optimizer, strategy: Strategy[Any]
) -> None:
    """Collective over all ranks, before `start`: let it inherit what `optimizer` has loaded."""
    worker.inherited = export_moments(optimizer, worker.named_parameters())
    if not strategy.synchronous:
        return
    tensors: Tensors = {}
    by_content(capture(worker.inherited), tensors)
    if list(tensors) != exchange.agree_on_data(worker, list(tensors), worker.everyone.ranks[0]):
        raise InputError(
            "the optimizer has other moments than on the first rank: load the same state on every "
            "rank before distribute, or clear it (optimizer.state.clear())"
        )


class OwnState:
    """What `batches.state_dict()` collects, and what is loaded into model, optimizer and batches.

    Parameters and moments that were loaded count from the next step on: where a strategy keeps
    copies of its own, as servers do, it starts anew with them.
    """

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop
        self._worker = loop.worker
        self._loaded_model = self._loaded_moments = self._restoring = False
        self._collected = False  # since the last step: the first worker's optimizer has all moments
        self._inherited = bool(loop.worker.inherited)
        self._release_moments()
        loop.worker.inherited = {}
        optimizer = loop.optimizer
        self._hooks: list[Any] = [
            optimizer.register_state_dict_pre_hook(self._may_be_saved),
            optimizer.register_load_state_dict_post_hook(self._optimizer_loaded),
        ]
        for module in loop.worker.module.modules():
            hook = Hook(self._model_loaded, LOADED)
            self._hooks.append(module.register_load_state_dict_post_hook(hook))

    def close(self) -> None:
        """Let go of model and optimizer."""
        for hook in self._hooks:
            hook.remove()

    @property
    def _whole(self) -> bool:
        """Whether the user's optimizer has the moments, on a worker."""
        loop = self._loop
        return loop.strategy.optimizer_of(loop.state) is loop.optimizer

    def _release_moments(self) -> None:
        """Let the user's optimizer make room for moments that lie elsewhere."""
        if not self._whole:
            self._loop.optimizer.state.clear()

    # What the user does with model and optimizer

    def _may_be_saved(self, _: torch.optim.Optimizer) -> None:
        loop, first = self._loop, self._worker.workers.ranks[0]
        moved = loop.steps > 0 or self._inherited
        if self._restoring or self._whole or loop.batches.ended or not moved:
            return
        if not self._collected:
            raise InputError(
                f"optimizer.state_dict(): under {loop.strategy!r} other ranks have the moments, or "
                "parts of them: save batches.state_dict() in its place; every worker calls that, "
                "and the first one's optimizer has all moments then, until the next step"
            )
        if self._worker.rank != first:
            raise InputError(
                f"optimizer.state_dict(): batches.state_dict() has collected the moments on rank "
                f"{first}: save them there (if orchestra.is_first())"
            )

    def _optimizer_loaded(self, _: torch.optim.Optimizer) -> None:
        self._loaded_moments = self._loaded_moments or not self._restoring

    def _model_loaded(self, *_: Any) -> None:
        self._loaded_model = True

    def step_begins(self) -> None:
        """What was collected is of the past."""
        if self._collected:
            self._collected = False
            self._release_moments()

    def take_over(self) -> None:
        """Collective over the workers, before a step: what the user has loaded counts."""
        loop = self._loop
        model, moments = self._loaded_model, self._loaded_moments
        self._loaded_model = self._loaded_moments = False
        if not loop.batches.is_worker() or loop.batches.ended:
            return
        if moments:
            self._worker.optimizer = loop.optimizer_spec()
        whole, synchronous = self._whole, loop.strategy.under_way(loop.state).synchronous
        if not (moments and not whole) and not (model and not (whole and synchronous)):
            return
        if loop.batches.taken and loop.strategy.work(loop.state) is not None:
            raise InputError(
                "load_state_dict(): workers take unlike numbers of batches, so that no step is "
                "known from which it would count: load before the epoch, or set work='equal' in "
                "distribute"
            )
        loaded = None
        if moments and not whole:
            loaded = export_moments(loop.optimizer, self._worker.named_parameters())
        self.tell(Word.RESTART)
        self._restart(loaded)

    def _restart(self, moments: Moments | None) -> None:
        """Collective: start anew, with `moments`, or those that there were."""
        loop, worker = self._loop, self._worker
        before = loop.strategy.optimizer_parts(worker, loop.state)
        loaded: dict[str, Any] = {
            "moments": moments,
            "consumed": worker.step.consumed,
            "groups": get_options(loop.optimizer),
        }
        put_back = self._keep_model()

        def renew() -> None:
            nonlocal loaded
            loaded = self._hand_out(dict.fromkeys(worker.everyone.ranks, loaded), loaded)
            put_back()
            self._set_options(loaded["groups"])
            worker.step.consumed = loaded["consumed"]
            worker.inherited = loaded["moments"] or {}

        loop.state = loop.strategy.restart(worker, loop.state, renew)
        worker.inherited = {}
        if loaded["moments"] is not None:
            self._inherited = True
            self._release_moments()
            return
        after = loop.strategy.optimizer_parts(worker, loop.state)
        for old, new in zip(before, after, strict=True):
            restore(new.optimizer, capture(old.optimizer))

    def _keep_model(self) -> Callable[[], None]:
        """Return what puts parameters and buffers back to what they are now."""
        own = [self._worker.parameters, *(buffer for _, buffer in self._worker.buffers)]
        kept = [tensor.clone() for tensor in own]
        return lambda: restore(own, kept)

    def _set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set weight decay and the like, also of optimizers that are made elsewhere or later."""
        set_options(self._loop.optimizer, groups)
        self._worker.optimizer = self._loop.optimizer_spec()

    # Collecting

    def collect(self) -> dict[str, Any]:
        """Collective over all ranks, with nothing in flight: what each has, on the first worker."""
        worker, first = self._worker, self._worker.workers.ranks[0]
        own = self._own()
        self._collected = True
        if worker.rank != first:
            give(worker.transport, own, first)
            return {}
        known: Tensors = {}
        ranks = {}
        for rank in worker.everyone.ranks:
            if rank == first:
                ranks[str(rank)] = unpack(by_content(own, known), known)
            else:
                ranks[str(rank)] = take(worker.transport, rank, known)
        if not self._whole:  # until the next step
            self._install(self._joined(each["moments"] for each in ranks.values()))
        return ranks

    def _own(self) -> dict[str, Any]:
        loop, worker = self._loop, self._worker
        works = loop.batches.is_worker()
        return {
            "parameters": worker.named_parameters() if works else {},
            "buffers": dict(worker.buffers) if works else {},
            "strategy": capture(loop.state),
            "moments": self._own_moments(),
            "rates": list(worker.step.rates),
            "rate_scale": worker.rate_scale,
            "random": random_state(),
            "order": loop.batches.order_state(),
        }

    def _own_moments(self) -> list[dict[str, Any]]:
        with_parts = self._loop.strategy.optimizer_parts(self._worker, self._loop.state)
        return [each for part in with_parts for each in part.moments()]

    def _joined(self, ranks: Iterable[Sequence[Any]]) -> Moments:
        parts = [part for parts in ranks for part in parts]
        elementwise = self._worker.optimizer.elementwise
        return join_moments(parts, self._worker.named_parameters(), elementwise=elementwise)

    def _install(self, moments: Moments) -> None:
        parameters = self._worker.named_parameters()
        for name, state in moments.items():
            self._loop.optimizer.state[parameters[name]] = _copied(state)  # equal ones were one

    def saved(self, ranks: Mapping[str, Any]) -> dict[str, Any]:
        """The whole of a state, with what was collected of the `ranks`."""
        loop, batches = self._loop, self._loop.batches
        return {
            "settings": settings_of(loop),
            "position": {
                "epoch": batches.epoch,
                "taken": batches.taken - (loop.counts.ahead or 0),
                "length": batches.length,
                "order": batches.order,
                "backwards": loop.backwards if batches.taken else 0,
                "consumed": self._worker.step.consumed,
                "steps": loop.steps,
            },
            "groups": get_options(loop.optimizer),
            "ranks": dict(ranks),
        }

    # Going on from a state

    def load(self, state: Mapping[str, Any]) -> None:
        """Collective over the workers, and the ranks that serve: go on from what `saved` gave."""
        check_fits(self._loop, state)
        loop, position = self._loop, state["position"]
        self._loaded_model = self._loaded_moments = self._collected = False
        self.tell(Word.RESUME)
        ranks = state["ranks"]
        self._resume(ranks, {"consumed": position["consumed"], "groups": state["groups"]})
        loop.steps = position["steps"]
        loop.batches.go_on_from(position, ranks[str(self._worker.rank)]["order"])

    def _resume(self, ranks: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        loop, worker = self._loop, self._worker
        loop.strategy.stop(worker, loop.state)
        exchange.wait_for_everyone(worker)
        parts = {int(rank): {**part, **common} for rank, part in ranks.items()}
        own = self._hand_out(parts, parts.get(worker.rank))
        tensors = {**worker.named_parameters(), **dict(worker.buffers)}
        for name, values in {**own["parameters"], **own["buffers"]}.items():
            restore(tensors[name], values)
        worker.step.consumed, worker.step.rates = own["consumed"], tuple(own["rates"])
        loop.prepare_start()
        self._set_options(own["groups"])
        self._restoring = True
        try:
            loop.state = loop.strategy.resume(worker, _copied(own["strategy"]))
        finally:
            self._restoring = False
        worker.rate_scale = own["rate_scale"]
        self._inherited = True
        restore_random_state(own["random"])

    # Ranks that serve

    def tell(self, word: Word) -> None:
        """On workers, before they stop: the first one tells ranks that serve what follows."""
        first, serving = self._places()
        if self._worker.rank == first:
            for rank in serving:
                with contextlib.suppress(PeerLost):
                    self._worker.transport.send(torch.tensor([word]), rank, Tag.GOES_ON).wait()

    def hear(self) -> Word:
        """On a rank that serves, once it has stopped: what follows."""
        first, _ = self._places()
        try:
            return Word(int(self._worker.transport.receive(first, Tag.GOES_ON).wait()))
        except PeerLost:
            return Word.OVER

    def _places(self) -> tuple[int, list[int]]:
        """Return the first worker, and the ranks that serve, of those that are there."""
        workers, everyone = self._loop.batches.workers, self._worker.everyone.ranks
        first = next(rank for rank in workers if rank in everyone)
        return first, [rank for rank in everyone if rank not in workers]

    def _hand_out(self, parts: Mapping[int, Any], own: Any) -> Any:
        """Let the first worker give each rank that serves its part; a worker has its `own`."""
        transport, (first, serving) = self._worker.transport, self._places()
        if self._worker.rank in serving:
            return take(transport, first, {})
        if self._worker.rank == first:
            for rank in serving:
                give(transport, parts[rank], rank)
        return own

    def follow(self, word: Word) -> None:
        """On a rank that serves: do what the workers do."""
        if word is Word.RESTART:
            self._restart(None)
        else:
            self._resume({}, {})

    # The end

    def last_word(self, word: Word) -> Word:
        """On a worker: whether moments are handed over where the script goes on."""
        moments_stay = self._whole or self._loaded_moments
        return Word.HANDS_OVER if word is Word.GOES_ON and not moments_stay else word

    def stop(self) -> None:
        """Stop the strategy; what was loaded since the last step stays in the model."""
        put_back = self._keep_model() if self._loaded_model else None
        self._loop.strategy.stop(self._worker, self._loop.state)
        if put_back is not None:
            put_back()

    def hand_over(self) -> None:
        """Collective, after the end: every rank's optimizer gets all moments."""
        worker, first = self._worker, self._places()[0]
        own = self._own_moments()
        others = [rank for rank in worker.everyone.ranks if rank != first]
        if worker.rank != first:
            give(worker.transport, own, first)
            joined = take(worker.transport, first, {})
        else:
            joined = self._joined([own, *(take(worker.transport, rank, {}) for rank in others)])
            for rank in others:
                give(worker.transport, joined, rank)
        self._install(joined)


def _copied(value: Any) -> Any:
    """Return `value` with copies of its tensors: an optimizer goes on with those that it loads."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value

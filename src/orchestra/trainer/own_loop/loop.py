"""A loop of the user's own: `loss.backward()` is half of a step, `optimizer.step()` the other."""

from __future__ import annotations

import functools
import math
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from orchestra.data.loaders import Loader
from orchestra.errors import InputError
from orchestra.optimizers.spec import changed_options, get_rates, set_options, set_rates
from orchestra.strategies.base import Strategy
from orchestra.trainer.own_loop import checks
from orchestra.trainer.own_loop.batches import Batches
from orchestra.trainer.own_loop.dealer import Dealer
from orchestra.trainer.own_loop.epochs import ENDED, Epochs
from orchestra.trainer.own_loop.group import OwnGroup, Regroup, refusal_to_regroup
from orchestra.trainer.own_loop.last_backward import LastBackward
from orchestra.trainer.own_loop.passes import BackwardPasses
from orchestra.trainer.own_loop.rank import OwnRank
from orchestra.trainer.own_loop.saving import Saver
from orchestra.trainer.own_loop.scale import LossScale
from orchestra.trainer.own_loop.strategy_state import StrategyState
from orchestra.worker.runtime import RankActivity, Runtime, Work
from orchestra.worker.worker import Step, Worker


class OwnLoop:
    """Ties a strategy to a model, an optimizer and a loader that a user drives.

    `accumulation` is how many times the user calls `backward` for one `step`: only the last one
    exchanges. Where an epoch ends with fewer, `step` does. Where there are more, each one that is
    complete is exchanged again, together with the average of those before, which stays what it is.
    With `regroup` it goes on where ranks are lost or join; a rank that `enters` waits until it is
    taken in.
    `loader` may be the batches of another loop, whose models are trained by turns on each of them.
    """

    _pending = False  # a gradient that was not exchanged yet
    _stepping = _handed_over = False
    _averaged = True  # all workers have the gradient of the last backward
    _closure: Callable[[], Any] | None = None  # of the step under way

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader | Batches,
        strategy: Strategy,
        *,
        accumulation: int = 1,
        seed: int = 0,
        work: str = "shared",
        bucket_megabytes: float = 25.0,
        overlap: bool = True,
        regroup: Regroup | None = None,
        enters: bool = False,
    ) -> None:
        checks.check_roles(strategy, runtime.ranks)
        checks.check_model(model, optimizer, len(strategy.roles(runtime.ranks).workers))
        self.optimizer, self.strategy = optimizer, strategy
        self._traits = strategy.traits()  # of all phases
        lead = None
        if isinstance(loader, Batches):
            first, loader = loader.iteration.lead, loader.loader
            lead = None if first.ended else first
        # Accumulation finds a short last step by the number of batches, unknown to a queue.
        queued = work == "shared" and accumulation == 1
        if regroup is not None:
            refusal = refusal_to_regroup(strategy, loader, accumulation)
            if refusal is not None:
                raise InputError(f"min_ranks: {refusal}")
        self.dealer = Dealer(
            loader, seed, queued=queued, leads=lead is None, elastic=regroup is not None
        )
        self.rank = OwnRank(
            runtime, model, optimizer, strategy, self.dealer.queue_of,
            bucket_bytes=int(bucket_megabytes * 1e6), overlap=overlap,
        )  # fmt: skip
        self.worker = self.rank.worker
        copied = self.worker.layout.device.type != "cpu"
        self._passes, self._scale = BackwardPasses(accumulation, copied=copied), LossScale()
        self._state = StrategyState(self.rank, model)
        self.epochs = Epochs(self.rank, self._state, self.dealer, self._passes, lead)
        self._group: OwnGroup | None = None
        if regroup is not None:
            self._group = self.epochs.group = OwnGroup(self, regroup, enters=enters)
        saver = Saver(self.rank, self._state, self.dealer, self.epochs, self._passes, self._scale)
        self.batches = Batches(
            self.rank, self.dealer, self.epochs, self._passes, saver, self._group
        )
        self._gradients = self.worker.gradients
        self._last = LastBackward(self._gradients.parameters)
        self._audit = checks.Audit(self.worker)
        self._model_hooks = [
            model.register_forward_pre_hook(checks.Hook(self.enter, checks.FORWARD)),
            model.register_state_dict_pre_hook(checks.Hook(self._may_be_saved, checks.STATE_DICT)),
        ]
        _loops[id(self)] = self
        self._gradients.on_backward = self._backward_begins
        self._take_over_step()

    @property
    def begun(self) -> bool:
        """True if training has begun."""
        return self.epochs.begun or self.rank.steps > 0

    def trains(self, parameters: set[nn.Parameter]) -> bool:
        """Return whether one of `parameters` is trained here."""
        return not parameters.isdisjoint(self._gradients.parameters)

    def enter(self, module: nn.Module, _: Any) -> None:
        """Prepare for a forward pass of `module`, which may be the first one of a step."""
        self.worker.compute.run(Work("forward", 0), lambda: None)  # a sign of life
        if not torch.is_grad_enabled():
            return
        self._passes.forward()
        changed = self._passes.complete and self._last.parameters_changed
        if changed and self._knows_only_steps:
            raise self._unknown_change("after backward() without step()")
        if module.training and self._passes.open:
            self._guarded(self.epochs.begin_step)

    @property
    def _is_void(self) -> bool:
        """True if nothing comes of the step under way, as the group of ranks has changed."""
        return self._group is not None and self._group.void

    def _guarded(self, call: Callable[[], object]) -> bool:
        """Make `call`, which waits for other ranks; return whether it has come to its end."""
        if self._group is not None:
            return self._group.guarded(call)
        call()
        return True

    def _may_be_saved(self, *_: Any) -> None:
        """Refuse that somebody reads parameters by name which are this worker's alone."""
        if self.epochs.left and not self.rank.synchronous and len(self.worker.workers) > 1:
            raise InputError(
                f"the loop was left before the epoch's end, and under {self.strategy!r} each "
                "worker's model is another one: call batches.agree() on every worker before "
                "state_dict(), or let the epoch end"
            )

    # The first half: at the end of the last backward of a step

    def _backward_begins(self) -> None:
        """Begin the exchange in the last backward of a step; called for each of its gradients."""
        passes, epochs = self._passes, self.epochs
        if self._is_void:
            self._gradients.last_backward = False
            return
        if passes.under_way:
            return
        passes.backward()
        if self._scale.rescale < 1.0 or self._last.is_cleared():
            self.worker.undo_exchange()
        if passes.ahead and not self.rank.synchronous:
            raise InputError(
                f"the next batch was taken before backward(), but under {self.strategy!r} workers "
                "come together when the batches are over, so the last one would come too late: "
                "take a batch after the step of the one before (num_workers loads ahead)"
            )
        passes.under_way = True
        # autograd has no public hook for the end of a backward pass; DDP and FSDP use this, too.
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        last = passes.exchanges(lambda: epochs.taken == self.dealer.length)
        self._gradients.last_backward = last
        if last:
            self._begin_exchange()

    def _backward_ends(self) -> None:
        self._passes.end()
        self._pending = not self._gradients.last_backward
        if not self._pending:
            if not self._guarded(self._reduce):
                return
            self._averaged = self.worker.step.loss_is_global
        self._last.note()

    def _reduce(self) -> None:
        rank = self.rank
        rank.phases.member.exchange()
        if not self._gradients.alike:
            raise rank.ledger.refusal(rank.steps)

    def _begin_exchange(self) -> None:
        worker, rank = self.worker, self.rank
        self._gradients.digest = rank.ledger.digest(worker.phase) & 0xFFFF
        count, new = self._passes.exchange()
        rescale = self._scale.rescale
        item = self.dealer.item
        self._gradients.await_collection()
        worker.begin_step(
            Step(
                samples=count.weight,
                total_samples=count.total,
                consumed=worker.step.consumed + new if item is None else item.stop,
                position=None if item is None else item.start,
                epoch=self.epochs.epoch,
                rates=get_rates(self.optimizer),
                loss=rank.loss,
                rescale=rescale,
            )
        )
        self._scale.of_exchange *= rescale

    # The second half: in optimizer.step()

    def _take_over_step(self) -> None:
        original, loop = self.optimizer.step, self

        @functools.wraps(original)  # a scheduler that was made before looks for its mark on it
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            # The strategy's update calls the optimizer, and so this function.
            if loop._stepping:
                return original() if loop._closure is None else original(loop._closure)
            if loop.rank.ended:
                if loop._handed_over:
                    return original(closure)
                raise InputError(f"optimizer.step(): {ENDED}")
            if loop._is_void:
                return None if closure is None else closure()
            loss = None if closure is None else loop._begin_closure(closure)
            if not loop._is_void and loop._has_gradient():
                loop._scale.look_for_scaler()
                loop._refuse_skipping()
                loop._guarded(loop._update)
            return loss

        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]

    def _begin_closure(self, closure: Callable[[], Any]) -> Any:
        """Return the closure's loss, whose gradient the step takes.

        An optimizer of the user's own gets a closure, too, and calls it as often as it likes; the
        loss is its first answer, unless the optimizer has changed the parameters before.
        """
        known, passes = not self._passes.complete, self._passes
        own = not type(self.optimizer).__module__.startswith("torch.optim")
        if own and not self.rank.whole:
            raise InputError(
                f"optimizer.step(closure): {type(self.optimizer).__name__} may call the closure "
                f"again, but under {self.strategy!r} other optimizers make the step: call "
                "backward() and step(), or take AllReduce without shards"
            )
        # As torch's optimizers do, whose `step` runs without gradients.
        with torch.enable_grad():
            loss = closure() if known or not own else None

        def again() -> Any:
            nonlocal known
            if known and not self._last.parameters_changed:
                known = False
                return loss
            passes.entered = True  # the step has begun
            with torch.enable_grad():
                other = closure()
            if self._pending:
                raise InputError(
                    "optimizer.step(closure): with accumulation or batches.accumulate() a further "
                    "call of the closure is not averaged: leave them out"
                )
            return other

        self._closure = again if own else None
        return loss

    @property
    def _knows_only_steps(self) -> bool:
        """True if the strategy would not learn of a change that anything but `step` makes now."""
        exact = self._averaged and not self._traits.phases
        return not (exact or self._stepping or self.rank.ended or len(self.worker.workers) == 1)

    def before_others_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step of any optimizer: refuse one that the strategy would not know of."""
        if optimizer is not self.optimizer and self._knows_only_steps:
            trained = {each for group in optimizer.param_groups for each in group["params"]}
            if self.trains(trained):
                name = type(optimizer).__name__
                raise self._unknown_change(f"by a step of another optimizer, {name}")

    def _unknown_change(self, how: str) -> InputError:
        return InputError(
            f"parameters of the model change {how}, and {self.strategy!r} learns only of steps of "
            "the optimizer that distribute was given: give that one all parameters, in groups; for "
            "steps in two halves (SAM) call step(closure), or take AllReduce"
        )

    def _has_gradient(self) -> bool:
        """Return whether a step is to be made; without any gradient an optimizer makes none."""
        if self._passes.under_way:
            # The end of a backward pass that raises an exception is never reported.
            self._passes.under_way = False
            raise InputError(
                "optimizer.step(): the last backward() ended with an exception, so that its "
                "gradient is not complete: call backward() again, or end the script"
            )
        if self._passes.complete:
            return True
        unreached = self._passes.reaches_nothing() and self.dealer.item is None
        grads = [parameter.grad for parameter in self._gradients.parameters]
        if any(grad is not None and (not unreached or grad.any()) for grad in grads):
            raise InputError(
                "optimizer.step(): there was no backward() since the last step, so the gradients "
                "are not those of all workers: one loss.backward() at least for each step()"
            )
        if unreached:  # the loss of another worker may have reached one: a gradient of 0 goes there
            self._passes.backward()
            self._passes.end()
            self._pending = True
            self._last.note()
        return unreached

    def _refuse_skipping(self) -> None:
        """Refuse an optimizer that skips steps by itself where others make them."""
        if hasattr(self.optimizer, "found_inf") and not self.rank.whole:
            raise InputError(
                "optimizer.step(): a GradScaler lets fused optimizers skip steps, but under "
                f"{self.strategy!r} other ranks take the step, or parts of it: make the optimizer "
                "with fused=False"
            )

    def _update(self) -> None:
        worker, rank, epochs = self.worker, self.rank, self.epochs
        self._audit.check(self.optimizer)
        # Before anything that waits: the watcher compares whether all ranks have called step().
        worker.reporter.progress(step=rank.steps + 1, samples=worker.step.consumed)
        # The hook of the whole model saw no forward pass in training mode: the loop trains in
        # evaluation mode, or a part of the model. From the next batch on steps begin with it.
        epochs.steps_begin_with_batches |= not self._passes.entered
        epochs.begin_step()
        self._state.begin_update()
        self._take_changes()
        if self._traits.reads_loss and math.isnan(rank.loss):
            raise InputError(
                f"{self.strategy!r} watches the training loss, which this loop keeps to itself: "
                "call batches.report(loss.item()) before loss.backward()"
            )
        behind = self._passes.step()
        if self.dealer.item is None:  # else what was accumulated before counts as passed over
            worker.step.samples, worker.step.total_samples = behind.weight, behind.total
        rank.ledger.enter(worker.phase, epochs.epoch, epochs.taken)
        self._stepping = True
        rates = get_rates(self.optimizer)
        worker.set_rates(rates)
        if not rank.whole:
            before = [options for _, options in worker.optimizer.groups]
            worker.step.options = changed_options(self.optimizer, before)
        try:
            rank.update()
        finally:
            # A strategy may scale rates for its update; the user's scheduler goes on from its own.
            set_rates(self.optimizer, rates)
            self._stepping, self._closure = False, None
        if self._passes.complete:  # by the closure, which the optimizer has called again
            self._passes.step()
        self.dealer.item = None
        self._last.forget()
        # A fused optimizer skips a step by itself, where a GradScaler has found infinities.
        if getattr(self.optimizer, "found_inf", False):
            worker.undo_exchange()
        worker.undo_exchange = Worker.undo_exchange
        self._gradients.forget()
        rank.steps += 1
        if self._group is not None:
            taken = epochs.taken - (self._passes.ahead or 0)
            self._group.step_done(self.dealer.position(taken))
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers

    def _take_changes(self) -> None:
        """Take over what the user has made of the gradient, such as clipping it.

        A step after fewer backward passes, the last ones of an epoch, exchanges it here.
        """
        changed = any(self._last.changes())
        self._gradients.take_users()
        several = len(self.worker.workers) > 1
        if self._pending:
            if changed and several and self.rank.synchronous:
                raise InputError(
                    "the gradient was changed before step(), as clipping does, after fewer than "
                    f"accumulation={self._passes.accumulation} backward passes, so that it is not "
                    "averaged yet: leave out accumulation, which then exchanges after each of them"
                )
            while not self._passes.ahead and self._passes.count_unreached():
                pass
            self._begin_exchange()
            self._reduce()
        elif changed and several and self.rank.synchronous and not self.worker.step.loss_is_global:
            raise InputError(
                f"the gradient was changed between backward() and step(), as clipping does, but "
                f"{self.strategy!r} averages it in step() only, so that each worker would clip by "
                "a norm of its own: set returns='gradients', which averages it in backward()"
            )

    # Another group of ranks

    def move(self, runtime: Runtime) -> None:
        """Go on in another group, from where this rank was; the step under way is void."""
        self.rank.move(runtime)
        self.worker = worker = self.rank.worker
        self._gradients = worker.gradients
        self._gradients.on_backward = self._backward_begins
        self._last, self._audit = LastBackward(self._gradients.parameters), checks.Audit(worker)

    def begin_anew(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Collective: begin the strategy anew, with these options of the optimizer, from a model
        and moments that all have equal."""
        set_options(self.optimizer, groups)
        self.rank.begin_anew()
        self._passes.begin_epoch(0)

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Go on with the moments of another rank's optimizer."""
        self._state.load_optimizer(state)

    def forget_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """After a void step: let the next one begin with these options, without a gradient."""
        set_options(self.optimizer, groups)
        self._gradients.clear()
        self._last.forget()
        self._pending = False
        self._passes.complete = self._passes.under_way = False
        self.worker.undo_exchange = Worker.undo_exchange

    # The end

    def finish(self, *, goes_on: bool = False) -> None:
        """End this loop, and leave in order, whatever the others still do.

        Ranks that serve learn whether the script `goes_on` with another loop.
        """
        if goes_on:
            self.worker.reporter.activity(RankActivity.TRAINING)
        self.epochs.end_loop(goes_on=goes_on)

    def close(self, *, handed_over: bool) -> None:
        """Release the model, and the optimizer if it is `handed_over`. Called after `finish`."""
        self._handed_over = handed_over
        for hook in self._model_hooks:
            hook.remove()
        self._state.close()


_loops: weakref.WeakValueDictionary[int, OwnLoop] = weakref.WeakValueDictionary()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for held in _loops.valuerefs():
        if (loop := held()) is not None:
            loop.before_others_step(optimizer)


# One hook for all, as torch lets no thread add one while another thread makes a step.
register_optimizer_step_pre_hook(_before_step)

"""A loop of the user's own: `loss.backward()` is half of a step, `optimizer.step()` the other.

And its batches, as a script iterates, saves and resumes them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from orchestra.coordinator.rest import Reason
from orchestra.data.loaders import Loader
from orchestra.errors import InputError
from orchestra.optimizers.spec import changed_options, get_options, get_rates, set_rates
from orchestra.strategies.base import Strategy
from orchestra.trainer.own_loop import model as checks
from orchestra.trainer.own_loop.epochs import ENDED, Epochs
from orchestra.worker.batches import digest
from orchestra.worker.runtime import Runtime, Work
from orchestra.worker.worker import Step, Worker


class Batches(Epochs):
    """The user's loader, dealt out to the workers; iterate it as before, once an epoch.

    When an iteration ends, every worker's model holds the agreed parameters. A rank that has become
    a server gets nothing more: its iterations serve until the workers' epoch is over, and the one
    after the workers have left ends its script, with status 0. Where workers take batches from a
    queue, which `queued` loads, they get unlike numbers of them.
    """

    scaler: torch.amp.GradScaler | None = None  # that multiplies the loss, once it has made a step
    scale = 1.0  # by which the gradient that was exchanged last is multiplied

    @property
    def rescale(self) -> float:
        """What the scale of gradients was multiplied by since the last exchange."""
        now = 1.0 if self.scaler is None else self.scaler.get_scale()
        return now / (self.scale or 1.0)

    # Saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training; every worker calls it, between two steps.

        It holds parameters, buffers and moments as each rank has them, slices on servers included,
        the epoch and the place in it, and random generators: plain data and tensors, for
        torch.save. Save the state of the first worker, which alone is complete. InputError if it
        cannot be taken at this place; the message says where it can.
        """
        ranks = {}
        if not self._is_over():
            if self.is_worker():
                # Refused on each worker alike, before anything collective begins
                self._check_place()
                self.take_over()
                # Servers learn of the saving by this step of the pause
                self.rest(Reason.SAVE)
                ranks = self.collect(self._order_state())
                self.phases.go_on()
            else:
                self._serve(until_saved=True)
        return {
            "settings": self._settings(),
            "position": self._position(),
            "groups": get_options(self.optimizer),
            "ranks": ranks,
        }

    def _position(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            # Batches that were taken ahead have had no step: they are read again.
            "taken": self.taken - (self.passes.ahead or 0),
            "length": self.length,
            "order": self._order_number,
            "backwards": self.passes.done if self.taken else 0,
            "consumed": self.worker.step.consumed,
            "steps": self.steps,
            "rescale": self.rescale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; every worker calls it with the first worker's `state_dict()`.

        Call it after `distribute` and before the loop over these batches, whose first iteration
        goes on where the epoch was left. InputError if `state` is of other settings, or training
        has come too far to go back.
        """
        workers = self.strategy.roles(self.worker.runtime.ranks).workers
        if self._is_over() or self.worker.rank not in workers:  # a server hears of it as it serves
            return
        where = "batches.load_state_dict()"
        if self._in_epoch and not self.left:
            raise InputError(
                f"{where}: an iteration over the batches is under way: call it before the loop "
                "over them, or leave that with break"
            )
        generators = self._generators()
        checks.check_fits(where, state, self._settings(), self.worker, self.length, generators)
        # A switch has happened, and the state is of the roles before it
        if self.roles != self.strategy.roles(self.worker.runtime.ranks):
            raise InputError(
                f"{where}: ranks have changed their roles since the beginning: load before training"
            )
        position, ranks = state["position"], state["ranks"]
        # Workers that go on from unlike states would train unlike models, and nothing would say so
        if not self.alike(digest([position, checks.parameters_in(ranks)])):
            raise InputError(f"{where}: workers load unlike states: give all the same one")
        self.load(state)
        self._go_on_from(position, ranks[str(self.worker.rank)]["order"])

    def start_at(self, batch: int) -> None:
        """Begin the next epoch at its batch number `batch`, from 0."""
        self._go_on_from(self._position() | {"taken": batch, "backwards": 0}, self._order_state())

    def _go_on_from(self, position: Mapping[str, Any], order: dict[str, Any]) -> None:
        """Let the next iteration begin at `position`, as `state_dict` gave it."""
        self.epoch = position["epoch"]
        self.taken = self._resumed_at = position["taken"]
        self._passes_before = position["backwards"]
        self.scaler, self.scale = None, 1.0 / (position.get("rescale") or 1.0)
        self._deal_out()
        if self._sharded is not None:
            self._sharded.epoch = position["order"]
        self.begun = self._in_epoch = self.left = False
        self._order = order
        for generator, state in zip(self._generators(), order["generators"], strict=True):
            generator.set_state(state)

    def _settings(self) -> dict[str, Any]:
        """Return what has to be the same where a state is loaded."""
        return {
            "strategy": repr(self.strategy),
            "ranks": self.worker.runtime.ranks,
            "optimizer": type(self.optimizer).__name__,
            "accumulation": self.passes.accumulation,
            "seed": self._seed,
            "work": "shared" if self._uses_queue else "equal",
        }

    def _check_place(self) -> None:
        """Refuse to save where there is no state that could be gone on from."""
        where = "batches.state_dict()"
        grads = (parameter.grad for parameter in self.worker.gradients.parameters)
        # A GradScaler that found infinities has lowered the scale, in place of a step.
        if self.passes.complete and (self.rescale < 1.0 or all(grad is None for grad in grads)):
            self.worker.undo_exchange()
            self.passes.complete = False
        if self.passes.under_way or self.passes.complete:
            raise InputError(f"{where}: gradients wait for their step: call it after that")
        if self.taken and self.source() is not None:
            raise InputError(
                f"{where} in mid-epoch needs equally many batches on every worker: set "
                "work='equal' in distribute, or save when the epoch has ended"
            )
        if self.taken and self.workers != self._roles.workers:
            raise InputError(
                f"{where}: a rank has become a server in this epoch, so that nobody takes its part "
                "of it: save when the epoch has ended"
            )

    # What else a loop tells

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let this rank take any time inside; the others wait when they need it.

        For work that takes longer than `patience` without a forward pass of the model. Under
        `AllReduce("native")` the collectives of the others give up after four times `patience`.
        """
        reporter = self.worker.reporter
        reporter.phase("paused")
        try:
            yield
        finally:
            reporter.phase("training")

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let `backward()` exchange nothing inside; the next one outside exchanges for all of them.

        As `no_sync` of DistributedDataParallel, for loops that know which one is the last.
        """
        self.passes.paused = True
        try:
            yield
        finally:
            self.passes.paused = False

    def report(self, loss: float) -> None:
        """Tell this step's loss, before `loss.backward()`: for rules that watch it."""
        self.loss = float(loss)


class OwnLoop:
    """Ties a strategy to a model, an optimizer and a loader that a user drives.

    `accumulation` is how many times the user calls `backward` for one `step`: only the last one
    exchanges. Where an epoch ends with fewer, `step` does. Where there are more, each one that is
    complete is exchanged again, together with the average of those before, which stays what it is.
    `loader` may be the batches of another loop, whose models are trained by turns on each of them.
    """

    _pending = False  # a gradient that was not exchanged yet
    _stepping = _handed_over = False
    _averaged = True  # all workers have the gradient of the last backward
    _left_version = 0  # of the parameters, at its end
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
    ) -> None:
        checks.check_roles(strategy, runtime.ranks)
        checks.check_model(model, optimizer, len(strategy.roles(runtime.ranks).workers))
        self.optimizer, self.strategy = optimizer, strategy
        self.batches = Batches(
            runtime, model, optimizer, strategy, loader,
            accumulation=accumulation, seed=seed, work=work,
            bucket_bytes=int(bucket_megabytes * 1e6), overlap=overlap,
        )  # fmt: skip
        self.worker, self._passes = self.batches.worker, self.batches.passes
        self._gradients = self.worker.gradients
        self._left: list[tuple[Tensor | None, int]] = []  # each `.grad` after the last backward
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
        return self.batches.begun or self.batches.steps > 0

    def trains(self, parameters: set[nn.Parameter]) -> bool:
        """Return whether one of `parameters` is trained here."""
        return not parameters.isdisjoint(self._gradients.parameters)

    def enter(self, module: nn.Module, _: Any) -> None:
        """Prepare for a forward pass of `module`, which may be the first one of a step."""
        self.worker.compute.run(Work("forward", 0), lambda: None)  # a sign of life
        if not torch.is_grad_enabled():
            return
        self._passes.forward()
        changed = self._passes.complete and self._version() != self._left_version
        if changed and self._knows_only_steps:
            raise self._unknown_change("after backward() without step()")
        if module.training and self._passes.open:
            self.batches.enter()

    def _may_be_saved(self, *_: Any) -> None:
        """Refuse that somebody reads parameters by name which are this worker's alone."""
        if self.batches.left and not self.batches.synchronous and len(self.worker.workers) > 1:
            raise InputError(
                f"the loop was left before the epoch's end, and under {self.strategy!r} each "
                "worker's model is another one: call batches.agree() on every worker before "
                "state_dict(), or let the epoch end"
            )

    # The first half: at the end of the last backward of a step

    def _backward_begins(self) -> None:
        """Begin the exchange in the last backward of a step; called for each of its gradients."""
        passes, batches = self._passes, self.batches
        if passes.under_way:
            return
        passes.backward()
        if batches.rescale < 1.0 or self._cleared():
            self.worker.undo_exchange()
        if passes.ahead and not batches.synchronous:
            raise InputError(
                f"the next batch was taken before backward(), but under {self.strategy!r} workers "
                "come together when the batches are over, so the last one would come too late: "
                "take a batch after the step of the one before (num_workers loads ahead)"
            )
        passes.under_way = True
        # autograd has no public hook for the end of a backward pass; DDP and FSDP use this, too.
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        last = passes.exchanges(lambda: batches.taken == batches.length)
        self._gradients.last_backward = last
        if last:
            self._begin_exchange()

    def _backward_ends(self) -> None:
        self._passes.end()
        self._pending = not self._gradients.last_backward
        if not self._pending:
            self._reduce()
            self._averaged = self.worker.step.loss_is_global
        self._note_left()

    def _note_left(self) -> None:
        self._left_version = self._version()
        own = [parameter.grad for parameter in self._gradients.parameters]
        self._left = [(grad, 0 if grad is None else grad._version) for grad in own]

    def _cleared(self) -> bool:
        """Return whether gradients were cleared after a backward that had no step. Called at the
        first one of a backward: where they add up, that is the only one that has changed."""
        return bool(self._left) and sum(self._changes()) > 1

    def _changes(self) -> Iterator[bool]:
        """Yield for each parameter whether its gradient is not what the last backward left."""
        for parameter, (before, version) in zip(
            self._gradients.parameters, self._left, strict=True
        ):
            grad = parameter.grad
            # Every change in place, such as clipping, counts up a tensor's version.
            yield grad is not before or (grad is not None and grad._version != version)

    def _reduce(self) -> None:
        self.batches.phases.member.exchange()
        if not self._gradients.alike:
            raise self.batches.ledger.refusal(self.batches.steps)

    def _begin_exchange(self) -> None:
        worker, batches = self.worker, self.batches
        self._gradients.digest = batches.ledger.digest(worker.phase) & 0xFFFF
        count, new = self._passes.exchange()
        rescale = batches.rescale
        item = batches.item
        self._gradients.await_collection()
        worker.begin_step(
            Step(
                samples=count.weight,
                total_samples=count.total,
                consumed=worker.step.consumed + new if item is None else item.stop,
                position=None if item is None else item.start,
                epoch=batches.epoch,
                rates=get_rates(self.optimizer),
                loss=batches.loss,
                rescale=rescale,
            )
        )
        batches.scale *= rescale

    # The second half: in optimizer.step()

    def _take_over_step(self) -> None:
        original, loop = self.optimizer.step, self

        @functools.wraps(original)  # a scheduler that was made before looks for its mark on it
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            # The strategy's update calls the optimizer, and so this function.
            if loop._stepping:
                return original() if loop._closure is None else original(loop._closure)
            if loop.batches.ended:
                if loop._handed_over:
                    return original(closure)
                raise InputError(f"optimizer.step(): {ENDED}")
            loss = None if closure is None else loop._begin_closure(closure)
            if loop._has_gradient():
                loop._look_for_scaler()
                loop._update()
            return loss

        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]

    def _begin_closure(self, closure: Callable[[], Any]) -> Any:
        """Return the closure's loss, whose gradient the step takes.

        An optimizer of the user's own gets a closure, too, and calls it as often as it likes; the
        loss is its first answer, unless the optimizer has changed the parameters before.
        """
        known, passes = not self._passes.complete, self._passes
        own = not type(self.optimizer).__module__.startswith("torch.optim")
        if own and not self.batches.whole:
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
            if known and self._version() == self._left_version:
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

    def _version(self) -> int:
        """Return a number that grows with each change of the parameters in place."""
        return sum(parameter._version for parameter in self._gradients.parameters)

    @property
    def _knows_only_steps(self) -> bool:
        """True if the strategy would not learn of a change that anything but `step` makes now."""
        exact = self._averaged and not self.strategy.traits().phases
        return not (exact or self._stepping or self.batches.ended or len(self.worker.workers) == 1)

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
        unreached = self._passes.reaches_nothing() and self.batches.item is None
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
            self._note_left()
        return unreached

    def _look_for_scaler(self) -> None:
        """Find the GradScaler that calls `step()`, which nothing else tells of."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
            frame = frame.f_back
        if frame is not None:
            self.batches.scaler = scaler = frame.f_locals["self"]
            self.batches.scale = scaler.get_scale()
        if hasattr(self.optimizer, "found_inf") and not self.batches.whole:
            raise InputError(
                "optimizer.step(): a GradScaler lets fused optimizers skip steps, but under "
                f"{self.strategy!r} other ranks take the step, or parts of it: make the optimizer "
                "with fused=False"
            )

    def _update(self) -> None:
        worker, batches = self.worker, self.batches
        self._audit.check(self.optimizer)
        # Before anything that waits: the watcher compares whether all ranks have called step().
        worker.reporter.progress(step=batches.steps + 1, samples=worker.step.consumed)
        # The hook of the whole model saw no forward pass in training mode: the loop trains in
        # evaluation mode, or a part of the model. From the next batch on steps begin with it.
        batches.steps_begin_with_batches |= not self._passes.entered
        batches.enter()
        batches.begin_update()
        self._take_changes()
        if self.strategy.traits().reads_loss and math.isnan(batches.loss):
            raise InputError(
                f"{self.strategy!r} watches the training loss, which this loop keeps to itself: "
                "call batches.report(loss.item()) before loss.backward()"
            )
        behind = self._passes.step()
        if batches.item is None:  # else what was accumulated before counts as passed over
            worker.step.samples, worker.step.total_samples = behind.weight, behind.total
        batches.ledger.enter(worker.phase, batches.epoch, batches.taken)
        self._stepping = True
        rates = get_rates(self.optimizer)
        worker.set_rates(rates)
        if not batches.whole:
            before = [options for _, options in worker.optimizer.groups]
            worker.step.options = changed_options(self.optimizer, before)
        try:
            batches.phases.update()
        finally:
            # A strategy may scale rates for its update; the user's scheduler goes on from its own.
            set_rates(self.optimizer, rates)
            self._stepping, self._closure = False, None
        if self._passes.complete:  # by the closure, which the optimizer has called again
            self._passes.step()
        batches.item = None
        self._left = []
        # A fused optimizer skips a step by itself, where a GradScaler has found infinities.
        if getattr(self.optimizer, "found_inf", False):
            worker.undo_exchange()
        worker.undo_exchange = Worker.undo_exchange
        self._gradients.forget()
        batches.steps += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers

    def _take_changes(self) -> None:
        """Take over what the user has made of the gradient, such as clipping it.

        A step after fewer backward passes, the last ones of an epoch, exchanges it here.
        """
        changed = any(self._changes())
        self._gradients.take_users()
        several = len(self.worker.workers) > 1
        if self._pending:
            if changed and several and self.batches.synchronous:
                raise InputError(
                    "the gradient was changed before step(), as clipping does, after fewer than "
                    f"accumulation={self._passes.accumulation} backward passes, so that it is not "
                    "averaged yet: leave out accumulation, which then exchanges after each of them"
                )
            while not self._passes.ahead and self._passes.count_unreached():
                pass
            self._begin_exchange()
            self._reduce()
        elif (
            changed and several and self.batches.synchronous and not self.worker.step.loss_is_global
        ):
            raise InputError(
                f"the gradient was changed between backward() and step(), as clipping does, but "
                f"{self.strategy!r} averages it in step() only, so that each worker would clip by "
                "a norm of its own: set returns='gradients', which averages it in backward()"
            )

    # The end

    def finish(self, *, goes_on: bool = False) -> None:
        """End this loop, and leave in order, whatever the others still do.

        Ranks that serve are told whether the script `goes_on` with another loop.
        """
        if goes_on:
            self.worker.reporter.phase("training")
        if not self.batches.ended:
            self.batches.end(self.batches.leave(goes_on=goes_on))

    def close(self, *, handed_over: bool) -> None:
        """Release the model, and the optimizer if it is `handed_over`. Called after `finish`."""
        self._handed_over = handed_over
        for hook in self._model_hooks:
            hook.remove()
        self.batches.close()


_loops: weakref.WeakValueDictionary[int, OwnLoop] = weakref.WeakValueDictionary()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for held in _loops.valuerefs():
        if (loop := held()) is not None:
            loop.before_others_step(optimizer)


# One hook for all, as torch lets no thread add one while another thread makes a step.
register_optimizer_step_pre_hook(_before_step)

"""A loop of the user's own: `loss.backward()` runs the first half of a step, `optimizer.step()`
the second.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from orchestra.data.own_loop import Loader, QueuedLoader
from orchestra.errors import InputError
from orchestra.optimizers.spec import OptimizerSpec, get_rates, set_rates
from orchestra.strategies.base import Strategy
from orchestra.strategies.switch import phases
from orchestra.trainer import own_model
from orchestra.trainer.own_batches import Batches
from orchestra.trainer.own_epochs import ENDED
from orchestra.trainer.own_state import OwnState, Word, agree_on_moments
from orchestra.worker.runtime import Runtime, Work
from orchestra.worker.worker import Step, Worker


class OwnLoop:
    """Ties a strategy to a model, an optimizer and a loader that a user drives.

    `accumulation` is how many times the user calls `backward` for one `step`: only the last one
    exchanges. Where an epoch ends with fewer, `step` does. Where there are more, each one that is
    complete is exchanged again, together with the average of those before, which stays what it is.
    `loader` may be the batches of another loop, whose models are trained by turns on each of them.

    Attributes:
        backwards: passes in this epoch, or group of batches.
        steps: that were made.
    """

    _exchange_every: int
    _grouped: bool  # all batches of a step were taken before its first backward
    _entered: bool  # a forward pass of this step has begun
    _in_backward = False
    _complete = False  # a gradient has come since the last step
    _pending = False  # a gradient that was not exchanged yet
    _version = 0  # of the gradients, when they were complete
    _stepping = _handed_over = False

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader | Batches,
        strategy: Strategy[Any],
        *,
        accumulation: int = 1,
        seed: int = 0,
        work: str = "shared",
        bucket_megabytes: float = 25.0,
        overlap: bool = True,
    ) -> None:
        self.strategy = strategy
        roles = strategy.roles(runtime.ranks)
        if len(roles.shares) != runtime.ranks:
            raise InputError(
                f"{strategy!r} runs on {len(roles.shares)} process(es), but {runtime.ranks} were "
                "started: start as many, or name another strategy"
            )
        own_model.check_model(model, optimizer, len(roles.workers))
        _refuse_late_workers(strategy, runtime.ranks)
        self.optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.worker = Worker(
            runtime, model, self.optimizer_spec(), own_optimizer=optimizer,
            bucket_bytes=int(bucket_megabytes * 1e6), overlap=overlap,
        )  # fmt: skip
        own_model.part_storages(self.worker)
        self.accumulation = accumulation
        source = loader if isinstance(loader, Batches) and not loader.ended else None
        own: Loader = loader.loader if isinstance(loader, Batches) else loader
        self.queued: QueuedLoader | None = None
        if work == "shared" and accumulation == 1 and source is None and QueuedLoader.fits(own):
            assert isinstance(own, DataLoader)
            self.queued = QueuedLoader(own, seed)
        self.prepare_start()
        agree_on_moments(self.worker, optimizer, strategy)
        self.state = strategy.start(self.worker)
        self.kept = OwnState(self)
        self.counts = own_model.SampleCounts(copied=self.worker.layout.device.type != "cpu")
        self.batches = Batches(self, own, seed, self.queued, source)
        self._audit = own_model.Audit(self.worker)
        self.steps = 0
        self.begin_epoch(0)
        self._model_hooks = [
            model.register_forward_pre_hook(own_model.Hook(self.enter, own_model.FORWARD)),
            model.register_state_dict_pre_hook(
                own_model.Hook(self._may_be_saved, own_model.STATE_DICT)
            ),
        ]
        self.worker.gradients.on_backward = self._backward_begins
        self._take_over_step()

    def optimizer_spec(self) -> OptimizerSpec:
        """How to make an optimizer with the options that the user's has now."""
        return OptimizerSpec.from_instance(self.optimizer, self._names)

    def prepare_start(self) -> None:
        """Undo what a strategy that has started, and may have changed its phase, has set."""
        worker = self.worker
        worker.set_workers(self.strategy.roles(worker.runtime.ranks).workers)
        worker.queue_of = None if self.queued is None else self.queued.queue
        worker.before_phase.clear()
        worker.rate_scale = 1.0

    @property
    def begun(self) -> bool:
        """Whether training has begun."""
        return self.batches.begun or self.steps > 0

    @property
    def between_steps(self) -> bool:
        """Whether all gradients that backward() has brought have become a step."""
        return not self._complete and not self._in_backward

    @property
    def _synchronous(self) -> bool:
        return self.strategy.under_way(self.state).synchronous

    def trains(self, parameters: set[nn.Parameter]) -> bool:
        """Whether one of `parameters` is trained here."""
        return not parameters.isdisjoint(self.worker.gradients.parameters)

    def enter(self, module: nn.Module, _: Any) -> None:
        """Before a forward pass of `module`; the first one of a step may change the parameters."""
        self.worker.compute.run(Work("forward", 0), lambda: None)  # a sign of life
        if not torch.is_grad_enabled():
            return
        self.counts.forward()
        if module.training and not self._entered:
            self._entered = True
            self.kept.take_over()
            self.strategy.before_forward(self.worker, self.state)

    def _may_be_saved(self, *_: Any) -> None:
        """Refuse that somebody reads parameters by name which are this worker's alone."""
        if self.batches.left and not self._synchronous and len(self.worker.workers) > 1:
            raise InputError(
                f"the loop was left before the epoch's end, and under {self.strategy!r} each "
                "worker's model is another one: call batches.agree() on every worker before "
                "state_dict(), or let the epoch end"
            )

    def begin_epoch(self, backwards: int) -> None:
        """Count the backward passes from here, where `backwards` of the epoch are done."""
        self.backwards = backwards
        self._exchange_every = self.accumulation
        self._grouped = self._entered = False
        self.counts.begin_epoch()

    def begin_group(self, size: int) -> None:
        """So many batches are behind the next step, each with a backward pass of its own."""
        self._exchange_every = size
        self._grouped = True
        self.backwards = 0

    # The first half: at the end of the last backward of a step

    def _backward_begins(self) -> None:
        """Begin the exchange in the last backward of a step; called for each of its gradients."""
        if self._in_backward:
            return
        self.counts.backward()
        self._check_order()
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        batches = self.batches
        last = (self.backwards + 1) % self._exchange_every == 0
        last = last or (batches.taken == batches.length and not self._grouped)
        self.worker.gradients.last_backward = last = last and not batches.accumulates
        if last:
            self._begin_exchange()

    def _backward_ends(self) -> None:
        self._in_backward = False
        self.backwards += 1
        self._complete = True
        if self.worker.gradients.last_backward:
            self._reduce()
        else:
            self._pending = True
            self._version = self.worker.gradients.storage._version

    def _reduce(self) -> None:
        self.strategy.reduce(self.worker, self.state)
        self._version = self.worker.gradients.storage._version

    def _check_order(self) -> None:
        if self.counts.ahead and not self._synchronous:
            raise InputError(
                f"the next batch was taken before backward(), but under {self.strategy!r} workers "
                "come together when the batches are over, so the last one would come too late: "
                "take a batch after the step of the one before (num_workers loads ahead)"
            )

    def _begin_exchange(self) -> None:
        worker = self.worker
        self._pending = False
        (samples, total), new = self.counts.exchange()
        item = self.batches.item
        worker.gradients.await_collection()
        worker.begin_step(
            Step(
                samples=samples,
                total_samples=total,
                consumed=worker.step.consumed + new if item is None else item.stop,
                position=None if item is None else item.start,
                epoch=self.batches.epoch,
                rates=get_rates(self.optimizer),
                loss=self.batches.loss,
            )
        )

    # The second half: in optimizer.step()

    def _take_over_step(self) -> None:
        original = self.optimizer.step
        loop = self

        @functools.wraps(original)  # a scheduler that was made before looks for its mark on it
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if loop._stepping:
                return original()
            if loop.batches.ended:
                if loop._handed_over:
                    return original(closure)
                raise InputError(f"optimizer.step(): {ENDED}")
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if loop._has_gradient():
                loop._update()
            return loss

        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]

    def _update(self) -> None:
        worker = self.worker
        self._audit.check(self.optimizer)
        self.kept.take_over()
        self.kept.step_begins()
        if self._pending:  # a step after fewer backward passes: the last ones of an epoch
            self._check_unchanged()
            self._begin_exchange()
            self._reduce()
        if self.strategy.reads_loss and math.isnan(self.batches.loss):
            raise InputError(
                f"{self.strategy!r} watches the training loss, which this loop keeps to itself: "
                "call batches.report(loss.item()) before loss.backward()"
            )
        self._take_users_gradient()
        behind = self.counts.step()
        if self.batches.item is None:  # else what was accumulated before counts as passed over
            worker.step.samples, worker.step.total_samples = behind
        self._stepping = True
        rates = get_rates(self.optimizer)
        worker.set_rates(rates)
        try:
            self.strategy.update(worker, self.state)
        finally:
            set_rates(self.optimizer, rates)
            self._stepping = False
        self.batches.item = None
        self._complete = self._entered = False
        worker.gradients.forget()
        self.steps += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers
        worker.reporter.progress(step=self.steps, samples=worker.step.consumed)

    def _has_gradient(self) -> bool:
        """Return whether a step is to be made; without any gradient an optimizer makes none."""
        if self._in_backward:
            self._in_backward = False
            raise InputError(
                "optimizer.step(): the last backward() ended with an exception, so that its "
                "gradient is not complete: call backward() again, or end the script"
            )
        gradients = self.worker.gradients.parameters
        if not self._complete and any(parameter.grad is not None for parameter in gradients):
            raise InputError(
                "optimizer.step(): there was no backward() since the last step, so the gradients "
                "are not those of all workers: one loss.backward() at least for each step()"
            )
        return self._complete

    def _take_changes(self) -> bool:
        """Take over what the user has made of the gradient since backward; return whether any."""
        gradients = self.worker.gradients
        return gradients.take_users() or gradients.storage._version != self._version

    def _check_unchanged(self) -> None:
        """Refuse changes before an exchange that the last backward could not make."""
        if self._take_changes() and self._synchronous and len(self.worker.workers) > 1:
            raise InputError(
                f"the gradient was changed before step(), as clipping does, after fewer than "
                f"accumulation={self.accumulation} backward passes, so that it is not averaged "
                "yet: leave out accumulation, which then exchanges after each of them"
            )

    def _take_users_gradient(self) -> None:
        """Take over what the user has made of the gradient, such as clipping it."""
        averages_later = self._synchronous and not self.worker.step.agreed
        if self._take_changes() and averages_later and len(self.worker.workers) > 1:
            raise InputError(
                f"the gradient was changed between backward() and step(), as clipping does, but "
                f"{self.strategy!r} averages it in step() only, so that each worker would clip by "
                "a norm of its own: set returns='gradients', which averages it in backward()"
            )

    # The end

    def finish(self, *, goes_on: bool = False) -> None:
        """This loop is over: leave in order, whatever the others still do.

        Ranks that serve are told whether the script `goes_on` with another loop.
        """
        self.worker.reporter.phase("training" if goes_on else "leaving")
        if self.batches.ended:
            return
        works, word = self.batches.is_worker(), Word.GOES_ON if goes_on else Word.OVER
        if works:
            word = self.kept.last_word(word)
            self.kept.tell(word)
        self.kept.stop()
        self.batches.left = False
        self.batches.end(word if works else self.kept.hear())

    def close(self, *, handed_over: bool) -> None:
        """After `finish`: let go of the model, and of the optimizer where it is `handed_over`."""
        self._handed_over = handed_over
        for hook in self._model_hooks:
            hook.remove()
        self.kept.close()
        self.worker.gradients.close()
        self.worker.reporter.expendable(False)


def may_serve(strategy: Strategy[Any], ranks: int) -> bool:
    """Whether a rank has no data in some phase of `strategy`."""
    return any(len(phase.roles(ranks).workers) < ranks for phase in phases(strategy))


def _refuse_late_workers(strategy: Strategy[Any], ranks: int) -> None:
    """A rank that serves does not run the loop, and could not come into it later."""
    for first, then in itertools.pairwise(phases(strategy)):
        late = set(then.roles(ranks).workers) - set(first.roles(ranks).workers)
        if late:
            raise InputError(
                f"{strategy!r}: rank {min(late)} serves first, and could not come into a loop of "
                "your own in mid-epoch: set placement='beside' in the first phase"
            )

"""Checks of model, roles and state in a loop of the user's own, and counts of backward passes."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orchestra.errors import InputError
from orchestra.strategies.base import Strategy
from orchestra.strategies.switch import phases
from orchestra.worker.batches import digest, leaves_of
from orchestra.worker.layout import owner_of
from orchestra.worker.worker import Worker


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer, workers: int) -> None:
    """Refuse what would be trained wrongly on `workers` workers."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise InputError(
            f"the model is wrapped in {type(model).__name__}, which distributes it already: pass "
            "the model itself (model.module)"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{name or 'the model'!r} is a TorchScript module, which takes no hooks: pass the "
                "module that it was made from, and script that after training"
            )
        if isinstance(module, nn.SyncBatchNorm) and workers > 1:
            raise InputError(
                f"{name!r} is a SyncBatchNorm, which needs a process group of torch.distributed "
                "and would be a plain BatchNorm without one: use GroupNorm, or nn.BatchNorm"
            )
        if getattr(module, "sparse", False) is True:
            raise InputError(
                f"{name!r} has sparse gradients, which do not travel here: make the "
                f"{type(module).__name__} with sparse=False"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise InputError(
                f"parameter {name!r} is complex, and such numbers do not travel here: keep it as "
                "torch.view_as_real(...) of them"
            )
    known = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter not in known:
                raise InputError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have, so that no other worker would learn of it: put both into "
                    "one nn.Module (an nn.ModuleList) and distribute that"
                )


def may_serve(strategy: Strategy, ranks: int) -> bool:
    """Return whether a rank has no data in some phase of `strategy`."""
    return any(len(phase.roles(ranks).workers) < ranks for phase in phases(strategy))


def check_roles(strategy: Strategy, ranks: int) -> None:
    """Refuse another number of ranks, and one that serves first: it would not run the loop."""
    shares = len(strategy.roles(ranks).shares)
    if shares != ranks:
        raise InputError(
            f"{strategy!r} runs on {shares} process(es), but {ranks} were started: start as many, "
            "or name another strategy"
        )
    for first, then in itertools.pairwise(phases(strategy)):
        late = set(then.roles(ranks).workers) - set(first.roles(ranks).workers)
        if late:
            raise InputError(
                f"{strategy!r}: rank {min(late)} serves first, and could not come into a loop of "
                "your own in mid-epoch: set placement='beside' in the first phase"
            )


@dataclass(eq=False)
class Hook:
    """A hook of a module that calls `function`, and may be copied and pickled with the module.

    In the copy or the file it is replaced by `harmless`, a builtin object and the name of one of
    its methods, which as a hook has no effect. So the file loads without Orchestra, too.
    """

    function: Callable[..., None]
    harmless: tuple[object, str]

    def __call__(self, *arguments: Any) -> None:
        self.function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.harmless


FORWARD: tuple[object, str] = ({}, "get")  # {}.get(module, inputs): the inputs, as they are
STATE_DICT = ("", "format")  # "".format(module, prefix, keep): nothing that anybody reads
LOADED: tuple[object, str] = (contextlib.nullcontext(), "__exit__")  # of any arguments: nothing


IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}
"""What a group holds beside options that change the result."""


class Audit:
    """Checks at each step that the trained parameters are still those that were laid out.

    `Worker` lays out those that need a gradient then, and moves them into one flat vector.
    """

    def __init__(self, worker: Worker) -> None:
        named = dict(worker.module.named_parameters())
        laid_out = worker.named_parameters()
        self._trained = [
            (name, *owner_of(worker.module, name), named[name], parameter.data_ptr())
            for name, parameter in laid_out.items()
        ]
        self._frozen = [(name, p) for name, p in named.items() if name not in laid_out]
        self._known = set(named.values())

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError for the first parameter that would not be trained as it should."""
        for name, owner, attribute, parameter, address in self._trained:
            # A look-up in the dictionary: `getattr` of a module is slow for every step.
            if owner._parameters.get(attribute) is not parameter:
                raise InputError(
                    f"parameter {name!r} was replaced after distribute, so that its "
                    "gradients go nowhere: replace it before, or copy values into it "
                    "(with torch.no_grad(): parameter.copy_(values))"
                )
            if parameter.data_ptr() != address:
                raise InputError(
                    f"parameter {name!r} got other memory after distribute (by p.data = ..., "
                    "or the model's to()), and what is exchanged would not be what it holds: do "
                    "that before, or copy (with torch.no_grad(): parameter.copy_(values))"
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InputError(
                    f"parameter {name!r} needs a gradient now, which it did not when distribute "
                    "was called, so that no other worker would learn of it: call distribute while "
                    "all that is to be trained at any time needs a gradient, then freeze it with "
                    "requires_grad_(False)"
                )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._known:
                    raise InputError(
                        f"the optimizer was given a parameter of shape {tuple(parameter.shape)} "
                        "after distribute: give it to model and optimizer before"
                    )


class Ledger:
    """A digest of the steps that this worker's optimizer has made, which all workers have alike.

    It takes in the place of each step among the batches, and the options of all groups then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._phase = self._digest = 0

    def enter(self, phase: int, *place: int) -> None:
        """Note a step at `place`."""
        options = [
            value
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name not in IMPLEMENTATION
        ]
        self._phase, self._digest = phase, digest([place, options], self.digest(phase))

    def digest(self, phase: int) -> int:
        """Return the digest of this phase's steps: before it, workers may have made unlike ones."""
        return self._digest if phase == self._phase else 0

    def refusal(self, steps: int) -> InputError:
        """Return what to raise where workers have unlike digests."""
        rates = ", ".join(f"{group['lr']:g}" for group in self._optimizer.param_groups)
        return InputError(
            f"after {steps} steps of this worker, whose learning rates are {rates} now, the "
            "workers' optimizers differ: in the batches at which step() was called, or in rates or "
            "other options. Let all workers decide by the same number, such as orchestra.mean(loss)"
        )


# The state that it goes on from


def check_fits(
    where: str,
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
    worker: Worker,
    length: int | None,
    generators: Sequence[torch.Generator],
) -> None:
    """Refuse a `state` that a loop of these `settings`, on `worker`, cannot go on from. `length` is
    that of an epoch; `generators` are those of the loader. Messages begin with `where`."""
    expected = {"settings", "position", "groups", "ranks"}
    if not isinstance(state, Mapping) or not expected <= state.keys():
        raise InputError(f"{where}: expected what batches.state_dict() returned")
    for name, ours in settings.items():
        theirs = state["settings"].get(name)
        if theirs != ours:
            raise InputError(
                f"{where}: the state is of {name}={theirs}, and this loop of {name}={ours}: "
                "distribute with the settings that it was saved under"
            )
    position, ranks = state["position"], state["ranks"]
    if ranks.keys() != {str(rank) for rank in range(worker.runtime.ranks)}:
        raise InputError(
            f"{where}: the state lacks what other ranks had: save what the first worker's "
            "batches.state_dict() returned (if orchestra.is_first())"
        )
    found = _differences(worker.named_parameters(), parameters_in(ranks))
    if not found and len(state["groups"]) != len(worker.optimizer.groups):
        found = "it has other parameter groups"
    if found:
        raise InputError(f"{where}: the state is of another model or optimizer: {found}")
    if position["taken"] and position["length"] != length:
        raise InputError(
            f"{where}: the state was saved in the midst of an epoch of {position['length']} "
            f"batches on each worker, and here it has {length}: use the same loader"
        )
    if len(ranks[str(worker.rank)]["order"]["generators"]) != len(generators):
        raise InputError(f"{where}: the loader has other generators than then: use the same loader")


def parameters_in(ranks: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return some worker's parameters in a state; ranks that serve have none."""
    every = (each["parameters"] for each in ranks.values())
    return next(named for named in every if named)


def _differences(named: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> str:
    """Return in which parameter `others` are another model's; empty if in none."""
    for name in [*named, *others]:
        if name not in others or name not in named:
            return f"parameter {name!r} is in one of them only"
        if others[name].shape != named[name].shape:
            theirs, ours = tuple(others[name].shape), tuple(named[name].shape)
            return f"parameter {name!r} has the shape {theirs} in it, and {ours} here"
    return ""


# Its batches


class Count(NamedTuple):
    """The weights of a gradient: samples, unless the loop has set others."""

    weight: int = 0  # of this worker
    total: int = 0  # of all workers
    samples: int = 0  # that all workers have read

    def plus(self, other: Count | None) -> Count:
        """Return the sum of both."""
        return self if other is None else Count(*map(sum, zip(self, other, strict=True)))


class BackwardPasses:
    """Counts the backward passes that a worker makes, and the batches behind each.

    Usually a backward pass follows each batch. A loop may take batches ahead of the backward pass
    of an earlier one, which it still holds then; it may pass batches over, which it has let go of;
    and it may make several backward passes on one batch, each of which has the batch's counts.
    `accumulation`: backward passes of a step, of which the last one exchanges. `copied`: batches go
    to another device; those that were let go of say nothing then.
    """

    def __init__(self, accumulation: int, *, copied: bool) -> None:
        self.accumulation = accumulation
        self.paused = False  # no pass exchanges, for now
        self.under_way = False  # a pass has begun, and not ended
        self.complete = False  # a pass has ended since the last step
        self._copied = copied
        self._exchanged: Count | None = None  # of the last exchange
        self._stepped: Count | None = None  # of the last step
        self._in_exchange: Count | None = None  # since then; a batch may count 0
        self._in_step: Count | None = None
        self.begin_epoch(0)

    def begin_epoch(self, done: int) -> None:
        """Count batches and passes from here, where `done` passes of the epoch are over."""
        # Batches that the loop has taken, and not begun, when it calls `backward`.
        self.ahead: int | None = None
        self.done = done  # passes in this epoch, or group of batches
        self.entered = False  # the strategy knows that this step has begun
        self.open = False  # a forward pass may be that of a step
        self._every = self.accumulation
        self._grouped = False  # all batches of a step were taken before its first backward
        # Of each batch its weights, if they are known, and what it is, unless nobody holds it.
        self._taken: deque[tuple[Count | None, Callable[[], object]]] = deque()
        self._fresh = self._ended = self._stepped_since = False
        self._forwards = self._forwards_on_last = 0  # in this epoch, on the batch taken last
        self._batches = 0  # taken in this epoch
        self._run: set[int] = set()  # the numbers of those that went forward

    def begin_group(self, size: int) -> None:
        """`size` batches are behind the next step, each with a backward pass of its own."""
        self._every, self._grouped, self.done = size, True, 0

    def end_epoch(self) -> None:
        """There are no more batches."""
        self._ended = True

    def rest(self) -> None:
        """Called when workers have come together, and the model shows what they agreed on.

        A step that had begun begins anew.
        """
        self.entered, self.open = False, bool(self._taken) and not self._ended

    def exchanges(self, at_end: Callable[[], bool]) -> bool:
        """Return whether the pass under way is the last of its step, and so exchanges. `at_end`:
        returns whether all batches of the epoch are taken."""
        last = (self.done + 1) % self._every == 0 or (at_end() and not self._grouped)
        return last and not self.paused

    def take(self, count: Count | None, batch: Any) -> None:
        """Called when a batch is handed out; without a `count`, `weigh` has to give one."""
        held: Callable[[], object] = lambda: None  # noqa: E731
        # A weak reference tells later whether the loop has let go of the batch.
        for leaf in leaves_of(batch):
            with contextlib.suppress(TypeError):
                held = weakref.ref(leaf)
                break
        self._taken.append((count, held))
        self._fresh = self.open = True
        self._forwards_on_last = 0
        self._batches += 1

    def weigh(self, weight: int, total: int) -> None:
        """Let the gradient of the batch that was taken last count `weight` of `total`."""
        if not self._fresh:
            raise InputError(
                "batches.weight(): call it after a batch was taken and before its backward()"
            )
        count, held = self._taken[-1]
        self._taken[-1] = Count(weight, total, count.samples if count else total), held

    def forward(self) -> None:
        """Called when a forward pass of the whole model begins."""
        self._forwards += 1
        self._forwards_on_last += 1
        if self._every > 1:
            self._run.add(self._batches)

    def backward(self) -> None:
        """Called when a backward pass begins. Raises InputError: no batch can be behind it."""
        none_before = self._exchanged is None and self._in_exchange is None
        over = self._ended and self._stepped_since
        if not self._taken and (none_before or over):
            raise InputError(
                "backward(): no batch was taken for it from the batches that distribute returned: "
                "iterate them, anew in each epoch; where several models are trained on the same "
                "batches, pass the first call's batches to the others"
            )
        if not self._taken or not (self._fresh or over):
            return
        if self.ahead is None:
            self.ahead = self._taken_ahead()
        # Batches that the loop passed over have no gradient.
        while len(self._taken) > self.ahead + 1:
            if not self.count_unreached():
                self._taken.popleft()
        self._count_first()
        self._fresh = self._stepped_since = False

    def count_unreached(self) -> bool:
        """Count the first batch, of several of a step, if it went forward: its gradient was 0."""
        if self._batches + 1 - len(self._taken) not in self._run:
            return False
        self._count_first()
        self.done += 1
        return True

    def _count_first(self) -> None:
        count, _ = self._taken.popleft()
        if count is None:
            raise InputError(
                "backward(): the tensors of this batch do not tell how many samples it has: their "
                "first dimensions are unlike, or smaller than what the sampler chose; call "
                "batches.weight(samples) before, on all workers, or, where Lightning or a Trainer "
                "calls backward(), drop samples from the data set, not in collate_fn"
            )
        self._in_exchange = count.plus(self._in_exchange)
        self._in_step = count.plus(self._in_step)

    def end(self) -> None:
        """Called when a backward pass ends."""
        self.under_way, self.complete = False, True
        self.done += 1

    def reaches_nothing(self) -> bool:
        """Return whether a batch was taken and no gradient came of it before `step()`."""
        return self._fresh and not self.complete

    def _taken_ahead(self) -> int:
        *earlier, _ = self._taken
        held = sum(held() is not None for _, held in earlier)
        if earlier and self._forwards and not self._forwards_on_last:
            return max(held, 1)  # what is going backward went forward before the last was taken
        if len(earlier) == 1 and not held and self._copied:
            raise InputError(
                "backward(): two batches were taken before, and it cannot be told which of them "
                "this one is of: take a batch after the step of the one before (num_workers "
                "loads ahead)"
            )
        return held

    def exchange(self) -> tuple[Count, int]:
        """Return the weights of the gradient that is exchanged now, and how many samples are new.

        A gradient that is exchanged again, after a further pass on the same batch, has no new ones.
        """
        new = self._in_exchange
        self._exchanged = new or self._exchanged or Count()
        self._in_exchange = None
        return self._exchanged, new.samples if new else 0

    def step(self) -> Count:
        """Return the weights of the gradient of the update that is made now."""
        self._stepped = self._in_step or self._stepped or Count()
        self._in_step = None
        self._stepped_since = True
        self.complete = self.entered = False
        return self._stepped

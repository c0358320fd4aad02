"""What a loop of the user's own does with model, state and batches: refused, watched, counted."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from orchestra.errors import InputError
from orchestra.worker.batches import digest, tensors_of
from orchestra.worker.worker import Worker

if TYPE_CHECKING:
    from orchestra.trainer.own_loop import OwnLoop


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer, workers: int) -> None:
    """Refuse what would be trained wrongly on `workers` workers."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise InputError(
            f"the model is wrapped in {type(model).__name__}, which distributes it already: pass "
            "the model itself (model.module)"
        )
    for name, module in model.named_modules():
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


def part_storages(worker: Worker) -> None:
    """Give each parameter a storage of its own in the flat vector: files get whole storages."""
    if worker.layout.device.type != "meta":
        for parameter in worker.gradients.parameters:
            parameter.data = from_dlpack(parameter.data)


class Hook:
    """Calls `function`, as a hook of a module; in copies of the module, and its file, `harmless`.

    That is a method of a builtin object: such a file loads where Orchestra is missing, too.
    """

    def __init__(self, function: Callable[..., None], harmless: tuple[object, str]) -> None:
        self._function = function
        self._harmless = harmless

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._harmless


FORWARD: tuple[object, str] = ({}, "get")  # {}.get(module, inputs): the inputs, as they are
STATE_DICT = ("", "format")  # "".format(module, prefix, keep): nothing that anybody reads


class Audit:
    """Sees at each step whether the parameters that are trained are still those that were laid out.

    `Worker` lays out those that need a gradient then, and moves them into one flat vector.
    """

    def __init__(self, worker: Worker) -> None:
        named = dict(worker.module.named_parameters())
        laid_out = worker.named_parameters()
        self._trained = [
            (name, *_owner_of(worker.module, name), named[name], parameter.data_ptr())
            for name, parameter in laid_out.items()
        ]
        self._frozen = [(name, p) for name, p in named.items() if name not in laid_out]
        self._known = set(named.values())

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises InputError for the first parameter that would not be trained as it should."""
        for name, owner, attribute, parameter, address in self._trained:
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


def _owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the owner of the parameter `name`, and its attribute there."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


# Its state


def settings_of(loop: OwnLoop) -> dict[str, Any]:
    """What has to be the same where a state is loaded."""
    return {
        "strategy": repr(loop.strategy),
        "ranks": loop.worker.runtime.ranks,
        "optimizer": type(loop.optimizer).__name__,
        "accumulation": loop.accumulation,
        "seed": loop.batches.seed,
        "work": "shared" if loop.strategy.self_paced and loop.queued else "equal",
    }


def check_place(loop: OwnLoop) -> None:
    """Raises InputError where there is no state that could be gone on from."""
    batches, where = loop.batches, "batches.state_dict()"
    if not loop.between_steps:
        raise InputError(f"{where}: gradients wait for their step: call it after that")
    if batches.taken and loop.strategy.work(loop.state) is not None:
        raise InputError(
            f"{where} in mid-epoch needs equally many batches on every worker: set "
            "work='equal' in distribute, or save when the epoch has ended"
        )
    if batches.dealt_out_anew:
        raise InputError(
            f"{where}: a rank has become a server in this epoch, so that nobody takes its part "
            "of it: save when the epoch has ended"
        )


def check_fits(loop: OwnLoop, state: Mapping[str, Any]) -> None:
    """Collective over the workers: raises InputError unless `loop` can go on from `state`."""
    batches, worker, where = loop.batches, loop.worker, "batches.load_state_dict()"
    expected = {"settings", "position", "groups", "ranks"}
    if not isinstance(state, Mapping) or not expected <= state.keys():
        raise InputError(f"{where}: expected what batches.state_dict() returned")
    for name, ours in settings_of(loop).items():
        theirs = state["settings"].get(name)
        if theirs != ours:
            raise InputError(
                f"{where}: the state is of {name}={theirs}, and this loop of {name}={ours}: "
                "distribute with the settings that it was saved under"
            )
    if state["ranks"].keys() != {str(rank) for rank in range(worker.runtime.ranks)}:
        raise InputError(
            f"{where}: the state lacks what other ranks had: save what the first worker's "
            "batches.state_dict() returned (if orchestra.is_first())"
        )
    every = (each["parameters"] for each in state["ranks"].values())
    parameters = next(named for named in every if named)  # servers have none
    found = _differences(worker, parameters)
    if found or len(state["groups"]) != len(loop.optimizer.param_groups):
        raise InputError(
            f"{where}: the state is of another model or optimizer: "
            f"{found or 'it has other parameter groups'}"
        )
    position = state["position"]
    if position["taken"] and position["length"] != batches.length:
        raise InputError(
            f"{where}: the state was saved in the midst of an epoch of {position['length']} "
            f"batches on each worker, and here it has {batches.length}: use the same loader"
        )
    generators = state["ranks"][str(worker.rank)]["order"]["generators"]
    if len(generators) != len(batches.generators()):
        raise InputError(f"{where}: the loader has other generators than then: use the same loader")
    roles = loop.strategy.roles(worker.runtime.ranks)
    if loop.strategy.current_roles(worker, loop.state) != roles:
        raise InputError(
            f"{where}: ranks have changed their roles since the beginning: load before training"
        )
    if not batches.alike(digest([position, parameters])):
        raise InputError(f"{where}: workers load unlike states: give all the same one")


def _differences(worker: Worker, parameters: Mapping[str, Tensor]) -> str:
    """In which parameter a state is another model's; empty if in none."""
    named = worker.named_parameters()
    for name in [*named, *parameters]:
        if name not in parameters or name not in named:
            return f"parameter {name!r} is in one of them only"
        if parameters[name].shape != named[name].shape:
            theirs, ours = tuple(parameters[name].shape), tuple(named[name].shape)
            return f"parameter {name!r} has the shape {theirs} in it, and {ours} here"
    return ""


# Its batches


class Count(NamedTuple):
    """Samples of this worker and of all workers."""

    samples: int = 0
    total: int = 0

    def plus(self, other: Count) -> Count:
        """The sum of both."""
        return Count(self.samples + other.samples, self.total + other.total)


class SampleCounts:
    """Assigns the batches that a worker takes to the backward passes that it makes.

    Usually a backward pass follows each batch. A loop may take batches ahead of the backward pass
    of an earlier one, which it still holds then; it may pass batches over, which it has let go of;
    and it may make several backward passes on one batch, each of which has the batch's counts.

    Where batches are `copied` to another device, those that were let go of say nothing.

    Attributes:
        ahead: batches that the loop has taken, and not begun, when it calls `backward`.
    """

    def __init__(self, *, copied: bool) -> None:
        self._copied = copied
        self._exchanged: Count | None = None  # of the last exchange
        self._stepped: Count | None = None  # of the last step
        self._in_exchange: Count | None = None  # since then; a batch may count 0
        self._in_step: Count | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """From here batches are those of another epoch."""
        self.ahead: int | None = None
        self._taken: deque[tuple[Count, Callable[[], object]]] = deque()  # None: nobody holds it
        self._fresh = self._ended = self._done = False
        self._forwards = self._entered = 0  # in this epoch, and since the last batch was taken

    def end_epoch(self) -> None:
        """There are no more batches."""
        self._ended = True

    def take(self, samples: int, total: int, batch: Any) -> None:
        """A batch is handed out."""
        first = next(tensors_of(batch), None)
        held: Callable[[], object] = (lambda: None) if first is None else weakref.ref(first)
        self._taken.append((Count(samples, total), held))
        self._fresh, self._entered = True, 0

    def forward(self) -> None:
        """A forward pass of the whole model begins."""
        self._forwards += 1
        self._entered += 1

    def backward(self) -> None:
        """A backward pass begins.

        Raises:
            InputError: no batch can be behind it.
        """
        none_before = self._exchanged is None and self._in_exchange is None
        if not self._taken and (none_before or (self._ended and self._done)):
            raise InputError(
                "backward(): no batch was taken for it from the batches that distribute returned: "
                "iterate them, anew in each epoch; where several models are trained on the same "
                "batches, pass the first call's batches to the others"
            )
        if not self._taken or not (self._fresh or (self._ended and self._done)):
            return
        if self.ahead is None:
            self.ahead = self._taken_ahead()
        while len(self._taken) > self.ahead + 1:
            self._taken.popleft()
        count, _ = self._taken.popleft()
        self._fresh = self._done = False
        self._in_exchange = count.plus(self._in_exchange or Count())
        self._in_step = count.plus(self._in_step or Count())

    def _taken_ahead(self) -> int:
        *earlier, _ = self._taken
        held = sum(held() is not None for _, held in earlier)
        if earlier and self._forwards and not self._entered:
            return max(held, 1)  # what is going backward went forward before the last was taken
        if len(earlier) == 1 and not held and self._copied:
            raise InputError(
                "backward(): two batches were taken before, and it cannot be told which of them "
                "this one is of: take a batch after the step of the one before (num_workers "
                "loads ahead)"
            )
        return held

    def exchange(self) -> tuple[Count, int]:
        """What is behind the gradient that is exchanged; and how many samples were not before."""
        new = self._in_exchange
        self._exchanged = new or self._exchanged or Count()
        self._in_exchange = None
        return self._exchanged, new.total if new else 0

    def step(self) -> Count:
        """What is behind the update that is made."""
        self._stepped = self._in_step or self._stepped or Count()
        self._in_step = None
        self._done = True
        return self._stepped

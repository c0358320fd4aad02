"""A model cut into stages: each is a module of its own, with the names of the whole.

The steps of a pipeline are in `strategies.pipeline`.
"""

from __future__ import annotations

import inspect
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from orchestra.errors import InputError
from orchestra.worker.layout import owner_of

ONE_AT_A_TIME = threading.Lock()  # while torch.fx traces, no thread can call any module

OUTSIDE = ("placeholder", "get_attr", "output")  # of a graph's nodes, those that compute nothing


Holders = Mapping[str, tuple[int, ...]]


class Stage(fx.GraphModule):
    """One stage: takes the tensors that are alive where it begins, gives those where it ends.

    Its parameters have the names that they have in the whole model, a shared one its first.
    `holders` tells which stages have each trainable parameter, in the order of the whole.
    """

    def __init__(self, whole: nn.Module, graph: fx.Graph, holders: Holders) -> None:
        super().__init__(whole, graph, "Stage")
        self.names = {id(p): name for name, p in whole.named_parameters()}
        self.holders = holders
        self.tensors_in = sum(node.op == "placeholder" for node in graph.nodes)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters with the names that they have in the whole model."""
        for _, parameter in super().named_parameters("", recurse, remove_duplicate):
            name = self.names[id(parameter)]
            yield (f"{prefix}.{name}" if prefix else name), parameter


def stage_of(
    module: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    stages: int,
    index: int,
    cuts: Sequence[str] | None,
) -> Stage:
    """Return stage `index` of `module` in `stages`; stage 0 also has what no stage uses.

    The model is cut before the layers named `cuts`, or where that evens out the cost of the stages.
    The cost of an operation is counted in one forward pass, with what `loss_of`, the loss on a few
    samples, gives the model: it is the same on every machine, so that all ranks, and a run that is
    resumed, cut alike. Raises InputError: the model cannot be traced or has too few places to be
    cut at.
    """
    # torch.fx replaces methods of `nn.Module` while it traces: no other rank of this process may
    # call a module meanwhile.
    with ONE_AT_A_TIME:
        args, kwargs = inputs_of(loss_of)
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        line = _Line(module, trace(module), bound.args)
    places = line.places_of(cuts) if cuts is not None else line.balanced(stages)
    spans = list(pairwise((0, *places, len(line.nodes))))
    used = [line.parameters_in(first, end) for first, end in spans]
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    holders = {
        name: tuple(k for k, ids in enumerate(used) if id(p) in ids) or (0,)
        for name, p in trainable.items()
    }
    stage = Stage(module, line.subgraph(*spans[index]), holders)
    persistent = module.state_dict(keep_vars=True).keys()
    for name, _ in stage.named_buffers():  # fx makes all that it copies persistent
        if name not in persistent:
            owner, leaf = owner_of(stage, name)
            owner._non_persistent_buffers_set.add(leaf)
    held = {id(parameter) for parameter in stage.parameters()}
    for name, parameter in trainable.items():
        if index in holders[name] and id(parameter) not in held:
            _attach(stage, name, parameter)
    return stage


class _Line(fx.Interpreter):
    """The operations of a graph in a row, with their costs in one forward pass.

    Place p lies before operation p. `costs` holds for each node its multiplications, additions and
    output elements; `elements` holds the output elements of nodes that give a tensor. `changed` has
    pairs of a node and a later one that changes its value in place.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, inputs: tuple[Any, ...]) -> None:
        super().__init__(module, graph=graph)
        self.nodes = [node for node in graph.nodes if node.op not in OUTSIDE]
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        (self.last,) = (node for node in graph.nodes if node.op == "output")
        self.index = {node: place for place, node in enumerate(self.nodes)}
        self.index |= dict.fromkeys(self.inputs, -1) | {self.last: len(self.nodes)}
        self.costs: dict[fx.Node, int] = {}
        self.elements: dict[fx.Node, int] = {}
        self.changed: list[tuple[fx.Node, fx.Node]] = []
        # The counting pass must not leave traces, as in BatchNorm's running means.
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        with torch.no_grad():
            self.run(*inputs)
            for buffer, before in buffers:
                buffer.copy_(before)

    def run_node(self, n: fx.Node) -> Any:
        before = {
            # Autograd's counter of changes in place: what has grown was changed by this node.
            node: (value, value._version)
            for node, value in self.env.items()
            if isinstance(value, Tensor)
        }
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        self.costs[n] = counter.get_total_flops()
        self.changed += [(node, n) for node, (held, old) in before.items() if held._version > old]
        if isinstance(value, Tensor):
            self.elements[n] = value.numel()
            self.costs[n] += value.numel()
        return value

    def alive(self, place: int) -> list[fx.Node]:
        """Return the nodes before `place` whose values are used behind it, attributes left out."""
        if place == 0:
            return self.inputs
        before = [*self.inputs, *self.nodes[:place]]
        return [n for n in before if any(self.index[user] >= place for user in n.users)]

    def crossing(self, place: int) -> int | None:
        """Return the elements that a cut at `place` sends; None if it cannot be cut there."""
        alive = self.alive(place)
        # Autograd forbids a change in place of what arrives from another stage.
        changed = any(
            self.index.get(node, place) < place <= self.index[by] for node, by in self.changed
        )
        if changed or not alive or any(node not in self.elements for node in alive):
            return None
        return sum(self.elements[node] for node in alive)

    def balanced(self, stages: int) -> tuple[int, ...]:
        places = range(len(self.nodes))
        cuts = balanced_cuts(
            [self.costs[node] for node in self.nodes],
            [None if place == 0 else self.crossing(place) for place in places],
            [bool(self.parameters_in(place, place + 1)) for place in places],
            stages,
        )
        if cuts is None:
            raise InputError(
                f"Pipeline: {type(self.module).__name__} cannot be cut into {stages} stages that "
                "each have parameters to train and pass on nothing but tensors: lower stages"
            )
        return cuts

    def places_of(self, cuts: Sequence[str]) -> tuple[int, ...]:
        places = [self._place_of(name) for name in cuts]
        for first, end in pairwise([0, *places, len(self.nodes)]):
            if end <= first or not self.parameters_in(first, end):
                raise InputError(
                    f"Pipeline.cuts: {list(cuts)} leave a stage without parameters to train; name "
                    "layers in their order"
                )
        return tuple(places)

    def _place_of(self, name: str) -> int:
        """Return the place at which the layer `name` begins."""
        for place, node in enumerate(self.nodes):
            if node.op == "call_module" and f"{node.target}.".startswith(f"{name}."):
                if place == 0 or self.crossing(place) is None:
                    raise InputError(
                        f"Pipeline.cuts: the model cannot be cut before {name!r}, where something "
                        "else than tensors would be passed on, or nothing"
                    )
                return place
        known = ", ".join(str(n.target) for n in self.nodes if n.op == "call_module")
        raise InputError(f"Pipeline.cuts: the model has no layer {name!r}; it has {known}")

    def parameters_in(self, first: int, end: int) -> set[int]:
        """Return the ids of the trainable parameters that the operations [first, end) use."""
        found: set[int] = set()
        for node in self.nodes[first:end]:
            if node.op == "call_module":
                layer = self.module.get_submodule(str(node.target))
                found |= {id(p) for p in layer.parameters() if p.requires_grad}
            for used in node.all_input_nodes:
                if used.op == "get_attr":
                    value = operator.attrgetter(str(used.target))(self.module)
                    if isinstance(value, nn.Parameter) and value.requires_grad:
                        found.add(id(value))
        return found

    def subgraph(self, first: int, end: int) -> fx.Graph:
        """Return the operations [first, end) as a graph of their own."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:
                assert node.op == "get_attr"
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in self.alive(first):
            # Inputs of the model keep their names and defaults; other stages take tensors alone.
            own = node.op == "placeholder" and first == 0
            copies[node] = graph.node_copy(node) if own else graph.placeholder(node.name)
        for node in self.nodes[first:end]:
            copies[node] = graph.node_copy(node, copied)
        if end == len(self.nodes):
            graph.node_copy(self.last, copied)
        else:
            graph.output(tuple(copied(node) for node in self.alive(end)))
        return graph


def _attach(stage: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give `stage` a parameter that its graph does not use."""
    *path, leaf = name.split(".")
    owner = stage
    for part in path:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    owner.register_parameter(leaf, parameter)


SLACK = 0.05  # the largest stage may be so much above the best if less crosses the cuts


def balanced_cuts(
    costs: Sequence[int], crossing: Sequence[int | None], trained: Sequence[bool], stages: int
) -> tuple[int, ...] | None:
    """Return the places of `stages` - 1 cuts of operations in a row; None if there are too few.

    The dearest stage costs as little as can be; among the cuts for which that is true to within
    `SLACK`, those that send the least. Every stage has something to train.

    Args:
        costs: of the operations; place p lies before operation p.
        crossing: for each place the elements that a cut there sends, None where none can be.
        trained: of each operation, whether it has parameters of its own to train.
    """
    end = len(costs)
    sums = [0, *accumulate(costs)]
    to_train = [0, *accumulate(map(int, trained))]
    places = [place for place in range(1, end) if crossing[place] is not None]

    def best(
        combine: Callable[[int, int], int], price: Callable[[int, int], int], limit: float
    ) -> tuple[int, tuple[int, ...]] | None:
        """Find by dynamic programming the least combined price of all stages, and their begins."""
        found: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
        for stage in range(1, stages + 1):
            reached = {}
            for last in places if stage < stages else [end]:
                options = [
                    (combine(so_far, price(first, last)), (*begins, first))
                    for first, (so_far, begins) in found.items()
                    if first < last
                    and to_train[first] < to_train[last]
                    and sums[last] - sums[first] <= limit
                ]
                if options:
                    reached[last] = min(options)
            found = reached
        return found.get(end)

    dearest = best(max, lambda first, last: sums[last] - sums[first], math.inf)
    if dearest is None:
        return None
    limit = dearest[0] * (1 + SLACK)
    # Without the slack a cut falls inside an attention layer to gain a hundredth.
    least = best(operator.add, lambda first, _: crossing[first] or 0, limit)
    assert least is not None
    return least[1][1:]


FACTORIES = ("arange", "empty", "full", "ones", "zeros")


class Closing(fx.Tracer):
    """Traces into Sequential only: for modules whose forward depends on what they are given."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential)


def trace(module: nn.Module) -> fx.Graph:
    """Return the operations of `module`, in their order, with names as in `module`. Raises
    InputError: its forward cannot be traced."""
    for tracer in (fx.Tracer(), Closing()):
        try:
            with _recorded_factories():
                return tracer.trace(module)
        except Exception as raised:  # whatever the model's own code raises when given no numbers
            error = raised
    raise InputError(
        f"Pipeline: torch.fx cannot trace the forward of {type(module).__name__} "
        f"({error}); make the model a Sequential of its parts"
    ) from error


@contextmanager
def _recorded_factories() -> Iterator[None]:
    """Record torch.arange(x.shape[1]) and its like as operations of the graph, too."""
    kept = {name: getattr(torch, name) for name in FACTORIES}
    for name, function in kept.items():
        setattr(torch, name, _recorded(function))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(torch, name, function)


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, fx.Proxy):
                return value.tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return call


class StandIn(nn.Module):
    """What a task's loss is given in place of the model, which no rank has as a whole."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.calls = 0
        self._answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer in place of the model."""
        self.calls += 1
        return self._answer(*args, **kwargs)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Raise InputError: no rank knows all parameters."""
        raise InputError(
            "Pipeline: the task's loss reads the parameters of the model, which no rank has as a "
            "whole: use weight_decay of the optimizer, or another strategy"
        )


class _Called(BaseException):
    """The loss has called the model: that is as far as a first stage follows it."""


def inputs_of(loss_of: Callable[[nn.Module], Tensor]) -> tuple[Any, ...]:
    """Return what a loss calls the model with: arguments by position, and those by name."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    try:
        loss_of(StandIn(stop))
    except _Called as called:
        return called.args
    raise called_otherwise(0)


def called_otherwise(calls: int) -> InputError:
    return InputError(
        f"Pipeline: the task's loss calls the model {calls} times; between stages it can be "
        "called once"
    )

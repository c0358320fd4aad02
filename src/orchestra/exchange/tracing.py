"""The graph of a model, traced by torch.fx, and what each of its operations costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from orchestra.errors import InputError

FACTORIES = ("arange", "empty", "full", "ones", "zeros")


class Closing(fx.Tracer):
    """Traces into Sequential only: for modules whose forward depends on what they are given."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential)


def trace(module: nn.Module) -> fx.Graph:
    """The operations of `module`, in their order, with names as in `module`.

    Raises:
        InputError: its forward cannot be traced.
    """
    try:
        return _traced(fx.Tracer(), module)
    except Exception:  # whatever the model's own code raises when it is given no numbers
        try:
            return _traced(Closing(), module)
        except Exception as error:
            raise InputError(
                f"Pipeline: torch.fx cannot trace the forward of {type(module).__name__} "
                f"({error}); make the model a Sequential of its parts"
            ) from error


def _traced(tracer: fx.Tracer, module: nn.Module) -> fx.Graph:
    with _recorded_factories():
        return tracer.trace(module)


@contextmanager
def _recorded_factories() -> Iterator[None]:
    """torch.arange(x.shape[1]) and its like become operations of the graph, too."""
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


@dataclass
class Measured:
    """What a forward pass showed of each node.

    `costs`: multiplications, additions, and the elements that come out. `elements` of nodes that
    give a tensor. `changed`: (a node, a later one that changes its value in place).
    """

    costs: dict[fx.Node, int]
    elements: dict[fx.Node, int]
    changed: list[tuple[fx.Node, fx.Node]]


def measure(module: nn.Module, graph: fx.Graph, inputs: Inputs) -> Measured:
    """Run `graph` once, without gradients; buffers of `module` stay as they are."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    meter = _Meter(module, graph)
    with torch.no_grad():
        meter.run(*inputs.bound_to(module))
        for buffer, before in buffers:
            buffer.copy_(before)
    return meter.measured


@dataclass(frozen=True)
class Inputs:
    """What a model was called with."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def bound_to(self, module: nn.Module) -> tuple[Any, ...]:
        """In the order of the parameters of the module's forward."""
        bound = inspect.signature(module.forward).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.args


class _Meter(fx.Interpreter):
    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.measured = Measured({}, {}, [])

    def run_node(self, n: fx.Node) -> Any:
        before = {
            node: (value, value._version)
            for node, value in self.env.items()
            if isinstance(value, Tensor)
        }
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        measured = self.measured
        measured.costs[n] = counter.get_total_flops()
        measured.changed += [
            (node, n) for node, (tensor, version) in before.items() if tensor._version > version
        ]
        if isinstance(value, Tensor):
            measured.elements[n] = value.numel()
            measured.costs[n] += value.numel()
        return value

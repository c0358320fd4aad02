"""Communication goes on while a worker computes, and changes no bit of what it should not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.lab import in_lab, some
from tests.support.members import wrapped
from tests.support.simulated import simulated, simulated_here
from tests.support.timelines import read
from tests.support.training import equal, settings, train_processes, train_threads
from tests.support.waiting import wait_until
from torch import nn

from orchestra.engines.simulation.costs import FLOPS
from orchestra.exchange import PartedChannel
from orchestra.settings import parse
from orchestra.strategies.gossip import DPSGDMember, Gossip
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.single import Single
from orchestra.trainer.settings import NONE, Run, Training
from orchestra.worker.worker import AwaitParameters, Worker

IN_PARTS: dict[str, Any] = {"bucket_megabytes": 0.001}
WHOLE: dict[str, Any] = {"overlap": False}
TASK = "images(samples=84, model='normalised')"  # the last step leaves a worker without samples
SYNCHRONOUS = [
    "ParameterServer(servers=2)",
    "ParameterServer(servers=2, placement='beside')",
    "ParameterServer(placement='beside', returns='gradients')",
]
ON_ARRIVAL = [
    "ParameterServer(consistency='asynchronous', delay_compensation='adaptive')",
    "ParameterServer(consistency='bounded', staleness=1, servers=2, placement='beside')",
    "ParameterServer(backup=1)",
]


def chosen(strategy: str) -> Any:
    return parse(strategy, STRATEGIES, where="test")


@pytest.mark.parametrize("strategy", some(SYNCHRONOUS))
def test_pushed_in_parts_or_whole_the_parameters_are_the_same(
    strategy: str, tmp_path: Path
) -> None:
    """On sockets and in virtual time, with checkpoints between."""
    options: dict[str, Any] = {"optimizer": "Adam(lr=0.01)", "epochs": 2, "checkpoint_every": 2}
    whole = train_threads(chosen(strategy), 4, tmp_path / "whole", TASK, **options, **WHOLE)
    parts = train_threads(chosen(strategy), 4, tmp_path / "parts", TASK, **options, **IN_PARTS)
    channels = [result.states[0].channel for result in (whole, parts)]
    assert [isinstance(channel, PartedChannel) for channel in channels] == [False, True]
    assert equal(parts.final, whole.final)
    simulated(settings(chosen(strategy), 4, TASK, **options, **IN_PARTS), tmp_path / "simulated")
    assert equal(load_file(tmp_path / "simulated" / "parameters.safetensors"), whole.final)


@pytest.mark.parametrize("strategy", ON_ARRIVAL)
def test_on_arrival_every_sample_counts_in_parts_too(strategy: str, tmp_path: Path) -> None:
    result = train_threads(chosen(strategy), 4, tmp_path, TASK, **IN_PARTS, checkpoint_every=2)
    consumed = [
        s.connection.server.own.state.consumed
        for s in result.states
        if s.connection.server is not None
    ]
    assert set(consumed) == {84}


def test_one_worker_of_an_asynchronous_server_equals_single(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "SGD(lr=0.05, momentum=0.9)", "epochs": 2}
    alone = train_threads(Single(), 1, tmp_path / "single", TASK, **options)
    strategy = chosen("ParameterServer(consistency='asynchronous')")
    served = train_threads(strategy, 2, tmp_path / "served", TASK, **options, **IN_PARTS)
    assert isinstance(served.states[0].channel, PartedChannel)
    assert equal(served.final, alone.final)


STEPS = 3
TENSORS = "synthetic(25_000_000, tensors=64, sample_flops=%g)"


def seconds(
    strategy: str, folder: Path, gradient: float = 1.0, ranks: int = 8, *, overlap: bool = True
) -> float:
    """A step of 100 MB at 10 Gbit/s, in virtual time, without the end of the run."""

    def run(steps: int) -> float:
        training = Training(
            ranks=ranks, batch_size=32, equal="worker_batch", steps=steps, threads=1, snapshots=0,
            engine="simulation", cluster=f"lan_10gbit(nodes={ranks}, jitter=None)",
            calibration=NONE, tensors="shapes", trace_steps=0, overlap=overlap,
        )  # fmt: skip
        task = TENSORS % (FLOPS * gradient / 32)
        outcome = simulated_here(Run("test", task, chosen(strategy), 0, training), folder)
        return float(max(report.train_seconds for report in outcome.results))

    folder.mkdir()
    return (run(2 * STEPS) - run(STEPS)) / STEPS


@pytest.mark.parametrize(
    "strategy", ["ParameterServer(servers=8, placement='beside')", *in_lab(["Gossip()"])]
)
def test_a_step_takes_as_long_as_computing(strategy: str, tmp_path: Path) -> None:
    compute = seconds("Single()", tmp_path / "alone", ranks=1)
    assert seconds(strategy, tmp_path / "all") <= 1.05 * compute


def test_no_server_waits_while_another_is_busy(tmp_path: Path) -> None:
    """The links of 4 servers are the limit: 8 workers push 100 MB, and hardly compute."""
    strategy = "ParameterServer(servers=4)"
    whole = seconds(strategy, tmp_path / "whole", gradient=0.01, ranks=12, overlap=False)
    assert seconds(strategy, tmp_path / "parts", gradient=0.01, ranks=12) < 0.6 * whole


def test_overlapped_push_sum_is_faster_where_messages_take_as_long_as_compute(
    tmp_path: Path,
) -> None:
    plain = seconds("StochasticGradientPush()", tmp_path / "plain", gradient=0.1)
    overlapped = seconds("StochasticGradientPush(overlap=1)", tmp_path / "late", gradient=0.1)
    assert overlapped < 0.8 * plain


class Arriving:
    """Values that are there once they are awaited."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())[::-1]
        self.values = [parameter.detach().clone() for parameter in self.parameters]
        self.awaited: list[int] = []
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.fill_(torch.nan)

    def await_for(self, slot: int) -> None:
        self.awaited.append(slot)
        with torch.no_grad():
            for parameter, values in list(zip(self.parameters, self.values, strict=True))[slot:]:
                parameter.data.copy_(values)


def test_forward_awaits_a_parameter_whichever_module_uses_it() -> None:
    """Attention uses the parameters of its projection without calling it."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 1)
    )
    inputs = torch.randn(2, 3, 8)
    expected = module(inputs)
    arriving = Arriving(module)
    with AwaitParameters(arriving.parameters, arriving):
        assert module(inputs).equal(expected)
    assert arriving.awaited[0] > 8
    assert arriving.awaited == sorted(arriving.awaited, reverse=True)
    assert len(arriving.awaited) > 4


class OnTheWire:
    """Holds the last gradient of a backward pass back until something has been sent in it."""

    def hold(self, worker: Worker) -> None:
        self.watch(worker, worker.transport.bytes_sent)

    def watch(self, worker: Worker, before: int) -> None:
        inner, last = worker.gradients.on_ready, len(worker.layout.slots) - 1

        def on_ready(first: int, end: int) -> None:
            if inner is not None:
                inner(first, end)
            if first == last:
                wait_until(lambda: worker.transport.bytes_sent > before, "the first message")
                worker.gradients.on_ready = inner

        worker.gradients.on_ready = on_ready


@dataclass(frozen=True, repr=False)
class HeldServer(OnTheWire, ParameterServer):
    def member(self, worker: Worker) -> Any:
        def begin(usual: Callable[[], None]) -> None:
            usual()
            self.hold(worker)

        return wrapped(super().member(worker), "begin", begin)


@dataclass(frozen=True, repr=False)
class HeldGossip(Gossip):
    def member(self, worker: Worker) -> HeldGossipMember:
        return HeldGossipMember(self, worker, worker.local_optimizer())


@dataclass(eq=False)
class HeldGossipMember(OnTheWire, DPSGDMember):
    def begin(self) -> None:
        before = self.worker.transport.bytes_sent
        super().begin()
        self.watch(self.worker, before)


@pytest.mark.parametrize(
    ("strategy", "tag"),
    [
        (HeldServer(servers=2), "gradient"),  # beside workers, values of the step before are sent
        (HeldServer(consistency="asynchronous"), "gradient"),
        (HeldGossip(), "mix"),
    ],
)
def test_the_first_message_leaves_before_backward_ends(
    strategy: Any, tag: str, tmp_path: Path
) -> None:
    """On real processes; without overlap nothing would be sent before."""
    run = settings(
        strategy, 4, "images(samples=72, model='cnn')", steps=3, trace_steps=3, **IN_PARTS
    )
    train_processes(run, tmp_path)
    trace = read(tmp_path)
    gradients = [e for e in trace.slices("compute") if "gradient" in e["name"]]
    assert len(gradients) >= 3
    for gradient in gradients:
        rank, end = gradient["pid"], gradient["ts"] + gradient["dur"]
        # From the step's beginning: gossip may send in the moment before the forward pass.
        begins = [e["ts"] for e in trace.slices("step", rank=rank) if e["ts"] <= gradient["ts"]]
        sent = [e for e in trace.slices("send", rank=rank) if max(begins) <= e["ts"] < end]
        assert tag in {e["args"].get("tag") for e in sent}

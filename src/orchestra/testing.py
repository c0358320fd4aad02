"""The contract that a strategy, a server rule, a compressor or a topology of your own has to keep.

    from orchestra.testing import assert_contract

    def test_it_keeps_the_contract() -> None:
        assert_contract(MyStrategy(every=4))

Strategies and server rules train on processes, which takes up to a minute on a busy machine.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from orchestra.compression.base import Compressor, Context, Encoder
from orchestra.engines.injection import VARIABLE, Inject
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.api import train
from orchestra.parameter_server.how import Correction
from orchestra.parameter_server.messages import Push
from orchestra.parameter_server.when import When
from orchestra.records.record import RunRecord
from orchestra.settings import Settings, parse, write
from orchestra.strategies.base import Strategy
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.single import Single
from orchestra.topologies import Topology, connected, doubly_stochastic

RANKS = range(1, 18)
"""The numbers of ranks with which a topology is tried."""
SHAPES = ((1,), (7,), (64,), (20, 15))
"""Of the tensors with which a compressor is tried."""
STEPS = 40
EVERY = 8
"""Steps between two checkpoints of a run that is killed."""
KILLED_AT = 19
SAMPLES = 16
"""Of each worker's batch."""
RATE = 0.05
LEARNT = 0.97
"""Of the loss at the beginning, what is left at the end is less than that."""
LOG_CLASSES = 2.303
"""The loss of a model that knows nothing of ten digits: log 10."""


def assert_contract(
    subject: Strategy | When | Correction | Compressor | Topology,
    *,
    ranks: int = 3,
    exact: bool = True,
) -> None:
    """Check that `subject` keeps what Orchestra takes for granted of its kind.

    *All*: written as a notation and read again it is the same.

    *A strategy* learns the task `digits` on `ranks` processes, with each sample once. Unless
    its traits say that the parameters depend on speed, the simulation ends with the same bits and
    bytes, and so does a run that is killed and goes on from a checkpoint. With one worker it trains
    as one process does, to the bit (`exact`), where some number of ranks up to `ranks` gives it one
    worker. Its class has to be in a module that processes can import.

    *A server rule* does so under `ParameterServer`, as `consistency` or as `learning_rate`. A
    `When` also puts no push into two groups, and leaves none behind once nobody works.

    *A compressor* makes payloads of the bytes that it states. What has arrived and the residual of
    error feedback are together what went in, the same values give the same payload, and what is no
    number stays none.

    *A topology*, for 1 to 17 ranks, returns tuples, has no link of a rank to itself, repeats after
    its period, and carries what anyone knows to everyone. Weights of gossip sum to one in both
    directions.

    Raises:
        AssertionError: it does not; one line says what.
    """
    registry = STRATEGIES
    _require(
        subject,
        parse(write(subject, registry), registry, where="assert_contract") == subject,
        "is another one after it was written as a notation, and read",
    )
    for kind, check in _CHECKS.items():
        if isinstance(subject, kind):
            check(subject, ranks, exact)
            return
    raise TypeError(f"assert_contract knows no contract of a {type(subject).__name__}")


def _fail(subject: object, sentence: str) -> NoReturn:
    raise AssertionError(f"{subject!r} {sentence}")


def _require(subject: object, holds: object, sentence: str) -> None:
    if not holds:
        _fail(subject, sentence)


# Strategies


@dataclass(frozen=True)
class _Trainings:
    """Short trainings of `digits` under `strategy`, each in a folder of its own in `folder`."""

    strategy: Strategy
    folder: Path

    def run(self, name: str, ranks: int, **settings: Any) -> RunRecord:
        """Train, or go on with what was begun under the same name."""
        given = {"steps": STEPS, "batch_size": SAMPLES, "checkpoint_every": EVERY, **settings}
        strategy = given.pop("strategy", self.strategy)
        return train(
            "digits", strategy, ranks, out=self.folder / name, quiet=True,
            optimizer=f"SGD(lr={RATE})", equal="worker_batch", threads=1, **given,
        )  # fmt: skip

    def killed(self, ranks: int) -> RunRecord:
        """Kill the first worker in the midst of a training, and go on."""
        worker = self.strategy.roles(ranks).workers[0]
        fault = Inject("kill", rank=worker, at="gradient", number=KILLED_AT)
        with patch.dict(os.environ, {VARIABLE: repr(fault)}), suppress(RunFailed):
            self.run("killed", ranks)
            _fail(self.strategy, f"ends well although its rank {worker} is killed")
        return self.run("killed", ranks)


OF_A_MEMBER = (
    "keep all state in fields that the member is made from, and let nothing depend on time (or say "
    "depends_on_speed in its traits)"
)
OF_A_RULE = "let the rule decide by its arguments alone (a Correction remembers in memory.own)"
OF_ONE_WORKER = (
    "what is exchanged has to leave a single worker's training as it is (exact=False excuses it)"
)


def _check_strategy(strategy: Strategy, ranks: int, exact: bool, remedy: str = OF_A_MEMBER) -> None:
    roles = strategy.roles(ranks)
    _require(strategy, roles == strategy.roles(ranks), "has other roles when asked again")
    _require(strategy, roles.workers, f"has no worker among {ranks} ranks")
    with tempfile.TemporaryDirectory(prefix="orchestra-contract-") as folder:
        trainings = _Trainings(strategy, Path(folder))
        found = trainings.run("processes", ranks)
        _check_record(strategy, found, ranks)
        if not strategy.traits().depends_on_speed:
            virtual = trainings.run("simulated", ranks, engine="simulation", cluster="lan_1gbit")
            _require_same(strategy, found, virtual, "in the simulation", remedy)
            _require(
                strategy,
                found.traffic.sent == virtual.traffic.sent,
                f"sends {found.traffic.sent} bytes on processes, and {virtual.traffic.sent} in the "
                "simulation: its messages depend on something that it does not state",
            )
            resumed = trainings.killed(ranks)
            _require_same(strategy, found, resumed, "after it was killed and resumed", remedy)
        if exact and (few := _ranks_of_one_worker(strategy, ranks)):
            # A run's samples are steps x ranks x batch_size, servers included
            alone = trainings.run("alone", 1, strategy=Single(), steps=STEPS * few)
            one = trainings.run("one worker", few)
            when = "than Single() with one worker"
            _require_same(strategy, alone, one, when, OF_ONE_WORKER)


def _check_record(strategy: Strategy, record: RunRecord, ranks: int) -> None:
    budget = STEPS * SAMPLES * ranks
    _require(
        strategy,
        record.ending.status == "completed",
        f"ends as {record.ending.status}: {record.ending.failure}",
    )
    _require(
        strategy,
        0 < record.learned.samples <= budget,
        f"trains on {record.learned.samples} samples, and was given {budget}",
    )
    assert record.learned.loss is not None
    _require(
        strategy,
        record.learned.loss < LEARNT * LOG_CLASSES,
        f"learns nothing: the loss is {record.learned.loss:.3g} at the end",
    )


def _require_same(
    strategy: Strategy, one: RunRecord, other: RunRecord, when: str, remedy: str
) -> None:
    _require(
        strategy,
        one.learned.parameters_sha256 == other.learned.parameters_sha256,
        f"ends with other parameters {when}: {remedy}",
    )


def _ranks_of_one_worker(strategy: Strategy, most: int) -> int | None:
    for ranks in range(1, most + 1):
        with suppress(InputError):
            if len(strategy.roles(ranks).workers) == 1:
                return ranks
    return None


# Server rules


def _check_when(rule: When, ranks: int, exact: bool) -> None:
    pushes = [Push(worker, clock, 8, 24, 1.0, False) for worker, clock in product(range(3), (1,))]
    for count, working in product(range(4), range(4)):
        pending = pushes[:count]
        groups = rule.ready(pending, working)
        taken = [push for group in groups for push in group]
        _require(rule, len(set(taken)) == len(taken), "puts a push into two groups")
        _require(rule, set(taken) <= set(pending), "applies a push that is not pending")
        _require(rule, all(groups), "returns a group without pushes")
        _require(rule, groups == rule.ready(pending, working), "decides otherwise when asked again")
        _require(rule, working or len(taken) == count, "leaves pushes behind although nobody works")
    # Several workers may share an update, so that one trains as one process only by chance
    server = ParameterServer(consistency=rule)
    _check_strategy(server, ranks, exact and not rule.averages, OF_A_RULE)


def _check_correction(rule: Correction, ranks: int, exact: bool) -> None:
    server = ParameterServer(consistency="asynchronous", learning_rate=rule)
    _check_strategy(server, ranks, exact, OF_A_RULE)


# Compressors


def _check_compressor(compressor: Compressor, ranks: int, exact: bool) -> None:
    for shape, dtype in product(SHAPES, (torch.float32, torch.float64)):
        _check_feedback(compressor, shape, dtype)
        if isinstance(compressor, Encoder):
            _check_payload(compressor, shape, dtype)
    _check_no_numbers(compressor)


def _context(
    compressor: Compressor, shape: Sequence[int], dtype: torch.dtype, step: int = 0
) -> Context:
    memory = compressor.memory(torch.zeros(*shape, dtype=dtype), 0)
    return Context(tuple(shape), 0, step, 0, 1, memory)


def _values(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of values of very unlike magnitudes. Some values are 0."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    normal = torch.randn(3, *shape, generator=generator, dtype=dtype)
    return (normal[0] * normal[1].exp() * (normal[2] > -1.3)).flatten()


def _check_feedback(compressor: Compressor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """What arrives of one worker, and its residual, are what went in."""
    if not compressor.error_feedback:
        return
    values = _values(shape, dtype)
    arrived, residual = values.clone(), torch.zeros_like(values)
    for _ in compressor.rounds([arrived], [residual], [_context(compressor, shape, dtype)]):
        pass
    close = torch.allclose(arrived + residual, values, rtol=1e-4, atol=1e-5)
    _require(
        compressor, close, f"loses something of a tensor of shape {tuple(shape)}: what arrives and "
        "the residual are not together what went in",
    )  # fmt: skip
    _require(
        compressor,
        not values.any() or residual.norm() < values.norm(),
        "is no contraction: with error feedback residuals grow",
    )


def _check_payload(encoder: Encoder, shape: Sequence[int], dtype: torch.dtype) -> None:
    values = _values(shape, dtype)
    before = values.clone()
    payload, again = (
        encoder.encode(values.clone(), _context(encoder, shape, dtype)) for _ in range(2)
    )
    size = encoder.size(values.numel(), dtype.itemsize, 0)
    where = f"of a tensor of shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}"
    _require(encoder, payload.dim() == 1, f"makes a payload {where} that is not flat")
    _require(
        encoder,
        payload.nbytes == size if encoder.sized else payload.nbytes <= size,
        f"makes a payload {where} of {payload.nbytes} bytes, and states {size}",
    )
    _require(
        encoder,
        encoder.adds or payload.dtype is torch.uint8,
        f"makes a payload {where} of {payload.dtype}: one that does not add is of uint8",
    )
    _require(
        encoder,
        torch.equal(payload, again),
        f"makes another payload {where} from the same values: draw from Context.random",
    )
    _require(encoder, torch.equal(values, before), f"changes the values {where} that it encodes")


def _check_no_numbers(compressor: Compressor) -> None:
    """A training that diverges has to be seen to."""
    for bad in (float("nan"), float("inf")):
        shape = SHAPES[-1]
        for step in range(1000):  # a sample of the elements meets it once
            values = _values(shape, torch.float32)
            values[7] = bad
            residuals = [torch.zeros_like(values)] if compressor.error_feedback else []
            there = _context(compressor, shape, torch.float32, step)
            for _ in compressor.rounds([values], residuals, [there]):
                pass
            if not torch.isfinite(values).all():
                break
        else:
            _fail(compressor, f"turns a gradient with {bad} into numbers")


# Topologies


def _check_topology(topology: Topology, ranks: int, exact: bool) -> None:
    for size in RANKS:
        with suppress(InputError):  # it may refuse a number of ranks
            _check_graphs(topology, size)


def _check_graphs(topology: Topology, ranks: int) -> None:
    where = f"with {ranks} ranks"
    for links in (topology.links(ranks, step) for step in range(topology.period(ranks))):
        tuples = all(isinstance(each, tuple) for each in (links, *links))
        _require(topology, tuples, f"returns links {where} that are not all tuples")
    graphs = topology.graphs(ranks)
    for step, graph in enumerate(graphs):
        _require(topology, len(graph) == ranks, f"has {len(graph)} rows {where}")
        for rank, targets in enumerate(graph):
            _require(topology, rank not in targets, f"links rank {rank} to itself {where}")
            _require(
                topology,
                list(targets) == sorted({*targets} & {*range(ranks)}),
                f"links rank {rank} to {targets} {where}: name other ranks, in ascending order",
            )
        same = topology.links(ranks, step) == graph
        _require(topology, same, f"has another graph in step {step} when asked again {where}")
        weights = doubly_stochastic(graph)
        columns = [sum(row.get(rank, 0.0) for row in weights) for rank in range(ranks)]
        for total in (*(sum(row.values()) for row in weights), *columns):
            _require(topology, abs(total - 1) < 1e-9, f"has weights {where} that sum to {total}")
    _require(topology, connected(graphs), f"leaves ranks apart {where}")


_CHECKS: dict[type[Settings], Callable[[Any, int, bool], None]] = {
    Strategy: _check_strategy,
    When: _check_when,
    Correction: _check_correction,
    Compressor: _check_compressor,
    Topology: _check_topology,
}

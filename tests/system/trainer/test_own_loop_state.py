"""The state of a loop of the user's own: saved, loaded, and the training that goes on from it."""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.commands import torchrun
from tests.support.lab import by_turns, in_lab, some
from tests.support.own_loops import BATCH, State, Stream, member_of, samples, sgd
from tests.support.paths import SCRIPTS
from tests.support.threads import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from orchestra import exchange, optimizers
from orchestra.engines.processes.distribute import Channel
from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.server_members import ServedMember
from orchestra.trainer.own_loop import OwnLoop
from orchestra.worker.interception import intercepted
from orchestra.worker.runtime import Runtime

EPOCHS, COUNT = 3, 24
SHARDED = "AllReduce(shard='optimizer')"
BESIDE = "ParameterServer(placement='beside', servers=2)"
ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"
PACED = "ParameterServer(consistency='asynchronous', placement='beside')"


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """With parameters from a generator of its own: ranks on threads share the global one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.uniform_(-0.6, 0.6, generator=generator)
    return model


def a_model(seed: int) -> nn.Module:
    """With a buffer, and parameters that servers cut."""
    return drawn(
        nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)), seed
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With moments, and a step count for the bias correction."""
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def shuffled() -> DataLoader[Any]:
    return DataLoader(samples(COUNT), batch_size=BATCH, shuffle=True)


class Run:
    """One rank's loop, which keeps what it has seen and saved."""

    def __init__(
        self,
        runtime: Runtime,
        strategy: str,
        loader: Any,
        initial: int = 0,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
        **options: Any,
    ) -> None:
        self.model = a_model(initial)
        self.optimizer = optimizer(self.model)
        self.loop = OwnLoop(
            runtime, self.model, self.optimizer, loader,
            parse(strategy, STRATEGIES, where="strategy"), **options,
        )  # fmt: skip
        self.batches = self.loop.batches
        self.seen: list[list[int]] = []
        self.saved: dict[int, bytes] = {}

    def train(self, save_after: tuple[int, ...] = (), epochs: int = EPOCHS) -> None:
        """Up to the epoch `epochs`; steps count from 1, and what is 0 or less is an epoch's end."""
        while self.batches.epoch < epochs and not self.batches.ended:
            for batch in self.batches:
                self.step(batch)
                self.seen.append(batch[2].tolist())
                if len(self.seen) in save_after:
                    self.save(len(self.seen))
            if -self.batches.epoch in save_after:
                self.save(-self.batches.epoch)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()

    def save(self, place: int) -> None:
        file = io.BytesIO()
        torch.save(self.batches.state_dict(), file)
        self.saved[place] = file.getvalue()

    def load(self, saved: bytes) -> None:
        self.batches.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))

    def end(self) -> tuple[State, list[list[int]], dict[int, bytes]]:
        self.loop.finish(goes_on=True)
        return member_of(self.model), self.seen, self.saved


def equal(one: State, other: State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def through_and_resumed(
    strategy: str,
    places: tuple[int, ...],
    ranks: int = 3,
    loader: Callable[[], Any] = shuffled,
    **options: Any,
) -> None:
    """Training in one piece is what it is with a new start, of another model, from each place."""

    def through(runtime: Runtime) -> Any:
        run = Run(runtime, strategy, loader(), **options)
        run.batches.serve_to_the_end() if not run.batches.is_worker() else run.train(places)
        return run.end()

    expected = run_ranks(ranks, through)
    for place in places:
        state = expected[0][2][place]

        def resumed(runtime: Runtime, state: bytes = state) -> Any:
            run = Run(runtime, strategy, loader(), initial=runtime.rank + 1, **options)
            if run.batches.is_worker():
                run.load(state)
                run.train()
            else:
                run.batches.serve_to_the_end()
            return run.end()

        for (one, seen, _), (other, later, _) in zip(
            expected, run_ranks(ranks, resumed), strict=True
        ):
            assert equal(one, other)
            assert later == (seen[place:] if place > 0 else seen[len(seen) - len(later) :])


@pytest.mark.parametrize(
    "strategy",
    [
        "AllReduce",
        SHARDED,
        "ParameterServer",
        *in_lab([BESIDE, "ParameterServer(placement='beside', returns='gradients')"]),
        "ParameterServer(servers=2, replicas=1)",
        *in_lab(["LocalSGD(3, outer=Nesterov())", "LocalSGD(2, outer=Elastic())", "Gossip"]),
        "LocalSGD(4, outer=SlowMo(), overlap=1)",
        "StochasticGradientPush",
        pytest.param("Switch(AllReduce, LocalSGD(2), when=AfterSteps(6))", marks=pytest.mark.lab),
    ],
)
def test_resumed(strategy: str) -> None:
    """With two workers at least: a single one draws its order from the generator of all threads."""
    through_and_resumed(strategy, (1, 4, -2), ranks=4 if "replicas" in strategy else 3)


def test_nobody_goes_on_before_everybody_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server beside a worker would answer from a state that is not restored."""
    running, restore, slow_ones = threading.Event(), optimizers.restore, [True]

    def slow(value: Any, saved: Any) -> Any:
        served = isinstance(value, ServedMember) and value.connection.server is not None
        if served and slow_ones:
            slow_ones.clear()
            assert not running.wait(0.3)
        return restore(value, saved)

    def program(runtime: Runtime) -> None:
        run = Run(runtime, BESIDE, shuffled())
        run.save(0)
        saved = exchange.agree_on_data(run.loop.worker, run.saved[0].hex(), 0)
        run.load(bytes.fromhex(saved))
        running.set()
        run.train(epochs=1)
        run.end()

    monkeypatch.setattr(optimizers, "restore", slow)
    run_ranks(3, program)


def test_resumed_where_workers_take_batches_from_a_queue() -> None:
    """Saved between epochs, twice; each sample is taken once."""

    def through(runtime: Runtime) -> Any:
        run = Run(runtime, ASYNCHRONOUS, shuffled())
        if not run.batches.is_worker():
            run.batches.serve_to_the_end()
            return run.end()
        run.save(0)
        run.train((-1,), epochs=1)
        run.save(-1)
        run.train(epochs=2)
        return run.end()

    def resumed(runtime: Runtime) -> Any:
        run = Run(runtime, ASYNCHRONOUS, shuffled(), initial=1)
        if run.batches.is_worker():
            run.load(saved)
            run.train(epochs=2)
        else:
            run.batches.serve_to_the_end()
        return run.end()

    first = run_ranks(3, through)
    saved = first[0][2][-1]
    second = run_ranks(3, resumed)
    for results, epochs in ((first, 2), (second, 1)):
        seen = sorted(number for _, batches, _ in results for batch in batches for number in batch)
        assert seen == sorted(list(range(COUNT)) * epochs)
    assert equal(second[0][0], second[1][0])


def own_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    sampler = WeightedRandomSampler([1.0] * COUNT, COUNT, generator=generator)
    return DataLoader(samples(COUNT), batch_size=BATCH, sampler=sampler)


LOADERS: dict[str, Callable[[], Any]] = {
    "own generator": own_generator,
    "stream": lambda: DataLoader(Stream(samples(COUNT)), batch_size=BATCH),
    "list": lambda: list(DataLoader(samples(COUNT), batch_size=BATCH)),
    "loading ahead": lambda: DataLoader(samples(COUNT), BATCH, shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("kind", some(LOADERS))
def test_the_order_of_any_loader_goes_on(kind: str) -> None:
    through_and_resumed("AllReduce", (2, -1), ranks=2, loader=LOADERS[kind])


def test_models_that_are_trained_by_turns_agree_in_mid_epoch() -> None:
    def train(runtime: Runtime) -> list[State]:
        first = Run(runtime, PACED, shuffled(), work="equal")
        second = Run(intercepted(runtime, Channel(1)), PACED, first.batches, initial=3)
        batches = iter(first.batches)
        for batch in (next(batches) for _ in range(3)):
            first.step(batch)
            second.step(batch)
        first.batches.agree()
        agreed = [member_of(run.model) for run in (first, second)]
        batches.close()
        for run in (first, second):
            run.loop.finish()
        return agreed

    one, other = run_ranks(2, train)
    assert all(equal(*pair) for pair in zip(one, other, strict=True))


def test_a_third_model_may_be_given_the_batches_of_the_second() -> None:
    """As a script does that calls what `distribute` returns `batches`, each time."""

    def train(runtime: Runtime) -> list[State]:
        runs = [Run(runtime, "AllReduce", shuffled())]
        for number in (1, 2):
            channel = intercepted(runtime, Channel(number))
            runs.append(Run(channel, "AllReduce", runs[-1].batches, initial=3 * number))
        for batch in runs[-1].batches:
            for run in runs:
                run.step(batch)
        for run in runs:
            run.loop.finish()
        return [member_of(run.model) for run in runs]

    def alone(runtime: Runtime, initial: int) -> State:
        run = Run(runtime, "AllReduce", shuffled(), initial=initial)
        run.train(epochs=1)
        return run.end()[0]

    for number, state in enumerate(run_ranks(2, train)[0]):
        expected, _ = run_ranks(2, functools.partial(alone, initial=3 * number))
        assert equal(state, expected)


@pytest.mark.parametrize("strategy", ["AllReduce", BESIDE])
def test_models_that_are_trained_by_turns(strategy: str) -> None:
    """Each has a state of its own; saved in mid-epoch, with half of a step accumulated before."""
    saved: list[bytes] = []

    def train(runtime: Runtime) -> list[State]:
        first = Run(runtime, strategy, own_generator(), initial=len(saved), work="equal")
        runtime = intercepted(runtime, Channel(1))
        second = Run(runtime, strategy, first.batches, initial=3, accumulation=2)
        runs, steps, resumed = (first, second), 0, bool(saved)
        if resumed:
            for run, state in zip(runs, saved, strict=True):
                run.load(state)
        for _ in range(first.batches.epoch, 2):
            for batch in first.batches:
                first.step(batch)
                nn.functional.mse_loss(second.model(batch[0]), batch[1]).backward()
                if first.batches.taken % 2 == 0:
                    second.optimizer.step()
                    second.optimizer.zero_grad()
                steps += 1
                if steps == 8 and not resumed:
                    for run in runs:
                        run.save(0)
        for run in runs:
            run.loop.finish()
        if runtime.rank == 0 and not resumed:
            saved.extend(run.saved[0] for run in runs)
        return [member_of(run.model) for run in runs]

    through, later = run_ranks(2, train), run_ranks(2, train)
    assert all(
        equal(*pair) for pair in zip(through[0] + through[1], later[0] + later[1], strict=True)
    )


@pytest.mark.parametrize("strategy", ["AllReduce", BESIDE.replace(", servers=2", ""), "Gossip"])
def test_one_worker_draws_the_same_numbers(strategy: str) -> None:
    """Its loader draws from the global generator, and so does dropout; batches are not loaded that
    were had."""
    loaded: list[int] = []

    class Noted(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            loaded.append(index)
            return tuple(tensor[index] for tensor in self.tensors)

    def trained(runtime: Runtime) -> Any:
        run = Run(
            runtime, strategy, DataLoader(Noted(*samples(COUNT).tensors), BATCH, shuffle=True)
        )
        assert isinstance(run.model, nn.Sequential)
        run.model.insert(3, nn.Dropout(0.5))
        if saved:
            torch.manual_seed(9)
            run.load(saved[5])
        run.train((5,))
        return run.end()

    saved: dict[int, bytes] = {}
    torch.manual_seed(7)
    ((expected, seen, saved),) = run_ranks(1, trained)
    loaded.clear()
    ((state, later, _),) = run_ranks(1, trained)
    assert equal(state, expected)
    assert later == seen[5:]
    assert loaded == [number for batch in later for number in batch]


# What is loaded into model and optimizer


def in_order() -> DataLoader[Any]:
    return DataLoader(samples(COUNT), batch_size=BATCH)


def union(workers: int) -> DataLoader[Any]:
    return DataLoader(samples(COUNT), batch_size=workers * BATCH)


def without_buffers(seed: int) -> nn.Module:
    return drawn(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)), seed)


def some_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()


def plain_states(workers: int) -> list[Any]:
    """Model and optimizer in plain PyTorch, after each of three epochs."""
    model = without_buffers(0)
    optimizer = adam(model)
    states = []
    for _ in range(3):
        some_steps(model, optimizer, union(workers))
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    return states


def same(ours: Any, plain: Any) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)


WORKERS = {  # of three ranks
    "AllReduce": 3, SHARDED: 3, "ParameterServer": 2, BESIDE: 3,
    "ParameterServer(servers=2, replicas=1)": 1,
    "Switch(AllReduce, ParameterServer(placement='beside'), when=AfterSteps(2))": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "when"),
    some(by_turns([*WORKERS], ["before distribute", "after it", "in mid-training"])),
)
def test_what_is_loaded_counts(strategy: str, when: str) -> None:
    """Model and optimizer go on from files of plain PyTorch, whose files they write; what is loaded
    last stays, and what was trained last goes with the optimizer into the next loop."""
    workers = WORKERS[strategy]
    states = plain_states(workers)
    final = 2 if when == "before distribute" else 1

    def train(runtime: Runtime) -> Any:
        model = without_buffers(runtime.rank + 1)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)  # what is loaded counts

        def load(epoch: int) -> None:
            loaded = copy.deepcopy(states[epoch])
            model.load_state_dict(loaded[0])
            optimizer.load_state_dict(loaded[1])

        if when == "before distribute":
            load(0)
        parsed = parse(strategy, STRATEGIES, where="strategy")
        loop = OwnLoop(runtime, model, optimizer, in_order(), parsed)
        batches = loop.batches
        if not batches.is_worker():
            batches.serve_to_the_end()
        else:
            if when == "after it":
                load(0)
            some_steps(model, optimizer, batches)
            if when == "in mid-training":
                load(0)
                batches.agree()
                some_steps(model, optimizer, batches)
            batches.state_dict()
            if runtime.rank == 0:
                same(optimizer.state_dict()["state"], states[1][1]["state"])
            some_steps(model, optimizer, batches)
            if final == 1:
                load(1)
        loop.finish(goes_on=True)
        return member_of(model), optimizer.state_dict()

    for rank, (state, moments) in enumerate(run_ranks(3, train)):
        if rank < workers:
            same(state, states[final][0])
            same(moments["state"], states[final][1]["state"])


@pytest.mark.parametrize(
    "strategy",
    [
        ASYNCHRONOUS, PACED,
        "LocalSGD(3, outer=Nesterov())", "LocalSGD(2, outer=Elastic())", "ElasticAveraging(1)",
        "StochasticGradientPush(overlap=1)", "PairwiseAveraging", "Gossip", "Hop", "Prague(2)",
    ],
)  # fmt: skip
def test_no_strategy_goes_back_to_what_was_before_a_load(strategy: str) -> None:
    """With a rate of 0 the model stays what was loaded, whatever is averaged, and with whom."""
    loaded = without_buffers(9).state_dict()

    def train(runtime: Runtime) -> State:
        model = without_buffers(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parsed = parse(strategy, STRATEGIES, where="strategy")
        loop = OwnLoop(runtime, model, optimizer, in_order(), parsed)
        if loop.batches.is_worker():
            some_steps(model, optimizer, loop.batches)
            model.get_submodule("0").load_state_dict(
                {name: loaded[f"0.{name}"] for name in ("weight", "bias")}
            )
            model.load_state_dict(loaded)
            optimizer.param_groups[0]["lr"] = 0.0
            some_steps(model, optimizer, loop.batches)
        else:
            loop.batches.serve_to_the_end()
        loop.finish(goes_on=True)
        return member_of(model)

    for state in run_ranks(3, train)[:2]:
        same(state, dict(loaded))


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("AllReduce", 3), (SHARDED, 3), ("ParameterServer", 2), (BESIDE, 3),
        ("ParameterServer(servers=2, replicas=1)", 1),
    ],
)  # fmt: skip
def test_moments_stay_where_the_model_alone_is_loaded(strategy: str, workers: int) -> None:
    """As in plain PyTorch."""

    initial = without_buffers(0)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        before = copy.deepcopy(model.state_dict())
        some_steps(model, optimizer, batches)
        model.load_state_dict(before)
        some_steps(model, optimizer, batches)

    def distributed(runtime: Runtime) -> State:
        model = copy.deepcopy(initial)
        optimizer = adam(model)
        parsed = parse(strategy, STRATEGIES, where="strategy")
        own = OwnLoop(runtime, model, optimizer, in_order(), parsed)
        if own.batches.is_worker():
            loop(model, optimizer, own.batches)
        else:
            own.batches.serve_to_the_end()
        own.finish(goes_on=True)
        return member_of(model)

    plain = copy.deepcopy(initial)
    loop(plain, adam(plain), union(workers))
    for state in run_ranks(3, distributed)[:workers]:
        same(state, member_of(plain))


# What is refused


def refused(words: str, attempt: Callable[[Run], None], strategy: str, **options: Any) -> None:
    """On two ranks."""

    def try_it(runtime: Runtime) -> None:
        attempt(Run(runtime, strategy, **{"loader": shuffled(), **options}))

    with pytest.raises(InputError, match=words):
        run_ranks(2, try_it)


def test_a_group_of_backward_passes_goes_on_where_it_was() -> None:
    """After a step that came late, in the midst of a group, its second backward pass exchanges."""

    def gradient_of(run: Run, batch: Any) -> list[float]:
        nn.functional.mse_loss(run.model(batch[0]), batch[1]).backward()
        grad: torch.Tensor = run.model[0].weight.grad  # type: ignore[index]
        return grad.flatten().tolist()

    def through(runtime: Runtime) -> tuple[list[float], bytes]:
        run = Run(runtime, "AllReduce", shuffled(), accumulation=2)
        batches = iter(run.batches)
        for _ in range(3):
            gradient_of(run, next(batches))
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.save(1)
        return gradient_of(run, next(batches)), run.saved[1]

    (one, state), (other, _) = run_ranks(2, through)
    assert one == other  # an average

    def resumed(runtime: Runtime) -> list[float]:
        run = Run(runtime, "AllReduce", shuffled(), accumulation=2)
        run.load(state)
        return gradient_of(run, next(iter(run.batches)))

    assert run_ranks(2, resumed) == [one, one]


def test_states_of_something_else_are_refused() -> None:
    def save(runtime: Runtime) -> dict[int, bytes]:
        run = Run(runtime, "LocalSGD(2)", shuffled())
        run.train((1,), epochs=1)
        return run.end()[2]

    def load(run: Run) -> None:
        run.load(first[1])

    def load_another_models(run: Run) -> None:
        state = torch.load(io.BytesIO(first[1]))
        state["ranks"]["0"]["parameters"]["0.weight"] = torch.zeros(5, 4)
        run.batches.load_state_dict(state)

    def load_unlike(run: Run) -> None:
        state = torch.load(io.BytesIO(first[1]))
        state["position"]["epoch"] += run.loop.worker.rank
        run.batches.load_state_dict(state)

    def load_in_an_iteration(run: Run) -> None:
        iterator = iter(run.batches)
        run.step(next(iterator))
        load(run)

    first, second = run_ranks(2, save)
    shorter = DataLoader(samples(COUNT // 2), batch_size=BATCH, shuffle=True)
    for words, attempt in (
        (r"another model.*'0.weight' has the shape \(5, 4\)", load_another_models),
        ("workers load unlike states", load_unlike),
        ("is under way: call it before", load_in_an_iteration),
        ("lacks what other ranks had", lambda run: run.load(second[1])),
        ("expected what batches.state_dict", lambda run: run.batches.load_state_dict({})),
    ):
        refused(words, attempt, "LocalSGD(2)")
    refused(r"of strategy=LocalSGD\(2\), and this loop of strategy=Gossip", load, "Gossip")
    words = "of optimizer=AdamW, and .* optimizer=SGD"
    refused(words, load, "LocalSGD(2)", optimizer=sgd)
    refused("seed=0, and this loop of seed=1: distribute with", load, "LocalSGD(2)", seed=1)
    refused("in the midst of an epoch of 6 batches", load, "LocalSGD(2)", loader=shorter)
    with pytest.raises(InputError, match="of ranks=2, and this loop of ranks=3"):
        run_ranks(3, lambda runtime: load(Run(runtime, "LocalSGD(2)", shuffled())))


def test_there_is_no_state_in_the_midst_of_a_step_or_of_a_shared_epoch() -> None:
    def before_the_step(run: Run) -> None:
        batch = next(iter(run.batches))
        run.model(batch[0]).sum().backward()
        run.batches.state_dict()

    def in_mid_epoch(run: Run) -> None:
        run.train((1,))

    refused("wait for their step", before_the_step, "AllReduce")
    refused("work='equal' in dist", in_mid_epoch, PACED)


def test_moments_are_saved_where_they_are() -> None:
    def at_once(run: Run) -> None:
        run.step(next(iter(run.batches)))
        run.optimizer.state_dict()

    def on_the_second(run: Run) -> None:
        run.step(next(iter(run.batches)))
        run.batches.state_dict()
        if run.loop.worker.rank == 1:
            run.optimizer.state_dict()

    def after_another_step(run: Run) -> None:
        run.train((1,), epochs=1)
        run.optimizer.state_dict()

    for strategy in (SHARDED, BESIDE):
        refused("save batches.state_dict", at_once, strategy)
        refused("collected the moments on rank 0", on_the_second, strategy)
        refused("save batches.state_dict", after_another_step, strategy)


def test_moments_on_one_rank_only_are_refused() -> None:
    def distribute(runtime: Runtime) -> None:
        model = without_buffers(0)
        optimizer = adam(model)
        if runtime.rank == 1:
            some_steps(model, optimizer, union(1))
        parsed = parse("AllReduce", STRATEGIES, where="strategy")
        OwnLoop(runtime, model, optimizer, in_order(), parsed)

    with pytest.raises(InputError, match="other moments than on the first rank"):
        run_ranks(2, distribute)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("strategy", some(["AllReduce", SHARDED, "ParameterServer", BESIDE]))
def test_moments_go_into_the_next_loop(strategy: str, loaded: bool) -> None:
    """Two loops with one optimizer are one of two epochs; dedicated servers come back between. What
    was loaded since the last step takes the place of what was trained."""
    workers = 2 if strategy == "ParameterServer" else 3
    initial, states = without_buffers(0), plain_states(workers)

    def train(runtime: Runtime) -> State:
        model = copy.deepcopy(initial)
        optimizer = adam(model)
        for number in range(2):
            channel = intercepted(runtime, Channel(number))
            parsed = parse(strategy, STRATEGIES, where="strategy")
            loop = OwnLoop(channel, model, optimizer, in_order(), parsed)
            if loop.batches.is_worker():
                some_steps(model, optimizer, loop.batches)
                if loaded and not number:
                    some_steps(model, optimizer, loop.batches)
                    model.load_state_dict(states[0][0])
                    optimizer.load_state_dict(copy.deepcopy(states[0][1]))
            else:
                loop.batches.serve_to_the_end()
            loop.finish(goes_on=True)
            loop.close(handed_over=True)
        return member_of(model)

    for state in run_ranks(3, train)[:workers]:
        same(state, dict(states[1][0]))


# On processes


@pytest.mark.lab
@pytest.mark.parametrize(
    "strategies",
    [
        [SHARDED, "ParameterServer", "LocalSGD(2)"],
        pytest.param(["AllReduce", BESIDE], marks=pytest.mark.lab),
    ],
)
def test_other_processes_go_on_from_a_file(strategies: list[str], tmp_path: Path) -> None:
    """Bit for bit, with each rank's random numbers, whatever another seed has given meanwhile."""
    for mode in ("through", "resumed"):
        with torchrun(SCRIPTS / "saved_loop.py", 3, [mode, *strategies], tmp_path) as process:
            ended = process.end()
        assert ended.status == 0, ended.err
    for number, strategy in enumerate(strategies):
        for rank in range(2 if strategy == "ParameterServer" else 3):
            through, resumed = (
                torch.load(tmp_path / f"{mode}-{number}-{rank}.pt", weights_only=True)
                for mode in ("through", "resumed")
            )
            assert equal(resumed, through), (strategy, rank)

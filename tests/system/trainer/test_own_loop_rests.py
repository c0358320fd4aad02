"""Where all workers of a loop of the user's own come to rest, and what the loop is in the midst of.

A rest is possible in five places of a loop; each place is tried in each state of the loop. Where
averages are exact, two workers have to train what one process trains. Replicas that differ have to
be equal after the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.lab import some
from tests.support.own_loops import (
    BATCH,
    State,
    alone,
    close,
    in_order,
    mean_square,
    member_of,
    samples,
    sgd,
    small_model,
)
from tests.support.threads import run_ranks
from torch import nn
from torch.utils.data import DataLoader

from orchestra.engines.processes.distribute import Channel
from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.own_loop import Batches, OwnLoop
from orchestra.worker.interception import intercepted
from orchestra.worker.runtime import Runtime

WORKERS, COUNT, EPOCHS = 2, 20, 2  # five batches of each worker in an epoch
REPLICAS, QUEUE = "LocalSGD(100)", "PairwiseAveraging"


class Script:
    """A loop that is brought into a state; in one process `batches` is a plain loader."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, accumulation: int
    ) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.accumulation = accumulation
        self.distributed = batches if isinstance(batches, Batches) else None
        self.after_rests: list[State] = []
        self.saved: dict[str, Any] | None = None

    def backward(self, batch: Any) -> None:
        (mean_square(self.model, batch) / self.accumulation).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, batches: Iterator[Any] | None = None) -> None:
        """Train on the batches that are left of an epoch; there may be fewer for the last step."""
        number = 0
        for number, batch in enumerate(iter(self.batches) if batches is None else batches, 1):
            self.backward(batch)
            if number % self.accumulation == 0:
                self.step()
        if number:  # else the epoch had ended before
            self.note()
        self.step()

    def note(self) -> None:
        self.after_rests.append(member_of(self.model))


Rest = Callable[[Script, Iterator[Any]], Iterator[Any]]
"""Come to rest, as the iterator over the epoch is left; return the one to go on with."""


# States of the loop, each in its first epoch


def nothing_pending(script: Script, rest: Rest) -> None:
    batches = iter(script.batches)
    for batch in itertools.islice(batches, 2):
        script.backward(batch)
        script.step()
    script.train(rest(script, batches))


def accumulation_pending(script: Script, rest: Rest) -> None:
    batches = iter(script.batches)
    for _ in range(2):
        script.backward(next(batches))
    script.step()
    script.backward(next(batches))
    batches = rest(script, batches)
    script.step()
    for batch in itertools.islice(batches, 1):
        script.backward(batch)
    script.train(batches)


def taken_ahead(script: Script, rest: Rest) -> None:
    batches = iter(script.batches)
    following, first = next(batches), True
    while following is not None:
        batch, following = following, next(batches, None)
        script.backward(batch)
        script.step()
        batches, first = rest(script, batches) if first else batches, False
    script.note()


def left_by_break(script: Script, rest: Rest) -> None:
    batches: Any = iter(script.batches)
    script.backward(next(batches))
    script.step()
    script.backward(next(batches))
    if script.distributed is not None:
        batches.close()
    script.step()
    script.train(rest(script, iter(script.batches)))


STATES: dict[str, Callable[[Script, Rest], None]] = {
    "nothing pending": nothing_pending,
    "accumulation pending": accumulation_pending,
    "batches taken ahead": taken_ahead,
    "left by break": left_by_break,
}


# Places of a rest


def in_step(script: Script, batches: Iterator[Any]) -> Iterator[Any]:
    """The phase ends after this update; without a gradient, it has ended after the one before."""
    script.step()
    script.note()
    return batches


def in_next(_: Script, batches: Iterator[Any]) -> Iterator[Any]:
    return batches


def in_state_dict(script: Script, batches: Iterator[Any]) -> Iterator[Any]:
    if script.distributed is not None:
        script.saved = script.distributed.state_dict()
    return batches


def in_agree(script: Script, batches: Iterator[Any]) -> Iterator[Any]:
    if script.distributed is not None:
        script.distributed.agree()
        script.note()
    return batches


def at_end_epoch(script: Script, batches: Any) -> Iterator[Any]:
    if script.distributed is not None:
        batches.close()
        script.distributed.end_epoch()
        script.note()
    return iter(())


RESTS: dict[str, Rest] = {
    "in step": in_step,
    "in next": in_next,
    "in state_dict": in_state_dict,
    "in agree": in_agree,
    "at end_epoch": at_end_epoch,
}


def exact_strategy(rest: str, state: str) -> tuple[str, int]:
    """Return a strategy that trains as one process, and its ranks; servers have to learn of a rest.

    A rank that serves first could not come into a loop later, so that where a phase ends the
    servers are beside the workers.
    """
    if rest != "in step":
        return "ParameterServer", 3
    steps = 1 if state == "batches taken ahead" else 2
    server = "ParameterServer(placement='beside')"
    return f"Switch(AllReduce, {server}, when=AfterSteps({steps}))", 2


def replicas(rest: str) -> str:
    switch = f"Switch({REPLICAS}, AllReduce, when=AfterSteps(2), moments='averaged')"
    return switch if rest == "in step" else REPLICAS


def run(
    strategy: str,
    ranks: int,
    play: Callable[[Script], None],
    loaded: dict[str, Any] | None = None,
    **options: Any,
) -> list[Script]:
    """Return each worker's script after `play`, which begins in the state that was `loaded`."""

    def program(runtime: Runtime) -> Script:
        model = small_model()
        optimizer, parsed = sgd(model), parse(strategy, STRATEGIES, where="strategy")
        loop = OwnLoop(runtime, model, optimizer, in_order(COUNT), parsed, **options)
        script = Script(model, optimizer, loop.batches, options.get("accumulation", 1))
        if not loop.batches.is_worker():
            loop.batches.serve_to_the_end()
        else:
            if loaded is not None:
                loop.batches.load_state_dict(loaded)
            play(script)
        loop.finish(goes_on=True)
        return script

    return run_ranks(ranks, program)[:WORKERS]


def in_one_process(play: Callable[[Script], None], accumulation: int) -> State:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        play(Script(model, optimizer, batches, accumulation))

    return alone(loop, DataLoader(samples(COUNT), WORKERS * BATCH))


def uninterrupted(script: Script) -> None:
    for _ in range(script.distributed.epoch if script.distributed else 0, EPOCHS):
        script.train()


def equal(states: list[State]) -> bool:
    return all(torch.equal(state[name], states[0][name]) for state in states for name in state)


@pytest.mark.parametrize("state", some(STATES))
@pytest.mark.parametrize("rest", RESTS)
def test_the_loop_goes_on_after_a_rest(rest: str, state: str) -> None:
    accumulation = 2 if state == "accumulation pending" else 1

    def play(script: Script) -> None:
        STATES[state](script, RESTS[rest])
        script.train()

    def run_all(strategy: str, ranks: int) -> list[Script]:
        return run(strategy, ranks, play, accumulation=accumulation)

    if (rest, state) == ("in state_dict", "accumulation pending"):
        for strategy, ranks in (exact_strategy(rest, state), (REPLICAS, WORKERS)):
            with pytest.raises(InputError, match="gradients wait for their step: call it after"):
                run_all(strategy, ranks)
        return
    expected = in_one_process(play, accumulation)
    for script in run_all(*exact_strategy(rest, state)):
        close(member_of(script.model), expected)
    if state == "batches taken ahead":
        with pytest.raises(InputError, match="the next batch was taken before backward"):
            run_all(replicas(rest), WORKERS)
        return
    one, other = run_all(replicas(rest), WORKERS)
    for pair in zip(one.after_rests, other.after_rests, strict=True):
        assert equal(list(pair))


@pytest.mark.parametrize("state", [name for name in STATES if name != "accumulation pending"])
def test_a_state_saved_at_a_rest_goes_on_from_the_last_step(state: str) -> None:
    """Batches that were taken ahead are taken again, those that were left after `break` follow."""

    def play(script: Script) -> None:
        STATES[state](script, in_state_dict)

    strategies = [("ParameterServer", 3), (REPLICAS, WORKERS)]
    if state == "batches taken ahead":
        strategies[1] = ("AllReduce", WORKERS)
    for strategy, ranks in strategies:
        saved = run(strategy, ranks, play)[0].saved
        through = run(strategy, ranks, uninterrupted)
        resumed = run(strategy, ranks, uninterrupted, saved)
        for one, other in zip(through, resumed, strict=True):
            close(member_of(other.model), member_of(one.model))


# A batch was taken from a queue, and no step was made with it


def load_and_step(script: Script, batches: Iterator[Any]) -> Iterator[Any]:
    """No phase ends after a step with a queue; what was loaded would count from the step on."""
    script.model.load_state_dict(small_model().state_dict())
    script.backward(next(batches))
    script.step()
    return batches


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (load_and_step, r"load_state_dict\(\): workers take unlike numbers of batches"),
        (in_state_dict, r"batches.state_dict\(\) in mid-epoch needs equally many batches"),
        (in_agree, r"batches.agree\(\) in mid-epoch needs equally many batches"),
        (at_end_epoch, r"batches.end_epoch\(\) in mid-epoch needs equally many batches"),
    ],
)
def test_workers_that_take_batches_from_a_queue_rest_between_epochs_only(
    rest: Rest, words: str
) -> None:
    def play(script: Script) -> None:
        batches = iter(script.batches)
        next(batches)
        rest(script, batches)

    with pytest.raises(InputError, match=words):
        run(QUEUE, WORKERS, play)


@pytest.mark.parametrize("strategy", [QUEUE, "ParameterServer(consistency='asynchronous')"])
def test_a_batch_of_a_queue_without_a_step_is_passed_over_before_the_rest(strategy: str) -> None:
    """Also where the script goes on to save, and ends in mid-epoch."""
    taken: list[int] = []

    def play(script: Script) -> None:
        assert script.distributed is not None
        for _, _, numbers in script.batches:
            taken.extend(numbers.tolist())
        script.note()
        script.saved = script.distributed.state_dict()
        next(iter(script.batches))

    one, other = run(strategy, WORKERS + ("Server" in strategy), play)
    assert sorted(taken) == list(range(COUNT))
    assert equal([one.after_rests[0], other.after_rests[0], small_model().state_dict()])


UNLIKE_NUMBERS = [
    (QUEUE, WORKERS),
    ("ParameterServer(consistency='asynchronous')", WORKERS + 1),
    ("ParameterServer(consistency='bounded', staleness=1, placement='beside')", WORKERS),
]


def leave_unlike(script: Script) -> None:
    """Break off after unlike numbers of steps, with a batch in hand."""
    assert script.distributed is not None
    first = script.distributed.worker.rank == 0
    batches = iter(script.batches)
    for batch in itertools.islice(batches, 2 if first else 1):
        script.backward(batch)
        script.step()
    next(batches)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    # Where replicas average in pairs, one that loads answers nobody that still makes a step
    [each for each in UNLIKE_NUMBERS if each[0] != QUEUE],
)
def test_a_state_is_loaded_after_workers_left_a_queue_at_unlike_batches(
    strategy: str, ranks: int
) -> None:
    """Each sample is read once in the epoch that begins anew."""
    taken: list[int] = []

    def begin(script: Script) -> None:
        in_state_dict(script, iter(()))

    saved = run(strategy, ranks, begin)[0].saved

    def play(script: Script) -> None:
        assert script.distributed is not None
        assert saved is not None
        leave_unlike(script)
        script.distributed.load_state_dict(saved)
        for batch in script.batches:
            taken.extend(batch[2].tolist())
            script.backward(batch)
            script.step()
        script.note()

    scripts = run(strategy, ranks, play)
    assert sorted(taken) == list(range(COUNT))
    assert equal([script.after_rests[-1] for script in scripts])


@pytest.mark.parametrize(("strategy", "ranks"), UNLIKE_NUMBERS)
def test_another_loop_begins_after_workers_left_a_queue_at_unlike_batches(
    strategy: str, ranks: int
) -> None:
    def program(runtime: Runtime) -> State:
        model = small_model()
        optimizer, parsed = sgd(model), parse(strategy, STRATEGIES, where="strategy")
        for number in range(2):
            channel = intercepted(runtime, Channel(number))
            loop = OwnLoop(channel, model, optimizer, in_order(COUNT), parsed)
            script = Script(model, optimizer, loop.batches, 1)
            if not loop.batches.is_worker():
                loop.batches.serve_to_the_end()
            elif number == 0:
                leave_unlike(script)
            else:
                script.train()
            loop.finish(goes_on=True)
            loop.close(handed_over=True)
        return member_of(model)

    assert equal(run_ranks(ranks, program))


# A rank that serves


def of_a_server(rest: str, batches: Batches, optimizer: torch.optim.Optimizer) -> None:
    """What a script does on a rank that serves, without asking whether it does."""
    if rest == "in step":
        optimizer.step()
    elif rest == "in state_dict":
        assert batches.state_dict()["ranks"] == {}
    elif rest == "in agree":
        batches.agree()
    elif rest == "at end_epoch":
        batches.end_epoch()


@pytest.mark.parametrize("rest", RESTS)
def test_a_rank_that_serves_runs_the_script_of_the_workers(rest: str) -> None:
    """A function that an engine calls on each rank, and waits for: nobody leaves it early."""

    def program(runtime: Runtime) -> tuple[int, State]:
        model = small_model()
        optimizer, parsed = sgd(model), parse("ParameterServer", STRATEGIES, where="strategy")
        loop = OwnLoop(runtime, model, optimizer, in_order(COUNT), parsed)
        loop.batches.ends_process = False
        script, serves = Script(model, optimizer, loop.batches, 1), not loop.batches.is_worker()
        if serves:
            of_a_server(rest, loop.batches, optimizer)
        else:
            nothing_pending(script, RESTS[rest])
        taken = 0
        for _ in range(EPOCHS - (not serves)):
            for batch in loop.batches:
                script.backward(batch)
                script.step()
                taken += 1
        loop.finish()
        return taken, member_of(model)

    (one, first), (other, second), (nothing, served) = run_ranks(WORKERS + 1, program)
    assert (one, other, nothing) == (5, 5, 0)
    assert equal([first, second, served])


def test_a_rank_that_a_step_has_made_a_server_gets_nothing_more() -> None:
    """It may ask for the agreed model all the same. The step was made in the midst of a group."""
    strategy = "Switch(AllReduce, ParameterServer, when=AfterSteps(1))"

    def program(runtime: Runtime) -> tuple[int, State]:
        model = small_model()
        optimizer, parsed = sgd(model), parse(strategy, STRATEGIES, where="strategy")
        loop = OwnLoop(runtime, model, optimizer, in_order(COUNT), parsed, accumulation=2)
        loop.batches.ends_process = False
        script = Script(model, optimizer, loop.batches, 2)
        taken = 0
        for _ in range(EPOCHS):
            for batch in loop.batches:
                script.backward(batch)
                script.step()
                loop.batches.agree()
                taken += 1
        loop.finish()
        return taken, member_of(model)

    (one, first), (other, second), (third, served) = run_ranks(WORKERS + 1, program)
    assert one == other > third == 1
    assert equal([first, second, served])


def test_no_state_is_saved_in_an_epoch_in_which_a_rank_has_become_a_server() -> None:
    def play(script: Script) -> None:
        script.backward(next(iter(script.batches)))
        script.step()
        in_state_dict(script, iter(()))

    with pytest.raises(InputError, match="a rank has become a server in this epoch"):
        run("Switch(AllReduce, ParameterServer, when=AfterSteps(1))", WORKERS + 1, play)

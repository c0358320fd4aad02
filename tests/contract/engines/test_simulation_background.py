"""Collectives in the background: evaluated for all ranks, or followed rank by rank."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import pytest
import torch
from tests.support.simulated import assert_agree, run_ranks
from tests.support.simulated_collectives import COSTLY, counted, followed, schedule_of

from orchestra.cluster.nodes import Line
from orchestra.collectives import Group, execute
from orchestra.transports.protocol import CollectiveCall, Pending, Transport
from orchestra.worker.runtime import Runtime, Work

WARM = replace(COSTLY, cold=0.0)
TAG, FOREGROUND, HALVES, NOISE, OTHERS = 70, 71, 72, 73, 74


@dataclass(frozen=True)
class Deed:
    """What each rank does next, after it has computed for `delays` seconds.

    `kind`: "begin" a sum in the background, and rank `who` with its messages where `shown`; carry
    out one in the "foreground"; begin one among the ranks of its own parity ("half"), or, from a
    flow beside, three ("beside"); "send" a message from `who` to `to`, "later" from a flow beside;
    "burn", in which `who` computes beside; "read" the counters; "look" whether it is done; "wait".
    """

    kind: str
    delays: Sequence[float]
    length: int
    who: int = 0
    to: int = 1
    seconds: float = 1e-4
    shown: bool = False


@dataclass(frozen=True)
class Trial:
    """Steps of deeds; after each the ranks wait for all that they began."""

    name: str
    ranks: int
    steps: Sequence[Sequence[Deed]]
    buffer: int = 700
    local: float = 0.0
    on: str = "lan_1gbit(nodes=8)"

    def run(self) -> tuple[list[Any], Any]:
        """What each rank saw, and what its stopwatch says that it sent."""
        overhead = replace(WARM, buffer=self.buffer)
        if self.local:
            overhead = replace(overhead, local=Line(self.local, 1e-9))
        outcome = run_ranks(self.ranks, self._program, self.on, overhead)
        assert outcome.failure is None, outcome.failure
        return list(outcome.results), (outcome.sent, outcome.seconds)

    def _program(self, runtime: Runtime) -> Any:
        transport, rank = runtime.transport, runtime.rank
        seen: list[Any] = []
        runtime.stopwatch(True)
        for step in self.steps:
            begun: list[Pending[int]] = []
            others: list[Pending[Any]] = []
            for number, deed in enumerate(step):
                _compute(runtime, deed.delays[rank])
                self._do(deed, runtime, seen, begun, others, OTHERS + number)
            for task in reversed(begun):
                seen.append((task.wait(), transport.now()))
            for other in others:
                result = other.wait()
                seen.append(result if isinstance(result, float) else transport.now())
            runtime.stopwatch(False)
            seen.append((transport.bytes_sent, transport.arrived(), asdict(transport.traffic)))
            runtime.stopwatch(True)
        runtime.stopwatch(False)
        transport.end_background()
        return seen, transport.now(), asdict(transport.traffic)

    def _do(
        self,
        deed: Deed,
        runtime: Runtime,
        seen: list[Any],
        begun: list[Pending[int]],
        others: list[Pending[Any]],
        own_tag: int,
    ) -> None:
        transport, rank = runtime.transport, runtime.rank
        everyone = Group(tuple(range(self.ranks)))

        def call(group: Group, tag: int, *, shown: bool = False) -> CollectiveCall:
            vector = torch.empty(deed.length, device="meta")
            schedule = schedule_of(self.name if group is everyone else "ring", len(group))
            return CollectiveCall(
                schedule, vector, group, tag, background=True, message_by_message=shown
            )

        def beside(flow: Transport) -> float:
            flow.collective(call(everyone, own_tag)._replace(background=False)).wait()
            for task in [flow.collective(call(everyone, own_tag)) for _ in range(2)]:
                task.wait()
            flow.end_background()
            return flow.now()

        match deed.kind:
            case "begin":
                shown = deed.shown and rank == deed.who
                begun.append(transport.collective(call(everyone, TAG, shown=shown)))
            case "half":
                half = Group(tuple(range(rank % 2, self.ranks, 2)))
                begun.append(transport.collective(call(half, HALVES)))
            case "beside":
                others.append(transport.spawn(beside))
            case "foreground":
                vector, schedule = call(everyone, 0).vector, schedule_of(self.name, self.ranks)
                buffer = execute(transport, vector, schedule, everyone, FOREGROUND)
                seen.append((buffer, transport.now()))
            case "read" | "look":
                done = [task.done() for task in begun] if deed.kind == "look" else []
                seen.append((done, transport.arrived(), transport.now()))
                seen.append(transport.bytes_sent)
            case "wait" if begun:
                seen.append((begun[deed.length % len(begun)].wait(), transport.now()))
            case "send" | "later" if deed.who != deed.to and rank == deed.to:
                others.append(transport.receive(deed.who, NOISE))
            case _ if rank == deed.who:
                _disturb(deed, runtime, others)


def _disturb(deed: Deed, runtime: Runtime, others: list[Pending[Any]]) -> None:
    """What one rank does beside: it sends, now or later, or computes."""

    def burn(flow: Transport) -> float:
        _compute(runtime, deed.seconds)
        return flow.now()

    def send_later(flow: Transport) -> float:
        burn(flow)
        flow.send(torch.empty(deed.length, device="meta"), deed.to, NOISE).wait()
        return flow.now()

    match deed.kind:
        case "burn":
            others.append(runtime.transport.spawn(burn))
        case "later" if deed.who != deed.to:
            others.append(runtime.transport.spawn(send_later))
        case "send" if deed.who != deed.to:
            runtime.transport.send(torch.empty(deed.length, device="meta"), deed.to, NOISE).wait()


def _compute(runtime: Runtime, seconds: float) -> None:
    if seconds > 0:
        runtime.compute.run(Work("update", cast(int, seconds)), lambda: None)


def check(trial: Trial) -> Counter[str]:
    """Both ways agree: times to 1e-12 of themselves, the rest exactly; what happened on the way.

    What has arrived is counted from the first byte on where messages are followed, and where not
    once all has arrived.
    """
    with followed():
        expected = trial.run()
    with counted() as counts:
        found = trial.run()
    assert_agree(_flat(found), _flat(expected))
    return counts


def _flat(value: Any) -> list[Any]:
    match value:
        case (first, dict(), third):
            value = first, third
        case dict():
            value = [part for pair in sorted(value.items()) for part in pair]
    if isinstance(value, tuple | list):
        return [part for each in value for part in _flat(each)]
    return [value]


def begins(ranks: int, buckets: int, length: int = 20_000) -> list[Deed]:
    """No two ranks begin together, some while the one before is under way and some later."""
    return [
        Deed("begin", [2e-4 * ((5 * rank + 3 * n) % ranks) for rank in range(ranks)], length + n)
        for n in range(buckets)
    ]


def test_a_queue_is_evaluated() -> None:
    """The bytes and times are those of ranks that are followed."""
    read = Deed("read", [0.0] * 6, 1)
    trial = Trial("ring", 6, [[*begins(6, 4), read, *begins(6, 2)], begins(6, 3)], local=3e-6)
    counts = check(trial)
    assert (counts["evaluated"], counts["participants"]) == (9, 0)


def test_what_is_under_way_can_be_read() -> None:
    """Bytes and arrivals count for each rank from when it is through, whoever waits for what."""
    ranks = 5
    deeds: list[Deed] = []
    for deed in begins(ranks, 6):
        deeds += [deed, Deed("read", [3e-4 * rank for rank in range(ranks)], 1)]
        deeds += [Deed("look", [0.0] * ranks, 1), Deed("wait", [1e-4] * ranks, deed.length)]
    assert not check(Trial("ring", ranks, [deeds, deeds]))["participants"]


@pytest.mark.parametrize("kind", ["half", "beside"])
def test_a_queue_goes_on_behind_others(kind: str) -> None:
    """Of other groups, or of another flow's thread: some are evaluated, and some followed."""
    other = Deed(kind, [2e-3 * ((rank + 1) % 2) for rank in range(6)], 30_000)
    trial = Trial("ring", 6, [[other, *begins(6, 3), other, *begins(6, 2)]] * 2)
    with counted() as counts:
        found, _ = trial.run()
    assert counts["evaluated"]
    assert len(found) == 6


@pytest.mark.parametrize("who", [0, 3])
def test_who_wants_to_see_messages_gets_them(who: int) -> None:
    """One rank sends messages of all, and the others learn of it when it comes."""
    shown = [replace(deed, who=who, shown=True) for deed in begins(4, 4)]
    check(Trial("ring", 4, [begins(4, 2), shown]))


def test_any_queue_agrees() -> None:
    """Random ones, on links and cores of their own, and shared ones."""
    total: Counter[str] = Counter()
    for seed in range(60):
        total += check(_random(random.Random(seed)))
    assert min(total["evaluated"], total["participants"]) > 40


def _random(draw: random.Random) -> Trial:
    ranks = draw.randint(2, 7)

    def seconds() -> float:
        return draw.choice([0.0, 1e-6, 1e-4, 3e-3]) * draw.random()

    def deed() -> Deed:
        delays = [seconds() for _ in range(ranks)]
        length = draw.choice([draw.randint(1, 50), draw.randint(100, 60_000)])
        who, to = draw.randrange(ranks), draw.randrange(ranks)
        kind = draw.choice(["begin", "begin", "begin", "read", "look", "wait"])
        return Deed(kind, delays, length, who, to, seconds() + 1e-9)

    steps = [[deed() for _ in range(draw.randint(1, 8))] for _ in range(draw.randint(1, 3))]
    name = draw.choice(["ring", "ring", "ring", "butterfly", "tree"])
    on = draw.choice(["lan_1gbit(nodes=8)", "lan_1gbit(nodes=4)", "two_sites(nodes=8)"])
    return Trial(name, ranks, steps, draw.choice([0, 700, 1 << 17]), draw.choice([0, 5e-6]), on)


def test_a_rank_that_begins_fewer_is_named() -> None:
    def program(runtime: Runtime) -> None:
        everyone = Group((0, 1, 2))
        tasks = [
            runtime.transport.collective(
                CollectiveCall(
                    schedule_of("ring", 3),
                    torch.empty(100, device="meta"),
                    everyone,
                    TAG,
                    background=True,
                )
            )
            for _ in range(2 if runtime.rank == 1 else 3)
        ]
        for task in tasks:
            task.wait()

    outcome = run_ranks(3, program, overhead=WARM)
    assert outcome.failure is not None
    assert "waits for rank 1" in outcome.failure


def test_two_flows_of_a_rank_with_one_tag_are_told() -> None:
    """Between real ranks their messages would be mixed up."""

    def program(runtime: Runtime) -> None:
        def beside(flow: Transport) -> None:
            vector = torch.empty(5000, device="meta")
            execute(flow, vector, schedule_of("ring", 3), Group((0, 1, 2)), TAG)

        _compute(runtime, 1e-3 * runtime.rank)
        for task in [runtime.transport.spawn(beside) for _ in range(2)]:
            task.wait()

    outcome = run_ranks(3, program, overhead=WARM)
    assert outcome.failure is not None
    assert f"tag {TAG}: two flows of rank 0" in outcome.failure

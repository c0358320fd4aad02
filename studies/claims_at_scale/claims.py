"""The published claims, as differences of rows of studies.yaml, for a number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from studies.claims_at_scale.verdicts import (
    SECONDS,
    TRAINING,
    Claim,
    Pair,
    Rows,
    found,
    head,
    keyed,
    line,
    print_verdicts,
    read_rows,
)

ONE_WORKER = ("one_worker", "one worker", 2)
ROUNDS = ("every 4 steps", "every 16 steps", "once, at the end")
SWITCHES = ("switch at 1 %", "switch at 10 %", "switch at 30 %")
HERE = "here a CNN of 72,000 parameters on digits, 20 passes"
CIFAR = f"published: ResNet on CIFAR-10, 160 epochs; {HERE}"
ABSTRACT = f"published: an abstract that names no task and no machines; {HERE}"
COMPENSATED = "0.6 to 1.7 points with 4 and 8 workers"


def claims_of(workers: int) -> tuple[Claim, ...]:
    """What is claimed of so many; a server of theirs is one more rank."""
    return (
        Claim("one worker, for comparison", "one_worker", ()),
        *_of_asynchronous_sgd(workers + 1),
        *_of_switches(workers),
        *_of_averaging(workers),
        *_of_strategy_switch(workers + 1),
    )


def _pairs(ranks: int, comparison: str, *labels: tuple[str, str]) -> tuple[Pair, ...]:
    """Rows of one comparison with so many ranks, each pair by its labels."""
    return tuple(Pair((comparison, a, ranks), (comparison, b, ranks)) for a, b in labels)


def _of_asynchronous_sgd(ranks: int) -> tuple[Claim, ...]:
    """Of a server with `ranks` - 1 workers, against one worker and against each other."""

    def below_one_worker(comparison: str, *labels: str) -> tuple[Pair, ...]:
        return tuple(Pair(ONE_WORKER, (comparison, label, ranks)) for label in labels)

    return (
        Claim(
            "asynchronous SGD loses accuracy, each row with its own rate and momentum",
            "asynchronous",
            below_one_worker("asynchronous", "asynchronous"),
            published="0.6 and 1.6 points with 4 and 8 workers",
            differs=CIFAR,
        ),
        Claim(
            "asynchronous SGD loses accuracy, with the settings of one worker",
            "same_rate",
            below_one_worker("same_rate", "rate kept", "rate divided"),
            published="users: chance level, where the rate is kept",
            differs=f"published: users' own tasks; {HERE}",
        ),
        Claim(
            "dividing that rate by the workers wins some of it back",
            "same_rate",
            _pairs(ranks, "same_rate", ("rate divided", "rate kept")),
            published="practice; no figure",
        ),
        Claim(
            "delay compensation (adaptive) wins some of it back, with one worker's settings",
            "same_rate",
            _pairs(ranks, "same_rate", ("compensated", "rate kept")),
            published=COMPENSATED,
            differs=f"published: without momentum; {CIFAR.removeprefix('published: ')}",
        ),
        Claim(
            "delay compensation (adaptive) wins some of it back, each with its own rate and lambda",
            "plain_sgd",
            _pairs(ranks, "plain_sgd", ("compensated", "asynchronous")),
            published=COMPENSATED,
            differs=CIFAR,
        ),
    )


def _of_switches(workers: int) -> tuple[Claim, ...]:
    """Of what comes first, and of what becomes of the momentum."""
    return (
        Claim(
            "synchronous first, then asynchronous, beats the reverse",
            "switch_order",
            _pairs(
                workers + 1,
                "switch_order",
                ("synchronous 50 %, asynchronous", "asynchronous, synchronous 50 %"),
                ("synchronous 25 %, asynchronous", "asynchronous, synchronous 25 %"),
            ),
            published="2.9 and 1.9 points with 8 workers",
            differs=CIFAR,
        ),
        Claim(
            "keeping the momentum across the switch beats resetting it",
            "switch_order",
            _pairs(
                workers + 1,
                "switch_order",
                ("synchronous 50 %, asynchronous, kept", "synchronous 50 %, asynchronous"),
            ),
            published="3.7 and 5.3 points, of the coefficient",
            differs=f"published: the momentum's coefficient; here its buffers; {HERE}",
        ),
        Claim(
            "keeping it beats resetting it where local SGD follows",
            "switch_local",
            _pairs(
                workers,
                "switch_local",
                ("synchronous 50 %, local, kept", "synchronous 50 %, local"),
            ),
        ),
    )


def _of_averaging(workers: int) -> tuple[Claim, ...]:
    """Of averages without a server: with some of the others, or seldom."""
    every_step = ("push_sum", "all-reduce", workers)
    seldom = tuple(Pair(every_step, ("rounds", label, workers)) for label in ROUNDS)
    return (
        Claim(
            "stochastic gradient push ends within about a point of all-reduce",
            "push_sum",
            (Pair(("push_sum", "push", workers), every_step, margin=1.2),),
            published="within 1.2 points",
            differs=f"published: ResNet-50 on ImageNet, 90 epochs, 32 nodes; {HERE}",
        ),
        Claim(
            "outer Nesterov momentum beats plain averaging where workers average seldom",
            "outer_nesterov",
            _pairs(workers, "outer_nesterov", ("outer Nesterov", "plain average")),
            published="ahead in perplexity",
            differs=f"published: language models, pretrained, 176 rounds of 500 steps; {HERE}",
        ),
        Claim(
            "averaging seldom, or once, at the end, costs accuracy",
            "rounds",
            seldom,
            published="16 to 32 steps a round are advised; no figure",
        ),
        Claim(
            "averaging at every step costs time",
            "rounds",
            seldom,
            SECONDS,
        ),
    )


def _of_strategy_switch(ranks: int) -> tuple[Claim, ...]:
    """Of switching from all-reduce to an asynchronous server, where there are `ranks` ranks."""
    slower = _pairs(ranks, "strategy_switch", *(("all-reduce", label) for label in SWITCHES))
    ahead = _pairs(ranks, "strategy_switch", *((label, "all-reduce") for label in SWITCHES))
    return (
        Claim(
            "Strategy-Switch takes less time than all-reduce for the same samples",
            "strategy_switch",
            slower,
            TRAINING,
            published="significantly faster; no figure",
            differs=ABSTRACT,
        ),
        Claim(
            "Strategy-Switch is sooner at an accuracy than all-reduce",
            "strategy_switch",
            slower,
            SECONDS,
            published="significantly faster; no figure",
            differs=ABSTRACT,
        ),
        Claim(
            "Strategy-Switch ends within a point of all-reduce",
            "strategy_switch",
            tuple(replace(pair, margin=1.0) for pair in ahead),
            published="comparable accuracy; no figure",
            differs=ABSTRACT,
        ),
        Claim(
            "Strategy-Switch ends more accurate than asynchronous SGD",
            "strategy_switch",
            _pairs(ranks, "strategy_switch", *((label, "asynchronous") for label in SWITCHES)),
        ),
    )


def print_tables(folders: Mapping[int, Mapping[str, Path]], alone: Path) -> None:
    """By workers and cluster all rows and differences, then one table; one worker is in `alone`."""
    known, one = {}, read_rows(alone, claims_of(1))
    print_verdicts(one, ())
    for workers, kinds in folders.items():
        claims = claims_of(workers)
        for kind, folder in kinds.items():
            some = read_rows(folder, claims)
            if some:
                print(f"\n## {workers} workers, {kind}")
                print_verdicts(some, claims, keyed(one))
                known[f"{workers}, {kind}"] = claims, keyed(one | some)
    if known:
        print("\n## All\n", *_summary(known), sep="\n")


def _summary(known: Mapping[str, tuple[Sequence[Claim], Rows]]) -> Iterator[str]:
    """A line for each difference, with its middle, interval and finding in each column."""
    yield from head(["claim: difference", "published", *known, "a verdict would need"])
    columns = list(known.values())
    for place, claim in enumerate(columns[0][0]):
        for number, pair in enumerate(claim.pairs):
            cells = [_cell(claims[place], number, rows) for claims, rows in columns]
            name = f"{claim.text}: {pair.ours[1]} - {pair.theirs[1]}"
            yield line([name, claim.published, *cells, claim.differs or "nothing more"])


def _cell(claim: Claim, number: int, rows: Rows) -> str:
    it = found(claim.pairs[number], claim, rows)
    if it is None:
        return "not run"
    failed = f", failed {it.failed}" if it.failed else ""
    said = it.finding if claim.differs else it.verdict
    interval = f" ({it.interval})" if it.interval else ""
    return f"{it.middle}{interval}{failed}: {said}"

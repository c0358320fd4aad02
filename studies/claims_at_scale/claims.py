"""The claims of studies/claims as differences of rows of this folder, for a number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from studies.claims.verdicts import (
    SECONDS,
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


def claims_of(workers: int) -> tuple[Claim, ...]:
    """What is claimed of so many; a server of theirs is one more rank."""
    served = workers + 1

    def pairs(comparison: str, *labels: tuple[str, str], ranks: int = served) -> tuple[Pair, ...]:
        return tuple(Pair((comparison, a, ranks), (comparison, b, ranks)) for a, b in labels)

    def below_one_worker(comparison: str, *labels: str) -> tuple[Pair, ...]:
        return tuple(Pair(ONE_WORKER, (comparison, label, served)) for label in labels)

    every_step = ("push_sum", "all-reduce", workers)
    return (
        Claim("one worker, for comparison", "one_worker", ()),
        Claim(
            "asynchronous SGD loses accuracy, each row with its own rate",
            "asynchronous",
            below_one_worker("asynchronous", "asynchronous"),
        ),
        Claim(
            "asynchronous SGD loses accuracy, with the rate of one worker",
            "same_rate",
            below_one_worker("same_rate", "rate kept", "rate divided"),
        ),
        Claim(
            "dividing that rate by the workers, and delay compensation, win some of it back",
            "same_rate",
            pairs("same_rate", ("rate divided", "rate kept"), ("compensated", "rate kept")),
        ),
        Claim(
            "delay compensation wins some of it back, without momentum, each with its own rate",
            "plain_sgd",
            pairs("plain_sgd", ("compensated", "asynchronous")),
        ),
        Claim(
            "synchronous first, then asynchronous, beats the reverse (half of the work)",
            "switch_order",
            pairs(
                "switch_order",
                ("synchronous 50 %, asynchronous", "asynchronous, synchronous 50 %"),
            ),
        ),
        Claim(
            "synchronous first, then asynchronous, beats the reverse (a quarter synchronous)",
            "switch_quarter",
            pairs(
                "switch_quarter",
                ("synchronous 25 %, asynchronous", "asynchronous, synchronous 25 %"),
            ),
        ),
        Claim(
            "keeping the momentum across the switch beats resetting it",
            "switch_order",
            pairs(
                "switch_order",
                ("synchronous 50 %, asynchronous, kept", "synchronous 50 %, asynchronous"),
            ),
        ),
        Claim(
            "keeping it beats resetting it where local SGD follows",
            "switch_local",
            pairs(
                "switch_local",
                ("synchronous 50 %, local, kept", "synchronous 50 %, local"),
                ranks=workers,
            ),
        ),
        Claim(
            "stochastic gradient push ends within about a point of all-reduce",
            "push_sum",
            (Pair(("push_sum", "push", workers), every_step, margin=1.2),),
        ),
        Claim(
            "outer Nesterov momentum beats plain averaging where workers average seldom",
            "outer_nesterov",
            pairs("outer_nesterov", ("outer Nesterov", "plain average"), ranks=workers),
        ),
        Claim(
            "averaging seldom, or once, at the end, costs accuracy",
            "rounds",
            tuple(Pair(every_step, ("rounds", label, workers)) for label in ROUNDS),
        ),
        Claim(
            "averaging at every step costs time",
            "rounds",
            tuple(Pair(every_step, ("rounds", label, workers)) for label in ROUNDS),
            SECONDS,
        ),
    )


def print_tables(folders: Mapping[int, Mapping[str, Path]], alone: Path) -> None:
    """By workers and cluster all rows and verdicts, then one table; one worker is in `alone`."""
    known = {}
    for workers, kinds in folders.items():
        claims = claims_of(workers)
        one = read_rows(alone, claims)
        for kind, folder in kinds.items():
            print(f"\n## {workers} workers, {kind}")
            rows = one | read_rows(folder, claims)
            print_verdicts(rows, claims)
            known[f"{workers}, {kind}"] = claims, keyed(rows)
    print("\n## All\n", *_summary(known), sep="\n")


def _summary(known: Mapping[str, tuple[Sequence[Claim], Rows]]) -> Iterator[str]:
    """A line for each difference, with its mean, interval and verdict in each column."""
    yield from head(["claim", "difference", *known])
    columns = list(known.values())
    for place, claim in enumerate(columns[0][0]):
        for number in range(len(claim.pairs)):
            cells = [_cell(claims[place], number, rows) for claims, rows in columns]
            ours, theirs = claim.pairs[number].ours[1], claim.pairs[number].theirs[1]
            yield line([claim.text, f"{ours} - {theirs}", *cells])


def _cell(claim: Claim, number: int, rows: Rows) -> str:
    it = found(claim.pairs[number], claim.figure, rows)
    return "not run" if it is None else f"{it.mean} ({it.interval}) {it.verdict}"

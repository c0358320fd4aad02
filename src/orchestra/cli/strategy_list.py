"""The strategies in `orchestra list`: when to use which, and which were seen best."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from orchestra.cli.tables import print_variants
from orchestra.strategies.base import Strategy
from orchestra.strategies.standing import Standing

FOR_REFERENCE = "(for reference)"
EXPLANATION = f"""\
{FOR_REFERENCE}: not yet seen best, or within 5 % of best, on any task that comes with \
Orchestra, by the seconds to a target in real runs ({{remark}})."""


def line_of_use(name: str, strategy: type[Strategy[Any]], standing: Standing) -> str:
    """When to use it; marked where none of its variants was seen best."""
    good = any(standing.good_on(notation) for notation, _ in variants_of(name, strategy))
    return strategy.use if good else f"{strategy.use} {FOR_REFERENCE}".lstrip()


def print_strategies(strategies: Mapping[str, tuple[str, type[Strategy[Any]]]]) -> None:
    """Of each name its first line, its use, and its variants with their own and their standing."""
    standing = Standing.shipped()
    for name, (first_line, strategy) in strategies.items():
        use = line_of_use(name, strategy, standing)
        print_variants(name, [first_line, use], _rows(name, strategy, standing))
    print(textwrap.fill(EXPLANATION.format(remark=standing.remark), 100))


def variants_of(name: str, strategy: type[Strategy[Any]]) -> tuple[tuple[str, str], ...]:
    """Notations and when to use them; without any, the strategy as it is."""
    return strategy.variants or ((f"{name}()", strategy.use),)


def _rows(
    name: str, strategy: type[Strategy[Any]], standing: Standing
) -> Iterator[tuple[str, str]]:
    for notation, use in variants_of(name, strategy):
        good = standing.good_on(notation)
        seen = f"best, or within 5 % of it, on {', '.join(good)}" if good else FOR_REFERENCE
        own = use if use != strategy.use else ""  # which stands above already
        yield notation, f"{own}{'; ' if own and good else ' '}{seen}".lstrip()

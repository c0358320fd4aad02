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
{FOR_REFERENCE}: not yet seen best, or within 5 % of best, by the seconds to a target: not in real \
runs on any task that comes with Orchestra ({{real}}), and not in simulated runs on any of its \
clusters ({{simulated}})."""


def line_of_use(name: str, strategy: type[Strategy[Any]], standing: Standing) -> str:
    """When to use it; marked where none of its variants was seen best."""
    good = any(_seen(notation, standing) for notation, _ in variants_of(name, strategy))
    return strategy.use if good else f"{strategy.use} {FOR_REFERENCE}".lstrip()


def print_strategies(strategies: Mapping[str, tuple[str, type[Strategy[Any]]]]) -> None:
    """Of each name its first line, its use, and its variants with their own and their standing."""
    standing = Standing.shipped()
    for name, (first_line, strategy) in strategies.items():
        use = line_of_use(name, strategy, standing)
        print_variants(name, [first_line, use], _rows(name, strategy, standing))
    text = EXPLANATION.format(real=standing.remark, simulated=standing.simulated_remark)
    print(textwrap.fill(text, 100))


def variants_of(name: str, strategy: type[Strategy[Any]]) -> tuple[tuple[str, str], ...]:
    """Notations and when to use them; without any, the strategy as it is."""
    return strategy.variants or ((f"{name}()", strategy.use),)


def _rows(
    name: str, strategy: type[Strategy[Any]], standing: Standing
) -> Iterator[tuple[str, str]]:
    for notation, use in variants_of(name, strategy):
        good = _seen(notation, standing)
        own = use if use != strategy.use else ""  # which stands above already
        yield notation, f"{own}{'; ' if own and good else ' '}{good or FOR_REFERENCE}".lstrip()


def _seen(notation: str, standing: Standing) -> str:
    """Where it was seen best, in words; nothing if it was not."""
    real, simulated = standing.good_on(notation), standing.good_in_simulation(notation)
    parts = [f"on {', '.join(real)} in real runs"] if real else []
    parts += [f"on {', '.join(simulated)} in simulated ones"] if simulated else []
    return f"best, or within 5 % of it, {' and '.join(parts)}" if parts else ""

"""The strategies in `orchestra list`: when to use which, and which were seen best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestra.cli.tables import print_variants, print_wrapped
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import Standing

EXPLANATION = """\
"fast on": best, or within 5 % of the best, by the seconds to a target. A variant without it was \
not fastest on any task in real runs ({real}), nor on any cluster in simulated runs \
({simulated})."""


def print_strategies(strategies: Mapping[str, tuple[str, type[Strategy[Any]]]]) -> None:
    """Of each name its first line, its use, and its variants with their own and their standing."""
    standing = Standing.shipped()
    for name, (first_line, strategy) in strategies.items():
        print_variants(name, [first_line, strategy.use], _rows(name, strategy, standing))
    print_wrapped(EXPLANATION.format(real=standing.remark, simulated=standing.simulated_remark))


def variants_of(name: str, strategy: type[Strategy[Any]]) -> tuple[tuple[str, str], ...]:
    """Notations and when to use them; without any, the strategy as it is."""
    return strategy.variants or ((f"{name}()", strategy.use),)


def _rows(
    name: str, strategy: type[Strategy[Any]], standing: Standing
) -> Iterator[tuple[str, ...]]:
    for notation, use in variants_of(name, strategy):
        own = use if use != strategy.use else ""  # which stands above already
        yield notation, *filter(None, (own, _seen(notation, standing)))


def _seen(notation: str, standing: Standing) -> str:
    """Where it was seen best, in words; nothing if it was not."""
    real, simulated = standing.good_on(notation), standing.good_in_simulation(notation)
    parts = [f"on {', '.join(real)} in real runs"] if real else []
    parts += [f"on {', '.join(simulated)} in simulated runs"] if simulated else []
    return f"fast {' and '.join(parts)}" if parts else ""

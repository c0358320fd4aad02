"""Strategies of a user's own, each with one mistake."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from orchestra import Strategy
from orchestra.settings import setting
from orchestra.strategies.member import Member


@dataclass(frozen=True, repr=False)
class Keeps(Strategy):
    """Makes a member from something that no checkpoint can keep."""

    what: str = setting("function", "what")

    def member(self, worker: Any) -> Member[Any]:
        things = {"function": lambda: 0, "streams": {"noise": [random.Random(1)]}}
        return KeepsMember(self, worker, things[self.what])


@dataclass(eq=False)
class KeepsMember(Member[Keeps]):
    rule: Any

    def update(self) -> None:
        """Learn nothing."""


@dataclass(frozen=True, repr=False)
class KeepsLater(Strategy):
    """Makes a member that holds such a thing from its first step on."""

    def member(self, worker: Any) -> Member[Any]:
        return KeepsLaterMember(self, worker)


@dataclass(eq=False)
class KeepsLaterMember(Member[KeepsLater]):
    rule: Any = None

    def update(self) -> None:
        self.rule = lambda: 0


class Undecorated(Strategy):
    every: int = setting(4, "steps between averages")

    def member(self, worker: Any) -> Member[Any]:
        raise AssertionError("not called")


@dataclass(frozen=True, repr=False)
class NoUpdate(Strategy):
    def member(self, worker: Any) -> Member[Any]:
        return NoUpdateMember(self, worker)  # type: ignore[abstract]


@dataclass(eq=False)
class NoUpdateMember(Member[NoUpdate]):
    pass


@dataclass(frozen=True, repr=False)
class Plain(Strategy):
    def member(self, worker: Any) -> Member[Any]:
        return PlainMember(self, worker, 4)  # type: ignore[call-arg]


class PlainMember(Member[Plain]):
    steps: int
    flow: Any = field(init=False, default=None)

    def update(self) -> None:
        """Learn nothing."""

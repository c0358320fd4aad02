"""Settings: frozen dataclasses that check themselves, and their one notation."""

from __future__ import annotations

from orchestra.settings.base import (
    MOST_RANKS,
    MOST_SEED,
    MOST_STEPS,
    REQUIRED,
    Described,
    Settings,
    describe,
    setting,
)
from orchestra.settings.notation import Call, parse, read, replace_setting, write
from orchestra.settings.registry import Registry

__all__ = [
    "MOST_RANKS",
    "MOST_SEED",
    "MOST_STEPS",
    "REQUIRED",
    "Call",
    "Described",
    "Registry",
    "Settings",
    "describe",
    "parse",
    "read",
    "replace_setting",
    "setting",
    "write",
]

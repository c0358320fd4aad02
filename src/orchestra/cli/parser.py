"""What the parsers of all commands share: argparse with errors of one line, and the nearest option
for an unknown one.

A parser imports nothing that takes time, so that `--help` and shell completion answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from orchestra.errors import InputError, nearest

ENGINES = ("processes", "emulation", "simulation")
OPTIMIZER_KEYS = ("lr", "momentum", "nesterov", "betas", "eps", "weight_decay")

MAPPINGS = {
    "target": "{metric: accuracy, at_least: 0.9}",
    "tune": "{settings: {optimizer.lr: [0.01, 0.1]}}",
    "devices": "{ring: cuda}",
}
"""The settings that are mappings, with an example of each; strategies are another."""


class Parser(argparse.ArgumentParser):
    """A command's parser; raises `InputError` where argparse would exit.

    Args:
        takes_command: the words behind `--` are a command of the user's own, kept in `command`.
        elsewhere: for options that only other commands have, how to get the same.
    """

    def __init__(
        self,
        command: str,
        description: str,
        epilog: str = "",
        *,
        takes_command: bool = False,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            prog=f"orchestra {command}".rstrip(), description=description, epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip
        self._takes_command = takes_command
        self._elsewhere = elsewhere or {}

    def error(self, message: str) -> NoReturn:
        # argparse would print its usage and exit; `main` prints one line.
        raise InputError(f"{message}; see {self.prog} --help")

    def option(
        self,
        name: str,
        value: str,
        meaning: str,
        *,
        type: Callable[[str], object] = str,
        default: object = None,
        choices: Sequence[str] | None = None,
        required: bool = False,
        action: str = "store",
    ) -> None:
        """Add an option that takes a value, named in the help by `value`."""
        self.add_argument(
            name, metavar=value, help=meaning, type=type, default=default, choices=choices,
            required=required, action=action,
        )  # fmt: skip

    def flag(
        self, name: str, meaning: str, action: str = "store_true", dest: str | None = None
    ) -> None:
        """Add an option without a value, False by default."""
        self.add_argument(name, action=action, help=meaning, dest=dest)

    def add_run_options(self, out: str) -> None:
        """Add the options of every command that makes runs; `out` is the help text of --out."""
        engine = "real processes (default), the same on emulated nodes, or a simulation"
        self.option("--engine", "{processes,emulation,simulation}", engine, choices=ENGINES)
        self.option("--cluster", "CLUSTER", "what is simulated or emulated: a preset or a file")
        changes = "change any setting: steps=100, optimizer.lr=0.1, task.channels=8; repeatable"
        self.option("--set", "KEY=VALUE", changes, action="append", default=[])
        order = "write down what depends on chance, for orchestra replay"
        # None where it is not given, so that the file's own setting holds
        self.add_argument("--record-order", action="store_true", default=None, help=order)
        self.option("--out", "DIR", out, type=Path)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the arguments of a command line; `given` has them as they were given.

        Raises:
            InputError: an unknown option or argument, a missing or refused value.
        """
        words, command = list(arguments), []
        if self._takes_command and "--" in words:
            place = words.index("--")
            words, command = words[:place], words[place + 1 :]
        # `parse_args` names all unknown options at once, and none that may be meant.
        namespace, unknown = self.parse_known_args(words)
        for argument in unknown:
            option = argument.partition("=")[0]
            if option.startswith("-"):
                hint = self._instead_of(option, words)
                raise InputError(f"{self.prog} has no option {option}; {hint}")
            raise InputError(f"{argument!r} is one argument too many; see {self.prog} --help")
        namespace.given, namespace.command = arguments, command
        return namespace

    def _instead_of(self, option: str, arguments: Sequence[str]) -> str:
        """Say what to write in place of an unknown option: a setting, or the nearest one."""
        known = self._option_string_actions
        if option in self._elsewhere:
            return self._elsewhere[option]
        settings = _settings_as_options() if "--set" in known else {}
        spelled = option.replace("_", "-")
        # A setting is no option, although many are tried as one: the message then offers --set.
        given = [*arguments, ""]
        place = next(at for at, text in enumerate(given) if text.partition("=")[0] == option)
        value = given[place].partition("=")[2] or given[place + 1]
        close = difflib.get_close_matches(spelled, [*known, *settings], n=1, cutoff=0.5)
        if not close or close[0] in known or not _takes(settings[close[0]], value):
            return nearest(option, known)
        wanted = "VALUE" if not value or value.startswith("-") else value
        return f"write --set {shlex.quote(_assignment(settings[close[0]], wanted))}"


def _assignment(key: str, value: str) -> str:
    """Return the KEY=VALUE that gives a setting `value`; some settings take a mapping."""
    if key in MAPPINGS:
        return f"{key}={MAPPINGS[key]}"
    if key != "strategies":
        return f"{key}={value}"
    label = value.partition("(")[0].strip().rpartition(":")[2]
    # A label of the file, as other commands take it, says nothing of the strategy itself
    notation = value if value[0].isupper() or ":" in value else "STRATEGY"
    if any(sign in notation for sign in ",:[]{}#"):
        notation = f"'{notation}'"
    return f"{key}={{{label}: {notation}}}"


def _takes(key: str, value: str) -> bool:
    """Return False if the setting `key` is a number and the `value` that was given is none."""
    from orchestra.trainer.settings import Training

    kinds = {field.name: str(field.type) for field in fields(Training)}
    number = set(kinds.get(key, "").split(" | ")) <= {"int", "float", "None"}
    if key not in kinds or not number or not value or value.startswith("-"):
        return True
    try:
        float(value)
    except ValueError:
        return False
    return True


def _settings_as_options() -> dict[str, str]:
    """Return options that users try, and the keys of `--set` that do the same."""
    from orchestra.experiments.file import KNOWN_KEYS

    keys = {key: key for key in KNOWN_KEYS} | {key: f"optimizer.{key}" for key in OPTIMIZER_KEYS}
    found = {f"--{name.replace('_', '-')}": key for name, key in keys.items()}
    return found | {"--learning-rate": "optimizer.lr"}

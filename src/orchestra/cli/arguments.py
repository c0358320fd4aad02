"""argparse with errors of one line, and the nearest option for an unknown one."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from orchestra.errors import InputError, nearest
from orchestra.experiments.file import KNOWN_KEYS
from orchestra.settings.yaml_text import Entry

_SETTINGS = {
    **{f"--{key.replace('_', '-')}": key for key in KNOWN_KEYS},
    **{f"--{key.replace('_', '-')}": f"optimizer.{key}" for key in (
        "lr", "momentum", "nesterov", "betas", "eps", "weight_decay")},
    "--learning-rate": "optimizer.lr",
}  # fmt: skip
"""What people try as options, and the keys that `--set` knows them by."""


class Parser(argparse.ArgumentParser):
    """A command's parser; raises `InputError` where argparse would exit."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"orchestra {command}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def add_run_options(self, out: str) -> None:
        """What every command that makes runs takes; `out` says what --out is there."""
        self.add_argument(
            "--engine",
            choices=["processes", "simulation"],
            help="real processes (default), or a simulation in virtual time",
        )
        self.add_argument(
            "--cluster", metavar="CLUSTER", help="what is simulated: a preset or a file"
        )
        self.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="change any setting: steps=100, optimizer.lr=0.1, task.channels=8; repeatable",
        )
        self.add_argument(
            "--record-order",
            action="store_const",
            const=True,
            help="write down what depends on chance, for orchestra replay",
        )
        self.add_argument("--out", type=Path, metavar="DIR", help=out)

    @staticmethod
    def run_settings(options: argparse.Namespace) -> dict[str, Entry]:
        """What the options of `add_run_options` say in place of the file."""
        return {
            key: Entry(value, f"--{key.replace('_', '-')}")
            for key in ("engine", "cluster", "record_order")
            if (value := getattr(options, key)) is not None
        }

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The arguments of a command line.

        Raises:
            InputError: an unknown option or argument, a missing or refused value.
        """
        namespace, unknown = self.parse_known_args(arguments)
        for argument in unknown:
            option = argument.partition("=")[0]
            if option.startswith("-"):
                hint = self._instead_of(option, arguments)
                raise InputError(f"{self.prog} has no option {option}; {hint}")
            raise InputError(f"{argument!r} is one argument too many; see {self.prog} --help")
        return namespace

    def _instead_of(self, option: str, arguments: Sequence[str]) -> str:
        """What to write in place of an unknown option: a setting, or the nearest one."""
        known = self._option_string_actions
        settings = _SETTINGS if "--set" in known else {}
        spelled = option.replace("_", "-")
        close = difflib.get_close_matches(spelled, [*known, *settings], n=1, cutoff=0.5)
        if not close or close[0] in known:
            return nearest(option, known)
        given = [*arguments, ""]
        place = next(at for at, text in enumerate(given) if text.partition("=")[0] == option)
        value = given[place].partition("=")[2] or given[place + 1]
        wanted = "VALUE" if not value or value.startswith("-") else value
        return f"write --set {shlex.quote(f'{settings[close[0]]}={wanted}')}"

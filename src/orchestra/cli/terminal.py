"""What commands share: argparse with errors of one line and the nearest option for an unknown one,
lists of numbers, tables, and a line of progress.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich import progress
from rich.table import Table

from orchestra.errors import InputError, nearest
from orchestra.experiments.file import KNOWN_KEYS
from orchestra.records.terminal import Terminal
from orchestra.settings.reading import Entry

if TYPE_CHECKING:
    from orchestra.bench.timing import Progress

ENGINES = ("processes", "emulation", "simulation")
_SETTINGS = {
    **{f"--{key.replace('_', '-')}": key for key in KNOWN_KEYS},
    **{f"--{key.replace('_', '-')}": f"optimizer.{key}" for key in (
        "lr", "momentum", "nesterov", "betas", "eps", "weight_decay")},
    "--learning-rate": "optimizer.lr",
}  # fmt: skip
"""Options that users try, and the keys of `--set` that do the same."""


class Parser(argparse.ArgumentParser):
    """A command's parser; raises `InputError` where argparse would exit."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"orchestra {command}", description=description, epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        # argparse would print its usage and exit; `main` prints one line.
        raise InputError(f"{message}; see {self.prog} --help")

    def option(self, name: str, value: str, meaning: str, **more: Any) -> None:
        """Add an option that takes a value, named in the help by `value`."""
        self.add_argument(name, metavar=value, help=meaning, **more)

    def flag(self, name: str, meaning: str, action: str = "store_true", **more: Any) -> None:
        """Add an option without a value, False by default."""
        self.add_argument(name, action=action, help=meaning, **more)

    def add_run_options(self, out: str) -> None:
        """Add the options of every command that makes runs; `out` is the help text of --out."""
        engine = "real processes (default), the same on emulated nodes, or a simulation"
        self.option("--engine", "{processes,emulation,simulation}", engine, choices=ENGINES)
        self.option("--cluster", "CLUSTER", "what is simulated or emulated: a preset or a file")
        changes = "change any setting: steps=100, optimizer.lr=0.1, task.channels=8; repeatable"
        self.option("--set", "KEY=VALUE", changes, action="append", default=[])
        order = "write down what depends on chance, for orchestra replay"
        self.flag("--record-order", order, default=None)
        self.option("--out", "DIR", out, type=Path)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the arguments of a command line.

        Raises:
            InputError: an unknown option or argument, a missing or refused value.
        """
        # `parse_args` names all unknown options at once, and none that may be meant.
        namespace, unknown = self.parse_known_args(arguments)
        for argument in unknown:
            option = argument.partition("=")[0]
            if option.startswith("-"):
                hint = self._instead_of(option, arguments)
                raise InputError(f"{self.prog} has no option {option}; {hint}")
            raise InputError(f"{argument!r} is one argument too many; see {self.prog} --help")
        return namespace

    def _instead_of(self, option: str, arguments: Sequence[str]) -> str:
        """Say what to write in place of an unknown option: a setting, or the nearest one."""
        known = self._option_string_actions
        settings = _SETTINGS if "--set" in known else {}
        spelled = option.replace("_", "-")
        # A setting is no option, although many are tried as one: the message then offers --set.
        close = difflib.get_close_matches(spelled, [*known, *settings], n=1, cutoff=0.5)
        if not close or close[0] in known:
            return nearest(option, known)
        given = [*arguments, ""]
        place = next(at for at, text in enumerate(given) if text.partition("=")[0] == option)
        value = given[place].partition("=")[2] or given[place + 1]
        wanted = "VALUE" if not value or value.startswith("-") else value
        return f"write --set {shlex.quote(f'{settings[close[0]]}={wanted}')}"


RUN_SETTINGS = ("engine", "cluster", "record_order")
"""The options of `Parser.add_run_options` that are keys of an experiment."""


def entries(options: argparse.Namespace, *keys: str) -> dict[str, Entry]:
    """Return the options that are `keys` of an experiment and were given, in place of a file's."""
    given = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    return {key: Entry(value, f"--{key.replace('_', '-')}") for key, value in given.items()}


def choose(
    arguments: Sequence[str],
    actions: Mapping[str, Callable[[Sequence[str]], int]],
    overview: str,
    unknown: str,
) -> int:
    """Carry out the one of a command's actions that is named first, or print `overview`.

    `unknown` begins the message about another name.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview, end="")
        return 0
    name, *rest = arguments
    if name not in actions:
        raise InputError(f"{unknown.format(name)}; {nearest(name, actions)}")
    return actions[name](rest)


ELLIPSES = ("...", "…")
MOST = 1000


def numbers(text: str) -> list[int]:
    """Return the numbers in `text`; before the last one `...` stands for those in between.

    They go on by equal steps where all given ones do (1,2,...,8), else by equal factors
    (1,2,4,...,256).

    Raises:
        ArgumentTypeError: it is no such list, or does not come to its last number.
    """
    parts = [part.strip() for part in text.split(",")]
    dots = [place for place, part in enumerate(parts) if part in ELLIPSES]
    try:
        given = [int(part) for part in parts if part not in ELLIPSES]
    except ValueError:
        reason = "is not a list of whole numbers such as 1,2,4 or 1,2,4,...,256"
        raise _refused(text, reason) from None
    if not dots:
        return given
    if dots != [len(parts) - 2] or len(given) < 3:
        raise _refused(text, "needs ... once, after two numbers or more and before the last one")
    return _continued(text, *given)


def counts(option: str, text: str, *, low: int, why: str = "") -> list[int]:
    """Return the numbers in the value of `option`, each at least `low`, for the reason `why`.

    Raises:
        InputError: they are no such numbers.
    """
    try:
        found = numbers(text)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{option}: {error}") from None
    if min(found) < low:
        raise InputError(f"{option}: {min(found)} is below {low}{why}")
    return found


def _continued(text: str, *given: int) -> list[int]:
    """Go on as the numbers before the last one do, which have to rise, up to the last one."""
    *found, last = given
    # Equal steps come first: 1,2,...,8 are steps of one, and not powers of two.
    rules = (1, found[1] - found[0]), (found[1] // max(found[0], 1), 0)
    for factor, step in rules if found[1] > found[0] else ():
        if all(b == a * factor + step for a, b in itertools.pairwise(found)):
            break
    else:
        raise _refused(text, "rises neither by equal steps nor by equal factors")
    if last <= found[-1]:
        raise _refused(text, f"has to end with a number above {found[-1]}")
    while found[-1] < last:
        found.append(found[-1] * factor + step)
        if len(found) > MOST:
            raise _refused(text, f"stands for more than {MOST} numbers")
    if found[-1] != last:
        raise _refused(text, f"does not come to {last}, but to {found[-2]} and {found[-1]}")
    return found


def _refused(text: str, reason: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} {reason}")


@contextmanager
def progress_line() -> Iterator[Progress]:
    """Show progress on standard error: a bar on a terminal, elsewhere a line now and then."""
    if not sys.stderr.isatty():
        from orchestra.engines.live import Lines

        yield Lines()
        return
    text, bar = progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=24)
    columns = (text, bar, progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=Terminal(stderr=True), transient=True) as line:
        task = line.add_task("starting", total=1.0)

        def tell(what: str, part: float) -> None:
            line.update(task, description=what, completed=part)

        yield tell


def print_table(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a table; its first column is of names, the others of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    # Without markup: names such as AllReduce[...] have brackets.
    console = Terminal()
    if not console.is_terminal:  # a file has room for all columns
        console.width = 1000
    console.print(title, style="bold", soft_wrap=True)
    console.print(table, end="\n\n")

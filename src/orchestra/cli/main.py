"""The command `orchestra`: choose the command, and turn errors into one line and a status.

Exit status: 0 all well, or SIGTERM stopped a training in good order; 1 a run failed or the user
stopped it; 2 bad input.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from orchestra import __version__
from orchestra.cli.commands import ORCHESTRA, Command, CommandGroup
from orchestra.errors import InputError, RunFailed, tell
from orchestra.module_path import admit_working_folder, without_working_folder

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""The errors of a failed write for which the system names no file."""

MOVED = (
    "orchestra bench is gone: in a clone of Orchestra's repository, run python -m benchmarks.step "
    "or python -m benchmarks.fidelity"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process), and return its exit status."""
    return guarded(_dispatch, argv)


def guarded(command: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run `command` on `argv` (default: the process's); turn errors into a line and a status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        # Python has none where it was closed when the process began (`orchestra ... >&-`).
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    try:
        with _ended_by_sigterm():
            return command(arguments)
    except (InputError, RunFailed) as error:
        return _complain(error, 2 if isinstance(error, InputError) else 1)
    except KeyboardInterrupt:
        return _complain("stopped", _interrupted_status())
    except SystemExit as exit:  # argparse, after --help
        return _complain(exit, 2) if isinstance(exit.code, str) else int(exit.code or 0)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is None and error.errno not in NO_ROOM:
            raise
        _drop_output()
        where = error.filename or "standard output, or a file"
        return _complain(f"{where}: {error.strerror}", 1)


def _interrupted_status() -> int:
    from orchestra.engines.processes.environment import INTERRUPTED_STATUS, LAUNCHER_VARIABLE

    return INTERRUPTED_STATUS if LAUNCHER_VARIABLE in os.environ else 1


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C inside; only a main thread can arrange that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        # None, a handler that was not set from Python, cannot be put back.
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _drop_output() -> None:
    """Send what is still to be written to standard output nowhere."""
    # Python flushes standard output as it ends, and would fail once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(f"orchestra {__version__}")
        return 0
    if arguments[:1] == ["bench"]:
        raise InputError(MOVED)
    found: Command | CommandGroup = ORCHESTRA
    words = arguments
    while isinstance(found, CommandGroup):
        if not words or words[0] in ("-h", "--help", "help"):
            print(found.overview(), end="")
            return 0
        found, words = found.find(words[0]), words[1:]
    status = _carry_out(found, words)
    # Here, where a full disk or a closed pipe still becomes a line and a status.
    sys.stdout.flush()
    return status


def _carry_out(command: Command, words: list[str]) -> int:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise InputError("the working directory is gone; change to one that is there") from None
    with without_working_folder():
        options = command.parser().read(words)
        if command.trains:
            admit_working_folder()
        module, _, function = command.action.partition(":")
        status = getattr(importlib.import_module(module), function)(options)
    assert isinstance(status, int)
    return status


def _complain(message: object, status: int) -> int:
    tell(message)
    return status


if __name__ == "__main__":
    sys.exit(main())

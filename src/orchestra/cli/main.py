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
from orchestra.errors import InputError, RunFailed, nearest, tell

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""The errors of a failed write for which the system names no file."""

HELP = """\
usage: orchestra COMMAND [ARGUMENT ...]

Orchestra trains a PyTorch model on several processes under any distribution strategy, by
naming the strategy: a task says what to train, a strategy when the processes exchange what.

commands:
  compare  train a task under every strategy of a file, and report on them side by side
  simulate the same in virtual time, on a cluster that you describe
  plan     which strategy for your model on your machines, and what it gains
  map      which strategy is first where, as bandwidth, nodes or speeds vary: a figure
  train    train a task under one strategy, and write the record of the run
  join     join a run under way, as one rank more
  watch    show a run or a comparison in the terminal, while it goes on or afterwards
  report   make a report of any past runs
  replay   repeat a recorded run to the same bits, and stop where you like
  bench    measure speed on this machine, beside peers measured in the same run
  calibrate measure what a simulation needs to know of this machine
  emulation check, use and clean up clusters that Linux emulates on this machine
  import   write the file of a cluster of a cloud's instances
  studio   a local web page: time, timeline and scaling of strategies as you move sliders
  list     show strategies, tasks and schedules, or the settings of one of them

  orchestra COMMAND --help says more about each. --version shows the version.

examples:
  orchestra compare examples/quickstart.yaml
      every strategy of the file on the same data, one after the other, and runs/quickstart-1/
      report.html with the answer: which was first, why, and did distributing pay

  orchestra train --task digits --strategy 'AllReduce("ring")'
      four processes, a small CNN on handwritten digits, gradients averaged round a ring

  orchestra train experiment.yaml --ranks 2 --set optimizer.lr=0.05 --out runs/first
      what the file says, with two changes; the same command again resumes it

  orchestra simulate examples/quickstart.yaml --cluster 'lan_1gbit(nodes=8)' --ranks 8
      the same comparison on eight machines that you do not have

  orchestra list ParameterServer
      what a parameter server is here, and each of its settings
"""

COMMANDS = {
    "bench": "orchestra.cli.bench:bench",
    "calibrate": "orchestra.cli.bench:calibrate",
    "compare": "orchestra.cli.compare:main",
    "emulation": "orchestra.cli.clusters:emulation",
    "import": "orchestra.cli.clusters:import_cluster",
    "join": "orchestra.cli.join:main",
    "list": "orchestra.cli.list:main",
    "map": "orchestra.cli.plan:draw",
    "plan": "orchestra.cli.plan:main",
    "replay": "orchestra.cli.train:replay",
    "report": "orchestra.cli.compare:report",
    "simulate": "orchestra.cli.compare:simulate",
    "studio": "orchestra.cli.watch:studio",
    "train": "orchestra.cli.train:main",
    "watch": "orchestra.cli.watch:main",
}


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
        return _complain("stopped", 1)
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
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    command, *rest = arguments
    if command == "--version":
        print(f"orchestra {__version__}")
        return 0
    if command not in COMMANDS:
        kind = "option" if command.startswith("-") else "command"
        raise InputError(f"unknown {kind} {command!r}; {nearest(command, COMMANDS)}")
    try:
        here = str(Path.cwd())
    except FileNotFoundError:
        raise InputError("the working directory is gone; change to one that is there") from None
    # For package.module:function. After what is installed: no file here may stand in for a package.
    if sys.path[0] in ("", here):  # from `python -m`
        del sys.path[0]
    if here not in sys.path:
        sys.path.append(here)
    module, _, function = COMMANDS[command].partition(":")
    status = getattr(importlib.import_module(module), function)(rest)
    assert isinstance(status, int)
    # Here, where a full disk or a closed pipe still becomes a line and a status.
    sys.stdout.flush()
    return status


def _complain(message: object, status: int) -> int:
    tell(message)
    return status


if __name__ == "__main__":
    sys.exit(main())

"""A launcher that ends, or may open too few files, while it starts its ranks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.support.commands import Started
from tests.support.warm import MODULE_PATH

TRAIN = ["-m", "orchestra", "train", "--task", "digits", "--strategy", "AllReduce", "--ranks", "4"]

# Python imports it in each process that it starts: this one's fork server never ends its imports.
SITE = """
import pathlib, signal, sys
if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    class Blocking:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                pathlib.Path({importing!r}).touch()
                while True:
                    signal.pause()
    sys.meta_path.insert(0, Blocking())
"""


def test_fork_server_ends_with_its_launcher_while_it_imports(tmp_path: Path) -> None:
    importing = tmp_path / "importing"
    (tmp_path / "sitecustomize.py").write_text(SITE.format(importing=str(importing)))
    path = {"PYTHONPATH": f"{tmp_path}:{MODULE_PATH}"}
    with Started([sys.executable, *TRAIN], tmp_path, path, fresh=True) as command:
        command.wait_until(importing.exists, "the fork server imports torch")
        os.kill(command.process.pid, signal.SIGKILL)
        assert command.end().status == -signal.SIGKILL


def test_too_few_open_files_are_told_in_one_line(tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -n 20; exec "$0" "$@"', sys.executable, *TRAIN]
    with Started(limited, tmp_path, fresh=True) as command:
        ended = command.end()
    assert ended.status == 2, ended.err
    assert ended.err.startswith("orchestra: cannot start 4 ranks: ")
    assert ended.err.count("\n") == 1, ended.err
    assert "this process may have 20 files open" in ended.err

"""Imported by the fork server before anything else: end it with the launcher, also in its imports.

multiprocessing's fork server looks whether its launcher is there only after its imports, which take
seconds.
"""

from __future__ import annotations

import os
import signal

from orchestra.engines.processes.system import die_with_parent


def _end_without_launcher() -> None:
    server, launcher = os.getpid(), os.getppid()

    def look(*_: object) -> None:
        # The kernel also sends the signal when only the thread that started this process ends.
        # A rank inherits this handler, and has another parent.
        if os.getpid() == server and os.getppid() != launcher:
            os._exit(1)

    signal.signal(signal.SIGURG, look)
    die_with_parent(signal.SIGURG)


_end_without_launcher()

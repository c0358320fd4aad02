"""Imported by the fork server before anything else: it imports nothing from the working folder, and
ends with the launcher, also during its imports.

multiprocessing's fork server looks whether its launcher is there only after its imports, which take
seconds.
"""

from __future__ import annotations

import os
import signal

from orchestra.module_path import leave_out_working_folder


def _end_without_launcher() -> None:
    from orchestra.engines.processes.system import die_with_parent

    server, launcher = os.getpid(), os.getppid()

    def look(*_: object) -> None:
        # The kernel also sends the signal when only the thread that started this process ends.
        # A rank inherits this handler, and has another parent.
        if os.getpid() == server and os.getppid() != launcher:
            os._exit(1)

    signal.signal(signal.SIGURG, look)
    die_with_parent(signal.SIGURG)


# First, as what comes next imports torch; ranks get the module path of the launcher later.
leave_out_working_folder()
_end_without_launcher()

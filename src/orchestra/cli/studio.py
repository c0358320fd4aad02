"""`orchestra studio`: a local web page on the simulation."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import socket
import webbrowser
from collections.abc import Sequence

from orchestra.cli.arguments import Parser
from orchestra.errors import InputError
from orchestra.worker.runtime import usable_cores

DESCRIPTION = """\
Open a page on which you choose the size of a model, the number of workers, the bandwidth and the
latency of their network, and how slow the slowest of them is. The time of a step, its timeline and
the scaling of every strategy are simulated as you move the controls, and the messages of a step
travel on the network. Nothing is trained, and nothing has to be measured first.

The page is served to this machine alone (127.0.0.1). Ctrl-C ends it.
"""
EPILOG = """\
examples:
  orchestra studio --open
      the page in your browser

  orchestra studio --port 8000
      at http://127.0.0.1:8000/, such as for ssh -L 8000:127.0.0.1:8000 from another machine
"""
MOST_PROCESSES = 8
ADDRESS = "127.0.0.1"


def main(arguments: Sequence[str]) -> int:
    parser = Parser("studio", DESCRIPTION, EPILOG)
    parser.option("--port", "N", "port of the address (default: a free one)", type=int, default=0)
    parser.flag("--open", "open the page in the browser of this machine")
    options = parser.read(arguments)
    if not 0 <= options.port < 65536:
        raise InputError(f"--port: {options.port} is no port; give one from 1024 to 65535")
    try:
        from werkzeug.serving import make_server

        from orchestra.studio.server import Simulator, begin_process, make_app
    # Only for what the extra brings: another missing module is a fault of the installation.
    except ModuleNotFoundError as error:
        if error.name not in ("flask", "werkzeug"):
            raise
        raise InputError(
            "orchestra studio needs Flask: pip install 'neural-orchestra[studio]'"
        ) from None
    # A page asks many times a second: no line for each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # Bound before processes are started, so that a port that is taken is noticed at once.
    listening = _listen(options.port)
    size = min(len(usable_cores()), MOST_PROCESSES)
    # Spawned: each process imports torch, and the server itself stays without (decision 101).
    with multiprocessing.get_context("spawn").Pool(size, begin_process) as pool:
        app = make_app(Simulator(pool, size))
        server = make_server(ADDRESS, 0, app, threaded=True, fd=listening.fileno())
        address = f"http://{ADDRESS}:{listening.getsockname()[1]}/"
        print(f"orchestra studio: {address} (Ctrl-C ends it)", flush=True)
        if options.open:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        server.server_close()
    return 0


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on `port` of this machine, for itself alone.

    Raises:
        InputError: somebody else does.
    """
    try:
        return socket.create_server((ADDRESS, port))
    except OSError as error:
        raise InputError(f"--port: {port} cannot be had ({error.strerror}); leave it out") from None

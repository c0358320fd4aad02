"""`orchestra studio`: a local web page on the simulation."""

from __future__ import annotations

import contextlib
import logging
import socket
import webbrowser
from argparse import Namespace

from orchestra.errors import InputError
from orchestra.worker.runtime import usable_cores

MOST_PROCESSES = 8
ADDRESS = "127.0.0.1"


def main(options: Namespace) -> int:
    if not 0 <= options.port < 65536:
        raise InputError(f"--port: {options.port} is no port; give one from 1024 to 65535")
    try:
        from werkzeug.serving import make_server

        from orchestra.studio.pool import StudioPool
        from orchestra.studio.server import Simulator, load_torch, make_app
    # Only for what the extra brings: another missing module is a fault of the installation.
    except ModuleNotFoundError as error:
        if error.name not in ("flask", "werkzeug"):
            raise
        raise InputError(
            "orchestra studio needs Flask: pip install '.[studio]' in a clone of Orchestra"
        ) from None
    # A page asks many times a second: no line for each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # Bound before processes are started, so that a port that is taken is noticed at once.
    listening = _listen(options.port)
    size = min(len(usable_cores()), MOST_PROCESSES)
    with StudioPool(size, load_torch) as pool:
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

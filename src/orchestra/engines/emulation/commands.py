"""Any command on an emulated cluster, once for each rank, as torchrun would start it: here, or by a
compose file on machines on which Docker does what the engine does.

There each container shapes its own ends of its link, inside: what it sends on its interface, and
what it receives on an intermediate one (ifb), through which all that arrives passes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from typing import IO, Any

from orchestra.cluster import Cluster, Link, Node
from orchestra.engines.emulation.groups import quota_and_period
from orchestra.engines.emulation.network import NODE_END, redirected, token_bucket
from orchestra.engines.emulation.nodes import (
    EmulatedCluster,
    require_plain,
    share_of,
)
from orchestra.engines.emulation.training import TimedChanges
from orchestra.engines.processes.environment import LATENCIES
from orchestra.engines.processes.system import RankPlace
from orchestra.errors import InputError, RunFailed
from orchestra.settings.reading import yaml_text

PORT = 29500  # for torch.distributed, on the first rank's node, where nothing else listens
HEAD = """\
# Cluster {name}, written by `orchestra emulation compose`; see docs/how-to/emulate.md.
# Checked by the schema of the compose specification, and not run by its authors.
#
#   docker compose up --build --abort-on-container-failure
"""
NETWORK, IMAGE, ARRIVING = "cluster", "neural-orchestra", "arriving"
_JOIN = 'echo $$ > "$0" && exec "$@"'
_LEAVING_SECONDS = 5.0


def run_command(cluster: Cluster, ranks: int, command: Sequence[str]) -> None:
    """Run `command` once for each of `ranks` ranks, inside its node, until all have ended.

    Each has the environment variables of torchrun. Its output comes line by line, with the rank and
    its node in front. When one fails, the others are ended. Faults count from the start.

    Raises `InputError` where this machine cannot emulate the cluster, and `RunFailed` with the
    first command that failed.
    """
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as readers, EmulatedCluster(cluster, ranks) as emulated:
        places = emulated.places()
        schedule = TimedChanges(emulated.changes(), ranks)
        try:
            for rank, place in enumerate(places):
                with emulated.network.namespaces[place.node].inside():
                    process = _start(place, command, variables(rank, places))
                processes.append(process)
                for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    given = stream, out, f"[{rank} {place.node}] "
                    reader = threading.Thread(target=_pass_on, args=given)
                    reader.start()
                    readers.callback(reader.join)  # by then nobody is left who could write
            schedule.begin()
            failure = _first_failure(processes)
        finally:
            schedule.close()
            _end(processes)
    if failure is not None:
        rank, how = failure
        raise RunFailed(f"the command of rank {rank} on {places[rank].node} {how}")


def variables(rank: int, places: Sequence[RankPlace]) -> dict[str, str]:
    """Return the variables of torchrun for `rank`, and the interface to the other nodes."""
    place = places[rank]
    threads = {"OMP_NUM_THREADS": str(place.threads)}
    own = torchrun_variables(rank, len(places), places[0].address, place.interface)
    here = Counter(other.node for other in places)[place.node]
    local = {"LOCAL_RANK": str(place.local_rank), "LOCAL_WORLD_SIZE": str(here)}
    held = {LATENCIES: ",".join(map(repr, place.latencies))} if any(place.latencies) else {}
    return {**threads, **os.environ, **own, **local, **held}


def _start(
    place: RankPlace, command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["sh", "-c", _JOIN, place.members, *command], env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,  # Ctrl-C is for this process, which ends them
    )  # fmt: skip


def _pass_on(stream: IO[str] | None, out: IO[str], prefix: str) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            out.write(prefix + line.rstrip("\n") + "\n")
            out.flush()


def _first_failure(processes: Sequence[subprocess.Popen[str]]) -> tuple[int, str] | None:
    """Wait until all have ended, or one has failed; return which, and how."""
    waiting = ThreadPoolExecutor(len(processes))
    ends = {waiting.submit(process.wait): rank for rank, process in enumerate(processes)}
    waiting.shutdown(wait=False)
    for end in as_completed(ends):
        if (status := end.result()) < 0:
            return ends[end], f"was killed by {signal.Signals(-status).name}"
        if status > 0:
            return ends[end], f"ended with status {status}"
    return None


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ask those that still run to end, and end them if they do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVING_SECONDS)
        process.kill()
        process.wait()


def torchrun_variables(rank: int, ranks: int, master: str, interface: str) -> dict[str, str]:
    """What torchrun says of `rank`, and which interface leads to the other nodes."""
    return {
        **{f"{name}_SOCKET_IFNAME": interface for name in ("GLOO", "NCCL", "TP")},
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
    }


# Compose files


def compose_text(cluster: Cluster, ranks: int, command: Sequence[str]) -> str:
    """Write the compose file: a service for each node, which runs `command` as its rank. Raises
    `InputError` where several ranks share a node, or the nodes are not all at one switch."""
    nodes = cluster.nodes_of(ranks)
    where = f"cluster {cluster.name}"
    require_plain(cluster, nodes)
    name, most = Counter(node.name for node in nodes).most_common(1)[0]
    if most > 1:
        raise InputError(
            f"{where}: node {name} holds {most} ranks, and a container holds one: give --ranks "
            f"{len(cluster.nodes)} or less, or use orchestra emulation run"
        )
    if len({node.switch for node in nodes}) > 1:
        raise InputError(
            f"{where}: its nodes are at several switches, and compose has no links between "
            "networks: use orchestra emulation run"
        )
    services = {
        service_name(node): _service(rank, nodes, command) for rank, node in enumerate(nodes)
    }
    if len(services) < ranks:
        raise InputError(f"{where}: two nodes differ in upper and lower case alone: rename one")
    document = {
        "name": re.sub(r"[^a-z0-9]+", "-", f"orchestra-{cluster.name}".lower()).strip("-"),
        "services": services,
        "networks": {NETWORK: {"driver": "bridge"}},
    }
    return HEAD.format(name=cluster.name) + yaml_text(document)


def service_name(node: Node) -> str:
    """Return the name by which other containers find a node: in lower case, as host names are."""
    return re.sub(r"[^a-z0-9-]", "-", node.name.lower())


def _service(rank: int, nodes: Sequence[Node], command: Sequence[str]) -> dict[str, Any]:
    node = nodes[rank]
    quota, period = quota_and_period(share_of(node))
    threads = {"OMP_NUM_THREADS": str(node.threads(1))}
    environment = torchrun_variables(rank, len(nodes), service_name(nodes[0]), NODE_END)
    return {
        "image": IMAGE,
        "build": ".",
        "cpu_period": period,
        "cpu_quota": quota,
        "cap_add": ["NET_ADMIN"],
        "networks": [NETWORK],
        "volumes": ["./runs:/runs"],
        "environment": {**environment, **threads},
        # A dollar is doubled: compose puts variables in place of single ones.
        "entrypoint": ["sh", "-c", shaping_script(node).replace("$", "$$"), "sh"],
        "command": list(command),
    }


def shaping_script(node: Node) -> str:
    """Return shell commands that shape both directions of a node's link, then run the command."""
    lines = ["set -e"]
    if node.up is not None and node.down is not None:
        lines += [
            *_shaped(NODE_END, node.up),
            f"ip link add {ARRIVING} type ifb",
            f"ip link set {ARRIVING} up",
            *(f"tc {line}" for line in redirected(NODE_END, ARRIVING)),
            *_shaped(ARRIVING, node.down),
        ]
    return "; ".join([*lines, 'exec "$@"'])


def _shaped(interface: str, link: Link) -> list[str]:
    lines = [f"tc qdisc add dev {interface} root handle 1: {token_bucket(link.bandwidth)}"]
    if link.latency:
        microseconds = max(1, round(link.latency * 1e6))
        lines.append(
            f"tc qdisc add dev {interface} parent 1:1 handle 10: netem delay {microseconds}us "
            "2> /dev/null || echo without netem there is no latency >&2"
        )
    return lines

"""Hosts with a real sshd each: network namespaces of this machine, which share its file system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.support.commands import Started
from tests.support.emulated import REASON
from tests.support.waiting import wait_until

from orchestra.cluster import Cluster, Link, NetworkSwitch, Node
from orchestra.engines.emulation.network import Network

SSHD = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
REQUIRED = "ORCHESTRA_REQUIRE_SSHD"
LACKING = "" if SSHD and shutil.which("ssh") and shutil.which("ip") else "needs sshd, ssh and ip"
_required = bool(LACKING) and os.environ.get(REQUIRED) == "1"
needs_sshd = pytest.mark.skipif(bool(REASON or LACKING) and not _required, reason=REASON or LACKING)

NAMES = ("a", "b", "c", "d")
LINK = Link(125e6, 50e-6)
_PRIVILEGES = Path("/run/sshd")  # the folder that sshd wants
_SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
"""
_CLIENT = """\
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking no
IdentityFile {folder}/key
IdentitiesOnly yes
LogLevel ERROR
"""


@dataclass
class SshHosts:
    """Hosts a, b, c ... with an address each; the first one is where commands are given."""

    network: Network
    folder: Path
    servers: dict[str, subprocess.Popen[bytes]]

    def started(
        self, arguments: Sequence[str], cwd: Path, variables: Mapping[str, str | None] | None = None
    ) -> Started:
        """`orchestra` with `arguments`, on the first host."""
        path = f"{self.folder}:{os.environ['PATH']}"
        command = [sys.executable, "-m", "orchestra", *arguments]
        with self.network.namespaces[NAMES[0]].inside():
            return Started(command, cwd, {"PATH": path, **(variables or {})}, fresh=True)

    def processes(self, name: str) -> set[int]:
        """The processes in the namespace of a host, its sshd aside."""
        inside = self._inode(f"/proc/self/fd/{self.network.namespaces[name].descriptor}")
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._inode(str(folder / "ns/net")) == inside:
                    found.add(int(folder.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found - {self.servers[name].pid}

    def sessions(self, name: str) -> set[int]:
        """The processes of sshd that hold a connection to a host."""
        return {pid for pid in self.processes(name) if "sshd: " in _command_line(pid)}

    def agents(self, name: str) -> set[int]:
        """The processes of agents on a host."""
        return {pid for pid in self.processes(name) if "hosts.agent" in _command_line(pid)}

    def ranks(self, name: str) -> set[int]:
        """The processes of ranks on a host."""
        return {pid for pid in self.processes(name) if " train - " in _command_line(pid)}

    def nothing_is_left(self) -> bool:
        return not any(self.processes(name) for name in self.servers)

    def close_ports(self, name: str, source: str) -> None:
        """Drop what `source` sends to high ports of `name`, as a firewall does."""
        address = self.network.addresses[source]
        self.network.namespaces[name].ip(
            [
                # The kernel's first rule, for its own addresses, comes after the new one.
                "rule add pref 20 lookup local",
                f"rule add pref 10 from {address} ipproto tcp dport 32768-60999 blackhole",
                "rule del pref 0",
            ]
        )

    def interpreter(self, name: str, line: str) -> str:
        """The path of an interpreter that, on the host `name`, runs the shell's `line` instead."""
        path = self.folder / "python"
        address = self.network.addresses[name]
        path.write_text(
            f'#!/bin/sh\ncase "$(ip -o -4 address)" in *" {address}/"*) {line};; esac\n'
            f'exec {sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        return str(path)

    @staticmethod
    def _inode(path: str) -> int:
        return os.stat(path).st_ino  # noqa: PTH116


def _listens(log: Path) -> bool:
    return log.exists() and "listening" in log.read_text()


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@contextmanager
def ssh_hosts(folder: Path, count: int) -> Iterator[SshHosts]:
    """The first `count` hosts, with keys, and an `ssh` that knows them by their names."""
    if LACKING:
        pytest.fail(f"{LACKING}, and {REQUIRED} is 1")
    names = NAMES[:count]
    nodes = tuple(
        Node(name, 1, speed=1, switch="s", up=LINK, down=LINK, loopback=LINK) for name in names
    )
    cluster = Cluster("hosts", nodes, (NetworkSwitch("s"),), placement="spread")
    for key in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    _PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    with ExitStack() as held:
        network = Network(cluster, nodes)
        held.callback(network.close)
        text = "".join(f"Host {n}\n  HostName {network.addresses[n]}\n" for n in names)
        (folder / "ssh_config").write_text(f"{text}Host *\n{_CLIENT.format(folder=folder)}")
        client = folder / "ssh"
        client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        client.chmod(0o755)
        servers = {}
        for name in names:
            log = folder / f"sshd-{name}.log"
            command = [str(SSHD), "-D", "-f", str(folder / "sshd_config"), "-E", str(log)]
            with network.namespaces[name].inside():
                process = servers[name] = subprocess.Popen(command)
            held.callback(process.wait)
            held.callback(process.kill)
            wait_until(partial(_listens, log), "sshd listens")
        hosts = SshHosts(network, folder, servers)
        try:
            yield hosts
        finally:
            for name in names:
                for pid in hosts.processes(name):
                    subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)

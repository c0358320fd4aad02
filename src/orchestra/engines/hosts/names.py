"""The value of `--hosts`: names of hosts as ssh knows them, each with a number of ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestra.errors import InputError
from orchestra.settings import MAX_RANKS

LOCAL = "localhost"
"""The name of this machine, which needs no ssh."""

_PLACE = re.compile(r"(?P<name>\[[^\]\s]+\]|[^\s:,\[\]]+)(?::(?P<ranks>[0-9]{1,9}))?")


@dataclass(frozen=True)
class HostRanks:
    """A host, and how many ranks of the run it holds."""

    name: str
    ranks: int = 1

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.ranks == 1 else f"{name}:{self.ranks}"


def read_hosts(text: str) -> tuple[HostRanks, ...]:
    """Read "a,user@b:2,[fe80::1]:4".

    Raises:
        InputError: a part is no host, names one twice, or asks for no rank.
    """
    hosts: list[HostRanks] = []
    for part in text.split(","):
        found = _PLACE.fullmatch(part.strip())
        if found is None or found["name"].startswith("-"):
            raise InputError(
                f"--hosts: {part!r} is no host; write NAME or NAME:RANKS, such as a,b:2 "
                "(an IPv6 address in brackets)"
            )
        host = HostRanks(found["name"].strip("[]"), int(found["ranks"] or 1))
        if not 1 <= host.ranks <= MAX_RANKS:
            raise InputError(f"--hosts: {part!r} asks for {host.ranks} ranks; give 1 or more")
        if any(host.name == other.name for other in hosts):
            raise InputError(f"--hosts: {host.name} is there twice; write {host.name}:RANKS once")
        hosts.append(host)
    return tuple(hosts)

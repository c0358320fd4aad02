"""What has to hold on all hosts before a run starts there; each refusal names a host and why."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestra.engines.hosts.connection import Connection, Hosts
from orchestra.engines.hosts.facts import Facts, file_digest
from orchestra.errors import InputError

CLOCK_SECONDS = 5.0
"""The largest difference between a host's clock and this machine's."""
_CLOCK_READINGS = 3
_LOOPBACK = "127.0.0.1"
_PORTS = "the ports of net.ipv4.ip_local_port_range"


@dataclass(frozen=True)
class Clock:
    """A host's clock compared with this machine's: seconds ahead, and the error of that."""

    ahead: float
    error: float

    @property
    def off(self) -> float:
        """The least difference that the readings leave possible, in seconds."""
        return max(0.0, abs(self.ahead) - self.error)


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other: the address of each host that all others have reached."""

    addresses: Mapping[str, str]  # by host; the first one holds rank 0
    ports: Mapping[str, int] = field(default_factory=dict)  # where agents listen before the start


def facts_of(hosts: Hosts) -> dict[str, Facts]:
    """Ask all hosts what they have. Raises `InputError` for those that cannot be reached."""
    return as_facts(hosts.ask("facts", dict.fromkeys(hosts.connections, False)))


def as_facts(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Facts]:
    """Return the facts of each host from its answer."""
    for name, each in found.items():
        if each.keys() != Facts.__dataclass_fields__.keys():
            raise InputError(f"{name}: has another version of Orchestra; install the same")
    return {name: Facts(**each) for name, each in found.items()}


def clocks_of(hosts: Hosts) -> dict[str, Clock]:
    """Compare the clock of each host with this machine's."""
    found, lost = hosts.each(_clock)
    if lost:
        raise InputError("; ".join(lost))
    return found


def _clock(connection: Connection) -> Clock:
    readings = []
    for _ in range(_CLOCK_READINGS):
        before = time.time()
        there = connection.ask("clock")
        after = time.time()
        readings.append(Clock(there - (before + after) / 2, (after - before) / 2))
    return min(readings, key=lambda reading: reading.error)


def unlike(facts: Mapping[str, Facts], here: Facts) -> list[str]:
    """Return a refusal for each host whose software differs: from `here`, or from the first's."""
    refusals = []
    first, one = next(iter(facts.items()))
    for name, each in facts.items():
        if each.orchestra != here.orchestra:
            refusals.append(
                f"{name}: Orchestra {each.orchestra}, here {here.orchestra}: install the same"
            )
        elif each.source != here.source:
            refusals.append(
                f"{name}: Orchestra {each.orchestra} with other files than here "
                f"({each.source}, not {here.source}): install the same"
            )
        if each.torch is None:
            refusals.append(f"{name}: has no torch; install {one.torch or 'it'}")
        elif each.torch != one.torch and one.torch is not None:
            refusals.append(
                f"{name}: torch {each.torch}, {first} has {one.torch}: install the same"
            )
    return refusals


def late(clocks: Mapping[str, Clock]) -> list[str]:
    """Return a refusal for each host whose clock is off by more than the bound."""
    return [
        f"{name}: its clock is {abs(clock.ahead):.1f} s {'ahead' if clock.ahead > 0 else 'behind'} "
        f"(at most {CLOCK_SECONDS:g} s): synchronise it, such as by chrony"
        for name, clock in clocks.items()
        if clock.off > CLOCK_SECONDS
    ]


def require_alike(hosts: Hosts, here: Facts) -> dict[str, Facts]:
    """Return the facts of all hosts.

    Raises:
        InputError: a host cannot be reached, or has other versions or another time.
    """
    facts = facts_of(hosts)
    refusals = unlike(facts, here) or late(clocks_of(hosts))
    if refusals:
        raise InputError("; ".join(refusals))
    return facts


def require_files(hosts: Hosts, folder: Path, modules: Sequence[Path]) -> None:
    """Enter the working folder on all hosts, and compare files of the user's own.

    Raises:
        InputError: a host lacks the folder or a file, or has another content there.
    """
    entered = hosts.ask("enter", dict.fromkeys(hosts.connections, str(folder)))
    refusals = [
        f"{name}: {folder}: {error}; the working folder has to be at the same path on each host"
        for name, error in entered.items()
        if error is not None
    ]
    own = {str(path): file_digest(path) for path in modules}
    if own and not refusals:
        found = hosts.ask("digests", {name: [*own] for name in hosts.connections})
        for name, digests in found.items():
            for (path, digest), there in zip(own.items(), digests, strict=True):
                if there != digest:
                    how = "is not there" if there is None else "differs from the one here"
                    refusals.append(f"{name}: {path} {how}; copy it to each host")
    if refusals:
        raise InputError("; ".join(refusals))


def require_shared(hosts: Hosts, first: str, folder: Path) -> None:
    """Raise `InputError` unless all hosts share the `folder` of the record, or where it will be."""
    others = [name for name in hosts.connections if name != first]
    if not others:
        return
    made = hosts.ask("mark", {first: str(folder)})[first]
    if "refusal" in made:
        raise InputError(f"{first}: {folder}: {made['refusal']}; choose another --out")
    found = hosts.ask("digests", {name: [made["path"]] for name in others})
    apart = [name for name, (digest,) in found.items() if digest is None]
    if apart:
        raise InputError(
            f"{', '.join(apart)}: {folder} is not the folder of {first}, and a checkpoint needs "
            "one that all hosts share: name one with --out, or leave out checkpoint_every"
        )


def meet(hosts: Hosts) -> Meeting:
    """Find an address of each host at which all others reach a port of it.

    Raises:
        InputError: two hosts have no such address; it names them, and what happened at each
            address.
    """
    first, *others = hosts.connections
    if not others:
        return Meeting({first: _LOOPBACK})
    ports = hosts.ask("listen")
    addresses = {first: _common_address(hosts, first, ports[first])}
    given = dict.fromkeys(others, (addresses[first], ports[first]))
    for name, found in hosts.ask("towards", given).items():
        if "refusal" in found:
            raise InputError(f"{name}: {found['refusal']}")
        addresses[name] = found["address"]
    wanted = {
        name: [(addresses[other], ports[other]) for other in addresses if other != name]
        for name in addresses
    }
    refusals = []
    for name, failures in hosts.ask("reach", wanted).items():
        targets = [other for other in addresses if other != name]
        for other, failure in zip(targets, failures, strict=True):
            if failure is not None:
                refusals.append(_closed(name, other, [(addresses[other], failure)]))
    if refusals:
        raise InputError("; ".join(refusals))
    return Meeting(addresses, ports)


def round_trips(hosts: Hosts, meeting: Meeting) -> dict[tuple[str, str], float]:
    """Return the seconds of a packet from each host to each other one and back."""
    pairs = {
        name: [other for other in meeting.ports if other != name] for name in hosts.connections
    }
    found: dict[tuple[str, str], float] = {}
    for name, others in pairs.items():  # one after the other, so that they do not disturb
        places = [(meeting.addresses[other], meeting.ports[other]) for other in others]
        seconds = hosts.ask("round_trips", {name: places})[name]
        found |= {(name, o): s for o, s in zip(others, seconds, strict=True)}
    return found


def _common_address(hosts: Hosts, first: str, port: int) -> str:
    """Return the address of the first host that all others reach."""
    candidates: list[str] = hosts.ask("own_addresses", {first: None})[first]
    others = [name for name in hosts.connections if name != first]
    if not candidates:
        raise InputError(f"{first}: has no address but loopback, so that others do not reach it")
    places = [(address, port) for address in candidates]
    found = hosts.ask("reach", dict.fromkeys(others, places))
    for place, address in enumerate(candidates):
        if all(failures[place] is None for failures in found.values()):
            return address
    name, failures = next((n, f) for n, f in found.items() if any(each for each in f))
    raise InputError(_closed(name, first, list(zip(candidates, failures, strict=True))))


def _closed(name: str, other: str, tried: Sequence[tuple[str, str | None]]) -> str:
    texts = ", ".join(f"{address}: {failure}" for address, failure in tried if failure)
    return (
        f"{name}: does not reach {other} ({texts}); open {_PORTS} of {other} to it, "
        f"or set ORCHESTRA_HOST on {other} to an address that it reaches"
    )

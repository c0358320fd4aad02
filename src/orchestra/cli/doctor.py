"""`orchestra doctor`: what this machine, or each of several hosts, has, and what would go wrong."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from orchestra.cli.parsers.machines import TASK
from orchestra.cli.terminal import print_table, progress_line
from orchestra.cluster import Link
from orchestra.cluster.file import cluster_text
from orchestra.cluster.units import BANDWIDTH, SECONDS
from orchestra.engines.hosts.checks import (
    Clock,
    Meeting,
    as_facts,
    clocks_of,
    late,
    meet,
    round_trips,
    unlike,
)
from orchestra.engines.hosts.connection import Hosts
from orchestra.engines.hosts.doctor import rows_of, warnings_of
from orchestra.engines.hosts.facts import Facts, facts_here
from orchestra.engines.hosts.names import HostRanks, read_hosts
from orchestra.engines.hosts.run import Command, print_prefixed, run_on
from orchestra.engines.processes.environment import Launched, detect
from orchestra.errors import InputError, RunFailed, tell
from orchestra.records.files import write_atomically

BATCH = 32
"""Samples of the gradients by which the speeds of nodes are compared."""

Links = dict[tuple[str, str], Link]


@dataclass
class Findings:
    """What `orchestra doctor` has found out about the hosts.

    Attributes:
        refused: reasons for which `orchestra train --hosts` would refuse these hosts.
        warnings: what slows a run down or may end it.
    """

    facts: dict[str, Facts]
    clocks: Mapping[str, Clock] = field(default_factory=dict)
    round_trips: Mapping[tuple[str, str], float] = field(default_factory=dict)
    links: Links = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    cluster: str | None = None  # the text of its file

    def to_json(self) -> str:
        links = [
            {
                "from": pair[0],
                "to": pair[1],
                "round_trip": seconds,
                "bandwidth": self.links[pair].bandwidth if pair in self.links else None,
                "latency": self.links[pair].latency if pair in self.links else None,
            }
            for pair, seconds in self.round_trips.items()
        ]
        document = {
            "schema": 1,
            "hosts": {name: asdict(each) for name, each in self.facts.items()},
            "clocks": {name: clock.ahead for name, clock in self.clocks.items()},
            "links": links,
            "refused": self.refused,
            "warnings": self.warnings,
        }
        return json.dumps(document, indent=1)


def main(options: Namespace) -> int:
    if (launched := detect(os.environ)) is not None:
        return _measure(launched)
    if options.out is not None and options.out.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out {options.out}: is the file to write, and neither .yaml nor .yml")
    if options.hosts is None:
        if options.out is not None or options.remote_python is not None:
            raise InputError("--out and --remote-python: belong to --hosts; give that, too")
        facts = facts_here(devices=True)
        findings = Findings({facts.host: facts}, warnings=[*warnings_of(facts)])
    else:
        findings = _examined(options)
    if options.out is not None:
        if findings.cluster is None:
            _print(findings, options.json)
            raise RunFailed(f"{options.out}: not written, as the links could not be measured")
        write_atomically(options.out, findings.cluster)
    _print(findings, options.json)
    if options.hosts is not None and not (options.json or findings.refused):
        print(f"to train on these hosts: orchestra train FILE --hosts {options.hosts}")
    if options.out is not None and not options.json:
        print(f"cluster: {options.out}; orchestra simulate EXPERIMENT --cluster {options.out}")
    return 1 if findings.refused else 0


def _examined(options: Namespace) -> Findings:
    """Ask all hosts what they have; measure their links, if ranks could run there."""
    places = read_hosts(options.hosts)
    here = facts_here()
    with Hosts([place.name for place in places], options.remote_python or sys.executable) as hosts:
        found, lost = hosts.each(lambda connection: connection.ask("facts", True))
        for name in [name for name in hosts.connections if name not in found]:
            hosts.leave_out(name)
        findings = Findings(as_facts(found), refused=lost)
        if not found:
            return findings
        findings.clocks = clocks_of(hosts)
        findings.refused += [*unlike(findings.facts, here), *late(findings.clocks)]
        findings.warnings = [
            f"{name}: {line}" for name, each in findings.facts.items() for line in warnings_of(each)
        ]
        try:
            meeting = meet(hosts)
        except InputError as error:
            findings.refused.append(str(error))
        else:
            findings.round_trips = round_trips(hosts, meeting)
        if options.links and not findings.refused and len(found) > 1:
            _measure_links(hosts, meeting, findings)
    return findings


def _measure_links(hosts: Hosts, meeting: Meeting, findings: Findings) -> None:
    """Start a rank on each host, which measure their links in pairs; add what they find."""
    names = [*hosts.connections]
    printed: list[str] = []

    def show(host: str, stream: str, rank: int, text: str) -> None:
        if rank == 0 and stream == "stdout":
            printed.append(text)
        else:
            print_prefixed(host, "stderr", rank, text)

    command = Command(["-m", "orchestra", "doctor"])
    places = [HostRanks(name) for name in names]
    if run_on(hosts, places, meeting, command, show) != 0:
        findings.warnings.append("the links could not be measured: see above")
        return
    found = json.loads(printed[-1])
    from orchestra.calibration.machines import MeasuredMachine, as_cluster

    machines = [
        MeasuredMachine(**{**each, "host": name, "loopback": None})
        for name, each in zip(names, found["machines"], strict=True)
    ]
    links = {(one, other): Link(*link) for one, other, *link in found["links"]}
    cluster, remarks = as_cluster("hosts", machines, links)
    nodes = {name: node.name for name, node in zip(names, cluster.nodes, strict=True)}
    remarks = _credible(remarks, nodes, findings.round_trips)
    cores = {name: machine.cores for name, machine in zip(names, machines, strict=True)}
    findings.warnings += _missing_cores(cores, findings.facts)
    date = datetime.now(UTC).isoformat(timespec="minutes")
    head = f"Measured by orchestra doctor on {date}: {TASK}, gradients of {BATCH} samples."
    lines = "".join(f"# {line}\n" for line in (head, *remarks))
    findings.cluster = lines + cluster_text(cluster)
    findings.links = {(names[i], names[j]): link for (i, j), link in links.items()}
    findings.warnings += [f"{line}: look at that path" for line in remarks if "slower" in line]


def _credible(
    remarks: Sequence[str],
    nodes: Mapping[str, str],
    round_trips: Mapping[tuple[str, str], float],
) -> list[str]:
    """Leave out remarks that a pair is late where its round trip is as short as others.

    The shortest of several round trips is less disturbed by other programs than a message's time.
    `nodes` are the names of hosts in the remarks.
    """
    from orchestra.calibration.machines import LATE, LATE_SECONDS, late_text

    short = LATE * min(round_trips.values()) + LATE_SECONDS
    calm = tuple(
        late_text(nodes[one], nodes[other])
        for (one, other), seconds in round_trips.items()
        if seconds <= short
    )
    return [line for line in remarks if not line.startswith(calm)]


def _missing_cores(found: Mapping[str, int], facts: Mapping[str, Facts]) -> Iterator[str]:
    """Yield a warning for each host on which a process got fewer cores than are there."""
    for name, cores in found.items():
        if cores < facts[name].cores:
            yield (
                f"{name}: a process got {cores} of its {facts[name].cores} cores while it was "
                "measured: it was busy, or has a quota; the cluster's file has what it got"
            )


def _measure(launched: Launched) -> int:
    """Be a rank of a measurement, which a launcher has started; rank 0 prints it as JSON."""
    from orchestra.calibration.machines import measure_here

    with progress_line() as progress:
        shown = progress if launched.rank == 0 else lambda _what, _part: None
        found = measure_here(TASK, BATCH, launched, shown)
    if found is not None:
        machines, links = found
        plain = {
            "machines": [asdict(machine) for machine in machines],
            "links": [[*pair, link.bandwidth, link.latency] for pair, link in links.items()],
        }
        print(json.dumps(plain))
    return 0


def _print(findings: Findings, as_json: bool) -> None:
    if as_json:
        print(findings.to_json())
        return
    names = [*findings.facts]
    columns = [dict(rows_of(each)) for each in findings.facts.values()]
    headings = [*dict.fromkeys(key for column in columns for key in column)]
    rows = [(key, *(column.get(key, "-") for column in columns)) for key in headings]
    if findings.clocks:
        clocks = (f"{findings.clocks[name].ahead:+.3f} s" for name in names)
        rows.append(("clock, compared with here", *clocks))
    if rows:
        print_table("machines" if len(names) > 1 else "machine", ("", *names), rows)
    if findings.round_trips:
        print_table("links", ("", "round trip", "bandwidth"), _link_rows(findings))
    for text in findings.refused:
        tell(f"a run is refused: {text}")
    for text in findings.warnings:
        tell(f"warning: {text}")


def _link_rows(findings: Findings) -> Iterator[tuple[str, str, str]]:
    for (one, other), seconds in findings.round_trips.items():
        link = findings.links.get((one, other))
        yield (
            f"{one} to {other}",
            SECONDS.write(float(f"{seconds:.2g}")),
            "-" if link is None else BANDWIDTH.write(float(f"{link.bandwidth:.3g}")),
        )

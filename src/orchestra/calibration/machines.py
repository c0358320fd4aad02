"""The machines on which a launcher started processes, as a cluster; or the links between these."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from orchestra.calibration.messages import back_and_forth
from orchestra.calibration.timing import Progress, run_ranks, total
from orchestra.cluster import Cluster, Link, NetworkSwitch, Node
from orchestra.cluster.calibration import WIRE
from orchestra.cluster.presets import LOOPBACK
from orchestra.cluster.units import BANDWIDTH, SECONDS
from orchestra.collectives import Group, all_reduce
from orchestra.data.feed import open_samples
from orchestra.engines.processes.environment import Launched
from orchestra.tasks.task import load_task
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import RankActivity, Runtime, usable_cores

TRIED, LEAST, MOST = 1 << 16, 1 << 16, 16 << 20
"""The bytes of the first message, which determines the size of the others; their least and most
bytes."""
ON_THE_WAY = 0.05  # the seconds of a message from which a bandwidth is computed
SMALL = 4
WINDOWS, WINDOW_SECONDS = 5, 0.6
"""The windows in which gradients are counted, and their seconds, longer than the period of a
processor quota."""
SPINNING_SECONDS = 0.5
LATE, THIN = 1.25, 0.8
"""A pair with this many times the latency, or this part of the bandwidth, of its links is
reported."""
LATE_SECONDS = 50e-6
"""Below these the processors' own variation is larger."""


@dataclass(frozen=True)
class MeasuredMachine:
    """A node, with its bytes of memory, and its gradients per second with one thread."""

    host: str
    cores: int
    memory: float | None
    rate: float
    loopback: Link | None


Links = Mapping[tuple[int, int], Link]
"""The link from one node to another, end to end, by their numbers."""


def measure_here(
    task: str, batch_size: int, launched: Launched, on_progress: Callable[[str, float], None]
) -> tuple[list[MeasuredMachine], dict[tuple[int, int], Link]] | None:
    """Measure the machines of all processes that were started with `launched`. Return None on
    all ranks but rank 0.
    """
    from orchestra.engines.processes.rank import join

    on_progress("measuring the nodes and their links", 0.0)
    outcome = join(measure_machines, (task, batch_size), launched)
    if launched.rank > 0:
        return None
    found: list[dict[str, Any]] = [each for each in outcome.results if each["host"] is not None]
    links = {(one, other): Link(*link) for each in found for one, other, *link in each["links"]}
    for each in found:
        each["loopback"] = Link(*each["loopback"]) if each["loopback"] else None
        del each["links"]
    return [MeasuredMachine(**each) for each in found], links


def measure_machines(runtime: Runtime, order: tuple[str, int]) -> dict[str, Any]:
    """Measure this rank's node and links. The first rank of a node returns the result as plain
    data.

    All nodes compute at the same time; links are measured pair after pair, in both directions.
    """
    torch.set_num_threads(1)
    transport, rank = runtime.transport, runtime.rank
    runtime.reporter.activity(RankActivity.TRAINING)
    # Ranks cannot tell by themselves where the next node begins: nodes may have unlike numbers
    own = rank if runtime.local_rank == 0 else None
    firsts = [r for r in range(runtime.ranks) if total(transport, float(r == own))]
    found: dict[str, Any] = {"host": None, "links": [], "loopback": None}
    if rank in firsts:
        found |= {"host": socket.gethostname(), "memory": _memory(), "cores": _cores()}
    total(transport)
    if rank in firsts:
        # All nodes at once, with one rank on each
        found["rate"] = gradients_per_second(*order)
    total(transport)
    # Launchers number the ranks node by node
    ends = [*firsts[1:], runtime.ranks]
    for first, end in zip(firsts, ends, strict=True):
        # A loopback takes two ranks of a node
        if end - first > 1 and rank in (first, first + 1):
            found["loopback"] = _link(runtime, (first, first + 1))
    done = itertools.count(1)
    # Pairs are measured one after the other, because a link that others use as well would look
    # slower. A shared uplink therefore does not show.
    for one, other in itertools.permutations(range(len(firsts)), 2):
        total(transport)
        if rank in (firsts[one], firsts[other]):
            link = _link(runtime, (firsts[one], firsts[other]))
            if rank == firsts[one]:
                found["links"].append([one, other, *link])
        runtime.reporter.progress(step=next(done), samples=0)
    return found


def _memory() -> float | None:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return None


def _cores() -> int:
    """Return the number of cores that this process gets if it wants all; a container's quota
    counts.
    """
    end = time.monotonic() + SPINNING_SECONDS

    def spin() -> None:
        while time.monotonic() < end:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)  # without the interpreter's lock

    # A container with a quota sees every core; its share shows only when all cores are wanted.
    threads = [threading.Thread(target=spin) for _ in usable_cores()]
    began, before = time.monotonic(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = (time.process_time() - before) / (time.monotonic() - began)
    # Starting and ending takes a little from each core; 0.2 of one is no core
    return min(max(1, math.ceil(used - 0.2)), len(threads))


def gradients_per_second(task_text: str, batch_size: int) -> float:
    """Return the gradients per second of a task with one thread, in the median of some windows."""
    task = load_task(task_text)
    module, batch = task.model(), open_samples(task.train, 0, task.collate).read(0, batch_size)

    def gradient() -> None:
        module.zero_grad()
        task.loss(module, batch).backward()

    for _ in range(3):
        gradient()
    rates = []
    # Gradients are counted in windows: a quota lets a short gradient pass at full speed, and stops
    # the process afterwards.
    for _ in range(WINDOWS):
        began, count = time.monotonic(), 0
        while time.monotonic() - began < WINDOW_SECONDS:
            gradient()
            count += 1
        rates.append(count / (time.monotonic() - began))
    return statistics.median(rates)


def _link(runtime: Runtime, pair: tuple[int, int]) -> tuple[float, float]:
    """Return bandwidth and latency from the first rank of `pair` to the second; runs on both.

    Bandwidth is that of the wire. Latency is the time of a small message without the processor
    time at its ends, which a simulation adds by itself.
    """
    transport = runtime.transport
    send, receive, one_way = map(statistics.median, back_and_forth(transport, pair, SMALL))
    # Noise could make it negative
    latency = max(one_way - send - receive, 1e-7)

    def seconds(size: int) -> float:
        *_, half = back_and_forth(transport, pair, size, answer=SMALL)
        # There and back, less the small answer's way
        return max(2 * statistics.median(half) - one_way, 1e-9)

    def agreed(size: float) -> int:
        own = size if runtime.rank == pair[0] else 0.0
        # The pair has to send equal sizes; the second rank's clock is not asked
        return round(total(transport, own, pair))

    # A message that takes long beside the latency, but no seconds on a thin link
    pace = TRIED / max(seconds(TRIED) - one_way, 1e-9)
    size = agreed(min(max(pace * ON_THE_WAY, LEAST), MOST))
    # Bytes on the wire, with the headers of packets: that is what a link's bandwidth counts
    return size * WIRE / max(seconds(size) - one_way, 1e-9), latency


# What a cluster's file can say


def as_cluster(
    name: str, machines: Sequence[MeasuredMachine], links: Links
) -> tuple[Cluster, list[str]]:
    """Return the nodes at one switch, and a remark for each fact that this does not express.

    Where a file knows one link a node, the best pair decides: its bandwidth up is the largest to
    any other node, its bandwidth down the largest from any. The latency l of node i follows from
    those of the pairs, which are sums of two: 2 l_i = d_ij + d_ik - d_jk, the least over j and k.
    """
    names, count = names_of(machines), len(machines)
    mean = {
        pair: (link.latency + links[pair[::-1]].latency) / 2 for pair, link in links.items()
    }  # a ping tells no directions apart
    own = _own_links(count, links, mean)
    nodes, remarks = [], []
    for number, machine in enumerate(machines):
        up, down = own[number] if own else (None, None)
        if machine.loopback is None:
            remarks.append(f"{names[number]}: its loopback is assumed: it had one rank")
        loopback = machine.loopback or LOOPBACK
        nodes.append(
            Node(
                names[number], machine.cores,
                # Speeds are relative to the first node, since the plan is made there with its
                # calibration.
                speed=float(f"{machine.rate / machines[0].rate:.3g}"),
                memory=machine.memory and float(f"{machine.memory:.3g}"),
                switch="switch" if up else None, up=up, down=down,
                loopback=_rounded(loopback.bandwidth, loopback.latency),
            )
        )  # fmt: skip
    remarks += _unexplained(names, own, links)
    return Cluster(name, tuple(nodes), (NetworkSwitch("switch"),), placement="spread"), remarks


def _own_links(
    count: int, links: Links, mean: Mapping[tuple[int, int], float]
) -> list[tuple[Link, Link]]:
    """Return the link of each node, up and down; an empty list where there is only one node."""
    found = []
    for number in range(count if count > 1 else 0):
        others = [other for other in range(count) if other != number]
        late = _latency(number, others, mean)
        # The best pair: the others may be limited by the peer's link
        up = max(links[number, other].bandwidth for other in others)
        down = max(links[other, number].bandwidth for other in others)
        found.append((_rounded(up, late), _rounded(down, late)))
    return found


def _latency(number: int, others: Sequence[int], mean: Mapping[tuple[int, int], float]) -> float:
    if len(others) == 1:
        # Of two nodes nobody can tell whose link is the slow one
        return mean[number, others[0]] / 2
    pairs = itertools.combinations(others, 2)
    halves = ((mean[number, a] + mean[number, b] - mean[a, b]) / 2 for a, b in pairs)
    return max(min(halves), 0.0)


def _rounded(bandwidth: float, latency: float) -> Link:
    return Link(float(f"{bandwidth:.3g}"), float(f"{latency:.2g}"))


def _unexplained(names: Sequence[str], own: Sequence[tuple[Link, Link]], links: Links) -> list[str]:
    """Return a remark for each pair of nodes that is slower than their `own` links."""
    found = []
    # Noise can make the own latency of a node as small as 0: no pair is as fast.
    fastest = min((link.latency for link in links.values()), default=0.0)
    for (one, other), link in links.items():
        up, down = own[one][0], own[other][1]
        width = min(up.bandwidth, down.bandwidth)
        latency = max(up.latency + down.latency, fastest)
        text = _slower_text(names[one], names[other])
        if link.bandwidth < THIN * width:
            figures = (BANDWIDTH.write(float(f"{x:.3g}")) for x in (link.bandwidth, width))
            found.append(f"{text} {', not '.join(figures)}")
        if link.latency > LATE * latency + LATE_SECONDS:
            figures = (SECONDS.write(float(f"{x:.2g}")) for x in (link.latency, latency))
            text = late_text(names[one], names[other])
            found.append(f"{text} {', not '.join(figures)}")
    return found


def _slower_text(one: str, other: str) -> str:
    return f"{one} to {other} is slower than their links:"


def late_text(one: str, other: str) -> str:
    """Return the beginning of a remark about the latency between two nodes."""
    return f"{_slower_text(one, other)} a message takes"


def names_of(machines: Sequence[MeasuredMachine]) -> list[str]:
    """Return names of nodes: of the hosts if they are valid names and differ, else numbers."""
    names = [re.sub(r"[^\w.-]", "-", machine.host) for machine in machines]
    if len({*names}) == len(names) and all(re.match(r"[A-Za-z_]", name) for name in names):
        return names
    return [f"node-{number}" for number in range(len(names))]


Matrix = list[list[float]]


def calibrate_links(
    ranks: int, size: int, launched: Launched | None = None, on_progress: Progress | None = None
) -> Matrix | None:
    """Return the seconds of a message of `size` bytes, one way, from each rank (row) to each
    rank (column).

    The ranks are processes of this machine, or those that a launcher started (`launched`); in
    the latter case the others than rank 0 return None.
    """
    if launched is not None:
        from orchestra.engines.processes.rank import join

        outcome = join(measure_links, size, launched)
        return outcome.results[0] if launched.rank == 0 else None
    pairs = ranks * (ranks - 1) // 2
    matrix: Matrix = run_ranks(
        measure_links, size, ranks, steps=pairs, what="links", on_progress=on_progress
    )[0]
    return matrix


def measure_links(runtime: Runtime, size: int) -> Matrix | None:
    """Measure each pair of ranks after the other, so that they do not disturb each other."""
    transport, ranks = runtime.transport, range(runtime.ranks)
    matrix = torch.zeros(len(ranks), len(ranks), dtype=torch.float64)
    for done, (one, other) in enumerate(itertools.combinations(ranks, 2), start=1):
        total(transport)
        if runtime.rank in (one, other):
            _, _, one_way = back_and_forth(transport, (one, other), size)
            if runtime.rank == one:
                # Half of the way there and back tells no directions apart
                matrix[one, other] = matrix[other, one] = statistics.median(one_way)
        runtime.reporter.progress(step=done, samples=0)
    # Each entry is known to one rank, and 0 on all others
    all_reduce(transport, matrix.view(-1), "ring", Group(tuple(ranks)), Tag.AGREE)
    return matrix.tolist() if runtime.rank == 0 else None

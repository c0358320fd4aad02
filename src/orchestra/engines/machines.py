"""What a run made of its machines: how well it used unlike ones, what it cost, what they drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestra.cluster import Node
from orchestra.cluster.units import read_price
from orchestra.records.record import RunRecord

HOUR = 3600.0


def on_machines(record: RunRecord, nodes: Sequence[Node], alone: Mapping[str, float]) -> RunRecord:
    """`record` with what follows from the `nodes` of its ranks, and from what each does `alone`, in
    samples/s.

    A node is paid for, and draws its power, while the stopwatch runs, whatever its ranks do. Where
    the price of one is not known, that of all is not.
    """
    nodes = list({node.name: node for node in nodes}.values())
    seconds, to_target = record.train_seconds, record.time_to_target_seconds
    together, speed = sum(alone.values()), record.samples_per_second
    prices = [read_price(node.price, where="price") for node in nodes if node.price is not None]
    watts = [node.watts for node in nodes if node.watts is not None]
    rate = sum(amount for amount, _ in prices) / HOUR if len(prices) == len(nodes) else None
    power = sum(watts) if len(watts) == len(nodes) else None
    if not nodes:
        rate = power = None
    return replace(
        record,
        alone=alone,
        heterogeneous_efficiency=speed / together if speed and together else None,
        cost=_product(rate, seconds),
        cost_to_target=_product(rate, to_target),
        currency=prices[0][1] if rate is not None else None,
        energy_joules=_product(power, seconds),
        energy_to_target_joules=_product(power, to_target),
    )


def by_node(speeds: Sequence[float], nodes: Sequence[Node]) -> dict[str, float]:
    """The `speeds` of ranks by the nodes that these are on, added up; else by rank ("rank 0")."""
    found: dict[str, float] = {}
    for rank, speed in enumerate(speeds):
        name = nodes[rank].name if nodes else f"rank {rank}"
        found[name] = found.get(name, 0.0) + speed
    return found


def beside_single(record: RunRecord, single: RunRecord | None) -> RunRecord:
    """`record` with its convergence efficiency, where `single` is one process on the fastest node:

    (time to target of `single` / of `record`) / (sum of what the nodes do alone / what that of
    `single` does). The latter is that of `record`, where it uses the node.
    """
    if single is None or not record.alone:
        return record
    fastest = record.alone.get(single.node or "") or sum(single.alone.values())
    ours, theirs = record.time_to_target_seconds, single.time_to_target_seconds
    if not (fastest and ours) or theirs is None:
        return record
    faster = sum(record.alone.values()) / fastest
    return replace(record, convergence_efficiency=theirs / ours / faster)


def _product(each_second: float | None, seconds: float | None) -> float | None:
    return None if each_second is None or seconds is None else each_second * seconds

"""When flows end according to SimGrid 4, as its pure max-min fair model CM02: JSON in, JSON out.

In a process of its own, since SimGrid has one engine a process:
{"capacities": [bytes/s, ...], "flows": [[start, bytes, [link, ...]], ...]} gives [end, ...].
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

SETTINGS = {
    "network/model": "CM02",
    "network/latency-factor": 1,
    "network/bandwidth-factor": 1,
    "network/crosstraffic": 0,
    "network/weight-S": 0,
    "precision/timing": 1e-12,
    "precision/work-amount": 1e-12,
}
Flow = tuple[float, int, Sequence[int]]


def ends(capacities: Sequence[float], flows: Sequence[Flow]) -> list[float]:
    simgrid: Any = importlib.import_module("simgrid")
    settings = [f"--cfg={name}:{value}" for name, value in SETTINGS.items()]
    engine = simgrid.Engine(["flows", *settings])
    zone = engine.netzone_root.add_netzone_full("zone")
    links = [zone.add_link(f"link {n}", capacity) for n, capacity in enumerate(capacities)]
    found = [0.0] * len(flows)

    def send(number: int, start: float, size: int) -> None:
        simgrid.this_actor.sleep_until(start)
        simgrid.Mailbox.by_name(str(number)).put(number, size)

    def receive(number: int) -> None:
        simgrid.Mailbox.by_name(str(number)).get()
        found[number] = simgrid.Engine.clock

    for number, (start, size, crossed) in enumerate(flows):
        source, target = (zone.add_host(f"{side} {number}", 1e9) for side in ("from", "to"))
        way = [simgrid.LinkInRoute(links[link]) for link in crossed]
        zone.add_route(source, target, way, False)
        source.add_actor(f"sender {number}", send, number, start, size)
        target.add_actor(f"receiver {number}", receive, number)
    zone.seal()
    engine.run()
    return found


if __name__ == "__main__":
    json.dump(ends(**json.load(sys.stdin)), sys.stdout)

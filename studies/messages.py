"""The drawings of messages in docs/concepts/messages.md, from simulated runs.

    python -m studies.messages docs/images/messages

Each drawing is the timeline of a short run in virtual time, with assumed costs and without jitter:
the same on every machine. A lane is a rank; a box is computing; an arrow is a message, from the
moment at which the sender hands it over to the moment at which the receiver has all of it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import orchestra

WIDTH, LEFT, RIGHT, TOP, LANE, BOX = 760, 92, 16, 40, 58, 16
SMALL = 1000
"""Messages of fewer bytes, which only coordinate, are left out."""
COLOURS = {
    "gradient": "#c0392b",
    "parameters": "#6c3483",
    "activation": "#1e8449",
    "forward and backward": "#5b8fc9",
    "forward": "#5b8fc9",
    "backward": "#9dbfe3",
    "update": "#e69f45",
    "average": "#e69f45",
}
KINDS = {
    "gradient": "gradient",
    "gradients": "gradient",
    "values": "parameters",
    "replicas": "parameters",
    "mix": "parameters",
    "activation": "activation",
    "activation_gradient": "gradient",
}
WORK = {"forward": "forward", "backward": "backward", "update": "update", "mix": "average"}


@dataclass(frozen=True)
class Drawing:
    """A run that is drawn: its strategy, on how many ranks, and for how many steps."""

    strategy: str
    ranks: int
    steps: int
    title: str
    cluster: str = "lan_1gbit(nodes=4, jitter=None)"
    task: str = "synthetic(25_000, tensors=1, sample_flops=2e6)"
    batch_size: int = 32


DRAWINGS = {
    "server": Drawing(
        "ParameterServer()", 4, 2, "Synchronous parameter server: three workers and a server"
    ),
    "ring": Drawing("AllReduce('ring')", 4, 1, "Ring all-reduce: four workers, 2 (4 - 1) rounds"),
    "gossip": Drawing("Gossip(Ring())", 4, 2, "Gossip on a ring: each worker and its neighbours"),
    "local_sgd": Drawing("LocalSGD(3)", 4, 4, "Local SGD: three steps alone, then an average"),
    "pipeline": Drawing(
        "Pipeline(3, microbatches=4)", 3, 1, "Pipeline: three stages, four micro-batches",
        "lan_10gbit(nodes=3, jitter=None)", "regression", 256,
    ),
    "asynchronous": Drawing(
        "ParameterServer(consistency='asynchronous')", 4, 3,
        "Asynchronous parameter server: the last worker is three times as slow",
        "stragglers(nodes=3, slow=1, factor=3, jitter=None)",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    rank: int
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Message:
    kind: str
    source: int
    target: int
    sent: float
    received: float


def timeline_of(drawing: Drawing) -> list[dict[str, Any]]:
    """Simulate the run; return the events of its timeline, in microseconds of virtual time."""
    with tempfile.TemporaryDirectory() as out:
        folder = Path(out) / "run"
        orchestra.train(
            drawing.task, drawing.strategy, ranks=drawing.ranks, steps=drawing.steps,
            batch_size=drawing.batch_size, trace_steps=2 * drawing.steps, snapshots=0, threads=1,
            engine="simulation", cluster=drawing.cluster, calibration="none", out=folder,
            quiet=True,
        )  # fmt: skip
        trace = gzip.decompress((folder / "trace.json.gz").read_bytes())
    events: list[dict[str, Any]] = json.loads(trace)["traceEvents"]
    return events


def work_in(events: Sequence[dict[str, Any]]) -> Iterator[Work]:
    """Yield what ranks compute: passes, updates and averages."""
    for event in events:
        if event["ph"] == "X" and event["cat"] == "compute":
            name = event["name"].partition(" ")[0]
            kind = "forward and backward" if name == "gradient" else WORK.get(name)
            if kind is not None:
                yield Work(event["pid"], kind, event["ts"], event["ts"] + event["dur"])


def messages_in(events: Sequence[dict[str, Any]]) -> Iterator[Message]:
    """Yield the messages between ranks: a flow event ties what was sent to what arrived."""
    began: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    ended: dict[int, dict[str, Any]] = {}
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for event in events:
        flow = (event["pid"], event["tid"])
        if event["ph"] == "X":
            last[flow] = event
        elif event["ph"] == "s":
            began[event["id"]] = event, last[flow]
        elif event["ph"] == "f":
            ended[event["id"]] = event
    for number, (begin, send) in began.items():
        kind = KINDS.get(send["args"]["tag"])
        if number in ended and kind is not None and send["args"]["payload_bytes"] >= SMALL:
            end = ended[number]
            yield Message(kind, begin["pid"], end["pid"], begin["ts"], end["ts"])


def svg(drawing: Drawing) -> str:
    """Return the drawing of the run, as SVG."""
    events = timeline_of(drawing)
    roles = {
        event["pid"]: event["args"]["name"].partition(": ")[2]
        for event in events
        if event["name"] == "process_name"
    }
    work, messages = [*work_in(events)], [*messages_in(events)]
    begin = min(each.start for each in work)
    end = max([each.end for each in work] + [each.received for each in messages])
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    height = TOP + LANE * len(roles) + 44

    def x(microseconds: float) -> str:
        return f"{LEFT + (microseconds - begin) * scale:.1f}"

    def y(rank: int) -> int:
        return TOP + LANE * rank + LANE // 2

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(drawing.title)}</title>",
        "<defs>",
        *(
            f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{COLOURS[kind]}"/>'
            "</marker>"
            for kind in sorted({message.kind for message in messages})
        ),
        "</defs>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">{escape(drawing.title)}</text>',
    ]
    for rank, role in sorted(roles.items()):
        name = f"stage {rank}" if drawing.strategy.startswith("Pipeline") else f"{role} {rank}"
        name = "server" if role == "server" else name
        parts.append(f'<text x="10" y="{y(rank) + 4}">{escape(name)}</text>')
        parts.append(
            f'<path d="M{LEFT} {y(rank)}H{WIDTH - RIGHT}" stroke="#c8c8c8" stroke-width="1"/>'
        )
    for each in work:
        width = max((each.end - each.start) * scale, 1.5)
        parts.append(
            f'<rect x="{x(each.start)}" y="{y(each.rank) - BOX // 2}" width="{width:.1f}" '
            f'height="{BOX}" fill="{COLOURS[each.kind]}" stroke="#ffffff" stroke-width="0.5"/>'
        )
    for message in messages:
        away = BOX // 2 if message.target > message.source else -BOX // 2
        parts.append(
            f'<path d="M{x(message.sent)} {y(message.source) + away}L{x(message.received)} '
            f'{y(message.target) - away}" stroke="{COLOURS[message.kind]}" stroke-width="1.4" '
            f'fill="none" marker-end="url(#{message.kind})"/>'
        )
    parts += _legend([*dict.fromkeys([e.kind for e in work] + [m.kind for m in messages])], height)
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{height - 14}" text-anchor="end">'
        f"{(end - begin) / 1000:.1f} ms</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(kinds: Sequence[str], height: int) -> Iterator[str]:
    at = LEFT
    for kind in kinds:
        yield f'<rect x="{at}" y="{height - 24}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield f'<text x="{at + 17}" y="{height - 14}">{escape(kind)}</text>'
        at += 40 + 7 * len(kind)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the messages of five strategies.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(svg(drawing))


if __name__ == "__main__":
    main()

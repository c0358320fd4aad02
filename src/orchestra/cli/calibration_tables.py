"""The figures of a calibration as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from orchestra.cluster.calibration import Calibration, Curve, TaskCosts

Row = tuple[str, ...]


def print_calibration(calibration: Calibration) -> None:
    """What was measured: medians, and how far the repeats lie apart."""
    for task in calibration.tasks:
        name, optimizer, precision = task.key
        _print(
            f"a step of {name}, {optimizer}, {precision}",
            (
                "",
                "amount",
                "1 thread",
                "spread",
                *(f"{t.threads} threads" for t in task.timings[1:]),
            ),
            _task_rows(task),
        )
    messages = calibration.messages
    rows = [
        *_rows("send", "bytes", messages.send),
        *_rows("receive", "bytes", messages.receive),
        *_rows("to itself", "bytes", messages.local),
        ("around a message", "", _seconds(messages.handling), ""),
        ("an all-reduce itself", "", _seconds(messages.collective), ""),
        *(
            row
            for kind, curve in calibration.work.items()
            for row in _rows(kind, "elements", curve)
        ),
    ]
    _print("a message, and work on float32", ("", "amount", "seconds", "spread"), rows)
    console = Console(highlight=False)
    console.print(
        f"A thread keeps a core for {_seconds(calibration.time_slice)} if another one waits. "
        f"A send of up to {messages.buffer_bytes / 1e6:.1f} MB is over at once.",
        soft_wrap=True,
    )
    console.print(f"This machine as a cluster: {calibration.cluster}", soft_wrap=True, markup=False)


def print_links(matrix: Sequence[Sequence[float]], size: int, order: Sequence[int]) -> None:
    """The costs between ranks, and what to do with them."""
    headings = ("us", *(f"to {rank}" for rank in range(len(matrix))))
    rows = [
        (f"from {source}", *("-" if s == source else f"{x * 1e6:.0f}" for s, x in enumerate(row)))
        for source, row in enumerate(matrix)
    ]
    _print(f"a message of {size} bytes, one way", headings, rows)
    print(f'AllReduce("ring", order={tuple(order)})')


def _task_rows(task: TaskCosts) -> Iterable[Row]:
    for kind, unit in (("gradient", "samples"), ("update", "elements"), ("step", "samples")):
        more = [dict(getattr(timing, kind).points) for timing in task.timings[1:]]
        for row, (amount, _) in zip(
            _rows(kind, unit, getattr(task.one, kind)), getattr(task.one, kind).points, strict=True
        ):
            yield *row, *(_seconds(known[amount]) if amount in known else "" for known in more)
    empty = ("",) * len(task.timings)
    yield "in turn with an exchange", "", f"+{_seconds(task.cold)}", *empty
    yield "on all cores at once", "", f"{1 / task.shared_speed:.2f} times as long", *empty
    yield "on another's core", "", f"+{_seconds(task.refill)}", *empty


def _rows(name: str, unit: str, curve: Curve) -> Iterable[Row]:
    for index, (amount, seconds) in enumerate(curve.points):
        spread = f"{curve.spread[index]:.0%}" if curve.spread else ""
        yield name if index == 0 else "", f"{amount:.0f} {unit}", _seconds(seconds), spread


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _print(title: str, headings: Sequence[str], rows: Iterable[Row]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row[: len(headings)])
    console = Console(highlight=False)
    console.print(title, style="bold", soft_wrap=True, markup=False)
    console.print(table)
    console.print()

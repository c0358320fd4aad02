"""How much of the time the stages of a pipeline compute, and how much of it at the same time.

cd examples && python pipeline_overlap.py

Read from the timeline of each run, trace.json.gz: the forward and backward passes of both ranks.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import defaultdict
from pathlib import Path

import orchestra

STEPS = 20
TASK = "characters(width=128, context=64)"
Spans = list[tuple[float, float]]


def main() -> None:
    """A line for each number of micro-batches and each schedule."""
    print("M schedule  ideal  rank 0  rank 1  both")
    for microbatches in (1, 4, 8):
        for schedule in ("gpipe", "1f1b"):
            first, second, seconds = passes(f"Pipeline(2, {microbatches}, {schedule!r})")
            shares = [total(first), total(second), total(common(first, second))]
            columns = "  ".join(f"{share / seconds:6.2f}" for share in shares)
            print(f"{microbatches} {schedule}  {microbatches / (microbatches + 1):7.2f}  {columns}")


def passes(strategy: str) -> tuple[Spans, Spans, float]:
    """When each of two ranks computed, and the seconds from the first step to the last."""
    with tempfile.TemporaryDirectory() as out:
        folder = Path(out) / "run"
        orchestra.train(
            TASK, strategy, ranks=2, steps=STEPS, trace_steps=STEPS, snapshots=0, out=folder,
            quiet=True,
        )  # fmt: skip
        trace = json.loads(gzip.decompress(next(folder.rglob("trace.json.gz")).read_bytes()))
    spans: dict[str, dict[int, Spans]] = defaultdict(lambda: defaultdict(list))
    for event in trace["traceEvents"]:
        if event.get("cat") in ("compute", "step"):
            kind = "pass" if event["name"] in ("forward", "backward") else event["cat"]
            begin = event["ts"] / 1e6
            spans[kind][event["pid"]].append((begin, begin + event["dur"] / 1e6))
    first, second = (spans["pass"][rank] for rank in sorted(spans["pass"]))
    steps = [span for of_rank in spans["step"].values() for span in of_rank]
    return first, second, max(end for _, end in steps) - min(begin for begin, _ in steps)


def common(first: Spans, second: Spans) -> Spans:
    """The times that lie in a span of both."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return [(begin, end) for begin, end in pairs if begin < end]


def total(spans: Spans) -> float:
    """Seconds of all spans."""
    return sum(end - begin for begin, end in spans)


if __name__ == "__main__":
    main()

"""For whom each rank waited, from the timeline of a run."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

TRACE = "trace.json.gz"
MAX_BYTES = 1 << 23
"""Of the packed file: a larger one, of hundreds of ranks, takes too long to read."""


def waits_of_trace(folder: Path) -> Mapping[int, str]:
    """By rank, whom its main flow waited for longest, with the part of the time that it did so.

    The time is that of the steps that the timeline in `folder` shows. A rank that came to serve
    has whom it waited for meanwhile, without a part. Empty where there is no timeline.
    """
    path = folder / TRACE
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError):
        return {}
    main = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"] == "main"
    }
    waited: dict[int, Counter[str]] = {}
    serving: dict[int, Counter[str]] = {}
    spans: dict[int, float] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        rank = event["pid"]
        if event["cat"] == "step":
            spans[rank] = spans.get(rank, 0.0) + event["dur"]
        elif event["cat"] == "wait" and (rank, event["tid"]) in main:
            whom = event["name"].removeprefix("wait for ").removeprefix("rank ")
            counts = waited if "step" in event["args"] else serving
            counts.setdefault(rank, Counter())[whom] += event["dur"]
    found = {}
    for rank, whoms in waited.items():
        whom, most = whoms.most_common(1)[0]
        found[rank] = f"{whom} ({most / spans[rank]:.0%})" if spans.get(rank) else whom
    return found | {rank: whoms.most_common(1)[0][0] for rank, whoms in serving.items()}

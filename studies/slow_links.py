"""A picture of times to the target: a dot for each strategy and folder of runs.

    python -m studies.slow_links PICTURE.png '10 Mbit/s=runs/slow-10' '100 Mbit/s=runs/slow-100'

The folders are those of `orchestra compare studies/slow_links.yaml`. A dot is the mean over the
seeds, a line goes from the first seed to the last one; a cross is where a seed that missed the
target had ended.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from orchestra.records.store import finished


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The summaries of all complete runs, by strategy."""
    found = defaultdict(list)
    for record in finished(folder):
        found[record.asked.name].append(record.summary())
    return found


def rows(where: str, runs: dict[str, list[dict[str, Any]]]) -> Iterable[dict[str, Any]]:
    """What is drawn of each strategy of a folder."""
    for name, records in runs.items():
        reached = [
            (r["time_to_target_seconds"] + r["time_to_target_after_seconds"]) / 2
            for r in records
            if r["time_to_target_seconds"] is not None
        ]
        missed = len(reached) < len(records)
        seconds = [r["train_seconds"] for r in records] if missed else reached
        yield {
            "strategy": name, "links": where, "missed": missed, "least": min(seconds),
            "most": max(seconds), "seconds": max(seconds) if missed else statistics.fmean(seconds),
        }  # fmt: skip


def picture(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw all rows, the soonest strategy first."""
    best: dict[str, tuple[bool, float]] = {}
    for row in found:
        own = (row["missed"], row["seconds"])
        best[row["strategy"]] = min(own, best.get(row["strategy"], own))
    y = alt.Y("strategy:N", sort=sorted(best, key=lambda name: best[name]), title=None)
    title = "seconds to the target; crosses: missed with a seed"
    x = alt.X("seconds:Q", scale=alt.Scale(type="log", nice=False), title=title)
    colour = alt.Color("links:N", title=None, legend=alt.Legend(orient="top"))
    ruled = alt.layer(
        alt.Chart().mark_rule(strokeWidth=2).encode(alt.X("least:Q"), y, colour, x2="most:Q"),
        alt.Chart()
        .transform_filter("!datum.missed")
        .mark_point(filled=True, size=90, opacity=1)
        .encode(x, y, colour),
        alt.Chart()
        .transform_filter("datum.missed")
        .mark_point(shape="cross", angle=45, size=70)
        .encode(x, y, colour),
        data=alt.Data(values=list(found)),
    )
    chart = ruled.properties(width=520, height=26 * len(best), background="white")
    path.write_bytes(vl_convert.vegalite_to_png(chart.to_dict(), scale=1.5))


def main() -> int:
    picture_path, *given = sys.argv[1:]
    pairs = [text.split("=", 1) for text in given]
    found = [row for where, folder in pairs for row in rows(where, read(Path(folder)))]
    if not found:
        print(f"no complete runs below {', '.join(given)}", file=sys.stderr)
        return 2
    picture(found, Path(picture_path))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where the runs of a report took place, and what makes their seconds doubtful."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestra.records.record import RunRecord
from orchestra.records.usage import NOTABLE
from orchestra.report.numbers import count, percent, some
from orchestra.report.study import Study


@dataclass(frozen=True)
class Condition:
    """A `name` with its `text`; `doubtful` where the seconds of the runs are, for that reason."""

    name: str
    text: str
    doubtful: bool = False


def conditions(study: Study) -> list[Condition]:
    """The machine of real processes; of simulated runs the cluster and the cost model."""
    records = _records(study)
    clusters = dict.fromkeys(record.cluster for record in records if record.cluster)
    found = [Condition("simulated cluster", cluster) for cluster in clusters]
    found += dict.fromkeys(
        Condition("cost model", costs_text(record), bool(record.costs_doubts))
        for record in records
        if record.costs
    )
    return [*found, *_machines(study)]


def doubts(study: Study) -> Iterator[str]:
    """Sentences on why seconds are not to be trusted; none where they are."""
    records = _records(study)
    for reasons in dict.fromkeys(tuple(record.costs_doubts) for record in records):
        if reasons:
            yield (
                "The cost model is not to be trusted, nor are simulated seconds: when measured, "
                f"{'; '.join(reasons)}. Calibrate again on a quiet machine."
            )
    disturbed = [record for record in records if record.disturbed]
    if disturbed:
        most = max(record.busy_with_others or 0.0 for record in disturbed)
        names = some(list(dict.fromkeys(record.name for record in disturbed)))
        yield (
            f"The machine was busy: in {len(disturbed)} of {count('run', len(records))} ({names}) "
            f"other programs took more than {percent(NOTABLE)} of its processor time, at most "
            f"{percent(most)}. Seconds of these runs are too long, and differences between rows "
            "may be due to that. Compare again on a quiet machine."
        )


def costs_text(record: RunRecord) -> str:
    """The cost model of a simulated run in one line."""
    return f"{record.costs}{'; NOT to be trusted' * bool(record.costs_doubts)}"


def _machines(study: Study) -> Iterator[Condition]:
    for source in study.sources:
        records = [run.record for run in source.runs if run.record.engine == "processes"]
        processor, cores = (source.environment.get(key) for key in ("processor", "cores"))
        if not records or not processor:
            continue
        text = f"{processor}, {count('core', cores)}" if cores else str(processor)
        busy = [r.busy_with_others for r in records if r.busy_with_others is not None]
        if busy:
            text += f"; other programs took at most {percent(max(busy))} of its processor time"
        yield Condition("machine", text, any(record.disturbed for record in records))


def _records(study: Study) -> list[RunRecord]:
    return [run.record for row in study.rows for run in row.completed]

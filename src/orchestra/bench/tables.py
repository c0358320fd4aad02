"""The figures of `orchestra bench fidelity` as tables, for a terminal and docs/fidelity.md."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from orchestra.bench.cases import CONTROLS
from orchestra.bench.fidelity import QUIET, FidelityRow
from orchestra.bench.verdicts import Block, Verdict, scatter, verdict
from orchestra.cluster.calibration import Calibration

PREDICTORS = {
    "simulated": "simulation",
    "replayed": "simulation, computation as recorded",
    "formula": "closed formula",
    "constant": "constant",
}


def verdicts(rows: Sequence[FidelityRow]) -> dict[str, Verdict]:
    """One on each predictor, by its title; controls are left out."""
    strategies = [row for row in rows if row.label not in CONTROLS]
    groups: dict[tuple[str, int, str], list[FidelityRow]] = defaultdict(list)
    for row in strategies:
        groups[row.task, row.ranks, row.cluster].append(row)
    return {
        title: verdict(
            [
                Block(
                    {row.label: row.runs for row in group},
                    {row.label: getattr(row, name) for row in group},
                )
                for group in groups.values()
            ]
        )
        for name, title in PREDICTORS.items()
        if all(getattr(row, name) is not None for row in strategies)
    }


VERDICT_HEADINGS = (
    "predictor", "ratios: median error (95 %)", "worst", "Kendall's tau", "regret: median", "worst",
    "step times: median error", "worst", "pairs in the right order",
)  # fmt: skip
CASE_HEADINGS = (
    "task", "ranks", "cluster", "strategy", "real", "runs", "simulation", "replayed", "formula",
    "constant",
    "bytes", "staleness", "parameters", "others", "switches",
)  # fmt: skip


def markdown(rows: Sequence[FidelityRow], calibration: Calibration) -> str:
    """When and where, then three tables, for docs/fidelity.md: the predictors, the controls, and
    every case."""
    machine = calibration.machine
    reasons = (calibration.quality_of(task).doubts for task in calibration.tasks)
    doubts = "; ".join(dict.fromkeys(itertools.chain(*reasons)))
    runs = sum(len(row.runs) for row in rows)
    lines = [
        f"Measured on {calibration.measured_at[:10]}: {machine.get('processor')}, "
        f"{calibration.cores} cores, torch {machine.get('packages', {}).get('torch')}; "
        f"{len(rows[0].runs)} runs of each row, {sum(row.attempts for row in rows) - runs} made "
        f"again since other programs took more than {QUIET:.0%}. While calibrating these took at "
        f"most {calibration.busy_with_others:.0%} of the processor time that was wanted.",
        "",
    ]
    if doubts:
        lines += [f"**The calibration is not to be trusted**, nor are these figures: {doubts}.", ""]
    strategies = [row for row in rows if row.label not in CONTROLS]
    controls = [row for row in rows if row.label in CONTROLS]
    if strategies:
        found = verdicts(rows)
        floor = next(iter(found.values())).ratios
        lines += _table(VERDICT_HEADINGS, itertools.starmap(_verdict_cells, found.items()))
        if floor is not None:
            lines += [
                "",
                f"Ratios of real runs, one half of the rounds beside the other: {floor.floor:.1%} "
                f"in the median, {floor.worst_floor:.1%} at worst. Errors below these say nothing.",
            ]
    for group in (controls, strategies):
        lines += ["", *_table(CASE_HEADINGS, map(_cells, group))] if group else []
    return "\n".join(lines) + "\n"


def _verdict_cells(title: str, found: Verdict) -> tuple[str, ...]:
    ratios = found.ratios
    of_ratios = ("", "")
    if ratios is not None:
        low, high = ratios.interval
        of_ratios = (
            f"{_at_least(ratios.median, ratios.floor)} ({low:.1%} to {high:.1%})",
            _at_least(ratios.worst, ratios.worst_floor),
        )
    return (
        title,
        *of_ratios,
        "" if found.tau is None else f"{found.tau:.2f}",
        f"{found.regret:.1%}",
        f"{found.worst_regret:.1%}",
        f"{found.median:.1%}",
        f"{found.worst:.1%}",
        f"{found.kept} of {found.pairs}",
    )


def _at_least(error: float, floor: float) -> str:
    """Write `error`, or that it is below what can be told."""
    return f"{error:.1%}" if error >= floor else f"below {floor:.1%}"


def _cells(row: FidelityRow) -> tuple[str, ...]:
    return (
        row.task,
        str(row.ranks),
        row.cluster,
        row.label,
        f"{row.real_seconds * 1e3:.2f} ms",
        f"±{scatter(row.runs) / row.real_seconds:.0%}",
        f"{row.error('simulated'):+.1%}",
        "" if row.replayed is None else f"{row.error('replayed'):+.1%}",
        f"{row.error('formula'):+.0%}",
        f"{row.error('constant'):+.0%}",
        f"{row.bytes_difference:+d}" if row.bytes_difference else "0",
        _staleness(row),
        "" if row.parameters_differ is None else f"{row.parameters_differ:.3g}",
        "" if row.others is None else f"{row.others:.0%}",
        str(row.switches),
    )


def _staleness(row: FidelityRow) -> str:
    if row.staleness is None or row.staleness_distance is None:
        return ""
    (mean, tail), (real_mean, real_tail) = row.staleness
    return (
        f"{row.staleness_distance:.2f} ({mean:.2f}, {tail:g}; real {real_mean:.2f}, {real_tail:g})"
    )


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---"] * len(headings)
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *lines)]

"""The state of a run as its folder shows it, while it is under way or afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from orchestra.cluster.units import BYTES
from orchestra.errors import InputError
from orchestra.records.following import Line, RankView
from orchestra.records.links import Links
from orchestra.records.live import Live, RankNow, mean_rates
from orchestra.records.record import RankTotals, RunRecord
from orchestra.records.report import StragglerFinding, changes_in
from orchestra.records.store import RunFolder
from orchestra.report.numbers import ranges
from orchestra.settings.notation import Call, read

Status = Literal["running", "completed", "stopped", "failed", "cut off"]


@dataclass(frozen=True)
class RunView:
    """All that is known about a run; see `RunWatch`."""

    folder: Path
    name: str
    strategy: str
    engine: str
    ranks: int
    seed: int
    status: Status
    phase: str = ""
    fraction: float | None = None
    seconds: float | None = None
    seconds_left: float | None = None
    silent_seconds: float | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    history: Sequence[tuple[float, float]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    staleness: Mapping[str, float] | None = None
    rows: Sequence[RankView] = ()
    balances: bool = False
    stragglers: Sequence[StragglerFinding] = ()
    switches: Sequence[str] = ()
    links: Sequence[str] = ()
    notices: Sequence[str] = ()
    failure: str | None = None

    @property
    def over(self) -> bool:
        """True if the run has ended."""
        return self.status != "running"


class RunWatch:
    """Watches a run; raises `InputError` if its folder is not that of a run."""

    def __init__(self, run: RunFolder) -> None:
        experiment = run.experiment
        (name, strategy), *_ = dict(experiment.get("strategies") or {"": ""}).items()
        ranks, seed = (_first(experiment.get(key)) for key in ("ranks", "seeds"))
        self._began = RunView(
            run.path, name, str(strategy), str(experiment.get("engine", "")), ranks, seed,
            "running", balances=experiment.get("shares") is not None,
        )  # fmt: skip
        self._run = run.follow()
        # live.json is written once a second at most: rates are means of about the last 12 s
        self._earlier: deque[Live] = deque(maxlen=12)

    def look(self, now: float) -> RunView:
        """Return the state at the time `now`, in seconds since 1970."""
        self._run.poll(now)
        record = self._run.record
        # A failed run has no figures in its record; the last ones that its ranks told are shown
        if record is not None and record.ending.status != "failed":
            return self._finished(record)
        if record is not None:
            view = self._under_way("failed", now)
            return replace(view, failure=record.ending.failure, phase="", seconds_left=None)
        return self._under_way("running" if self._run.under_way else "cut off", now)

    def _under_way(self, status: Status, now: float) -> RunView:
        live = self._run.live
        told = live or Live(now, "", 0)
        said = {each.rank: each for each in told.ranks}
        # A run that goes on on fewer ranks leaves the files of the others behind.
        there = {r: track for r, track in self._run.tracks.items() if not said or r <= max(said)}
        tracks = {rank: track for rank, track in there.items() if track.window}
        newest = max((track.window[-1]["seconds"] for track in tracks.values()), default=0.0)
        rows = []
        for rank in sorted({*there, *said}):
            track, own = tracks.get(rank), said.get(rank, RankNow(rank, ""))
            # A server that was a worker before a switch must not count with its last speed as a
            # worker.
            serves = own.phase == "serving"
            if track is None or serves:  # its steps, if any, were those of a phase before
                row = RankView(rank, "server" if serves else "", own.step)
            else:
                row = track.view(rank, newest)
            rows.append(replace(row, waits_for=_waits_text(own), phase=own.phase))
        running = status == "running"
        rates = [row.samples_per_second for row in rows if row.samples_per_second is not None]
        return replace(
            self._view(status, rows),
            phase=_phase(told.ranks) if running else "",
            fraction=told.fraction,
            seconds=newest or None,
            seconds_left=told.seconds_left if running else None,
            silent_seconds=max(0.0, now - live.written) if live else None,
            samples_per_second=sum(rates) if rates else None,
            # The loss of a rank that has stopped is an old one
            loss=_mean(row.loss for row in rows if not row.silent_seconds),
            stragglers=told.stragglers,
            links=self._links_now(live),
            notices=told.notices,
        )

    def _finished(self, record: RunRecord) -> RunView:
        rows = [self._whole_run(each, record) for each in record.machine.by_rank]
        status: Status = "completed" if record.ending.status == "completed" else "stopped"
        return replace(
            self._view(status, rows, record.switching.at_step),
            seconds=record.time.training,
            samples_per_second=record.time.samples_per_second,
            loss=_mean(row.loss for row in rows),
            metrics=record.learned.figures,
            staleness=record.updates.staleness,
            stragglers=record.machine.stragglers,
            links=_links_carried(self._run.run.links),
            notices=record.ending.notices,
        )

    def _whole_run(self, said: RankTotals, record: RunRecord) -> RankView:
        track = self._run.tracks.get(said.rank)
        serves = said.role == "server"
        last: Line = track.window[-1] if track and track.window and not serves else {}
        total = record.time.training or 0.0
        parts = {name: value / total for name, value in said.seconds.items() if total > 0}
        speed = said.samples / total if said.samples and total > 0 else None
        return RankView(
            said.rank, said.role, said.steps, speed, last.get("loss"), parts,
            batch=last.get("samples"),
            bytes_per_second=said.bytes_sent / total if total > 0 else None,
            waits_for=self._run.waits.get(said.rank, ""),
        )  # fmt: skip

    def _view(
        self, status: Status, rows: Sequence[RankView], switched_at_step: int | None = None
    ) -> RunView:
        """Return what a run under way and one that has ended have in common."""
        tracks = [track for _, track in sorted(self._run.tracks.items())]
        history = next((track.history for track in tracks if track.history), ())
        recorded = [] if switched_at_step is None else [switched_at_step]
        steps = next((track.switched for track in tracks if track.switched), recorded)
        # The workers decide together, and the record has those of the first, too
        decided = next((track.decisions for track in tracks if track.decisions), ())
        told = [switch_text(self._began.strategy, step, len(steps)) for step in steps]
        switches = changes_in(decided) or told
        return replace(self._began, status=status, rows=rows, history=history, switches=switches)

    def _links_now(self, live: Live | None) -> list[str]:
        if live is None:
            return []
        # Looks come more often than new files: equal ones would shorten the time of the mean
        if not self._earlier or self._earlier[-1].written != live.written:
            self._earlier.append(live)
        before = self._earlier[0].ranks if len(self._earlier) > 1 else ()
        rates = sorted(mean_rates(before, live.ranks).items(), key=lambda item: -item[1])
        return [
            f"{source} to {target}: {BYTES.rounded(rate)}/s" for (source, target), rate in rates
        ]


def switch_text(strategy: str, step: int, known: int = 1) -> str:
    """Return a switch of `strategy` in words; only its step if further switches are inside."""
    # A strategy in another notation than today's still switched after a step
    text = f"after step {step}"
    try:
        call = read(strategy, where="strategy")
    except InputError:
        return text
    phases = dict(zip(("first", "then"), call.positional, strict=False)) | dict(call.keywords)
    inner = [phases.get("first"), phases.get("then")]
    nested = any(isinstance(each, Call) and each.name == "Switch" for each in inner)
    if call.name != "Switch" or nested or known > 1:
        return text
    return f"{text} to {phases.get('then')}, by {phases.get('when', 'LossStable()')}"


def _first(value: object) -> int:
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) else 0


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _phase(ranks: Sequence[RankNow]) -> str:
    """Return the phase of most of the ranks that do not serve."""
    phases = [each.phase for each in ranks if each.phase != "serving"]
    # Ranks reach the next phase at different moments
    return max(phases, key=phases.count) if phases else "set-up"


def _waits_text(said: RankNow) -> str:
    most = said.waits_for[:1]
    return "".join(f"{' or '.join(ranges(each.ranks))} ({each.share:.0%})" for each in most)


def _links_carried(links: Links | None) -> list[str]:
    """Return the busiest links of a cluster that was simulated or emulated."""
    if links is None or links.seconds <= 0:
        return []
    return [
        f"{link.name}: {BYTES.rounded(link.bytes / links.seconds)}/s ({min(link.share, 1.0):.0%})"
        for link in links.busiest
    ]

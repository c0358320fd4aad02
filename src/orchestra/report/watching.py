"""The state of a run as its folder shows it, while it is under way or afterwards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from orchestra.cluster.units import BYTES
from orchestra.errors import InputError
from orchestra.records.exports import longest_waits
from orchestra.records.live import (
    PARTS,
    Line,
    Live,
    RankNow,
    Tail,
    is_step,
    mean_rates,
    read_live,
    under_way,
)
from orchestra.records.record import (
    EXPERIMENT,
    SUMMARY,
    RankTotals,
    RunRecord,
    read_links,
    read_summary,
)
from orchestra.records.report import StragglerFinding, changes_in
from orchestra.report.numbers import ranges
from orchestra.settings.notation import Call, read
from orchestra.settings.reading import read_yaml

WINDOW_SECONDS, WINDOW_STEPS = 10.0, 10
"""Figures are means over at least this many seconds of the stopwatch and this many steps."""
MAX_WINDOW = 5000
HISTORY = 512
SILENT_SECONDS = 5.0
"""How much older than another worker's a worker's last step is for it to count as silent."""

Status = Literal["running", "completed", "stopped", "failed", "cut off"]


@dataclass(frozen=True)
class Row:
    """A rank: its last steps, or, once the run is completed, all of them. What is not known is
    None; `parts` are those of its time."""

    rank: int
    role: str
    step: int
    samples_per_second: float | None = None
    loss: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    staleness: tuple[float, int] | None = None
    batch: int | None = None
    bytes_per_second: float | None = None
    waits_for: str = ""
    phase: str = ""
    silent_seconds: float = 0.0


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
    rows: Sequence[Row] = ()
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


class RankTrack:
    """The steps of one rank, as its file grows."""

    def __init__(self, path: Path) -> None:
        # Bounded for steps of less than 2 ms, of which ten seconds have more than this
        self.window: deque[Line] = deque(maxlen=MAX_WINDOW)
        self.history: list[tuple[float, float]] = []
        self.switched: list[int] = []
        self.decisions: list[Mapping[str, Any]] = []
        self._tail = Tail(path)
        self._every, self._count = 1, 0

    def look(self) -> list[Line]:
        """Read the lines that were added, and return them."""
        # A file of another version, or a damaged line, must not end whoever watches
        lines = [line for line in self._tail.read() if is_step(line)]
        # A resumed run rewrites its file: steps after the checkpoint are dropped and done again
        if self._tail.began_anew:
            for kept in (self.window, self.history, self.switched, self.decisions):
                kept.clear()
        for line in lines:
            self.window.append(line)
            if line.get("switched_at_step") not in (None, *self.switched):
                self.switched.append(line["switched_at_step"])
            if "decision" in line:
                self.decisions.append(line["decision"])
            self._remember(line)
        # One line more than the window: a rate needs the moment at which the first step began
        since = self.window[-1]["seconds"] - WINDOW_SECONDS if self.window else 0.0
        while len(self.window) > WINDOW_STEPS + 1 and self.window[1]["seconds"] < since:
            self.window.popleft()
        return lines

    def _remember(self, line: Line) -> None:
        """Keep at most `HISTORY` losses, evenly spaced over the steps."""
        self._count += 1
        loss = line["loss"]
        if self._count % self._every or loss is None or not math.isfinite(loss):
            return
        self.history.append((float(line["consumed"]), float(loss)))
        if len(self.history) > HISTORY:
            # Every second one from now on, too: evenly spaced, however long the run
            del self.history[::2]
            self._every *= 2

    def row(self, rank: int, now: RankNow | None, newest: float) -> Row:
        """Return rank `rank`'s last steps; `newest` is the latest moment that any rank reported."""
        now = now or RankNow(rank, "")
        first, *lines = self.window
        # The first line only tells when the next step began
        began = first["seconds"] if lines else 0.0
        lines = lines or [first]
        last = lines[-1]
        seconds = last["seconds"] - began

        def rate(name: str) -> float | None:
            return sum(line.get(name) or 0 for line in lines) / seconds if seconds > 0 else None

        parts = {name: rate(name) or 0.0 for name in PARTS if name in last}
        stale = [value for line in lines for value in line.get("staleness") or ()]
        staleness = (sum(stale) / len(stale), max(stale)) if stale else None
        silent = newest - last["seconds"]
        return Row(
            rank, "worker", last["step"], rate("samples"), last["loss"], parts, staleness,
            last["samples"], rate("bytes_sent"), _waits_text(now), now.phase,
            silent if silent > SILENT_SECONDS else 0.0,
        )  # fmt: skip


class RunWatch:
    """Follows the run in `folder`; raises `InputError` if it is not the folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        experiment = experiment_of(folder)
        (name, strategy), *_ = dict(experiment.get("strategies") or {"": ""}).items()
        ranks, seed = (_first(experiment.get(key)) for key in ("ranks", "seeds"))
        self._began = RunView(
            folder, name, str(strategy), str(experiment.get("engine", "")), ranks, seed, "running",
            balances=experiment.get("shares") is not None,
        )  # fmt: skip
        self._tracks: dict[int, RankTrack] = {}
        # live.json is written once a second at most: rates are means of about the last 12 s
        self._earlier: deque[Live] = deque(maxlen=12)
        self._waits: Mapping[int, str] | None = None

    def look(self, now: float) -> RunView:
        """Return the state at the time `now`, in seconds since 1970."""
        record = next(iter(_summary(self.folder)), None)
        live = read_live(self.folder)
        # Not by the age of live.json alone, which is wrong where clocks differ: a run holds a lock
        # on its folder (decision 100).
        status: Status = "running"
        if record is None and not under_way(self.folder, live, now):
            record = next(iter(_summary(self.folder)), None)  # it may have ended just now
            status = "cut off"
        self._follow_steps()
        # A failed run has no figures in its record; the last ones that its ranks told are shown
        if record is not None and record.status != "failed":
            return self._finished(record)
        view = self._now(status, live, now)
        if record is not None:
            return replace(view, status="failed", failure=record.failure, seconds_left=None)
        return view

    def _follow_steps(self) -> None:
        for path in self.folder.glob("steps-rank-*.jsonl"):
            number = path.stem.rpartition("-")[2]
            # The folder is open to others; a copy of such a file must not end whoever watches
            if number.isdecimal():
                self._tracks.setdefault(int(number), RankTrack(path)).look()

    def _now(self, status: Status, live: Live | None, now: float) -> RunView:
        told = live or Live(now, "", 0)
        said = {each.rank: each for each in told.ranks}
        # A run that goes on on fewer ranks leaves the files of the others behind.
        there = {r: track for r, track in self._tracks.items() if not said or r <= max(said)}
        tracks = {rank: track for rank, track in there.items() if track.window}
        newest = max((track.window[-1]["seconds"] for track in tracks.values()), default=0.0)
        rows = []
        for rank in sorted({*there, *said}):
            track, own = tracks.get(rank), said.get(rank, RankNow(rank, ""))
            # A server that was a worker must not count with its last speed (decision 100)
            serves = own.phase == "serving"
            if track is None or serves:  # its steps, if any, were those of a phase before
                role, waits_for = "server" if serves else "", _waits_text(own)
                rows.append(Row(rank, role, own.step, waits_for=waits_for, phase=own.phase))
            else:
                rows.append(track.row(rank, own, newest))
        running = status == "running"
        rates = [row.samples_per_second for row in rows if row.samples_per_second is not None]
        return self._view(
            status,
            rows,
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
        # Read once: a timeline takes seconds to read, and no longer changes
        if self._waits is None:
            self._waits = longest_waits(self.folder)
        rows = [self._whole_run(RankTotals(**each), record) for each in record.by_rank]
        return self._view(
            "completed" if record.status == "completed" else "stopped",
            rows,
            seconds=record.train_seconds,
            samples_per_second=record.samples_per_second,
            loss=_mean(row.loss for row in rows),
            metrics=record.figures,
            staleness=record.staleness,
            stragglers=record.slow_ranks,
            switched_at_step=record.switched_at_step,
            links=_links_carried(self.folder),
            notices=record.notices,
        )

    def _whole_run(self, said: RankTotals, record: RunRecord) -> Row:
        track = self._tracks.get(said.rank)
        serves = said.role == "server"
        last: Line = track.window[-1] if track and track.window and not serves else {}
        total = record.train_seconds or 0.0
        parts = {name: value / total for name, value in said.seconds.items() if total > 0}
        speed = said.samples / total if said.samples and total > 0 else None
        return Row(
            said.rank, said.role, said.steps, speed, last.get("loss"), parts,
            batch=last.get("samples"),
            bytes_per_second=said.bytes_sent / total if total > 0 else None,
            waits_for=(self._waits or {}).get(said.rank, ""),
        )  # fmt: skip

    def _view(
        self, status: Status, rows: Sequence[Row], switched_at_step: int | None = None, **about: Any
    ) -> RunView:
        tracks = [track for _, track in sorted(self._tracks.items())]
        history = next((track.history for track in tracks if track.history), ())
        recorded = [] if switched_at_step is None else [switched_at_step]
        steps = next((track.switched for track in tracks if track.switched), recorded)
        # The workers decide together, and the record has those of the first, too
        decided = next((track.decisions for track in tracks if track.decisions), ())
        told = [switch_text(self._began.strategy, step, len(steps)) for step in steps]
        about |= {"rows": rows, "history": history, "switches": changes_in(decided) or told}
        return replace(self._began, status=status, **about)

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


def experiment_of(folder: Path) -> Mapping[str, Any]:
    """Return the experiment in the folder of a run or of a comparison; raise `InputError` if there
    is none."""
    try:
        value = read_yaml(folder / EXPERIMENT)
    except FileNotFoundError:
        lacks = "there is no such folder"
        if folder.exists():
            lacks = f"is not the folder of a run or comparison: it has no {EXPERIMENT}"
        raise InputError(f"{folder}: {lacks}") from None
    return value


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


def _summary(folder: Path) -> list[RunRecord]:
    try:
        return read_summary(folder / SUMMARY)
    except FileNotFoundError:
        return []


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


def _links_carried(folder: Path) -> list[str]:
    """Return the busiest links of a cluster that was simulated or emulated."""
    links = read_links(folder)
    if links is None or links.seconds <= 0:
        return []
    return [
        f"{link.name}: {BYTES.rounded(link.bytes / links.seconds)}/s ({min(link.share, 1.0):.0%})"
        for link in links.busiest
    ]

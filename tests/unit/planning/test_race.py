"""The race of a plan: what it asks for, when it is over, and who is out. No simulation is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.support.plans import ACCURACY, RECORD, found_on, points
from tests.support.recorded import changed

from orchestra.engines.simulation.trials import Tried
from orchestra.planning.candidates import Candidate
from orchestra.planning.race import MOST_SEEDS, Race, SearchBudget, TrialRequest
from orchestra.planning.standing import FEWEST_SEEDS, Length
from orchestra.records.report import Point

Samples = Callable[[str, int], float]
"""The samples with which a candidate reaches the target with a seed."""


class Outcomes:
    """Answers a race: every simulation takes a second; all have 100 samples/s."""

    def __init__(
        self, race: Race, samples: Samples, speeds: dict[str, float] | None = None
    ) -> None:
        self.race, self.samples, self.speeds = race, samples, speeds or {}
        self.clock = 0.0
        self.asked: list[TrialRequest] = []

    def run(self, stop: Callable[[TrialRequest], bool] = lambda request: False) -> None:
        """Go on until the race is over, or asks for a request with `stop`."""
        while (request := self.race.ask(self.clock)) is not None:
            self.asked.append(request)
            if stop(request):
                return
            self.clock += 1.0
            self.race.told(request, self.outcome(request))
        self.race.over()

    def outcome(self, request: TrialRequest) -> Tried:
        name = request.entry.name
        if not request.learns:
            speed = self.speeds.get(name, 100.0)
            return Tried(changed(RECORD, samples_per_second=speed), seconds=1.0)
        whole = self.samples(name, request.run.seed)
        curve = [
            Point(n, n / 100, {"accuracy": min(1.0, 0.9 * n / whole)})
            for n in range(100, round(1000 * request.part) + 1, 100)
        ]
        record = changed(RECORD, samples=round(1000 * request.part))
        return Tried(record, curve, seconds=1.0)


def race_of(
    names: Sequence[str], folder: Path, until: float = 1e12, seeds: Sequence[int] = (0, 1)
) -> Race:
    """A race of some candidates on two nodes."""
    every = found_on("lan_1gbit(nodes=2)", folder)
    some: list[Candidate] = [every[name] for name in names]
    return Race(some, ACCURACY, Length(1000, 10), SearchBudget(0.0, until), seeds)


ONE, GOSSIP, PUSH = "one process", "gossip on 2 nodes", "push-sum on 2 nodes"


def test_a_race_ends_when_the_first_is_confirmed_by_four_seeds(tmp_path: Path) -> None:
    race = race_of([ONE, GOSSIP], tmp_path)
    played = Outcomes(race, lambda name, seed: (400 if name == GOSSIP else 900) + 10 * seed)
    played.run()
    best = race.best()
    assert best is not None
    assert best[0].name == GOSSIP
    assert race.is_confirmed()
    assert len(race.times(best[0])) == FEWEST_SEEDS
    assert not race.notes


def test_close_ones_get_further_seeds(tmp_path: Path) -> None:
    """Push-sum is 5 % slower in the mean, but not with every seed."""
    race = race_of([ONE, GOSSIP, PUSH], tmp_path)

    def samples(name: str, seed: int) -> float:
        if name == PUSH:
            return 360.0 if seed % 2 else 480.0
        return 400 if name == GOSSIP else 900

    Outcomes(race, samples).run()
    assert len(race.times(race.entries[GOSSIP])) == MOST_SEEDS
    assert len(race.times(race.entries[PUSH])) == MOST_SEEDS


def test_a_rival_is_paired_by_seed(tmp_path: Path) -> None:
    """Seeds differ by half, but push-sum is a tenth slower with each of them."""
    race = race_of([ONE, GOSSIP, PUSH], tmp_path)

    def samples(name: str, seed: int) -> float:
        own = {GOSSIP: 400.0, PUSH: 440.0}.get(name, 900.0)
        return own * (1 + 0.1 * (seed % 4))

    Outcomes(race, samples).run()
    best = race.best()
    assert best is not None
    assert best[0].name == GOSSIP
    assert race.is_confirmed()
    assert len(race.times(race.entries[PUSH])) < MOST_SEEDS


def test_a_run_that_was_cut_off_is_a_bound_of_a_rival(tmp_path: Path) -> None:
    race = race_of([ONE, GOSSIP, PUSH], tmp_path)
    for name in (ONE, GOSSIP, PUSH):
        race.entries[name].record = changed(RECORD, samples_per_second=100.0)
    race.entries[ONE].dropped = "out"
    reached = points(0.5, 0.8, 1.0)
    race.entries[GOSSIP].curves = dict.fromkeys(range(4), reached)
    race.entries[PUSH].curves = dict.fromkeys(range(4), points(0.5, 0.5, 0.5))
    race.entries[PUSH].curves[0] = points(0.5, 0.5, 0.85, 1.0)
    assert race.is_confirmed()  # 6 s and more with each seed, 5 s of the first
    race.entries[PUSH].curves |= dict.fromkeys(range(1, 4), points(0.5, 0.5))
    assert not race.is_confirmed()


def test_the_budget_ends_a_race_and_is_not_overrun(tmp_path: Path) -> None:
    every = list(found_on("lan_1gbit(nodes=2)", tmp_path))
    race = race_of(every, tmp_path, until=20.0)
    played = Outcomes(race, lambda name, seed: 500.0)
    played.run()
    assert played.clock <= 20.0
    assert any(note.startswith("no time for the") for note in race.notes)
    assert not race.is_confirmed()


@pytest.mark.parametrize("costly", ["speeds", "runs"])
def test_a_cheaper_piece_of_information_comes_first(costly: str, tmp_path: Path) -> None:
    """Gossip learns before push-sum's speed is known, unless runs take much longer than speeds."""
    race = race_of([ONE, GOSSIP, PUSH], tmp_path)
    played = Outcomes(race, lambda name, seed: 500.0)
    played.run(stop=lambda request: request.entry.name == GOSSIP)
    reference = race.entries[ONE]
    reference.speed_wall, reference.wall = (1e3, 1.0) if costly == "speeds" else (1.0, 1e6)
    race.told(played.asked[-1], played.outcome(played.asked[-1]))
    played.asked.clear()
    played.run(stop=lambda request: request.entry.name in (GOSSIP, PUSH))
    first = played.asked[-1]
    assert (first.entry.name, first.learns) == (
        (GOSSIP, True) if costly == "speeds" else (PUSH, False)
    )


def test_one_process_is_trained_first_and_to_the_target(tmp_path: Path) -> None:
    race = race_of([GOSSIP, ONE], tmp_path)
    played = Outcomes(race, lambda name, seed: 900.0)
    played.run(stop=lambda request: request.learns and request.entry.name != ONE)
    learned = [request.part for request in played.asked if request.learns]
    assert learned[:3] == [0.25, 0.5, 1.0]
    assert played.asked[0].entry.name == ONE
    assert {request.run.seed for request in played.asked[:4]} == {0}


def test_a_candidate_learns_in_rungs_and_is_dropped_where_the_first_had_won(
    tmp_path: Path,
) -> None:
    race = race_of([ONE, GOSSIP], tmp_path)
    played = Outcomes(race, lambda name, seed: 500.0 if name == ONE else 900.0)
    played.run()
    parts = [r.part for r in played.asked if r.learns and r.entry.name == GOSSIP]
    assert parts == [0.2, 0.4, 0.6]
    reason = race.entries[GOSSIP].dropped or ""
    assert reason.startswith("accuracy 0.6 after 6 s, when one process")
    assert race.entries[GOSSIP].rungs[0] == "accuracy 0.2 after 2 s"


def test_a_slow_seed_after_a_lucky_one_goes_on_until_it_reaches_the_target(tmp_path: Path) -> None:
    race = race_of([ONE, GOSSIP], tmp_path)
    played = Outcomes(race, lambda name, seed: 900.0 if name == ONE else 500.0 if seed else 200.0)
    played.run()
    best = race.best()
    assert best is not None
    assert best[0].name == GOSSIP
    assert not race.missed(best[0])
    assert {seed: at.samples for seed, at in race.times(best[0]).items()}[1] == pytest.approx(500)


def test_an_unlucky_first_seed_does_not_drop_a_candidate(tmp_path: Path) -> None:
    race = race_of([ONE, GOSSIP], tmp_path)
    played = Outcomes(race, lambda name, seed: 500.0 if name == ONE else 300.0 if seed else 660.0)
    played.run()
    best = race.best()
    assert best is not None
    assert best[0].name == GOSSIP
    assert len(race.times(best[0])) >= FEWEST_SEEDS


def test_a_twin_comes_back_when_the_faster_one_is_measured_again(tmp_path: Path) -> None:
    ring, halving = "ring on 2 nodes", "halving-doubling on 2 nodes"
    race = race_of([ONE, ring, halving], tmp_path)
    played = Outcomes(race, lambda name, seed: 500.0, {ring: 210.0, halving: 205.0})

    def is_confirmation(request: TrialRequest) -> bool:
        return request.entry.name == ring and race.entries[ring].speed is not None

    played.run(stop=is_confirmation)
    assert (race.entries[halving].dropped or "").startswith(f"learns the same as {ring}")
    played.speeds[ring] = 190.0
    race.told(played.asked[-1], played.outcome(played.asked[-1]))
    assert race.entries[halving].dropped is None
    assert (race.entries[ring].dropped or "").startswith(f"learns the same as {halving}")


def test_who_misses_the_target_with_a_seed_gets_no_further_ones(tmp_path: Path) -> None:
    race = race_of([ONE, GOSSIP], tmp_path)
    played = Outcomes(
        race, lambda name, seed: 900.0 if name == ONE else 1e9 if seed == 1 else 400.0
    )
    played.run()
    seeds = {r.run.seed for r in played.asked if r.learns and r.entry.name == GOSSIP}
    assert seeds == {0, 1}
    best = race.best()
    assert best is not None
    assert best[0].name == ONE


@pytest.mark.parametrize("failing", [ONE, GOSSIP])
def test_a_failure_drops_who_learns_the_same(failing: str, tmp_path: Path) -> None:
    race = race_of([ONE, "ring on 2 nodes", GOSSIP], tmp_path)
    played = Outcomes(race, lambda name, seed: 500.0)
    played.run(stop=lambda request: request.learns and request.entry.name == failing)
    race.told(played.asked[-1], Tried(failure="out of memory"))
    lost = {ONE, "ring on 2 nodes"} if failing == ONE else {GOSSIP}
    for name in lost:
        assert "failed: out of memory" in (race.entries[name].dropped or "") or (
            race.entries[name].dropped or ""
        ).startswith("learns the same")

"""The oracle of the race, and plans that are replayed on it."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.race.__main__ import main, markdown, wanted
from benchmarks.race.oracle import (
    CURVES,
    SPEEDS,
    Oracle,
    RecordedCurve,
    RecordedSpeed,
    candidates_of,
    curve_key,
    record,
    speed_key,
    steps_of,
)
from benchmarks.race.pairs import SEEDS, TASKS, RacePair, pairs
from benchmarks.race.replay import Known, Play, draws, raced, regrets_of

from orchestra.engines.processes.system import now
from orchestra.errors import InputError
from orchestra.planning.candidates import Candidate
from orchestra.planning.standing import Length

GOSSIP, RING = "gossip on 4 nodes", "ring on 4 nodes"


def known_of(
    pair: RacePair, folder: Path, samples: dict[str, float], missing: frozenset[int] = frozenset()
) -> Known:
    """An oracle of a pair in which each candidate reaches the target after `samples`, 4,000 by
    default, and gossip not with the `missing` seeds. A speed takes 0.1 s, a whole run 10 s."""
    candidates = candidates_of(pair, folder)
    oracle = Oracle()
    whole, bound = TASKS[pair.task].samples, TASKS[pair.task].target.bound
    for each in candidates:
        for steps in steps_of(each):
            key = speed_key(pair, each, steps)
            oracle.speeds[key] = RecordedSpeed(key, 100.0 * len(each.nodes), 0.1)
        for seed in SEEDS:
            needed = samples.get(each.name, 4_000.0) + seed
            points = [
                (
                    n,
                    n / 100.0,
                    0.0 if each.name == GOSSIP and seed in missing else bound * n / needed,
                )
                for n in range(0, whole + 1, whole // 20)
            ]
            key = curve_key(pair, each, seed)
            oracle.curves.setdefault(key, RecordedCurve(key, points, 10.0))
    return Known(pair, oracle, candidates, Length(whole, 20), {})


def named(known: Known, name: str) -> Candidate:
    return next(each for each in known.candidates if each.name == name)


def test_there_are_24_pairs_none_of_them_twice() -> None:
    found = pairs()
    assert [pair.number for pair in found] == list(range(1, 25))
    assert len({pair.title.partition(": ")[2] for pair in found}) == 24
    assert {pair.task for pair in found} == {*TASKS}


def test_candidates_that_learn_alike_share_a_recording(tmp_path: Path) -> None:
    first, other = pairs()[0], pairs()[8]  # one task on two clusters of four nodes
    assert first.task == other.task
    here, there = (
        {each.name: each for each in candidates_of(pair, tmp_path / str(pair.number))}
        for pair in (first, other)
    )
    for name in (RING, GOSSIP):
        assert curve_key(first, here[name], 3) == curve_key(other, there[name], 3)
    beside = "asynchronous beside on 4 nodes"
    assert curve_key(first, here[beside], 3) != curve_key(other, there[beside], 3)
    assert curve_key(first, here[RING], 3) == curve_key(first, here["one process"], 3)
    assert curve_key(first, here[RING], 3) != curve_key(first, here[RING], 4)


def test_a_recording_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Every call records a line at least, and none twice."""
    some = pairs()[1:2]
    for _ in range(2):
        assert not record(some, tmp_path, now())
    with (tmp_path / SPEEDS).open("a") as file:
        file.write('{"key": "2|cut')
    oracle = Oracle.read(tmp_path)
    assert len(oracle.speeds) == 2
    for each in oracle.speeds.values():
        assert each.speed > 0
        assert each.wall > 0
    assert not (tmp_path / CURVES).exists()


def test_a_recording_is_read_from_its_compressed_part_too(tmp_path: Path) -> None:
    first, second = (RecordedSpeed(f"1|{name}|0", 5.0, 0.1) for name in ("ring", "tree"))
    (tmp_path / f"{SPEEDS}.gz").write_bytes(
        gzip.compress(f"{json.dumps(asdict(first))}\n".encode())
    )
    (tmp_path / SPEEDS).write_text(json.dumps(asdict(second)))
    assert Oracle.read(tmp_path).speeds == {first.key: first, second.key: second}


@pytest.mark.lab
def test_the_recording_that_is_kept_has_pairs_that_several_nodes_win(tmp_path: Path) -> None:
    oracle = Oracle.read(Path("benchmarks/race/recording"))
    several = 0
    for pair in pairs():
        candidates = candidates_of(pair, tmp_path / str(pair.number))
        if oracle.knows(pair, candidates):
            known = Known(pair, oracle, candidates, Length(TASKS[pair.task].samples, 20), {})
            several += len(min(candidates, key=known.truth).nodes) > 1
    assert several >= 5


def test_a_speed_and_a_curve_are_looked_up(tmp_path: Path) -> None:
    known = known_of(pairs()[0], tmp_path, {})
    play = Play(known, {0: 5}, {})
    ring = named(known, RING)
    wall, tried = play.speed(ring, 0, 1.0)
    assert wall == 0.1
    assert tried.record is not None
    assert tried.record.time.samples_per_second == 400.0
    late, cut = play.speed(ring, 0, 0.05)
    assert late > 0.05
    assert cut.record is None
    gossip = named(known, GOSSIP)
    wall, tried = play.learn(gossip, 0, 0.5, 100.0)
    assert wall == pytest.approx(5.0)
    assert tried.points[-1].samples == 2_560
    # It goes on from where it has been, and its seconds are those of the pair.
    wall, tried = play.learn(gossip, 0, 0.75, 100.0)
    assert wall == pytest.approx(2.5)
    assert tried.points[-1].seconds == pytest.approx(3_840 / 400.0)
    wall, tried = play.learn(gossip, 0, 1.0, 0.5)
    assert tried.points[-1].samples == 4_096  # so far it came in half a second
    lost, nothing = play.learn(named(known, "push-sum on 4 nodes"), 0, 1.0, 9.0)
    assert lost > 9.0
    assert nothing.record is None


def test_a_seed_that_misses_the_target_is_paid_for(tmp_path: Path) -> None:
    known = known_of(pairs()[0], tmp_path, {}, frozenset({0, 1}))
    gossip, ring = named(known, GOSSIP), named(known, RING)
    whole = TASKS[known.pair.task].samples
    assert known.truth(ring) == pytest.approx((4_000 + 3.5) / 400.0)
    assert known.truth(gossip) == pytest.approx((6 * 4_004.5 + 2 * whole) / 6 / 400.0)


def test_regret_is_what_the_choice_takes_more_than_the_best(tmp_path: Path) -> None:
    known = known_of(pairs()[0], tmp_path, {GOSSIP: 2_000.0})
    found = regrets_of(known, raced, draws(2, random.Random(1)), 200.0, 2)
    assert found.best.name == GOSSIP
    assert found.regrets == [0.0, 0.0]
    assert found.overruns == [0.0, 0.0]
    assert found.rules["DDP"] == pytest.approx(4_003.5 / 2_003.5 - 1)
    assert found.rules["one process"] == pytest.approx(4 * 4_003.5 / 2_003.5 - 1)
    text = markdown([found])
    assert f"| {known.pair.title} | {GOSSIP} | 4 | 0.0 % | 0.0 % | 0.0 % |" in text
    assert "| all pairs | 2 | 0.0 % | 0.0 % | 0.0 % |" in text
    assert "The budget was overrun by 0.0 s at most." in text


def test_what_is_not_recorded_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["race", "replay", "--out", str(tmp_path), "--pairs", "3"]
    monkeypatch.setattr("sys.argv", arguments)
    assert main() == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "no pair is recorded there; python -m benchmarks.race record" in line
    with pytest.raises(InputError, match="there is no pair 25; give numbers from 1 to 24"):
        wanted("1,25")


def test_every_draw_has_all_seeds() -> None:
    for draw in draws(3, random.Random(0)):
        assert sorted(draw) == sorted(draw.values()) == list(SEEDS)

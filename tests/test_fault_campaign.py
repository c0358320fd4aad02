"""A seeded campaign: something dies, stops or is interrupted at a random moment of a training.

Run with `pytest -m matrix tests/test_fault_campaign.py`; the machine should do nothing else.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from tests.commands import Ended, Started, rank_pids, started

pytestmark = pytest.mark.matrix

FAULTS = 173
#: A strategy, and the ranks that it runs on.
SETTINGS = [
    ("Single()", 1),
    ("AllReduce('ring')", 3),
    ("AllReduce('native')", 2),
    ("AllReduce('ring', shard='optimizer')", 3),
    ("AllReduce('ring', shard='parameters')", 3),
    ("AllReduce('ring', backup=1)", 3),
    ("ParameterServer", 3),
    ("ParameterServer(placement='beside')", 2),
    ("ParameterServer(consistency='asynchronous')", 3),
    ("ParameterServer(consistency='bounded', staleness=4, placement='beside')", 3),
    ("ParameterServer(servers=2, replicas=1)", 4),
    ("LocalSGD(4)", 3),
    ("LocalSGD(4, outer=Nesterov(0.7, 0.9), overlap=2)", 3),
    ("Gossip()", 3),
    ("StochasticGradientPush(overlap=1)", 3),
    ("PairwiseAveraging()", 3),
    ("ElasticAveraging(4)", 3),
    ("Hop(staleness=4, skip=4)", 3),
    ("Switch(AllReduce('ring'), ParameterServer, when=AfterSteps(40))", 3),
]  # fmt: skip
KINDS = ("kill a rank", "stop a rank", "kill the command", "Ctrl-C", "SIGTERM")
STEPS = 160


def command(strategy: str, ranks: int, checkpoint_every: int) -> list[str]:
    words = ["train", "--task", "digits", "--strategy", strategy, "--ranks", str(ranks)]
    for setting in (
        f"steps={STEPS}", "batch_size=8", "equal=worker_batch", "patience=6", "snapshots=2",
        f"checkpoint_every={checkpoint_every}",
    ):  # fmt: skip
        words += ["--set", setting]
    return [*words, "--out", "out"]


def steps_done(folder: Path) -> int:
    """The steps that all ranks have written down."""
    files = (folder / "out").glob("steps-rank-*.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in files)


def disturb(process: Started, kind: str, victim: int, ranks: int) -> bool:
    """Do it; False: the training was over before."""
    pid = process.process.pid
    if kind == "kill the command":
        process.process.kill()
    elif kind in ("Ctrl-C", "SIGTERM"):
        process.process.send_signal(signal.SIGINT if kind == "Ctrl-C" else signal.SIGTERM)
    else:
        pids = rank_pids(pid)
        if len(pids) != ranks:
            return False
        os.kill(pids[victim], signal.SIGKILL if "kill" in kind else signal.SIGSTOP)
    return True


def check(ended: Ended, kind: str, victim: int) -> None:
    assert "Traceback" not in ended.err, ended.err
    if kind == "kill the command":
        assert ended.status in (0, -signal.SIGKILL), ended
    elif kind in ("Ctrl-C", "SIGTERM"):
        assert ended.status in (0, 1), ended  # 1: stopped before its end
        assert ended.err.startswith("orchestra: stopping in good order"), ended.err
    else:
        assert ended.status in (0, 1), ended
        if ended.status:
            how = "was killed by SIGKILL" if "kill" in kind else "is stopped"
            assert f"orchestra: rank {victim} on " in ended.err, ended.err
            assert how in ended.err, ended.err


@pytest.mark.parametrize("number", range(FAULTS))
def test_a_fault_at_a_random_moment(number: int, tmp_path: Path) -> None:
    """The first cause is named, nothing hangs, nothing is left; the same command completes."""
    draw = random.Random(number)
    strategy, ranks = SETTINGS[number % len(SETTINGS)]
    kind, victim = draw.choice(KINDS), draw.randrange(ranks)
    moment = draw.randrange(ranks * STEPS)
    words = command(strategy, ranks, draw.choice((7, 20, 50)))
    with started(words, tmp_path) as process:
        pid = process.process.pid
        process.wait_until(
            lambda: len(rank_pids(pid)) == ranks and steps_done(tmp_path) >= min(moment, 1),
            "the ranks are there",
        )
        poll = process.process.poll
        process.wait_until(
            lambda: poll() is not None or steps_done(tmp_path) >= moment, "the moment"
        )
        disturbed = poll() is None and disturb(process, kind, victim, ranks)
        ended = process.end()
    if disturbed:
        check(ended, kind, victim)
    with started(words, tmp_path) as process:
        again = process.end()
    assert again.status == 0, again.err
    (entry,) = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert entry["status"] == "completed"

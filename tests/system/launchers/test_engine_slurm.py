"""The example for Slurm, on a cluster of two nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import MARK
from tests.support.paths import ROOT
from tests.support.slurm import Slurm, needs_slurm, slurm_cluster
from tests.support.waiting import is_running, wait_until
from tests.support.warm import MODULE_PATH

pytestmark = needs_slurm
EXAMPLES = ROOT / "examples/engines"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path) as cluster:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        cluster.variables.update(PATH=path, PYTHONPATH=MODULE_PATH)
        cluster.variables[MARK] = tmp_path.name
        yield cluster


def submit(slurm: Slurm, folder: Path, epochs: int) -> str:
    """Submit the example, with an experiment of so many epochs; return the job's number."""
    text = (EXAMPLES / "digits.yaml").read_text()
    (folder / "digits.yaml").write_text(text.replace("epochs: 20", f"epochs: {epochs}"))
    script = str(EXAMPLES / "slurm.sbatch")
    command = ("sbatch", "--parsable", "--output=job.out", script, "digits.yaml", "record")
    return slurm.say(*command, cwd=folder)


def ranks(folder: Path) -> dict[int, int]:
    """The process of each rank of the job, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        named = dict(each.partition(b"=")[::2] for each in variables)
        is_rank = b"train" in arguments and b"srun" not in arguments[0]
        ours = named.get(MARK.encode()) == folder.name.encode() and b"SLURM_PROCID" in named
        if ours and is_rank and is_running(int(process.name)):
            found[int(named[b"SLURM_PROCID"])] = int(process.name)
    return found


def goes_on_to_its_end(slurm: Slurm, job: str) -> None:
    """Wait until Slurm has started the job again, and the job is completed."""
    wait_until(lambda: "Restarts=1" in slurm.say("scontrol", "show", "job", job), "a restart")
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the job is completed")


def out(folder: Path) -> str:
    path = folder / "job.out"
    return path.read_text() if path.exists() else ""


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("record/checkpoints/*/manifest.json"))


def test_a_job_goes_on_after_it_has_lost_a_rank(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, 12)
    wait_until(lambda: has_checkpoint(tmp_path), "a checkpoint")
    os.kill(ranks(tmp_path)[1], signal.SIGKILL)
    goes_on_to_its_end(slurm, job)
    assert "rank 1" in out(tmp_path)
    assert "resumed from checkpoint" in out(tmp_path)
    (record,) = json.loads((tmp_path / "record/summary.json").read_text())["runs"]
    assert record["status"] == "completed"
    assert record["ranks"] == 2


def test_a_job_that_gets_sigterm_stops_in_good_order_and_goes_on(
    slurm: Slurm, tmp_path: Path
) -> None:
    """As before a time limit, by `--signal=TERM@60`."""
    job = submit(slurm, tmp_path, 12)
    wait_until(lambda: has_checkpoint(tmp_path), "a checkpoint")
    slurm.say("scancel", "--signal=TERM", job)
    goes_on_to_its_end(slurm, job)
    assert "stopping in good order" in out(tmp_path)
    (record,) = json.loads((tmp_path / "record/summary.json").read_text())["runs"]
    assert record["status"] == "completed"


def test_a_job_that_is_cancelled_is_not_started_again(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, 2000)
    wait_until(lambda: has_checkpoint(tmp_path), "a checkpoint")
    slurm.say("scancel", job)
    wait_until(lambda: slurm.state(job) == "CANCELLED", "the job is cancelled")
    wait_until(lambda: not ranks(tmp_path), "the ranks have left")
    (record,) = json.loads((tmp_path / "record/summary.json").read_text())["runs"]
    assert record["status"] == "stopped"

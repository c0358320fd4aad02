"""A Slurm cluster of two nodes on this machine, with daemons and keys of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.free_ports import free_port
from tests.support.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_missing = [name for name in PROGRAMS if shutil.which(name) is None]
needs_slurm = pytest.mark.skipif(
    bool(_missing) or os.geteuid() != 0, reason=f"needs root and Slurm; missing: {_missing}"
)

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster; its commands need `variables`."""

    variables: dict[str, str]

    def say(self, *command: str, cwd: Path | None = None) -> str:
        """Return what a command of Slurm prints."""
        environment = {**os.environ, **self.variables}
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment, cwd=cwd
        )
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as PENDING."""
        shown = self.say("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def end_jobs(self) -> None:
        """End all jobs, which would outlive the daemons."""
        self.say("scancel", "--user=root", "--full", "--signal=KILL")
        self.say("scancel", "--user=root")
        wait_until(lambda: not self.say("squeue", "--noheader"), "no job is left")


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Start the daemons, with all that they write below `folder`; end them at the exit."""
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(64))
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(folder=folder, port=free_port(), first=free_port(), second=free_port())
    )
    variables = {"SLURM_CONF": str(configuration)}
    # Nodes' names are not known to this machine, so the ranks are told where rank 0 is.
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    slurm = Slurm({**variables, **master})
    munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    commands = [
        [*munged, f"--socket={folder}/munge.socket"],
        ["slurmctld", "-D", "-i"],
        *(["slurmd", "-D", "-N", node] for node in ("n0", "n1")),
    ]
    with contextlib.ExitStack() as running:
        for number, command in enumerate(commands):
            log = running.enter_context((folder / f"daemon-{number}.out").open("w"))
            process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=log, stderr=log
            )
            running.callback(process.wait)
            running.callback(process.terminate)
            if number == 0:
                wait_until((folder / "munge.socket").exists, "munged listens")
        wait_until(
            lambda: slurm.say("sinfo", "--noheader", "--states=idle", "--format=%D") == "2",
            "both nodes are idle",
        )
        try:
            yield slurm
        finally:
            slurm.end_jobs()

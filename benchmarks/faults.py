"""A campaign of faults: a seed and a number name a trial, which holds a run to its promises.

A trial is a small training under one strategy, as a command or under torchrun, and one fault at an
operation of one rank (`orchestra.engines.processes.injection`). Then the same command resumes it.
The promises: nothing hangs, no process, shared memory or temporary file is left, one line names the
first cause, the exit status is right, and the resumed run goes on from the newest whole checkpoint
and ends with all samples of its budget.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tests.support import warm
from tests.support.commands import Ended, Started
from tests.support.paths import ROOT
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.options import bench_parser, read_options, write_figures
from orchestra.cli.main import guarded
from orchestra.cli.terminal import print_table, progress_line
from orchestra.engines.injection import LOG, VARIABLE, Inject, injected
from orchestra.engines.processes.watcher import BY_MESSAGES
from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.strategies.base import refusal_of
from orchestra.strategies.registry import STRATEGIES
from orchestra.tasks import Task, TensorData
from orchestra.trainer.checkpoint_files import DamagedCheckpoint, complete, verify

STEPS, BATCH, EVERY = 24, 4, 5
SAMPLES = 96
LIMIT_SECONDS = 40.0  # for a run of less than a second, on a busy machine: it hangs
CAUSE_SECONDS = 5.0  # from the fault until the run has ended and told why
PATIENCE = 8.0
LEFT_SECONDS = 5.0  # for the last processes to end
ASYNCHRONOUS = "consistency='asynchronous'"

SETTINGS: dict[str, tuple[str, int]] = {
    "single": ("Single()", 1),
    "ring": ("AllReduce('ring')", 3),
    "native": ("AllReduce('native')", 2),
    "PowerSGD": ("AllReduce('ring', compression=PowerSGD(2))", 3),
    "top-k": ("AllReduce('ring', compression=TopK(0.1))", 3),
    "ZeRO-1": ("AllReduce('ring', shard='optimizer')", 3),
    "ZeRO-3": ("AllReduce('ring', shard='parameters')", 3),
    "backup": ("AllReduce('ring', backup=1)", 3),
    "server": ("ParameterServer()", 3),
    "servers beside": ("ParameterServer(servers=2, placement='beside')", 3),
    "asynchronous": (f"ParameterServer({ASYNCHRONOUS})", 3),
    "asynchronous beside": (f"ParameterServer({ASYNCHRONOUS}, placement='beside')", 3),
    "bounded": ("ParameterServer(consistency='bounded', staleness=4)", 3),
    "replicas": ("ParameterServer(servers=2, replicas=1)", 4),
    "local SGD": ("LocalSGD(4)", 3),
    "DiLoCo": ("LocalSGD(4, outer=Nesterov(0.7, 0.9), overlap=2)", 3),
    "gossip": ("Gossip()", 3),
    "push-sum": ("StochasticGradientPush(overlap=1)", 3),
    "pairwise": ("PairwiseAveraging()", 3),
    "elastic": ("ElasticAveraging(4)", 3),
    "Hop": ("Hop(staleness=4, skip=4)", 3),
    "Prague": ("Prague(2)", 3),
    "Hogwild": ("Hogwild()", 2),
    "pipeline": ("Pipeline(microbatches=2)", 3),
    "switch": (f"Switch(AllReduce(), ParameterServer({ASYNCHRONOUS}), when=AfterSteps(8))", 3),
    "auto": ("Auto([AllReduce('ring'), LocalSGD(4)], samples=[9, 1])", 2),
    "in groups: ring": ("AllReduce('ring')", 3),
    "in groups: top-k": ("AllReduce('ring', compression=TopK(0.1))", 3),
    "in groups: tree": ("AllReduce('tree')", 4),
    "in groups: local SGD": ("LocalSGD(4)", 3),
    "in groups: DiLoCo": ("LocalSGD(4, outer=Nesterov(0.7, 0.9))", 3),
    "in groups: fragments": ("LocalSGD(4, fragments=2)", 3),
    "in groups: gossip": ("Gossip()", 3),
    "in groups: push-sum": ("StochasticGradientPush()", 3),
    "in groups: server": ("ParameterServer()", 3),
    "in groups: servers beside": ("ParameterServer(servers=2, placement='beside')", 3),
    "in groups: phases": (
        "Switch(AllReduce(), ParameterServer(), when=AfterSteps(8), moments='reset')", 3
    ),
    "in groups: asynchronous": (f"ParameterServer({ASYNCHRONOUS})", 3),
    "in groups: elastic": ("ElasticAveraging(4)", 3),
    "in groups: pairwise": ("PairwiseAveraging()", 3),
    "in groups: ZeRO-3": ("AllReduce('ring', shard='parameters')", 3),
    "in groups: switch": (
        f"Switch(AllReduce(), ParameterServer({ASYNCHRONOUS}), when=AfterSteps(8))", 3
    ),
    "torchrun ring": ("AllReduce('ring')", 2),
    "torchrun asynchronous": (f"ParameterServer({ASYNCHRONOUS})", 3),
    "own loop ring": ("AllReduce('ring')", 2),
}  # fmt: skip
"""The name of a setting in tables -> strategy and ranks; the first words may say who starts it, or
that those who are left go on together (`min_ranks`)."""

FAULTS: dict[str, dict[str, Any]] = {
    "kill a rank": {"action": "kill"},
    "kill the leader": {"action": "kill"},
    "kill a server": {"action": "kill"},
    "stop": {"action": "stop", "seconds": 600.0},
    "pause": {"action": "stop", "seconds": 1.0},
    "delay": {"action": "delay", "seconds": 0.5},
    "cut": {"action": "cut"},
    "reset": {"action": "reset"},
    "cut the watcher": {"action": "cut", "target": "watcher"},
    "strangers": {"action": "strangers"},
    "NaN": {"action": "nan", "at": "gradient"},
    "full disk": {"action": "full_disk", "at": "write"},
    "truncated file": {"action": "truncate", "at": "write"},
    "exception": {"action": "raise", "at": "gradient"},
    "kill the launcher": {"action": "kill", "target": "launcher"},
    "kill the fork server": {"action": "kill", "target": "fork server"},
    "SIGTERM to all": {"action": "terminate", "target": "group"},
    "SIGTERM to a rank": {"action": "terminate"},
    "Ctrl-C": {"action": "interrupt", "target": "group"},
    "damaged checkpoint": {"action": "kill"},  # the newest one, before the run is resumed
    "kill while stopping": {"action": "kill"},  # after SIGTERM
    "kill while resuming": {"action": "kill"},  # once more
    "kill and restart": {"action": "kill"},
}
"""The name of a fault in tables -> what is injected; the operation is drawn unless it is named."""

TO_AGENT = {
    "kill the launcher": signal.SIGKILL,
    "kill the fork server": signal.SIGKILL,
    "SIGTERM to all": signal.SIGTERM,
    "Ctrl-C": signal.SIGINT,
}
"""What torchrun's agent gets in place of a fault in the launcher. The campaign sends it, while the
operation is delayed: a rank that is forked by `tests.support.warm` has another parent."""
HARMLESS = ("pause", "delay", "strangers")


def task(width: int = 24) -> Task:
    """Random vectors, and a network of four layers; of 700 KB at a `width` of 250."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 16, generator=generator)
    labels = torch.randint(0, 4, (SAMPLES,), generator=generator)

    def model() -> nn.Module:
        hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(nn.Linear(16, width), nn.Tanh(), *hidden, nn.Linear(width, 4))

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(module(batch[0]), batch[1])

    return Task(
        model=model, train=TensorData(inputs, labels), loss=loss, collate=TensorData.collate
    )


@dataclass(frozen=True)
class Trial:
    """A training and its fault, which `seed` and `number` choose."""

    seed: int
    number: int
    setting: str
    fault: str
    inject: Inject
    more: tuple[Inject, ...]  # before it, or in the resumed run
    shared_memory: bool
    width: int  # of the model
    compiled: bool = True  # whether compiled code may move collectives between hosts

    @staticmethod
    def of(seed: int, number: int) -> Trial:
        """Return trial `number` of the campaign `seed`. The numbers of a campaign go through all
        pairs of setting and fault."""
        draw = random.Random(f"{seed} {number}")
        settings = list(SETTINGS)
        faults = list(FAULTS)
        random.Random(seed).shuffle(settings)
        # Both counts have no common factor: every pair comes once in their product.
        setting, fault = settings[number % len(settings)], faults[number % len(faults)]
        strategy, ranks = SETTINGS[setting]
        roles = parse(strategy, STRATEGIES, where="campaign").roles(ranks)
        shared = draw.random() < 0.6 or setting == "Hogwild"
        rank, width = draw.randrange(ranks), draw.choice((24, 24, 250))
        if fault == "kill the leader":
            rank = roles.leader
        elif fault == "kill a server" and roles.servers:
            rank = draw.choice(roles.servers)
        agent = fault in TO_AGENT and setting.split()[0] in ("torchrun", "own")
        what = {"action": "delay", "seconds": 2.0} if agent else FAULTS[fault]
        inject = _inject(draw, what, rank, works=rank in roles.workers, shared=shared)
        more = []
        if fault == "kill while stopping":
            inject = Inject("kill", rank=rank, at="write", number=draw.randint(2, 12))
            more.append(Inject("terminate", rank=rank, at="wait", number=draw.randint(1, 20)))
        if inject.action == "terminate" or fault == "kill while stopping":
            # The rank is told to stop within half a second, when such a run may be over.
            signal_at = inject if inject.action == "terminate" else more[0]
            held = replace(signal_at, action="delay", number=signal_at.number + 1, seconds=0.8)
            more.append(held)
        if fault == "kill while resuming":
            at = draw.choice(("start", "wait"))
            nth = draw.randint(1, 12) if at == "wait" else 1
            where: dict[str, Any] = {"at": at, "number": nth}
            more.append(Inject("kill", rank=draw.randrange(ranks), **where))
        return Trial(seed, number, setting, fault, inject, tuple(more), shared, width)

    @property
    def strategy(self) -> str:
        return SETTINGS[self.setting][0]

    @property
    def ranks(self) -> int:
        return SETTINGS[self.setting][1]

    @property
    def starter(self) -> str:
        """Who starts the ranks: "torchrun", a script of the user's ("own"), or the command."""
        word = self.setting.split()[0]
        return word if word in ("torchrun", "own") else "command"

    @property
    def in_groups(self) -> bool:
        """Whether those that are left go on together."""
        return self.setting.startswith("in groups")

    @property
    def least(self) -> int:
        """The fewest ranks that the strategy runs on."""
        strategy = parse(self.strategy, STRATEGIES, where="campaign")
        return next(n for n in itertools.count(1) if refusal_of(strategy, n) is None)

    def command(self) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--log-dir=logs"]
        torchrun.append(f"--nproc-per-node={self.ranks}")
        if self.starter == "own":
            script = str(ROOT / "benchmarks" / "fault_loop.py")
            return [sys.executable, *torchrun, script, self.strategy]
        start = torchrun if self.starter == "torchrun" else []
        words = [sys.executable, *start, "-m", "orchestra", "train", "--strategy", self.strategy]
        words += ["--task", f"benchmarks.faults:task({self.width})", "--out", "out"]
        if self.starter == "command":
            words += ["--ranks", str(self.ranks)]
            words += ["--max-restarts", "1"] * (self.fault == "kill and restart")
            words += ["--set", f"min_ranks={self.least}"] * self.in_groups
        for setting in (
            f"steps={STEPS}", f"batch_size={BATCH}", f"checkpoint_every={EVERY}", "snapshots=2",
            f"patience={PATIENCE}", "optimizer=SGD(lr=0.01)",
        ):  # fmt: skip
            words += ["--set", setting]
        return words


def _inject(
    draw: random.Random, fault: dict[str, Any], rank: int, *, works: bool, shared: bool
) -> Inject:
    """Choose an operation of `rank` for the fault."""
    # Without a step of its own, a rank serves: it sends and receives.
    kinds = ["wait", *(("gradient", "step", "collective") if works else ("receive", "send"))]
    if works and not shared:
        kinds += ["send", "receive"]
    at = fault.get("at") or draw.choice([*kinds, "write", "start"])
    most = {"start": 1, "gradient": 20, "step": 20, "write": 16}.get(at, 100)
    number = round(math.exp(draw.uniform(0.0, math.log(most))))
    if most < 100:
        number = draw.randint(1, most)
    return Inject(**{"rank": rank, "at": at, "number": number, **fault})


@dataclass
class Result:
    """What came of a trial; `problems` are the promises that were broken."""

    trial: Trial
    fired: bool = False  # the rank came to the operation
    status: int | None = None
    outcome: str = ""  # completed, failed, stopped, or empty without a record
    cause: str = ""
    seconds: float = 0.0  # from the fault to the end of the command
    took: float = 0.0  # the trial, with its resumption
    problems: list[str] = field(default_factory=list)

    def require(self, holds: object, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


def run_trial(trial: Trial, folder: Path, *, timed: bool = True) -> Result:
    """Carry out `trial` in the new `folder`.

    With `timed` a cause that takes longer than `CAUSE_SECONDS` is a problem, too.
    """
    result = Result(trial)
    began = time.monotonic()
    log = folder / "injected"
    faults = [trial.inject]
    if trial.fault != "kill while resuming":
        faults += trial.more
    variables = {VARIABLE: ";".join(map(repr, faults)), LOG: str(log)}
    ended = _run(trial, folder, variables, result)
    over = time.monotonic()
    if ended is None:
        return result
    times = {line["fault"]: line["monotonic"] for line in injected(log)}
    result.fired = repr(trial.inject) in times
    if result.fired:
        result.seconds = over - times[repr(trial.inject)]
    entry = _entry(folder)
    result.status, result.outcome = ended.status, entry.get("status", "")
    CHECKS[trial.starter](result, ended, entry, folder)
    quick = trial.inject.action not in ("delay", "strangers", "terminate", "interrupt")
    if timed and result.fired and quick and result.outcome != "completed":
        # Others wait for a stopped rank that the run can do without.
        limit = CAUSE_SECONDS + 3 * PATIENCE * (trial.fault == "stop")
        limit += 40.0 * (trial.starter != "command")
        result.require(result.seconds < limit, f"it took {result.seconds:.1f} s to tell the cause")
    if result.outcome != "completed" or trial.starter == "own":
        _resume(trial, folder, result)
    result.took = time.monotonic() - began
    return result


def _run(
    trial: Trial, folder: Path, variables: dict[str, str], result: Result, what: str = "the run"
) -> Ended | None:
    """Run the command to its end; None if it hangs. Look for what it leaves."""
    temporary = folder / f"tmp-{'-'.join(what.split())}"
    temporary.mkdir()
    shared = "1" if trial.shared_memory else "0"
    given = {"TMPDIR": str(temporary), "ORCHESTRA_SHARED_MEMORY": shared, **variables}
    if not trial.compiled:
        given["ORCHESTRA_COMPILED"] = "0"
    given.update(warm.variables())
    named = _in_shared_memory()
    with Started(trial.command(), folder, given) as command:
        if variables and trial.starter != "command" and trial.fault in TO_AGENT:
            log = Path(variables[LOG])
            while not log.exists() and command.process.poll() is None:
                time.sleep(0.01)
            command.process.send_signal(TO_AGENT[trial.fault])
        try:
            # An agent of torchrun gives a rank that is stopped 30 s after SIGTERM.
            limit = LIMIT_SECONDS + 40.0 * (trial.starter != "command")
            status = command.process.wait(limit)
        except subprocess.TimeoutExpired:
            result.problems.append(f"{what} hangs: {_last(command.err())}")
            return None
        until = time.monotonic() + LEFT_SECONDS
        while (left := command.alive()) and time.monotonic() < until:
            time.sleep(0.02)
        result.require(not left, f"{what} leaves {len(left)} processes")
        ended = Ended(status, "", command.err())
    # Other programs use it as well: what torch and Orchestra name after a process that has ended.
    new = [name for name in _in_shared_memory() - named if re.search("orchestra|torch_", name)]
    result.require(not new, f"{what} leaves shared memory: {new}")
    names = sorted(path.name for path in temporary.iterdir() if not _of_torchrun(path))
    result.require(not names, f"{what} leaves temporary files: {names}")
    return ended


def _in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _of_torchrun(path: Path) -> bool:
    return path.name.startswith(("torchelastic", "tmp"))


def _entry(folder: Path) -> dict[str, Any]:
    """Return the run in `summary.json`; empty if there is none."""
    try:
        (entry,) = json.loads((folder / "out" / "summary.json").read_text())["runs"]
    except FileNotFoundError:
        return {}
    return dict(entry)


def _told(error: str) -> list[str]:
    lines = [line for line in error.splitlines() if line.startswith("orchestra: ")]
    return [line for line in lines if BY_MESSAGES not in line]


def _last(error: str) -> str:
    return (_told(error) or [""])[-1]


def _is_cause(line: str) -> bool:
    notice = "going on" in line or re.search(r"rank \d serves the slice", line)
    return bool(re.match(r"orchestra: (rank \d|the fork server)", line)) and not notice


def _complete(result: Result, entry: dict[str, Any], what: str) -> None:
    budget = STEPS * BATCH * result.trial.ranks
    result.require(entry.get("status") == "completed", f"{what} is {entry.get('status')}")
    samples = entry.get("samples", 0)
    # What a rank had done that the others go on without is done, and in nobody's account.
    goes_on = entry.get("left_out") and not (result.trial.in_groups and entry["synchronous"])
    if not goes_on and result.trial.setting != "backup":
        result.require(samples == budget, f"{what} has {samples} of {budget} samples")


def _names(trial: Trial) -> str:
    """Return a pattern of the line that tells the cause of the fault."""
    rank = f"rank {trial.inject.rank} on {re.escape(socket.gethostname())}"
    lost = rf"{rank} (was killed by SIGKILL|is gone)"
    match trial.fault:
        case "stop":
            return rf"{rank} (is|was still) stopped"
        case "cut" | "reset":
            return r"rank \d+ on \S+ (failed: rank \d+ is gone|lost its connection to rank \d+)"
        case "cut the watcher":
            return rf"{rank} (exited with status 1|is gone|closed its control connection)"
        case "NaN":
            return r"rank \d+ on \S+ failed: (the loss became nan|parameters are NaN)"
        case "full disk":
            return rf"{rank} failed: cannot write .*: No space left on device"
        case "exception":
            return rf"{rank} failed: Injected: injected at gradient"
        case "kill the fork server":
            return r"the fork server, .*, was killed by SIGKILL"
    return lost


def _check_command(result: Result, ended: Ended, entry: dict[str, Any], folder: Path) -> None:
    """Check the end of `orchestra train` that has started the ranks itself."""
    trial, lines = result.trial, _told(ended.err)
    result.cause = _last(ended.err)
    # A failure of the program comes with its traceback; what the system does to it does not.
    if trial.fault != "exception":
        result.require("Traceback" not in ended.err, "a traceback is printed")
    if trial.fault == "kill the launcher" and result.fired:
        result.require(ended.status in (0, -signal.SIGKILL), f"exit status {ended.status}")
        return
    stopped = int(trial.fault == "Ctrl-C")
    status = {"completed": 0, "stopped": stopped, "failed": 1}.get(result.outcome)
    result.require(ended.status == status, f"exit status {ended.status}, though {result.outcome!r}")
    if trial.fault == "kill while stopping":
        result.require(sum(map(_is_cause, lines)) == (result.outcome == "failed"), f"told: {lines}")
    elif not result.fired or trial.fault in HARMLESS:
        result.require(not entry.get("left_out"), f"left out: {entry.get('left_out')}")
        _complete(result, entry, "the run")
    elif trial.fault == "kill and restart":
        _complete(result, entry, "the run")
        result.require(len(entry.get("restarts", ())) <= 1, f"{entry.get('restarts')}")
    elif trial.inject.action in ("terminate", "interrupt"):
        result.require(result.outcome in ("stopped", "completed"), f"{result.outcome}: {lines}")
        # The run may have ended before the signal was heard of.
        told = sum("stopping in good order" in line for line in lines)
        result.require(told >= (result.outcome == "stopped"), f"told: {lines}")
        result.require(told < 2, f"told: {lines}")
    elif result.outcome == "completed":
        _complete(result, entry, "the run")
        if trial.in_groups:
            _check_lines(result, folder)
        spared = str(trial.inject.rank) in entry.get("left_out", {})
        killed = trial.inject.action in ("kill", "truncate") and trial.inject.target == "rank"
        result.require(spared or not killed, "completed, though a rank that it needs was killed")
        if trial.fault in ("exception", "full disk", "kill the fork server"):
            result.require(False, f"{trial.fault}: completed all the same")
    else:
        result.require(re.search(_names(trial), result.cause), f"told: {result.cause}")
        result.require(sum(map(_is_cause, lines)) == 1, f"told: {lines}")
        if trial.in_groups and trial.inject.at in ("gradient", "step"):
            result.require(trial.fault not in ("kill a rank", "cut", "reset"), "it ended by a loss")


def _check_lines(result: Result, folder: Path) -> None:
    """Check that each rank which is there at the end has recorded each step once."""
    for path in (folder / "out").glob("steps-rank-*.jsonl"):
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        result.require(steps == sorted(set(steps)), f"{path.name}: steps {steps}")


def _check_torchrun(result: Result, ended: Ended, entry: dict[str, Any], folder: Path) -> None:
    """Check the end of `orchestra train` on ranks that torchrun has started."""
    trial, lines = result.trial, _told(ended.err)
    result.cause = (lines or [""])[0]
    if trial.fault == "kill while stopping":
        result.require(lines, "nothing is told")
    elif not result.fired or trial.fault in HARMLESS:
        result.require(ended.status == 0, f"exit status {ended.status}: {result.cause}")
        _complete(result, entry, "the run")
    elif trial.fault in ("SIGTERM to all", "SIGTERM to a rank", "Ctrl-C"):
        # The agent ends by the signal that it got, and its ranks with status 0.
        result.require(result.outcome in ("stopped", "completed"), f"{result.outcome}: {lines}")
    elif result.outcome == "completed":
        _complete(result, entry, "the run")
    elif trial.fault not in TO_AGENT:
        result.require(ended.status != 0, "exit status 0")
        result.require(lines, "nothing is told")


def _check_own(result: Result, ended: Ended, entry: dict[str, Any], folder: Path) -> None:
    """Check the end of a loop of the user's own, which writes no record."""
    result.cause = (_told(ended.err) or [""])[0]
    result.outcome = "completed" if ended.status == 0 else "failed"
    if "stopping in good order" in ended.err:
        result.outcome = "stopped"
    result.require("Traceback" not in ended.err or ended.status, "a traceback, and exit status 0")
    if result.trial.fault == "kill while stopping":
        return
    if not result.fired or result.trial.fault in HARMLESS or result.trial.fault == "NaN":
        result.require(ended.status == 0, f"exit status {ended.status}: {result.cause}")
    elif result.trial.inject.action == "kill":
        result.require(result.cause, "nothing is told")
    elif result.trial.fault == "exception":
        result.require(ended.status == 1, f"exit status {ended.status}")
        result.require("Injected: injected at gradient" in ended.err, "the exception is not told")


CHECKS: dict[str, Callable[[Result, Ended, dict[str, Any], Path], None]] = {
    "command": _check_command,
    "torchrun": _check_torchrun,
    "own": _check_own,
}


def _resume(trial: Trial, folder: Path, result: Result) -> None:
    """Run the same command again, without a fault: it goes on from the newest checkpoint."""
    checkpoints = folder / "out" / "checkpoints"
    found = sorted(complete(checkpoints), reverse=True) if checkpoints.exists() else []
    if trial.fault == "damaged checkpoint" and found:
        file = next((checkpoints / f"{found[0]:04d}").glob("rank-?.safetensors"))
        os.truncate(file, file.stat().st_size // 2)
    whole = [index for index in found if _is_whole(checkpoints, index)]
    lost = len(found) - len(whole)
    result.require(
        lost == (trial.fault == "damaged checkpoint" and bool(found)), f"{lost} damaged checkpoints"
    )
    if trial.fault == "kill while resuming":
        again = {VARIABLE: repr(trial.more[0])}
        ended = _run(trial, folder, again, result, "the run that is killed again")
        if ended is None or ended.status == 0:  # over before
            return
        result.require(trial.starter == "own" or _told(ended.err), "nothing is told")
    ended = _run(trial, folder, {}, result, "the resumed run")
    if ended is None:
        return
    result.require(ended.status == 0, f"resumed: exit status {ended.status}: {_last(ended.err)}")
    if trial.starter == "own":
        return
    entry = _entry(folder)
    _complete(result, entry, "the resumed run")
    if whole:
        told = re.search(rf"resumed from checkpoint {whole[0]}\b", ended.err)
        result.require(told, f"not from {whole[0]}")


def _is_whole(folder: Path, index: int) -> bool:
    try:
        verify(folder, index)
    except DamagedCheckpoint:
        return False
    return True


# The command

DESCRIPTION = """\
Disturb small trainings under every strategy by one fault each, at an operation of one rank, and
check that each ends as it should, and resumes. A number names a trial of a seed, and repeats it.
"""


def campaign(trials: Sequence[Trial], tell: Callable[[str, float], None]) -> Iterator[Result]:
    """Carry out the trials, and yield what each has shown."""
    for place, trial in enumerate(trials):
        with tempfile.TemporaryDirectory(prefix="orchestra-faults-") as name:
            try:
                result = run_trial(trial, Path(name))
            except Exception as error:  # of this trial alone
                problem = f"{type(error).__name__}: {error}"
                result = Result(trial, problems=[problem])
        if result.problems:
            print(f"{trial.number} {trial.setting}, {trial.fault}: {'; '.join(result.problems)}")
            print(f"    {trial.inject!r}", flush=True)
        tell(f"{trial.setting}, {trial.fault}", (place + 1) / len(trials))
        yield result


def counts_alike(trial: Trial) -> bool:
    """Return whether the operation of the fault is the same one, whatever moves collectives: where
    it is compiled code, they send no messages of their own."""
    alike = trial.inject.at in ("start", "gradient", "collective", "step", "write")
    return alike and not trial.more and not trial.shared_memory


def compared(results: Sequence[Result]) -> int:
    """Print the trials that end otherwise with compiled code than without, which take turns in
    `results`; return how many do."""
    unlike = 0
    for one, other in zip(results[::2], results[1::2], strict=False):  # the last may be alone
        ends = [(r.fired, r.status, r.outcome, _without_places(r.cause)) for r in (one, other)]
        if ends[0] != ends[1]:
            unlike += 1
            print(
                f"{one.trial.number} {one.trial.setting}, {one.trial.fault}, {one.trial.inject!r}"
            )
            print(f"    compiled:    {ends[0]}\n    by messages: {ends[1]}")
    print(f"{len(results) // 2} trials both ways, {unlike} ended otherwise")
    return unlike


def _without_places(cause: str) -> str:
    return re.sub(r"/\S*/out/|\d+(\.\d+)? s\b", "", cause)


def print_results(results: Sequence[Result]) -> None:
    """Print a table of faults by how the trials ended, one of settings, and what has failed."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[result.trial.fault].append(result)
    _print_groups("by fault", {name: groups[name] for name in FAULTS if name in groups})
    groups.clear()
    for result in results:
        groups[result.trial.setting].append(result)
    _print_groups("by setting", {name: groups[name] for name in SETTINGS if name in groups})
    failed = [result.trial.number for result in results if result.problems]
    print(f"{len(results)} trials, {len(failed)} broke a promise: {failed or 'none'}")


def _print_groups(title: str, groups: dict[str, list[Result]]) -> None:
    headings = [title, "trials", "reached", "completed", "stopped", "failed", "median s", "worst s",
                "broken"]  # fmt: skip
    lines = []
    for name, group in groups.items():
        outcomes = Counter(result.outcome for result in group)
        seconds = sorted(r.seconds for r in group if r.fired and r.outcome != "completed")
        lines.append(
            [
                name, str(len(group)), str(sum(result.fired for result in group)),
                str(outcomes["completed"]), str(outcomes["stopped"]), str(outcomes["failed"]),
                f"{seconds[len(seconds) // 2]:.1f}" if seconds else "",
                f"{seconds[-1]:.1f}" if seconds else "",
                str(sum(bool(result.problems) for result in group)),
            ]
        )  # fmt: skip
    print_table("", headings, lines)


@dataclass(frozen=True)
class Line:
    """A trial in the file of figures."""

    number: int
    setting: str
    fault: str
    inject: str
    fired: bool
    status: int | None
    outcome: str
    cause: str
    seconds: float
    took: float
    problems: list[str]


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("python -m benchmarks.faults", DESCRIPTION)
    parser.option("--count", "N", "trials (default: 100)", type=int, default=100)
    parser.option("--seed", "S", "of the campaign (default: 0)", type=int, default=0)
    parser.option("--only", "NUMBER", "this trial alone", type=int)
    parser.option("--first", "NUMBER", "the first trial (default: 0)", type=int, default=0)
    parser.option("--setting", "TEXT", "only trials of settings whose name has this", default="")
    parser.flag(
        "--both-ways", "each trial with compiled collectives and without; only over sockets, and "
        "faults at operations that both count alike",
    )  # fmt: skip
    options = read_options(parser, arguments)
    if options.count < 1 or options.first < 0:
        raise InputError("--count has to be 1 at least, and --first 0")
    wanted = (n for n in itertools.count(options.first)
              if options.setting in Trial.of(options.seed, n).setting)  # fmt: skip
    if not any(options.setting in name for name in SETTINGS):
        raise InputError(
            f"--setting {options.setting}: no setting's name has it: {', '.join(SETTINGS)}"
        )
    if options.both_ways:
        wanted = (n for n in wanted if counts_alike(Trial.of(options.seed, n)))
    numbers = list(itertools.islice(wanted, options.count))
    trials = [
        Trial.of(options.seed, n) for n in (numbers if options.only is None else [options.only])
    ]
    if options.both_ways:
        trials = [replace(trial, compiled=way) for trial in trials for way in (True, False)]
    results: list[Result] = []
    try:
        with progress_line() as tell:
            for result in campaign(trials, tell):
                results.append(result)
    finally:  # also what there is at Ctrl-C
        print_results(results)
        _write(options.json, results)
    unlike = compared(results) if options.both_ways else 0
    return 1 if unlike or any(result.problems for result in results) else 0


def _write(path: Path | None, results: Sequence[Result]) -> None:
    lines = [
        Line(
            r.trial.number, r.trial.setting, r.trial.fault, repr(r.trial.inject), r.fired, r.status,
            r.outcome, r.cause, r.seconds, r.took, r.problems,
        )
        for r in results
    ]  # fmt: skip
    write_figures(path, "faults", lines)


if __name__ == "__main__":
    sys.exit(guarded(main))

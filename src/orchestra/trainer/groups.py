"""A session whose ranks may be lost, or join: it goes on in the next group of them.

It goes on from what each rank keeps (`trainer/regrouping.py`), with the same objects. Under other
strategies it goes on from the newest checkpoint, with a new session, as a restarted run does. Under
some of these the ranks write that checkpoint after the loss (`AfterLoss.HANDED_OVER`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestra import exchange
from orchestra.collectives import all_reduce
from orchestra.coordinator.batches import HeldWork, rebuilt
from orchestra.data.feed import open_samples
from orchestra.errors import GroupChanged, PeerLost, RunFailed
from orchestra.optimizers.state import capture, random_state, restore
from orchestra.records.report import Membership, Regrouping
from orchestra.settings.base import from_plain, to_plain
from orchestra.strategies.base import ModelPart, Roles, Strategy
from orchestra.strategies.phases import Phases
from orchestra.strategies.traits import AfterLoss, Partition
from orchestra.tasks.task import Task
from orchestra.trainer import checkpoints, setup
from orchestra.trainer.checkpoint_files import LOST, DamagedCheckpoint, Manifest, verify
from orchestra.trainer.members import MemberFiles, Survivors, handed_over
from orchestra.trainer.recorder import Order
from orchestra.trainer.regrouping import (
    NO_STEPS,
    GroupStanding,
    KeptSteps,
    NoticedChange,
    Retreat,
    RoundStart,
    StepStart,
    TakenOver,
    take_mean,
    take_moments,
    with_own,
)
from orchestra.trainer.session import Session, role_of
from orchestra.trainer.settings import Run, evenly_due
from orchestra.trainer.trace import Trace
from orchestra.transports.tags import Tag
from orchestra.worker.layout import Share
from orchestra.worker.runtime import RankActivity, Runtime
from orchestra.worker.worker import Worker

NO_QUEUE = HeldWork(-1)
"""Stands for what a rank holds that takes no batches from a queue."""


@dataclass(frozen=True)
class Before:
    """What a session leaves to the one of the next group, where that goes on from a checkpoint.

    A newcomer knows of no `change`, and nothing of the `run`.
    """

    task: Task
    trace: Trace
    setup: dict[str, float]
    change: NoticedChange | None
    run: dict[str, Any]  # see `ElasticSession.of_the_run`


class ElasticSession(Session):
    """A session that goes on in the next group of ranks, where the run can.

    A rank that `enters` a run under way has no state of it. One that goes on from a checkpoint in a
    new group knows what was `before`.
    """

    def __init__(
        self,
        runtime: Runtime,
        run: Run,
        strategy: Strategy,
        folder: Path,
        *,
        enters: bool = False,
        before: Before | None = None,
    ) -> None:
        self._enters = enters  # until it is taken in
        self._before = before
        self._rests = False  # all ranks do, and there is a checkpoint of it
        super().__init__(runtime, run, strategy, folder)

    # Its beginning

    def _first_roles(self) -> Roles:
        return Roles((1.0,)) if self._enters else super()._first_roles()

    def _load_task(self) -> Task:
        return super()._load_task() if self._before is None else self._before.task

    def _intercepted(self, repeats: Order | None) -> Runtime:
        if self._before is not None:
            self.trace = self._before.trace  # which goes on
        return super()._intercepted(repeats)

    def _place(self, module: nn.Module) -> ModelPart | Share | None:
        return None if self._enters else super()._place(module)

    def _check_target(self, module: nn.Module) -> None:
        if not self._enters:
            super()._check_target(module)

    def _join(self) -> None:
        if self._before is not None:
            self._learn_from_others(self._before)
        if not self._enters:
            super()._join()

    def _join_at_the_beginning(self) -> Phases:
        if self._before is not None:
            self._truncate_records({}, 0)
        return super()._join_at_the_beginning()

    def begin(self) -> None:
        if self._before is None:
            super().begin()
        else:
            self._go_on_with_stopwatch()
            self._start_together()
            self.setup = self._before.setup
        if not self._is_elastic:
            return
        if self.run.after_loss.keeps_state:
            self.retreat = self._make_retreat()
        elif not self.checkpoints.all_have_folder("a loss ends the run, and nobody can join it"):
            return
        elif self.run.after_loss.hands_over:
            self.retreat = StepStart(self.worker, self._live_state)
        elif self._before is None and not self.training.checkpoint_every:
            self._tell_of_checkpoints()
        self._tell_that_it_is_elastic()

    def _tell_of_checkpoints(self) -> None:
        """Let the user know that a loss costs all that was done."""
        in_place = self.run.after_loss is AfterLoss.IN_PLACE
        if self.runtime.rank == self.roles.workers[0] and not in_place:
            self.runtime.reporter.notice(
                f"min_ranks: {self.strategy!r} goes on from checkpoints, and there are none: set "
                "checkpoint_every"
            )

    def enter(self, activity: RankActivity) -> ElasticSession:
        """Get ready; wait as `activity` says until the ranks of a run take this one in; return the
        session that goes on from their state."""
        self._warm_up()
        self.trace.start()
        self._tell_that_it_is_elastic()
        self.runtime.reporter.activity(activity)
        return self.in_next_group(GroupChanged())

    def _what_it_trains(self) -> str:
        """Return a digest of what all ranks of a group have to have in common."""
        module, run = self.worker.module, self.run
        named = [*module.named_parameters(), *module.named_buffers()]
        if run.strategy.traits().partition is not Partition.REPLICATED:
            named = []  # each has a part of its own, and a newcomer the whole
        shapes = [(name, str(each.dtype), tuple(each.shape)) for name, each in named]
        text = repr((run.task, run.strategy, run.seed, self.epoch_samples, shapes))
        return hashlib.sha256(text.encode()).hexdigest()

    def _tell_that_it_is_elastic(self) -> None:
        rests = not self.run.after_loss.keeps_state
        self.runtime.reporter.elastic(self._what_it_trains(), rests=rests)

    @property
    def _is_elastic(self) -> bool:
        return self.run.is_elastic and self.engine.regroup is not None

    def in_next_group(self, error: PeerLost | GroupChanged) -> ElasticSession:
        """Return the session that goes on in the next group, after `error`, from a state that its
        ranks can have. Collective over these. Raises `error` where the run cannot go on.
        """
        if not self._is_elastic:
            raise error
        self.recorder.pause()
        change = None if self._enters else self._noticed()
        if not self.run.after_loss.keeps_state:
            return self._from_checkpoint(error, change)
        if change is not None:
            self._group_change = change
        self._regroup(error)
        return self

    def _is_to_stop(self, *, complete: bool, saved: bool) -> bool:
        reporter = self.runtime.reporter
        if not self._is_elastic or self.run.after_loss.keeps_state:
            return True
        if not complete:  # who has left is not waited for, and each may decide by itself
            return reporter.stop_requested()
        if exchange.wait_for_everyone(self.worker, int(reporter.stop_requested())):
            return True
        if saved:
            reporter.activity(RankActivity.RESTING)
            self._rests = True
            raise GroupChanged()
        return False

    def _from_checkpoint(
        self, error: PeerLost | GroupChanged, change: NoticedChange | None
    ) -> ElasticSession:
        """Go on from the newest checkpoint, as a run does that is started again, in this process.
        A newcomer knows of no `change`."""
        if change is not None:
            self._group_change = change
        told = {} if change is None else self.of_the_run()
        before, engine = Before(self.task, self.trace, self.setup, change, told), self.engine
        hands_over = self.run.after_loss.hands_over
        if not hands_over:
            self._let_go()
        while True:
            try:
                error.__traceback__ = None  # which holds what the program had
                engine.reporter.expendable(False)  # until its strategy says so again
                assert engine.regroup is not None
                engine = engine.regroup(error)
                engine.reporter.activity(RankActivity.SET_UP)
                if hands_over:
                    self.engine = engine
                    self._hand_over(change)
                    self._let_go()
                    hands_over = False
                run = replace(self.run, training=replace(self.training, ranks=engine.ranks))
                session = ElasticSession(engine, run, self.strategy, self.folder, before=before)
                session.begin()
                return session
            except (PeerLost, GroupChanged) as again:  # there is one more change
                error = again

    def _hand_over(self, change: NoticedChange | None) -> None:
        """Write what the ranks of the new group hold as a checkpoint, from which it resumes.

        Collective. Writes nothing where all rested, since their checkpoint is as new, and where
        ranks are in different phases. A newcomer knows of no `change`, and holds nothing.
        """
        consumed, phase, position = -1, 0, self.position
        held: HeldWork | None = None
        if change is not None:
            phase = self.phases.number + 1
            if self.phases.worker.rank in self.phases.roles.workers:
                consumed, held = position.consumed, self.phases.member.held_work()
        worker, loss = self._move_worker(), self.worker.step.loss
        row = consumed, phase, self._rests, loss, *(held or NO_QUEUE)
        rows = exchange.gather_numbers(worker, row, worker.everyone)
        most = max(int(row[0]) for row in rows)
        phases = {row[1] for row in rows if row[1]}
        if most < 0 or len(phases) > 1 or any(row[2] for row in rows):
            return
        donor = next(rank for rank, row in enumerate(rows) if row[0] == most)
        held_by_all = [
            HeldWork(int(dealt), int(first), int(end), bool(pushed))
            for *_, dealt, first, end, pushed in rows
            if dealt != NO_QUEUE.dealt
        ]
        if held_by_all:
            start, owed = rebuilt(held_by_all, most)
            position = replace(position, owed=owed)
            most = start - sum(end - first for first, end in owed)
        self.checkpoints.begin_attempt(donor)
        if change is None:
            self.checkpoints.take({}, Manifest(), donor, whole=False)
            return
        assert self.retreat is not None
        self.retreat.state(position.steps)  # a step under way is void
        worker.snapshots.go_back_to(most)
        before, members = change.members, self.engine.members
        lost = frozenset(rank for rank, slot in enumerate(before) if slot not in members)
        speaker = before.index(members[donor])
        handed = handed_over(self.phases, in_parts=False, survivors=Survivors(speaker, lost))
        if worker.rank == donor:
            handed["moments"] += self._moments_of(lost, before)
        # Free workers are in steps of their own.
        is_behind = not held_by_all and 0 <= consumed < most
        if is_behind:
            position = replace(position, steps=position.steps + 1)
        state = {**self.checkpoint_state(), "position": position, "handed": handed}
        roles = {slot: role_of(rank, self.phases.roles) for rank, slot in enumerate(before)}
        roles_left = tuple(roles.get(slot, LOST) for slot in members)
        manifest = replace(self._manifest(), members=roles_left, consumed=most, speaker=donor)
        self.checkpoints.take(state, manifest, donor)
        if is_behind:
            # Its step is done by the others, with what it has contributed.
            worker.step.consumed, worker.step.loss = most, rows[donor][3]
            self.recorder.step(position.steps)

    def _moments_of(self, lost: frozenset[int], before: tuple[int, ...]) -> list[dict[str, Any]]:
        """Return the moments of the `lost` servers from the newest checkpoint of the group whose
        members were `before`; give notice if it has none."""
        index, folder = self.checkpoints.index, self.folder / "checkpoints"
        servers = lost.intersection(self.phases.roles.servers)
        if not servers or self.phases.traits.optimizer is Partition.REPLICATED:
            return []  # nothing is lost, or workers have the moments
        with contextlib.suppress(DamagedCheckpoint):
            manifest = verify(folder, index)
            if manifest.slots == before and manifest.phase == self.phases.number:
                files = MemberFiles(folder, index, manifest).files
                moments = [files[rank].unpacked("handed", "moments") for rank in sorted(servers)]
                return list(itertools.chain(*moments))
        self.runtime.reporter.notice(
            "the moments of a lost server's slice begin anew: set checkpoint_every to keep them"
        )
        return []

    def _let_go(self) -> None:
        """Leave no memory to what the next session has anew."""
        if self.scalars is not None:
            self.scalars.close()
        if not self._enters:
            del self.phases, self._planned, self._work
        del self.worker, self.checkpoints
        self.recorder.close()
        self.balancer = None

    def _learn_from_others(self, before: Before) -> None:
        """Learn from the first rank that was there before what is the same on all ranks of the run.
        Collective over all ranks.

        Raises:
            RunFailed: only newcomers are left.
        """
        worker, runtime, change = self.worker, self.runtime, before.change
        knows = torch.zeros(runtime.ranks, dtype=torch.int32)
        knows[runtime.rank] = change is not None
        all_reduce(worker.transport, knows, "butterfly", worker.everyone, Tag.AGREE)
        if not knows.any():
            raise RunFailed("all ranks that had the state of the run are lost")
        self._take_note_of(exchange.agree_on_data(worker, before.run, int(knows.nonzero()[0])))
        if change is not None:
            self._group_change = change
        # As long as no checkpoint says otherwise
        workers = len(self.roles.workers)
        self.history = (self.history[0], Membership(self.training.ranks, workers, 0))

    def _go_on_with_stopwatch(self) -> None:
        """Go on with the stopwatch of the group before, and note the change of the group."""
        change, position, totals = self._group_change, self.position, self.totals
        kept, members = self.kept_steps or 0, self.engine.members
        made = change.made(members, kept, position.consumed, self._now())
        self.regroupings.append(replace(made, step=position.steps))
        elapsed = made.noticed + made.seconds
        # Steps that are done again have taken their time, too.
        totals.spent.wait += max(0.0, elapsed - totals.elapsed)
        self.recorder.go_on_from(position.steps, elapsed)
        self._show(made)

    def _show(self, made: Regrouping) -> None:
        """Put a change of the group into the timeline."""
        for how, ranks in (("lost", made.lost), ("joined by", made.joined)):
            if ranks:
                self.trace.happened(f"{how} rank {', '.join(map(str, ranks))}")

    def _regroup(self, error: PeerLost | GroupChanged) -> None:
        """Go on from what the ranks keep. `train` goes on with the next step."""
        while True:
            try:
                assert self.engine.regroup is not None
                self.engine = self.engine.regroup(error)
                self._join_group()
                break
            except (PeerLost, GroupChanged) as again:  # there is one more change
                error = again
        position, members = self.position, self.engine.members
        made = self._group_change.made(members, position.steps, position.consumed, self._now())
        # What it took is part of the run.
        self.totals.elapsed += made.seconds
        self.totals.spent.wait += made.seconds
        self.regroupings.append(made)
        self.recorder.resume()
        self.runtime.reporter.activity(RankActivity.TRAINING)
        self._show(made)

    def _now(self) -> float:
        return self.engine.transport.now()

    def _make_retreat(self) -> Retreat:
        """Return what this rank goes back to from now on, at the start or in a new group."""
        worker, live = self.worker, self._live_state
        if self.run.after_loss is AfterLoss.TOGETHER:
            return StepStart(worker, live)
        if self.run.after_loss is AfterLoss.ROUND:
            return RoundStart(worker, live)
        return KeptSteps(worker, live, self.strategy.traits(self.training.work).round)

    def _live_state(self) -> dict[str, Any]:
        """Return the state that this rank goes on from, as plain data."""
        state: dict[str, Any] = capture(
            {
                "steps": self.position.steps,
                "consumed": self.position.consumed,
                "samples": self.totals.samples,
                "loss": self.totals.loss,  # of the last step
                **checkpoints.rank_state(self.phases, self.worker.parameters),
            }
        )
        return state

    def _noticed(self) -> NoticedChange:
        """Return what is known of the change of the group that this rank has just noticed."""
        steps, samples = self.position.steps, self.position.consumed
        if self.retreat is not None and self.retreat.under_way:
            steps, samples = steps + 1, samples + self.worker.step.total_samples
        members, elapsed = self.engine.members, self.totals.elapsed
        return NoticedChange(members, elapsed, self._now(), steps, samples)

    def _join_group(self) -> None:
        """Let this rank go on in a new group, with the state that all go on from. Collective."""
        enters, apart = self._enters, self.run.after_loss is AfterLoss.KEPT
        worker, position = self._move_worker(), self.position
        steps = NO_STEPS if self.retreat is None else self.retreat.steps(position.steps)
        standing = GroupStanding.among(worker, steps, apart=apart)
        if standing.is_behind:
            state = self._taken_over_from_donor(standing)
        else:
            assert self.retreat is not None
            state = self.retreat.state(standing.steps)
            standing.give(worker, self.phases.member, {**state, "run": self.of_the_run()})
            self.recorder.go_back_to(standing.steps, state["samples"])
        worker.snapshots.skip(position.consumed)
        position.steps, position.consumed = standing.steps, state["consumed"]
        worker.step.consumed, worker.step.loss = position.consumed, state["loss"]
        restore(worker.parameters, state["parameters"])
        if standing.is_behind and not enters and self.run.after_loss is AfterLoss.TOGETHER:
            worker.offer_equal_parameters()  # of the step that the others have completed
        self.checkpoints.begin_attempt(self.roles.leader)
        self.recorder.move(worker)
        worker.snapshots.go_back_to(position.consumed)
        if apart:
            take_mean(worker, None if enters else self.phases.member, state)
            state["buffers"] = dict(worker.buffers)
        self.phases = checkpoints.resume(worker, self.strategy, state, common=apart)
        if apart:
            take_moments(self.phases.member, state)
        worker.rate_scale *= self._resizing_rate(self.begun_on)
        self._resize_batch()
        self.samples = open_samples(self.task.train, self.run.seed, self.task.collate)
        position.plan_start, position.plan_step = position.consumed, 0
        workers = len(self.roles.workers)
        self.history += (Membership(self.runtime.ranks, workers, position.consumed),)
        self._begin_phase()
        self._enters, self.retreat = False, self._make_retreat()

    def _taken_over_from_donor(self, standing: GroupStanding) -> dict[str, Any]:
        """Return the state that this rank takes over, as it is behind, or has none."""
        state = standing.receive(self.worker)
        if self._enters:
            self._take_over_run(state.pop("run"), standing.steps)
        else:
            own = self._live_state()
            # Its step is done by the others, with what it has contributed.
            self.worker.step.consumed, self.worker.step.loss = state["consumed"], state["loss"]
            self.recorder.step(standing.steps)
            state = {**with_own(state, own), "samples": self.totals.samples}
            # Should one more rank be lost meanwhile, this one is behind no more.
            self.retreat = TakenOver(self.worker, state)
        state["random"] = random_state()
        return state

    def of_the_run(self) -> dict[str, Any]:
        """Return what is the same on all ranks of the run, as plain data."""
        return {
            "budget": self.budget,
            "begun_on": self.begun_on,
            "snapshots": len(self.worker.snapshots.due),
            "change": to_plain(self._group_change),
            "history": to_plain(list(self.history)),
            "regroupings": to_plain(self.regroupings),
        }

    def _take_over_run(self, known: Mapping[str, Any], steps: int) -> None:
        """Go on as a rank of a run after `steps` steps; the facts `known` describe the run."""
        self._take_note_of(known)
        self.recorder.go_on_from(steps, self._group_change.noticed)
        self.worker.snapshots.started = self._now() - self._group_change.noticed
        # A stream of its own, which has not been used before.
        text = f"{self.run.seed} {self.runtime.slot} {steps}"
        self.runtime.seed(random.Random(text).getrandbits(62))

    def _take_note_of(self, known: Mapping[str, Any]) -> None:
        """Go on with what another rank has told `of_the_run`."""
        self.budget, self.begun_on = known["budget"], known["begun_on"]
        self.history = tuple(from_plain(list[Membership], known["history"]))
        self.regroupings = from_plain(list[Regrouping], known["regroupings"])
        change = from_plain(NoticedChange, known["change"])
        self._group_change = replace(change, began=self._now())  # by this rank's clock
        self.worker.snapshots.due = tuple(evenly_due(self.budget, known["snapshots"]))
        self._deal_out()

    def _move_worker(self) -> Worker:
        """Make this rank's worker in the group that the engine has joined, and return it."""
        old = self.worker
        self.runtime = runtime = self._intercepted(None)
        self.training = replace(self.training, ranks=runtime.ranks)
        self.run = replace(self.run, training=self.training)
        self.roles = self.strategy.roles(runtime.ranks)
        old.gradients.close()
        worker = setup.make_worker(runtime, self.run, self.task, old.module, None, self.budget)
        worker.set_workers(self.roles.workers)
        worker.step, worker.measures, worker.logged = old.step, old.measures, old.logged
        worker.check_loss, worker.observe = old.check_loss, old.observe
        worker.snapshots = old.snapshots.moved(runtime.transport.now)
        self.worker = worker
        self.checkpoints = self.checkpoints.moved(worker)
        self._deal_out()
        return worker

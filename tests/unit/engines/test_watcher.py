"""What the watcher decides, in virtual time: no process, no socket, no clock."""

from __future__ import annotations

import json
import signal
import socket
from dataclasses import replace
from typing import Any

import pytest

from orchestra.engines.events import (
    RUN_OVER,
    Abort,
    Accused,
    Disconnect,
    Disconnected,
    Event,
    Exited,
    Failed,
    Failure,
    Finished,
    Heartbeat,
    HostGone,
    Instruction,
    Interrupted,
    Joined,
    Kill,
    Left,
    Notice,
    Quiesce,
    Ready,
    Refuse,
    Regroup,
    Stop,
    Terminated,
    follow_waits,
    stuck,
)
from orchestra.engines.failure_detector import (
    BOTH_SECONDS,
    RECONNECTED_SECONDS,
    FailureDetector,
    Limits,
)
from orchestra.engines.processes.control import BadFrame, Frames, pack
from orchestra.worker.runtime import RankActivity

LIMITS = Limits(patience=60.0)


class Story:
    """A run told event by event. All ranks have joined, and beat at each quarter of a second
    that `pass_time` lets pass, unless they are silent or held."""

    def __init__(
        self, ranks: int = 3, *, children: bool = True, step: int = 1, **options: Any
    ) -> None:
        self.now = 0.0
        self.detector = FailureDetector(ranks, LIMITS, start=0.0, children=children, **options)
        self.beats = {
            rank: Heartbeat(rank, step=step, activity=RankActivity.TRAINING)
            for rank in range(ranks)
        }
        self.silent: set[int] = set()
        self.held: set[int] = set()
        self.done: list[Instruction] = []
        for rank in range(ranks):
            self.tell(Joined(rank, "host"))
        self.beat()

    def tell(self, event: Event) -> list[Instruction]:
        instructions = self.detector.observe(self.now, event)
        self.done += instructions
        return instructions

    def change(self, rank: int, **fields: Any) -> None:
        self.beats[rank] = replace(self.beats[rank], **fields)

    def beat(self) -> None:
        for rank, beat in self.beats.items():
            if rank not in self.silent | self.held:
                self.tell(beat)

    def pass_time(self, seconds: float, *, busy: tuple[int, ...] = ()) -> list[Instruction]:
        """What the watcher did in these seconds; ranks in `busy` show progress all the time."""
        before = len(self.done)
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            for rank in busy:
                self.change(rank, progress=self.beats[rank].progress + 1)
            self.beat()
            held = [rank for rank in self.detector.suspects(self.now) if rank in self.held]
            self.done += self.detector.tick(self.now, held)
        return self.done[before:]

    def die(self, rank: int, status: int = -signal.SIGKILL) -> None:
        self.silent.add(rank)
        self.tell(Disconnected(rank))
        self.tell(Exited(rank, status))

    @property
    def cause(self) -> str:
        assert self.detector.cause is not None, "the run goes on"
        return self.detector.cause


def lost(rank: int) -> Failure:
    return Failure("PeerLost", f"rank {rank} is gone", lost=rank)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-signal.SIGKILL, "rank 2 on host was killed by SIGKILL"),
        (-signal.SIGSEGV, "rank 2 on host was killed by SIGSEGV"),
        (0, "rank 2 on host exited with status 0 without a result"),
        (3, "rank 2 on host exited with status 3 without a result"),
    ],
)
def test_a_dead_rank_ends_the_run_at_once(status: int, text: str) -> None:
    story = Story()
    assert story.tell(Disconnected(2)) == []  # its exit status says more
    assert story.tell(Exited(2, status)) == [Abort(text)]


def test_the_end_of_its_connection_is_all_that_is_known_of_a_rank_elsewhere() -> None:
    story = Story(children=False)
    assert story.tell(Disconnected(1)) == [
        Abort("rank 1 on host is gone: its control connection closed")
    ]


def test_a_process_that_only_drops_its_connection_is_found_out() -> None:
    story = Story()
    story.silent.add(1)
    story.tell(Disconnected(1))
    assert story.pass_time(1.5) == []
    assert Abort("rank 1 on host closed its control connection") in story.pass_time(2)


def test_an_exception_is_the_cause_with_its_traceback() -> None:
    story = Story()
    story.tell(Failed(1, Failure("ValueError", "bad sample 17\nmore", "Traceback ...\n")))
    assert story.cause == "rank 1 on host failed: ValueError: bad sample 17\nTraceback ..."


def test_a_consequence_waits_for_the_death_behind_it() -> None:
    story = Story()
    assert story.tell(Failed(0, lost(2))) == []
    assert story.pass_time(1) == []
    story.die(2)
    assert story.cause == "rank 2 on host was killed by SIGKILL"


def test_a_consequence_waits_for_the_exception_behind_it() -> None:
    story = Story()
    story.tell(Failed(0, Failure("RunAborted", "a collective failed", aborted=True)))
    story.tell(Failed(1, lost(2)))
    story.tell(Failed(2, Failure("ValueError", "bad sample")))
    assert story.cause == "rank 2 on host failed: ValueError: bad sample"


def test_a_consequence_without_a_cause_is_the_cause() -> None:
    story = Story()
    story.tell(Failed(0, lost(2)))
    story.tell(Exited(0, 1))
    assert story.pass_time(2.5) == []
    story.pass_time(1)
    assert story.cause == "rank 0 on host failed: PeerLost: rank 2 is gone"


def test_expendable_rank_that_loses_its_connection_to_a_living_one_is_left_out() -> None:
    """Also where that one has finished meanwhile, without it."""
    for finished in (False, True):
        story = Story()
        story.change(2, expendable=True)
        story.beat()
        story.tell(Accused(2, lost(0), 0))
        if finished:
            story.tell(Finished(0))
        done = story.pass_time(4, busy=(0, 1))
        assert story.detector.left_out == {2: "lost its connection to rank 0"}
        assert Disconnect(2, "lost its connection to rank 0") in done
        assert Kill(2) in done
        assert story.detector.cause is None


def test_later_failures_do_not_replace_the_cause() -> None:
    story = Story()
    story.die(1)
    assert story.tell(Failed(0, Failure("ValueError", "confused by the end"))) == []
    story.die(2)
    assert story.cause == "rank 1 on host was killed by SIGKILL"


def test_a_stopped_rank_ends_a_run_that_needs_it() -> None:
    story = Story()
    story.held.add(2)
    assert story.pass_time(3) == []
    assert story.pass_time(1) == [
        Abort("rank 2 on host is stopped (by SIGSTOP or its terminal)"),
        Kill(2),
    ]


def test_a_rank_that_is_stopped_before_it_joins_is_named() -> None:
    """Three seconds after it was last seen to run, however late it was stopped."""
    detector = FailureDetector(2, LIMITS, start=0.0, children=True)
    detector.observe(0.0, Joined(0, "host"))
    for quarter in range(1, 100):
        now = quarter / 4
        detector.observe(now, Heartbeat(0, progress=quarter))
        assert detector.suspects(now) == [1]
        stopped = {1} if now == 5 or now > 10 else ()
        if done := detector.tick(now, stopped):
            break
    assert now == 13.25
    assert done == [Abort("rank 1 is stopped (by SIGSTOP or its terminal)"), Kill(1)]


def test_a_silent_rank_has_its_patience() -> None:
    story = Story()
    story.silent.add(1)
    assert story.pass_time(59, busy=(0, 2)) == []
    assert story.pass_time(2, busy=(0, 2)) == [
        Abort("rank 1 on host does not respond: no sign of life for 60 s"),
        Kill(1),
    ]


def test_an_expendable_rank_that_dies_is_left_out() -> None:
    story = Story()
    story.change(2, expendable=True)
    story.beat()
    story.done.clear()
    story.die(2)
    how = "was killed by SIGKILL"
    assert story.done == [
        Disconnect(2, how),
        Notice(f"rank 2 on host {how}; going on without it"),
    ]
    story.tell(Finished(0))
    story.tell(Exited(0, 0))
    story.tell(Finished(1))
    story.tell(Exited(1, 0))
    assert story.detector.over
    assert story.detector.cause is None
    assert story.detector.left_out == {2: how}


def test_an_exception_ends_the_run_also_in_an_expendable_rank() -> None:
    story = Story()
    story.change(2, expendable=True)
    story.beat()
    story.tell(Failed(2, Failure("ValueError", "bad sample")))
    assert story.cause == "rank 2 on host failed: ValueError: bad sample"


def test_a_rank_that_cannot_go_on_without_an_expendable_one_names_both() -> None:
    story = Story()
    story.change(2, expendable=True)
    story.beat()
    story.die(2)
    story.tell(Failed(0, lost(2)))
    story.pass_time(4)
    assert story.cause == (
        "rank 2 on host was killed by SIGKILL; "
        "rank 0 on host could not go on: PeerLost: rank 2 is gone"
    )


def test_a_rank_that_stood_in_for_an_expendable_one_is_the_cause_when_it_dies() -> None:
    story = Story()
    story.change(2, expendable=True)
    story.beat()
    story.die(2)
    assert story.tell(Failed(0, lost(2))) == []
    story.die(1)
    assert story.cause == "rank 1 on host was killed by SIGKILL"


def test_an_expendable_rank_is_taken_back_when_it_continues() -> None:
    story = Story()
    story.change(2, expendable=True)
    story.beat()
    story.held.add(2)
    held = story.pass_time(200, busy=(0, 1))
    assert held == [Notice("rank 2 on host is stopped; going on without it")]
    story.held.clear()
    story.silent.add(2)  # it runs again, and has yet to beat
    assert story.pass_time(50, busy=(0, 1)) == []
    story.silent.clear()
    assert story.pass_time(50, busy=(0, 1)) == [Notice("rank 2 on host is back")]


def test_an_expendable_rank_that_does_not_respond_is_killed_and_left_out() -> None:
    story = Story()
    story.change(2, expendable=True)
    story.beat()
    story.silent.add(2)
    how = "does not respond: no sign of life for 60 s"
    assert story.pass_time(61, busy=(0, 1)) == [
        Disconnect(2, how),
        Notice(f"rank 2 on host {how}; going on without it"),
        Kill(2),
    ]


@pytest.mark.parametrize(
    ("status", "loss"), [(-signal.SIGKILL, True), (-signal.SIGSEGV, True), (0, False), (3, False)]
)
def test_a_death_is_a_loss_if_a_signal_caused_it(status: int, loss: bool) -> None:
    story = Story()
    story.die(1, status)
    assert story.detector.ended_by_loss == loss


def test_disconnected_stopped_and_silent_ranks_are_losses() -> None:
    elsewhere = Story(children=False)
    elsewhere.tell(Disconnected(1))
    dropped = Story()
    dropped.silent.add(1)
    dropped.tell(Disconnected(1))
    dropped.pass_time(4)
    stopped = Story()
    stopped.held.add(2)
    stopped.pass_time(4)
    silent = Story()
    silent.silent.add(2)
    silent.pass_time(70, busy=(0, 1))
    parted = Story()  # by the network, as the watcher still hears of both
    parted.tell(Failed(0, lost(2)))
    parted.pass_time(4)
    for story in (elsewhere, dropped, stopped, silent, parted):
        assert story.detector.ended_by_loss, story.cause


def test_exceptions_hangs_and_ctrl_c_are_no_losses() -> None:
    raised = Story()
    raised.tell(Failed(0, lost(1)))
    raised.tell(Failed(1, Failure("ValueError", "bad sample 17")))
    hung = Story()
    hung.pass_time(70, busy=(0, 1))
    deadlocked = Story()
    for rank in range(3):
        deadlocked.change(rank, waits_for=((rank + 1) % 3,))
    deadlocked.pass_time(70)
    interrupted = Story()
    interrupted.tell(Interrupted())
    interrupted.tell(Interrupted())
    died_as_asked = Story()
    died_as_asked.tell(Interrupted())
    died_as_asked.die(1)
    stopped_by_user_after = Story()
    stopped_by_user_after.die(1)
    stopped_by_user_after.tell(Interrupted())
    for story in (raised, hung, deadlocked, interrupted, died_as_asked, stopped_by_user_after):
        assert story.cause
        assert not story.detector.ended_by_loss, story.cause


def test_what_follows_from_an_expendable_rank_is_a_loss_unless_that_hung() -> None:
    for hangs in (False, True):
        story = Story()
        story.change(2, expendable=True)
        story.beat()
        if hangs:
            story.pass_time(61, busy=(0, 1))
        else:
            story.die(2)
        story.tell(Failed(0, lost(2)))
        story.pass_time(4, busy=(1,))
        assert story.detector.ended_by_loss == (not hangs), story.cause


def test_stopped_ranks_alone_do_not_hold_up_the_end() -> None:
    story = Story()
    story.change(2, expendable=True)
    story.beat()
    story.held.add(2)
    story.pass_time(5, busy=(0, 1))
    story.change(0, activity=RankActivity.LEAVING)
    assert story.pass_time(5, busy=(0, 1)) == []
    story.tell(Finished(1))
    story.tell(Exited(1, 0))
    assert Kill(2) in story.pass_time(1, busy=(0,))
    assert story.detector.left_out == {2: "was still stopped at the end"}


@pytest.mark.parametrize(("step", "patience"), [(1, 60), (0, 180)])
def test_a_slow_step_is_not_a_hang_before_its_patience(step: int, patience: int) -> None:
    story = Story(step=step)
    story.change(0, waits_for=(1,))
    story.change(2, waits_for=(0,))
    assert story.pass_time(patience - 1) == []
    story.pass_time(2)
    assert story.cause == (
        f"rank 1 on host hangs: no progress for {patience} s (step {step}, training); "
        "rank 0 waiting for it"
    )


def test_progress_of_any_kind_is_a_new_start() -> None:
    story = Story()
    for _ in range(5):
        assert story.pass_time(50) == []
        for rank in range(3):
            story.change(rank, progress=story.beats[rank].progress + 1)


def test_ranks_that_wait_for_each_other_are_named_as_a_cycle() -> None:
    story = Story()
    story.change(0, waits_for=(1,), waits_what="to receive, tag 7")
    story.change(1, waits_for=(0,), waits_what="to receive, tag 8")
    assert story.pass_time(59, busy=(2,)) == []
    story.pass_time(2, busy=(2,))
    assert story.cause == (
        "the run hangs: rank 0 waits for rank 1 (to receive, tag 7), "
        "rank 1 waits for rank 0 (to receive, tag 8)"
    )


def test_unlike_steps_of_ranks_that_wait_for_each_other_are_told() -> None:
    """One has left out a step, which the others wait for; a server counts none."""
    story = Story(4)
    for rank, step in enumerate((13, 13, 12)):
        story.change(rank, step=step, waits_for=(rank ^ 2,))
    story.change(3, step=0, activity=RankActivity.SERVING, waits_for=(0,))
    story.pass_time(61)
    assert story.cause is not None
    assert story.cause.endswith("; rank 0 is at step 13, rank 2 at 12")


EARLY = (
    "rank 1 on host ended its script after step 1, but rank 0 on host still needs it: let every "
    "rank make as many steps before its script ends"
)


@pytest.mark.parametrize("activity", [RankActivity.TRAINING, RankActivity.SCRIPT_OVER])
def test_a_script_that_ends_before_the_others_is_named(activity: RankActivity) -> None:
    """Where all have come to the end they may be slow: they have their patience."""
    story = Story(2)
    story.change(0, waits_for=(1,), activity=activity)
    story.change(1, waits_for=(0,), activity=RankActivity.SCRIPT_OVER)
    assert story.pass_time(9) == []
    assert story.pass_time(2) == ([Abort(EARLY)] if activity is RankActivity.TRAINING else [])


def test_a_rank_that_left_in_order_before_the_others_is_named() -> None:
    story = Story(2)
    story.tell(Finished(1))
    story.tell(Failed(0, lost(1)))
    story.pass_time(4)
    assert story.cause == EARLY


def test_a_connection_that_ends_as_all_end_is_told() -> None:
    story = Story(2)
    for rank in range(2):
        story.change(rank, activity=RankActivity.LEAVING)
    story.beat()
    story.tell(Finished(1))
    story.tell(Failed(0, lost(1)))
    story.pass_time(4)
    assert story.cause.startswith("rank 0 on host failed: PeerLost: rank 1 is gone")


def test_waiting_for_a_rank_that_has_finished_is_a_hang() -> None:
    story = Story()
    story.tell(Finished(2))
    story.tell(Exited(2, 0))
    story.silent.add(2)
    story.change(1, waits_for=(2,), waits_what="to receive, tag 1")
    story.pass_time(61, busy=(0,))
    assert story.cause == (
        "the run hangs: rank 1 waits for rank 2 (to receive, tag 1), rank 2 has finished"
    )


def test_a_stopped_rank_that_holds_up_all_others_is_left_out() -> None:
    story = Story()
    story.change(2, expendable=True)
    story.beat()
    story.held.add(2)
    story.change(0, waits_for=(1, 2))
    story.change(1, waits_for=(2,))
    notice = Notice("rank 2 on host is stopped; going on without it")
    assert story.pass_time(59) == [notice]
    assert Kill(2) in story.pass_time(3)
    assert story.detector.left_out == {2: "is stopped, and all others wait for it"}
    assert story.detector.cause is None


def test_a_rank_that_leaves_may_wait_for_the_others() -> None:
    story = Story()
    story.change(0, activity=RankActivity.LEAVING)
    assert story.pass_time(120, busy=(1, 2)) == []
    story.change(1, activity=RankActivity.LEAVING)
    story.change(2, activity=RankActivity.LEAVING)
    story.pass_time(61)
    assert "hangs" in story.cause


def test_nobody_is_late_while_the_watcher_was_stopped() -> None:
    story = Story()
    story.pass_time(30)
    story.now += 1000
    assert story.detector.tick(story.now) == []
    assert story.pass_time(25) == []


def test_a_first_ctrl_c_asks_and_a_second_ends() -> None:
    story = Story(ranks=2)
    first = story.tell(Interrupted())
    assert first[0] == Stop()
    assert story.detector.stopped
    assert story.tell(Interrupted()) == [Abort("interrupted"), Kill(0), Kill(1)]


def test_sigterm_stops_the_run_once_however_many_processes_get_it() -> None:
    story = Story(ranks=2)
    assert story.tell(Terminated(1))[0] == Stop()
    assert story.tell(Terminated(0)) == []
    assert story.tell(Terminated()) == []
    assert story.detector.stopped
    assert story.detector.terminated
    assert story.tell(Terminated()) == [Abort("interrupted"), Kill(0), Kill(1)]


def test_ranks_that_do_not_stop_in_the_grace_after_sigterm_are_named_and_killed() -> None:
    story = Story()
    story.tell(Terminated())
    story.tell(Finished(0))
    story.tell(Exited(0, 0))
    assert story.pass_time(26.5, busy=(1, 2)) == []
    assert story.pass_time(1, busy=(1, 2)) == [
        Abort(
            "rank 1 on host, rank 2 on host did not come to rest in time within the 30 s that "
            "SIGTERM leaves (grace); the last checkpoint stands",
            at_once=True,
        ),
        Kill(1),
        Kill(2),
    ]
    assert not story.detector.ended_by_loss


def test_the_launcher_of_a_rank_says_how_it_ended() -> None:
    story = Story(children=False, follows=True)
    story.tell(Failed(0, lost(2)))
    story.tell(Disconnected(2))
    assert story.detector.cause is None
    story.tell(Exited(2, -signal.SIGKILL, "c"))
    assert story.cause == "rank 2 on host was killed by SIGKILL"
    assert story.detector.ended_by_loss


def test_a_rank_whose_launcher_is_silent_is_gone() -> None:
    story = Story(children=False, follows=True)
    for rank in (0, 1):
        story.tell(Finished(rank))
    for rank in range(3):
        story.tell(Disconnected(rank))
    assert not story.detector.over
    story.pass_time(3)
    assert story.cause == "rank 2 on host is gone: its control connection closed"
    assert story.detector.over


def test_a_rank_that_ends_before_it_has_joined_is_named_with_its_host() -> None:
    detector = FailureDetector(2, LIMITS, start=0.0, children=False, follows=True)
    detector.observe(1.0, Exited(1, 1, "c"))
    assert detector.cause == "rank 1 on c exited with status 1 without a result"


def test_a_host_that_is_cut_off_stops_the_run_and_is_named() -> None:
    """Its agent sends SIGTERM to the ranks there, and may be faster than the news."""
    story = Story(children=False, follows=True)
    assert story.tell(Terminated(2)) == [Stop()]
    notice = Notice("c: the ssh connection has ended; stopping in good order")
    assert notice in story.tell(HostGone("c", (2,), stops=True))
    story.pass_time(3)
    assert story.detector.notices == [notice.text]
    story.tell(Disconnected(2))
    assert story.cause == "rank 2 on host is lost: the ssh connection to host has ended"


def test_the_loss_of_a_host_is_the_cause_whichever_end_is_seen_first() -> None:
    story = Story(children=False, follows=True)
    story.tell(Disconnected(2))
    story.tell(HostGone("c", (2,), stops=True))
    assert story.cause == "rank 2 on host is lost: the ssh connection to host has ended"
    assert story.detector.notices == []
    absent = FailureDetector(2, LIMITS, start=0.0, children=False, follows=True)
    absent.observe(1.0, HostGone("c", (1,), stops=True))
    assert absent.cause == "rank 1 on c is lost: the ssh connection to c has ended"


def test_sigterm_to_a_followed_rank_is_told_a_little_later() -> None:
    story = Story(children=False, follows=True)
    story.tell(Terminated(2))
    story.pass_time(3)
    (notice,) = story.detector.notices
    assert notice.startswith("stopping in good order; all ranks have to leave within 30 s")


def test_a_run_that_stops_in_the_grace_ends_well() -> None:
    story = Story(ranks=2)
    story.tell(Terminated())
    for rank in range(2):
        story.tell(Finished(rank))
        story.tell(Exited(rank, 0))
    story.pass_time(40)
    assert story.detector.cause is None


def test_sigterm_right_after_a_loss_is_its_echo() -> None:
    """As torchrun sends it to all ranks of a node once one of them has died."""
    dying = Story(children=False)
    dying.tell(Failed(0, lost(2)))
    assert dying.tell(Terminated(1)) == []
    dying.tell(Disconnected(2))
    assert dying.cause == "rank 2 on host is gone: its control connection closed"
    assert dying.tell(Terminated(0)) == []
    spared = Story(children=False)
    spared.change(2, expendable=True)
    spared.beat()
    spared.tell(Disconnected(2))
    spared.tell(Terminated(1))
    assert spared.cause == (
        "rank 2 on host is gone: its control connection closed; its launcher ends the other ranks, "
        "too"
    )
    for story in (dying, spared):
        assert not story.detector.stopped
        assert story.detector.ended_by_loss


def test_sigterm_long_after_a_loss_stops_the_run() -> None:
    story = Story(children=False)
    story.change(2, expendable=True)
    story.beat()
    story.silent.add(2)
    story.tell(Disconnected(2))
    story.pass_time(11, busy=(0, 1))
    assert story.tell(Terminated(1))[0] == Stop()


def test_ranks_that_do_not_leave_are_killed() -> None:
    story = Story()
    story.die(1)
    assert story.pass_time(4.5) == []
    assert story.pass_time(1) == [Kill(0), Kill(2)]
    assert not story.detector.over
    story.die(0)
    story.die(2)
    assert story.detector.over


def test_a_rank_that_stays_after_its_result_is_killed() -> None:
    story = Story()
    story.tell(Finished(0))
    story.silent.add(0)
    story.tell(Disconnected(0))
    assert Kill(0) in story.pass_time(6, busy=(1, 2))
    story.tell(Exited(0, -signal.SIGKILL))
    assert story.detector.cause is None


def test_ranks_that_never_join_are_named() -> None:
    detector = FailureDetector(3, LIMITS, start=0.0, children=True)
    detector.observe(0.0, Joined(1, "host"))
    for now in range(1, 299):
        assert detector.tick(now) == []
        detector.observe(float(now), Heartbeat(1, progress=now))
    detector.tick(300.0)
    assert detector.cause == "rank 0, rank 2 did not join within 300 s"


def test_stuck_finds_the_ranks_that_nobody_releases() -> None:
    everyone = range(5)
    assert stuck({0: (1,), 1: (0,), 2: (3,)}, everyone) == {0: (1,), 1: (0,)}
    assert stuck({0: (1, 4), 1: (0,)}, everyone) == {}
    assert stuck({0: (1,), 1: (2,)}, {0, 1}) == {0: (1,), 1: (2,)}
    assert follow_waits({3: (3,)}, {}, {}) == "rank 3 waits for rank 3"


def test_frames_arrive_whole_however_they_are_cut() -> None:
    here, there = socket.socketpair()
    with here, there:
        frames = Frames(there)
        data = pack({"kind": "a"}) + pack({"kind": "b", "x": [1, None]}, b"\0payload")
        arrived = []
        for index in range(len(data)):
            here.send(data[index : index + 1])
            assert frames.read()
            arrived += list(frames.complete())
        assert arrived == [({"kind": "a"}, b""), ({"kind": "b", "x": [1, None]}, b"\0payload")]
        here.close()
        assert not frames.read()


@pytest.mark.parametrize("data", [b"\0\0\0\1" + b"\0" * 8 + b"3", b"\0\0\0\1" + b"\0" * 8 + b"{"])
def test_bad_frames_are_refused(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        frames = Frames(there)
        here.send(data)
        frames.read()
        with pytest.raises(BadFrame):
            list(frames.complete())


def test_messages_are_json() -> None:
    assert json.loads(pack({"loss": 1.5})[12:]) == {"loss": 1.5}


def test_a_rank_that_has_not_joined_is_the_cause_and_no_innocent_one() -> None:
    """Whatever the patience: all others can only wait for it, and for its connections."""
    detector = FailureDetector(3, replace(LIMITS, patience=10.0), start=0.0, children=True)
    notice = detector.refused("a connection was refused")
    assert notice == [Notice("a connection was refused")]
    assert detector.refused("a connection was refused") == []
    now = 0.0
    for rank in (0, 2):
        detector.observe(now, Joined(rank, "host"))
    while not (done := detector.tick(now)):
        now += 0.25
        for rank in (0, 2):
            detector.observe(now, Heartbeat(rank, activity=RankActivity.SET_UP))
    assert now == LIMITS.joining
    assert done == [Abort("rank 1 did not join within 300 s; a connection was refused")]


def test_patience_begins_when_the_last_rank_has_joined() -> None:
    detector = FailureDetector(2, LIMITS, start=0.0, children=True)
    detector.observe(0.0, Joined(0, "host"))
    now = 0.0
    while now < 250.0:
        now += 0.25
        detector.observe(now, Heartbeat(0, activity=RankActivity.SET_UP))
        assert detector.tick(now) == []
    detector.observe(now, Joined(1, "host"))
    while not (done := detector.tick(now)):
        now += 0.25
        for rank in (0, 1):
            detector.observe(now, Heartbeat(rank, activity=RankActivity.SET_UP))
    assert now > 250.0 + 3 * LIMITS.patience
    assert "rank 0 on host hangs" in str(done[0])


# Groups of those that are left


def elastic_story(ranks: int = 4, **options: Any) -> Story:
    story = Story(ranks, **options)
    for rank in range(ranks):
        story.change(rank, elastic="program")
    story.beat()
    return story


def regroups(instructions: list[Instruction]) -> list[Regroup]:
    return [each for each in instructions if isinstance(each, Regroup)]


def test_a_loss_makes_a_group_of_those_that_are_left() -> None:
    story = elastic_story()
    story.die(1)
    assert regroups(story.done) == [Regroup(1, (0, 2, 3))]
    text = "rank 1 on host was killed by SIGKILL; going on with 3 ranks"
    assert story.detector.notices == [text]
    assert story.detector.left_out == {1: "was killed by SIGKILL"}
    story.die(3)  # before the others are ready
    assert regroups(story.done) == [Regroup(1, (0, 2, 3)), Regroup(2, (0, 2))]
    story.die(0)
    assert regroups(story.done)[-1] == Regroup(3, (2,))
    assert story.detector.notices[-1].endswith("; going on with 1 rank")
    story.tell(Finished(2))
    story.tell(Exited(2, 0))
    assert story.detector.over
    assert story.detector.cause is None


def test_a_silent_rank_and_a_stopped_one_are_lost_elsewhere_too() -> None:
    story = elastic_story(children=False)
    story.held.add(2)
    story.pass_time(LIMITS.silence + 1)
    assert regroups(story.done) == [Regroup(1, (0, 1, 3))]
    assert Kill(2) in story.done
    story.silent.add(0)
    story.pass_time(LIMITS.patience + 1, busy=(1, 3))
    assert regroups(story.done)[-1] == Regroup(2, (1, 3))


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_where_one_program_is_not_elastic_a_loss_ends_the_run(rank: int) -> None:
    story = elastic_story()
    story.change(rank, elastic=False)
    story.beat()
    story.die(1)
    assert story.cause == "rank 1 on host was killed by SIGKILL"
    assert story.detector.ended_by_loss
    assert regroups(story.done) == []


def test_what_is_no_loss_makes_no_group() -> None:
    story = elastic_story()
    story.tell(Failed(1, Failure("ValueError", "a mistake")))
    assert story.cause.startswith("rank 1 on host failed: ValueError: a mistake")
    story = elastic_story()
    story.die(1, status=3)  # an exit of its own
    assert "exited with status 3" in story.cause
    story = elastic_story()
    story.pass_time(2 * LIMITS.patience, busy=(0, 1, 2))
    assert "rank 3 on host hangs" in story.cause
    assert not regroups(story.done)


def test_who_has_lost_another_is_heard_before_the_watcher_knows() -> None:
    story = elastic_story()
    story.tell(Accused(0, lost(1), 0))
    story.pass_time(LIMITS.cause / 2)
    story.die(1)
    story.tell(Accused(2, lost(1), 0))  # on its way meanwhile
    for rank in (0, 2, 3):
        story.tell(Ready(rank, 1))
    story.tell(Accused(2, lost(0), 0))  # which has left that group for the next one
    story.pass_time(2 * LIMITS.cause)
    assert story.detector.cause is None


def test_ranks_that_lose_each_other_and_live_connect_anew() -> None:
    story = elastic_story()
    story.tell(Accused(0, lost(1), 0))
    done = story.pass_time(LIMITS.cause + 1)
    assert Regroup(1, (0, 1, 2, 3)) in done
    assert any("all ranks connect anew" in text for text in story.detector.notices)
    for rank in range(4):
        story.tell(Ready(rank, 1))
    story.pass_time(2 * RECONNECTED_SECONDS, busy=(0, 1, 2, 3))
    story.tell(Accused(1, lost(0), 1))
    assert Regroup(2, (0, 1, 2, 3)) in story.pass_time(LIMITS.cause + 1, busy=(0, 1, 2, 3))


def test_who_is_accused_by_most_is_given_up_where_that_does_not_help() -> None:
    """Rank 1 is on the other side of a partition: it accuses the first one that it misses."""
    story = elastic_story()
    story.tell(Accused(0, lost(1), 0))
    story.pass_time(LIMITS.cause + 1)
    for rank, other in ((1, 0), (0, 1), (2, 1), (3, 1)):
        story.tell(Accused(rank, lost(other), 1))
    done = story.pass_time(LIMITS.cause + 1)
    assert Regroup(2, (0, 2, 3)) in done
    assert Kill(1) in done
    assert story.detector.left_out == {1: "lost its connection to rank 0"}


def test_where_one_program_is_not_elastic_an_accusation_ends_the_run() -> None:
    story = elastic_story()
    story.change(3, elastic="")
    story.beat()
    story.tell(Accused(0, lost(1), 0))
    story.pass_time(LIMITS.cause + 1)
    assert story.cause == "rank 1 on host lost its connection to rank 0"
    assert story.detector.ended_by_loss


@pytest.mark.parametrize("accuser", [1, 2])
def test_of_two_that_accuse_each_other_a_worker_is_given_up_and_soon(accuser: int) -> None:
    """A connection that both miss is gone; a dead rank accuses nobody."""
    story = Story()
    story.change(2, expendable=True, activity=RankActivity.SERVING)
    story.change(1, expendable=True)
    story.beat()
    story.tell(Accused(accuser, lost(3 - accuser), 0))
    story.tell(Accused(3 - accuser, lost(accuser), 0))
    done = story.pass_time(BOTH_SECONDS + 0.25, busy=(0, 1, 2))
    assert Disconnect(1, "lost its connection to rank 2") in done
    assert Kill(1) in done
    assert story.detector.cause is None


def test_who_still_needs_a_rank_that_has_ended_learns_of_its_end() -> None:
    story = Story()
    story.tell(Finished(1))
    story.tell(Accused(0, lost(1), 0))
    assert Disconnect(1, "has ended", to=0) in story.pass_time(0.25)


@pytest.mark.parametrize(
    ("activity", "cause"),
    [
        (RankActivity.LEAVING, "rank 0 on host failed: PeerLost: rank 1 is gone"),
        (
            RankActivity.TRAINING,
            "rank 1 on host ended its script after step 1, but rank 0 on host still",
        ),
    ],
)
def test_rank_that_cannot_go_on_without_one_that_has_ended_ends_the_run(
    activity: RankActivity, cause: str
) -> None:
    story = elastic_story()
    story.change(1, activity=activity)
    story.beat()
    story.tell(Accused(0, lost(1), 0))
    story.tell(Finished(1))
    story.pass_time(0.25)
    assert story.detector.cause is None
    story.tell(Accused(0, lost(1), 0, waits=True))
    story.pass_time(0.25)
    assert story.cause.startswith(cause)


def test_while_others_set_up_nobody_is_expendable() -> None:
    story = Story()
    story.change(2, expendable=True)
    story.change(0, activity=RankActivity.SET_UP)
    story.beat()
    story.die(2)
    assert story.cause == "rank 2 on host was killed by SIGKILL"


@pytest.mark.parametrize("fields", [{"elastic": "program"}, {"expendable": True}])
def test_the_run_ends_where_too_few_are_left(fields: dict[str, Any]) -> None:
    """Whether those that are left would make a group, or go on in place."""
    story = Story(4, min_ranks=3)
    for rank in range(4):
        story.change(rank, **fields)
    story.beat()
    story.die(1)
    assert story.detector.cause is None
    story.die(2)
    assert story.cause == "rank 2 on host was killed by SIGKILL; 2 ranks are left, of 3 at least"
    assert story.detector.ended_by_loss


# Newcomers


def newcomer(
    story: Story,
    rank: int = 4,
    activity: RankActivity = RankActivity.JOINING,
    program: str = "program",
) -> None:
    """Let a newcomer connect, and be ready as `activity` says."""
    story.tell(Joined(rank, "elsewhere"))
    story.beats[rank] = Heartbeat(rank, activity=activity, elastic=program)
    story.beat()


def test_a_newcomer_is_a_member_of_the_next_group_once_it_is_ready() -> None:
    story = elastic_story()
    newcomer(story, activity=RankActivity.SET_UP, program="")
    assert story.pass_time(30, busy=(0, 1, 2, 3)) == []
    story.change(4, activity=RankActivity.JOINING, elastic="program")
    assert Regroup(1, (0, 1, 2, 3, 4)) in story.pass_time(0.5)
    assert story.detector.notices[-1] == "rank 4 on elsewhere joins; going on with 5 ranks"
    story.tell(Disconnected(4))  # nobody's child: that is all that is known of its end
    assert Regroup(2, (0, 1, 2, 3)) in story.done


@pytest.mark.parametrize("fields", [{"activity": RankActivity.EVALUATING}, {"elastic": ""}])
def test_a_newcomer_waits_until_all_train(fields: dict[str, str]) -> None:
    story = elastic_story()
    story.change(2, **fields)
    newcomer(story)
    assert story.pass_time(10, busy=(0, 1, 2, 3)) == []
    story.change(2, activity=RankActivity.TRAINING, elastic="program")
    assert Regroup(1, (0, 1, 2, 3, 4)) in story.pass_time(1)


def test_a_newcomer_that_trains_something_else_is_refused() -> None:
    story = elastic_story()
    newcomer(story, program="another")
    (refusal,) = [each for each in story.pass_time(1) if isinstance(each, Refuse)]
    assert refusal.rank == 4
    assert refusal.why.startswith("its model, data or version of Orchestra is not that of the run")
    assert story.detector.generation == 0


def test_a_newcomer_for_whom_the_strategy_has_no_place_is_refused() -> None:
    story = elastic_story(refusal=lambda ranks: "an even number" if ranks % 2 else None)
    newcomer(story)
    assert Refuse(4, "it would be one rank too many: an even number") in story.pass_time(1)


def test_the_end_of_a_newcomer_concerns_nobody() -> None:
    story = elastic_story()
    newcomer(story, activity=RankActivity.SET_UP)
    newcomer(story, rank=5, activity=RankActivity.SET_UP)
    assert isinstance(story.tell(Failed(4, Failure("ValueError", "no data")))[0], Refuse)
    story.tell(Disconnected(5))
    story.silent |= {4, 5}
    story.pass_time(2 * LIMITS.patience, busy=(0, 1, 2, 3))
    assert story.detector.cause is None
    assert story.detector.generation == 0
    assert not story.detector.left_out


def test_a_spare_takes_the_place_of_the_next_rank_that_is_lost() -> None:
    story = elastic_story()
    newcomer(story, activity=RankActivity.SPARE)
    newcomer(story, rank=5, activity=RankActivity.SPARE)
    assert story.pass_time(5, busy=(0, 1, 2, 3)) == []
    story.die(2)
    assert Regroup(1, (0, 1, 3, 4)) in story.done
    assert "rank 4 on elsewhere takes its place" in story.detector.notices[-1]


def test_a_silent_spare_takes_nobodys_place() -> None:
    story = elastic_story()
    newcomer(story, activity=RankActivity.SPARE)
    story.silent.add(4)
    story.pass_time(LIMITS.silence + 1, busy=(0, 1, 2, 3))
    story.die(2)
    assert Regroup(1, (0, 1, 3)) in story.done


def test_a_spare_ends_with_the_run() -> None:
    story = elastic_story()
    newcomer(story, activity=RankActivity.SPARE)
    for rank in range(4):
        story.tell(Finished(rank))
    assert Refuse(4, RUN_OVER) in story.pass_time(1)


def test_who_leaves_in_order_is_lost_to_the_others() -> None:
    story = elastic_story()
    newcomer(story)
    story.pass_time(1)
    story.tell(Left(4))
    assert story.detector.left_out == {4: "has left"}
    assert Regroup(2, (0, 1, 2, 3)) in story.done


def test_a_newcomer_that_reaches_nobody_is_the_one_to_go() -> None:
    """It connects to the others, so that it alone misses somebody."""
    story = elastic_story()
    newcomer(story)
    story.pass_time(1)
    for _ in range(3):
        story.tell(Accused(4, lost(0), 1))
    story.pass_time(LIMITS.cause + 1)
    assert story.detector.left_out == {4: "cannot connect with rank 0"}
    assert Regroup(2, (0, 1, 2, 3)) in story.done


def test_a_newcomer_that_hangs_as_all_connect_is_the_one_to_go() -> None:
    story = elastic_story()
    newcomer(story)
    story.pass_time(1)
    for rank in range(4):
        story.change(rank, waits_for=(4,), waits_what="to connect")
    story.change(4, waits_for=(0,), waits_what="to connect")
    story.pass_time(2 * LIMITS.patience)
    assert story.detector.left_out == {4: "cannot connect with all others"}


def test_a_spare_counts_where_few_ranks_are_left() -> None:
    story = Story(3, min_ranks=3)
    for rank in range(3):
        story.change(rank, elastic="program")
    story.beat()
    newcomer(story, rank=3, activity=RankActivity.SPARE)
    story.die(2)
    assert Regroup(1, (0, 1, 3)) in story.done
    story.die(1)
    assert story.cause.endswith("2 ranks are left, of 3 at least")


def test_one_that_leaves_is_no_reason_for_sigterm() -> None:
    story = elastic_story()
    newcomer(story)
    story.pass_time(1)
    story.tell(Left(4))
    story.tell(Terminated(0))
    assert story.detector.cause is None
    assert story.detector.stopped
    assert Kill(4) not in story.done


def resting_story() -> Story:
    """Two workers and a server, which come to rest before they take ranks in."""
    story = Story(3)
    for rank in range(3):
        activity = RankActivity.TRAINING if rank < 2 else RankActivity.SERVING
        story.change(rank, elastic="program", rests=True, activity=activity, expendable=rank < 2)
    story.beat()
    return story


def test_members_rest_before_a_newcomer_is_taken_in() -> None:
    story = resting_story()
    newcomer(story, rank=3)
    assert story.pass_time(5, busy=(0, 1, 2)) == [Quiesce()]
    for rank in (0, 1):
        story.change(rank, activity=RankActivity.RESTING)
    assert not regroups(story.pass_time(5, busy=(0, 1, 2)))
    story.change(2, activity=RankActivity.RESTING)
    assert regroups(story.pass_time(0.25)) == [Regroup(1, (0, 1, 2, 3))]
    assert not regroups(story.pass_time(5, busy=(0, 1, 2)))


def test_members_that_rest_go_on_without_a_newcomer_that_is_gone() -> None:
    story = resting_story()
    newcomer(story, rank=3)
    story.pass_time(1)
    story.tell(Disconnected(3))
    for rank in range(3):
        story.change(rank, activity=RankActivity.RESTING)
    assert regroups(story.pass_time(0.25)) == [Regroup(1, (0, 1, 2))]


def test_a_rank_that_is_lost_as_the_others_rest_is_not_waited_for() -> None:
    story = resting_story()
    newcomer(story, rank=3)
    story.pass_time(1)
    for rank in (0, 2):
        story.change(rank, activity=RankActivity.RESTING)
    story.beat()
    story.die(1)
    assert Disconnect(1, "was killed by SIGKILL") in story.done
    assert regroups(story.pass_time(1)) == [Regroup(1, (0, 2, 3))]


def test_a_spare_takes_a_place_that_is_vacant_since_the_others_went_on() -> None:
    story = resting_story()
    newcomer(story, rank=3, activity=RankActivity.SPARE)
    assert story.pass_time(2, busy=(0, 1, 2)) == []
    story.die(1)
    assert not regroups(story.done)
    assert Quiesce() in story.pass_time(1)
    for rank in (0, 2):
        story.change(rank, activity=RankActivity.RESTING)
    assert regroups(story.pass_time(0.25)) == [Regroup(1, (0, 2, 3))]


def test_a_rank_that_ends_before_it_hears_of_a_newcomer_ends_well() -> None:
    story = elastic_story()
    newcomer(story)
    assert Regroup(1, (0, 1, 2, 3, 4)) in story.pass_time(1)
    for rank in (1, 2, 3, 4):
        story.tell(Ready(rank, 1))
    story.tell(Finished(0))
    assert Refuse(4, RUN_OVER) in story.done
    assert Regroup(2, (1, 2, 3)) in story.done
    assert story.detector.cause is None

"""How a worker leaves: on notice, drained, with a dead engine, refused or unwanted; what it says before, and its exit code."""

from __future__ import annotations

import pytest

from rollout.worker import LINGER_MS
from scavenger.protocol import messages as wire
from scavenger.protocol.worker.events import (
    EXIT_DRAINED,
    EXIT_ENGINE_FAILED,
    EXIT_NO_DAEMON,
    EXIT_PREEMPTED,
    EXIT_REFUSED,
    Abort,
    Connect,
    Connected,
    EndWorker,
    EngineCrashed,
    KeyRefused,
    Loaded,
    LoadFailed,
    LogNote,
    Received,
    Terminate,
    Unreachable,
    WorkerEvent,
    WorkerLimits,
    WorkerPhase,
    WorkerTick,
)
from tests.rollout.talk import LIMITS, WELCOME, Talk, lease, of, sent


def test_sigterm_flushes_says_goodbye_and_leaves_on_the_ack_or_in_time() -> None:
    for ack in (True, False):
        t = Talk().joined()
        t.assign(lease(1))
        t.made(1, 1, 2)
        actions = t.do(Terminate("SIGTERM"))
        assert [type(m) for m in sent(actions)] == [wire.Chunks, wire.Goodbye]
        assert sent(actions)[1] == wire.Goodbye("SIGTERM", notice=True)
        assert of(Abort, actions)
        (end,) = of(EndWorker, t.hear(wire.GoodbyeAck()) if ack else t.wait(LIMITS.notice_s))
        assert end.code == EXIT_PREEMPTED
        assert t.session.phase is WorkerPhase.GONE
        assert t.do(WorkerTick()) == []


def test_sigterm_before_it_registered_leaves_at_once() -> None:
    assert of(EndWorker, Talk().do(Terminate("SIGTERM"))) == [EndWorker(EXIT_PREEMPTED, "SIGTERM")]


@pytest.mark.parametrize("answered", [True, False])
def test_sigterm_after_the_first_hello_waits_for_its_answer_to_say_goodbye(answered: bool) -> None:
    """The daemon may know of us, and may have a lease on its way."""
    t = Talk()
    t.do(Connected())
    assert not of(EndWorker, t.do(Terminate("SIGTERM")))
    if answered:
        assert sent(t.hear(WELCOME)) == [wire.Goodbye("SIGTERM", notice=True)]
        assert of(EndWorker, t.hear(wire.GoodbyeAck())) == [EndWorker(EXIT_PREEMPTED, "SIGTERM")]
    else:
        assert of(EndWorker, t.wait(LIMITS.notice_s)) == [EndWorker(EXIT_PREEMPTED, "SIGTERM")]


def test_sigterm_while_registering_again_says_goodbye_after_the_welcome() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.hear(wire.HelloAgain("restarted"))
    t.made(1, 1, 2)
    assert not of(EndWorker, t.do(Terminate("SIGTERM")))
    assert [type(m) for m in sent(t.hear(WELCOME))] == [wire.Chunks, wire.Goodbye]


def test_a_drained_worker_leaves_for_good_and_a_sigterm_only_hurries_it() -> None:
    t = Talk().joined()
    assert sent(t.hear(wire.Drain("surplus"))) == [wire.Goodbye("surplus", notice=False)]
    assert t.do(Terminate("SIGTERM")) == []
    (end,) = of(EndWorker, t.wait(LIMITS.notice_s))
    assert end.code == EXIT_DRAINED


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (EngineCrashed("gone"), EXIT_ENGINE_FAILED),
        (Received(wire.Rejected("old protocol", "upgrade")), EXIT_REFUSED),
    ],
)
def test_each_end_has_its_exit_code(event: WorkerEvent, code: int) -> None:
    t = Talk().joined()
    t.do(event)
    t.wait(LIMITS.drain_s)
    (end,) = of(EndWorker, t.log)
    assert end.code == code


def test_the_goodbye_of_a_dead_engine_says_that_it_died() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.made(1, 1, 2)
    messages = sent(t.do(EngineCrashed("KeyError('x')")))
    assert [type(m) for m in messages] == [wire.Chunks, wire.Goodbye]
    assert messages[1] == wire.Goodbye("KeyError('x')", notice=False, failed=True)
    assert [end.code for end in of(EndWorker, t.hear(wire.GoodbyeAck()))] == [EXIT_ENGINE_FAILED]


def test_the_second_mismatch_in_a_row_is_the_engine_s_death_and_one_that_loaded_between_them_is_not() -> None:
    t, wrong = Talk().joined(), "merged to other weights"
    for number, event in enumerate(
        (LoadFailed(8, wrong, differs=True), Loaded(8, b"r8", 0.0, 0.0), LoadFailed(9, wrong, differs=True))
    ):
        t.hear(wire.UseWeights(8 + number // 2, b"", ()))
        assert not any(isinstance(message, wire.Goodbye) for message in sent(t.do(event)))
    for _ in range(5):
        t.hear(wire.UseWeights(9, b"", ()))
        assert sent(t.do(LoadFailed(9, "nobody gave it"))) == [wire.WeightsFailed(9, "nobody gave it")], (
            "no fault of this node"
        )
    t.hear(wire.UseWeights(9, b"", ()))
    said = sent(t.do(LoadFailed(9, wrong, differs=True)))
    assert said == [wire.WeightsFailed(9, wrong), wire.Goodbye(wrong, notice=False, failed=True)]
    assert [end.code for end in of(EndWorker, t.hear(wire.GoodbyeAck()))] == [EXIT_ENGINE_FAILED]


def test_an_engine_that_dies_while_the_daemon_is_away_is_told_after_the_welcome() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.do(Unreachable("restarting"))
    assert not of(EndWorker, t.do(EngineCrashed("gone")))
    t.do(Connected())
    assert sent(t.hear(WELCOME)) == [wire.Goodbye("gone", notice=False, failed=True)]


def test_a_refused_key_is_believed_the_third_time() -> None:
    t = Talk().joined()
    for _ in range(2):
        assert of(Connect, t.do(KeyRefused("no")))
        t.do(Connected())
    assert [end.code for end in of(EndWorker, t.do(KeyRefused("no")))] == [EXIT_REFUSED]


def test_a_refusal_that_may_pass_is_tried_again() -> None:
    t = Talk()
    t.do(Connected())
    assert of(Connect, t.hear(wire.Rejected("not open yet", "", retry=True)))


def test_a_worker_that_is_turned_away_again_and_again_says_why_once() -> None:
    t = Talk()
    for reason in ("run 'r' is not open",) * 9 + ("this key registers again and again",):
        t.do(Connected())
        t.hear(wire.Rejected(reason, "", retry=True))
        t.wait(1.0)
    notes = [note.detail for note in of(LogNote, t.log) if note.event == "rejected"]
    assert notes == ["run 'r' is not open; trying again", "this key registers again and again; trying again"]


def test_a_worker_that_is_turned_away_for_too_long_leaves_and_says_why() -> None:
    t = Talk(WorkerLimits(orphan_s=30.0))
    while t.session.phase is not WorkerPhase.GONE and t.now < 200:
        t.do(Connected())
        t.hear(wire.Rejected("run 'run' is not open", "open it", retry=True))
        t.wait(1.0)
    (end,) = of(EndWorker, t.log)
    assert end == EndWorker(EXIT_NO_DAEMON, "turned away for 30 s: run 'run' is not open", "open it")
    assert 130 <= t.now <= 132


def test_a_worker_that_no_daemon_wants_gives_its_gpu_back() -> None:
    t = Talk(WorkerLimits(orphan_s=30.0)).joined()
    while t.session.phase is not WorkerPhase.GONE and t.now < 200:
        if of(Connect, t.wait(1.0)):
            t.do(Connected())
    (end,) = of(EndWorker, t.log)
    assert end.code == EXIT_NO_DAEMON
    assert t.now <= 132


def test_a_goodbye_that_nobody_answers_ends_before_slurmd_looks_for_the_second_time() -> None:
    """It looks 0.17 and 0.67 s after a signal without grace, then a second later: others would wait for all of that."""
    assert WorkerLimits().notice_s + LINGER_MS / 1000 < 0.67 - 0.1, (
        "srun and the job's script end after the engine"
    )

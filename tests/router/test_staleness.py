"""Bounded staleness in the core: samples of later steps are generated while a step is trained, under versions that each chunk names."""

from __future__ import annotations

import re

import msgspec
import pytest

from scavenger.policy.interface import EngineProgress, Fact, Standard
from scavenger.protocol.messages import (
    CommitStep,
    DeferLate,
    Deferred,
    Denied,
    Goodbye,
    GroupDone,
    GroupSpec,
    Heartbeat,
    Held,
    Lease,
    Ok,
    Reply,
    SampleOutcome,
    UseWeights,
    WeightsLoaded,
    Yield,
    Yielded,
)
from scavenger.router.core import returns, samples, staleness, steps
from scavenger.router.core.transitions import IllegalTransition
from tests.router import schedule
from tests.router.coverage import Coverage
from tests.router.harness import Bench, root, specs
from tests.router.moves import W1, W2, finish_all

GOODBYE = Goodbye("preempted", True)


def bench_of(ahead: int, steps: int, *, prompts: int = 1, on_new_version: str = "switch") -> Bench:
    """A run with so many steps in advance, of which the first `steps` are submitted; one sample a prompt."""
    bench = Bench()
    bench.open(ahead=ahead, on_new_version=on_new_version)
    bench.publish()
    for step in range(1, steps + 1):
        bench.submit(step=step, groups=specs(prompts, 1))
    return bench


def beat(bench: Bench, *conns: int) -> None:
    """Long enough for these to have pulled the next version, they are heard every second."""
    for second in range(int(staleness.PULL_S) + 2):
        for conn in conns:
            bench.say(conn, Heartbeat((), second, 1))
        bench.tick(1.0)


def done(bench: Bench) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """(step, versions of its sample's tokens) of what the trainer got since the last look."""
    return [(group.step, list(group.samples[0].versions)) for group in bench.take(1, GroupDone)]


def versions_of(leases: list[Lease]) -> list[tuple[int, int]]:
    return [(lease.sample_id, lease.version) for lease in leases]


def test_samples_of_later_steps_take_the_slots_that_the_step_under_way_leaves() -> None:
    bench = bench_of(2, 3, prompts=2)
    leases = bench.join(W1)
    assert [lease.sample_id for lease in leases] == [1, 2, 3, 4], "four slots: step 1 first, then step 2"
    finish_all(bench, W1, leases[:2])
    assert [lease.sample_id for lease in bench.leases(W1)] == [5, 6], "then step 3"


def test_samples_of_later_steps_give_their_slots_to_the_step_under_way() -> None:
    """An engine is lost, and the others are full of later steps: earliest deadline first holds for slots that are taken, too."""
    bench = bench_of(2, 3, prompts=3)
    first = bench.join(W1)
    assert [lease.sample_id for lease in first] == [1, 2, 3, 4], "step 1, and one of step 2"
    later = bench.join(W2)
    assert [lease.sample_id for lease in later] == [5, 6, 7, 8], "the rest of step 2, and two of step 3"
    bench.chunk(W2, later[3], 0, 5)
    bench.say(W1, GOODBYE)
    [order] = bench.take(W2, Yield)
    assert [sample_id for sample_id, _ in order.leases] == [7, 8, 5], (
        "as many as wait: those of step 3 first, then the one of step 2 that has the fewest tokens"
    )
    assert "3 samples of step 1, which is under way, wait for a slot" in order.reason
    bench.say(W2, Yielded(tuple(Held(id_, epoch, 5 if id_ == 8 else 0) for id_, epoch in order.leases)))
    assert [lease.sample_id for lease in bench.leases(W2)] == [1, 2, 3]
    assert bench.take(W2, Yield) == [], "sample 4 is of step 2, and waits"


class Listener(Standard):
    """Decides as usual, and remembers what it was told of engines' paces."""

    def __init__(self) -> None:
        self.paces: list[EngineProgress] = []

    def observe(self, fact: Fact, now: float) -> None:
        if isinstance(fact, EngineProgress):
            self.paces.append(fact)


def full_engine() -> tuple[Bench, Listener, list[Lease]]:
    """An engine with four samples of 3 + 11 tokens, of step 1 and step 2; those of step 3 wait. It was heard a second ago."""
    listener = Listener()
    bench = Bench()
    bench.router.core.new_policy = lambda _run: listener
    bench.open(ahead=2)
    bench.publish()
    for step in (1, 2, 3):
        bench.submit(step=step, groups=specs(2, 1, 50))
    leases = bench.join(W1)
    for number, length in enumerate((1, 11), 1):
        bench.now += 1.0
        bench.say(W1, Heartbeat(tuple(Held(one.sample_id, one.epoch, length) for one in leases), number, 1))
    listener.paces.clear()
    bench.now += 1.0
    return bench, listener, leases


def another(bench: Bench, leases: list[Lease], length: int) -> tuple[Held, ...]:
    """The first sample ends and another one comes; the three others have so many tokens by now."""
    bench.chunk(W1, leases[0], 0, 12, "stop")
    [new] = bench.leases(W1)
    stayed = (Held(one.sample_id, one.epoch, length) for one in leases[1:])
    return (*stayed, Held(new.sample_id, new.epoch, 41))


def test_an_engine_whose_leases_come_and_go_is_measured_by_the_samples_that_stay() -> None:
    """With steps in advance one ends, and another one comes, between any two heartbeats: by those where none did alone, its pace was
    never known, and what later steps may begin was decided by a prior."""
    bench, listener, leases = full_engine()
    bench.say(W1, Heartbeat(another(bench, leases, 31), 3, 1))
    [pace] = listener.paces
    assert (pace.batch, pace.tokens, pace.seconds) == (4, 4 * 20, 1.0), "as many as there were gained 20 each"
    assert pace.context == 4 * (3 + 11 + 10)


@pytest.mark.parametrize(("came_with", "measured"), [(0, True), (40, False)])
def test_samples_that_come_with_much_to_prefill_say_nothing_of_an_engines_pace(
    came_with: int, measured: bool
) -> None:
    """The others gained a token meanwhile: most of the time between the heartbeats went into that prefill."""
    bench, listener, leases = full_engine()
    held = another(bench, leases, 12)
    sample = bench.router.core.samples[held[-1].sample_id]
    sample.lease_offset = sample.reported = came_with
    bench.say(W1, Heartbeat(held, 3, 1))
    assert bool(listener.paces) is measured


def test_samples_that_come_back_together_say_nothing_of_an_engines_pace() -> None:
    """After a load of weights they gain alike, at the pace of their prefill: none of them stayed."""
    bench, listener, leases = full_engine()
    for lease in leases:
        bench.router.core.samples[lease.sample_id].lease_offset = 11
    bench.say(W1, Heartbeat(tuple(Held(one.sample_id, one.epoch, 31) for one in leases), 3, 1))
    assert listener.paces == []


def test_a_group_is_generated_with_the_weights_of_its_time_and_its_chunks_name_them() -> None:
    bench = bench_of(1, 2)
    first, ahead = bench.join(W1)
    bench.chunk(W1, ahead, 0, 3)
    finish_all(bench, W1, [first])
    assert isinstance(bench.commit_step(1, [1]), Ok)
    bench.publish(2, 1)
    bench.submit(step=3, version=2, groups=specs(1, 1))
    bench.say(W1, GOODBYE)
    bench.hello(W2)
    bench.say(W2, WeightsLoaded(2, root(2)))
    moved, later = bench.leases(W2)
    assert (moved.sample_id, moved.version, len(moved.accepted) // 4) == (2, 2, 3)
    assert versions_of([later]) == [(3, 2)]
    finish_all(bench, W2, [moved, later])
    # Version 1 has the weights after 0 steps, version 2 those after 1.
    assert done(bench) == [(1, [(1, 0, 8)]), (2, [(1, 0, 3), (2, 1, 5)]), (3, [(2, 1, 8)])]
    assert isinstance(bench.commit_step(2, [2], version=2), Ok)


def test_a_daemon_that_restarts_knows_the_versions_of_each_sample_and_goes_on() -> None:
    bench = bench_of(1, 2)
    first, ahead = bench.join(W1)
    bench.chunk(W1, ahead, 0, 3)
    finish_all(bench, W1, [first])
    bench.commit_step(1, [1])
    bench.publish(2, 1)
    bench.say(W1, GOODBYE)
    bench.restart()
    bench.attach(wants=(2,), conn=2)
    bench.publish(2, 1)
    bench.hello(W2)
    bench.say(W2, WeightsLoaded(2, root(2)))
    [moved] = bench.leases(W2)
    finish_all(bench, W2, [moved])
    [group] = bench.take(2, GroupDone)
    assert list(group.samples[0].versions) == [(1, 0, 3), (2, 1, 5)]
    assert bench.router.core.runs["r"].progress.newest == ("train", 2)


def test_no_engine_takes_a_sample_that_it_would_generate_beyond_k() -> None:
    bench = bench_of(1, 2, on_new_version="finish")
    first, ahead = bench.join(W1)
    finish_all(bench, W1, [first])
    bench.commit_step(1, [1])
    bench.publish(2, 1)
    bench.submit(step=3, version=2, groups=specs(1, 1))
    assert bench.leases(W1) == [], "step 3 may be of version 2 alone: version 1 is two steps too old"
    finish_all(bench, W1, [ahead])
    assert [order.version for order in bench.take(W1, UseWeights)][-1] == 2
    bench.say(W1, WeightsLoaded(2, root(2)))
    assert versions_of(bench.leases(W1)) == [(3, 2)]


def test_an_engine_that_finishes_takes_samples_that_its_weights_may_generate_yet() -> None:
    bench = bench_of(2, 3, on_new_version="finish")
    first, second, third = bench.join(W1)
    finish_all(bench, W1, [first])
    bench.commit_step(1, [1])
    bench.publish(2, 1)
    bench.submit(step=4, version=2, groups=specs(1, 1))
    assert bench.leases(W1) == [], "step 4 may be of version 2 at the oldest"
    bench.say(W1, Yielded((Held(third.sample_id, third.epoch, 0),)))
    assert versions_of(bench.leases(W1)) == [(3, 1)], "step 3 may be of version 1"
    assert bench.take(W1, Yield) == []
    finish_all(bench, W1, [second])


def test_an_engine_that_switches_gives_its_samples_back_loads_and_goes_on_with_their_tokens() -> None:
    bench = bench_of(1, 2)
    first, ahead = bench.join(W1)
    bench.chunk(W1, ahead, 0, 3)
    finish_all(bench, W1, [first])
    bench.commit_step(1, [1])
    bench.publish(2, 1)
    bench.submit(step=3, version=2, groups=specs(1, 1))
    beat(bench, W1)
    [order] = bench.take(W1, Yield)
    assert order.leases == ((2, 1),)
    assert bench.leases(W1) == [], "it is about to load: it gets nothing more"
    bench.say(W1, Yielded((Held(2, 1, 3),)))
    assert [order.version for order in bench.take(W1, UseWeights)][-1] == 2
    bench.say(W1, WeightsLoaded(2, root(2)))
    leases = bench.leases(W1)
    assert versions_of(leases) == [(2, 2), (3, 2)]
    assert len(leases[0].accepted) // 4 == 3


def test_one_engine_in_four_switches_at_a_time() -> None:
    conns = list(range(11, 16))
    bench = bench_of(1, 2, prompts=12)
    for conn in conns:
        bench.join(conn)
    bench.publish(2, 1)  # as after step 1
    beat(bench, *conns)
    asked = [conn for conn in conns if bench.take(conn, Yield)]
    assert asked == conns[:2], "two of five"
    beat(bench, *conns)
    assert not any(bench.take(conn, Yield) for conn in conns[2:]), "while these load no other does"


def test_a_commit_says_which_sample_is_too_old() -> None:
    bench = bench_of(1, 2)
    leases = bench.join(W1)
    finish_all(bench, W1, leases)
    bench.commit_step(1, [1])
    run = bench.router.core.runs["r"]
    run.weights.versions[1].step = -1
    groups = [group for group in run.by_key.values() if group.step == 2]
    body = CommitStep(2, 1, "train", (SampleOutcome(2, "consumed", 1.0, 0.5),), {})
    assert "sample 2: version 1 is 2 steps too old for step 2, over 1" in steps._commit_fault(body, groups)
    groups[0].delivered_to = 0
    with pytest.raises(IllegalTransition, match="may not be trained"):
        samples.deliver_if_done(bench.router.core, groups[0])


# ---------------------------------------------------------------- late samples


def places(first: int, count: int) -> tuple[GroupSpec, ...]:
    """Prompts of one sample, at these places in the data."""
    return tuple(
        msgspec.structs.replace(spec, prompt_index=first + at) for at, spec in enumerate(specs(count, 1))
    )


def with_a_late_sample(ahead: int) -> tuple[Bench, Lease]:
    """Step 1 has samples 1 and 2, of which 2 is late; step 2 has 3 and 4. All are of version 1, the weights after no step."""
    bench = Bench()
    bench.open(ahead=ahead)
    bench.publish()
    for step in (1, 2):
        bench.submit(step=step, groups=places(2 * step, 2))
    first, late, *_ = bench.join(W1)
    bench.chunk(W1, late, 0, 3)
    finish_all(bench, W1, [first])
    return bench, late


def deferred(bench: Bench, step: int, *groups: int) -> Deferred:
    bench.call(DeferLate(step, groups))
    [answer] = [reply.body for reply in bench.take(1, Reply) if isinstance(reply.body, Deferred)]
    return answer


@pytest.mark.parametrize("restarts", [False, True])
def test_a_late_sample_is_trained_in_the_next_step_and_none_is_dropped(restarts: bool) -> None:
    bench, late = with_a_late_sample(1)
    assert deferred(bench, 1, 2) == Deferred((2,), "1 groups of step 1 are late: step 2 trains them")
    assert deferred(bench, 1, 2).groups == (2,), "the answer was lost: it is asked again"
    if restarts:
        bench.say(W1, GOODBYE)
        bench.restart()
        bench.attach(have=(1,), wants=(2, 3, 4), conn=1)
        bench.publish(1, 0)
        [late, *_] = [lease for lease in bench.join(W2) if lease.sample_id == late.sample_id]
    assert isinstance(bench.commit_step(1, [1]), Ok), "the late one is not asked for"
    bench.publish(2, 1)
    conn = W2 if restarts else W1
    held = bench.router.core.samples[2].accepted
    bench.chunk(conn, late, held, 8 - held, "length")
    [group] = [group for group in bench.take(1, GroupDone) if group.group_id == 2]
    assert (group.step, list(group.samples[0].versions)) == (2, [(1, 0, 8)])
    missing = bench.commit_step(2, [3, 4], version=2)
    assert isinstance(missing, Denied), "it is of step 2 now, which may not leave it out"


def test_a_late_sample_that_would_be_too_old_in_the_next_step_is_waited_for() -> None:
    bench, late = with_a_late_sample(1)
    finish_all(bench, W1, [late])
    third, fourth = [bench.router.core.samples[number] for number in (3, 4)]
    assert isinstance(bench.commit_step(1, [1, 2]), Ok)
    bench.submit(step=3, groups=places(6, 2))
    lease = Lease(third.id, third.epoch, 1, b"", b"", third.group.sampling, 0, third.key)
    finish_all(bench, W1, [lease])
    answer = deferred(bench, 2, fourth.group.id)
    assert answer.groups == ()
    assert "sample 4: version 1 is 2 steps too old for step 3, over 1" in answer.reason


def test_a_step_does_not_put_most_of_itself_off() -> None:
    bench = Bench()
    bench.open(ahead=2)
    bench.publish()
    for step in (1, 2):
        bench.submit(step=step, groups=places(4 * step, 4))
    first, *_ = bench.join(W1)
    finish_all(bench, W1, [first])
    answer = deferred(bench, 1, 2, 3, 4)
    assert (answer.groups, answer.reason) == ((), "1 of 4 groups are whole, 50% are to be trained")
    assert deferred(bench, 1, 1).reason == "a group that was waited for is whole"


# ---------------------------------------------------------------- a trainer that starts again


def resumed(bench: Bench, step: int, version: int, *, same: bool = True, ahead: int = 1) -> None:
    """Another attempt, from the checkpoint of `step`; `same`: its weights have the root that they had."""
    bench.open(resume_step=step, ahead=ahead)
    bench.publish(version, step, root_of=step + 1 if same else 99)
    for later in range(step + 1, step + 2 + ahead):
        bench.submit(step=later, version=version, groups=specs(1, 1))


def test_a_trainer_that_starts_again_from_its_last_step_loses_nothing_of_what_was_generated_in_advance() -> (
    None
):
    bench = bench_of(1, 2)
    leases = bench.join(W1)
    finish_all(bench, W1, leases)
    bench.commit_step(1, [1])
    bench.publish(2, 1)
    bench.take(1, GroupDone)
    resumed(bench, 1, 3)
    assert done(bench) == [(2, [(1, 0, 8)])], "as it was, of version 1"
    assert not any(end.state == "superseded" for end in ended(bench))
    assert isinstance(bench.commit_step(2, [2], version=3), Ok)


def ended(bench: Bench):  # type: ignore[no-untyped-def]
    return [row for row in bench.ledger.samples.values() if row.ends]


def test_what_was_generated_by_weights_that_a_restart_took_back_is_generated_anew() -> None:
    """Steps 1 and 2 were taken; the trainer starts again from step 1, and its step 2 comes out different."""
    bench = bench_of(1, 2)
    finish_all(bench, W1, bench.join(W1))
    bench.commit_step(1, [1])
    bench.publish(2, 1)
    bench.submit(step=3, version=2, groups=specs(1, 1))
    bench.say(W1, WeightsLoaded(2, root(2)))
    finish_all(bench, W1, bench.leases(W1))
    bench.commit_step(2, [2], version=2)
    bench.publish(3, 2)
    bench.take(1, GroupDone)
    resumed(bench, 1, 4)
    assert done(bench) == [(2, [(1, 0, 8)]), (3, [(2, 1, 8)])], "version 2 is the checkpoint's"
    resumed(bench, 0, 5)
    assert [step for step, _ in done(bench)] == [1, 2], "of version 1"
    resumed(bench, 0, 6, same=False)
    assert done(bench) == [], "version 1 is another now"
    reasons = {row.reason for row in bench.ledger.samples.values() if row.state == "superseded"}
    assert any("version 1, whose weights were taken back" in reason for reason in reasons)


def test_a_submission_that_is_repeated_finds_its_groups_although_newer_weights_came() -> None:
    bench = bench_of(1, 2)
    again = bench.submit(step=2, groups=specs(1, 1))
    bench.publish(2, 1)
    assert bench.submit(step=2, groups=specs(1, 1)) == again


# ---------------------------------------------------------------- random schedules


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_random_schedules_hold_with_steps_in_advance(ahead: int) -> None:
    mixed = stale = 0
    for seed in range(1000 * ahead, 1000 * ahead + 40):
        world = schedule.run(seed, 200, Coverage(), ahead=ahead)
        mixed, stale = mixed + world.truth.mixed, stale + world.truth.stale
    assert stale > 40, "hardly a sample was older than its step: the schedules prove nothing"
    assert mixed > 5


def test_without_steps_in_advance_nothing_of_this_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """k = 0 decides as it did before there was a k."""

    def never(*_: object) -> None:
        raise AssertionError("bounded staleness had a say in a run without it")

    names = ("age", "fault", "may_serve", "note", "_set_version", "adopt", "adoption_fault", "under_way")
    for name in names:
        monkeypatch.setattr(staleness, name, never)
    for seed in range(10):
        schedule.run(seed, 200, Coverage())


def too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any weights will do."""
    monkeypatch.setattr(staleness, "fault", lambda run, step, version: "")


def under_the_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk counts as of its group's version, whatever it names."""
    note = staleness.note
    monkeypatch.setattr(
        staleness, "note", lambda sample, version, tokens: note(sample, sample.group.version, tokens)
    )


def taken_back_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What weights generated that a restart took back is trained."""
    monkeypatch.setattr(staleness, "_is_live", lambda run, version: True)


def late_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of a later step that its engine gives back is forgotten."""
    release = samples.release

    def careless(core, sample, reason, **how):  # type: ignore[no-untyped-def]
        release(core, sample, reason, **how)
        if sample.group.step > sample.group.run.progress.newest[1]:
            sample.group.run.queue.discard(sample)

    monkeypatch.setattr(samples, "release", careless)


def waited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample waits for the engine that has its KV cache, also where that is gone."""
    monkeypatch.setattr(returns, "expire", lambda core, run: None)


@pytest.mark.parametrize(
    ("plant", "says", "first"),
    [
        (too_old, "steps too old", 0),
        (under_the_wrong_version, "other than those of its chunks|forgot the versions", 0),
        (taken_back_and_kept, "by weights taken back", 0),
        (late_and_dropped, "queued, in queue: False", 0),
        (waited_for_ever, "a run does not go on", 1200),  # one schedule in some two thousand shows it
    ],
)
def test_the_schedules_find_a_planted_bug_of_staleness(
    plant,
    says: str,
    first: int,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    plant(monkeypatch)
    others = []
    for seed in range(first, first + 300):
        try:
            schedule.run(seed, 200, Coverage(), ahead=1 + seed % 2)
        except schedule.Failed as failed:
            if re.search(says, str(failed.cause)):
                return
            others.append(str(failed).splitlines()[0])
    pytest.fail(f"not found by 300 schedules; what they found: {others[:3]}")

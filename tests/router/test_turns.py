"""Turns of episodes: durable before they are shown, generated once, moved unseen, and untouched by a trainer's restart."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from scavenger.protocol.messages import (
    Chunks,
    CloseRun,
    Denied,
    EndEpisode,
    GatewayPing,
    GroupDone,
    Heartbeat,
    Lease,
    Ok,
    OpenTurn,
    Pong,
    SampleFailed,
    Sampling,
    Serving,
    TurnAccepted,
    TurnTokens,
    UseWeights,
    WeightsFailed,
    WeightsLoaded,
    WeightSource,
    pack_tokens,
)
from scavenger.router.core import staleness, turns
from scavenger.router.core.events import JobGone, PeerIdentity
from scavenger.router.core.state import Episode
from scavenger.router.core.transitions import EpisodeStep, IllegalTransition
from tests.router.harness import SPEC, Bench, chunk_of, payload, root, started
from tests.router.memory_ledger import StoredLedger

GATEWAY, W1, W2, W3 = 90, 11, 12, 13
PROMPT = pack_tokens([5, 6, 7])


def ask(
    request: str = "a",
    *,
    episode: str = "e",
    n: int = 1,
    tokens: int = 8,
    content: str = "",
    have: tuple[int, ...] = (),
) -> OpenTurn:
    return OpenTurn(
        episode,
        sha256(f"{episode} {request}".encode()).digest(),
        sha256((content or request).encode()).digest(),
        PROMPT,
        n,
        Sampling(tokens),
        have,
    )


def opened(*, auto: bool = True) -> Bench:
    """A bench whose run is open and has version 1, without a step."""
    bench = Bench()
    bench.open()
    bench.publish()
    bench.auto = auto
    return bench


def turn(bench: Bench, body: OpenTurn | None = None, conn: int = GATEWAY) -> TurnAccepted:
    reply = bench.call(body or ask(), conn=conn, attempt=0)
    assert isinstance(reply, TurnAccepted), reply
    return reply


def text(messages: list[TurnTokens]) -> tuple[bytes, bytes, bytes, str]:
    """What a gateway has after these messages, and how the sample ended."""
    have: list[bytearray] = [bytearray(), bytearray(), bytearray()]
    finish = ""
    for m in messages:
        assert 4 * m.offset <= len(have[0]), "a gap"
        for column, data in zip(have, (m.tokens, m.logprobs, m.raw_logprobs), strict=True):
            column[4 * m.offset :] = data if data or m.finish else column[4 * m.offset :]
        finish = m.finish or finish
    return bytes(have[0]), bytes(have[1]), bytes(have[2]), finish


def finish(bench: Bench, conn: int, lease: Lease, start: int = 0, end: int = 8) -> None:
    bench.chunk(conn, lease, start, end - start)


def test_a_turn_is_leased_at_once_and_its_tokens_are_streamed_once_they_are_durable() -> None:
    bench = opened(auto=False)
    bench.settle()
    bench.hello(W1)
    bench.settle()
    bench.say(W1, WeightsLoaded(1, root(1)))
    bench.settle()
    assert bench.call(ask(), conn=GATEWAY, attempt=0) is None, "accepted before it is durable"
    assert bench.leases(W1) == []
    bench.settle()
    assert isinstance(bench.answer(bench.call_id, GATEWAY), TurnAccepted)
    [lease] = bench.leases(W1)
    assert (lease.prompt, lease.key.purpose) == (PROMPT, turns.PURPOSE)
    bench.chunk(W1, lease, 0, 3)
    assert bench.take(GATEWAY, TurnTokens) == []
    bench.settle()
    [part] = bench.take(GATEWAY, TurnTokens)
    assert (part.tokens, part.logprobs, part.raw_logprobs) == payload(lease.sample_id, 0, 3)[:3]
    bench.chunk(W1, lease, 3, 5)
    assert bench.take(GATEWAY, TurnTokens) == []
    bench.settle()
    [rest] = bench.take(GATEWAY, TurnTokens)
    assert (rest.offset, rest.finish, rest.version) == (3, "length", 1)
    assert text([part, rest]) == (*payload(lease.sample_id, 0, 8)[:3], "length")


def test_an_end_without_tokens_is_told_only_after_it_is_durable() -> None:
    bench = opened()
    bench.join(W1)
    turn(bench)
    [lease] = bench.leases(W1)
    bench.auto = False
    bench.chunk(W1, lease, 0, 3)
    bench.say(W1, Chunks((chunk_of(lease.sample_id, lease.epoch, 1, 3, 0, "stop"),)))
    bench.commit(1)
    assert not any(m.finish for m in bench.take(GATEWAY, TurnTokens)), "its end was told before its commit"
    bench.settle()
    assert {m.finish for m in bench.take(GATEWAY, TurnTokens)} == {"stop"}


def test_a_preempted_engine_is_invisible_in_the_stream() -> None:
    bench = opened()
    bench.join(W1)
    turn(bench)
    [first] = bench.leases(W1)
    bench.chunk(W1, first, 0, 3)
    bench.join(W2)
    bench.handle(JobGone("job11", 0, "preempted", crashed=False))
    [second] = bench.leases(W2)
    assert (second.epoch, second.accepted, second.key) == (2, payload(first.sample_id, 0, 3)[0], first.key)
    bench.chunk(W2, second, 3, 5)
    assert text(bench.take(GATEWAY, TurnTokens)) == (*payload(first.sample_id, 0, 8)[:3], "length")


def test_a_late_chunk_of_a_lost_engine_changes_no_stream() -> None:
    bench = opened()
    bench.join(W1)
    turn(bench)
    [first] = bench.leases(W1)
    bench.chunk(W1, first, 0, 3)
    bench.join(W2)
    bench.tick(bench.limits.dead_s + 1)
    bench.say(W2, Chunks(()))
    bench.take(GATEWAY, TurnTokens)
    bench.chunk(W1, first, 3, 2)
    assert bench.take(GATEWAY, TurnTokens) == []


def test_the_same_request_is_answered_and_not_generated_again() -> None:
    bench = opened()
    bench.join(W1)
    made = turn(bench, ask(n=2))
    a, b = bench.leases(W1)
    bench.chunk(W1, a, 0, 3)
    bench.take(GATEWAY, TurnTokens)
    again = turn(bench, ask(n=2), conn=GATEWAY + 1)
    assert again == msgspec.structs.replace(made, known=True), "while it runs"
    [there] = bench.take(GATEWAY + 1, TurnTokens)
    assert there.tokens == payload(a.sample_id, 0, 3)[0]
    finish(bench, W1, a, 3)
    finish(bench, W1, b)
    assert bench.leases(W1) == []
    bench.take(GATEWAY, TurnTokens)
    turn(bench, ask(n=2, have=(5, 8)))
    found = {m.index: m for m in bench.take(GATEWAY, TurnTokens)}
    assert (found[0].offset, found[0].tokens) == (5, payload(a.sample_id, 5, 3)[0])
    assert (found[1].offset, found[1].tokens, found[1].finish) == (8, b"", "length")
    assert len(bench.ledger.groups) == 1
    assert sum(len(r.tokens) // 4 for r in bench.ledger.samples.values()) == 16


def test_a_request_that_comes_again_with_another_content_is_refused() -> None:
    bench = opened()
    turn(bench)
    refused = bench.call(ask(content="another"), conn=GATEWAY, attempt=0)
    assert isinstance(refused, Denied)
    assert refused.code == "conflict"


def test_a_restarted_daemon_goes_on_with_the_stream_and_answers_what_was_complete(tmp_path: Path) -> None:
    bench = Bench()
    bench.ledger = StoredLedger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    bench.open()
    bench.publish()
    bench.join(W1)
    turn(bench, ask("done"))
    [done] = bench.leases(W1)
    finish(bench, W1, done)
    turn(bench, ask("open"))
    [lease] = bench.leases(W1)
    bench.chunk(W1, lease, 0, 3)
    bench.call(EndEpisode("gone"), conn=GATEWAY, attempt=0)
    turn(bench, ask(episode="over"))
    bench.call(EndEpisode("over"), conn=GATEWAY, attempt=0)
    bench.restart()
    again = turn(bench, ask("done"), conn=91)
    assert (again.known, again.number) == (True, 1)
    assert (again.prompt_sha256, again.prompt_tokens) == (sha256(PROMPT).digest(), 3)
    assert text(bench.take(91, TurnTokens)) == (*payload(done.sample_id, 0, 8)[:3], "length")
    assert turn(bench, ask("open"), conn=91).number == 2
    assert text(bench.take(91, TurnTokens))[0] == payload(lease.sample_id, 0, 3)[0]
    ended = bench.call(ask(episode="over"), conn=91, attempt=0)
    assert isinstance(ended, Denied)
    assert ended.code == "ended"
    bench.publish()  # its sources again
    bench.join(W2)
    bench.tick(bench.limits.reconnect_s + bench.limits.dead_s + 1)
    bench.hello(W3)
    bench.say(W3, WeightsLoaded(1, root(1)))
    [moved] = bench.leases(W3) or bench.leases(W2)
    assert moved.sample_id == lease.sample_id
    bench.ledger.close()


def test_a_new_attempt_of_the_trainer_and_its_steps_leave_turns_alone() -> None:
    bench = started(prompts=1, n=2)
    bench.join(W1)
    turn(bench)
    leases = {lease.key.purpose: lease for lease in bench.leases(W1)}
    bench.chunk(W1, leases["turn"], 0, 3)
    bench.open()
    bench.publish(2)
    bench.submit(1, 2)
    fleet = bench.router.core.runs["r"]
    assert leases["turn"].sample_id in bench.router.core.workers[1].leases
    bench.chunk(W1, leases["turn"], 3, 5)
    assert text(bench.take(GATEWAY, TurnTokens))[3] == "length"
    assert bench.take(bench.trainer, GroupDone) == []
    assert all(group.turn is None for group in fleet.by_key.values())


def test_a_turn_goes_before_the_samples_of_a_step() -> None:
    bench = started(prompts=4, n=2)
    turn(bench)
    first = bench.join(W1)
    assert [lease.key.purpose for lease in first] == ["turn", "train", "train", "train"]


def test_an_episode_that_asks_for_many_holds_up_itself_alone() -> None:
    bench = opened()
    for i in range(3):
        turn(bench, ask(str(i), episode="flood", n=8))
    turn(bench, ask(episode="calm", n=2))
    turn(bench, ask(episode="quiet"))
    first = bench.join(W1)  # four at a time
    assert [lease.sample_id for lease in first] == [1, 25, 27, 2], (
        "each episode's first, then each one's second"
    )
    finish(bench, W1, first[0])
    assert [lease.sample_id for lease in bench.leases(W1)] == [3], (
        "as many on the engine as the calm one: the older"
    )
    finish(bench, W1, first[2])
    assert [lease.sample_id for lease in bench.leases(W1)] == [26]


def test_a_turn_without_tokens_takes_the_newest_weights_and_one_with_tokens_keeps_its_own() -> None:
    bench = opened()
    turn(bench)
    bench.publish(2)
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(2, root(2)))
    [lease] = bench.leases(W1)
    assert lease.version == 2
    bench.chunk(W1, lease, 0, 3)
    bench.publish(3)
    bench.handle(JobGone("job11", 0, "preempted", crashed=False))
    bench.hello(W2)
    bench.say(W2, WeightsLoaded(3, root(3)))
    assert bench.leases(W2) == [], "another version would go on with its tokens"
    bench.say(W2, WeightsLoaded(2, root(2)))
    [moved] = bench.leases(W2)
    assert (moved.version, moved.epoch) == (2, 2)


def beat(bench: Bench, loaded: dict[int, int]) -> None:
    """So long that these, connection -> version, have pulled the newest one."""
    for second in range(int(staleness.PULL_S) + 2):
        for conn, version in loaded.items():
            bench.say(conn, Heartbeat((), second, version))
        bench.tick(1.0)


def test_an_engine_that_turns_keep_busy_finishes_them_and_loads_new_weights() -> None:
    bench = opened()
    bench.join(W1)
    turn(bench, ask("a"))
    [first] = bench.leases(W1)
    bench.publish(2)
    turn(bench, ask("b"))
    [second] = bench.leases(W1)
    assert second.version == 1, "its weights come yet: it goes on with what it has"
    beat(bench, {W1: 1})
    turn(bench, ask("c"))
    finish(bench, W1, first)
    assert bench.leases(W1) == [], "it takes no other turn"
    finish(bench, W1, second)
    assert bench.take(W1, UseWeights)[-1].version == 2
    bench.say(W1, WeightsLoaded(2, root(2)))
    assert [lease.version for lease in bench.leases(W1)] == [2]


def test_while_one_engine_makes_way_for_new_weights_the_others_take_turns() -> None:
    bench = opened()
    conns = (W1, W2)
    held = []
    for conn in conns:
        bench.join(conn)
        turn(bench, ask(f"{conn}"))
    for conn in conns:
        held += [(conn, lease) for lease in bench.leases(conn)]
    assert [conn for conn, _ in held] == [W1, W2]
    bench.publish(2)
    beat(bench, {W1: 1, W2: 1})
    turn(bench, ask("c"))
    assert bench.leases(W1) == []
    [lease] = bench.leases(W2)
    assert lease.version == 1
    finish(bench, *held[0])
    bench.say(W1, WeightsLoaded(2, root(2)))
    beat(bench, {W1: 2, W2: 1})
    turn(bench, ask("d"))
    assert [lease.version for lease in bench.leases(W1)] == [2]
    assert bench.leases(W2) == [], "its turn to load"
    finish(bench, *held[1])
    finish(bench, W2, lease)
    assert bench.take(W2, UseWeights)[-1].version == 2, "though no turn waits"


def test_a_turn_whose_engine_is_lost_gets_its_weights_from_an_engine_that_others_keep_busy() -> None:
    bench = opened()
    bench.join(W1)
    turn(bench, ask("a"))
    [begun] = bench.leases(W1)
    bench.chunk(W1, begun, 0, 3)
    bench.publish(2)
    bench.hello(W2)
    bench.say(W2, WeightsLoaded(2, root(2)))
    bench.auto = True
    turn(bench, ask("b"))
    [other] = bench.leases(W2)
    assert other.version == 2
    bench.handle(JobGone("job11", 0, "preempted", crashed=False))
    turn(bench, ask("c"))
    assert bench.leases(W2) == [], "it makes way for what was begun with version 1"
    finish(bench, W2, other)
    assert bench.take(W2, UseWeights)[-1].version == 1
    bench.say(W2, WeightsLoaded(1, root(1)))
    moved = bench.leases(W2)
    assert (moved[0].sample_id, moved[0].version, len(moved[0].accepted)) == (begun.sample_id, 1, 12)


def test_when_a_turn_of_older_weights_has_its_engine_the_others_go_on_to_the_newest_at_once() -> None:
    bench = opened()
    bench.join(W1)
    turn(bench, ask("a"))
    [begun] = bench.leases(W1)
    bench.chunk(W1, begun, 0, 3)
    bench.publish(2)
    for conn in (W2, W3):
        bench.hello(conn)
        bench.say(conn, WeightsLoaded(2, root(2)))
    bench.handle(JobGone("job11", 0, "preempted", crashed=False))
    for conn in (W2, W3):
        assert bench.take(conn, UseWeights)[-1].version == 1, "either may be the first to have them"
    bench.say(W2, WeightsLoaded(1, root(1)))
    [moved] = bench.leases(W2)
    assert (moved.sample_id, moved.version) == (begun.sample_id, 1)
    assert bench.take(W3, UseWeights)[-1].version == 2


def test_two_engines_keep_the_weights_of_a_turn_that_their_trainer_has_let_go() -> None:
    bench = opened()
    bench.join(W1)
    turn(bench, ask("a"))
    bench.join(W2)
    for conn in (W1, W2):
        bench.say(conn, Serving(1, root(1), WeightSource(f"tcp://engine{conn}:1", "", b"t" * 16)))
    sources = {}
    for version in (2, 3):
        bench.publish(version, step=version - 1)
        sources[version] = bool(bench.router.core.runs["r"].weights.versions[1].sources)
        order = bench.take(W2, UseWeights)[-1]
        bench.say(W2, WeightsLoaded(version, root(version)))
    assert sources == {2: True, 3: False}
    assert (order.version, order.keep) == (3, (1,)), "the other may be lost"


def test_an_engine_loads_new_weights_also_where_each_turn_has_more_samples_than_it_has_slots() -> None:
    """Those of a begun turn that wait go to it, as they may to no other; then it loads."""
    bench = opened()
    bench.join(W1, lease_limit=2)
    for name in "ab":
        turn(bench, ask(name, episode=name, n=3))
    held, of_version = bench.leases(W1), {1: 0, 2: 0}
    bench.publish(2)
    [worker] = bench.router.core.workers.values()
    for number in range(30):
        bench.say(W1, Heartbeat((), number, worker.weights.loaded, lease_limit=2))
        bench.tick(1.0)
        if held:
            lease = held.pop(0)
            of_version[lease.version] += 1
            finish(bench, W1, lease)
        if any(order.version == 2 for order in bench.take(W1, UseWeights)):
            bench.say(W1, WeightsLoaded(2, root(2)))
        if not number % 3:
            turn(bench, ask(f"{number}", episode=f"{number}", n=3))
        held += bench.leases(W1)
    assert of_version[1] % 3 == 0, "a turn has one version"
    assert of_version[2] > 3


def test_a_turn_does_not_wait_for_a_guest_that_sleeps_with_its_weights() -> None:
    bench = opened()
    bench.join(W1)
    turn(bench, ask("a"))
    [begun] = bench.leases(W1)
    bench.chunk(W1, begun, 0, 3)
    bench.join(W2, lease_limit=2)
    bench.say(W2, Heartbeat((), 1, 1, lease_limit=0))
    bench.publish(2)
    bench.hello(W3)
    bench.say(W3, WeightsLoaded(2, root(2)))
    turn(bench, ask("b"))
    [busy] = bench.leases(W3)
    bench.handle(JobGone("job11", 0, "preempted", crashed=False))
    bench.tick(1.0)
    turn(bench, ask("c"))
    assert bench.leases(W3) == [], "it ends what it has, and loads"
    finish(bench, W3, busy)
    assert bench.take(W3, UseWeights)[-1].version == 1
    bench.say(W3, WeightsLoaded(1, root(1)))
    assert bench.leases(W3)[0].sample_id == begun.sample_id


def test_an_old_version_that_an_engine_could_not_load_stays_on_its_disk() -> None:
    bench = opened()
    bench.join(W1)
    for version in (2, 3):
        bench.publish(version, step=version - 1)
    versions = bench.router.core.runs["r"].weights.versions
    on_disk, served = (WeightSource(at, "", b"") for at in ("file:///spool/1", "tcp://trainer:1"))
    versions[1].sources, versions[3].sources = (on_disk, served), (served,)
    for version in (1, 3):
        bench.say(W1, WeightsFailed(version, "a connection was reset"))
    assert (versions[1].sources, versions[3].sources) == ((on_disk,), (served,))


def test_a_turn_that_kills_engines_is_given_up_and_the_run_goes_on() -> None:
    bench = opened()
    for conn in (W1, W2, W3):
        bench.join(conn)
    turn(bench)
    for _ in range(3):
        [(conn, lease)] = [(conn, lease) for conn in (W1, W2, W3) for lease in bench.leases(conn)]
        bench.say(conn, SampleFailed(lease.sample_id, lease.epoch, "out of memory"))
    told = [m for m in bench.take(GATEWAY, TurnTokens) if m.error]
    assert len(told) == 1
    assert "failed 3 times" in str(told[0].error)
    assert not bench.router.core.runs["r"].stopped
    turn(bench)
    assert [m.error for m in bench.take(GATEWAY, TurnTokens)] == [told[0].error], "and is not tried again"


def test_an_ended_episode_gives_its_open_turns_up_and_takes_no_more() -> None:
    bench = opened()
    bench.join(W1)
    turn(bench, ask("a"))
    turn(bench, ask("b"))
    a, b = bench.leases(W1)
    finish(bench, W1, a)
    bench.chunk(W1, b, 0, 2)
    bench.take(GATEWAY, TurnTokens)
    assert bench.call(EndEpisode("e"), conn=GATEWAY, attempt=0) == Ok()
    assert [bench.ledger.samples[x.sample_id].state for x in (a, b)] == ["served", "surplus"]
    [told] = bench.take(GATEWAY, TurnTokens)
    assert told.error
    assert not bench.router.core.samples
    assert not bench.router.core.runs["r"].turns.groups
    refused = bench.call(ask("c"), conn=GATEWAY, attempt=0)
    assert isinstance(refused, Denied)
    assert refused.code == "ended"
    assert bench.call(EndEpisode("e"), conn=GATEWAY, attempt=0) == Ok()


def test_a_closed_run_ends_its_episodes() -> None:
    bench = opened()
    turn(bench)
    bench.call(CloseRun("finished"))
    assert {e.state for e in bench.ledger.episodes.values()} == {"stopped"}
    assert isinstance(bench.call(ask("b"), conn=GATEWAY, attempt=0), Denied)
    assert not bench.router.core.runs["r"].turns.ended, "their names are in the ledger alone"


def refusal(bench: Bench, body: OpenTurn | EndEpisode) -> str:
    reply = bench.call(body, conn=GATEWAY, attempt=0)
    assert isinstance(reply, Denied), reply
    return reply.code


@pytest.mark.parametrize("restarts", [False, True])
def test_until_a_closed_run_that_opens_again_has_read_which_episodes_ended_none_is_begun(
    restarts: bool,
) -> None:
    bench = opened()
    for episode in ("e", "f"):
        turn(bench, ask(episode=episode))
    bench.call(EndEpisode("e"), conn=GATEWAY, attempt=0)
    bench.call(CloseRun("failed"))  # which ends `f`
    if restarts:
        bench.restart()
    bench.auto = False
    bench.open()
    bench.commit()
    for body in (ask(episode="e"), ask(episode="g"), EndEpisode("g")):
        assert refusal(bench, body) == "full", "asked again later"
    bench.open()  # another attempt, whose question is answered
    bench.auto = True
    bench.settle()
    bench.publish(2)
    assert [refusal(bench, ask("later", episode=episode)) for episode in ("e", "f")] == ["ended", "ended"]
    assert turn(bench, ask(episode="g")).number == 1
    assert bench.call(EndEpisode("f"), conn=GATEWAY, attempt=0) == Ok()
    assert len(bench.ledger.episodes) == 3


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (msgspec.structs.replace(ask(), prompt=b""), "invalid"),
        (msgspec.structs.replace(ask(), prompt=b"\x00" * 5), "invalid"),
        (ask(tokens=SPEC.context_length), "invalid"),
    ],
)
def test_what_no_engine_could_generate_is_refused(body: OpenTurn, code: str) -> None:
    bench = opened()
    refused = bench.call(body, conn=GATEWAY, attempt=0)
    assert isinstance(refused, Denied)
    assert refused.code == code
    assert not bench.ledger.episodes


def test_bounds_on_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_OPEN_EPISODES", 2), ("MAX_EPISODE_TURNS", 3), ("MAX_TURNS", 4)):
        monkeypatch.setattr(turns, name, most)
    bench = opened()
    for body in (ask("1"), ask("2"), ask("3"), ask("1", episode="f")):
        turn(bench, body)
    for body, why in (
        (ask("4"), "has 3 turns"),
        (ask("1", episode="g"), "over 2 episodes"),
        (ask("2", episode="f"), "over 4 turns"),
    ):
        refused = bench.call(body, conn=GATEWAY, attempt=0)
        assert isinstance(refused, Denied)
        assert refused.code == "full"
        assert why in refused.reason
    assert turn(bench, ask("1")).known, "what is known is answered all the same"


def test_another_key_and_a_worker_s_key_open_no_turn() -> None:
    bench = opened()
    for who in (PeerIdentity("owner", "another"), PeerIdentity("worker", "key-job11", "r", "job11")):
        for body in (ask(), EndEpisode("e"), GatewayPing()):
            refused = bench.call(body, conn=GATEWAY, attempt=0, who=who)
            assert isinstance(refused, Denied)
            assert refused.code == "not-owner"


def test_a_gateway_is_no_sign_of_a_trainer_s_life_and_does_not_take_its_place() -> None:
    bench = opened()
    seen = bench.router.core.runs["r"].trainer.seen_at
    bench.tick(5)
    turn(bench)
    assert isinstance(bench.call(GatewayPing(), conn=GATEWAY, attempt=0), Pong)
    trainer = bench.router.core.runs["r"].trainer
    assert (trainer.seen_at, trainer.conn) == (seen, bench.trainer)


def test_turns_request_engines_and_keep_them_between_turns() -> None:
    bench = opened()
    bench.join(W1)
    for i in range(9):
        turn(bench, ask(str(i)))
    assert bench.router.demand(bench.now)[0].engines == 3, "nine samples, four at a time"
    run = bench.router.core.runs["r"]
    while run.turns.open:
        for lease in bench.leases(W1):
            finish(bench, W1, lease)
    bench.now += turns.DEMAND_HOLD_S - 1
    run.trainer.seen_at = bench.now
    assert bench.router.demand(bench.now)[0].engines == 3
    bench.now += 2
    assert bench.router.demand(bench.now)[0].engines == 0


def test_an_ended_episode_cannot_be_opened_again() -> None:
    episode = Episode(1, "e", 0.0)
    episode.transition(EpisodeStep.OPEN)
    episode.transition(EpisodeStep.END)
    with pytest.raises(IllegalTransition):
        episode.transition(EpisodeStep.OPEN)


def test_a_turn_whose_weights_are_gone_is_given_up_and_made_anew_when_it_is_asked_for_again() -> None:
    bench = opened()
    bench.join(W1)
    first = turn(bench)
    [lease] = bench.leases(W1)
    bench.chunk(W1, lease, 0, 3)
    bench.take(GATEWAY, TurnTokens)
    bench.open()  # the trainer began anew: what it served is gone with it
    bench.publish(2)
    bench.handle(JobGone("job11", 0, "preempted", crashed=False))
    bench.join(W2, 2)
    assert bench.leases(W2) == []
    bench.tick(turns.UNSERVED_S - 1)
    assert bench.take(GATEWAY, TurnTokens) == []
    bench.say(W2, Heartbeat((), 0, 2))
    bench.tick(3)
    [told] = bench.take(GATEWAY, TurnTokens)
    assert "version 1" in str(told.error)
    again = turn(bench)
    assert (again.known, again.number, again.turn_id > first.turn_id) == (False, 2, True)
    bench.restart()
    assert turn(bench).number == 2


def test_a_turn_is_given_up_too_where_the_sample_that_waits_has_no_token_and_another_has() -> None:
    bench = opened()
    bench.join(W1)
    first = turn(bench, ask(n=2))
    whole, lease = bench.leases(W1)
    finish(bench, W1, whole)
    bench.open()  # the trainer began anew: what it served is gone with it
    bench.publish(2)
    bench.handle(JobGone("job11", 0, "preempted", crashed=False))
    bench.join(W2, 2)
    assert bench.leases(W2) == []
    bench.take(GATEWAY, TurnTokens)
    bench.tick(turns.UNSERVED_S - 1)
    bench.say(W2, Heartbeat((), 0, 2))
    bench.tick(3)
    [told] = bench.take(GATEWAY, TurnTokens)
    assert (told.index, "version 1" in str(told.error)) == (lease.key.index, True)
    again = turn(bench, ask(n=2))
    assert again.turn_id > first.turn_id
    bench.restart()
    assert turn(bench, ask(n=2)) == msgspec.structs.replace(again, known=True)


def test_an_episode_that_ended_before_its_first_turn_came_takes_none() -> None:
    bench = opened()
    for _ in range(2):
        assert bench.call(EndEpisode("e"), conn=GATEWAY, attempt=0) == Ok()
    for _ in range(2):
        refused = bench.call(ask(), conn=GATEWAY, attempt=0)
        assert isinstance(refused, Denied)
        assert refused.code == "ended"
        bench.restart()
    assert [e.state for e in bench.ledger.episodes.values()] == ["ended"]


def test_bounds_on_open_samples_and_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = opened()
    turn(bench, ask("1", n=2))
    for name, most, why in (
        ("MAX_EPISODE_SAMPLES", 3, "3 samples of the episode"),
        ("MAX_OPEN_SAMPLES", 3, "3 samples of the run"),
        ("MAX_EPISODE_PROMPT_BYTES", len(PROMPT), "prompts of the episode"),
        ("MAX_OPEN_PROMPT_BYTES", len(PROMPT), "prompts of the run"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(turns, name, most)
            refused = bench.call(ask("2", n=2), conn=GATEWAY, attempt=0)
            assert isinstance(refused, Denied)
            assert (refused.code, why in refused.reason) == ("full", True)
    turn(bench, ask("2", n=2))

"""Turns go to the engine that has their prefix where that saves more than it costs; and in the router, by what it believes to be cached."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks import agent_turns, agent_turns_daemon
from scavenger.ledger import records as rec
from scavenger.policy import affinity
from scavenger.policy.affinity import Engine, Speeds, Waiting, place
from scavenger.protocol.messages import EndEpisode, Lease, WeightsLoaded
from scavenger.router.core.decision_log import PolicyCode
from scavenger.router.core.events import JobGone
from tests.router import harness
from tests.router.harness import Bench, root, token
from tests.router.memory_ledger import Ledger
from tests.router.test_prefixes import GATEWAY, Agent

SPEEDS = Speeds(prefill_s=0.001, completion=100.0, prefills=1, completions=1)


def chosen(
    waiting: list[Waiting], engines: list[Engine], speeds: Speeds = SPEEDS
) -> list[tuple[int, int, bool]]:
    return [(p.sample_id, p.worker_id, p.waits) for p in place(waiting, engines, speeds)]


# ---------------------------------------------------------------- the decision


def test_without_a_prefix_anywhere_the_emptiest_engine_is_taken() -> None:
    engines = [Engine(1, 2, 4), Engine(2, 1, 4), Engine(3, 1, 4)]
    assert chosen([Waiting(i, 50, 0.0) for i in range(1, 9)], engines) == [
        (1, 2, False),
        (2, 3, False),
        (3, 1, False),
        (4, 2, False),
        (5, 3, False),
        (6, 1, False),
        (7, 2, False),
        (8, 3, False),
    ]


@pytest.mark.parametrize(
    ("holder", "other", "waited", "expected"),
    [
        (Engine(1, 3, 4, token_s=0.01), Engine(2, 0, 4, token_s=0.01), 0.0, (1, False)),  # free: 1 s is saved
        (
            Engine(1, 3, 4, token_s=0.03),
            Engine(2, 0, 4, token_s=0.01),
            0.0,
            (2, False),
        ),  # it decodes 2 s longer
        (Engine(1, 4, 4, token_s=0.01), Engine(2, 0, 4, token_s=0.01), 0.0, (1, True)),  # a slot in 0.25 s
        (Engine(1, 4, 4, token_s=0.05), Engine(2, 0, 4, token_s=0.05), 0.0, (2, False)),  # a slot in 1.25 s
        (
            Engine(1, 4, 4, token_s=0.01),
            Engine(2, 0, 4, token_s=0.01),
            0.8,
            (2, False),
        ),  # it has waited long enough
        (Engine(1, 4, 4), Engine(2, 0, 4), 0.0, (2, False)),  # nobody knows for how long
    ],
)
def test_a_turn_goes_where_it_is_done_first(
    holder: Engine, other: Engine, waited: float, expected: tuple[int, bool]
) -> None:
    [found] = place([Waiting(7, 1100, waited, [(1, 1000)])], [holder, other], SPEEDS)
    assert (found.worker_id, found.waits) == expected
    assert (found.holder_id, found.cached, found.saved_s) == (1, 1000, 1.0)
    for number in ("1000 of 1100 tokens", "1.000 s of prefill"):
        assert number in found.reason


def test_where_all_engines_are_full_nobody_chooses() -> None:
    full = [Engine(1, 4, 4, token_s=0.01), Engine(2, 4, 4, token_s=0.01)]
    assert chosen([Waiting(7, 1100, 0.0, [(1, 1000)])], full) == []


def test_those_that_wait_for_an_engine_are_its_queue() -> None:
    full, free = Engine(1, 4, 4, token_s=0.012), Engine(2, 0, 8, token_s=0.012)
    waiting = [Waiting(i, 1000, 0.0, [(1, 1000)]) for i in range(1, 6)]
    assert chosen(waiting, [full, free]) == [
        (1, 1, True),
        (2, 1, True),
        (3, 1, True),
        (4, 2, False),
        (5, 2, False),
    ]


def test_a_node_where_an_engine_failed_on_it_is_avoided_though_it_has_the_prefix() -> None:
    engines = [Engine(1, 0, 4, "sick"), Engine(2, 3, 4, "well")]
    assert chosen([Waiting(1, 1000, 0.0, [(1, 900)], frozenset({"sick"}))], engines) == [(1, 2, False)]
    assert chosen([Waiting(1, 1000, 0.0, [(1, 900)], frozenset({"sick"}))], engines[:1]) == [(1, 1, False)]


def test_the_engine_with_more_of_the_prefix_wins_unless_it_is_slow() -> None:
    sample = Waiting(1, 1000, 0.0, [(1, 900), (2, 400)])
    assert chosen([sample], [Engine(1, 1, 4, token_s=0.01), Engine(2, 1, 4, token_s=0.01)]) == [(1, 1, False)]
    assert chosen([sample], [Engine(1, 4, 4, token_s=0.03), Engine(2, 1, 4, token_s=0.03)]) == [(1, 2, False)]


def test_an_engine_s_pace_is_that_of_its_turns_without_their_prefill_and_short_ones_weigh_little() -> None:
    first = SPEEDS.paced(0.0, 100, 3.0, 1000)
    assert first == pytest.approx(0.02), "1 s of it was prefill"
    assert SPEEDS.paced(first, 100, 7.0, 1000) == pytest.approx(0.02 + 0.25 * 0.04)
    assert SPEEDS.paced(first, 1, 0.9, 0) == pytest.approx(0.02 + 0.88 / 301)
    assert SPEEDS.paced(first, 0, 0.9, 0) == SPEEDS.paced(first, 1, 0.0, 0) == first
    assert SPEEDS.paced(first, 100, 0.5, 1000) < first


def test_speeds_are_learned_and_slow_measurements_weigh_little() -> None:
    speeds = Speeds()
    assert speeds.prefill_s == affinity.PRIOR_PREFILL_S
    speeds.prefilled(affinity.LEAST_TOKENS - 1, 9.0)
    speeds.prefilled(1000, 0.0)
    assert speeds.prefills == 0
    speeds.prefilled(1000, 2.0)
    assert speeds.prefill_s == 0.002
    speeds.prefilled(1000, 4.0)
    assert speeds.prefill_s == pytest.approx(0.002 + affinity.SLOWER * 0.002)
    for _ in range(20):
        speeds.prefilled(1000, 1.0)
    assert speeds.prefill_s == pytest.approx(0.001, rel=0.01)
    for tokens in (10, 20, 30):
        speeds.completed(tokens)
    assert speeds.completion == 20.0


# ---------------------------------------------------------------- in the router


@pytest.fixture
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of long contexts that keep prefixes."""
    of = msgspec.structs.replace(harness.SPEC, name="vllm", context_length=1 << 17)
    monkeypatch.setattr(harness, "SPEC", of)


def pair() -> Agent:
    """An agent whose run has two engines, worker 1 on connection 11 and worker 2 on 12."""
    agent = Agent(Ledger())
    agent.bench.join(12)
    return agent


def leased(bench: Bench) -> list[tuple[int, Lease]]:
    return [(conn, lease) for conn in (11, 12, 13) for lease in bench.leases(conn)]


def generate(agent: Agent, prompt: list[int], most: int = 8) -> tuple[int, list[int]]:
    """One turn: who had it, and what it said."""
    agent.ask(prompt, most=most)
    [(conn, lease)] = leased(agent.bench)
    agent.bench.chunk(conn, lease, 0, most)
    return conn, [token(lease.sample_id, i) for i in range(most)]


def busy(agent: Agent, samples: int) -> list[tuple[int, Lease]]:
    """Other turns on the engines, and who has them."""
    for i in range(samples):
        agent.ask([50 + i])
    return leased(agent.bench)


def decisions(bench: Bench) -> list[rec.Decision]:
    return [r for r in bench.ledger.log if isinstance(r, rec.Decision) and r.policy == "affinity"]


def test_a_turn_returns_to_the_engine_of_its_parent_though_another_is_emptier(long_context: None) -> None:
    agent = pair()
    conn, said = generate(agent, [1] * 600)
    busy(agent, 3)  # two of them there
    found = []
    prompt = [1] * 600 + said
    for _ in range(4):
        at, said = generate(agent, [*prompt, 2])
        prompt = [*prompt, 2, *said]
        found.append(at)
    assert found == [conn] * 4
    told = decisions(agent.bench)[0]
    assert (told.code, told.action) == (PolicyCode.CACHED, "lease")
    assert "608 of 609 tokens" in told.reason
    assert json.loads(told.inputs)["cached_tokens"] == 608


def test_two_branches_go_to_the_engines_that_have_them(long_context: None) -> None:
    agent = pair()
    agent.ask([1] * 600, n=2)
    one, two = leased(agent.bench)
    assert {one[0], two[0]} == {11, 12}
    for conn, lease in (one, two):
        agent.bench.chunk(conn, lease, 0, 8)
    for conn, lease in (two, one):
        said = [token(lease.sample_id, i) for i in range(8)]
        assert generate(agent, [1] * 600 + said + [3])[0] == conn


def test_an_engine_that_is_lost_or_was_emptied_has_nothing(long_context: None) -> None:
    agent = pair()
    bench = agent.bench
    conn, said = generate(agent, [1] * 600)
    assert conn == 11
    busy(agent, 1)
    bench.handle(JobGone("job11", 0, "preempted", crashed=False))
    leased(bench)
    assert generate(agent, [1] * 600 + said + [2])[0] == 12
    assert decisions(bench) == []


def test_other_weights_empty_a_cache(long_context: None) -> None:
    agent = pair()
    bench = agent.bench
    _, said = generate(agent, [1] * 600)
    bench.publish(2)
    for conn in (11, 12):
        bench.say(conn, WeightsLoaded(2, root(2)))
    generate(agent, [1] * 600 + said + [2])
    assert decisions(bench) == []


def test_what_a_cache_has_forgotten_is_not_counted(long_context: None) -> None:
    agent = pair()
    run = agent.bench.router.core.runs["r"]
    conn, said = generate(agent, [1] * 600)
    holder = next(w for w in run.workers.values() if w.conn == conn)
    holder.engine.cache_tokens = 1000
    holder.engine.entered += 391  # and one token of another turn: 392 and 608 fit
    busy(agent, 1)
    at, _ = generate(agent, [1] * 600 + said + [2])
    assert at == conn
    before = len(decisions(agent.bench))
    assert before == 1
    generate(agent, [1] * 600 + said + [3])
    assert len(decisions(agent.bench)) == before, "what came since has driven it out"


@pytest.mark.parametrize(
    ("name", "options"), [("reference", ""), ("vllm", '{"enable_prefix_caching": false}')]
)
def test_an_engine_that_keeps_no_prefixes_is_neither_chosen_nor_awaited_for_them(
    name: str, options: str, long_context: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = msgspec.structs.replace(harness.SPEC, name=name, options=options)
    monkeypatch.setattr(harness, "SPEC", of)
    agent = pair()
    conn, said = generate(agent, [1] * 600)
    assert conn == 11
    busy(agent, 1)
    at, _ = generate(agent, [1] * 600 + said + [2])
    assert at == 12, "the emptiest"
    assert decisions(agent.bench) == []


def test_a_full_engine_is_waited_for_only_as_long_as_its_cache_is_worth(long_context: None) -> None:
    agent = pair()
    bench = agent.bench
    run = bench.router.core.runs["r"]
    conn, said = generate(agent, [1] * 600)
    assert conn == 11
    holder = next(w for w in run.workers.values() if w.conn == conn)
    lease = next(lease for at, lease in busy(agent, 7) if at == 12)
    bench.chunk(12, lease, 0, 8)
    assert len(holder.leases) == 4
    run.turns.speeds = Speeds(0.01, 8.0, 1, 1)  # 6 s of prefill
    holder.engine.turn_token_s = 1.0  # a slot in 2 s
    agent.ask([1] * 600 + said + [2])
    assert leased(bench) == [], "it waits for its prefix"
    [told] = [d for d in decisions(bench) if d.code == PolicyCode.AWAITED]
    assert (told.action, "6.080 s of prefill saved, 2.000 s of queue" in told.reason) == ("wait", True)
    agent.ask([9])
    [(at, _)] = leased(bench)
    assert at == 12, "and holds nobody up"
    [waiting] = run.turns.queue.held_since
    run.turns.queue.held_since[waiting] -= 3.9
    bench.tick(0.1)
    assert leased(bench) == []
    bench.tick(0.25)
    [(at, lease)] = leased(bench)
    assert (at, len(lease.prompt)) == (12, 4 * 609), "it is not worth more than 6 s in all"
    assert decisions(bench)[-1].code == PolicyCode.ELSEWHERE


def test_a_slot_that_comes_free_at_the_holder_is_taken(long_context: None) -> None:
    agent = pair()
    bench = agent.bench
    run = bench.router.core.runs["r"]
    _, said = generate(agent, [1] * 600)
    there = [lease for at, lease in busy(agent, 7) if at == 11]
    run.turns.speeds = Speeds(0.01, 8.0, 1, 1)
    next(w for w in run.workers.values() if w.conn == 11).engine.turn_token_s = 1.0
    agent.ask([1] * 600 + said + [2])
    assert leased(bench) == []
    bench.chunk(11, there[0], 0, 8)
    assert [at for at, _ in leased(bench)] == [11]
    assert not run.turns.queue.held_since


def test_an_episode_between_its_turns_holds_no_slot(long_context: None) -> None:
    agent = pair()
    generate(agent, [1] * 600)
    assert all(not w.leases for w in agent.bench.router.core.workers.values())
    assert not agent.bench.router.core.runs["r"].turns.open


def test_a_restarted_daemon_believes_nothing_of_caches(long_context: None) -> None:
    agent = pair()
    bench = agent.bench
    _, said = generate(agent, [1] * 600)
    bench.restart()
    bench.publish()
    bench.hello(11, loaded=1, loaded_root=root(1))
    bench.hello(12, loaded=1, loaded_root=root(1))
    agent.ask([1] * 600 + said + [2])
    assert len(leased(bench)) == 1
    assert decisions(bench) == []
    assert agent.parents()[-1] == (1, 608), "though the ledger knows the prefix"
    assert bench.call(EndEpisode("e"), conn=GATEWAY, attempt=0)


def test_an_engine_is_as_fast_as_the_turns_that_end_on_it_whatever_its_heartbeats_saw(
    long_context: None,
) -> None:
    agent = pair()
    bench = agent.bench
    run = bench.router.core.runs["r"]
    engines = {w.conn: w.engine for w in run.workers.values()}
    prompt = [1] * 600
    engines[11].tokens_per_s, engines[12].tokens_per_s = (
        0.5,
        50.0,
    )  # a heartbeat fell between turns of the first
    engines[12].turn_token_s = 0.1
    for _ in range(8):
        agent.ask([*prompt, 2], most=8)
        [(conn, lease)] = leased(bench)
        bench.now += 0.8
        bench.chunk(conn, lease, 0, 8)
        prompt = [*prompt, 2, *(token(lease.sample_id, i) for i in range(8))]
    assert conn == 11
    assert engines[11].turn_token_s == pytest.approx(0.1, abs=0.02)
    busy(agent, 3)
    assert generate(agent, [*prompt, 2])[0] == 11, "it saves more than it costs"


def test_the_prefill_of_a_turn_is_measured_by_its_first_tokens(long_context: None) -> None:
    agent = pair()
    bench = agent.bench
    speeds = bench.router.core.runs["r"].turns.speeds
    agent.ask([1] * 1000)
    [(conn, lease)] = leased(bench)
    bench.now += 2.0 + bench.limits.flush_ms / 1000
    bench.chunk(conn, lease, 0, 8)
    assert (speeds.prefills, speeds.completions) == (1, 1)
    assert speeds.prefill_s == pytest.approx(0.002)
    assert speeds.completion == 8


# ---------------------------------------------------------------- routed as a benchmark asks


def test_the_benchmark_s_routings_go_back_always_or_never() -> None:
    engines = [Engine(1, 1, 2, token_s=0.01), Engine(2, 0, 2, token_s=0.01)]
    turns = [Waiting(i, 1100, 0.0, [(1, 1000)]) for i in (1, 2)] + [Waiting(3, 50, 0.0)]
    assert [(p.sample_id, p.worker_id) for p in agent_turns.sticky(turns, engines, SPEEDS)] == [
        (1, 1),
        (3, 2),
    ]
    turns.append(Waiting(4, 60, 0.0))
    placed = [(p.sample_id, p.worker_id) for p in agent_turns.elsewhere(turns, engines, SPEEDS)]
    assert placed == [(1, 2), (2, 2), (3, 1)]


@pytest.mark.parametrize(("routing", "returns"), [("always sticky", True), ("always elsewhere", False)])
def test_the_router_itself_routes_as_the_benchmark_asks(
    routing: str, returns: bool, long_context: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(affinity, "place", affinity.place)  # undone after the test
    agent_turns_daemon.choose(tmp_path, "ours")
    agent_turns_daemon.route_as_written(tmp_path)
    agent = pair()
    before, said = generate(agent, [1] * 600)
    prompt = [1] * 600 + said
    agent_turns_daemon.choose(tmp_path, routing)
    for _ in range(3):
        at, said = generate(agent, [*prompt, 2])
        assert (at == before) is returns
        prompt, before = [*prompt, 2, *said], at


# ---------------------------------------------------------------- simulated


@pytest.mark.parametrize("seed", range(3))
def test_in_simulation_few_tokens_are_computed_twice_and_no_turn_waits_for_it(seed: int) -> None:
    site = agent_turns.Site(engines=4, slots=4, episodes=24, turns=8, lost_every_s=120.0)
    found = {name: agent_turns.outcome(site, routing, seed) for name, routing in agent_turns.ROUTINGS.items()}
    ours, elsewhere, sticky = found["ours"], found["always elsewhere"], found["always sticky"]
    assert ours.prefilled < 0.7 * elsewhere.prefilled
    assert ours.mean_s < elsewhere.mean_s
    assert ours.mean_s < 1.1 * sticky.mean_s

"""An engine's batch, computed between events, against an engine that is stepped token by token."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import msgspec
import pytest

from scavenger.errors import EngineError
from scavenger.simulate.decode import Efficiency, GpuDatasheet, Model, SimulatedEngine
from scavenger.simulate.presets import engine
from scavenger.simulate.sequences import (
    WATERMARK,
    EngineBatch,
    Finished,
    Happening,
    Joined,
    Preempted,
    SimulatedRequest,
)

H100_8B = engine("Qwen3-8B", "H100")
SMALL = Model("small", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=500)
LOW = Efficiency(bandwidth=1.0, decode_compute=1.0, overhead_s=0.01, prefill_compute=1.0, memory_share=1.0)


def with_capacity(tokens: int) -> SimulatedEngine:
    nbytes = SMALL.weight_bytes + tokens * SMALL.kv_bytes_per_token
    spec = SimulatedEngine(SMALL, GpuDatasheet("small", nbytes, 1e6, 1e8, 1e9, 1e9), LOW)
    assert spec.kv_capacity == tokens
    return spec


def run_out(batch: EngineBatch) -> list[Happening]:
    happened = []
    while batch.next_time() < math.inf:
        happened += batch.advance(batch.next_time())
    return happened


@dataclass
class Slot:
    request: SimulatedRequest
    tokens: int


def step_by_step(
    spec: SimulatedEngine, requests: list[tuple[float, SimulatedRequest]]
) -> list[tuple[str, int, int, float]]:
    """The same rules, one token at a time and with plain lists: (what, key, tokens, time)."""
    coming = sorted(requests, key=lambda one: one[0])
    waiting: list[Slot] = []
    running: list[Slot] = []
    now = 0.0
    log = []

    def stored(slots: list[Slot]) -> int:
        prompts = {slot.request.prompt: slot.request.prompt_tokens for slot in slots}
        return sum(prompts.values()) + sum(slot.tokens for slot in slots)

    while coming or waiting or running:
        while coming and coming[0][0] <= now:
            _, request = coming.pop(0)
            waiting.append(Slot(request, request.generated))
        admitted: list[Slot] = []
        parts = []
        while waiting and len(running) + len(admitted) < spec.max_sequences:
            here = running + admitted
            watermark = WATERMARK * spec.kv_capacity if here else 0
            if stored([*here, waiting[0]]) + len(here) + 1 + watermark > spec.kv_capacity:
                break
            slot = waiting.pop(0)
            shared = any(slot.request.prompt == other.request.prompt for other in here)
            cached = slot.request.prompt_tokens if shared else 0
            parts.append((max(1, slot.request.prompt_tokens + slot.tokens - cached), cached))
            admitted.append(slot)
        if admitted:
            now += spec.prefill_many_s(parts)
            running += admitted
            continue
        if not running:
            now = coming[0][0]
            continue
        if stored(running) + len(running) > spec.kv_capacity:
            slot = running.pop()
            waiting.insert(0, slot)
            log.append(("preempted", slot.request.key, slot.tokens, now))
            continue
        now += spec.step_s(len(running), sum(slot.request.prompt_tokens + slot.tokens for slot in running))
        for slot in list(running):
            slot.tokens += 1
            if slot.tokens == slot.request.target:
                running.remove(slot)
                log.append(("finished", slot.request.key, slot.tokens, now))
    return log


def computed(
    spec: SimulatedEngine, requests: list[tuple[float, SimulatedRequest]]
) -> list[tuple[str, int, int, float]]:
    batch = EngineBatch(spec)
    happened = []
    for at in sorted({time for time, _ in requests}):
        happened += batch.advance(at)
        batch.add([request for time, request in requests if time == at], at)
    happened += run_out(batch)
    assert batch.size == 0
    assert batch.stored_tokens(batch._since) == 0
    names = {Finished: "finished", Preempted: "preempted"}
    return [
        (names[type(one)], one.key, one.generated, one.time_s)
        for one in happened
        if not isinstance(one, Joined)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_finish_times_are_those_of_stepping_token_by_token(seed: int) -> None:
    draw = random.Random(seed)
    requests = []
    for key in range(draw.randint(1, 40)):
        prompt = key // draw.choice([1, 4, 8])
        generated = draw.choice([0, 0, draw.randint(1, 500)])
        requests.append(
            (
                0.0,
                SimulatedRequest(key, prompt, 50 + 37 * prompt, generated, generated + draw.randint(1, 1500)),
            )
        )
    exact, ours = step_by_step(H100_8B, requests), computed(H100_8B, requests)
    assert sorted(one[:3] for one in exact) == sorted(one[:3] for one in ours)
    ends = {key: time for _, key, _, time in exact}
    for _, key, _, time in ours:
        assert time == pytest.approx(ends[key], rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_samples_that_come_while_others_decode_finish_within_one_percent_of_stepping(seed: int) -> None:
    draw = random.Random(100 + seed)
    spec = replace(H100_8B, max_sequences=12)
    requests = [
        (
            draw.uniform(0, 20),
            SimulatedRequest(key, key // 4, 100 + 50 * (key // 4), 0, draw.randint(200, 1500)),
        )
        for key in range(40)
    ]
    exact = {key: time for _, key, _, time in step_by_step(spec, requests)}
    for _, key, _, time in computed(spec, requests):
        assert time == pytest.approx(exact[key], rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_a_full_cache_preempts_and_recomputes_as_stepping_does(seed: int) -> None:
    draw = random.Random(200 + seed)
    spec = with_capacity(1500)
    requests = [
        (0.0, SimulatedRequest(key, key // 3, 40 + 10 * (key // 3), 0, draw.randint(60, 400)))
        for key in range(draw.randint(14, 24))
    ]
    exact, ours = step_by_step(spec, requests), computed(spec, requests)
    assert any(what == "preempted" for what, *_ in exact)
    assert [one[:3] for one in ours] == [one[:3] for one in exact]
    assert [one[3] for one in ours] == pytest.approx([one[3] for one in exact], rel=1e-6)


def test_a_newcomer_waits_until_there_is_room_to_spare() -> None:
    batch = EngineBatch(with_capacity(1000))
    batch.add([SimulatedRequest(1, 0, 100, 800, 850)], 0.0)
    batch.advance(batch.next_time())
    # 900 are held: 88 more leave the spare 1 % and a token for each, 89 do not
    batch.add([SimulatedRequest(2, 1, 80, 9, 200)], batch._since)
    assert (batch.running, batch.size, len(batch._joining)) == (1, 2, 0)
    batch.remove(2, batch._since)
    batch.add([SimulatedRequest(3, 1, 80, 8, 200)], batch._since)
    assert [request.key for request in batch._joining] == [3]


def test_every_token_is_counted_once_whatever_happens_on_the_way() -> None:
    draw = random.Random(5)
    spec = with_capacity(1200)
    engines = [EngineBatch(spec), EngineBatch(spec)]
    target = {key: draw.randint(30, 300) for key in range(60)}
    for side in (0, 1):
        engines[side].add(
            (SimulatedRequest(key, key // 4, 30, 0, target[key]) for key in target if key % 2 == side), 0.0
        )
    finished: dict[int, int] = {}
    last = dict.fromkeys(target, 0)
    now = 0.0
    moves = 0
    while len(finished) < len(target):
        now += draw.choice([0.03, 0.4, 2.0])
        for batch in engines:
            for one in batch.advance(now):
                if isinstance(one, Finished):
                    assert one.key not in finished
                    finished[one.key] = one.generated
            for key, tokens in batch.progress(now).items():
                assert last[key] <= tokens < target[key]
                last[key] = tokens
                assert batch.generated(key, now) == tokens
            assert batch.stored_tokens(now) <= spec.kv_capacity + 1e-6
        here, there = draw.sample(engines, 2)
        for key in list(here)[:2]:
            moves += 1
            tokens = here.remove(key, now)
            assert tokens == last[key]
            assert key not in here
            there.add([SimulatedRequest(key, key // 4, 30, tokens, target[key])], now)
    assert finished == target
    assert moves > 10
    assert sum(batch.preemptions for batch in engines) > 0
    assert sum(batch.decoded_tokens for batch in engines) == sum(target.values())


def test_siblings_prefill_and_store_their_prompt_once_on_one_engine_and_twice_on_two() -> None:
    one, two, other = EngineBatch(H100_8B), EngineBatch(H100_8B), EngineBatch(H100_8B)
    group = [SimulatedRequest(key, 0, 1000, 0, 100) for key in range(8)]
    one.add(group, 0.0)
    two.add(group[:4], 0.0)
    other.add(group[4:], 0.0)
    assert one.stored_tokens(0.0) == 1000
    assert one.next_time() == pytest.approx(H100_8B.prefill_many_s([(1000, 0), *[(1, 1000)] * 7]))
    run_out(one), run_out(two), run_out(other)
    assert one.prefilled_tokens == 1000 + 7
    assert two.prefilled_tokens + other.prefilled_tokens == 2 * (1000 + 3)


def test_a_moved_sample_is_prefilled_with_its_answer() -> None:
    batch = EngineBatch(H100_8B)
    batch.add([SimulatedRequest(1, 0, 300, 5000, 6000)], 0.0)
    assert batch.next_time() == pytest.approx(H100_8B.prefill_s(5300))
    assert batch.advance(batch.next_time()) == [Joined(pytest.approx(H100_8B.prefill_s(5300)), (1,))]  # type: ignore[arg-type]
    assert run_out(batch)[-1] == Finished(pytest.approx(batch._since), 1, 6000)  # type: ignore[arg-type]
    assert batch.decoded_tokens == 1000


def test_what_the_cache_has_of_a_sample_that_comes_back_is_not_prefilled_again() -> None:
    batch = EngineBatch(H100_8B)
    batch.add([SimulatedRequest(1, 0, 300, 5000, 6000, 5200)], 0.0)
    assert batch.next_time() == pytest.approx(H100_8B.prefill_s(100, 5200))
    assert (batch.prefilled_tokens, batch.stored_tokens(0.0)) == (100, 5300)


def test_decoding_stalls_while_a_newcomer_is_prefilled() -> None:
    batch = EngineBatch(H100_8B)
    batch.add([SimulatedRequest(1, 0, 100, 0, 5000)], 0.0)
    before = batch.generated(1, 2.0)
    batch.add([SimulatedRequest(2, 1, 30_000, 0, 5000)], 2.0)
    stall = H100_8B.prefill_s(30_000)
    assert batch.generated(1, 2.0 + stall * 0.99) == before
    assert batch.generated(1, 2.0 + stall + 1.0) > before


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    spec = with_capacity(500)
    batch = EngineBatch(spec)
    batch.add([SimulatedRequest(1, 0, 100, 0, 400)], 0.0)
    due = batch.next_time()
    with pytest.raises(EngineError, match="the engine has KV for 500"):
        batch.add([SimulatedRequest(2, 1, 101, 0, 400)], 0.0)
    with pytest.raises(ValueError, match="here already"):
        batch.add([SimulatedRequest(1, 0, 100, 0, 400)], 0.0)
    with pytest.raises(KeyError):
        batch.remove(3, 0.0)
    assert (batch.next_time(), batch.size) == (due, 1)
    batch.advance(due)
    with pytest.raises(ValueError, match="asked for"):
        batch.advance(due - 1.0)
    for wrong in ((0, 0, 10), (10, 10, 10), (10, -1, 10)):
        with pytest.raises(ValueError, match="sample 9"):
            SimulatedRequest(9, 0, *wrong)
    with pytest.raises(KeyError):
        batch.generated(3, due)


def test_a_batch_runs_alike_however_often_it_is_looked_at() -> None:
    def play(looks: int) -> list[Happening]:
        batch = EngineBatch(with_capacity(1500))
        for key in range(16):
            batch.add([SimulatedRequest(key, key // 4, 50, 0, 40 + 20 * key)], 0.0)
        happened: list[Happening] = []
        for look in range(looks):
            happened += batch.advance(look * 4.0 / looks)
        return happened + run_out(batch)

    few, many = play(1), play(500)
    assert [msgspec.structs.replace(one, time_s=0.0) for one in few] == [
        msgspec.structs.replace(one, time_s=0.0) for one in many
    ]
    assert [one.time_s for one in few] == pytest.approx([one.time_s for one in many], rel=1e-9)

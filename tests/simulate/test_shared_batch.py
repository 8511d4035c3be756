"""Samples of two runs in one engine's batch: they cost what as many samples of one run cost, and each run hears of its own."""

from __future__ import annotations

from scavenger.simulate.sequences import EngineBatch, Finished, Joined, SimulatedRequest
from scavenger.simulate.shared_batch import BatchPart, SharedBatch
from tests.simulate.test_driver import ENGINE


def request(key: int, target: int, prompt: int | None = None) -> SimulatedRequest:
    return SimulatedRequest(key, key if prompt is None else prompt, 512, 0, target)


def ends(batch: EngineBatch) -> list[Finished]:
    found = list[Finished]()
    while batch.size:
        found += [one for one in batch.advance(batch.next_time()) if isinstance(one, Finished)]
    return found


def read(part: BatchPart, now: float) -> list[tuple[int, float, int]]:
    return [(one.key, one.time_s, one.generated) for one in part.advance(now) if isinstance(one, Finished)]


def shared() -> SharedBatch:
    return SharedBatch(EngineBatch(ENGINE), lambda: None)


def test_two_runs_samples_cost_what_their_sum_costs() -> None:
    one = EngineBatch(ENGINE)
    one.add([request(key, 1000 + 100 * key) for key in range(4)], 0.0)
    one.add([request(4 + key, 1400 + 100 * key) for key in range(4)], 0.0)
    expected = ends(one)
    both = shared()
    both.lender.add([request(key, 1000 + 100 * key) for key in range(4)], 0.0)
    both.borrower.add([request(key, 1400 + 100 * key) for key in range(4)], 0.0)
    found = [*read(both.lender, 1e6), *read(both.borrower, 1e6)]
    mine = {(tokens, round(at, 6)) for _, at, tokens in found}
    assert mine == {(one.generated, round(one.time_s, 6)) for one in expected}
    assert both.batch.decoded_tokens == one.decoded_tokens == both.lender.decoded_tokens
    assert both.borrower.decoded_tokens == 0, "counted once, at the engine's lender"


def test_each_run_hears_of_its_own_samples_though_their_keys_are_equal() -> None:
    both = shared()
    both.lender.add([request(7, 100)], 0.0)
    both.borrower.add([request(7, 200), request(8, 300)], 0.0)
    assert (both.lender.size, both.borrower.size) == (3, 2), "the engine works for its lender while it works"
    assert [(key, tokens) for key, _, tokens in read(both.borrower, 1e6)] == [(7, 200), (8, 300)]
    assert [(key, tokens) for key, _, tokens in read(both.lender, 1e6)] == [(7, 100)]
    assert (both.lender.size, both.borrower.size) == (0, 0)


def test_equal_prompts_of_two_runs_are_not_shared_in_the_cache() -> None:
    both = shared()
    both.lender.add([request(1, 100, prompt=5)], 0.0)
    both.borrower.add([request(1, 100, prompt=5)], 0.0)
    both.lender.advance(1e6)
    assert both.batch.prefilled_tokens == 2 * 512


def test_who_does_something_moves_the_other_ones_next_event() -> None:
    moved = list[str]()
    both = SharedBatch(EngineBatch(ENGINE), lambda: moved.append("lender"))
    both.borrower.changed = lambda: moved.append("borrower")
    both.lender.add([request(1, 1000)], 0.0)
    alone = both.lender.next_time()
    both.lender.advance(alone)
    alone = both.lender.next_time()
    assert moved == ["borrower", "borrower"]
    both.borrower.add([request(n, 1000) for n in range(64)], alone / 2)
    assert moved[2:] == ["lender"]
    assert both.lender.next_time() < alone, "the borrower's prefill is over sooner"
    both.borrower.advance(both.borrower.next_time())
    assert both.lender.next_time() > alone, "and then its rows slow the lender's sample"


def test_a_sample_that_ended_unread_may_be_asked_for_and_taken_away() -> None:
    """The other run's worker moved the time past its end: its engine has not heard of it."""
    both = shared()
    both.lender.add([request(1, 100), request(2, 100)], 0.0)
    both.borrower.add([request(1, 5000)], 0.0)
    both.borrower.generated(1, 30.0)
    assert 1 not in both.lender
    assert both.lender.generated(1, 30.0) == 99, "its last token is told when its engine reads that it ended"
    assert both.lender.progress(30.0) == {1: 99, 2: 99}
    assert both.lender.remove(1, 30.0) == 100
    assert both.lender.next_time() <= 30.0, "there is something to read"
    assert [key for key, _, _ in read(both.lender, 30.0)] == [2]
    assert all(isinstance(one, Joined) for one in both.borrower.advance(30.0))
    assert both.borrower.is_running(1)

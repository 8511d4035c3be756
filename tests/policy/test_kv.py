"""Whether a moved sample takes its KV blocks along: by what was measured, and never by a guess in the transfer's favour."""

from __future__ import annotations

import pytest

from scavenger.policy import kv
from scavenger.policy.kv import BySize, KvRates, decide


def test_the_quicker_of_the_two_is_chosen_and_the_decision_says_why() -> None:
    rates = KvRates()
    rates.prefills.note(1000, 2.0)
    rates.transfers.note(1_000_000, 0.5)
    found = decide(1000, 1000, rates)
    assert (found.take, found.transfer_s, found.prefill_s) == (True, 0.5, 2.0)
    assert found.reason == (
        "the blocks go along, 1000000 bytes of 1000 tokens are predicted to take 0.5000 s, less than the 2.0000 s of a prefill"
    )
    assert dict(found.inputs()) == {
        "tokens": 1000,
        "nbytes": 1_000_000,
        "transfer_s": 0.5,
        "prefill_s": 2.0,
        "within_s": 2.0,
        "ahead": 0,
    }
    rates.prefills = BySize()
    rates.prefills.note(1000, 0.4)
    slower = decide(1000, 1000, rates)
    assert (slower.take, slower.reason.partition(",")[0]) == (False, "prefilled again")


def test_an_engine_that_is_gone_before_is_not_asked() -> None:
    rates = KvRates()
    rates.prefills.note(1000, 2.0)
    rates.transfers.note(1_000_000, 0.5)
    assert decide(1000, 1000, rates, stays_s=0.6).take
    found = decide(1000, 1000, rates, stays_s=0.4)
    assert (found.take, found.within_s) == (False, 0.4)
    assert found.reason.endswith("less than the 2.0000 s of a prefill, and their engine is gone in 0.4000 s")


def test_what_goes_the_same_way_before_is_waited_for() -> None:
    rates = KvRates()
    rates.prefills.note(1000, 2.0)
    rates.transfers.note(1_000_000, 0.5)
    found = decide(1000, 1000, rates, ahead=4_000_000)
    assert (found.take, found.transfer_s, found.inputs()["ahead"]) == (False, pytest.approx(2.5), 4_000_000)
    assert "1000000 bytes of 1000 tokens behind 4000000 bytes are predicted" in found.reason
    rates.prefills = BySize()
    rates.prefills.note(1000, 0.5)
    assert not decide(1000, 1000, rates).take, "what is no quicker is not worth a try"


def test_without_a_measurement_the_link_is_slow_and_the_engine_fast() -> None:
    rates = KvRates()
    assert not decide(1000, 131_072, rates).take
    assert rates.prefill_s(1000) == pytest.approx(1000 * kv.PRIOR_PREFILL_S)
    assert rates.transfer_s(10**6) == pytest.approx(kv.SET_UP_S + 10**6 / kv.PRIOR_LINK)
    rates.weights_pulled(10**9, 10.0)
    assert rates.link == kv.PRIOR_LINK, "a slower pull says nothing"
    rates.weights_pulled(10**10, 1.0)
    rates.weights_pulled(0, 0.0)
    assert rates.transfer_s(10**6) == pytest.approx(kv.SET_UP_S + 10**6 / 10**10)


def test_a_size_that_was_never_seen_is_taken_for_what_it_takes_at_least_or_at_most() -> None:
    seen = BySize()
    assert (seen.least(100), seen.most(100)) == (None, None)
    seen.note(1000, 2.0)
    assert seen.least(100) == pytest.approx(0.2), "of a longer one, a token costs less"
    assert seen.least(100_000) == 2.0, "as long as the longest shorter one"
    assert seen.most(100) == 2.0
    assert seen.most(100_000) == pytest.approx(200.0)
    seen.note(100, 1.0)
    assert seen.least(1000) == 2.0
    assert seen.least(100) == 1.0
    seen.note(0, 1.0)
    seen.note(5, 0.0)
    assert len(seen.means) == 2


def test_a_slow_measurement_counts_for_less_than_a_fast_one() -> None:
    seen = BySize()
    seen.note(1000, 1.0)
    seen.note(1000, 2.0)
    assert seen.least(1000) == pytest.approx(1.0 + kv.SLOWER)
    seen = BySize()
    seen.note(1000, 2.0)
    seen.note(1000, 1.0)
    assert seen.least(1000) == pytest.approx(2.0 - kv.FASTER)


def test_blocks_are_waited_for_within_bounds() -> None:
    rates = KvRates()
    rates.transfers.note(1000, 0.001)
    rates.prefills.note(1000, 0.002)
    assert decide(1000, 1, rates).within_s == kv.LEAST_WAIT_S
    rates.prefills = BySize()
    rates.prefills.note(1000, 500.0)
    assert decide(1000, 1, rates).within_s == kv.MOST_WAIT_S

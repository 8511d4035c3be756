"""KV blocks that move with their samples: what an engine offers serves one lease, and only where it is predicted to be quicker."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scavenger.ledger import records as rec
from scavenger.policy import kv
from scavenger.protocol.messages import Goodbye, Held, KvKept, KvOffer, KvTried, Lease, WeightSource, Yielded
from scavenger.router.core import kv_moves, state
from tests.router import harness
from tests.router.harness import Bench
from tests.router.moves import W1, W2, one_lease

THERE = WeightSource("tcp://n11:5", "key", b"token")
#: Three tokens of the prompt and three that were generated: the last one's entry is not made yet.
CACHED = 5


def leaving(offer: dict[str, Any] | None = None, source: WeightSource = THERE, **options: object) -> Bench:
    """A sample has three tokens on W1, which offers its blocks and leaves; its prefill is known to take long."""
    bench, lease = one_lease(**options)
    bench.chunk(W1, lease, 0, 3)
    run = bench.router.core.runs["r"]
    run.kv.rates.prefills.note(CACHED, 1.0)
    given = {
        "sample_id": lease.sample_id,
        "epoch": lease.epoch,
        "number": 9,
        "tokens": CACHED,
        "token_nbytes": 64,
    }
    bench.say(W1, KvKept((KvOffer(**(given | (offer or {}))),), source))
    bench.say(W1, Goodbye("preempted", True))
    return bench


def leased(bench: Bench) -> Lease:
    (lease,) = bench.join(W2)
    return lease


def counts(bench: Bench) -> dict[str, int]:
    found = bench.router.core.runs["r"].kv
    return {name: getattr(found, name) for name in ("offered", "moved", "prefilled", "gone", "refused")}


def test_the_next_lease_names_the_blocks_and_the_ledger_says_why() -> None:
    bench = leaving()
    lease = leased(bench)
    assert lease.kv is not None
    assert (lease.kv.source, lease.kv.number, lease.kv.tokens) == (THERE, 9, CACHED)
    assert 0.1 <= lease.kv.within_s <= 10.0
    (said,) = [r for r in bench.ledger.log if isinstance(r, rec.Decision) and r.policy == "kv"]
    assert (said.action, said.code, said.subject) == ("transfer", "blocks", "sample 1")
    assert "320 bytes of 5 tokens" in said.reason
    assert msgspec.json.decode(said.inputs)["prefill_s"] == 1.0


def test_an_offer_serves_one_lease() -> None:
    bench = leaving()
    leased(bench)
    bench.say(W2, Goodbye("preempted", True))
    (again,) = bench.join(13)
    assert again.kv is None


def test_blocks_whose_prefill_is_quicker_are_left() -> None:
    bench = leaving()
    bench.router.core.runs["r"].kv.rates.transfers.note(320, 2.0)
    assert leased(bench).kv is None
    (said,) = [r for r in bench.ledger.log if isinstance(r, rec.Decision) and r.policy == "kv"]
    assert (said.action, said.code) == ("prefill", "prefilled")
    assert counts(bench) == {"offered": 1, "moved": 0, "prefilled": 1, "gone": 0, "refused": 0}


@pytest.mark.parametrize(
    ("offer", "offered"),
    [({"epoch": 7}, 0), ({"sample_id": 99}, 0), ({"tokens": CACHED - 1}, 1), ({"tokens": CACHED + 1}, 1)],
)
def test_what_is_not_of_the_lease_or_not_of_all_its_tokens_is_prefilled(
    offer: dict[str, int], offered: int
) -> None:
    bench = leaving(offer)
    assert leased(bench).kv is None
    assert counts(bench)["offered"] == counts(bench)["gone"] == offered


@pytest.mark.parametrize("endpoint", [("tcp://n11:5", ""), ("file:/etc/passwd", "key")])
def test_nobody_is_sent_to_read_in_the_clear_or_from_a_file(endpoint: tuple[str, str]) -> None:
    bench = leaving(source=WeightSource(*endpoint, b"token"))
    assert leased(bench).kv is None
    assert counts(bench)["offered"] == 0


def test_a_run_that_did_not_ask_for_it_hears_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SPEC", msgspec.structs.replace(harness.SPEC, move_kv=False))
    bench = leaving()
    assert leased(bench).kv is None
    assert counts(bench)["offered"] == 0


def test_who_has_left_for_long_is_not_asked() -> None:
    bench = leaving()
    bench.tick(kv_moves.LEFT_S + 0.5)
    assert leased(bench).kv is None
    assert counts(bench)["gone"] == 1


def test_who_gave_a_lease_back_and_stays_is_asked_however_late() -> None:
    """It may be the one that goes on with it."""
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    bench.router.core.runs["r"].kv.rates.prefills.note(CACHED, 1.0)
    bench.say(W1, KvKept((KvOffer(lease.sample_id, lease.epoch, 9, CACHED, 64),), THERE))
    bench.now += 60.0
    bench.say(W1, Yielded((Held(lease.sample_id, lease.epoch, 3),)))
    (again,) = bench.leases(W1)
    assert again.kv is not None


def test_what_came_of_the_blocks_is_learned_or_counted() -> None:
    bench = leaving()
    lease = leased(bench)
    bench.say(W2, KvTried(lease.sample_id, lease.epoch, CACHED, 320, 0.25))
    rates = bench.router.core.runs["r"].kv.rates
    assert rates.transfers.most(320) == 0.25
    found = bench.router.core.runs["r"].kv
    assert (found.moved, found.tokens, found.nbytes, found.seconds) == (1, CACHED, 320, 0.25)
    bench.say(W2, KvTried(lease.sample_id, lease.epoch + 1, CACHED, 320, 0.25))
    assert found.moved == 1, "of no lease of its"

    other = leaving()
    lease = leased(other)
    other.say(
        W2, KvTried(lease.sample_id, lease.epoch, CACHED, 320, 0.1, "the blocks are of another version")
    )
    assert counts(other)["refused"] == 1
    assert other.router.core.runs["r"].kv.rates.transfers.means == {}
    (event,) = other.events("kv_refused")
    assert event.reason == "the blocks are of another version"


def test_blocks_wait_for_those_before_them_on_the_same_way() -> None:
    """Many samples leave an engine at once: each alone would be quicker than its prefill, and all together are not."""
    bench = leaving()
    lease = leased(bench)
    run = bench.router.core.runs["r"]
    assert run.kv.under_way[lease.sample_id].nbytes == 320
    run.kv.under_way[77] = state.KvUnderWay("key", 99, 10**9, 0, bench.now, 50.0)
    run.kv.under_way[78] = state.KvUnderWay("other", 99, 10**9, 0, bench.now, 50.0)
    run.kv.under_way[79] = state.KvUnderWay("key", 99, 10**9, 0, bench.now - 2.0, 1.0)
    run.kv.under_way[80] = state.KvUnderWay("key", 99, 10**9, 0, bench.now - kv_moves.SILENT_S, 1.0)
    bench.say(W2, KvKept((KvOffer(lease.sample_id, lease.epoch, 9, CACHED, 64),), THERE))
    bench.say(W2, Goodbye("preempted", True))
    (again,) = bench.join(13)
    assert again.kv is None
    said = [r for r in bench.ledger.log if isinstance(r, rec.Decision) and r.policy == "kv"][-1]
    assert msgspec.json.decode(said.inputs)["ahead"] == 10**9, "what is late is not waited for"
    assert set(run.kv.under_way) == {77, 78, 79}


def test_what_waited_is_measured_with_what_it_waited_for() -> None:
    bench = leaving()
    lease = leased(bench)
    run = bench.router.core.runs["r"]
    run.kv.under_way[lease.sample_id] = state.KvUnderWay("key", W2, 320, 320, bench.now, 50.0)
    bench.say(W2, KvTried(lease.sample_id, lease.epoch, CACHED, 320, 0.5))
    assert run.kv.rates.transfer_s(640) == 0.5
    assert run.kv.under_way == {}


def test_blocks_that_come_too_late_are_learned_from() -> None:
    """Else every sample of the run would wait for the like in vain."""
    bench = leaving()
    lease = leased(bench)
    late = "the blocks did not come within 2.000 s"
    bench.say(W2, KvTried(lease.sample_id, lease.epoch, CACHED, 320, 2.0, late))
    rates = bench.router.core.runs["r"].kv.rates
    assert rates.transfer_s(320) == 2.0
    assert not kv.decide(CACHED, 64, rates).take


def test_a_prefill_is_measured_by_a_lease_s_first_tokens_and_not_by_one_that_brought_its_blocks() -> None:
    bench, lease = one_lease()
    prefills = bench.router.core.runs["r"].kv.rates.prefills
    bench.now += 1.1
    bench.chunk(W1, lease, 0, 3)
    assert prefills.least(3) == pytest.approx(1.0), "but for a flush"
    bench.now += 5.0
    bench.chunk(W1, lease, 3, 1)
    assert len(prefills.means) == 1, "only the first"

    bench = leaving()
    before = dict(bench.router.core.runs["r"].kv.rates.prefills.means)
    lease = leased(bench)
    bench.now += 3.0
    bench.chunk(W2, lease, 3, 1)
    assert bench.router.core.runs["r"].kv.rates.prefills.means == before

"""Whole, as deltas or not yet: the decision by predicted seconds, what it rests on, and that pulls and publishers act on it."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.protocol import keys
from scavenger.weights import choice, delta
from scavenger.weights.choice import (
    LEAST_GAINED_S,
    AdapterSetting,
    DeltaOffer,
    Form,
    MeasuredRate,
    RateBook,
    Rates,
    ReceiverReport,
    at_once_s,
    choose,
    encoding_pays,
    predicted_s,
    serving,
)
from scavenger.weights.delta_store import Chains, Encoder
from scavenger.weights.pull import PROBED_CHUNKS, Pull
from scavenger.weights.source import WeightServer
from scavenger.weights.transfer import TransferLimits
from tests.weights.pulling import LONG, known, link_of
from tests.weights.test_delta import CHUNK, fetch, history

GB = 1e9
LIMITS = TransferLimits(stall_s=1.0, backoff_s=0.01)


def rate(per_s: float) -> MeasuredRate:
    return MeasuredRate(1.0).measured(per_s, 1.0)


# ---------------------------------------------------------------- the receiver's decision


def test_a_slow_link_takes_the_delta_and_a_fast_one_beside_a_slow_core_the_whole_version() -> None:
    """16 GB, an 8B model in bfloat16; its delta is 1.5 %. One core applies 0.15 GB a second, four connections share two cores."""
    offer = DeltaOffer(0.015 * 16 * GB)
    slow = Rates(link=rate(0.125 * GB), applying=rate(0.15 * GB), threads=2)
    found = choose(16 * GB, offer, slow)
    assert found.form is Form.DELTA
    assert found.full_s == pytest.approx(16 / 0.125 + 16 / 2)  # the link, and loading
    assert found.delta_s == pytest.approx((16 / 0.15 + 16 / 4) / 2 + 16 / 2)  # the cores' work, not the bytes
    fast = replace(slow, link=rate(12.5 * GB))
    found = choose(16 * GB, offer, fast)
    assert found.form is Form.FULL
    assert found.full_s == pytest.approx(16 / 4 / 2 + 8)  # hashing
    assert found.delta_s == pytest.approx(55.33 + 8, rel=1e-3)
    assert choose(16 * GB, offer, replace(fast, applying=rate(20 * GB))).form is Form.FULL
    assert "12,500 MB/s (1 measured)" in choose(16 * GB, offer, fast).reason


def test_a_device_that_applies_fast_makes_the_delta_worth_it_on_a_middling_link() -> None:
    link = Rates(link=rate(1.25 * GB), applying=rate(0.15 * GB), threads=4)
    assert choose(16 * GB, DeltaOffer(0.24 * GB), link).form is Form.FULL
    assert choose(16 * GB, DeltaOffer(0.24 * GB), replace(link, applying=rate(2 * GB))).form is Form.DELTA


def test_each_version_in_between_is_applied() -> None:
    rates = Rates(link=rate(0.1 * GB), applying=rate(0.15 * GB))
    assert choose(GB, DeltaOffer(0.01 * GB, steps=1), rates).form is Form.DELTA
    assert choose(GB, DeltaOffer(0.04 * GB, steps=4), rates).form is Form.FULL


def test_it_waits_for_deltas_only_where_that_is_quicker_and_never_longer_than_its_patience() -> None:
    """32 chunks of 1 MB are asked for at once: whole, they take 3.2 s, and what is made meanwhile stands behind them."""
    rates = Rates(link=rate(0.01 * GB), applying=rate(GB))
    offer = DeltaOffer(0.01 * GB, pending_s=1.0)  # full 100.5 s, delta 1.75 s

    def form(offer: DeltaOffer, *, ahead: float = 0.032 * GB, waited: float = 0.0) -> Form:
        return choose(GB, offer, rates, ahead_nbytes=ahead, waited_s=waited, most_wait_s=30.0).form

    assert form(offer) is Form.NOTHING_YET
    assert form(offer, ahead=0.0) is Form.DELTA, "whole chunks that are in nobody's way are a gain"
    assert form(replace(offer, pending_s=4.0)) is Form.DELTA, "the whole ones are here before"
    assert form(replace(offer, pending_s=0.0)) is Form.DELTA
    assert form(offer, waited=29.5) is Form.DELTA
    assert "all made in 1 s" in choose(GB, offer, rates, ahead_nbytes=3e7, most_wait_s=30.0).reason


@settings(max_examples=300, deadline=None)
@given(
    full=st.floats(1e6, 1e12),
    share=st.floats(0.0, 1.5),
    steps=st.integers(1, 8),
    link=st.floats(1e5, 1e11),
    applying=st.floats(1e6, 1e12),
    threads=st.integers(1, 64),
    bound=st.sampled_from([0.0, 1e7]),
    pending=st.floats(0.0, 1e4),
    waited=st.floats(0.0, 1e4),
    ahead=st.floats(0.0, 1e12),
)
def test_what_is_chosen_is_never_predicted_to_be_the_slower_one(
    full: float,
    share: float,
    steps: int,
    link: float,
    applying: float,
    threads: int,
    bound: float,
    pending: float,
    waited: float,
    ahead: float,
) -> None:
    rates = Rates(link=rate(link), applying=rate(applying), threads=threads, bound_nbytes_per_s=bound)
    offer = DeltaOffer(share * full, steps, pending)
    found = choose(full, offer, rates, ahead_nbytes=ahead, waited_s=waited, most_wait_s=30.0)
    assert found.delta_s is not None
    assert found.reason
    match found.form:
        case Form.FULL:
            assert found.full_s <= found.delta_s
        case Form.DELTA:
            assert found.delta_s < found.full_s
        case Form.NOTHING_YET:
            mixed_s = at_once_s(full, offer, found.delta_s, rates, ahead)
            assert 0 < pending + found.delta_s < min(found.full_s, mixed_s)
            assert waited + pending <= min(30.0, found.full_s)
    # A faster link never turns a whole version into a delta, a faster core never a delta into a whole version.
    quicker = choose(
        full, replace(offer, pending_s=0.0), replace(rates, link=rate(10 * link), bound_nbytes_per_s=0.0)
    )
    stronger = choose(full, replace(offer, pending_s=0.0), replace(rates, applying=rate(10 * applying)))
    if found.form is Form.FULL:
        assert quicker.form is Form.FULL
    else:
        assert stronger.form is Form.DELTA
    assert predicted_s(full, full, rates) >= predicted_s(full, full, replace(rates, link=rate(10 * link)))


def test_without_an_offer_there_is_only_the_whole_version() -> None:
    assert choose(GB, None, Rates()).form is Form.FULL
    assert choose(0, None, Rates()).full_s == 0.0


# ---------------------------------------------------------------- rates


def test_a_rate_is_its_default_until_measured_and_forgets_slowly() -> None:
    first = MeasuredRate(7.0)
    assert (first.per_s, first.count) == (7.0, 0)
    assert first.measured(0, 1.0) == first == first.measured(5, 0.0)
    one = first.measured(100, 1.0)
    assert one.per_s == 100.0
    many = one
    for _ in range(200):
        many = many.measured(10, 1.0)
    assert many.per_s == pytest.approx(10.0, rel=0.01)
    assert 10 < one.measured(10, 1.0).per_s < 100
    assert "assumed" in str(first)
    assert "201 measured" in str(many)


def test_connections_add_up_and_a_host_that_was_not_measured_adds_nothing() -> None:
    book = RateBook()
    assert book.rates(["a", "a"], cores=8).link.per_s == choice.LINK_NBYTES_PER_S
    book.delivered("a", 100, 1.0)
    assert book.rates(["a", "a", "b"], cores=8).link.per_s == pytest.approx(200.0)
    assert book.rates(["a"] * 4, cores=2).threads == 2
    book.applying = book.applying.measured(10, 1.0)
    assert book.rates(["a"] * 4, cores=2).threads == 4, "what threads take from each other is in the rate"
    assert book.rates(["a"], cores=2, bound_nbytes_per_s=50.0).wire == 50.0


# ---------------------------------------------------------------- the publisher's decision


def test_deltas_are_made_where_a_receiver_has_the_version_sooner_by_them() -> None:
    encoding = rate(0.2 * GB)
    slow, fast = ReceiverReport(0.02 * GB, 0.6 * GB), ReceiverReport(5 * GB, 0.6 * GB)
    assert encoding_pays(16 * GB, 16 * GB, 0.015, encoding, []).encode
    assert encoding_pays(16 * GB, 16 * GB, 0.015, MeasuredRate(1.0), [fast]).encode, "unmeasured"
    assert encoding_pays(16 * GB, 16 * GB, 0.015, encoding, [slow]).encode
    assert not encoding_pays(16 * GB, 16 * GB, 0.015, encoding, [fast]).encode
    assert encoding_pays(16 * GB, 16 * GB, 0.015, encoding, [fast, slow]).encode, "one is enough"
    assert not encoding_pays(16 * GB, 16 * GB, 0.015, rate(0.01 * GB), [slow]).encode, "made too late"
    assert encoding_pays(16 * GB, 16 * GB, 0.015, rate(0.01 * GB), [replace(slow, late_s=3600.0)]).encode
    assert encoding_pays(16 * GB, 16 * GB, 0.015, encoding, [fast], skipped=choice.TRIED_AGAIN).encode
    assert not encoding_pays(16 * GB, 16 * GB, 1.0, encoding, [ReceiverReport(0.125 * GB, 0.6 * GB)]).encode


def test_ranks_that_each_encode_their_part_save_by_the_bytes_of_all() -> None:
    """A receiver's rates are of all ranks together. Before, they were held against one rank's part, as if it came at the speed of all."""
    encoding, reports = rate(0.2 * GB), [ReceiverReport(0.2 * GB, 0.6 * GB)]
    assert not encoding_pays(4 * GB, 4 * GB, 0.015, encoding, reports).encode
    found = encoding_pays(16 * GB, 4 * GB, 0.015, encoding, reports)
    assert found.encode
    assert "making them takes 20 s" in found.reason, "all ranks encode at the same time"
    saves_s = 16 / 0.2 - (16 / 4 + 16 / 0.6) - 4 / 0.2
    assert f"one saves {saves_s:.3g} s" in found.reason


def test_a_rank_decides_by_the_bytes_of_the_whole_version() -> None:
    (old, blob), (new, changed) = history(2)
    chains = Chains(4)
    encoder = Encoder(chains)
    quarter = range(len(new.chunk_hashes) // 4)
    encoder.rate = rate(0.2 * GB)
    encoder.heard(ReceiverReport(0.2 * GB, 0.6 * GB))
    encoder.published(old, blob.view, quarter)
    encoder.published(new, changed.view, quarter)
    encoder.wait()
    assert new.root in chains._steps


def test_a_publisher_whose_receivers_are_near_makes_no_deltas_and_tries_again_later() -> None:
    versions = history(choice.TRIED_AGAIN + 4)
    chains = Chains(4)
    encoder, made = Encoder(chains), []
    for manifest, buffer in versions:
        encoder.heard(ReceiverReport(100 * GB, 0.01 * GB))
        encoder.published(manifest, buffer.view)
        encoder.wait()
        made.append(manifest.root in chains._steps)
    assert made == [False, True, *[False] * choice.TRIED_AGAIN, True, False]


def test_a_publisher_hears_from_receivers_what_they_measured() -> None:
    versions = history(2)
    with WeightServer(local=False, deltas=4) as source:
        for manifest, buffer in versions:
            source.publish(manifest, buffer)
            source.wait_deltas()
        fetch(versions[0], versions[1][0], source, versions[1][1])
        assert source._encoder is not None
        (report,) = source._encoder._reports  # of four connections: those of 16 receivers are kept
        assert report.link == pytest.approx(4e6, rel=0.01), "of four connections"
        assert 0 <= report.late_s < 10


# ---------------------------------------------------------------- pulls


def test_an_offer_counts_what_is_made_what_is_whole_and_what_is_still_to_come() -> None:
    chains = Chains(4)
    chains.begin(b"a", b"b", chunks=4)
    assert chains.offer(b"x", b"b", 4, 100) is None
    assert chains.offer(b"b", b"b", 4, 100) is None
    found = chains.offer(b"a", b"b", 4, 100, share=0.5, encoding=50.0)
    assert found is not None
    assert (found.nbytes, found.of_nbytes, found.left_nbytes, found.nbytes_per_s) == (200, 400, 400, 50.0)
    chains.add(b"a", b"b", 0, bytes(10))
    chains.looked_at(b"b")
    chains.looked_at(b"b")  # one that was not worth it
    found = chains.offer(b"a", b"b", 4, 100)
    assert found is not None
    assert (found.nbytes, found.of_nbytes, found.left_nbytes, found.steps) == (110, 200, 200, 1)
    chains.add(b"b", b"c", 0, bytes(20))
    found = chains.offer(b"a", b"c", 4, 100)
    assert found is not None
    assert found.steps == 2
    chains.begun_no_more(b"b")
    found = chains.offer(b"a", b"b", 4, 100)
    assert found is not None
    assert (found.nbytes, found.of_nbytes, found.left_nbytes) == (310, 400, 0)


@pytest.mark.parametrize(("link", "form"), [(1e6, Form.DELTA), (5e9, Form.FULL)])
def test_a_pull_asks_for_what_is_predicted_to_be_here_first(link: float, form: Form) -> None:
    versions = history(2)
    with WeightServer(local=False, deltas=4) as source:
        for manifest, buffer in versions:
            source.publish(manifest, buffer)
            source.wait_deltas()
        newest, buffer = versions[-1]
        work = fetch(versions[0], newest, source, buffer, link=link)
        assert work.choice.form is form
        assert work.deltas == (len(newest.chunk_hashes) if form is Form.DELTA else 0)
        assert (work.nbytes < newest.total_nbytes / 10) == (form is Form.DELTA)


@pytest.mark.parametrize(("link", "deltas"), [(1e6, PROBED_CHUNKS - 4), (5e9, 4)])
def test_of_a_large_version_each_connection_s_first_chunk_measures_the_other_way(
    link: float, deltas: int
) -> None:
    versions = history(2, chunks=PROBED_CHUNKS)
    with WeightServer(local=False, deltas=4) as source:
        for manifest, buffer in versions:
            source.publish(manifest, buffer)
            source.wait_deltas()
        newest, buffer = versions[-1]
        work = fetch(versions[0], newest, source, buffer, link=link)
        assert abs(work.deltas - deltas) <= 4  # a connection that came too late asked for nothing
        assert work.rates.applying.count - LONG == work.deltas > 0


def test_a_pull_waits_for_deltas_that_are_nearly_made_where_the_link_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, whole chunks were asked for at once, and deltas that were made meanwhile stood behind them."""
    versions, held = history(2), threading.Event()
    encode = delta.encode

    def slowly(old: memoryview, new: memoryview, width: int) -> bytes:
        held.wait(0.05)
        return encode(old, new, width)

    monkeypatch.setattr(delta, "encode", slowly)
    newest, buffer = versions[-1]
    assert newest.total_nbytes == 16 * CHUNK
    with WeightServer(local=False, deltas=4) as source:
        source.publish(*versions[0])
        assert source._encoder is not None
        source._encoder.rate = rate(CHUNK / 0.06)
        work = Pull(newest, keys.generate(), limits=LIMITS, base=versions[0], rates=link_of(0.02e6))
        forms: list[Form] = []
        rechoose = work.rechoose

        def noted() -> None:
            rechoose()
            forms.append(work.choice.form)

        work.rechoose = noted  # type: ignore[method-assign]

        async def main() -> None:
            work.offer([source.publish(newest, buffer)])
            await work.finish(20.0)

        asyncio.run(main())
    assert forms[0] is Form.NOTHING_YET
    assert forms[-1] is Form.DELTA
    assert work.deltas == len(newest.chunk_hashes)
    assert work.buffer.view == buffer.view


def test_what_is_measured_decides_the_next_pull() -> None:
    """A source at 2 MB/s: the first version comes whole and measures the link, the second as deltas."""
    (first, old), (second, new) = history(2, chunks=64)
    book = RateBook(applying=known(1e8))
    with WeightServer(local=False, deltas=4, nbytes_per_s=2e6) as source:
        for manifest, buffer, base in ((first, old, None), (second, new, (first, old))):
            address = source.publish(manifest, buffer)
            source.wait_deltas()
            work = Pull(manifest, keys.generate(), limits=LIMITS, base=base, rates=book)

            async def main(work: Pull = work, address: object = address) -> None:
                work.offer([address])  # type: ignore[list-item]
                await work.finish(10.0)

            began = time.monotonic()
            asyncio.run(main())
            took = time.monotonic() - began
            assert work.buffer.view == buffer.view
    link = book.rates(["127.0.0.1"] * 4, cores=2).link
    assert link.count > 4
    assert link.per_s < 20e6, "a burst apart, what the source sends"
    assert work.choice.form is Form.DELTA
    assert work.deltas == len(second.chunk_hashes)
    assert took < 10.0


# ---------------------------------------------------------------- adapters, merged or not


def _setting(
    weights: float, device: str, *, tokens: float = 4096, gpus: int = 1, layers: int = 252
) -> AdapterSetting:
    value_nbytes = 2 if device == "cuda" else 4
    return AdapterSetting(int(weights), int(weights * value_nbytes), layers, tokens, device, gpus)


def test_large_weights_on_cores_are_not_merged_and_small_ones_are() -> None:
    large, small = (
        serving(_setting(8e9, "cpu", tokens=100)),
        serving(_setting(1e6, "cpu", tokens=100, layers=14)),
    )
    assert (large.unmerged, small.unmerged) == (True, False)
    assert large.merged_s == pytest.approx(8e9 * 34e-9 + 32e9 / 2e9)
    assert "beside the base: merging and loading 288 s a version" in large.reason
    assert small.reason.startswith("merged: ")


def test_on_a_gpu_the_length_of_completions_decides() -> None:
    short, long = serving(_setting(8e9, "cuda", tokens=512)), serving(_setting(8e9, "cuda", tokens=16_384))
    assert short.unmerged
    assert not long.unmerged
    assert short.merged_s == long.merged_s == pytest.approx(8e9 / 12e9 + 16e9 / 2e9)
    assert long.unmerged_s == pytest.approx(32 * short.unmerged_s)


def test_less_than_a_second_is_not_worth_the_digest() -> None:
    found = serving(_setting(8e8, "cuda", tokens=64, layers=100))
    assert 0 < found.merged_s - found.unmerged_s < LEAST_GAINED_S
    assert not found.unmerged


def test_more_gpus_load_and_merge_sooner() -> None:
    one, eight = serving(_setting(32e9, "cuda")), serving(_setting(32e9, "cuda", gpus=8))
    assert eight.merged_s == pytest.approx(one.merged_s / 8)
    assert eight.unmerged_s > one.unmerged_s / 8, "a layer's own time stays"

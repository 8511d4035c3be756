"""What fits an engine's KV cache, against caches that are filled token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scavenger.router import policy as seam
from scavenger.router.filling import POINTS, Filling
from scavenger.router.policy import PlainView, SampleView, StepView
from scavenger.router.predictive import Predictive
from scavenger.router.predictive_placing import RANKING_S
from tests.router.test_predictive import sample, worker

SAMPLE = st.tuples(st.integers(0, 400), st.integers(1, 160))


def fullest(held: list[tuple[int, int]]) -> int:
    """Tokens in the cache at its fullest, when all of these gain a token a step and go when they end."""
    return max((sum(have + step for have, rest in held if rest >= step) for step in range(161)), default=0)


@given(samples=st.lists(SAMPLE, max_size=30), cache=st.integers(200, 5000))
def test_what_was_taken_as_far_as_it_fits_stays_within_the_cache_to_its_end(samples: list[tuple[int, int]], cache: int) -> None:
    filling, held = Filling(cache, 160), []
    for have, rest in samples:
        if filling.fits(have, rest):
            filling.take(have, rest)
            held.append((have, rest))
    between = 160 // POINTS  # tokens that each may gain from one look to the next
    assert fullest(held) <= cache + len(held) * between


@given(samples=st.lists(SAMPLE, min_size=1, max_size=30), cache=st.integers(200, 5000))
def test_nothing_is_refused_that_would_fit(samples: list[tuple[int, int]], cache: int) -> None:
    *others, last = samples
    if fullest(samples) <= cache:
        assert Filling(cache, 160, others).fits(*last)


@given(samples=st.lists(SAMPLE, min_size=1, max_size=30), cache=st.integers(200, 5000))
def test_the_share_that_fits_is_the_cache_s_of_what_there_is_at_its_fullest(samples: list[tuple[int, int]], cache: int) -> None:
    share, most = Filling(cache, 160, samples).fitting, fullest(samples)
    between = len(samples) * (160 // POINTS)
    assert min(1.0, cache / max(1, most)) <= share * (1 + 1e-9)
    assert share <= min(1.0, cache / max(1, most - between))


def test_a_cache_of_unknown_size_holds_anything() -> None:
    filling = Filling()
    filling.take(1e9, 1e9)
    assert filling.fits(1e9, 1e9)
    assert filling.fitting == 1.0


# ---------------------------------------------------------------- in the placer


def placer(cap: int = 2000) -> Predictive:
    policy = Predictive("r")
    policy.observe(seam.StepSubmitted(1, "train", 64, 8, cap), 0.0)
    return policy


def view(samples: list[SampleView], cache: int, engines: int = 1) -> PlainView:
    held = {i: sum(s.worker_id == i and not s.done for s in samples) for i in range(1, engines + 1)}
    return PlainView(
        step=StepView(step=1, version=1, samples=64, groups=8),
        samples=samples,
        queued=[s for s in samples if not s.worker_id and not s.done],
        workers=[worker(i, leases=held[i], max_batch=64, cache_tokens=cache) for i in range(1, engines + 1)],
    )


def test_an_engine_is_given_what_fits_its_cache_and_not_all_its_slots() -> None:
    waiting = [sample(i, i // 8, cap=2000) for i in range(64)]
    few = placer().place(view(waiting, cache=5_000), 1.0)
    assert 4 <= len(few) < 64, "of 2,000 tokens at most"
    assert len(few) < len(placer().place(view(waiting, cache=10_000), 1.0)) < 64
    assert len(placer().place(view(waiting, cache=0), 1.0)) == 64, "it did not say what it holds"


def test_a_slot_that_comes_free_stays_free_while_the_cache_is_too_full() -> None:
    """Samples turned out longer than was thought: what ends must not be replaced one by one."""
    policy = placer()
    running = [sample(i, i // 8, cap=2000, worker_id=1, length=900) for i in range(20)]
    waiting = [sample(i, i // 8, cap=2000) for i in range(20, 64)]
    assert policy.place(view([*running, *waiting], cache=12_000), 1.0) == []
    running = running[1:]
    assert list(policy.place(view([*running, *waiting], cache=12_000), 2.0)) == []
    few = running[:4]
    assert policy.place(view([*few, *waiting], cache=12_000), 2.0 + RANKING_S), "there is room again"


def test_an_engine_that_was_not_there_at_the_last_look_gets_no_more_than_fit_it() -> None:
    policy = placer()
    waiting = [sample(i, i // 8, cap=2000) for i in range(64)]
    first = policy.place(view(waiting, cache=5_000), 1.0)
    given_ = {answer.sample_id for answer in first}
    now = [sample(i, i // 8, cap=2000, worker_id=int(i in given_)) for i in range(64)]
    second = policy.place(view(now, cache=5_000, engines=2), 1.5)
    assert {answer.worker_id for answer in second} == {2}
    assert len(second) <= 2 * len(first)
    assert len(second) + len(first) < 64

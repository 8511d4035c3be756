"""Who of those that wait is next, by an order that was found once."""

from __future__ import annotations

import random
from collections.abc import Iterable

from scavenger.policy.interface import SampleView
from scavenger.policy.placement import QueuedSample, Ranked
from scavenger.policy.predictive.placement import Ranking
from tests.plain_view import PlainView


def sample(i: int, **more: object) -> SampleView:
    return SampleView(**{"id": i, "group_id": i // 4, "index": i % 4, "prompt_tokens": 10, "cap": 100} | more)  # type: ignore[arg-type]


def view(*ids: int, **more: object) -> PlainView:
    return PlainView(queued=[sample(i, **more) for i in ids])


def ranked(*ids: int) -> list[Ranked]:
    return [Ranked(QueuedSample(i, i // 4, 10.0, 5.0), "longest expected") for i in ids]


def known(ids: Iterable[int], at: float = 0.0) -> Ranking:
    ranking = Ranking()
    ids = list(ids)
    ranking.renew(ranked(*ids), view(*ids).came, at)
    return ranking


def following(ranking: Ranking, now: PlainView) -> list[int]:
    assert ranking.has_all(now)
    return [waiting.sample_id for waiting in ranking.next(now)]


def test_the_next_are_those_that_wait_in_the_order_that_was_found() -> None:
    ranking = known((3, 1, 2, 0))
    assert following(ranking, view(0, 1, 2, 3)) == [3, 1, 2, 0]
    assert following(ranking, view(0, 2)) == [2, 0]
    assert following(ranking, view()) == []


def test_who_was_placed_and_waits_again_has_its_place_back() -> None:
    ranking = known((3, 1, 2, 0))
    assert following(ranking, view(2, 0)) == [2, 0]
    assert following(ranking, view(3, 2, 0)) == [3, 2, 0]


def test_it_says_that_somebody_waits_whom_it_does_not_know() -> None:
    ranking = known((1, 0))
    assert not ranking.has_all(view(0, 1, 2))
    assert ranking.has_all(view(0))


def test_who_was_begun_comes_in_at_the_front_and_who_is_new_at_the_end() -> None:
    ranking = known((1, 0))
    now = PlainView(queued=[sample(7, length=3), sample(8, moves=1), sample(0), sample(1), sample(9)])
    assert ranking.admit(now) == 3
    assert following(ranking, now) == [7, 8, 1, 0, 9]
    assert ranking.admit(now) == 0


def test_where_a_sample_failed_since_it_was_ranked_it_is_not_sent_again() -> None:
    ranking = known((0, 1))
    now = PlainView(
        queued=[sample(0, avoid=frozenset({"n1"}), accepted=1), sample(1), sample(5, avoid=frozenset({"n2"}))]
    )
    ranking.admit(now)
    assert ranking.has_all(now)
    assert [(w.sample_id, set(w.avoid)) for w in ranking.next(now)] == [(0, {"n1"}), (1, set()), (5, {"n2"})]


def test_another_step_makes_it_stale() -> None:
    ranking = known((0, 1), at=5.0)
    assert ranking.at == 5.0
    ranking.forget()
    assert ranking.at < 0


def test_whatever_comes_and_goes_everybody_who_waits_is_next_exactly_once() -> None:
    rng = random.Random(0)
    ranking, waiting, fresh = known(range(20)), set(range(20)), 20
    for _ in range(200):
        for gone in rng.sample(sorted(waiting), min(len(waiting), rng.randrange(4))):
            waiting.discard(gone)
        for _ in range(rng.randrange(3)):
            back = rng.randrange(fresh + 1)
            fresh += back == fresh
            waiting.add(back)
        now = PlainView(queued=[sample(i, moves=rng.randrange(2)) for i in sorted(waiting)])
        if not ranking.has_all(now):
            ranking.admit(now)
        assert sorted(following(ranking, now)) == sorted(waiting)

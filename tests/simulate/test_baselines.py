"""The baselines are what their papers and code say, by views and facts made by hand: Theta, B, eta, the memo, the limit, turns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from benchmarks.baselines.points import Setting, scenario, steady
from benchmarks.baselines.polyrl import PolyRL
from benchmarks.baselines.registry import profiled, running_context, simulated_policy
from benchmarks.baselines.rlboost import RLBoost, Settings
from benchmarks.baselines.seeding import Seeding
from scavenger.policy.interface import (
    Fact,
    RouterPolicy,
    SampleFinished,
    SampleMove,
    SampleView,
    StepFinished,
    StepSubmitted,
    StepView,
    WindowMoved,
    WorkerLost,
    WorkerReady,
    WorkerView,
)
from scavenger.simulate.presets import STACK
from tests.plain_view import PlainView


class Hand:
    """A daemon played by hand: it follows every answer at once. Samples are served in the order in which they were given."""

    def __init__(
        self, policy: RouterPolicy, workers: Sequence[int], samples: int, siblings: int = 8, most: int = 256
    ) -> None:
        self.policy, self.workers, self.most = policy, list(workers), most
        numbers = [(i, *divmod(i, siblings)) for i in range(samples)]
        self.samples = {
            i: SampleView(id=i, group_id=of, index=index, prompt_tokens=100, cap=9000)
            for i, of, index in numbers
        }
        self.beats: dict[int, float] = dict.fromkeys(workers, 0.0)
        policy.observe(StepSubmitted(1, "train", samples, samples // siblings), 0.0)

    def view(self) -> PlainView:
        held = Counter(sample.worker_id for sample in self.samples.values())
        workers = [
            WorkerView(
                id=one,
                kind="harvested",
                node=f"n{one}",
                gpus=1,
                status="ready",
                serves=True,
                leases=held[one],
                max_batch=self.most,
                beat_at=self.beats[one],
            )
            for one in self.workers
        ]
        everyone = list(self.samples.values())
        queued = [sample for sample in everyone if not sample.worker_id]
        return PlainView(
            step=StepView(step=1, samples=len(everyone)), samples=everyone, queued=queued, workers=workers
        )

    def held(self, worker: int) -> list[SampleView]:
        found = (sample for sample in self.samples.values() if sample.worker_id == worker)
        return sorted(found, key=lambda sample: (sample.leased_at, sample.id))

    def lease(self, sample_id: int, worker: int, now: float) -> None:
        old = self.samples[sample_id]
        self.samples[sample_id] = msgspec.structs.replace(
            old, worker_id=worker, leased_at=now, lease_offset=old.length
        )

    def place(self, now: float) -> Mapping[int, int]:
        """How many each got."""
        answers = self.policy.place(self.view(), now)
        for answer in answers:
            self.lease(answer.sample_id, answer.worker_id, now)
        return Counter(answer.worker_id for answer in answers)

    def rebalance(self, now: float) -> Sequence[SampleMove]:
        moves = self.policy.rebalance(self.view(), now)
        for move in moves:
            assert self.samples[move.sample_id].worker_id == move.from_worker != move.to_worker
            self.lease(move.sample_id, move.to_worker, now)
        return moves

    def beat(self, now: float, executed: Mapping[int, int]) -> None:
        """Each of these says that its first so many samples have more tokens, and the others none."""
        for worker, count in executed.items():
            self.beats[worker] = now
            for sample in self.held(worker)[:count]:
                self.samples[sample.id] = msgspec.structs.replace(sample, length=sample.length + 50)


# ---------------------------------------------------------------- RLBoost: load balancing


def test_no_instance_is_given_more_than_theta_before_it_can_have_begun() -> None:
    hand = Hand(RLBoost(Settings(theta=8, batch=8)), (1, 2), 200)
    assert hand.place(0.0) == {1: 8, 2: 8}
    assert [hand.place(0.0) for _ in range(3)] == [{}, {}, {}]
    assert hand.place(0.5) == {}


def test_beyond_b_a_request_is_pending_until_its_instance_tells_of_a_token() -> None:
    hand = Hand(RLBoost(Settings(theta=8, batch=8)), (1,), 200)
    hand.place(0.0)
    assert hand.place(2.0) == {1: 8}, "the first B have begun meanwhile"
    assert [hand.place(now) for now in (2.0, 4.0, 9.0)] == [{}, {}, {}], (
        "whether more than B run is for the instance to say"
    )
    hand.beat(10.0, {1: 13})
    assert hand.place(10.0) == {1: 5}, "three of 16 are pending, and may be eight"
    hand.beat(20.0, {1: 13})
    assert hand.place(20.0) == {}
    hand.beat(30.0, {1: 21})
    assert hand.place(30.0) == {1: 8}


def test_an_instance_that_executes_none_of_what_it_was_given_gets_no_more() -> None:
    """However few it has: its cache may be full of long answers."""
    hand = Hand(RLBoost(Settings(theta=8, batch=64)), (1,), 200)
    hand.place(0.0)
    hand.beat(10.0, {1: 0})
    assert [hand.place(now) for now in (10.0, 12.0, 19.0)] == [{}, {}, {}]


def test_requests_join_the_shortest_queue() -> None:
    hand = Hand(RLBoost(), (1, 2, 3), 30)
    hand.samples |= {
        i: msgspec.structs.replace(hand.samples[i], worker_id=1 if i < 10 else 2, length=5) for i in range(14)
    }
    assert hand.place(0.0) == {2: 6, 3: 10}


def crowded(settings: Settings, others: int = 0) -> Hand:
    """Instance 1 executes 64 and has 72 waiting; instance 2 executes one, and its queue is empty. `others` wait at the router."""
    hand = Hand(RLBoost(settings), (1,), 137 + others)
    hand.lease(0, 2, 0.0)
    for now in (0.0, 2.0, 4.0):
        hand.place(now)
        hand.beat(now + 1, {1: 64})
    rest = [sample.id for sample in hand.samples.values() if not sample.worker_id]
    for sample_id in rest[: 136 - len(hand.held(1))]:
        hand.lease(sample_id, 1, 4.0)
    hand.workers.append(2)
    hand.beat(20.0, {1: 64, 2: 1})
    assert (len(hand.held(1)), len(hand.held(2))) == (136, 1)
    return hand


def test_pending_requests_move_to_an_instance_whose_queue_is_empty_though_it_is_not_idle() -> None:
    hand = crowded(Settings(theta=1000, batch=64))
    last = {sample.id for sample in hand.held(1)[69:]}
    moves = hand.rebalance(20.0)
    assert {move.sample_id for move in moves} == last, (
        "who would have begun last goes, until both have as many"
    )
    assert (len(hand.held(1)), len(hand.held(2))) == (69, 68)


def test_moves_obey_theta_and_go_on_while_something_waits_at_the_router() -> None:
    hand = crowded(Settings(theta=10, batch=64), others=50)
    assert len(hand.rebalance(20.0)) == 10
    assert not hand.rebalance(20.0), "a second look at the same time changes nothing"


def test_pending_requests_are_spread_evenly_over_empty_queues() -> None:
    hand = Hand(RLBoost(Settings(theta=100, batch=4)), (1,), 40)
    hand.place(0.0)
    hand.beat(10.0, {1: 4})
    hand.workers += [2, 3]
    hand.beats |= {2: 0.0, 3: 0.0}
    hand.rebalance(10.0)
    assert [len(hand.held(worker)) for worker in (1, 2, 3)] == [14, 13, 13]


@pytest.mark.parametrize(("instances", "samples"), [(2, 21), (3, 32), (3, 34)])
def test_moves_come_to_an_end_where_all_caches_are_full(instances: int, samples: int) -> None:
    """Each executes ten and no more. Who is left with an empty queue gets what waits at another, and does not give it back."""
    workers = range(1, instances + 1)
    hand = Hand(RLBoost(Settings(theta=100, batch=8)), workers, samples)
    hand.place(0.0)
    moves: dict[float, int] = defaultdict(int)
    for look in range(1, 60):
        hand.beat(10.0 * look, dict.fromkeys(workers, 10))
        for now in (10.0 * look, 10.0 * look + 5):
            moves[now] += len(hand.rebalance(now))
    assert not any(count for now, count in moves.items() if now > 100.0)


def test_what_is_executed_beyond_b_goes_to_idle_peers_and_to_no_others() -> None:
    for batch, expected in ((14, 6), (8, 10), (20, 0)):
        hand = Hand(RLBoost(Settings(theta=100, batch=batch)), (1, 2, 3), 21)
        for i in range(20):
            hand.lease(i, 1, 0.0)
            hand.samples[i] = msgspec.structs.replace(hand.samples[i], length=1000 - i)
        hand.lease(20, 2, 0.0)
        hand.samples[20] = msgspec.structs.replace(hand.samples[20], length=1000)
        moves = hand.rebalance(10.0)
        assert {move.to_worker for move in moves} <= {3}
        assert {move.sample_id for move in moves} == set(range(20 - expected, 20)), (
            "the shortest, until the idle one has as many"
        )


def test_b_is_what_the_cache_and_the_decode_curve_of_the_engine_allow() -> None:
    found = {}
    for model, gpus in (("Qwen3-8B", 8), ("Qwen3-14B", 8), ("Qwen3-32B", 16)):
        cell = scenario(Setting(model, gpus), steady(1, 1e4), 1, 0)
        settings = profiled(cell)
        context = running_context(cell)
        assert settings.batch <= cell.harvested.max_batch(context)
        assert cell.harvested.tokens_per_s(settings.batch, context) >= 0.9 * cell.harvested.tokens_per_s(
            cell.harvested.max_batch(context), context
        )
        assert settings.theta == 2 * settings.batch
        assert STACK.prompt_tokens + STACK.mean_tokens / 2 < context < STACK.prompt_tokens + STACK.mean_tokens
        found[model] = settings.batch
        assert simulated_policy("rlboost", cell).name == "rlboost"
    assert 70 <= found["Qwen3-8B"] <= 85
    assert 55 <= found["Qwen3-14B"] <= 70
    assert 18 <= found["Qwen3-32B"] <= 25, "its pairs hold 141,000 tokens"


# ---------------------------------------------------------------- the window and the limit


Told = tuple[float, Fact]


def told(seeding: Seeding | PolyRL | RLBoost, *facts: Told) -> None:
    for now, fact in facts:
        seeding.observe(fact, now)


def ready(worker: int) -> WorkerReady:
    return WorkerReady(worker, "harvested", "n", 2, 1, True, 1.0, 1.0, 1.0)


def lost(worker: int) -> WorkerLost:
    return WorkerLost(worker, "harvested", "n", 2, 1.0, True, "preempted")


def finished() -> SampleFinished:
    return SampleFinished(1, 1, 1, 100, 100, False, 5, "harvested", "n")


def step(
    start: float, wait_train: float, wait_remote: float, *between: Told, train_s: float = 50.0
) -> list[Told]:
    """A step of 100 s."""
    metrics = {"seconds_wait": wait_train, "seconds_train": train_s, "seconds_update": 0.0}
    last = (start + 100.0 - wait_remote, finished())
    facts = sorted([*between, last], key=lambda pair: pair[0])
    return [
        (start, StepSubmitted(1, "train", 8, 1)),
        *facts,
        (start + 100.0, StepFinished(1, "train", metrics)),
    ]


def window_s(policy: RLBoost | PolyRL, opened: float) -> float:
    """Seconds that the window is to stay open."""
    policy.observe(StepSubmitted(9, "train", 8, 1), opened)
    policy.observe(WindowMoved(True), opened)
    answer = policy.window(PlainView(), opened)
    assert answer is not None
    return answer.again_at - opened


def test_the_window_is_corrected_by_a_third_of_the_waits_difference_and_is_never_below_five_seconds() -> None:
    for wait_train, wait_remote, expected in ((60.0, 0.0, 50.0), (0.0, 45.0, 15.0), (0.0, 90.0, 5.0)):
        policy = RLBoost()
        told(policy, (0.0, ready(5)), *step(10.0, wait_train, wait_remote))
        assert window_s(policy, 200.0) == pytest.approx(expected)


def test_the_memo_is_written_only_when_the_number_of_instances_did_not_change_within_the_step() -> None:
    seeding = Seeding(1 / 3, 5.0, 30.0)
    told(seeding, (0.0, ready(5)), *step(10.0, 30.0, 0.0))
    assert seeding.memo == {1: pytest.approx(40.0)}
    told(seeding, *step(200.0, 90.0, 0.0, (250.0, ready(6))))
    assert seeding.memo == {1: pytest.approx(40.0)}, "a second one came within the step"
    assert seeding.seed_s == pytest.approx(70.0), "the window is corrected all the same"
    told(seeding, *step(400.0, 0.0, 30.0))
    assert seeding.memo == {1: pytest.approx(40.0), 2: pytest.approx(60.0)}
    told(seeding, (500.0, lost(6)), (501.0, StepSubmitted(5, "train", 8, 1)))
    assert seeding.seed_s == pytest.approx(40.0), "as it was with one"
    forgetful = Seeding(1 / 3, 5.0, 30.0, memo=False)
    told(forgetful, (0.0, ready(5)), *step(10.0, 30.0, 0.0))
    assert forgetful.memo == {}


def test_polyrl_remembers_windows_as_an_average_of_old_and_new() -> None:
    policy = PolyRL()
    told(policy, (0.0, ready(5)), *step(10.0, 60.0, 0.0))
    assert window_s(policy, 200.0) == pytest.approx(0.8 * 30 + 0.2 * 50)
    told(policy, *step(300.0, 30.0, 0.0))
    assert window_s(policy, 600.0) == pytest.approx(0.8 * 34 + 0.2 * 44)


def test_the_limit_is_remote_work_and_seeding_over_training_of_the_step_that_was_measured() -> None:
    """N = (t_remote n + T_seed N_resv) / t_train, n the mean over t_remote: four for 50 s, then two until the last answer at 100 s."""
    seeding = Seeding(0.0, 5.0, 30.0)
    assert seeding.cap(8, 64)[0] == 64, "nothing was measured yet"
    told(
        seeding,
        *((0.0, ready(i)) for i in range(4)),
        *step(0.0, 0.0, 0.0, (50.0, lost(0)), (50.0, lost(1)), train_s=60.0),
    )
    assert seeding.cap(8, 64)[0] == 9  # (100 * 3 + 30 * 8) / 60 = 9.0
    assert seeding.cap(9, 64)[0] == 10
    assert seeding.cap(8, 4)[0] == 4
    told(seeding, (101.0, lost(2)))
    assert seeding.cap(8, 64)[0] == 9, "who is left says nothing of what there is to do"


# ---------------------------------------------------------------- PolyRL: dispatch


def test_polyrl_hands_groups_in_turn_to_instances_with_room_four_a_second() -> None:
    hand = Hand(PolyRL(), (1, 2, 3), 24 * 4, siblings=4, most=8)
    turns = []
    for tick in range(9):
        got = hand.place(tick / 4)
        turns += list(got)
        assert set(got.values()) <= {4}, "a group is whole"
    assert turns == [1, 2, 3, 1, 2, 3], "then no batch has room for a group"
    for sample in hand.held(2)[:4]:
        hand.samples[sample.id] = msgspec.structs.replace(sample, worker_id=0, done=True)
    hand.samples = {i: sample for i, sample in hand.samples.items() if not sample.done}
    assert hand.place(2.25) == {2: 4}, "it is the only one whose queue is empty"


def test_polyrl_dispatches_four_groups_a_second_over_all_instances_together() -> None:
    hand = Hand(PolyRL(), (1, 2, 3), 400, siblings=4, most=256)
    got = sum(sum(hand.place(tick / 16).values()) // 4 for tick in range(16 * 5))
    assert got in (20, 21)

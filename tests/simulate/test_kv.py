"""KV blocks that move in virtual time: what a transfer takes, and that the router's own decision is what moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from scavenger.errors import ConfigError
from scavenger.policy.interface import RunView, SamplePlacement
from scavenger.policy.kv import SET_UP_S
from scavenger.protocol.worker.events import WorkerLimits
from scavenger.simulate import kv
from scavenger.simulate.driver import simulate
from scavenger.simulate.kv import Fetched, KvTransfers
from scavenger.simulate.outcome import KvOutcome, SimulationOutcome
from scavenger.simulate.policies import Even, SimulatedPolicy
from tests.simulate.test_driver import ENGINE, EVENLY, UNEVEN

GB = 10**9


def transfers() -> KvTransfers:
    """A second for each gigabyte that crosses, a tenth for each that is copied."""
    return KvTransfers(1e9, 10e9)


def test_who_leaves_stays_as_long_as_a_live_one() -> None:
    assert WorkerLimits().kv_s == kv.STAYS_S


def test_transfers_from_one_holder_come_one_after_the_other() -> None:
    moves = transfers()
    for number in (1, 2, 3):
        moves.keep("a", number, GB, 0.0)
    ways = [moves.fetch(reader, 7, "a", number, GB, 10.0, 0.0) for reader, number in (("b", 1), ("c", 2))]
    assert [way.at_s for way in ways] == pytest.approx([0.1 + 1 + 0.1, 0.1 + 2 + 0.1])
    assert moves.fetch("a", 8, "a", 3, GB, 10.0, 5.0) == Fetched(5.1), "its own take no way"


def test_transfers_to_one_reader_come_one_after_the_other_and_not_too_late() -> None:
    moves = transfers()
    for holder in "abc":
        moves.keep(holder, 1, GB, 0.0)
    assert moves.fetch("r", 1, "a", 1, GB, 10.0, 0.0).at_s == pytest.approx(1.2)
    assert moves.fetch("r", 2, "b", 1, GB, 1.5, 0.0) == Fetched(1.5, "late")
    assert moves.fetch("r", 3, "c", 1, GB, 10.0, 2.0).at_s == pytest.approx(2.0 + SET_UP_S + 1 + 0.1)


def test_what_is_not_kept_does_not_come() -> None:
    moves = transfers()
    moves.keep("a", 1, 3 * GB, 0.0)
    moves.keep("a", 2, 2 * GB, 0.0)  # beyond the bound: the first goes
    moves.keep("a", 3, 5 * GB, 0.0)
    assert moves.fetch("b", 1, "a", 1, 3 * GB, 10.0, 0.0).fault == "not kept"
    assert moves.fetch("b", 3, "a", 3, 5 * GB, 10.0, 0.0).fault == "no memory for what comes"
    assert moves.fetch("b", 2, "a", 2, 2 * GB, 10.0, 0.0).fault == ""
    assert moves.fetch("b", 4, "a", 2, 2 * GB, 10.0, 9.0).fault == "not kept", "it is taken"
    moves.keep("a", 5, GB, 10.0)
    moves.clear("a")
    assert moves.fetch("b", 5, "a", 5, GB, 10.0, 11.0).fault == "not kept"


def test_who_leaves_stays_for_a_moment() -> None:
    moves = transfers()
    moves.keep("a", 1, GB // 10, 0.0)
    moves.keep("a", 2, GB, 0.0)
    moves.leaves("a", 0.0)
    assert moves.fetch("b", 1, "a", 1, GB // 10, 10.0, 0.0).fault == ""
    assert moves.fetch("b", 2, "a", 2, GB, 10.0, 0.0) == Fetched(10.0, "late")


def test_what_comes_to_one_reader_is_bounded_until_it_is_over() -> None:
    moves = transfers()
    for number, holder in enumerate("abc"):
        moves.keep(holder, number, 2 * GB, 0.0)
    assert moves.fetch("r", 1, "a", 0, 2 * GB, 60.0, 0.0).fault == ""
    assert moves.fetch("r", 2, "b", 1, 2 * GB, 60.0, 0.0).fault == ""
    assert moves.fetch("r", 3, "c", 2, 2 * GB, 60.0, 0.0).fault == "no memory for what comes"
    moves.over("r", 1)
    assert moves.fetch("r", 4, "c", 2, 2 * GB, 60.0, 5.0).fault == ""


# ---------------------------------------------------------------- a whole run

SLOW = replace(ENGINE, efficiency=replace(ENGINE.efficiency, prefill_compute=0.01))
SCENARIO = replace(UNEVEN, reserved=SLOW, harvested=SLOW, steps=2, prompts=16)


def outcome(move_kv: bool, kv_bytes_s: float = 50e9) -> tuple[SimulationOutcome, KvOutcome]:
    out = simulate(replace(SCENARIO, move_kv=move_kv, kv_bytes_s=kv_bytes_s), EVENLY)
    return out, out.kv or KvOutcome(*(0,) * 7, 0.0)


def test_samples_take_their_blocks_along_where_that_is_quicker_than_a_prefill() -> None:
    (without, _), (out, moves) = outcome(False), outcome(True)
    assert without.kv is None
    assert moves.moved > 0
    assert moves.nbytes == pytest.approx(moves.tokens * ENGINE.model.kv_bytes_per_token)
    assert out.prefilled < without.prefilled
    assert out.prefill_s < without.prefill_s
    assert len(out.steps) == len(without.steps) == 2


def test_over_a_slow_way_the_router_leaves_them() -> None:
    _, moves = outcome(True, 1e7)
    assert moves.moved == 0
    assert moves.prefilled > 0, "it learned from the first that came too late"


def test_only_engines_of_one_gpu_move_blocks() -> None:
    two = replace(ENGINE, gpus=2)
    with pytest.raises(ConfigError, match="engines of 2 GPUs"):
        replace(UNEVEN, reserved=two, harvested=two, move_kv=True)


class Scattered(Even):
    """A group's samples go to different engines, once there are some."""

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        answers = super().place(view, now) if len(view.slots()) >= 4 else ()
        mixed = sorted((answer.sample_id for answer in answers), key=lambda sample_id: sample_id % 8)
        return [
            SamplePlacement(sample_id, answer.worker_id)
            for sample_id, answer in zip(mixed, answers, strict=True)
        ]


def test_prompts_that_are_shared_are_prefilled_less_often() -> None:
    scenario, policy = replace(UNEVEN, steps=1), SimulatedPolicy("scattered", Scattered, window=0.4)
    without, shared = simulate(scenario, policy), simulate(replace(scenario, share_prompts=True), policy)
    assert shared.prefilled < without.prefilled

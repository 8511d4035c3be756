"""Random schedules hold every invariant and get every step done; the driver finds classic bugs when they are planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scavenger.ledger import records as rec
from scavenger.router import restore
from scavenger.router import samples as sm
from scavenger.router import workers as wk
from scavenger.router.state import Core, Sample, SampleStatus
from scavenger.wire import Chunk, Lease
from tests.router import schedule
from tests.router.harness import StoredLedger


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_random_schedules_hold_every_invariant_and_get_every_step_done(first: int) -> None:
    steps = 0
    for seed in range(first, first + 40):
        steps += schedule.run(seed, 300).trainer.steps_done
    assert steps >= 40, "the schedules hardly trained: they prove nothing"


@pytest.mark.parametrize("seed", range(500, 512))
def test_random_schedules_hold_over_a_real_ledger(seed: int, tmp_path: Path) -> None:
    ledger = StoredLedger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    try:
        assert schedule.run(seed, 300, ledger).trainer.steps_done
    finally:
        ledger.close()


@pytest.mark.long
def test_many_long_schedules_hold_every_invariant() -> None:
    for seed in range(10_000, 12_000):
        schedule.run(seed, 800)


def test_schedules_reach_what_they_are_for() -> None:
    """Moves with tokens, restarts, replays, supersessions and refusals all happen, or the driver is blind to their bugs."""
    kinds: dict[str, int] = {}
    for seed in range(100):
        world = schedule.run(seed, 300)
        for record in world.bench.ledger.log:
            name = type(record).__name__
            kinds[name] = kinds.get(name, 0) + 1
            if isinstance(record, rec.LeaseGranted) and record.offset:
                kinds["moved"] = kinds.get("moved", 0) + 1
            if isinstance(record, rec.SampleEnded):
                kinds[record.state] = kinds.get(record.state, 0) + 1
            if isinstance(record, rec.Event):
                kinds[record.kind] = kinds.get(record.kind, 0) + 1
    for wanted in ("moved", "superseded", "consumed", "chunk_refused", "SampleReopened", "GroupAdopted", "StepsRewound", "worker_suspect"):
        assert kinds.get(wanted, 0) >= 5, f"{wanted}: {kinds.get(wanted, 0)}"


def test_a_failed_schedule_replays_from_its_log() -> None:
    world = schedule.run(3)
    router = schedule.replay(world.bench.log)
    mine = {s.id: (s.status, s.accepted, s.epoch) for s in world.bench.router.core.samples.values()}
    assert {s.id: (s.status, s.accepted, s.epoch) for s in router.core.samples.values()} == mine


# ---------------------------------------------------------------- planted bugs


def _any_epoch(patch: pytest.MonkeyPatch) -> None:
    fault = sm.chunk_fault

    def blind(chunk: Chunk, sample: Sample | None, worker: object) -> object:
        if sample is not None and sample.status is SampleStatus.LEASED:
            chunk = Chunk(
                chunk.sample_id, sample.epoch, chunk.offset, chunk.version, chunk.tokens, chunk.logprobs, chunk.raw_logprobs, chunk.finish
            )
        return fault(chunk, sample, worker)  # type: ignore[arg-type]

    patch.setattr(sm, "chunk_fault", blind)


def _any_worker(patch: pytest.MonkeyPatch) -> None:
    fault = sm.chunk_fault

    def blind(chunk: Chunk, sample: Sample | None, worker: object) -> object:
        if sample is not None and sample.status is SampleStatus.LEASED:
            return None
        return fault(chunk, sample, worker)  # type: ignore[arg-type]

    patch.setattr(sm, "chunk_fault", blind)


def _deliver_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "send_durable", Core.send)


def _deliver_before_durable(patch: pytest.MonkeyPatch) -> None:
    finish = sm.finish

    def eager(core: Core, sample: Sample, reason: str) -> None:
        finish(core, sample, reason)
        for one in sample.group.samples:
            one.durable = one.accepted
        send, core.send_durable = core.send_durable, core.send  # type: ignore[method-assign]
        sm.deliver_if_done(core, sample.group)
        core.send_durable = send  # type: ignore[method-assign]

    patch.setattr(sm, "finish", eager)


def _drop_on_release(patch: pytest.MonkeyPatch) -> None:
    release = sm.release

    def careless(core: Core, sample: Sample, reason: str, **how: object) -> None:
        release(core, sample, reason, **how)  # type: ignore[arg-type]
        sample.group.run.queue.discard(sample)

    patch.setattr(sm, "release", careless)


def _forget_tokens(patch: pytest.MonkeyPatch) -> None:
    grant = sm._grant

    def amnesiac(core: Core, sample: Sample, worker: object) -> tuple[Lease, int]:
        return grant(core, sample, worker)[0], 0  # type: ignore[arg-type]

    patch.setattr(sm, "_grant", amnesiac)


def _budget_of_each_lease(patch: pytest.MonkeyPatch) -> None:
    fault = sm.chunk_fault

    def generous(chunk: Chunk, sample: Sample | None, worker: object) -> object:
        found = fault(chunk, sample, worker)  # type: ignore[arg-type]
        return None if found is not None and "budget" in found.reason else found

    patch.setattr(sm, "chunk_fault", generous)


def _replay_other_weights(patch: pytest.MonkeyPatch) -> None:
    from scavenger.router import runs
    from scavenger.router.state import Group

    make = runs._group_for

    def trusting(core: Core, run: object, body: object, spec: object) -> Group:
        old = run.by_key.get((body.purpose, body.step, spec.prompt_index))  # type: ignore[attr-defined]
        if old is not None:
            old.root = run.versions[body.version].root  # type: ignore[attr-defined]
        return make(core, run, body, spec)  # type: ignore[arg-type]

    patch.setattr(runs, "_group_for", trusting)


def _never_ask_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wk, "_reconcile_orders", lambda *_: None)


def _deaf_to_lost_assignments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wk, "_assignment_lost", lambda *_: False)


def _forget_rewound_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restore, "_unsettled", lambda _, state: any(s.state in ("open", "complete") for s in state.samples))


@pytest.mark.parametrize(
    "plant",
    [
        _any_epoch, _any_worker, _deliver_early, _deliver_before_durable, _drop_on_release, _forget_tokens, _budget_of_each_lease,
        _replay_other_weights, _never_ask_again, _deaf_to_lost_assignments,
        _forget_rewound_steps,
    ],
)  # fmt: skip
def test_the_driver_finds_a_planted_bug(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(schedule.Failed):  # noqa: PT012 (any of the schedules may be the one)
        for seed in range(200):
            schedule.run(seed, 300)

"""Classic bugs, planted into the core one at a time: what the schedules must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from scavenger.ledger import records as rec
from scavenger.router import restore, runs
from scavenger.router import samples as sm
from scavenger.router import workers as wk
from scavenger.router.state import Core, SampleStatus
from scavenger.wire import Ack, CommitStep, Held, Lease

Plant = Callable[[pytest.MonkeyPatch], None]


def _changed_fault(patch: pytest.MonkeyPatch, **what: Callable[[Any], Any]) -> None:
    fault = sm.chunk_fault

    def blind(chunk: Any, sample: Any, worker: Any) -> Any:
        if sample is not None and sample.status is SampleStatus.LEASED:
            chunk = msgspec.structs.replace(chunk, **{name: of(sample) for name, of in what.items()})
        return fault(chunk, sample, worker)

    patch.setattr(sm, "chunk_fault", blind)


def stale_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    _changed_fault(patch, epoch=lambda sample: sample.epoch)


def other_version_accepted(patch: pytest.MonkeyPatch) -> None:
    _changed_fault(patch, version=lambda sample: sample.lease_version)


def anybody_accepted(patch: pytest.MonkeyPatch) -> None:
    fault = sm.chunk_fault

    def blind(chunk: Any, sample: Any, worker: Any) -> Any:
        return None if sample is not None and sample.status is SampleStatus.LEASED else fault(chunk, sample, worker)

    patch.setattr(sm, "chunk_fault", blind)


def budget_of_each_lease(patch: pytest.MonkeyPatch) -> None:
    """The budget is checked against what this lease generated alone."""
    fault = sm.chunk_fault

    def generous(chunk: Any, sample: Any, worker: Any) -> Any:
        found = fault(chunk, sample, worker)
        return None if found is not None and "budget" in found.reason else found

    patch.setattr(sm, "chunk_fault", generous)


def budget_renewed_by_a_move(patch: pytest.MonkeyPatch) -> None:
    grant = sm._grant

    def renewing(core: Core, sample: Any, worker: Any) -> Lease:
        lease = grant(core, sample, worker)
        more = msgspec.structs.replace(lease.sampling, max_tokens=lease.sampling.max_tokens + sample.accepted)
        return msgspec.structs.replace(lease, sampling=more)

    patch.setattr(sm, "_grant", renewing)


def sent_before_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "send_durable", Core.send)


def delivered_before_durable(patch: pytest.MonkeyPatch) -> None:
    finish = sm.finish

    def eager(core: Core, sample: Any, reason: str) -> None:
        finish(core, sample, reason)
        for one in sample.group.samples:
            one.durable = one.accepted
        send, core.send_durable = core.send_durable, core.send  # type: ignore[method-assign]
        sm.deliver_if_done(core, sample.group)
        core.send_durable = send  # type: ignore[method-assign]

    patch.setattr(sm, "finish", eager)


def acked_before_durable(patch: pytest.MonkeyPatch) -> None:
    append = sm._append

    def hasty(core: Core, worker: Any, sample: Any, chunk: Any) -> None:
        append(core, worker, sample, chunk)
        core.send(worker.conn, Ack((Held(sample.id, sample.epoch, sample.accepted),)))

    patch.setattr(sm, "_append", hasty)


def consumed_twice(patch: pytest.MonkeyPatch) -> None:
    """A replay offers what was consumed again, and nobody writes down that it was reopened."""
    record = Core.record

    def forgetful(core: Core, *records: rec.Record) -> None:
        record(core, *(r for r in records if not isinstance(r, rec.SampleReopened)))

    patch.setattr(Core, "record", forgetful)


def dropped_on_release(patch: pytest.MonkeyPatch) -> None:
    release = sm.release

    def careless(core: Core, sample: Any, reason: str, **how: Any) -> None:
        release(core, sample, reason, **how)
        sample.group.run.queue.discard(sample)

    patch.setattr(sm, "release", careless)


def tokens_forgotten_by_a_move(patch: pytest.MonkeyPatch) -> None:
    grant = sm._grant

    def amnesiac(core: Core, sample: Any, worker: Any) -> Lease:
        return msgspec.structs.replace(grant(core, sample, worker), accepted=b"")

    patch.setattr(sm, "_grant", amnesiac)


def version_reused_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    restored = restore._restore_run

    def young(state: rec.RunState, now: float) -> Any:
        run = restored(state, now)
        run.next_version = 1
        run.versions = {}
        return run

    patch.setattr(restore, "_restore_run", young)


def replayed_with_other_weights(patch: pytest.MonkeyPatch) -> None:
    make = runs._group_for

    def trusting(core: Core, run: Any, body: Any, spec: Any) -> Any:
        old = run.by_key.get((body.purpose, body.step, spec.prompt_index))
        if old is not None:
            old.root = run.versions[body.version].root
        return make(core, run, body, spec)

    patch.setattr(runs, "_group_for", trusting)


def prompt_skipped_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    """One failure is enough to go on without the sample."""

    def impatient(_core: Core, sample: Any, node: str) -> bool:
        sample.failures += 1
        sample.failed_nodes.add(node)
        return True

    patch.setattr(sm, "charge", impatient)


def old_attempt_commits(patch: pytest.MonkeyPatch) -> None:
    may = runs._may_call

    def lenient(core: Core, conn: int, identity: Any, call: Any, run: Any) -> Any:
        denied = may(core, conn, identity, call, run)
        if denied is not None and denied.code == "stale" and isinstance(call.body, CommitStep):
            run.conn = conn
            return None
        return denied

    patch.setattr(runs, "_may_call", lenient)


def lost_assignments_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wk, "_assignment_lost", lambda *_: False)


def rewound_steps_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restore, "_unsettled", lambda _, state: any(s.state in ("open", "complete") for s in state.samples))


def goodbye_before_durable(patch: pytest.MonkeyPatch) -> None:
    """The fix of a worker that leaves is undone: its goodbye is acked although its tokens are not committed."""
    said = wk.said

    def hasty(core: Core, conn: int, message: Any) -> None:
        send, core.send_durable = core.send_durable, core.send  # type: ignore[method-assign]
        try:
            said(core, conn, message)
        finally:
            core.send_durable = send  # type: ignore[method-assign]

    patch.setattr(wk, "said", hasty)




PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        stale_epoch_accepted, other_version_accepted, anybody_accepted, budget_of_each_lease, budget_renewed_by_a_move, sent_before_durable,
        delivered_before_durable, acked_before_durable, goodbye_before_durable, consumed_twice, dropped_on_release,
        tokens_forgotten_by_a_move, version_reused_after_a_restart, replayed_with_other_weights, prompt_skipped_after_a_failure,
        old_attempt_commits, lost_assignments_not_noticed, rewound_steps_forgotten,
    )
}  # fmt: skip

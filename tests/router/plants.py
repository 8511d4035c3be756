"""Classic bugs, planted into the core one at a time: what the schedules must find. `fleet_plants` has those of a fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from scavenger.ledger import records as rec
from scavenger.policy import agreement as agreement_policy
from scavenger.protocol.messages import Ack, Chunk, CommitStep, Held, Lease
from scavenger.router.core import registration, restore, runs, samples, steps, worker_commands
from scavenger.router.core import workers as wk
from scavenger.router.core.payloads import Payload, PayloadStore
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import SampleStatus
from tests.router import blocks, drafts
from tests.router.harness import chunk_of

Plant = Callable[[pytest.MonkeyPatch], None]


def _changed_fault(patch: pytest.MonkeyPatch, **what: Callable[[Any], Any]) -> None:
    fault = samples.chunk_fault

    def blind(chunk: Any, sample: Any, worker: Any) -> Any:
        if sample is not None and sample.status is SampleStatus.LEASED:
            chunk = msgspec.structs.replace(chunk, **{name: of(sample) for name, of in what.items()})
        return fault(chunk, sample, worker)

    patch.setattr(samples, "chunk_fault", blind)


def stale_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    _changed_fault(patch, epoch=lambda sample: sample.epoch)


def other_version_accepted(patch: pytest.MonkeyPatch) -> None:
    _changed_fault(patch, version=lambda sample: sample.lease_version)


def anybody_accepted(patch: pytest.MonkeyPatch) -> None:
    fault = samples.chunk_fault

    def blind(chunk: Any, sample: Any, worker: Any) -> Any:
        return (
            None
            if sample is not None and sample.status is SampleStatus.LEASED
            else fault(chunk, sample, worker)
        )

    patch.setattr(samples, "chunk_fault", blind)


def budget_of_each_lease(patch: pytest.MonkeyPatch) -> None:
    """The budget is checked against what this lease generated alone."""
    fault = samples.chunk_fault

    def generous(chunk: Any, sample: Any, worker: Any) -> Any:
        found = fault(chunk, sample, worker)
        return None if found is not None and "budget" in found.reason else found

    patch.setattr(samples, "chunk_fault", generous)


def budget_renewed_by_a_move(patch: pytest.MonkeyPatch) -> None:
    grant = samples._grant

    def renewing(core: Core, sample: Any, worker: Any) -> tuple[Lease, int]:
        lease, accepted = grant(core, sample, worker)
        more = msgspec.structs.replace(lease.sampling, max_tokens=lease.sampling.max_tokens + accepted)
        return msgspec.structs.replace(lease, sampling=more), accepted

    patch.setattr(samples, "_grant", renewing)


def sent_before_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "send_durable", Core.send)


def delivered_before_durable(patch: pytest.MonkeyPatch) -> None:
    finish = samples.finish

    def eager(core: Core, sample: Any, reason: str) -> None:
        finish(core, sample, reason)
        for one in sample.group.samples:
            one.durable = one.accepted
        send, core.send_durable = core.send_durable, core.send  # type: ignore[method-assign]
        samples.deliver_if_done(core, sample.group)
        core.send_durable = send  # type: ignore[method-assign]

    patch.setattr(samples, "finish", eager)


def acked_before_durable(patch: pytest.MonkeyPatch) -> None:
    append = samples._append

    def hasty(core: Core, worker: Any, sample: Any, chunk: Any) -> None:
        append(core, worker, sample, chunk)
        core.send(worker.conn, Ack((Held(sample.id, sample.epoch, sample.accepted),)))

    patch.setattr(samples, "_append", hasty)


def consumed_twice(patch: pytest.MonkeyPatch) -> None:
    """A replay offers what was consumed again, and nobody writes down that it was reopened."""
    record = Core.record

    def forgetful(core: Core, *records: rec.Record) -> None:
        record(core, *(r for r in records if not isinstance(r, rec.SampleReopened)))

    patch.setattr(Core, "record", forgetful)


def dropped_on_release(patch: pytest.MonkeyPatch) -> None:
    release = samples.release

    def careless(core: Core, sample: Any, reason: str, **how: Any) -> None:
        release(core, sample, reason, **how)
        sample.group.run.queue.discard(sample)

    patch.setattr(samples, "release", careless)


def tokens_forgotten_by_a_move(patch: pytest.MonkeyPatch) -> None:
    grant = samples._grant

    def amnesiac(core: Core, sample: Any, worker: Any) -> tuple[Lease, int]:
        return grant(core, sample, worker)[0], 0

    patch.setattr(samples, "_grant", amnesiac)


def version_reused_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    restored = restore._restore_run

    def young(core: Core, state: rec.RunState) -> Any:
        run = restored(core, state)
        run.weights.next_version = 1
        run.weights.versions = {}
        return run

    patch.setattr(restore, "_restore_run", young)


def replayed_with_other_weights(patch: pytest.MonkeyPatch) -> None:
    make = steps._group_for

    def trusting(core: Core, run: Any, body: Any, spec: Any) -> Any:
        old = run.by_key.get((body.purpose, body.step, spec.prompt_index))
        if old is not None:
            old.root = run.weights.versions[body.version].root
        return make(core, run, body, spec)

    patch.setattr(steps, "_group_for", trusting)


def prompt_skipped_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    """One failure is enough to go on without the sample."""

    def impatient(_core: Core, sample: Any, node: str) -> bool:
        sample.failures += 1
        sample.failed_nodes |= {node}
        return True

    patch.setattr(samples, "charge", impatient)


def old_attempt_commits(patch: pytest.MonkeyPatch) -> None:
    may = runs._may_call

    def lenient(core: Core, conn: int, identity: Any, call: Any, run: Any) -> Any:
        denied = may(core, conn, identity, call, run)
        if denied is not None and denied.code == "stale" and isinstance(call.body, CommitStep):
            run.trainer.conn = conn
            return None
        return denied

    patch.setattr(runs, "_may_call", lenient)


def lost_assignments_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wk, "_assignment_lost", lambda *_: False)


def orders_never_repeated(patch: pytest.MonkeyPatch) -> None:
    """What was ordered once (load, sleep, wake, leave) is taken for done, whatever the worker's heartbeats say."""
    patch.setattr(worker_commands, "reconcile", lambda *_: None)


def rewound_steps_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        restore, "_unsettled", lambda _, state: any(s.state in ("open", "complete") for s in state.samples)
    )


def goodbye_before_durable(patch: pytest.MonkeyPatch) -> None:
    """The fix of a worker that leaves is undone: its goodbye is acked although its tokens are not committed."""
    sender, goodbye = wk.sender, wk.goodbye

    def hastily(say: Callable[..., Any]) -> Callable[..., Any]:
        def hasty(core: Core, *rest: Any, **named: Any) -> Any:
            send, core.send_durable = core.send_durable, core.send  # type: ignore[method-assign]
            try:
                return say(core, *rest, **named)
            finally:
                core.send_durable = send  # type: ignore[method-assign]

        return hasty

    patch.setattr(wk, "sender", hastily(sender))
    patch.setattr(wk, "goodbye", hastily(goodbye))


def evicted_engine_let_in_again(patch: pytest.MonkeyPatch) -> None:
    """Two live engines of one slot evict each other for ever."""
    patch.setattr(registration, "_evict_from_slot", lambda *_: None)


def evicted_before_durable(patch: pytest.MonkeyPatch) -> None:
    append = PayloadStore.append

    def hasty(store: PayloadStore, sample_id: int, offset: int, chunk: Chunk) -> None:
        append(store, sample_id, offset, chunk)
        store.durable(sample_id, offset + len(chunk.tokens) // 4)

    patch.setattr(PayloadStore, "append", hasty)


def resends_compared_with_nothing(patch: pytest.MonkeyPatch) -> None:
    """Nobody reads back the tokens that a resend is compared with."""
    patch.setattr("tests.router.harness.lacking", lambda *_: {})


def read_back_joined_without_looking(patch: pytest.MonkeyPatch) -> None:
    def careless(store: PayloadStore, sample_id: int, payload: Payload, accepted: int) -> None:
        store.drop(sample_id)
        for_all = chunk_of(sample_id, 0, 0, 0, accepted)
        store.append(sample_id, 0, msgspec.structs.replace(for_all, tokens=for_all.tokens[::-1]))
        store.durable(sample_id, accepted)

    patch.setattr(PayloadStore, "load", careless)


def delivered_in_half(patch: pytest.MonkeyPatch) -> None:
    deliver = samples.deliver_if_done

    def shortened(core: Core, group: Any) -> None:
        send = core.send_filled
        core.send_filled = lambda conn, message, lengths: send(conn, message, tuple(n // 2 for n in lengths))  # type: ignore[method-assign]
        deliver(core, group)
        core.send_filled = send  # type: ignore[method-assign]

    patch.setattr(samples, "deliver_if_done", shortened)


def asleep_once_told(patch: pytest.MonkeyPatch) -> None:
    """A worker counts as asleep as soon as it was told to sleep."""
    put = worker_commands.put_to_sleep

    def trusting(core: Core, worker: Any) -> None:
        put(core, worker)
        worker_commands.asleep(core, worker, worker.memory.order, 0)

    patch.setattr(worker_commands, "put_to_sleep", trusting)


def acknowledged_by_an_older_order(patch: pytest.MonkeyPatch) -> None:
    """Any word that it sleeps is taken for an answer to the newest order, although it was woken in between."""
    asleep, reconcile = worker_commands.asleep, worker_commands.reconcile

    def trusting(core: Core, worker: Any, beat: Any) -> None:
        if beat.memory == "asleep":
            asleep(core, worker, worker.memory.order, beat.bytes_held)
        reconcile(core, worker, beat)

    patch.setattr(worker_commands, "reconcile", trusting)
    patch.setattr(
        worker_commands,
        "asleep",
        lambda core, worker, order, held: asleep(core, worker, worker.memory.order, held),
    )


def woken_without_the_trainer(patch: pytest.MonkeyPatch) -> None:
    """A restarted daemon takes it that engines are to be awake, before the trainer has said so."""
    restored = restore._restore_run

    def sure(core: Core, state: rec.RunState) -> Any:
        run = restored(core, state)
        run.reserved.awake_stated = True
        return run

    patch.setattr(restore, "_restore_run", sure)


def set_aside_and_kept(patch: pytest.MonkeyPatch) -> None:
    """An engine whose numbers are wrong is named, and goes on as before."""
    patch.setattr(worker_commands, "set_aside", lambda core, worker, reason: None)


def blamed_on_another(patch: pytest.MonkeyPatch) -> None:
    """Now and then a report counts against the worker that joined next."""
    add = agreement_policy.SpanWindow.add

    def shifted(self: Any, step: int, spans: Any) -> None:
        add(self, step, [span._replace(worker_id=span.worker_id + step % 2) for span in spans])

    patch.setattr(agreement_policy.SpanWindow, "add", shifted)


def draft_accepted_unverified(patch: pytest.MonkeyPatch) -> None:
    """An engine believes what siblings said."""
    patch.setattr(drafts, "accepts", lambda _drafted, _drawn: True)


def kv_loaded_unverified(patch: pytest.MonkeyPatch) -> None:
    """An engine loads whatever blocks it finds."""
    patch.setattr(blocks, "fault", lambda _found, _expected: "")


def engine_of_two_runs(patch: pytest.MonkeyPatch) -> None:
    """An engine registers for another run, and the one that it left still counts on it: its goodbye was lost."""
    patch.setattr(registration, "_left_for_this", lambda _worker, _identity, _run: False)


@dataclass(frozen=True)
class Planted:
    """A bug; what is said when it is found for its own reason; schedules that are known to find it, which are tried first."""

    plant: Plant
    says: str
    seeds: tuple[int, ...] = ()


PLANTS: dict[str, Planted] = {
    planted.plant.__name__: planted
    for planted in (
        Planted(stale_epoch_accepted, "a chunk with stale epoch was accepted", (31,)),
        Planted(
            other_version_accepted, "a chunk with other version was accepted|a chunk of other weights", (32,)
        ),
        Planted(anybody_accepted, "was accepted .I1"),
        Planted(
            budget_of_each_lease,
            "a chunk with over budget was accepted|lengths out of order|over its budget",
            (6,),
        ),
        Planted(budget_renewed_by_a_move, "the budget changed with the lease"),
        Planted(sent_before_durable, "before their commit|before its commit"),
        Planted(
            delivered_before_durable, "delivered before its record|delivered while|acked before its commit"
        ),
        Planted(acked_before_durable, "acked before its commit"),
        Planted(goodbye_before_durable, "its goodbye was acked before its commit"),
        Planted(consumed_twice, "was consumed twice", (10,)),
        Planted(dropped_on_release, "queued, in queue: False"),
        Planted(tokens_forgotten_by_a_move, "moved without its own tokens"),
        Planted(version_reused_after_a_restart, "was used twice"),
        Planted(replayed_with_other_weights, "was generated by other weights", (6,)),
        Planted(prompt_skipped_after_a_failure, "given up after . leases"),
        Planted(old_attempt_commits, "was fenced, and its CommitStep was taken", (2, 241, 265)),
        Planted(lost_assignments_not_noticed, "an engine serves nobody", (16, 217, 392)),
        Planted(orders_never_repeated, "an engine serves nobody", (32, 308, 384)),
        Planted(rewound_steps_forgotten, "retries .*I3|groups .* stand", (1234, 4635)),
        Planted(evicted_engine_let_in_again, "an engine serves nobody", (29, 42)),
        Planted(
            evicted_before_durable,
            "evicted before it was durable|evicted up to|neither in memory nor durable",
        ),
        Planted(resends_compared_with_nothing, "are to be compared, and are not in memory", (2,)),
        Planted(
            read_back_joined_without_looking, "moved without its own tokens|other tokens than the ledger"
        ),
        Planted(asleep_once_told, "trains beside an engine that is awake"),
        Planted(acknowledged_by_an_older_order, "trains beside an engine that is awake", (443, 588)),
        Planted(woken_without_the_trainer, "trains beside an engine that is awake", (148, 511)),
        Planted(set_aside_and_kept, "was set aside and is"),
        Planted(blamed_on_another, "was set aside and is healthy"),
        Planted(draft_accepted_unverified, "others. tokens were accepted", (40, 82, 89)),
        Planted(kv_loaded_unverified, "others. tokens were accepted", (18, 60)),
        Planted(engine_of_two_runs, "works for two runs", (262,)),
        Planted(delivered_in_half, "delivered with other tokens than the ledger"),
    )
}

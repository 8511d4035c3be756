"""Bugs of a fleet, planted one at a time: what schedules with several runs, a further cluster and guests must find. `plants` has others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from scavenger.protocol.messages import Chunk, Chunks
from scavenger.protocol.worker.events import SendMessage
from scavenger.protocol.worker.session import Session
from scavenger.protocol.worker.work import Work
from scavenger.router.core import registration, samples, worker_commands, workers
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import SampleStatus
from tests.router.fleet import CLUSTER, Fleet
from tests.router.plants import Planted


def lease_kept_after_a_change_of_hands(patch: pytest.MonkeyPatch) -> None:
    """What an engine generated for one run goes with it to the next."""
    gone, hello = workers.gone, registration.hello
    left: dict[str, list[Any]] = {}

    def leaves(core: Core, worker: Any, reason: str, **how: Any) -> None:
        if worker.departure.hands_to:
            left[worker.process.intent_id] = list(worker.leases.values())
        gone(core, worker, reason, **how)

    def comes(core: Core, conn: int, identity: Any, message: Any) -> None:
        hello(core, conn, identity, message)
        worker = core.by_conn.get(conn)
        for sample in left.pop(identity.intent_id, []) if worker is not None else []:
            if sample.status is SampleStatus.QUEUED:
                sample.queue.discard(sample)
                samples.lease(core, worker, [sample])  # type: ignore[arg-type]  # not None

    patch.setattr(workers, "gone", leaves)
    patch.setattr(registration, "hello", comes)


def goodbye_before_its_tokens(patch: pytest.MonkeyPatch) -> None:
    """An engine that changes hands says goodbye, and what it had not sent yet is lost."""
    farewell = Session._farewell

    def hasty(session: Session) -> list[Any]:
        said = farewell(session)
        goodbyes = [
            one for one in said if not (isinstance(one, SendMessage) and isinstance(one.message, Chunks))
        ]
        return goodbyes if session._ending is not None and session._ending.hands_to else said

    patch.setattr(Session, "_farewell", hasty)


def weights_of_the_run_before(patch: pytest.MonkeyPatch) -> None:
    """An engine that changed hands is sent to weights of another run."""
    order = worker_commands._order

    def mistaken(core: Core, worker: Any, version: Any, *, more: bool = False) -> Any:
        found = order(core, worker, version, more=more)
        others = [run for run in core.runs.values() if run is not worker.run and run.weights.versions]
        if more or not others or worker.weights.loads != 1 or worker.weights.loaded >= 0:
            return found
        theirs = others[0].weights.versions
        return msgspec.structs.replace(found, manifest=theirs[max(theirs)].manifest)

    patch.setattr(worker_commands, "_order", mistaken)


def tokens_of_another_runs_engine(patch: pytest.MonkeyPatch) -> None:
    """Whoever names the right epoch, version and offset may go on with a sample, whatever run its key is of."""
    fault = samples.chunk_fault

    def blind(chunk: Any, sample: Any, worker: Any) -> Any:
        if sample is not None and sample.status is SampleStatus.LEASED and sample.group.run is not worker.run:
            return fault(chunk, sample, SimpleNamespace(id=sample.worker_id))  # type: ignore[arg-type]  # its holder
        return fault(chunk, sample, worker)

    patch.setattr(samples, "chunk_fault", blind)


def failed_by_another_runs_engine(patch: pytest.MonkeyPatch) -> None:
    """An engine may give up a sample that it does not have."""

    def trusting(core: Core, _worker: Any, message: Any) -> None:
        sample = core.samples.get(message.sample_id)
        if sample is not None and sample.status is SampleStatus.LEASED and sample.epoch == message.epoch:
            samples.release(core, sample, message.reason, crashed=True)

    patch.setattr(workers, "sample_failed", trusting)


def group_to_another_owner(patch: pytest.MonkeyPatch) -> None:
    deliver = samples.deliver_if_done

    def generous(core: Core, group: Any) -> None:
        send = core.send_filled
        everybody = [run.trainer.conn for run in core.runs.values() if run.trainer.conn is not None]

        def to_all(_conn: int, message: Any, lengths: tuple[int, ...]) -> None:
            for conn in everybody:
                send(conn, message, lengths)

        core.send_filled = to_all  # type: ignore[method-assign, assignment]  # while this group is delivered
        deliver(core, group)
        core.send_filled = send  # type: ignore[method-assign]  # as it was

    patch.setattr(samples, "deliver_if_done", generous)


def chunk_doubled_by_the_links_return(patch: pytest.MonkeyPatch) -> None:
    """A link that was cut delivers twice what waited, and what comes again counts as what follows."""
    meet = Fleet.on_meet

    def twice(world: Fleet, kept: bool) -> None:
        for link in [link for link in world.links.values() if link.who.cluster == CLUSTER]:
            waiting = [(one, one) if isinstance(one, Chunks) else (one,) for one in link.up]
            link.up.clear()
            link.up.extend(message for messages in waiting for message in messages)
        meet(world, kept)

    def next_ones(_core: Core, _worker: Any, sample: Any, chunk: Chunk) -> Chunk:
        return msgspec.structs.replace(chunk, offset=sample.accepted)

    patch.setattr(Fleet, "on_meet", twice)
    patch.setattr(samples, "_resent", next_ones)


def weights_across_in_the_clear(patch: pytest.MonkeyPatch) -> None:
    """Engines of a further cluster get weights of any run."""
    for module in (registration, worker_commands):
        patch.setattr(module, "not_across", lambda _cluster, _encrypt: "")


def bound_that_fell_not_heeded(patch: pytest.MonkeyPatch) -> None:
    """A guest ends what it began, whatever its host leaves it."""
    patch.setattr(Work, "_yield_beyond", lambda _work, _bound, _now: [])


def loan_told_once(patch: pytest.MonkeyPatch) -> None:
    """An order of a loan that is lost on its way is not repeated: a loan that never begins, or one that never ends."""
    reconcile = worker_commands.reconcile

    def trusting(core: Core, worker: Any, message: Any) -> None:
        reconcile(core, worker, msgspec.structs.replace(message, lends=worker.loan.public_key))

    patch.setattr(worker_commands, "reconcile", trusting)


FLEET_PLANTS: dict[str, Planted] = {
    planted.plant.__name__: planted
    for planted in (
        Planted(lease_kept_after_a_change_of_hands, "worker .* of run . holds sample .* of run", (9,)),
        Planted(goodbye_before_its_tokens, "tokens the engine's change of hands left", (9,)),
        Planted(weights_of_the_run_before, "weights with the manifest of . were sent to", (4,)),
        Planted(tokens_of_another_runs_engine, "tokens(| again), said an engine of run"),
        Planted(failed_by_another_runs_engine, "it failed, said an engine of run", (4,)),
        Planted(group_to_another_owner, "group .* of run . was sent to"),
        Planted(chunk_doubled_by_the_links_return, "tokens were accepted twice"),
        Planted(weights_across_in_the_clear, "was to cross to cluster north in the clear"),
        Planted(bound_that_fell_not_heeded, "beyond its bound", (6,)),
        Planted(loan_told_once, "knows of loan .*, and was told of"),
    )
}

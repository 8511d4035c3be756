"""Engines beside inference services: when a run refuses a guest's key, and that one process at a time has it. Pure.

A guest's key is in hands that are not the run's owner's, on a GPU that nobody here watches. One whose engine fails, or computes wrong
numbers, is asked to leave, and workers with its key are refused until the admin renews the key (`scavenger keys guest`) or the daemon
starts again. Nothing that a guest does stops a run.
"""

from __future__ import annotations

from scavenger.protocol.messages import GUEST_INTENT, LENT_INTENT, Rejected, WorkerHello, words
from scavenger.router.core import worker_commands
from scavenger.router.core.events import PeerIdentity
from scavenger.router.core.state import ActiveRun, GuestStanding, Worker
from scavenger.router.core.tables import Core

#: Samples that fail on a guest before it is refused. An engine whose memory is too small for the run fails each one that it is given.
MOST_FAILURES = 3
RENEW = "mend it, and have the site's admin renew the key (scavenger keys guest); a restart of the daemon admits it too"
LENT = "read the log of the job whose engine lends them; the daemon ends this loan, and each loan has a key of its own"


def fault(run: ActiveRun, identity: PeerIdentity, hello: WorkerHello) -> Rejected | None:
    """Why a worker with this key may not register now. One that is known comes back, if only to say goodbye."""
    others = [w for w in run.workers.values() if w.process.intent_id == identity.intent_id]
    standing = run.guests.get(identity.intent_id)
    if (
        standing is None
        or standing.public_key not in ("", identity.public_key)
        or any(other.process.session == hello.session for other in others)
    ):
        return None
    if standing.refused:
        if identity.intent_id.startswith(LENT_INTENT):
            return Rejected(words(f"the key to these lent slots is refused: {standing.refused}"), LENT)
        return Rejected(words(f"this guest's key is refused: {standing.refused}"), RENEW)
    if not identity.intent_id.startswith(GUEST_INTENT):
        return None  # of a harvested job the later incarnation is the one that lives
    for other in others:
        if other.conn is not None and not other.suspect:
            return Rejected(
                f"another process with this guest's key is at work on {other.node}",
                "have one key for each process; it is tried again until that one has left",
                retry=True,
            )
    return None


def admitted(core: Core, run: ActiveRun, identity: PeerIdentity) -> None:
    """A worker with this key registers. Under a renewed key nothing is held against it."""
    if not identity.intent_id.startswith(GUEST_INTENT):
        return
    standing = run.guests.get(identity.intent_id)
    if standing is None:
        run.guests[identity.intent_id] = GuestStanding(identity.public_key, 0)
    elif standing.public_key != identity.public_key:
        run.guests[identity.intent_id] = GuestStanding(identity.public_key, core.next_worker_id)


def loan_over(core: Core, lender: str) -> None:
    """The job of this intent lends no slots any more: no worker comes under the borrower's key."""
    for run in core.runs.values():
        run.guests.pop(f"{LENT_INTENT}{lender}", None)


def judge(core: Core, worker: Worker) -> None:
    """A guest may have failed a sample: after `MOST_FAILURES` it leaves, and its key is refused."""
    standing = worker.run.guests.get(worker.process.intent_id)
    if standing is None or standing.refused or standing.failures < MOST_FAILURES or not worker.bounded:
        return
    reason = f"{standing.failures} samples failed on it, the last one: {standing.last_failure}"
    refuse(core, worker.run, worker.process.intent_id, worker.id, reason)
    worker_commands.set_aside(core, worker, f"set aside: {reason}")


def refuse(core: Core, run: ActiveRun, intent_id: str, worker_id: int, reason: str) -> None:
    """Refuse the key under which this worker registered, if it is still the guest's."""
    standing = run.guests.get(intent_id)
    if standing is None or standing.refused or worker_id < standing.first_worker:
        return
    standing.refused = reason
    core.event("guest_refused", run.id, intent_id, f"{reason}; its key is refused", worker=worker_id)

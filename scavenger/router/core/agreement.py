"""Engines whose logprobs disagree with the trainer's: what a trainer reports, and what is done about an engine that is found wrong. Pure.

`policy.agreement` decides. An engine that it finds is *set aside*: its unfinished samples move to others with all their tokens, it is given
no more and asked to leave, and its node is charged. Its trainer is told, and masks the samples that hold tokens of it. The engine may have
left by then: its samples are masked and its node is charged all the same. A reserved engine starts again; where the next one in its slot is
set aside too, the run stops, because no other engine can use that GPU, and it may be the trainer that is wrong.
"""

from __future__ import annotations

from scavenger.policy.agreement import MOST_WORKERS, AgreementSpan, SuspectWorker
from scavenger.protocol.messages import GUEST_INTENT, ReportAgreement, RunStopped, Suspect, Suspects, words
from scavenger.router.core import decision_log, guests, worker_commands
from scavenger.router.core.events import CondemnedEngine
from scavenger.router.core.state import ActiveRun, Place, Worker
from scavenger.router.core.tables import Core

#: Engines in one reserved slot that are set aside before the run stops.
MOST_IN_A_SLOT = 2
REMEDY = (
    "test this GPU and the trainer's, and compare the engine's version and types with the trainer's; then start the training job again on "
    'other nodes (#SBATCH --exclude): it goes on from its checkpoint. router.disagreement = "report" goes on with such an engine'
)


#: It left before this daemon began: its samples are masked, and no node is charged.
GONE = Place("", "", "", "", 0, 0)


def joined(worker: Worker) -> None:
    """Remember where a worker is."""
    places = worker.run.agreement.places
    process = worker.process
    places[worker.id] = Place(
        worker.kind, worker.place, worker.slot, process.intent_id, process.incarnation, process.job_id
    )
    while len(places) > MOST_WORKERS:
        places.popitem(last=False)


def reported(core: Core, run: ActiveRun, body: ReportAgreement) -> Suspects:
    """Take in a trainer's report, act upon what it shows, and name all whom the trainer is not to train on."""
    mode, known = core.limits.disagreement, run.agreement
    if mode != "off":
        known.window.add(
            body.step,
            [
                AgreementSpan(one.sample_id, one.worker_id, one.tokens, one.signed, one.absolute, one.k3)
                for one in body.spans
                if one.worker_id not in known.suspects
            ],
        )
        for verdict in known.window.judge():
            _act(core, run, verdict, known.places.get(verdict.worker_id, GONE), report_only=mode == "report")
    return Suspects(
        tuple(
            Suspect(worker_id, node[:256], words(reason))
            for worker_id, (node, reason) in known.suspects.items()
        )
    )


def _act(core: Core, run: ActiveRun, verdict: SuspectWorker, place: Place, *, report_only: bool) -> None:
    worker_id, reason = verdict.worker_id, verdict.reason
    subject = f"worker {worker_id}"
    where = {"node": place.node, "worker": place.kind, "job_id": place.job_id, "intent": place.intent_id}
    numbers = verdict.numbers | where | {"step": run.progress.newest[1]}
    action = "report" if report_only else "set-aside"
    decision_log.set_aside(core, run, action, subject, reason, numbers)
    run.agreement.window.forget(worker_id)  # it is no measure for the others
    if report_only:
        if core.count_refusal(f"{run.owner_key} engine_disagrees"):
            core.event("engine_disagrees", run.id, subject, reason, **numbers)
        return
    core.event("engine_set_aside", run.id, subject, reason, **numbers)
    suspects = run.agreement.suspects
    suspects[worker_id] = (place.node, reason)
    while len(suspects) > MOST_WORKERS:
        suspects.popitem(last=False)
    worker = run.workers.get(worker_id)
    if worker is not None:
        worker_commands.set_aside(core, worker, f"set aside: {reason}")
    if place.intent_id.startswith(GUEST_INTENT):  # no node of ours: Slurm's poll never saw its job
        guests.refuse(core, run, place.intent_id, worker_id, reason)
    elif place.kind == "harvested":
        number = core.condemned[-1].number + 1 if core.condemned else 1
        core.condemned.append(
            CondemnedEngine(number, place.intent_id, place.incarnation, run.id, reason, core.now)
        )
    elif place.kind == "reserved":
        _count_reserved(core, run, place, reason)


def _count_reserved(core: Core, run: ActiveRun, place: Place, reason: str) -> None:
    """The launcher starts another in its slot, on the same GPU: once."""
    so_far = run.reserved.set_aside[place.slot] = run.reserved.set_aside.get(place.slot, 0) + 1
    if so_far < MOST_IN_A_SLOT or run.stopped:
        return
    run.stopped = words(f"reserved engine {place.slot or '?'} on node {place.node} is wrong again: {reason}")
    run.stop_remedy = REMEDY
    core.event("reserved_wrong", run.id, f"reserved engine {place.slot}", run.stopped, node=place.node)
    core.send_durable(run.trainer.conn, RunStopped(run.stopped, run.stop_remedy))

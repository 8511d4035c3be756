"""What a trainer may ask: open a run, submit groups, publish versions, commit steps. Pure; every call may be repeated.

Holds I3: a new attempt fences the older; what it had not consumed for good is offered again only under an equal root hash, else superseded.

Boundary: a trainer's calls, beside a worker's.
"""

from __future__ import annotations

import msgspec

from scavenger.errors import ONE_RELEASE
from scavenger.ledger import records as rec
from scavenger.policy.agreement import SpanWindow
from scavenger.policy.interface import WindowMoved
from scavenger.protocol import engine_options
from scavenger.protocol.messages import (
    GATEWAY_BODIES,
    PROTOCOL,
    Attach,
    Call,
    CallBody,
    CloseRun,
    CommitStep,
    DeferLate,
    Deliver,
    Denied,
    EndReserved,
    HelloAgain,
    Ok,
    OpenRun,
    Ping,
    Pong,
    PublishVersion,
    RecordCheckpoint,
    Reply,
    ReplyBody,
    ReportAgreement,
    RunStopped,
    SetReserved,
    SubmitGroups,
    WantDeliveries,
    WeightSource,
)
from scavenger.router.core import (
    agreement,
    deliveries,
    registration,
    samples,
    staleness,
    steps,
    turns,
    worker_commands,
    worker_counts,
    workers,
)
from scavenger.router.core.events import PeerIdentity
from scavenger.router.core.row_budget import PEER_BURST, PEER_EVERY_S
from scavenger.router.core.state import ActiveRun, Agreement, EpisodeBudget, RunSettings, TrainerLink, Version
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import SampleStatus, WorkerStatus
from scavenger.weights import manifest as manifests
from scavenger.weights.directory import VERSIONS_SERVED, WeightDirectory

#: Of a version's manifest (names and shapes of some 100,000 tensors) and of its sources, one a rank: each engine is sent both in one
#: message, and those of a base beside those of its adapters.
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
MAX_SOURCES = 4096
MAX_SOURCES_BYTES = 4 * 1024 * 1024
ENDS = ("finished", "failed", "stopped")
_TOO_OFTEN = (
    f"over {PEER_BURST} openings, versions and checkpoints of this run, and no step was committed among them",
    f"look why its training job makes no progress; one more is taken every {PEER_EVERY_S:g} s",
)
_TOO_MANY = (
    f"over {PEER_BURST} runs of this owner were opened for the first time",
    f"give a run's trainer the name that the run has; one more is taken every {PEER_EVERY_S:g} s",
)


def called(core: Core, conn: int, identity: PeerIdentity, call: Call) -> None:
    """Answer one call. Replies wait for the commit of what they promise."""
    run = core.runs.get(call.run)
    denied = _may_call(core, conn, identity, call, run)
    if denied is not None:
        core.send(conn, Reply(call.id, denied))
        return
    if isinstance(call.body, OpenRun):
        _open(core, conn, identity, call, call.body, run)
        return
    assert run is not None
    if isinstance(call.body, GATEWAY_BODIES):  # a gateway is no trainer, and no sign of one
        core.send_durable(conn, Reply(call.id, turns.called(core, conn, run, call.body)))
        return
    run.trainer.seen_at = core.now
    if isinstance(call.body, Attach):
        reply: ReplyBody = _attach(core, conn, run, call.body)
    elif isinstance(call.body, Ping):
        known = call.body.aside or run.trainer.conn == conn
        if run.trainer.conn == conn and call.body.trained is not None:
            steps.trained(core, run, call.body.trained)
        core.send(conn, Reply(call.id, Pong(core.generation)) if known else HelloAgain("attach first"))
        return
    elif run.trainer.conn != conn:
        core.send(conn, HelloAgain("attach first"))
        return
    else:
        reply = _answer(core, run, call.body)
    core.send_durable(conn, Reply(call.id, reply))


def _may_call(
    core: Core, conn: int, identity: PeerIdentity, call: Call, run: ActiveRun | None
) -> Denied | None:
    if identity.role != "owner":
        return Denied("not-owner", "a worker's key cannot act as a trainer", "use the owner's key")
    if isinstance(call.body, OpenRun | Attach) and call.body.run != call.run:
        why = f"a call for run {call.run!r} that names run {call.body.run!r}"
        return Denied("invalid", why, "run trainer and daemon of one release")
    if isinstance(call.body, OpenRun):
        if call.body.protocol != PROTOCOL:
            why = f"protocol {call.body.protocol}: this daemon speaks {PROTOCOL}"
            return Denied("invalid", why, "run trainer and daemon of one release")
        if run is not None and run.owner_key != identity.public_key:
            return Denied(
                "not-owner",
                f"run {call.run!r} belongs to another key: names of runs are the site's, and another owner has taken this one",
                "choose another run.name, such as one with your own name in it",
            )
        return None
    if isinstance(call.body, Attach) and core.foreign(call.body.ledger):
        return Denied(
            "restored",
            f"the ledger was restored from a backup, in which attempt {call.attempt} of run {call.run!r} does not exist",
            "start the training job again: it goes on from the newest checkpoint that the ledger knows",
        )
    if run is None:
        return Denied("unknown-run", f"run {call.run!r} was never opened on this ledger", "open it first")
    if run.owner_key != identity.public_key:
        return Denied("not-owner", f"run {call.run!r} belongs to another key", "use the key that opened it")
    if call.attempt != run.attempt and not isinstance(call.body, GATEWAY_BODIES):
        return Denied(
            "stale",
            f"attempt {call.attempt} of run {call.run!r} was fenced: attempt {run.attempt} is the trainer now",
            "end this job; only the newest trainer of a run goes on",
        )
    return None


def _fault_of_charging(core: Core, run: ActiveRun) -> Denied | None:
    """Charge a row that nothing else bounds: a trainer may ask for it as often as it likes. Work that is committed makes room."""
    if core.charge_row(f"calls {run.id}"):
        return None
    core.count("calls_refused")
    return Denied("invalid", *_TOO_OFTEN)


def _checkpoint(core: Core, run: ActiveRun, body: RecordCheckpoint) -> ReplyBody:
    if body.kept is not None and body.step not in body.kept:
        return Denied(
            "invalid",
            f"the checkpoint of step {body.step} is recorded and not among those kept",
            "name it in `kept`",
        )
    if (refusal := _fault_of_charging(core, run)) is not None:
        return refusal
    kept = "" if body.kept is None else msgspec.json.encode(sorted(set(body.kept))).decode()
    core.record(rec.CheckpointRecorded(run.id, body.step, body.version, body.root, body.path, core.now, kept))
    return Ok()


def _answer(core: Core, run: ActiveRun, body: CallBody) -> ReplyBody:
    match body:
        case SubmitGroups():
            return steps.submit(core, run, body)
        case PublishVersion():
            return _publish(core, run, body)
        case DeferLate():
            return steps.defer(core, run, body)
        case Deliver():
            return deliveries.deliver(core, run, body)
        case WantDeliveries():
            return deliveries.want(core, run, body)
        case CommitStep():
            before, reply = run.progress.last_committed, steps.commit(core, run, body)
            if run.progress.last_committed > before:
                core.advanced(f"calls {run.id}")
                registration.advanced(core, run)
            return reply
        case RecordCheckpoint():
            return _checkpoint(core, run, body)
        case SetReserved():
            return _set_reserved(core, run, body)
        case EndReserved():
            return _end_reserved(core, run, body)
        case ReportAgreement():
            return agreement.reported(core, run, body)
        case CloseRun():
            return _close(core, run, body)
    return Denied("invalid", f"{type(body).__name__} is not a call")


# ---------------------------------------------------------------- opening


def _open(
    core: Core, conn: int, identity: PeerIdentity, call: Call, body: OpenRun, run: ActiveRun | None
) -> None:
    if run is not None and run.trainer.opening is not None and run.trainer.opening[2] == body:
        # A repeat: its trainer connected again while the ledger is being read.
        run.trainer.opening = (conn, call.id, body)
        return
    if (refusal := _fault_of_options(core, body)) is not None:
        core.count("calls_refused")
        core.send(conn, Reply(call.id, refusal))
        return
    if (refusal := deliveries.opening_fault(core, identity.public_key, body)) is not None:
        core.count("calls_refused")
        core.send(conn, Reply(call.id, refusal))
        return
    if run is None and not core.charge_row(f"runs {identity.public_key}"):
        core.count("calls_refused")
        core.send(conn, Reply(call.id, Denied("invalid", *_TOO_MANY)))
        return
    if run is None:
        run = ActiveRun(
            core.next_run_id,
            call.run,
            identity.public_key,
            body.seed,
            body.engine,
            policy=core.new_policy(call.run),
        )
        run.weights.directory = WeightDirectory(core.switches)  # which may be learnt later
        run.agreement = Agreement(SpanWindow(core.limits.agreement))
        core.next_run_id += 1
        core.runs[call.run] = run
        core.record(
            rec.RunCreated(
                run.id,
                run.name,
                run.owner_key,
                body.seed,
                body.config,
                msgspec.json.encode(body.engine).decode(),
                body.tokenizer,
                core.now,
            )
        )
    elif (refusal := _open_fault(run, body) or _fault_of_charging(core, run)) is not None:
        core.send(conn, Reply(call.id, refusal))
        return
    _supersede_opening(core, run)
    run.attempt += 1
    run.engine = body.engine
    run.settings = RunSettings(
        body.harvest,
        body.max_engines,
        body.gpus_per_engine,
        body.poison_after,
        body.on_poison,
        body.encrypt,
        body.nodes_per_engine,
        body.max_off_policy_steps,
        body.on_new_version,
        body.keeps_cache,
        body.environment_jobs,
        body.environment_file,
        body.policies,
        body.episodes_of,
        body.serves_only,
        body.isolation,
        EpisodeBudget(body.budget_turns, body.budget_tokens, body.budget_s),
    )
    if run.settings.encrypt:
        run.weights.directory.refuse_clear()
    for worker in run.workers.values():
        if worker.conn is not None:
            worker_commands.may_pull(core, worker)
    run.progress.resumed_after, run.stopped, run.ended = body.resume_step, "", False
    run.trainer = TrainerLink(opening=(conn, call.id, body), seen_at=core.now, job_id=body.job_id)
    # Another trainer: its engines are its own, and it counts its orders anew. Those of the one before ended with it.
    run.reserved.order, run.reserved.unaccounted, run.reserved.set_aside = 0, {}, {}
    run.reserved.memory_changed = run.reserved.awake_stated = True
    for version in run.weights.versions.values():
        # Its bytes died with the trainer that served them; what lies on a disk does not.
        version.sources = _on_disk(version.sources)
    for group in list(run.by_key.values()):
        if group.purpose == "eval" or group.step <= body.resume_step:
            samples.supersede(core, group, f"attempt {run.attempt} starts at step {body.resume_step}")
        else:
            group.orphaned, group.delivered_to = True, 0
    core.record(
        rec.AttemptGranted(
            run.id,
            run.attempt,
            body.host,
            body.job_id,
            body.resume_step,
            body.config,
            msgspec.json.encode(body.engine).decode(),
            core.now,
        )
    )
    # Behind it where the ledger never had the run: it begins at its checkpoint's step.
    if run.progress.last_committed != body.resume_step:
        core.record(rec.StepsRewound(run.id, run.attempt, body.resume_step, core.now))
    run.progress.last_committed = body.resume_step
    deliveries.resumed(run)
    core.read_history(run, body.solved_at, turns.names_wanted(run))


def _fault_of_options(core: Core, body: OpenRun) -> Denied | None:
    """Harvested engines are processes of the daemon's user: what they are given of a run is checked before anything is submitted."""
    nodes, most = body.nodes_per_engine, core.limits.max_nodes_per_engine
    if body.harvest and nodes > most:
        cause = f"run.nodes_per_engine = {nodes}, and this site starts engines of {most} at most (harvest.max_nodes_per_engine)"
        return Denied("invalid", cause, "lower it, ask the admin for more, or set run.harvest = false")
    found = engine_options.fault_of_text(
        body.engine.options, harvested=body.harvest, allowed=core.limits.vllm_options
    )
    return Denied("invalid", *found) if found else None


def _supersede_opening(core: Core, run: ActiveRun) -> None:
    """A trainer that still waits for its opening is told that a newer one came: unanswered, it would ask again and fence that one."""
    if run.trainer.opening is not None:
        conn, call_id, _ = run.trainer.opening
        why = f"another trainer opened run {run.name!r} while this one waited"
        core.send_durable(
            conn,
            Reply(call_id, Denied("stale", why, "end this job; only the newest trainer of a run goes on")),
        )


def _open_fault(run: ActiveRun, body: OpenRun) -> Denied | None:
    if run.seed != body.seed:
        why = f"run {run.name!r} is another one: seed {body.seed}, the ledger has {run.seed}"
        return Denied("invalid", why, "choose another run.name")
    if run.engine.routing != body.engine.routing:
        why = f"run {run.name!r}: {body.engine.routing} bytes a token for its experts, its samples have {run.engine.routing}"
        return Denied("invalid", why, "leave algorithm.router_replay as it was, or choose another run.name")
    if body.resume_step > run.progress.last_committed:
        why = f"run {run.name!r}: a checkpoint of step {body.resume_step}, the ledger ends at {run.progress.last_committed}"
        remedy = "an older ledger was restored, or it is another run: resume from an older checkpoint, or choose another run.name"
        return Denied("ahead", why, remedy, run.progress.last_committed)
    return None


def _attach(core: Core, conn: int, run: ActiveRun, body: Attach) -> ReplyBody:
    if run.trainer.opening is not None:
        return Denied("detached", "the run is being opened", "try again")
    run.trainer.conn = conn
    run.trainer.fleet = None
    run.deliveries.wanted = None  # it says anew what it has
    have, wants = set(body.have), set(body.wants)
    for group in list(run.by_key.values()):
        group.orphaned = group.id not in have and group.id not in wants
        group.delivered_to = run.attempt if group.id in have else 0
        samples.deliver_if_done(core, group)
    if run.stopped:
        core.send_durable(conn, RunStopped(run.stopped, run.stop_remedy))
    return Ok()


# ---------------------------------------------------------------- steps


def _too_large(body: PublishVersion) -> Denied | None:
    """What every engine would be sent must fit into a message."""
    nbytes = sum(
        len(text.encode())
        for source in body.sources
        for text in (source.endpoint, source.server_key, source.local)
    )
    if len(body.manifest) > MAX_MANIFEST_BYTES:
        why = f"a manifest of {len(body.manifest):,} bytes, over {MAX_MANIFEST_BYTES:,}"
        return Denied("invalid", why, "use fewer and larger tensors: every engine is sent their names")
    if len(body.sources) > MAX_SOURCES or nbytes > MAX_SOURCES_BYTES:
        why = f"{len(body.sources):,} sources whose addresses have {nbytes:,} bytes, over {MAX_SOURCES:,} and {MAX_SOURCES_BYTES:,}"
        return Denied(
            "invalid", why, "set trainer.replicas so that fewer ranks serve weights: every engine is sent all"
        )
    return None


def _publish(core: Core, run: ActiveRun, body: PublishVersion) -> ReplyBody:
    if (too_large := _too_large(body)) is not None:
        return too_large
    known, base, merged = (
        run.weights.versions.get(body.version),
        manifests.base_of(body.manifest),
        manifests.merged_of(body.manifest),
    )
    if known is not None and known.root == body.root:
        return _publish_again(known, body, base, merged)
    if body.version < run.weights.next_version:
        return Denied(
            "invalid",
            f"version {body.version} was used before",
            f"the next one is {run.weights.next_version}",
        )
    if base and not any(version.root == base for version in run.weights.versions.values()):
        why = f"version {body.version} is to be merged with weights of root {base.hex()}, and no version of this run has them"
        return Denied("invalid", why, "publish the base first; adapters of another base do not fit this run")
    if (refusal := _fault_of_charging(core, run)) is not None:
        return refusal
    run.weights.versions[body.version] = Version(
        body.version, body.step, body.root, body.manifest, body.sources, base, merged, nbytes=body.nbytes
    )
    run.weights.next_version = body.version + 1
    core.record(
        rec.VersionPublished(
            run.id, body.version, body.step, run.attempt, body.root, body.manifest, body.nbytes, core.now
        )
    )
    run.weights.drop_trainer(VERSIONS_SERVED)
    turns.published(core, run, body.version)
    staleness.retarget(core, run, body.version)
    return Ok()


def _on_disk(sources: tuple[WeightSource, ...]) -> tuple[WeightSource, ...]:
    return tuple(source for source in sources if source.endpoint.startswith("file:"))


def _publish_again(known: Version, body: PublishVersion, base: bytes, merged: bytes) -> ReplyBody:
    """The same bytes from other sources. What engines must make of them was said once and stays: samples were made by that."""
    if known.merged and merged and known.merged != merged:
        theirs, ours = merged.hex()[:16], known.merged.hex()[:16]
        why = f"version {body.version} was published as merged to {ours}, and now, with the same adapters and base, to {theirs}"
        return Denied("invalid", why, f"publish it under another number; {ONE_RELEASE}")
    # Engines would find nothing to compare with in the manifest, and be refused for that.
    if known.merged and not merged:
        body = msgspec.structs.replace(body, manifest=manifests.stating(body.manifest, known.merged))
    # Stated later, it is another claim: the engines that held the version were never asked for it.
    known.proved &= merged in (b"", known.merged)
    known.sources, known.manifest = body.sources, body.manifest  # that of an old version was let go
    known.base, known.merged = base, merged or known.merged
    return Ok()


def _set_reserved(core: Core, run: ActiveRun, body: SetReserved) -> ReplyBody:
    if 0 < body.order < run.reserved.order:
        return Ok()  # said late: a newer word came before
    run.reserved.awake_stated, run.reserved.memory_changed = True, True
    run.reserved.order = body.order
    if run.reserved.awake != body.awake:
        run.reserved.awake_since, run.due.ask = core.now, True
        run.policy.observe(WindowMoved(body.awake), core.now)
    run.reserved.awake = body.awake
    if body.awake:
        run.reserved.trainer_bytes = body.bytes_held
    for worker in list(run.workers.values()):
        if worker.kind != "reserved":
            continue
        if body.awake:
            worker_commands.wake(core, worker)
        elif worker.status in (WorkerStatus.READY, WorkerStatus.LOADING):
            worker_commands.put_to_sleep(core, worker)
    return Ok()


def _end_reserved(core: Core, run: ActiveRun, body: EndReserved) -> ReplyBody:
    """Its trainer owns their processes: they are gone, whatever was heard of them last. One that was not is let in no more."""
    run.reserved.memory_changed = run.due.fleet = True
    for name in body.engines:
        run.reserved.unaccounted.pop(name, None)
        for worker in [
            w for w in run.workers.values() if w.kind == "reserved" and worker_counts.name_of(w) == name
        ]:
            core.connection_event(
                worker,
                "reserved_ended",
                f"worker {worker.id}",
                body.reason,
                engine=name,
                memory=worker.memory.state,
                node=worker.place,
            )
            registration.evict(run, worker.process.session)
            workers.gone(core, worker, body.reason, crashed=False)
    return Ok()


def _close(core: Core, run: ActiveRun, body: CloseRun) -> ReplyBody:
    if run.ended:
        return Ok()
    if body.state not in ENDS:
        return Denied("invalid", "a run does not end so", f"give one of {', '.join(ENDS)}")
    run.ended = True
    turns.end_all(core, run, f"the run {body.state}")
    for group in list(run.by_key.values()):
        for sample in group.samples:
            if sample.status is not SampleStatus.ENDED:
                samples.abandon(core, sample, "surplus", f"the run {body.state}")
        run.retries[group.key] = group.retry + 1
        samples.forget(core, group)
    for worker in list(run.workers.values()):
        worker_commands.drain(core, worker, f"the run {body.state}")
    core.record(rec.RunEnded(run.id, body.state, body.reason, core.now))
    deliveries.closed(core, run, f"the run {body.state}")
    return Ok()

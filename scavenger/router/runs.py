"""What a trainer may ask: open a run, submit groups, publish versions, commit steps. Pure; every call may be repeated.

Holds I3: a new attempt fences the older; what it had not consumed for good is offered again only under an equal root hash, else superseded.
"""

from __future__ import annotations

import msgspec

from scavenger import discretion
from scavenger.ledger import records as rec
from scavenger.router import samples as sm
from scavenger.router import workers as wk
from scavenger.router.events import Identity
from scavenger.router.policy import StepFinished, StepSubmitted, TrainedGroups, WindowMoved
from scavenger.router.state import Core, Group, Run, Sample, SampleStatus, Version, Worker, WorkerStatus
from scavenger.wire import (
    MAX_CALL_SAMPLES,
    MAX_GROUP_SAMPLES,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Accepted,
    Attach,
    Call,
    CallBody,
    CloseRun,
    CommitStep,
    Denied,
    Fleet,
    GroupSpec,
    HelloAgain,
    Ok,
    OpenRun,
    Ping,
    Pong,
    PublishVersion,
    RecordCheckpoint,
    Reply,
    ReplyBody,
    RunStopped,
    SampleOutcome,
    SetReserved,
    SubmitGroups,
    Trained,
    words,
)

OUTCOMES = {"train": ("consumed", "filtered", "masked"), "eval": ("evaluated", "masked")}

ENDS = ("finished", "failed", "stopped")


def called(core: Core, conn: int, identity: Identity, call: Call) -> None:
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
    run.trainer_seen = core.now
    if isinstance(call.body, Attach):
        reply: ReplyBody = _attach(core, conn, run, call.body)
    elif isinstance(call.body, Ping):
        known = call.body.aside or run.conn == conn
        if run.conn == conn and call.body.trained is not None:
            _trained(core, run, call.body.trained)
        core.send(conn, Reply(call.id, Pong(core.generation)) if known else HelloAgain("attach first"))
        return
    elif run.conn != conn:
        core.send(conn, HelloAgain("attach first"))
        return
    else:
        reply = _answer(core, run, call.body)
    core.send_durable(conn, Reply(call.id, reply))


def _may_call(core: Core, conn: int, identity: Identity, call: Call, run: Run | None) -> Denied | None:
    if identity.role != "owner":
        return Denied("not-owner", "a worker's key cannot act as a trainer", "use the owner's key")
    if isinstance(call.body, OpenRun):
        if call.body.protocol != PROTOCOL:
            why = f"protocol {call.body.protocol}: this daemon speaks {PROTOCOL}"
            return Denied("invalid", why, "run trainer and daemon of one release")
        if run is not None and run.owner_key != identity.public_key:
            return Denied("not-owner", f"run {call.run!r} belongs to another key", "choose another run.name")
        return None
    if isinstance(call.body, Attach) and core.foreign(call.body.ledger):
        return Denied(
            "restored", f"the ledger was restored from a backup, in which attempt {call.attempt} of run {call.run!r} does not exist",
            "start the training job again: it goes on from the newest checkpoint that the ledger knows",
        )  # fmt: skip
    if run is None:
        return Denied("unknown-run", f"run {call.run!r} was never opened on this ledger", "open it first")
    if run.owner_key != identity.public_key:
        return Denied("not-owner", f"run {call.run!r} belongs to another key", "use the key that opened it")
    if call.attempt != run.attempt:
        return Denied(
            "stale", f"attempt {call.attempt} of run {call.run!r} was fenced: attempt {run.attempt} is the trainer now",
            "end this job; only the newest trainer of a run goes on",
        )  # fmt: skip
    return None


def _checkpoint(core: Core, run: Run, body: RecordCheckpoint) -> ReplyBody:
    if body.kept is not None and body.step not in body.kept:
        return Denied("invalid", f"the checkpoint of step {body.step} is recorded and not among those kept", "name it in `kept`")
    kept = "" if body.kept is None else msgspec.json.encode(sorted(set(body.kept))).decode()
    core.record(rec.CheckpointRecorded(run.id, body.step, body.version, body.root, body.path, core.now, kept))
    return Ok()


def _answer(core: Core, run: Run, body: CallBody) -> ReplyBody:
    match body:
        case SubmitGroups():
            return _submit(core, run, body)
        case PublishVersion():
            return _publish(core, run, body)
        case CommitStep():
            return _commit(core, run, body)
        case RecordCheckpoint():
            return _checkpoint(core, run, body)
        case SetReserved():
            return _set_reserved(core, run, body)
        case CloseRun():
            return _close(core, run, body)
    return Denied("invalid", f"{type(body).__name__} is not a call")


# ---------------------------------------------------------------- opening


def _open(core: Core, conn: int, identity: Identity, call: Call, body: OpenRun, run: Run | None) -> None:
    if run is not None and run.opening is not None and run.opening[2] == body:
        run.opening = (conn, call.id, body)  # a repeat: its trainer connected again while the ledger is being read
        return
    if run is None:
        run = Run(core.next_run_id, call.run, identity.public_key, body.seed, body.engine, policy=core.new_policy(call.run))
        core.next_run_id += 1
        core.runs[call.run] = run
        core.record(
            rec.RunCreated(
                run.id, run.name, run.owner_key, body.seed, body.config,
                msgspec.json.encode(body.engine).decode(), body.tokenizer, core.now,
            )
        )  # fmt: skip
    elif (refusal := _open_fault(run, body)) is not None:
        core.send(conn, Reply(call.id, refusal))
        return
    _supersede_opening(core, run)
    run.attempt += 1
    run.engine, run.harvest, run.max_engines, run.gpus_per_engine = body.engine, body.harvest, body.max_engines, body.gpus_per_engine
    run.poison_after, run.on_poison = body.poison_after, body.on_poison
    run.conn, run.opening, run.resume_step = None, (conn, call.id, body), body.resume_step
    run.stopped, run.ended, run.trainer_seen, run.fleet = "", False, core.now, None
    for version in run.versions.values():
        # Its bytes died with the trainer that served them; what lies on a disk does not.
        version.sources = tuple(source for source in version.sources if source.endpoint.startswith("file:"))
    for group in list(run.by_key.values()):
        if group.purpose == "eval" or group.step <= body.resume_step:
            sm.supersede(core, group, f"attempt {run.attempt} starts at step {body.resume_step}")
        else:
            group.orphaned, group.delivered_to = True, 0
    core.record(
        rec.AttemptGranted(
            run.id, run.attempt, body.host, body.job_id, body.resume_step, body.config, msgspec.json.encode(body.engine).decode(), core.now
        )
    )
    if run.last_step != body.resume_step:  # behind it where the ledger never had the run: it begins at its checkpoint's step
        core.record(rec.StepsRewound(run.id, run.attempt, body.resume_step, core.now))
    run.last_step = body.resume_step
    core.read_history(run)


def _supersede_opening(core: Core, run: Run) -> None:
    """A trainer that still waits for its opening is told that a newer one came: unanswered, it would ask again and fence that one."""
    if run.opening is not None:
        conn, call_id, _ = run.opening
        why = f"another trainer opened run {run.name!r} while this one waited"
        core.send_durable(conn, Reply(call_id, Denied("stale", why, "end this job; only the newest trainer of a run goes on")))


def _open_fault(run: Run, body: OpenRun) -> Denied | None:
    if run.seed != body.seed:
        why = f"run {run.name!r} is another one: seed {body.seed}, the ledger has {run.seed}"
        return Denied("invalid", why, "choose another run.name")
    if body.resume_step > run.last_step:
        why = f"run {run.name!r}: a checkpoint of step {body.resume_step}, the ledger ends at {run.last_step}"
        remedy = "an older ledger was restored, or it is another run: resume from an older checkpoint, or choose another run.name"
        return Denied("ahead", why, remedy, run.last_step)
    return None


def _attach(core: Core, conn: int, run: Run, body: Attach) -> ReplyBody:
    if run.opening is not None:
        return Denied("detached", "the run is being opened", "try again")
    run.conn = conn
    run.fleet = None
    have, wants = set(body.have), set(body.wants)
    for group in list(run.by_key.values()):
        group.orphaned = group.id not in have and group.id not in wants
        group.delivered_to = run.attempt if group.id in have else 0
        sm.deliver_if_done(core, group)
    if run.stopped:
        core.send_durable(conn, RunStopped(run.stopped, run.stop_remedy))
    return Ok()


# ---------------------------------------------------------------- steps


def _publish(core: Core, run: Run, body: PublishVersion) -> ReplyBody:
    known = run.versions.get(body.version)
    if known is not None and known.root == body.root:
        known.sources, known.manifest = body.sources, body.manifest  # the manifest of an old version was let go
        return Ok()
    if body.version < run.next_version:
        return Denied("invalid", f"version {body.version} was used before", f"the next one is {run.next_version}")
    run.versions[body.version] = Version(body.version, body.step, body.root, body.manifest, body.sources)
    run.next_version = body.version + 1
    core.record(
        rec.VersionPublished(run.id, body.version, body.step, run.attempt, body.root, body.manifest, body.nbytes, core.now)
    )  # fmt: skip
    return Ok()


def _spec_fault(run: Run, spec: GroupSpec) -> str:
    length = len(spec.prompt) // 4
    if len(spec.prompt) % 4 or not length:
        return f"prompt {spec.prompt_index} has no tokens"
    if length + spec.sampling.max_tokens > run.engine.context_length:
        return (
            f"prompt {spec.prompt_index} has {length} tokens and may grow by {spec.sampling.max_tokens}, "
            f"over the engine's context of {run.engine.context_length}"
        )
    whole = length * 4 + len(spec.meta) * 4 + spec.n * (12 * spec.sampling.max_tokens + 256)
    if whole > MAX_MESSAGE_BYTES:
        return f"prompt {spec.prompt_index}: its {spec.n} answers may make a message of {whole:,} bytes, over {MAX_MESSAGE_BYTES:,}"
    if spec.n < 1 or spec.sampling.max_tokens < 1:
        return f"prompt {spec.prompt_index} asks for {spec.n} samples of {spec.sampling.max_tokens} tokens"
    return ""


def _size_fault(body: SubmitGroups) -> Denied | None:
    """A short message may ask for many samples, which are made in one go: others would wait for that."""
    large = next((spec for spec in body.groups if spec.n > MAX_GROUP_SAMPLES), None)
    if large is not None:
        why = f"prompt {large.prompt_index} asks for {large.n:,} samples, over the {MAX_GROUP_SAMPLES:,} of one group"
        return Denied("invalid", why, "lower data.samples_per_prompt, or give the prompt to several groups")
    total = sum(spec.n for spec in body.groups)
    if total > MAX_CALL_SAMPLES:
        why = f"{total:,} samples in one SubmitGroups, over the {MAX_CALL_SAMPLES:,} of one call"
        return Denied("invalid", why, "submit the step's groups in several calls, as scavenger.client does")
    return None


def _submit(core: Core, run: Run, body: SubmitGroups) -> ReplyBody:
    if body.version not in run.versions:
        return Denied("invalid", f"version {body.version} was not published", "publish it first")
    if body.purpose not in OUTCOMES:
        return Denied("invalid", f"purpose {body.purpose!r}", 'use "train" or "eval"')
    if run.ended or (body.purpose == "train" and body.step <= run.last_step):
        why = "the run has ended" if run.ended else f"step {body.step} is not after the last committed one, {run.last_step}"
        return Denied("invalid", why, "open the run again to go on from a checkpoint")
    indices = [spec.prompt_index for spec in body.groups]
    if len(indices) != len(set(indices)):
        return Denied("invalid", f"step {body.step} names a prompt twice", "give each prompt its own prompt_index")
    too_many = _size_fault(body)
    if too_many is not None:
        return too_many
    for spec in body.groups:
        fault = _spec_fault(run, spec)
        if fault:
            return Denied("invalid", fault, "lower sampling.max_tokens, raise model.context_length, or drop the prompt from the data")
    groups = [_group_for(core, run, body, spec) for spec in body.groups]
    run.step_samples = sum(len(g.samples) for g in run.by_key.values() if (g.purpose, g.step) == (body.purpose, body.step))
    run.newest, run.submitted_at, run.fresh = (body.purpose, body.step), core.now, True
    cap = max((spec.sampling.max_tokens for spec in body.groups), default=0)
    run.policy.observe(StepSubmitted(body.step, body.purpose, run.step_samples, len(groups), cap), core.now)
    for group in groups:
        sm.deliver_if_done(core, group)
    return Accepted(tuple(g.id for g in groups))


def _group_for(core: Core, run: Run, body: SubmitGroups, spec: GroupSpec) -> Group:
    """The group of this prompt: an equal one that exists goes on (I3), anything else is superseded and made anew."""
    root = run.versions[body.version].root
    old = run.by_key.get((body.purpose, body.step, spec.prompt_index))
    if old is not None:
        same = (old.root, old.prompt, old.sampling, len(old.samples)) == (root, spec.prompt, spec.sampling, spec.n)
        poisoned = run.on_poison == "stop" and any(s.error is not None for s in old.samples)
        if same and not poisoned:
            _adopt(core, run, old, body.version)
            return old
        why = "generated by other weights" if old.root != root else "the prompt or its sampling changed"
        sm.supersede(core, old, f"attempt {run.attempt}: {'a sample is poisoned' if same else why}")
    return _make_group(core, run, body, spec, root)


def _adopt(core: Core, run: Run, group: Group, version: int) -> None:
    if not group.orphaned and group.version == version:
        return
    queued = [s for s in group.samples if s.id in run.queue]
    for sample in queued:
        run.queue.discard(sample)
    group.orphaned, group.version, group.delivered_to = False, version, 0
    for sample in queued:
        run.queue.add(sample)
    core.record(rec.GroupAdopted(group.id, version, core.now))
    for sample in group.samples:
        if sample.status is SampleStatus.ENDED and sample.error is None:
            sample.step("reopen")
            core.record(rec.SampleReopened(sample.id, run.attempt, core.now))


def _make_group(core: Core, run: Run, body: SubmitGroups, spec: GroupSpec, root: bytes) -> Group:
    take = run.takes.get((body.purpose, body.step, spec.prompt_index), 0)
    group = Group(
        core.next_group_id, run, body.purpose, body.step, spec.prompt_index, take, body.version, root, spec.prompt, spec.meta, spec.sampling
    )
    core.next_group_id += 1
    first = core.next_sample_id
    core.next_sample_id += spec.n
    for index in range(spec.n):
        sample = Sample(first + index, group, index)
        group.add(sample)
        core.samples[sample.id] = sample
        run.queue.add(sample)
    core.groups[group.id] = run.by_key[group.key] = group
    core.record(
        rec.GroupCreated(
            group.id, run.id, body.purpose, body.step, spec.prompt_index, take, body.version, spec.prompt, spec.n, first,
            msgspec.json.encode(spec.sampling).decode(), spec.meta, core.now,
        )
    )  # fmt: skip
    return group


def _commit(core: Core, run: Run, body: CommitStep) -> ReplyBody:
    groups = [g for g in run.by_key.values() if g.purpose == body.purpose and g.step == body.step and not g.orphaned]
    if not groups:
        known = body.step <= run.last_step if body.purpose == "train" else all(o.sample_id < core.next_sample_id for o in body.outcomes)
        return Ok() if known else Denied("invalid", f"step {body.step} was never submitted", "submit its groups first")
    fault = _commit_fault(body, groups)
    if fault:
        return Denied("invalid", fault, "commit each sample of the step exactly once")
    outcomes = {o.sample_id: o for o in body.outcomes}
    for group in groups:
        for sample in group.samples:
            if sample.status is SampleStatus.COMPLETE:
                _end(core, run, body, sample, outcomes[sample.id])
        sm.forget(core, group)
    core.record(
        rec.StepCommitted(
            run.id, body.step, body.purpose, run.attempt, body.version,
            msgspec.json.encode(discretion.metrics(body.metrics)).decode(), core.now,
        )
    )  # fmt: skip
    run.policy.observe(StepFinished(body.step, body.purpose, body.metrics), core.now)
    if body.purpose == "train":
        run.last_step = body.step
        for group in [g for g in run.by_key.values() if g.orphaned and g.purpose == "train" and g.step <= body.step]:
            sm.supersede(core, group, f"attempt {run.attempt} took step {body.step} without it")
        _retire_versions(run)
    return Ok()


def _commit_fault(body: CommitStep, groups: list[Group]) -> str:
    expected = {s.id: s for g in groups for s in g.samples}
    got = {o.sample_id for o in body.outcomes}
    if len(got) != len(body.outcomes):
        return f"step {body.step} names a sample twice"
    allowed = OUTCOMES.get(body.purpose, ())
    for outcome in body.outcomes:
        sample = expected.get(outcome.sample_id)
        if sample is None:
            return f"sample {outcome.sample_id} does not belong to step {body.step}"
        if not sample.done or outcome.outcome not in allowed:
            return f"sample {outcome.sample_id} is {sample.status} and cannot be {outcome.outcome!r}"
    missing = [i for i, s in expected.items() if i not in got and s.error is None]
    return f"{len(missing)} samples of step {body.step} have no outcome, first: {missing[0]}" if missing else ""


def _end(core: Core, run: Run, body: CommitStep, sample: Sample, outcome: SampleOutcome) -> None:
    sample.step("end")
    core.record(
        rec.SampleEnded(
            sample.id, outcome.outcome, discretion.reason(outcome.outcome, outcome.reason), body.step, run.attempt,
            outcome.reward, outcome.advantage, core.now, discretion.version(outcome.reward_version),
        )
    )  # fmt: skip


def _retire_versions(run: Run, keep: int = 4) -> None:
    """Forget manifests that nobody can ask for again; roots of a replay come back with the history."""
    used = {g.version for g in run.by_key.values()}
    for version in sorted(run.versions)[:-keep]:
        if version not in used:
            run.versions[version].manifest = b""
            run.versions[version].sources = ()
            run.directory.forget(version)


def _trained(core: Core, run: Run, body: Trained) -> None:
    """How far the trainer is; pings repeat it."""
    if run.newest == ("train", body.step) and body != run.trained:
        run.trained = body
        run.policy.observe(TrainedGroups(body.step, body.groups, body.tokens, body.seconds), core.now)


def _set_reserved(core: Core, run: Run, body: SetReserved) -> ReplyBody:
    if run.reserved_awake != body.awake:
        run.window_since, run.fresh = core.now, True
        run.policy.observe(WindowMoved(body.awake), core.now)
    run.reserved_awake = body.awake
    for worker in list(run.workers.values()):
        if worker.kind != "reserved":
            continue
        if body.awake:
            wk.wake(core, worker)
        elif worker.status in (WorkerStatus.READY, WorkerStatus.LOADING):
            wk.put_to_sleep(core, worker)
    return Ok()


def _close(core: Core, run: Run, body: CloseRun) -> ReplyBody:
    if run.ended:
        return Ok()
    if body.state not in ENDS:
        return Denied("invalid", "a run does not end so", f"give one of {', '.join(ENDS)}")
    run.ended = True
    for group in list(run.by_key.values()):
        for sample in group.samples:
            if sample.status is not SampleStatus.ENDED:
                sm.abandon(core, sample, "surplus", f"the run {body.state}")
        run.takes[group.key] = group.take + 1
        sm.forget(core, group)
    for worker in list(run.workers.values()):
        wk.drain(core, worker, f"the run {body.state}")
    core.record(rec.RunEnded(run.id, body.state, body.reason, core.now))
    return Ok()


def fleet_sizes(run: Run) -> tuple[int, int, int]:
    """Harvested workers that can generate, reserved ones awake, reserved ones asleep or going to sleep.

    A harvested worker that still loads does not count: under churn, engines that are taken again before they generate would keep
    reserved ones asleep for nothing.
    """
    sizes = [0, 0, 0]
    for worker in run.workers.values():
        role = _role(worker)
        if role >= 0:
            sizes[role] += 1
    return sizes[0], sizes[1], sizes[2]


def counted(run: Run) -> tuple[int, int, int]:
    """The sizes, counted anew."""
    run.restated.clear()
    for worker in run.workers.values():
        worker.role = _role(worker)
    return fleet_sizes(run)


def counted_again(run: Run) -> tuple[int, int, int]:
    """The sizes as counted last, with those workers counted again that are another since: a fleet loads one by one."""
    sizes = list(run.sizes)
    for worker in run.restated:
        before, worker.role = worker.role, _role(worker)
        if before >= 0:
            sizes[before] -= 1
        if worker.role >= 0:
            sizes[worker.role] += 1
    run.restated.clear()
    return sizes[0], sizes[1], sizes[2]


def _role(worker: Worker) -> int:
    status = worker.status
    if worker.conn is None or worker.suspect or status is WorkerStatus.DRAINING:
        return -1
    if worker.kind == "harvested":
        return 0 if status is WorkerStatus.READY else -1
    return 1 if status is WorkerStatus.READY or status is WorkerStatus.LOADING else 2


def fleet_of(run: Run) -> Fleet:
    """The run's workers as its trainer sees them."""
    open_samples = sum([g.unfinished for g in run.by_key.values() if not g.orphaned])
    held = sum([len(w.leases) for w in run.workers.values() if w.kind == "reserved" and _role(w) >= 0])
    sizes = fleet_sizes(run) if run.restated else run.sizes
    return Fleet(*sizes, open_samples, held, run.window, words(run.window_reason))

"""From the ledger's rows back to the core's tables: after the daemon's restart, and for a trainer that resumes. Pure.

Restores what a restart may not forget (I2, I3, I10). A group from the ledger may be left over from an older attempt. So it is *orphaned*
until the present attempt claims it, by attaching with its id or by submitting it again.

Boundary: from ledger rows to tables; no event passes here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scavenger.ledger import records as rec
from scavenger.policy.agreement import SpanWindow
from scavenger.protocol.messages import EngineSpec, Reply, RunOpened, Sampling, environment_file
from scavenger.router.core import agreement, deliveries, samples, siblings, staleness, turns
from scavenger.router.core.events import HistoryRead
from scavenger.router.core.state import (
    ActiveRun,
    Agreement,
    EpisodeBudget,
    Group,
    RunSettings,
    Sample,
    Turn,
    Version,
    Worker,
    WorkerProcess,
)
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import SampleStep, WorkerStep
from scavenger.weights import manifest as manifests
from scavenger.weights.directory import WeightDirectory


def restore(core: Core, snapshot: rec.Snapshot) -> None:
    """Rebuild everything that a restarted daemon needs; open leases stay with their holders, who have not come back yet."""
    core.next_run_id, core.next_group_id = snapshot.next_run_id, snapshot.next_group_id
    core.next_sample_id, core.next_worker_id = snapshot.next_sample_id, snapshot.next_worker_id
    core.next_episode_id, core.next_tool_call_id = snapshot.next_episode_id, snapshot.next_tool_call_id
    by_id: dict[int, ActiveRun] = {}
    for state in snapshot.runs:
        run = _restore_run(core, state)
        core.runs[run.name] = by_id[run.id] = run
    for worker_state in snapshot.workers:
        if worker_state.joined.run_id in by_id:
            _restore_worker(core, by_id[worker_state.joined.run_id], worker_state.joined)
    turns_of = turns.restore_episodes(core, by_id, snapshot)
    deliveries.restore(core, by_id, snapshot)
    ends = {ended.sample_id: ended.sha256 for ended in snapshot.turn_samples}
    tokens = dict(snapshot.turn_tokens)
    for state_of_group in _newest_retries(snapshot.groups):
        if state_of_group.created.purpose == turns.PURPOSE:
            if (turn := turns_of.get(state_of_group.created.group_id)) is not None:
                group = adopt_state(core, by_id[state_of_group.created.run_id], state_of_group, turn)
                turns.restore(core, turn, group, ends, tokens)
            continue
        owner = by_id.get(state_of_group.created.run_id)
        if owner is None or not _unsettled(owner, state_of_group):
            continue
        group = adopt_state(core, owner, state_of_group)
        for row, sample in zip(state_of_group.samples, group.samples, strict=True):
            # One that an older attempt left is generated anew: it holds up no other.
            if (
                row.state == "poisoned"
                and row.ended_attempt == owner.attempt
                and owner.settings.on_poison == "stop"
                and not owner.stopped
            ):
                samples.stop_run(sample, row.reason)
    for run_id, purpose, step, prompt_index, retry in snapshot.retries:
        if run_id in by_id:
            by_id[run_id].retries[purpose, step, prompt_index] = retry + 1
    for run in by_id.values():
        run.progress.newest, run.progress.samples = _newest_step(snapshot.groups, run.id)
        if run.settings.max_off_policy_steps:
            run.progress.newest = staleness.under_way(run)
            run.progress.samples = sum(
                len(g.samples) for g in run.by_key.values() if (g.purpose, g.step) == run.progress.newest
            )
        run.progress.submitted_at = run.reserved.awake_since = core.now


def _unsettled(run: ActiveRun, state: rec.OpenGroup) -> bool:
    """Whether a trainer may still ask for the group: it is in flight, or no step that stands has taken it.

    `last_step` was set back when the present attempt began, so a later train step was taken by an older attempt: the present one is
    to be offered what that consumed.
    """
    if any(s.state in ("open", "complete") for s in state.samples):
        return True
    return (
        state.created.step > run.progress.last_committed
        if state.created.purpose == "train"
        else any(s.state == "poisoned" for s in state.samples)
    )


def _newest_step(groups: tuple[rec.OpenGroup, ...], run_id: int) -> tuple[tuple[str, int], int]:
    """The run's newest step and its samples: what its fleet is sized for, or its engines would be given back until the next one."""
    mine = [
        g
        for g in _newest_retries(groups)
        if g.created.run_id == run_id and g.created.purpose != turns.PURPOSE
    ]
    newest = max(mine, key=lambda g: g.created.group_id, default=None)
    if newest is None:
        return ("train", 0), 0
    step = (newest.created.purpose, newest.created.step)
    return step, sum(len(g.samples) for g in mine if (g.created.purpose, g.created.step) == step)


def _newest_retries(groups: tuple[rec.OpenGroup, ...]) -> list[rec.OpenGroup]:
    """One group for each prompt of a step: the newest."""
    newest: dict[tuple[int, str, int, int], rec.OpenGroup] = {}
    for state in sorted(groups, key=lambda g: g.created.group_id):
        made = state.created
        newest[(made.run_id, made.purpose, made.step, made.prompt_index)] = state
    return sorted(newest.values(), key=lambda g: g.created.group_id)


def history_read(core: Core, event: HistoryRead) -> None:
    """What the ledger has is back: keep groups for adoption, deliver again what later steps took, and answer the OpenRun that waits."""
    run = next((r for r in core.runs.values() if r.id == event.run_id), None)
    if run is None or run.attempt != event.attempt or run.trainer.opening is None:
        return
    turns.names_read(run, event.ended_episodes)
    deliveries.taken_back(core, run, event.deliveries)
    for state in _newest_retries(event.groups):
        known = run.by_key.get((state.created.purpose, state.created.step, state.created.prompt_index))
        if (
            known is None
            and state.created.purpose == "train"
            and state.created.step > run.progress.resumed_after
        ):
            adopt_state(core, run, state)
    run.trainer.conn, call_id, _ = run.trainer.opening
    run.trainer.opening = None
    versions = tuple(
        (v.step, v.version, v.root) for v in sorted(run.weights.versions.values(), key=lambda v: v.version)
    )
    core.send_durable(
        run.trainer.conn,
        Reply(
            call_id,
            RunOpened(
                run.id,
                run.attempt,
                core.generation,
                run.weights.next_version,
                run.progress.last_committed,
                versions,
                core.ledger,
                event.pass_rates,
            ),
        ),
    )


def adopt_state(core: Core, run: ActiveRun, state: rec.OpenGroup, turn: Turn | None = None) -> Group:
    """Rebuild a group from the ledger: of a step orphaned, of an episode as its `turn`. Open leases become *unconfirmed* under their
    old epoch.
    """
    made = state.created
    root = run.weights.versions[state.version].root if state.version in run.weights.versions else b""
    sampling = msgspec.json.decode(made.sampling.encode(), type=Sampling)
    group = Group(
        made.group_id,
        run,
        made.purpose,
        made.step,
        made.prompt_index,
        made.retry,
        state.version,
        root,
        made.prompt,
        made.meta,
        sampling,
        orphaned=turn is None,
        turn=turn,
    )
    for row in state.samples:
        sample = Sample(
            row.sample_id,
            group,
            row.index,
            epoch=row.epoch,
            finish=row.finish,
            moves=row.moves,
            reward=row.reward,
            reward_version=row.reward_version,
            accepted=row.length,
            durable=row.length,
            reported=row.length,
            spans=list(row.spans),
            versions=row.versions if run.settings.max_off_policy_steps else (),
        )
        core.samples[sample.id] = sample
        group.add(sample)
        _restore_status(core, run, sample, row)
    core.groups[group.id] = group
    if turn is None:
        run.by_key[group.key] = group
    return group


def _restore_status(core: Core, run: ActiveRun, sample: Sample, row: rec.SampleState) -> None:
    if row.state == "complete":
        sample.transition(SampleStep.RESTORE_COMPLETE)
    elif row.state != "open":
        sample.error = (row.reason or "poisoned") if row.state == "poisoned" else None
        sample.transition(SampleStep.RESTORE_ENDED)
    elif row.lease is not None and row.lease[1] in run.workers:
        epoch, worker_id, version = row.lease
        sample.transition(SampleStep.RESTORE_LEASED)
        sample.epoch, sample.lease_version = epoch, version
        sample.worker_id = sample.last_worker_id = worker_id
        sample.lease_offset, sample.leased_at, sample.chunk_at, sample.assigned_at = (
            sample.accepted,
            core.now,
            core.now,
            core.now,
        )
        run.workers[worker_id].leases[sample.id] = sample
        siblings.lease_restored(sample)
        run.count_lease(sample.group, version, 1)
    else:
        if row.lease is not None:  # its holder left while the daemon was down
            core.record(
                rec.LeaseEnded(
                    sample.id, sample.epoch, "holder unknown after a restart", sample.accepted, 0, core.now
                )
            )
        sample.transition(SampleStep.QUEUE)
        sample.queue.add(sample)


def _restore_run(core: Core, state: rec.RunState) -> ActiveRun:
    made = state.created
    engine = msgspec.json.decode(state.engine.encode(), type=EngineSpec)
    policy, directory = core.new_policy(made.name), WeightDirectory(core.switches)
    run = ActiveRun(made.run_id, made.name, made.owner_key, made.seed, engine, policy=policy)
    run.weights.directory = directory
    run.agreement = Agreement(SpanWindow(core.limits.agreement))
    config = msgspec.json.decode(state.config.encode())
    section = config.get("run", {})
    run.reserved.awake_stated = False  # its trainer may be at work on the GPUs where they sleep
    run.settings = RunSettings(
        bool(section.get("harvest", True)),
        int(section.get("max_engines", 0)),
        int(section.get("gpus_per_engine", 1)),
        int(section.get("poison_after", 3)),
        str(section.get("on_poison", "stop")),
        bool(config.get("weights", {}).get("encrypt", False)),
        int(section.get("nodes_per_engine", 1)),
        int(config.get("algorithm", {}).get("max_off_policy_steps", 0)),
        str(config.get("algorithm", {}).get("on_new_version", "switch")),
        config.get("algorithm", {}).get("kv") == "keep",
        int(config.get("data", {}).get("environment_jobs", 0)),
        environment_file(str(section.get("out_dir", ""))),
        policies_of(config),
        str(config.get("data", {}).get("episodes_of") or ""),
        section.get("steps") == 0,
        str(section.get("isolation", "memory")),
        budget_of(config),
    )
    run.attempt, run.progress.resumed_after, run.progress.last_committed = (
        state.attempt,
        state.resume_step,
        state.last_step,
    )
    run.trainer.seen_at, run.ended, run.trainer.job_id = core.now, state.ended, state.job_id
    run.turns.ended_known = not state.ended  # the snapshot has no episodes of it
    for v in state.versions:
        base, merged = manifests.base_of(v.manifest), manifests.merged_of(v.manifest)
        run.weights.versions[v.version] = Version(
            v.version, v.step, v.root, v.manifest, base=base, merged=merged
        )
    run.weights.next_version = max(run.weights.versions, default=0) + 1
    return run


def budget_of(config: dict[str, Any]) -> EpisodeBudget:
    """Of each of its episodes, of a run.toml as the ledger has it."""
    data = config.get("data", {})
    return EpisodeBudget(
        int(data.get("budget_turns", 0)), int(data.get("budget_tokens", 0)), float(data.get("budget_s", 0.0))
    )


def policies_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The other runs that answer for agents, of a run.toml as the ledger has it."""
    named = {str(one.get("run", "")) for one in config.get("data", {}).get("policies", {}).values()}
    return tuple(sorted(named - {"", str(config.get("run", {}).get("name", ""))}))


def _restore_worker(core: Core, run: ActiveRun, joined: rec.WorkerJoined) -> None:
    process = WorkerProcess(
        joined.intent_id, joined.session, joined.incarnation, joined.job_id, joined.cluster
    )
    worker = Worker(
        joined.worker_id,
        run,
        joined.kind,
        joined.node,
        joined.gpus,
        process,
        None,
        core.now,
        joined.slot,
        joined_at=core.now,
        idle_since=core.now,
    )
    worker.engine.speculated = None
    worker.transition(WorkerStep.RESTORE)
    core.workers[worker.id] = run.workers[worker.id] = worker
    agreement.joined(worker)

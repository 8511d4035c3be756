"""A step of a run: groups submitted, adopted by a later attempt, committed with their samples' ends. Pure.

Holds I3: a step's groups are made once, a replay gets those that exist, and each sample is consumed by one commit.

Boundary: a step's calls, of a trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from scavenger.ledger import data_decisions, redaction
from scavenger.ledger import records as rec
from scavenger.policy.interface import StepFinished, StepSubmitted, TrainedGroups
from scavenger.protocol.messages import (
    MAX_CALL_SAMPLES,
    MAX_DIFFERENCES_BYTES,
    MAX_GROUP_SAMPLES,
    MAX_MESSAGE_BYTES,
    MAX_SPANS,
    Accepted,
    CommitStep,
    DeferLate,
    Deferred,
    Denied,
    GroupSpec,
    Ok,
    ReplyBody,
    SampleOutcome,
    SubmitGroups,
    Trained,
)
from scavenger.router.core import decision_log, deliveries, samples, staleness, turns
from scavenger.router.core.state import ActiveRun, Group, Sample
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import SampleStatus, SampleStep

#: Of a run, submitted and not committed: each is a row and lies in memory.
MAX_OPEN_GROUPS = 200_000
#: Characters of an answer's reason.
MAX_REASON = 400
OUTCOMES = {"train": ("consumed", "filtered", "masked"), "eval": ("evaluated", "masked")}


def _seconds_are_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """A trainer's figures without those that cannot be: what is no number, and times below zero."""
    return {
        name: value
        for name, value in metrics.items()
        if math.isfinite(value) and (value >= 0 or not name.startswith("seconds"))
    }


def _spec_fault(run: ActiveRun, spec: GroupSpec) -> str:
    length = len(spec.prompt) // 4
    if len(spec.prompt) % 4 or not length:
        return f"prompt {spec.prompt_index} has no tokens"
    if length + spec.sampling.max_tokens > run.engine.context_length:
        return (
            f"prompt {spec.prompt_index} has {length} tokens and may grow by {spec.sampling.max_tokens}, "
            f"over the engine's context of {run.engine.context_length}"
        )
    whole = (
        length * 4
        + len(spec.meta) * 4
        + spec.n * (12 * spec.sampling.max_tokens + 256 + 16 * MAX_SPANS + 4 * samples.ERROR_CHARS)
    )
    if whole > MAX_MESSAGE_BYTES:
        return f"prompt {spec.prompt_index}: its {spec.n} completions may make a message of {whole:,} bytes, over {MAX_MESSAGE_BYTES:,}"
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


def submit(core: Core, run: ActiveRun, body: SubmitGroups) -> ReplyBody:
    if body.version not in run.weights.versions:
        return Denied("invalid", f"version {body.version} was not published", "publish it first")
    if body.purpose not in OUTCOMES:
        return Denied("invalid", f"purpose {body.purpose!r}", 'use "train" or "eval"')
    if run.ended or (body.purpose == "train" and body.step <= run.progress.last_committed):
        why = (
            "the run has ended"
            if run.ended
            else f"step {body.step} is not after the last committed one, {run.progress.last_committed}"
        )
        return Denied("invalid", why, "open the run again to go on from a checkpoint")
    indices = [spec.prompt_index for spec in body.groups]
    if len(indices) != len(set(indices)):
        return Denied(
            "invalid", f"step {body.step} names a prompt twice", "give each prompt its own prompt_index"
        )
    too_many = _size_fault(body)
    if too_many is not None:
        return too_many
    if (
        sum((body.purpose, body.step, index) not in run.by_key for index in indices) + len(run.by_key)
        > MAX_OPEN_GROUPS
    ):
        return Denied(
            "invalid", f"over {MAX_OPEN_GROUPS:,} groups are open", "commit steps, or submit fewer in advance"
        )
    for spec in body.groups:
        fault = _spec_fault(run, spec)
        if fault:
            return Denied(
                "invalid",
                fault,
                "lower sampling.max_tokens, raise model.context_length, or drop the prompt from the data",
            )
    groups = [_group_for(core, run, body, spec) for spec in body.groups]
    if staleness.begins(run, body.purpose, body.step):
        cap = max((spec.sampling.max_tokens for spec in body.groups), default=0)
        _begin(core, run, body.purpose, body.step, len(groups), cap)
    for group in groups:
        samples.deliver_if_done(core, group)
    return Accepted(tuple(g.id for g in groups))


def _begin(core: Core, run: ActiveRun, purpose: str, step: int, groups: int, cap: int) -> None:
    """The trainer works at this from now on: what engines do first, and what the policy forecasts."""
    run.progress.samples = sum(
        len(g.samples) for g in run.by_key.values() if (g.purpose, g.step) == (purpose, step)
    )
    run.progress.newest, run.progress.submitted_at, run.due.ask = (purpose, step), core.now, True
    finished = 0
    if run.settings.max_off_policy_steps:
        finished = sum(
            len(g.samples) - g.unfinished
            for g in run.by_key.values()
            if (g.purpose, g.step) == (purpose, step)
        )
    run.progress.finished_before = finished
    run.policy.observe(StepSubmitted(step, purpose, run.progress.samples, groups, cap, finished), core.now)


def _begin_next(core: Core, run: ActiveRun) -> None:
    """Something was committed: a step that was submitted in advance begins."""
    purpose, step = staleness.under_way(run)
    groups = [g for g in run.by_key.values() if (g.purpose, g.step) == (purpose, step) and not g.orphaned]
    if groups and (purpose, step) != run.progress.newest:
        _begin(core, run, purpose, step, len(groups), max(g.sampling.max_tokens for g in groups))
        run.due.fleet = True  # its samples wait in the queue, where they were not looked at


def _group_for(core: Core, run: ActiveRun, body: SubmitGroups, spec: GroupSpec) -> Group:
    """The group of this prompt: an equal one that exists goes on (I3), anything else is superseded and made anew."""
    root = run.weights.versions[body.version].root
    old = run.by_key.get((body.purpose, body.step, spec.prompt_index))
    if old is not None:
        asked = (old.prompt, old.sampling, len(old.samples)) == (spec.prompt, spec.sampling, spec.n)
        taken_back = staleness.adoption_fault(old) if staleness.is_bounded(old) else ""
        same = asked and (not taken_back if staleness.is_bounded(old) else old.root == root)
        poisoned = run.settings.on_poison == "stop" and any(s.error is not None for s in old.samples)
        if same and not poisoned:
            _adopt(core, run, old, body.version)
            return old
        why = taken_back or (
            "the prompt or its sampling changed" if not asked else "generated by other weights"
        )
        samples.supersede(core, old, f"attempt {run.attempt}: {'a sample is poisoned' if same else why}")
    return _make_group(core, run, body, spec, root)


def _adopt(core: Core, run: ActiveRun, group: Group, version: int) -> None:
    if not group.orphaned and (group.version == version or staleness.is_bounded(group)):
        return  # asked for again; with bounded staleness it may have a newer version by now
    if staleness.is_bounded(group):
        staleness.adopt(core, run, group, version)
    queued = [s for s in group.samples if s.id in run.queue]
    for sample in queued:
        run.queue.discard(sample)
    group.orphaned, group.version, group.delivered_to = False, version, 0
    for sample in queued:
        run.queue.add(sample)
    core.record(rec.GroupAdopted(group.id, version, core.now))
    for sample in group.samples:
        if sample.status is SampleStatus.ENDED and sample.error is None:
            sample.transition(SampleStep.REOPEN)
            core.record(rec.SampleReopened(sample.id, run.attempt, core.now))


def _make_group(core: Core, run: ActiveRun, body: SubmitGroups, spec: GroupSpec, root: bytes) -> Group:
    retry = run.retries.get((body.purpose, body.step, spec.prompt_index), 0)
    group = Group(
        core.next_group_id,
        run,
        body.purpose,
        body.step,
        spec.prompt_index,
        retry,
        body.version,
        root,
        spec.prompt,
        spec.meta,
        spec.sampling,
    )
    core.next_group_id += 1
    first = core.next_sample_id
    core.next_sample_id += spec.n
    for index in range(spec.n):
        sample = Sample(first + index, group, index)
        group.add(sample)
        sample.transition(SampleStep.QUEUE)
        core.samples[sample.id] = sample
        run.queue.add(sample)
    core.groups[group.id] = run.by_key[group.key] = group
    core.record(
        rec.GroupCreated(
            group.id,
            run.id,
            body.purpose,
            body.step,
            spec.prompt_index,
            retry,
            body.version,
            spec.prompt,
            spec.n,
            first,
            msgspec.json.encode(spec.sampling).decode(),
            spec.meta,
            core.now,
        )
    )
    return group


def defer(core: Core, run: ActiveRun, body: DeferLate) -> ReplyBody:
    """The trainer waits for nothing but these groups: have the next step train them, where that is within k."""
    step = body.step
    if run.progress.newest != ("train", step):
        return Denied("invalid", f"step {step} is not under way", "ask while its samples are waited for")
    named = [group for id_ in body.groups if (group := core.groups.get(id_)) is not None and group.run is run]
    gone = [group.id for group in named if group.step == step + 1]  # asked before: the answer was lost
    late = [group for group in named if group.step == step and not group.done]
    if any(group.step == step and group.done for group in named):
        return Deferred(tuple(gone), "a group that was waited for is whole")
    why = staleness.put_off_fault(run, step, late)
    if why:
        return Deferred(tuple(gone), why[:MAX_REASON])
    for group in late:
        _put_off(core, run, group)
    run.progress.samples = sum(
        len(g.samples) for g in run.by_key.values() if (g.purpose, g.step) == ("train", step)
    )
    run.due.ask = run.due.fleet = True
    reason = f"{len(late)} groups of step {step} are late: step {step + 1} trains them"
    decision_log.put_off(core, run, step, [group.id for group in late], reason)
    return Deferred(tuple(sorted([*gone, *(group.id for group in late)])), reason)


def _put_off(core: Core, run: ActiveRun, group: Group) -> None:
    del run.by_key[group.key]
    group.step += 1
    run.by_key[group.key] = group
    core.record(rec.GroupDeferred(group.id, group.step, core.now))


def commit(core: Core, run: ActiveRun, body: CommitStep) -> ReplyBody:
    groups = [
        g for g in run.by_key.values() if g.purpose == body.purpose and g.step == body.step and not g.orphaned
    ]
    if (body.episodes or body.deliveries) and not groups:
        train = body.purpose == "train"
        if body.step <= run.progress.last_committed if train else turns.committed(run, body):
            return Ok()
    elif not groups:
        known = (
            body.step <= run.progress.last_committed
            if body.purpose == "train"
            else all(o.sample_id < core.next_sample_id for o in body.outcomes)
        )
        if known:
            return Ok()
        if body.outcomes or body.purpose != "train" or not turns.asked(run):
            return Denied("invalid", f"step {body.step} was never submitted", "submit its groups first")
    fault = (
        _commit_fault(body, groups)
        or turns.commit_fault(run, body, OUTCOMES.get(body.purpose, ()))
        or deliveries.commit_fault(run, body)
    )
    if fault:
        return Denied("invalid", fault, "commit each sample of the step exactly once")
    outcomes = {o.sample_id: o for o in body.outcomes}
    if body.purpose == "train":
        _record_differences(
            core, run, body, {sample.id: sample for group in groups for sample in group.samples}
        )
    for group in groups:
        for sample in group.samples:
            if sample.status is SampleStatus.COMPLETE:
                _end(core, run, body, sample, outcomes[sample.id])
        samples.forget(core, group)
    for episode in body.episodes:
        turns.settle(core, run, body.step, episode)
    deliveries.settle(core, run, body)
    metrics = _kept_metrics(core, run, body)
    core.record(
        rec.StepCommitted(
            run.id,
            body.step,
            body.purpose,
            run.attempt,
            body.version,
            msgspec.json.encode(metrics).decode(),
            core.now,
        )
    )
    for decision in body.decisions:
        core.record(data_decisions.row(run.name, body.step, decision, core.now))
    run.policy.observe(StepFinished(body.step, body.purpose, _seconds_are_times(body.metrics)), core.now)
    if body.purpose == "train":
        run.progress.last_committed = body.step
        for group in [
            g for g in run.by_key.values() if g.orphaned and g.purpose == "train" and g.step <= body.step
        ]:
            samples.supersede(core, group, f"attempt {run.attempt} took step {body.step} without it")
        retire_versions(run)
    if run.settings.max_off_policy_steps:
        _begin_next(core, run)
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
    for group in groups:
        if found := staleness.trained_beyond(group):
            return found
    missing = [i for i, s in expected.items() if i not in got and s.error is None]
    return (
        f"{len(missing)} samples of step {body.step} have no outcome, first: {missing[0]}" if missing else ""
    )


def _end(core: Core, run: ActiveRun, body: CommitStep, sample: Sample, outcome: SampleOutcome) -> None:
    sample.transition(SampleStep.END)
    core.record(
        rec.SampleEnded(
            sample.id,
            outcome.outcome,
            redaction.reason(outcome.outcome, outcome.reason),
            body.step,
            run.attempt,
            outcome.reward,
            outcome.advantage,
            core.now,
            redaction.version(outcome.reward_version),
        )
    )


def _kept_metrics(core: Core, run: ActiveRun, body: CommitStep) -> dict[str, float]:
    """The step's metrics as the ledger keeps them; an event says of how many it keeps none, since a step does not fail for a figure."""
    kept = redaction.metrics(body.metrics)
    if left := sum(map(math.isfinite, body.metrics.values())) - len(kept):
        why = f"{left} of {len(body.metrics)} metrics of {body.purpose} step {body.step} are beyond {redaction.MOST_METRICS:,} characters"
        if core.count_refusal(f"{run.owner_key} metrics_left_out"):
            core.event("metrics_left_out", run.id, f"step {body.step}", why)
        else:
            core.count("metrics_left_out")
    return kept


def _record_differences(core: Core, run: ActiveRun, body: CommitStep, known: Mapping[int, Sample]) -> None:
    """Record how far trainer and engine were apart at each token. What fits no sample of the step is left out, and what is beyond the bound
    of a step: a step does not fail for a figure, and an event says how much."""
    said = [(one, known.get(one.sample_id)) for one in body.differences]
    for episode in body.episodes:
        by_end = turns.samples_taken(run, episode)
        said += [(one, deliveries.take_sample(by_end, one.turn)) for one in episode.differences]
    taken: set[int] = set()
    room = MAX_DIFFERENCES_BYTES
    for one, sample in said:
        if sample is None or sample.error is not None or sample.id in taken:
            continue
        if len(one.values) == 2 * sample.accepted and len(one.values) <= room:
            taken.add(sample.id)
            room -= len(one.values)
            core.record(
                rec.DifferencesRecorded(
                    sample.id, body.step, run.attempt, sample.accepted, one.mean, one.values
                )
            )
    if left := len(said) - len(taken):
        why = (
            f"{left} of {len(said)} name no sample of step {body.step}, or one of another length, "
            f"or are beyond {MAX_DIFFERENCES_BYTES >> 20} MiB"
        )
        if core.count_refusal(f"{run.owner_key} differences_left_out"):
            core.event("differences_left_out", run.id, f"step {body.step}", why)
        else:
            core.count("differences_left_out")


def trained(core: Core, run: ActiveRun, body: Trained) -> None:
    """How far the trainer is; pings repeat it."""
    if run.progress.newest == ("train", body.step) and body != run.progress.trained:
        run.progress.trained = body
        run.policy.observe(
            TrainedGroups(body.step, body.groups, body.tokens, body.seconds, body.scored, body.reward_s),
            core.now,
        )


def retire_versions(run: ActiveRun, keep: int = 4) -> None:
    """Forget manifests that cannot be asked for again; roots of a replay come back with the history."""
    used = {g.version for g in (*run.by_key.values(), *run.turns.open.values())}
    bases = {
        run.weights.versions[v].base
        for v in (*used, *sorted(run.weights.versions)[-keep:])
        if v in run.weights.versions
    }
    for version in sorted(run.weights.versions)[:-keep]:
        if version not in used and run.weights.versions[version].root not in bases:
            run.weights.versions[version].manifest = b""
            run.weights.versions[version].sources = ()
            run.weights.directory.forget(version)

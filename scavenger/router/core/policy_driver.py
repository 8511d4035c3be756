"""Asks a run's policy what to do, and does it: leases, moves, the window, the number of engines wanted. Pure.

A policy may ask for what cannot be done. Each of its answers is checked against the tables; what cannot be followed is dropped and counted
(`advice_dropped`), so no policy can break I1 to I6. Decisions go into the ledger with their reasons (`decision_log`).

A move of a sample takes three messages: Yield to its worker; the worker flushes and replies Yielded; the lease is released and granted to
the other worker with the next epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scavenger.policy import admission, placement, sharing
from scavenger.policy.admission import Admission
from scavenger.policy.fleet_size import Benefit
from scavenger.policy.interface import Fact, Paces, SampleMove, SamplePlacement, Weighs
from scavenger.policy.placement import QueuedSamples, Slots
from scavenger.policy.sharing import Placeable
from scavenger.protocol import engine_options
from scavenger.protocol.messages import Held, Revoke, Yield
from scavenger.router.core import decision_log, deliveries, returns, samples, staleness, turns
from scavenger.router.core.policy_view import LiveView
from scavenger.router.core.state import ActiveRun, Group, RouterLimits, Sample, SampleYield, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import GpuMemoryState, SampleStatus, WorkerStatus


def learn(core: Core, facts: Mapping[int, Sequence[tuple[float, Fact]]]) -> None:
    """After a restart: give each run a new policy, and have it observe in order what was known before."""
    for run in core.runs.values():
        if run.id in facts:
            run.policy = core.new_policy(run.name)
            for at, fact in facts[run.id]:
                run.policy.observe(fact, at)


def placements(core: Core, run: ActiveRun) -> list[SamplePlacement]:
    """The leases that the policy wants now and that are possible. Empty where no sample waits or no worker has a free slot."""
    if not run.queue or run.stopped or run.ended:
        return []
    view = LiveView(core, run)
    if run.settings.max_off_policy_steps and next(iter(view.waiting()), None) is None:
        return []  # what waits is of later steps
    for slot in view.slots():
        if slot.leases < slot.max_batch:
            break
    else:
        return []
    answers = run.policy.place(view, core.now)
    if not answers:
        return []
    free = {slot.worker_id: slot.max_batch - len(run.workers[slot.worker_id].leases) for slot in view.slots()}
    version, taken, kept = view.version, set[int](), []
    for answer in answers:
        sample = core.samples.get(answer.sample_id)
        waits = (
            sample is not None
            and sample.id in run.queue
            and sample.group.version == version
            and sample.id not in taken
            and sample.id not in run.returning
            and staleness.is_now(run, sample.group)
            and (not staleness.is_bounded(sample.group) or _may_take(run, answer.worker_id, sample.group))
        )
        if not waits or free.get(answer.worker_id, 0) < 1:
            core.count("advice_dropped")
            continue
        free[answer.worker_id] -= 1
        taken.add(answer.sample_id)
        kept.append(answer)
    return kept


def _may_take(run: ActiveRun, worker_id: int, group: Group) -> bool:
    worker = run.workers.get(worker_id)
    return worker is not None and samples.may_generate(worker, group)


def place_queued(core: Core, run: ActiveRun) -> None:
    """Lease queued samples as the policy says. A lease is sent once it is durable."""
    answers = placements(core, run)
    if not answers:
        return
    _lease(core, run, _beside_siblings(core, answers) if core.limits.share_prompts else answers)


def _beside_siblings(core: Core, answers: Sequence[SamplePlacement]) -> list[SamplePlacement]:
    """The same places, with samples that have no token exchanged so that those of one prompt share its prefill."""
    by_version: dict[int, list[Placeable]] = {}
    held: dict[int, dict[int, int]] = {}
    for answer in answers:
        sample = core.samples[answer.sample_id]
        group = sample.group
        # What failed somewhere was placed with regard to that, and steps in advance with regard to each engine's version.
        if not (sample.accepted or sample.failures or staleness.is_bounded(group)):
            one = Placeable(sample.id, group.id, answer.worker_id)
            by_version.setdefault(group.version, []).append(one)
            held[group.id] = group.holders
    chosen: dict[int, int] = {}
    for some in by_version.values():
        chosen |= sharing.together(some, held)
    return [
        answer
        if chosen.get(answer.sample_id, answer.worker_id) == answer.worker_id
        else SamplePlacement(
            answer.sample_id, chosen[answer.sample_id], f"beside its siblings, {answer.reason or 'its place'}"
        )
        for answer in answers
    ]


def _lease(core: Core, run: ActiveRun, answers: Sequence[SamplePlacement]) -> None:
    run.queue.discard_all([core.samples[answer.sample_id] for answer in answers])
    batches: dict[int, list[SamplePlacement]] = {}
    for answer in answers:
        batches.setdefault(answer.worker_id, []).append(answer)
    for worker_id, batch in batches.items():
        samples.lease(core, core.workers[worker_id], [core.samples[p.sample_id] for p in batch])
    decision_log.placed(core, run, answers)


# ---------------------------------------------------------------- steps in advance


def admit(core: Core, run: ActiveRun) -> None:
    """Lease samples of later steps to slots that what the trainer works at has left, the earliest step first."""
    answers = ahead_placements(core, run)
    if answers:
        _lease(core, run, answers)


def admission_of(core: Core, run: ActiveRun) -> Admission:
    """How many samples an engine may hold, those of later steps included: decided anew every `ADMIT_S`, and in each step."""
    known, asked = run.decisions.admission, run.decisions.admit_again_at
    if known is not None and core.now < asked:
        return known
    view = LiveView(core, run)
    pace = run.policy.pace(view) if isinstance(run.policy, Paces) else None
    serving = [w for w in run.workers.values() if w.status in (WorkerStatus.READY, WorkerStatus.LOADING)]
    harvested = sum(worker.kind != "reserved" and not worker.bounded for worker in serving)
    reserved = sum(worker.kind == "reserved" for worker in run.workers.values())
    decided = admission.limit(
        admission.AdmissionView(
            run.settings.max_off_policy_steps, run.engine.max_batch, harvested, reserved, pace
        )
    )
    run.decisions.admission, run.decisions.admit_again_at = decided, core.now + ADMIT_S
    if known is None or known.limit != decided.limit:
        decision_log.admission(core, run, decided)
    return decided


#: Engines come and go, and lengths are learned: how many samples they may hold is decided again so soon.
ADMIT_S = 5.0


def ahead_placements(core: Core, run: ActiveRun) -> list[SamplePlacement]:
    if not run.settings.max_off_policy_steps or not run.queue or run.stopped or run.ended:
        return []
    purpose, now = run.progress.newest
    if purpose != "train":
        return []
    leases = {worker.id: len(worker.leases) for worker in run.workers.values()}
    decided = admission_of(core, run)
    able = [
        worker
        for worker in run.workers.values()
        if leases[worker.id] < decided.limit
        and samples.servable(worker, worker.weights.loaded)
        and not worker.weights.switches
    ]
    if not able:
        return []
    waiting: dict[int, list[Sample]] = {}
    # What the step under way waits for is kept free for it: a slot that one of a later step gave it would else go back to that.
    left = sum(
        max(0, w.most_leases - leases[w.id]) for w in samples.serving(run, samples.queued_version(run))
    )
    for sample in run.queue.waiting(samples.queued_version(run)):
        group = sample.group
        left -= staleness.is_now(run, group)
        returns_soon = sample.id in run.returning
        if staleness.is_bounded(group) and group.step > now and not (group.orphaned or returns_soon):
            waiting.setdefault(group.step, []).append(sample)
    if not waiting or left <= 0:
        return []
    found: list[SamplePlacement] = []
    for step, some in sorted(waiting.items()):
        slots = [
            Slots(w.id, leases[w.id], min(decided.limit, w.most_leases), w.place)
            for w in able
            if leases[w.id] < min(decided.limit, w.most_leases) and samples.may_generate(w, some[0].group)
        ]
        for sample_id, worker_id in placement.place(
            (QueuedSamples(s.id, s.failed_nodes) for s in some), slots
        ):
            if len(found) >= left:
                return found
            leases[worker_id] += 1
            why = f"in advance, of step {step} while step {now} is under way; {decided.reason}"
            found.append(SamplePlacement(sample_id, worker_id, why))
    return found


def give_way(core: Core, run: ActiveRun) -> None:
    """Where samples of what the trainer works at wait and no engine has a free slot, have samples of later steps give theirs: the latest
    step first, and of one step those with the fewest tokens to prefill again. They keep their tokens, and wait their turn.
    """
    if not run.settings.max_off_policy_steps or run.progress.newest[0] != "train" or not run.queue:
        return
    view = LiveView(core, run)
    waits = view.waits
    if not waits or run.stopped or run.ended:
        return
    step = run.progress.newest[1]
    serving = [run.workers[slot.worker_id] for slot in view.slots()]
    free = sum(max(0, worker.most_leases - len(worker.leases)) for worker in serving)
    later = [
        (worker, sample)
        for worker in serving
        for sample in worker.leases.values()
        if not staleness.is_now(run, sample.group) and staleness.is_bounded(sample.group)
    ]
    leaving = sum(sample.id in worker.yielding for worker, sample in later)
    able = [
        (worker, sample)
        for worker, sample in later
        if sample.status is SampleStatus.LEASED and sample.id not in worker.yielding
    ]
    able.sort(key=lambda one: (-one[1].group.step, one[1].accepted, one[1].id))
    by_worker: dict[int, list[SampleMove]] = {}
    for worker, sample in able[: max(0, waits - free - leaving)]:
        why = f"{waits} samples of step {step}, which is under way, wait for a slot: one of step {sample.group.step} gives way"
        by_worker.setdefault(worker.id, []).append(SampleMove(sample.id, worker.id, 0, why))
    for worker_id, moves in by_worker.items():
        _take(core, run.workers[worker_id], moves)
        core.count("gave_way", len(moves))


def switch(core: Core, run: ActiveRun) -> None:
    """Have some workers that generate with older weights give their samples back and load the newest."""
    target = run.cached.target
    for worker in staleness.to_switch(run, target, core.now):
        worker.weights.switches = True
        run.cached.serving = None
        run.due.changed_workers.append(worker)
        why = f"version {target} follows {worker.weights.loaded}"
        moves = [
            SampleMove(sample.id, worker.id, 0, why)
            for sample in sorted(worker.leases.values(), key=lambda sample: sample.id)
            if sample.status is SampleStatus.LEASED and sample.id not in worker.yielding
        ]
        if moves:
            _take(core, worker, moves)
            returns.expect(run, worker, [core.samples[move.sample_id] for move in moves], core.now)


def rebalance(core: Core, run: ActiveRun, *, timed: bool) -> None:
    """Ask for moves: after what changed the fleet or the queue, and every `every_s`."""
    if run.ended or run.stopped or (timed and core.now - run.decisions.rebalanced_at < run.policy.every_s):
        return
    run.decisions.rebalanced_at = core.now
    moves = run.policy.rebalance(LiveView(core, run), core.now)
    leaving: dict[int, list[SampleMove]] = {}
    able = [move for move in moves if _may_move(core, run, move)]
    for move in able:
        leaving.setdefault(move.from_worker, []).append(move)
    if len(able) < len(moves):
        core.count("advice_dropped", len(moves) - len(able))
    for worker_id, batch in leaving.items():
        _take(core, core.workers[worker_id], batch)
    decision_log.moved(core, run, able)


def _may_move(core: Core, run: ActiveRun, move: SampleMove) -> bool:
    sample, worker = core.samples.get(move.sample_id), run.workers.get(move.from_worker)
    if (
        sample is None
        or worker is None
        or worker.conn is None
        or sample.id in worker.yielding
        or move.from_worker == move.to_worker
    ):
        return False
    target = run.workers.get(move.to_worker)
    if move.to_worker and (target is None or not samples.may_generate(target, sample.group)):
        return False
    return sample.status is SampleStatus.LEASED and sample.worker_id == worker.id and sample.group.run is run


def _take(core: Core, worker: Worker, moves: Sequence[SampleMove]) -> None:
    """Ask a worker to give samples back."""
    held = [(move, core.samples[move.sample_id]) for move in moves]
    names = tuple((sample.id, sample.epoch) for _, sample in held)
    for move, sample in held:
        worker.yielding[sample.id] = SampleYield(sample.epoch, move.to_worker, move.reason, core.now)
        sample.view_changed()
    core.send_durable(worker.conn, Yield(names, moves[0].reason))  # behind the leases themselves


def handed_back(core: Core, worker: Worker, leases: Sequence[Held]) -> None:
    """A worker flushed and gave leases back. It may have been asked to by the daemon before this one."""
    over: list[tuple[int, int]] = []
    for held in leases:
        sample = core.samples.get(held.sample_id)
        if (
            sample is not None
            and sample.done
            and sample.epoch == held.epoch
            and sample.last_worker_id == worker.id
        ):
            continue  # it ended with the flush: its ack is on the way
        if (
            sample is None
            or sample.worker_id != worker.id
            or sample.epoch != held.epoch
            or sample.status is not SampleStatus.LEASED
        ):
            core.send(worker.conn, Revoke(((held.sample_id, held.epoch),), "the sample moved on"))
            continue
        if held.length > sample.accepted:
            core.count("yields_early")  # what came before it was lost: it is sent again, and so is this
            continue
        asked = worker.yielding.get(sample.id)
        over.append((sample.id, sample.epoch))
        sleeps = worker.memory.state is GpuMemoryState.FALLING_ASLEEP
        unasked = "reserved worker sleeps" if sleeps else "given back"
        reason = f"moved: {asked.reason}" if asked is not None else unasked
        samples.release(core, sample, reason)
        if asked is not None:
            give(core, asked.to_worker, sample.id)
    if over:
        # Only then may it forget the tokens.
        core.send_durable(worker.conn, Revoke(tuple(over), "given back"))


def give(core: Core, worker_id: int, sample_id: int) -> None:
    """Lease a sample that was just released to the worker that the move named; where that cannot take it, it stays queued."""
    sample, worker = core.samples[sample_id], core.workers.get(worker_id)
    run = sample.group.run
    if worker is None or sample.id not in run.queue or run.stopped or run.ended:
        return
    if samples.may_generate(worker, sample.group) and len(worker.leases) < worker.most_leases:
        run.queue.discard(sample)
        samples.lease(core, worker, [sample])


def window(core: Core, run: ActiveRun, *, timed: bool) -> None:
    """Ask whether reserved engines go on generating. The answer travels in the next `Fleet`."""
    if run.ended or run.stopped or (timed and core.now < run.decisions.ask_window_at):
        return
    view = LiveView(core, run)
    answer = run.policy.window(view, core.now)
    run.decisions.ask_window_at = math.inf if answer is None else answer.again_at
    said = "" if answer is None else "close" if answer.close else "open"
    keep_open = answer is not None and answer.keep_open and not answer.close
    if (said, keep_open) != (run.decisions.window, run.decisions.keep_open):
        run.decisions.window, run.decisions.window_reason = said, "" if answer is None else answer.reason
        run.decisions.keep_open = keep_open
        decision_log.window(
            core, run, view.step.finished >= view.step.samples, {} if answer is None else answer.inputs
        )


def engines_for(core: Core, run: ActiveRun, now: float, limits: RouterLimits) -> tuple[int, str]:
    """How many harvested engines the run could use; 0 where it cannot use any, whatever its policy says."""
    engines, reason = _wanted(core, run, now, limits)
    decision_log.engines(core, run, engines, reason, benefit(run))
    return engines, reason


def _wanted(core: Core, run: ActiveRun, now: float, limits: RouterLimits) -> tuple[int, str]:
    if run.ended or run.stopped:
        return 0, "the run is over"
    if not run.settings.harvest:
        return 0, "run.harvest = false"
    if refused := engine_options.fault_of_text(
        run.engine.options, harvested=True, allowed=limits.vllm_options
    ):
        return 0, refused[0]
    if not run.weights.versions:
        return 0, "no weights are published yet"
    silent = now - deliveries.seen_at(core, run)
    if silent > limits.trainer_gone_s:
        return 0, f"its trainer was silent for {limits.trainer_gone_s:g} s: it is taken for dead"
    idle = not run.queue and not run.turns.open and not any(w.leases for w in run.workers.values())
    if silent > limits.trainer_silent_s and idle:
        return 0, f"its trainer was silent for {limits.trainer_silent_s:g} s"
    engines, reason = run.policy.engines(LiveView(core, run), now)
    for_turns, why = turns.engines(run, now)
    if for_turns > engines:
        engines, reason = for_turns, why
    return max(0, min(engines, run.settings.max_engines)), reason


def benefit(run: ActiveRun) -> Benefit | None:
    """What one more engine of the run is worth, as its policy computed it last; None for a policy that does not weigh benefits."""
    return run.policy.benefit() if isinstance(run.policy, Weighs) else None

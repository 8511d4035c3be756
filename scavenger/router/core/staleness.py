"""Whose tokens a step may train, and with which weights its samples are generated next. Pure.

`algorithm.max_off_policy_steps` = k. Step t is trained by the weights after t - 1 optimizer steps; its tokens may be of weights up to k
steps older. With k = 0 a group names one version and every lease has that version. With k > 0 a lease has the version of its worker:

    published        every group that is not whole is to be generated with the newest version from now on (`retarget`)
    leased           by any worker whose version is no more than k steps too old for the sample's step (`fault`)
    moved            a sample goes on under its next worker's version; `Sample.versions` says which tokens are of which
    late             may be trained one step later, if that is within k too (`put_off_fault`)
    committed        refused if any token is older than that: no sample is trained beyond k
    opened again     a group goes on if all its tokens are of weights that the resumed trainer had too (`adoption_fault`)

Which step is under way is the core's to know here: several are submitted at once (`under_way`).

Boundary: ages of tokens, of groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.ledger import records as rec
from scavenger.protocol.messages import MAX_VERSIONS
from scavenger.router.core.state import ActiveRun, Group, Sample, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import SampleStatus, WorkerStatus

#: (version, tokens) of one sample, in the order of its tokens.
Mixture = tuple[tuple[int, int], ...]


def is_bounded(group: Group) -> bool:
    """Whether the group's samples may be of several versions, none of them too old."""
    return group.run.settings.max_off_policy_steps > 0 and group.purpose == "train" and group.turn is None


def age(run: ActiveRun, step: int, version: int) -> int:
    """Optimizer steps between the version's weights and those that train the step."""
    return step - 1 - run.weights.versions[version].step


def fault(run: ActiveRun, step: int, version: int) -> str:
    """Why tokens of this version may not be trained in this step; empty where they may."""
    most = run.settings.max_off_policy_steps
    if version not in run.weights.versions:
        return f"version {version} is not one of the run's"
    old = age(run, step, version)
    if old < 0:  # a restart from an older checkpoint took it back
        return f"version {version} has the weights after step {run.weights.versions[version].step}, which is not before step {step}"
    return f"version {version} is {old} steps too old for step {step}, over {most}" if old > most else ""


def may_serve(worker: Worker, group: Group) -> bool:
    """Whether a worker that is ready has weights that are young enough for the group."""
    return not worker.weights.switches and may_lease(group.run, group.step, worker.weights.loaded)


def may_lease(run: ActiveRun, step: int, version: int) -> bool:
    """Whether samples of this step may be generated with this version from now on."""
    return not fault(run, step, version) and _is_live(run, version)


# ---------------------------------------------------------------- a sample's versions


def note(sample: Sample, version: int, tokens: int) -> None:
    """So many more of its tokens are of this version."""
    known = sample.versions
    if known and known[-1][0] == version:
        tokens, known = tokens + known[-1][1], known[:-1]
    sample.versions = (*known, (version, tokens))


def mixture(sample: Sample) -> Mixture:
    """The versions of its tokens. One that was begun while k was 0 has its group's alone."""
    if sample.versions or not sample.accepted:
        return sample.versions
    return ((sample.group.version, sample.accepted),)


def begun_version(sample: Sample, version: int) -> int:
    """`Lease.begun_version` of a lease of this version."""
    if not (sample.group.run.settings.keeps_cache and is_bounded(sample.group)):
        return -1
    found = mixture(sample)
    return found[0][0] if found else version


def told(group: Group, sample: Sample) -> tuple[tuple[int, int, int], ...]:
    """(version, its step, tokens) as its trainer is told; nothing where all of a step's samples are of one version."""
    if not is_bounded(group):
        return ()
    versions, found = group.run.weights.versions, mixture(sample)
    if len(found) > MAX_VERSIONS:
        found = tuple((v, sum(n for one, n in found if one == v)) for v in sorted({v for v, _ in found}))
    return tuple((version, versions[version].step, tokens) for version, tokens in found)


def trained_beyond(group: Group) -> str:
    """Why the group may not be trained in its step; empty where it may. The hard bound: it is asked before a commit."""
    if not is_bounded(group):
        return ""
    for sample in group.samples:
        for version, _ in mixture(sample):
            if sample.error is None and (found := fault(group.run, group.step, version)):
                return f"sample {sample.id}: {found}"
    return ""


#: A step trains this share of its groups at least: what is late is few, or the step would be another.
LEAST_TRAINED = 0.5


def put_off_fault(run: ActiveRun, step: int, groups: Sequence[Group]) -> str:
    """Why these late groups of the step under way cannot be trained in the next one; empty where they can.

    All or none go: while one of them is waited for, the others cost nothing.
    """
    of_step = [g for g in run.by_key.values() if (g.purpose, g.step) == ("train", step) and not g.orphaned]
    if not groups:
        return "no group is late"
    if not any((g.purpose, g.step) == ("train", step + 1) and not g.orphaned for g in run.by_key.values()):
        return f"step {step + 1} was not asked for"
    whole = sum(group.done for group in of_step)
    if whole < LEAST_TRAINED * len(of_step):
        return f"{whole} of {len(of_step)} groups are whole, {LEAST_TRAINED:.0%} are to be trained"
    for group in groups:
        if not is_bounded(group) or group.key != ("train", step, group.prompt_index):
            return f"group {group.id} is not one of step {step}"
        if ("train", step + 1, group.prompt_index) in run.by_key:
            return f"step {step + 1} has prompt {group.prompt_index} too"
        for sample in group.samples:
            used = {version for version, _ in mixture(sample)}
            if sample.status in (SampleStatus.LEASED, SampleStatus.UNCONFIRMED):
                used.add(sample.lease_version)
            for version in sorted(used):
                if found := fault(run, step + 1, version):
                    return f"sample {sample.id}: {found}"
    return ""


# ---------------------------------------------------------------- the next version


def _set_version(core: Core, run: ActiveRun, group: Group, version: int) -> None:
    """From now on the group's samples are generated with this version; those that have tokens keep what they are of."""
    queued = [sample for sample in group.samples if sample.id in run.queue]
    for sample in queued:
        run.queue.discard(sample)
    for sample in group.samples:
        sample.versions = mixture(sample)
    group.version, group.root = version, run.weights.versions[version].root
    for sample in queued:
        run.queue.add(sample)
    core.record(rec.GroupAdopted(group.id, version, core.now))


def retarget(core: Core, run: ActiveRun, version: int) -> None:
    """New weights: what is to be generated yet is generated with them."""
    for group in list(run.by_key.values()):
        if is_bounded(group) and not group.orphaned and not group.done and group.version < version:
            _set_version(core, run, group, version)


def adopt(core: Core, run: ActiveRun, group: Group, version: int) -> None:
    """A group of an older attempt goes on, under this attempt's version."""
    if group.orphaned and group.version != version:
        _set_version(core, run, group, version)


def _is_live(run: ActiveRun, version: int) -> bool:
    """Whether the weights are ones that the present trainer had: none that a restart from an older checkpoint took back.

    A version that was published later for an earlier step, or for the same step with another root, took it back.
    """
    mine = run.weights.versions.get(version)
    return mine is not None and all(
        later.step > mine.step or (later.step == mine.step and later.root == mine.root)
        for number, later in run.weights.versions.items()
        if number > version
    )


def adoption_fault(group: Group) -> str:
    """Why the group of an older attempt cannot go on; empty where it can."""
    run = group.run
    for sample in group.samples:
        used = {version for version, _ in mixture(sample)}
        if sample.status in (SampleStatus.LEASED, SampleStatus.UNCONFIRMED):
            used.add(sample.lease_version)
        for version in sorted(used):
            if not _is_live(run, version):
                return f"generated by version {version}, whose weights were taken back"
            if found := fault(run, group.step, version):
                return found
    return ""


# ---------------------------------------------------------------- the step under way


def under_way(run: ActiveRun) -> tuple[str, int]:
    """(purpose, step) of what the trainer works at: an evaluation that it asked for, else the first step that is not committed."""
    if run.progress.newest[0] != "train" and any(
        (group.purpose, group.step) == run.progress.newest for group in run.by_key.values()
    ):
        return run.progress.newest
    return ("train", run.progress.last_committed + 1)


def is_now(run: ActiveRun, group: Group) -> bool:
    """Whether the group is of what the trainer works at, and not of a later step. With k = 0 every group is."""
    if not run.settings.max_off_policy_steps:
        return True
    purpose, step = run.progress.newest
    return group.purpose == purpose and (purpose != "train" or group.step <= step)


def begins(run: ActiveRun, purpose: str, step: int) -> bool:
    """Whether what is submitted is what the trainer works at next. Steps in advance begin later, once those before are committed."""
    return (
        not run.settings.max_off_policy_steps or purpose != "train" or step == run.progress.last_committed + 1
    )


# ---------------------------------------------------------------- switching

#: One in so many workers loads at a time.
STAGGER = 4


def _may_switch(worker: Worker) -> bool:
    """A turn, or an evaluation, goes on with the version that it has (I4)."""
    return all(is_bounded(sample.group) for sample in worker.leases.values())


def _is_at_hand(run: ActiveRun, worker: Worker, target: int, now: float) -> bool:
    held = run.weights.directory.is_holder(target, worker.id)
    return held or (worker.weights.ahead == target and now - worker.weights.ahead_at >= PULL_S)


#: So long a worker generates on while it pulls the next version; then it loads, and waits for what is missing.
PULL_S = 10.0


def to_switch(run: ActiveRun, target: int, now: float) -> list[Worker]:
    """Workers that generate with older weights and are to load `target` now: one in `STAGGER` at a time, the oldest weights first, so
    that decoding never stops everywhere. Who is to switch has the bytes at hand, or did not get them in `PULL_S`.
    """
    settings = run.settings
    if not settings.max_off_policy_steps or settings.on_new_version != "switch":
        return []
    return _first(run, [w for w in _behind(run, target, now) if _may_switch(w)])


def to_switch_after_turns(run: ActiveRun, target: int, now: float) -> list[Worker]:
    """Workers that generate turns, and are to take no other turn until they have loaded `target`: as many at a time as `to_switch` takes.

    A turn keeps its version (I4) and the next one may come as it ends, so an engine of busy agents is never idle by itself. Where
    `target` is older, a turn that was begun with it waits, and one worker is enough; none where another that takes leases has these
    weights, or loads them.
    """
    behind = _behind(run, target, now)
    if not behind and not any(target in (w.weights.loaded, w.weights.asked) for w in _takes_leases(run)):
        behind = [w for w in _generating(run, target) if w.weights.loaded > target][:1]
    return _first(run, [w for w in behind if _has_turns(w)])


def _has_turns(worker: Worker) -> bool:
    return any(sample.group.turn is not None for sample in worker.leases.values())


def _ready(run: ActiveRun) -> list[Worker]:
    return [w for w in run.workers.values() if w.conn is not None and not w.suspect]


def _takes_leases(run: ActiveRun) -> list[Worker]:
    """Those that take them now or once they have loaded: a guest whose host leaves it nothing may sleep for hours."""
    return [
        w for w in _ready(run) if w.most_leases and w.status in (WorkerStatus.READY, WorkerStatus.LOADING)
    ]


def _generating(run: ActiveRun, target: int) -> list[Worker]:
    """Workers that generate with other weights than `target`, which can be had, and are not to load it yet; the oldest weights first."""
    if target < 0 or not run.weights.available(target):
        return []
    found = [
        w
        for w in run.workers.values()
        if w.weights.loaded not in (-1, target)
        and w.status is WorkerStatus.READY
        and w.leases
        and not w.weights.switches
        and w.conn is not None
        and not w.suspect
    ]
    return sorted(found, key=lambda w: (w.weights.loaded, w.id))


def _behind(run: ActiveRun, target: int, now: float) -> list[Worker]:
    """Those of `_generating` whose weights are older, and that have the newer ones at hand."""
    return [
        w for w in _generating(run, target) if w.weights.loaded < target and _is_at_hand(run, w, target, now)
    ]


def _first(run: ActiveRun, behind: list[Worker]) -> list[Worker]:
    """As many of them as may change weights beside those that do."""
    if not behind:
        return []
    ready = _ready(run)
    changing = sum(
        bool(w.leases) and w.weights.switches if w.status is WorkerStatus.READY else w.weights.loads > 0
        for w in ready
        if w.status in (WorkerStatus.READY, WorkerStatus.LOADING)
    )
    return behind[: max(0, max(1, -(-len(ready) // STAGGER)) - changing)]

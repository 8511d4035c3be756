"""Several policies in one environment: what one run's episodes say is delivered to the trainer of another run. Pure.

    the run that plays              the other run, whose policy answers for an agent
    OpenTurn(policy) ------------>  its own episode of the same name, with the turns that its engines generate (`turns`)
    Deliver(policy, shares) ----->  a `Delivery` for each episode, durable, and none for one that has been delivered
                                    WantDeliveries -> DeliveredGroup: due, young enough for the step, and not held by its trainer
                                    CommitStep.deliveries -> taken, and known to the ledger alone
    OpenRun at an earlier step ---> what later steps took is read from the ledger: due again
    the run ends ---------------->  EpisodesOver

An episode's turns are delivered together, once: `Episode.delivered`, and in the ledger a turn has one delivery. Both runs have one owner,
and the other one names the run whose episodes it takes. Its trainer may be away: what is due waits, within bounds, and its engines stay
for as long as the run that plays has a trainer.

Boundary: two runs' calls on each other; whatever else a run does it does alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import sha256

import msgspec

from scavenger.ledger import records as rec
from scavenger.ledger import redaction
from scavenger.protocol.messages import (
    CommitStep,
    Deliver,
    DeliveredEpisode,
    DeliveredGroup,
    DeliveredRow,
    DeliveryOutcome,
    Denied,
    EpisodeShare,
    EpisodesOver,
    Ok,
    OpenRun,
    ReplyBody,
    WantDeliveries,
    fault_of_numbers,
    fault_of_turns,
    turn_ends,
)
from scavenger.router.core import staleness
from scavenger.router.core.state import ActiveRun, Delivery, Episode, Group, Sample
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import DeliveryStatus, DeliveryStep, SampleStatus

#: Of a run: groups that are due, and their bytes. Beyond, the oldest that its trainer does not have are dropped.
MAX_DUE_GROUPS, MAX_DUE_BYTES = 4096, 256 << 20
TAKEN = ("consumed", "filtered", "masked")
_TOO_MANY = "newer ones came, and too many were due"


# ---------------------------------------------------------------- who answers for whom


def other_run(core: Core, run: ActiveRun, name: str) -> ActiveRun | Denied:
    """The run called `name` that answers for an agent in episodes of `run`, or why it does not."""
    fault = fault_of(core, run.name, run.owner_key, name)
    if fault is None and name not in run.settings.policies:
        why = f"run {run.name!r} names no policy of run {name!r}"
        fault = Denied(
            "invalid", why, f'set data.policies.AGENT.run = "{name}" and start its training job again'
        )
    return fault or core.runs[name]


def fault_of(core: Core, player: str, owner_key: str, name: str) -> Denied | None:
    """Why run `name` cannot answer for an agent in episodes of the run `player` of this owner; None where it can."""
    found = core.runs.get(name)
    if found is None:
        why = f"run {name!r}, which is to answer for an agent of run {player!r}, does not exist"
        return Denied("invalid", why, "start its training job first")
    if found.owner_key != owner_key:
        why = f"run {name!r}, which is to answer for an agent of run {player!r}, belongs to another owner"
        return Denied("not-owner", why, "name a run of your own in data.policies")
    if found.settings.episodes_of != player:
        why = f"run {name!r} does not take episodes of run {player!r}"
        return Denied("invalid", why, f'set data.episodes_of = "{player}" in its run.toml')
    if found.ended or found.stopped:
        why = f"run {name!r}, which answers for an agent of run {player!r}, has ended"
        return Denied("invalid", why, "start its training job again: it goes on from its checkpoint")
    return None


def opening_fault(core: Core, owner_key: str, body: OpenRun) -> Denied | None:
    """Why a run with these policies is not opened."""
    if body.episodes_of == body.run or body.run in body.policies:
        return Denied("invalid", f"run {body.run!r} names itself as another run", "leave it out")
    if body.episodes_of and body.policies:
        why = f"run {body.run!r} takes episodes of run {body.episodes_of!r}, and plays none of its own"
        return Denied("invalid", why, "leave out data.policies, or data.episodes_of")
    source = core.runs.get(body.episodes_of) if body.episodes_of else None
    if source is not None and source.owner_key != owner_key:
        why = (
            f"run {body.episodes_of!r}, whose episodes run {body.run!r} is to take, belongs to another owner"
        )
        return Denied("not-owner", why, "name a run of your own in data.episodes_of")
    faults = (fault_of(core, body.run, owner_key, name) for name in body.policies)
    if (fault := next((one for one in faults if one is not None), None)) is not None:
        return fault
    plays_this_one = source is not None and not source.ended and body.run in source.settings.policies
    beside = [core.runs[name] for name in body.policies]
    beside += [source] if source is not None and plays_this_one else []
    return next((fault for one in beside if (fault := _vocabulary_fault(body, one)) is not None), None)


def _vocabulary_fault(body: OpenRun, other: ActiveRun) -> Denied | None:
    """The environment reads and writes tokens of the run that plays, for all agents: to another vocabulary they are other words."""
    mine, theirs = body.engine.vocabulary, other.engine.vocabulary
    if not mine or not theirs or mine == theirs:
        return None
    why = f"the models of runs {body.run!r} and {other.name!r} have different tokenizers, and their episodes share tokens"
    return Denied("invalid", why, "give both runs a model.path with the same tokenizer.json")


def others_of(core: Core, run: ActiveRun) -> list[ActiveRun]:
    """The runs that answer for agents of this one, as far as they take its episodes."""
    found = (core.runs.get(name) for name in run.settings.policies)
    return [
        one
        for one in found
        if one is not None and one.settings.episodes_of == run.name and one.owner_key == run.owner_key
    ]


def player_of(core: Core, run: ActiveRun) -> ActiveRun | None:
    """The run whose episodes this one takes; None where it has ended, or was never opened."""
    found = core.runs.get(run.settings.episodes_of) if run.settings.episodes_of else None
    return found if found is not None and not found.ended and found.owner_key == run.owner_key else None


def seen_at(core: Core, run: ActiveRun) -> float:
    """When the run was last known to be wanted (Unix s): by its trainer, or by that of the run whose episodes its engines answer in."""
    player = player_of(core, run)
    return run.trainer.seen_at if player is None else max(run.trainer.seen_at, player.trainer.seen_at)


# ---------------------------------------------------------------- delivered


def deliver(core: Core, run: ActiveRun, body: Deliver) -> ReplyBody:
    """What another run's policy said in episodes of this one is for its trainer."""
    known = core.runs.get(body.policy)
    closed = known is not None and (
        known.ended or not known.turns.ended_known
    )  # or is just being opened again
    if known is not None and closed and known.owner_key == run.owner_key:
        core.count("deliveries_to_ended_runs")  # nobody trains them any more, and this run's own step goes on
        return Ok()
    other = other_run(core, run, body.policy)
    if isinstance(other, Denied):
        return other
    fresh: list[tuple[Episode, EpisodeShare, tuple[DeliveredRow, ...]]] = []
    for share in body.shares:
        episode = other.turns.episodes.get(share.episode)
        if share.episode in other.turns.ended or (episode is not None and episode.delivered):
            continue  # said before
        if episode is None:
            why = f"run {other.name!r} has no turns of episode {share.episode!r}"
            return Denied("invalid", why, "deliver what the policy of the run said")
        if why := _fault_of_share(other, episode, share):
            return Denied("invalid", why, "deliver whole turns of the policy of the run, and each once")
        rows = _with_groups(episode, share)
        if rows is None:
            why = f"episode {share.episode!r} rewards a turn that is none of those it names, or one twice"
            return Denied("invalid", why, "reward turns that the share names, and each once")
        fresh.append((episode, share, rows))
    if len({share.episode for _, share, _ in fresh}) != len(fresh):
        return Denied("invalid", "an episode is named twice", "deliver each episode once")
    group = core.next_delivery_id
    for episode, share, rows in fresh:
        _make(core, run, other, body, group, episode, share, rows)
    if fresh:
        _bound(core, other)
        send(core, other)
    return Ok()


def _fault_of_share(other: ActiveRun, episode: Episode, share: EpisodeShare) -> str:
    """Why the share is not what the policy said in the episode: rows end where its turns do, and their turns are whole."""
    groups = [episode.turns.get(request) for request in share.used]
    if any(group is None or not _is_whole(group) for group in groups):
        return f"episode {share.episode!r} names a turn that run {other.name!r} does not have, or not whole"
    for row in share.rows:
        if fault := _fault_of_row(row):
            return f"episode {share.episode!r}: {fault}"
        if not episode.prefixes.ended_by(sha256(row.prompt + row.completion).digest()).sample_id:
            return f"episode {share.episode!r} has a row that is no turn of run {other.name!r}"
    if fault := fault_of_numbers(row.turns for row in share.rows):
        return f"episode {share.episode!r}: {fault}"
    return ""


def _with_groups(episode: Episode, share: EpisodeShare) -> tuple[DeliveredRow, ...] | None:
    """The rows, of which each turn that the environment rewards has its group; None: one of them is no turn that the share names."""
    by_end = samples_by_end(episode, share.used)
    rows = []
    for row in share.rows:
        turns = []
        for turn, end in turn_ends(row.prompt, row.completion, row.mask, row.turns):
            sample = take_sample(by_end, end)
            if sample is None:
                return None
            turns.append(msgspec.structs.replace(turn, group=sample.group.id))
        rows.append(msgspec.structs.replace(row, turns=tuple(turns)))
    return tuple(rows)


def _earned(rows: Iterable[DeliveredRow]) -> dict[int, float]:
    """What the turns earned that the environment rewards, by their groups: of all completions of a turn together."""
    earned: dict[int, float] = {}
    for row in rows:
        for turn in row.turns:
            earned[turn.group] = earned.get(turn.group, 0.0) + turn.reward
    return earned


def samples_by_end(episode: Episode, requests: Iterable[bytes]) -> dict[bytes, list[Sample]]:
    """The complete samples of these turns of the episode by the SHA-256 of their prompt's and completion's tokens, in the turns' order."""
    found: dict[bytes, list[Sample]] = {}
    for request in dict.fromkeys(requests):
        group = episode.turns[request]
        for sample in group.samples:
            if group.turn is not None and (end := group.turn.ends.get(sample.index)) is not None:
                found.setdefault(end, []).append(sample)
    return found


def take_sample(by_end: dict[bytes, list[Sample]], end: bytes) -> Sample | None:
    """The next sample with this end: of turns with equal tokens each in its order, and once."""
    same = by_end.get(end)
    return same.pop(0) if same else None


def _is_whole(group: Group) -> bool:
    return group.durable and all(sample.status is SampleStatus.COMPLETE for sample in group.samples)


def _fault_of_row(row: DeliveredRow) -> str:
    said = sum(row.mask) if row.mask else len(row.completion) // 4
    if len(row.prompt) % 4 or not row.prompt or len(row.completion) % 4 or not row.completion:
        return "a row without tokens"
    if row.mask and (4 * len(row.mask) != len(row.completion) or set(row.mask) - {0, 1} or not row.mask[-1]):
        return "a row whose mask is not one of its tokens, up to the last that was said"
    if len(row.behaviour) != 4 * said:
        return "a row whose logprobs are not those of its tokens"
    return fault_of_turns(row.turns, said)


def _make(
    core: Core,
    run: ActiveRun,
    other: ActiveRun,
    body: Deliver,
    group: int,
    episode: Episode,
    share: EpisodeShare,
    rows: tuple[DeliveredRow, ...],
) -> None:
    turns = [episode.turns[request] for request in dict.fromkeys(share.used)]
    delivery = Delivery(
        core.next_delivery_id,
        group,
        run.name,
        body.step,
        body.prompt_index,
        share.index,
        share.episode,
        share.reward,
        min(turn.version for turn in turns),
        rows,
    )
    core.next_delivery_id += 1
    episode.delivered = True
    only_served = other.settings.serves_only
    delivery.transition(DeliveryStep.SERVE if only_served else DeliveryStep.DELIVER)
    if not only_served:
        other.deliveries.by_id[delivery.id] = delivery
    core.count("deliveries")
    core.record(
        rec.Delivered(
            delivery.id,
            other.id,
            run.id,
            episode.id,
            group,
            delivery.step,
            delivery.prompt_index,
            delivery.index,
            delivery.reward,
            delivery.version,
            b"" if only_served else msgspec.msgpack.encode(delivery.rows),
            delivery.status.value,
            "the run takes no steps" if only_served else "",
            core.now,
        ),
        *(rec.TurnDelivered(turn.id, other.id, delivery.id) for turn in turns),
        *(rec.TurnRewarded(turn, reward) for turn, reward in _earned(rows).items()),
    )


def _bound(core: Core, run: ActiveRun) -> None:
    """Drop the oldest groups where too many are due: its trainer is slower than episodes come, or away."""
    due = run.deliveries.due()
    groups, nbytes = len(due), sum(one.nbytes for of_group in due.values() for one in of_group)
    for group, of_group in due.items():
        if groups <= MAX_DUE_GROUPS and nbytes <= MAX_DUE_BYTES:
            return
        if group in run.deliveries.held:
            continue
        nbytes -= sum(one.nbytes for one in of_group)
        groups -= 1
        _end(core, run, of_group, DeliveryStep.DROP, _TOO_MANY)


def _end(core: Core, run: ActiveRun, some: list[Delivery], step: DeliveryStep, reason: str) -> None:
    for one in some:
        one.transition(step)
        del run.deliveries.by_id[one.id]
        core.count(f"deliveries_{one.status.value}")
        core.record(rec.DeliveryEnded(one.id, one.status.value, reason, core.now))


# ---------------------------------------------------------------- to the trainer


def want(core: Core, run: ActiveRun, body: WantDeliveries) -> ReplyBody:
    """The run's trainer wants groups for a step, and says which it has."""
    if not run.settings.episodes_of:
        return Denied("invalid", f"run {run.name!r} takes no other run's episodes", "set data.episodes_of")
    run.deliveries.wanted, run.deliveries.held = body, set(body.have)
    run.deliveries.over_sent = False
    send(core, run)
    return Ok()


def send(core: Core, run: ActiveRun) -> None:
    """Send what is due, is young enough for the step and was not sent, as far as it is wanted. Durable by then.

    Once the step was taken nothing is sent for it: it would be trained in a later one, for which it may be too old.
    """
    mine = run.deliveries
    if mine.wanted is None or run.trainer.conn is None:
        return
    most = mine.wanted.count if mine.wanted.step > run.progress.last_committed else 0
    for group, some in mine.due().items():
        if group in mine.held:
            continue
        oldest = min(one.version for one in some)
        if why := staleness.fault(run, mine.wanted.step, oldest):
            _end(core, run, some, DeliveryStep.EXPIRE, why)
        elif len(mine.held) < most:
            mine.held.add(group)
            core.send_durable(run.trainer.conn, _message(group, some))
    tell_over(core, run)


def tell_over(core: Core, run: ActiveRun) -> None:
    """The run that plays has ended: tell the trainer, once, when it has all that is due or does not want it."""
    mine, source = run.deliveries, core.runs.get(run.settings.episodes_of)
    if source is not None and source.owner_key != run.owner_key:
        return  # of another owner, who took the name: nothing of it is said
    if mine.wanted is None or mine.over_sent or run.trainer.conn is None:
        return
    if (
        source is None
        or not source.ended
        or (mine.due().keys() - mine.held and len(mine.held) < mine.wanted.count)
    ):
        return
    mine.over_sent = True
    why = f"run {source.name!r}, which plays the episodes, has ended"
    core.send_durable(run.trainer.conn, EpisodesOver(source.name, why))


def _message(group: int, some: list[Delivery]) -> DeliveredGroup:
    first = some[0]
    return DeliveredGroup(
        group,
        first.source,
        first.step,
        first.prompt_index,
        tuple(
            DeliveredEpisode(one.id, one.episode, one.index, one.reward, one.version, one.rows)
            for one in some
        ),
    )


# ---------------------------------------------------------------- taken by a step


def commit_fault(run: ActiveRun, body: CommitStep) -> str:
    """Why a step cannot be taken with its deliveries; "" where it can."""
    named = {one.sample_id for one in body.deliveries}
    if len(named) != len(body.deliveries):
        return f"step {body.step} names a delivery twice"
    groups = set()
    for outcome in body.deliveries:
        found = run.deliveries.by_id.get(outcome.sample_id)
        if found is None or found.status is not DeliveryStatus.DUE:
            return f"delivery {outcome.sample_id} is not due to run {run.name!r}"
        if outcome.outcome not in TAKEN or body.purpose != "train":
            return f"delivery {outcome.sample_id} cannot be {outcome.outcome!r}"
        groups.add(found.group)
    whole = {
        one.id
        for one in run.deliveries.by_id.values()
        if one.group in groups and one.status is DeliveryStatus.DUE
    }
    return f"step {body.step} has a part of a delivered group" if whole != named else ""


def settle(core: Core, run: ActiveRun, body: CommitStep) -> None:
    """The step was taken with these."""
    for outcome in body.deliveries:
        one = run.deliveries.by_id[outcome.sample_id]
        one.transition(DeliveryStep.TAKE)
        del run.deliveries.by_id[one.id]  # the ledger has it: the next checkpoint may be far
        run.deliveries.held.discard(one.group)
        reason = outcome.reason if redaction.is_known(outcome.reason) else redaction.OTHER
        core.record(
            rec.DeliveryTaken(
                one.id,
                outcome.outcome,
                reason if outcome.reason else "",
                body.step,
                run.attempt,
                outcome.advantage,
                core.now,
            ),
            *(rec.DeliveredTurnTaken(turn, advantage) for turn, advantage in _advantages(one, outcome)),
        )


def _advantages(one: Delivery, outcome: DeliveryOutcome) -> list[tuple[int, float]]:
    """By group, what turns of the delivery had in the step: the mean, of several completions. What is no turn of it is left out."""
    groups = {turn.number: turn.group for row in one.rows for turn in row.turns if turn.group}
    found: dict[int, list[float]] = {}
    for turn in outcome.turns:
        if turn.number in groups:
            found.setdefault(groups[turn.number], []).append(turn.advantage)
    return [(group, math.fsum(some) / len(some)) for group, some in found.items()]


def resumed(run: ActiveRun) -> None:
    """A new attempt begins: its trainer has nothing yet."""
    mine = run.deliveries
    mine.wanted, mine.held, mine.over_sent = None, set(), False


def taken_back(core: Core, run: ActiveRun, taken: Iterable[rec.DeliveryState]) -> None:
    """What steps took that the attempt takes back is due again. A group of which the ledger's reader left rows out, which are beyond
    `MAX_DUE_BYTES`, is dropped."""
    beyond: dict[int, list[Delivery]] = {}
    for row in taken:
        one = _restored(row)
        one.transition(DeliveryStep.RESTORE_TAKEN)
        one.transition(DeliveryStep.REOPEN)
        run.deliveries.by_id[one.id] = one
        core.record(
            rec.DeliveryReopened(one.id, run.attempt, core.now),
            *(rec.DeliveredTurnTaken(turn, None) for turn in _earned(one.rows) if turn),
        )
        if not one.rows:
            beyond[one.group] = []
    for one in run.deliveries.by_id.values():
        if one.group in beyond:
            beyond[one.group].append(one)
    for some in beyond.values():
        _end(core, run, some, DeliveryStep.DROP, _TOO_MANY)
    _bound(core, run)


def closed(core: Core, run: ActiveRun, reason: str) -> None:
    """The run has ended: what was due to it is dropped, and those that take its episodes are told."""
    due = [one for one in run.deliveries.by_id.values() if one.status is DeliveryStatus.DUE]
    _end(core, run, due, DeliveryStep.DROP, reason)
    for other in core.runs.values():
        if other.settings.episodes_of == run.name and not other.ended:
            tell_over(core, other)


# ---------------------------------------------------------------- restored


def restore(core: Core, runs: Mapping[int, ActiveRun], snapshot: rec.Snapshot) -> None:
    """What the ledger has of runs that have not ended."""
    core.next_delivery_id = snapshot.next_delivery_id
    for row in snapshot.deliveries:
        run = runs.get(row.run_id)
        if run is None or run.ended:
            continue
        one = run.deliveries.by_id[row.delivery_id] = _restored(row)
        one.transition(DeliveryStep.DELIVER)
        run.deliveries.held.add(one.group)  # its trainer may have it, until it says what it has


def _restored(row: rec.DeliveryState) -> Delivery:
    return Delivery(
        row.delivery_id,
        row.group,
        row.source,
        row.step,
        row.prompt_index,
        row.episode_index,
        row.episode,
        row.reward,
        row.version,
        msgspec.msgpack.decode(row.rows, type=tuple[DeliveredRow, ...]) if row.rows else (),
    )

"""Episodes and their turns: what a gateway asks for outside of any step. Pure; every call may be repeated.

    OpenTurn -> Episode (made by its first turn) -> Group with a `Turn` -> Samples -> place -> leases, chunks, commits as of any sample
                                                                                  `samples.stream` -> TurnTokens, durable ones only

A turn is a group of samples: leased singly, fenced by epochs, durable before it is shown, and moved with all its tokens when an engine
is lost. What differs from a step's group: no trainer owns it, so attempts do not touch it; it waits in a queue of its own, which goes
before the samples of steps, and no policy plans it; and it is known by its request, so that the same one is generated once, for as long
as its episode is open.

Boundary: a gateway's calls, beside a trainer's and a worker's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from scavenger.ledger import records as rec
from scavenger.ledger import redaction
from scavenger.policy import affinity
from scavenger.policy.affinity import Placed
from scavenger.protocol.messages import (
    TURN,
    AnswerTool,
    AskTool,
    CommitStep,
    Denied,
    EndEpisode,
    EpisodeOutcome,
    GatewayPing,
    Ok,
    OpenTurn,
    Pong,
    ReplyBody,
    TurnAccepted,
    TurnOutcome,
)
from scavenger.router.core import decision_log, deliveries, episode_budget, samples, staleness, tools
from scavenger.router.core.prefixes import Parent, Point
from scavenger.router.core.state import (
    ActiveRun,
    CachedAt,
    Episode,
    EpisodeBudget,
    EpisodeSpent,
    Group,
    Sample,
    Turn,
    Worker,
    ancestors,
)
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import UNFINISHED, EpisodeStatus, EpisodeStep, SampleStatus, SampleStep

#: `groups.purpose` of a turn.
PURPOSE = TURN
#: Of a run: each is a row and lies in memory.
MAX_OPEN_EPISODES = 65_536
MAX_TURNS = 200_000
MAX_EPISODE_TURNS = 4096
#: Samples that are not done, of an episode and of a run, and bytes of the prompts that they are generated from.
MAX_EPISODE_SAMPLES, MAX_OPEN_SAMPLES = 4096, 65_536
MAX_EPISODE_PROMPT_BYTES, MAX_OPEN_PROMPT_BYTES = 256 << 20, 1 << 30
#: Names of ended episodes that are kept, of a run that is open: their requests are refused, not generated again.
MAX_ENDED_EPISODES = 65_536
#: Of a turn: how many engines that have something of it are looked at.
MAX_HOLDERS = 4
#: Connections that follow one turn: a gateway that connected again, or another one that was asked the same.
MAX_FOLLOWERS = 4
#: A turn whose weights no engine has and nobody can give out is given up after this time (s): a trainer that restarts announces again.
UNSERVED_S = 120.0
#: Engines stay requested for the most samples that were open at once within this time (s): agents wait for their tools between turns.
DEMAND_HOLD_S = 120.0


def called(
    core: Core, conn: int, run: ActiveRun, body: OpenTurn | AskTool | AnswerTool | EndEpisode | GatewayPing
) -> ReplyBody:
    """Answer a gateway's call."""
    if isinstance(body, GatewayPing):
        return Pong(core.generation)
    if isinstance(body, EndEpisode):
        episode = run.turns.episodes.get(body.episode)
        if episode is None and body.episode not in run.turns.ended and not run.ended:
            if not run.turns.ended_known:
                return _being_opened(run)
            episode = _begin(
                core, run, body.episode
            )  # its first turn may still be under way: it must find it ended
        if episode is not None:
            _end(core, run, episode, "ended", "its gateway ended it")
        return Ok()
    if isinstance(body, AskTool | AnswerTool):
        return _tool(core, run, body)
    if body.policy:
        return _turn_of_policy(core, conn, run, body)
    player = deliveries.player_of(core, run)
    if player is None or body.episode not in player.turns.episodes:
        player = run
    return _open_turn(core, conn, player, run, body)


# ---------------------------------------------------------------- asked for


def _tool(core: Core, run: ActiveRun, body: AskTool | AnswerTool) -> ReplyBody:
    refusal = _over(run, body.episode)
    if refusal is not None:
        return refusal
    episode = run.turns.episodes.get(body.episode)
    if episode is None:
        if len(run.turns.episodes) >= MAX_OPEN_EPISODES:
            return _too_many_episodes()
        episode = _begin(core, run, body.episode)
    if isinstance(body, AskTool):
        return tools.asked(core, run, episode, body)
    return tools.answered(core, run, episode, body)


def _over(run: ActiveRun, episode: str) -> Denied | None:
    if run.ended or run.stopped:
        why = f"the run is over: {run.stopped}" if run.stopped else "the run has ended"
        return Denied("invalid", why, run.stop_remedy or "open the run again")
    if not run.turns.ended_known:
        return _being_opened(run)
    if episode in run.turns.ended:
        return Denied("ended", f"episode {episode!r} has ended", "begin another episode")
    return None


def _being_opened(run: ActiveRun) -> Denied:
    return Denied("full", f"run {run.name!r} is being opened again", "try again when its trainer has begun")


def _too_many_episodes() -> Denied:
    return Denied("full", f"over {MAX_OPEN_EPISODES:,} episodes are open", "end those that are over")


def _turn_of_policy(core: Core, conn: int, run: ActiveRun, body: OpenTurn) -> ReplyBody:
    """A turn of an agent for which another run answers: of that run's own episode of this name, on its engines."""
    other = deliveries.other_run(core, run, body.policy)
    if isinstance(other, Denied):
        core.count("turns_refused")
        return other
    if (refusal := _over(run, body.episode)) is not None:
        return refusal
    if body.episode not in run.turns.episodes:  # what it ends with is this run's to say
        if len(run.turns.episodes) >= MAX_OPEN_EPISODES:
            return _too_many_episodes()
        _begin(core, run, body.episode)
    return _open_turn(core, conn, run, other, body)


def _open_turn(core: Core, conn: int, player: ActiveRun, run: ActiveRun, body: OpenTurn) -> ReplyBody:
    """`player`: the run whose episode it is, which has its budget; `run` generates."""
    episode = run.turns.episodes.get(body.episode)
    group = episode.turns.get(body.request) if episode is not None else None
    if group is None:
        refusal = _fault(run, episode, body)
        if refusal is not None:
            core.count("turns_refused")
            return refusal
        most_tokens = _within_budget(core, player, body)
        if isinstance(most_tokens, Denied):
            core.count("turns_refused")
            return most_tokens
        episode = episode or _begin(core, run, body.episode)
        group = _make(core, run, episode, body, most_tokens)
        known = False
    else:
        known = True
    turn = group.turn
    assert turn is not None
    if turn.content != body.content:
        why = f"turn {turn.number} of episode {body.episode!r} had this request's name and asked for something else"
        return Denied("conflict", why, "give each request a name of its own, or repeat it unchanged")
    turn.followers.pop(conn, None)
    turn.followers[conn] = None
    if len(turn.followers) > MAX_FOLLOWERS:
        turn.followers.popitem(last=False)
    if known:
        core.count("turns_repeated")
        for sample in group.samples:
            have = body.have[sample.index] if sample.index < len(body.have) else 0
            samples.stream(core, sample, min(have, sample.durable), conn)
    return TurnAccepted(group.id, turn.number, known, turn.prompt_sha256, turn.prompt_tokens)


def _fault(run: ActiveRun, episode: Episode | None, body: OpenTurn) -> Denied | None:
    """Why a new turn is not made."""
    if (refusal := _over(run, body.episode)) is not None:
        return refusal
    if not run.weights.versions:
        return Denied("full", "no weights are published yet", "try again when the run's trainer has begun")
    length = len(body.prompt) // 4
    if len(body.prompt) % 4 or not length:
        return Denied("invalid", "a prompt without tokens", "send at least one token")
    if length + body.sampling.max_tokens > run.engine.context_length:
        why = (
            f"a prompt of {length} tokens that may grow by {body.sampling.max_tokens}, "
            f"over the engine's context of {run.engine.context_length}"
        )
        return Denied("invalid", why, "lower max_tokens, or shorten the prompt")
    if episode is None and len(run.turns.episodes) >= MAX_OPEN_EPISODES:
        return _too_many_episodes()
    if episode is not None and len(episode.turns) >= MAX_EPISODE_TURNS:
        return Denied(
            "full", f"episode {body.episode!r} has {MAX_EPISODE_TURNS:,} turns", "begin another one"
        )
    if run.turns.groups >= MAX_TURNS:
        return Denied("full", f"over {MAX_TURNS:,} turns are kept", "end the episodes that are over")
    for held, what, most_samples, most_bytes in (
        (
            episode.turns.values() if episode else (),
            "the episode",
            MAX_EPISODE_SAMPLES,
            MAX_EPISODE_PROMPT_BYTES,
        ),
        (run.turns.open.values(), "the run", MAX_OPEN_SAMPLES, MAX_OPEN_PROMPT_BYTES),
    ):
        if body.n + sum(group.unfinished for group in held) > most_samples:
            return Denied(
                "full", f"over {most_samples:,} samples of {what} are open", "wait for some of them"
            )
        if len(body.prompt) + sum(len(group.prompt) for group in held) > most_bytes:
            why = f"over {most_bytes >> 20:,} MiB of prompts of {what} are open"
            return Denied("full", why, "wait for some of them")
    return None


def _within_budget(core: Core, player: ActiveRun, body: OpenTurn) -> int | Denied:
    """The most tokens that each sample of a new turn may have, or why the episode has no further turn."""
    budget, asked = player.settings.budget, body.sampling.max_tokens
    if budget == EpisodeBudget():
        return asked
    episode = player.turns.episodes.get(body.episode)
    parts = (one.turns.episodes.get(body.episode) for one in (player, *deliveries.others_of(core, player)))
    groups = (group for part in parts if part is not None for group in part.turns.values())
    spent = episode_budget.spent_by(groups, episode.spent if episode is not None else EpisodeSpent())
    age_s = core.now - episode.begun_at if episode is not None else 0.0
    return episode_budget.tokens_left_for(budget, body.episode, spent, age_s, body.n, asked)


def _begin(core: Core, run: ActiveRun, name: str) -> Episode:
    episode = run.turns.episodes[name] = Episode(core.next_episode_id, name, core.now)
    core.next_episode_id += 1
    episode.transition(EpisodeStep.OPEN)
    core.record(rec.EpisodeBegun(episode.id, run.id, name, core.now))
    return episode


def _make(core: Core, run: ActiveRun, episode: Episode, body: OpenTurn, most_tokens: int) -> Group:
    version = max(run.weights.versions)
    episode.numbers += 1
    read, points, parent = episode.prefixes.read(body.prompt)
    turn = Turn(episode, episode.numbers, body.request, body.content, read.end().digest, read.length, parent)
    sampling = msgspec.structs.replace(
        body.sampling, max_tokens=most_tokens, min_tokens=min(body.sampling.min_tokens, most_tokens)
    )
    group = Group(
        core.next_group_id,
        run,
        PURPOSE,
        run.progress.newest[1],
        core.next_group_id,
        0,
        version,
        run.weights.versions[version].root,
        body.prompt,
        "{}",
        sampling,
        turn=turn,
    )
    core.next_group_id += 1
    first = core.next_sample_id
    core.next_sample_id += body.n
    for index in range(body.n):
        sample = Sample(first + index, group, index)
        group.add(sample)
        sample.transition(SampleStep.QUEUE)
        core.samples[sample.id] = sample
        run.turns.queue.add(sample)
        turn.hashes[index] = read.copy()
    episode.prefixes.add(first, points)
    core.groups[group.id] = episode.turns[body.request] = run.turns.open[group.id] = group
    run.turns.groups += 1
    core.count("turn_prompt_tokens", turn.prompt_tokens)
    core.count("turn_prompt_tokens_shared", parent.length)
    core.record(
        rec.GroupCreated(
            group.id,
            run.id,
            PURPOSE,
            group.step,
            group.prompt_index,
            0,
            version,
            body.prompt[4 * parent.length :],
            body.n,
            first,
            msgspec.json.encode(sampling).decode(),
            group.meta,
            core.now,
        ),
        rec.TurnBegun(
            group.id,
            episode.id,
            run.id,
            turn.number,
            body.request,
            body.content,
            parent.sample_id,
            parent.length,
            turn.prompt_tokens,
            turn.prompt_sha256,
            core.now,
        ),
    )
    return group


# ---------------------------------------------------------------- placed


class Placement(NamedTuple):
    """What becomes of a sample that waits, and the version that it is generated with."""

    sample: Sample
    version: int
    chosen: Placed


def placements(core: Core, run: ActiveRun, now: float) -> list[Placement]:
    """Samples of turns that a worker takes now, and those that are worth keeping for one that has their prefix (`chosen.waits`).

    A turn that has no token yet takes the newest version that a worker with a free slot serves; one that has keeps its own (I4), also on
    a worker that is to load other weights, where no other serves it.
    """
    if not run.turns.queue or run.stopped or run.ended:
        return []
    serving: dict[int, list[Worker]] = {}
    ending: dict[int, list[Worker]] = {}  # by workers that finish what was begun, and load other weights
    for worker in run.workers.values():
        if samples.servable(worker, worker.weights.loaded):
            of = ending if worker.weights.switches else serving
            of.setdefault(worker.weights.loaded, []).append(worker)
    begun = {v: ws for v, ws in ending.items() if v not in serving}
    free, free_for_begun = (
        {v: sum(len(w.leases) < w.most_leases for w in ws) for v, ws in some.items()}
        for some in (serving, begun)
    )
    if not any(free.values()) and not any(free_for_begun.values()):
        return []  # before what waits is sorted
    wanted: dict[int, list[Sample]] = {}
    chosen: dict[int, int] = {}  # group -> version
    for sample in _in_order(run):
        group = sample.group
        version = chosen.get(group.id)
        if version is None:
            version = group.version
            if version not in serving and _unbegun(group):
                version = max((v for v, n in free.items() if n), default=version)
            chosen[group.id] = version
        if free.get(version) or (free_for_begun.get(version) and not _unbegun(group)):
            wanted.setdefault(version, []).append(sample)
    found = []
    for version, some in sorted(wanted.items()):
        engines = _engines(run, serving.get(version) or begun[version])
        by_id = {s.id: s for s in some}
        for placed in affinity.place((_waiting(core, s, now) for s in some), engines, run.turns.speeds):
            found.append(Placement(by_id[placed.sample_id], version, placed))
    return found


def _in_order(run: ActiveRun) -> list[Sample]:
    """What waits, in the order in which it is placed: samples with tokens, then those of episodes that have the fewest samples on engines
    and before them in the queue. So one episode that asks for thousands holds up itself.
    """
    ahead: dict[int, int] = {}  # episode -> its samples on engines, and those that come before
    for group in run.turns.open.values():
        assert group.turn is not None
        on_engines = sum(sample.worker_id != 0 for sample in group.samples)
        ahead[group.turn.episode.id] = ahead.get(group.turn.episode.id, 0) + on_engines
    ordered: list[tuple[bool, int, int, Sample]] = []
    for sample in run.turns.queue.waiting():
        assert sample.group.turn is not None
        episode = sample.group.turn.episode.id
        rank = ahead[episode] = ahead.get(episode, 0) + 1
        ordered.append((sample.accepted == 0, rank if sample.accepted == 0 else 0, sample.id, sample))
    return [entry[-1] for entry in sorted(ordered, key=lambda entry: entry[:3])]


def _engines(run: ActiveRun, serving: list[Worker]) -> list[affinity.Engine]:
    """The engines by how fast turns were on them of late. One that holds nothing is as fast as the fastest that was measured.

    Not by their heartbeats: most of a turn that takes a second or two lies between two of them, and is in no rate.
    """
    measured = {w.id: w.engine.turn_token_s for w in serving if w.leases and w.engine.turn_token_s > 0}
    fastest = min(measured.values(), default=0.0)
    return [
        affinity.Engine(
            w.id, len(w.leases), w.most_leases, w.place, measured.get(w.id, 0.0) if w.leases else fastest
        )
        for w in serving
    ]


def _waiting(core: Core, sample: Sample, now: float) -> affinity.Waiting:
    turn = sample.group.turn
    assert turn is not None
    since = sample.group.run.turns.queue.held_since.get(sample.id, now)
    context = turn.prompt_tokens + sample.accepted
    return affinity.Waiting(
        sample.id, context, max(0.0, now - since), _cached(core, turn), sample.failed_nodes
    )


def _cached(core: Core, turn: Turn) -> list[tuple[int, int]]:
    """(worker, tokens): who is believed to have how much of the turn's prompt cached, of its nearest ancestors."""
    found: dict[int, int] = {}
    for sample, length in ancestors(core.samples, turn):
        if len(found) >= MAX_HOLDERS:
            break
        before = sample.group.turn
        at = before.cached_at.get(sample.index) if before is not None else None
        worker = core.workers.get(at.worker_id) if at is not None else None
        if at is not None and worker is not None and _has_still(worker, at, length):
            found.setdefault(worker.id, length)
    return list(found.items())


def _has_still(worker: Worker, at: CachedAt, tokens: int) -> bool:
    """Whether a cache that forgets what was used longest ago has these tokens yet. One of unknown size forgets nothing."""
    size = worker.engine.cache_tokens
    return worker.cache_era == at.era and (not size or worker.engine.entered - at.entered + tokens <= size)


def _unbegun(group: Group) -> bool:
    return all(s.status is SampleStatus.QUEUED and not s.accepted for s in group.samples)


def switch_busy_workers(core: Core, run: ActiveRun) -> None:
    """Have some workers finish the turns that they hold and take no other, so that they load what is wanted next."""
    for worker in staleness.to_switch_after_turns(run, run.cached.target, core.now):
        worker.weights.switches = True
        run.cached.serving = None
        run.due.changed_workers.append(worker)


def place(core: Core, run: ActiveRun) -> None:
    """Lease what can be leased now. A lease is sent once it is durable."""
    batches: dict[int, list[Sample]] = {}
    found = placements(core, run, core.now)
    fresh = []  # that begin to wait for a cache
    kept = run.turns.queue.held_since
    for sample, version, chosen in found:
        if chosen.waits:
            if sample.id not in kept:
                kept[sample.id] = core.now
                fresh.append(chosen)
            continue
        if sample.group.version != version:
            _pin(core, run, sample.group, version)
        run.turns.queue.discard(sample)
        turn = sample.group.turn
        assert turn is not None
        turn.found_cached[sample.index] = chosen.cached if chosen.worker_id == chosen.holder_id else 0
        batches.setdefault(chosen.worker_id, []).append(sample)
    for worker_id, batch in batches.items():
        samples.lease(core, core.workers[worker_id], batch)
    decision_log.routed(core, run, [p.chosen for p in found if not p.chosen.waits], fresh)


def _pin(core: Core, run: ActiveRun, group: Group, version: int) -> None:
    """A turn that has no token yet is generated with another version."""
    waiting = [sample for sample in group.samples if sample.id in run.turns.queue]
    for sample in waiting:
        run.turns.queue.discard(sample)
    group.version, group.root = version, run.weights.versions[version].root
    for sample in waiting:
        run.turns.queue.add(sample)
    core.record(rec.GroupAdopted(group.id, version, core.now))


def published(core: Core, run: ActiveRun, version: int) -> None:
    """New weights: turns that wait and have no token are generated with them."""
    for group in list(run.turns.open.values()):
        if group.version < version and _unbegun(group):
            _pin(core, run, group, version)


def watch(core: Core, run: ActiveRun) -> None:
    """Give up turns that wait, of which a sample has tokens of weights that are gone: another version may not go on with them (I4). Asked
    for again, such a request is another turn."""
    if not run.turns.queue:
        return
    waiting = {group.id: group for group in run.turns.queue.groups() if not _unbegun(group)}
    held = {worker.weights.loaded for worker in run.workers.values() if worker.most_leases}
    for group in waiting.values():
        turn = group.turn
        assert turn is not None
        if group.version in held or run.weights.available(group.version):
            turn.unserved_since = None
        elif turn.unserved_since is None:
            turn.unserved_since = core.now
        elif core.now - turn.unserved_since > UNSERVED_S:
            why = f"weights of version {group.version}, which began it, are gone: ask again"
            core.event("turn_given_up", run.id, f"turn {group.id}", why)
            _give_up(core, group, why)
            samples.forget(core, group)
            del turn.episode.turns[turn.request]
            run.turns.groups -= 1


def engines(run: ActiveRun, now: float) -> tuple[int, str]:
    """How many engines the turns can use, by the most samples that were open at once of late, and why."""
    held, now_open = run.turns, sum(group.unfinished for group in run.turns.open.values())
    if now_open >= held.peak or now - held.peak_at > DEMAND_HOLD_S:
        held.peak, held.peak_at = now_open, now
    wanted = -(-held.peak // max(1, run.engine.max_batch))
    return wanted, f"{held.peak} samples of turns were open within {DEMAND_HOLD_S:g} s"


# ---------------------------------------------------------------- taken by a step


def asked(run: ActiveRun) -> bool:
    """Whether a gateway has asked for anything. Its trainer may take steps with what others asked for, of which it names nothing."""
    return bool(run.turns.episodes or run.turns.ended)


def committed(run: ActiveRun, body: CommitStep) -> bool:
    """Whether this very commit was made: its episodes have ended."""
    return all(one.episode in run.turns.ended for one in body.episodes)


def commit_fault(run: ActiveRun, body: CommitStep, allowed: tuple[str, ...]) -> str:
    """Why a step cannot be taken with its episodes; "" where it can."""
    if body.episodes and not run.turns.ended_known:
        return f"step {body.step} names episodes, and the run is closed"
    names = {one.episode for one in body.episodes}
    if len(names) != len(body.episodes):
        return f"step {body.step} names an episode twice"
    for one in body.episodes:
        if one.outcome not in allowed:
            return f"episode {one.episode!r} cannot be {one.outcome!r}"
        if one.episode in run.turns.ended:
            return f"episode {one.episode!r} has ended, and was not taken by step {body.step}"
        episode = run.turns.episodes.get(one.episode)
        known = episode.turns if episode is not None else {}
        for request in one.used:
            if request not in known or not all(
                s.status is SampleStatus.COMPLETE for s in known[request].samples
            ):
                return f"episode {one.episode!r} names a turn that it does not have, or not whole"
    return ""


def samples_taken(run: ActiveRun, taken: EpisodeOutcome) -> dict[bytes, list[Sample]]:
    """The samples of the turns that a step takes, as `deliveries.samples_by_end`."""
    episode = run.turns.episodes.get(taken.episode)
    return deliveries.samples_by_end(episode, taken.used) if episode is not None else {}


def _rewarded_by(
    core: Core, run: ActiveRun, episode: Episode, taken: EpisodeOutcome
) -> dict[int, TurnOutcome]:
    """By sample, what its turn earned. What fits no turn is left out, and an event says so: a step does not fail for it."""
    by_end = deliveries.samples_by_end(episode, taken.used)
    found: dict[int, TurnOutcome] = {}
    earned: dict[int, float] = {}  # by group: of all completions of a turn together
    for one in taken.turns:
        if (sample := deliveries.take_sample(by_end, one.turn)) is not None:
            found[sample.id] = one
            earned[sample.group.id] = earned.get(sample.group.id, 0.0) + one.reward
    core.record(*(rec.TurnRewarded(group, reward) for group, reward in earned.items()))
    if left := len(taken.turns) - len(found):
        why = f"{left} of {len(taken.turns)} rewards are of no turn that the step took"
        core.event("turn_rewards_left_out", run.id, f"episode {episode.name}", why)
    return found


def settle(core: Core, run: ActiveRun, step: int, taken: EpisodeOutcome) -> None:
    """The episode ends with the step that took it; one that asked for no turn is in the ledger all the same, with its reason."""
    episode = run.turns.episodes.get(taken.episode) or _begin(core, run, taken.episode)
    reason = redaction.reason(taken.outcome, taken.reason)
    own = _rewarded_by(core, run, episode, taken)
    for request in taken.used:
        for sample in episode.turns[request].samples:
            sample.transition(SampleStep.END)
            version = redaction.version(taken.reward_version)
            core.record(
                rec.SampleEnded(
                    sample.id,
                    taken.outcome,
                    reason,
                    step,
                    run.attempt,
                    taken.reward,
                    own[sample.id].advantage if sample.id in own else taken.advantage,
                    core.now,
                    version,
                )
            )
    _end(
        core, run, episode, "ended", reason or taken.outcome, used=frozenset(taken.used), worker=taken.worker
    )


# ---------------------------------------------------------------- over


def _end(
    core: Core,
    run: ActiveRun,
    episode: Episode,
    state: str,
    reason: str,
    used: frozenset[bytes] | None = None,
    worker: str = "",
) -> None:
    """Give up what is open of the episode, and forget what the ledger has of it. `used`: turns that a step took, which have ended; what
    else it has is surplus.
    """
    episode.transition(EpisodeStep.END)
    _keep_spent(core, run, episode)
    for request, group in episode.turns.items():
        if used is None or request not in used:
            _give_up(core, group, reason, "served" if used is None else "surplus")
        samples.forget(core, group)
    run.turns.groups -= len(episode.turns)
    episode.turns.clear()
    tools.forget(run, episode)
    del run.turns.episodes[episode.name]
    _note_ended(run, episode.name)
    core.record(rec.EpisodeEnded(episode.id, state, reason, core.now, worker))
    for other in deliveries.others_of(core, run):
        if (part := other.turns.episodes.get(episode.name)) is not None:
            _end(core, other, part, state, f"run {run.name} ended the episode", worker=worker)


def _keep_spent(core: Core, run: ActiveRun, part: Episode) -> None:
    """A policy's part is over, and its turns leave memory. Where the episode goes on, its budget stays as spent as it is."""
    player = deliveries.player_of(core, run)
    whole = player.turns.episodes.get(part.name) if player is not None else None
    if player is None or whole is None or not part.turns:
        return
    if any(one is run for one in deliveries.others_of(core, player)):
        whole.spent = episode_budget.spent_by(part.turns.values(), whole.spent)
        core.record(rec.EpisodeSpent(whole.id, whole.spent.turns, whole.spent.tokens))


def _give_up(core: Core, group: Group, reason: str, whole: str = "served") -> None:
    """End the turn's samples, whole or not; its followers are told of those that have no end. `whole`: what becomes of whole ones."""
    for sample in group.samples:
        if sample.status is SampleStatus.COMPLETE:
            sample.transition(SampleStep.END)
            core.record(rec.SampleEnded(sample.id, whole, reason, 0, 0, None, None, core.now))
        elif sample.status is not SampleStatus.ENDED:
            samples.abandon(core, sample, "surplus", reason)
            sample.give_up(reason)
            samples.stream(core, sample, sample.durable)


def _note_ended(run: ActiveRun, name: str) -> None:
    run.turns.ended[name] = None
    if len(run.turns.ended) > MAX_ENDED_EPISODES:
        run.turns.ended.popitem(last=False)


def end_all(core: Core, run: ActiveRun, reason: str) -> None:
    """The run is over, and its episodes with it. Their names stay in the ledger: who opens the run again reads them."""
    for episode in list(run.turns.episodes.values()):
        _end(core, run, episode, "stopped", reason)
    run.turns.ended.clear()
    run.turns.ended_known = False


def names_wanted(run: ActiveRun) -> int:
    """Of how many episodes that ended the names are to be read before any is begun."""
    return 0 if run.turns.ended_known else MAX_ENDED_EPISODES


def names_read(run: ActiveRun, ended: Iterable[str]) -> None:
    """The ledger's names of episodes that ended, the newest last, are here: the run may have new ones."""
    if run.turns.ended_known:
        return
    for name in ended:
        _note_ended(run, name)
    run.turns.ended_known = True


# ---------------------------------------------------------------- restored


def restore_episodes(core: Core, runs: Mapping[int, ActiveRun], snapshot: rec.Snapshot) -> dict[int, Turn]:
    """The episodes that the ledger has, and by group id the turns of those that are open."""
    by_id: dict[int, Episode] = {}
    for state in snapshot.episodes:
        run = runs.get(state.run_id)
        if run is None or run.ended:
            continue
        episode = Episode(
            state.episode_id,
            state.name,
            state.begun_at,
            delivered=bool(state.delivered),
            spent=EpisodeSpent(state.spent_turns, state.spent_tokens),
        )
        if state.state == "open":
            episode.transition(EpisodeStep.OPEN)
            run.turns.episodes[state.name] = by_id[state.episode_id] = episode
        else:
            episode.transition(EpisodeStep.RESTORE_ENDED)
            _note_ended(run, state.name)
    tools.restore(runs, by_id, snapshot)
    for begun in snapshot.turns:
        if begun.episode_id in by_id:
            by_id[begun.episode_id].numbers = max(by_id[begun.episode_id].numbers, begun.number)
    return {
        begun.group_id: Turn(
            by_id[begun.episode_id],
            begun.number,
            begun.request,
            begun.content,
            begun.prompt_sha256,
            begun.prompt_tokens,
            Parent(begun.parent_id, begun.prefix_len),
        )
        for begun in snapshot.turns
        if begun.episode_id in by_id
    }


def restore(
    core: Core, turn: Turn, group: Group, ends: Mapping[int, bytes], tokens: Mapping[int, bytes]
) -> None:
    """The turn's group is in the tables again. By sample id, `ends`: hashes of prompt and completion, of complete ones; `tokens`: what
    is accepted of those under way.
    """
    run, prefixes = group.run, turn.episode.prefixes
    assert turn.episode.status is EpisodeStatus.OPEN
    turn.episode.turns[turn.request] = group
    run.turns.groups += 1
    run.turns.open[group.id] = group
    prefixes.add(group.samples[0].id, (Point(turn.prompt_tokens, turn.prompt_sha256, True),))
    for sample in group.samples:
        if (digest := ends.get(sample.id)) is not None:
            turn.ends[sample.index] = digest
            prefixes.add(sample.id, (Point(turn.prompt_tokens + sample.accepted, digest, True),))
        elif sample.status in UNFINISHED:
            read, points, _ = prefixes.read(group.prompt)
            points += read.grow(tokens.get(sample.id, b""))
            assert read.length == turn.prompt_tokens + sample.accepted, (
                f"turn {group.id}: its tokens are not all here"
            )
            prefixes.add(sample.id, points)
            turn.hashes[sample.index] = read
    samples.settle(group)

"""A ledger in memory for a router on the bench, and one that is kept in SQLite as well.

It applies the core's records to plain rows and gives the snapshot that a restarted daemon reads; it holds what the real one holds and no
more, and refuses what a real ledger's audit would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

from scavenger.ledger import records as rec
from scavenger.ledger import store
from scavenger.ledger.read import reader
from scavenger.ledger.write import transaction
from scavenger.ledger.write.moves import MoveLog
from scavenger.router.core import deliveries
from scavenger.router.core.payloads import Payload
from scavenger.weights import manifest as manifests


@dataclass
class Row:
    """A sample's row."""

    group_id: int
    index: int
    state: str = "open"
    epoch: int = 0
    moves: int = 0
    tokens: bytes = b""
    logprobs: bytes = b""
    raw_logprobs: bytes = b""
    routing: bytes = b""
    finish: str = ""
    reward: float | None = None
    lease: tuple[int, int, int] | None = None
    step: int = 0
    attempt: int = 0
    reason: str = ""
    ends: list[str] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)


def plain(records: Iterable[rec.Record]) -> Iterator[rec.Record]:
    """The records, with a move as the end and the grant that it is."""
    for record in records:
        if isinstance(record, rec.LeaseMoved):
            yield rec.LeaseEnded(
                record.sample_id, record.epoch, record.reason, record.length, record.regenerated, record.at
            )
            yield rec.LeaseGranted(
                record.sample_id, record.epoch + 1, record.worker_id, record.version, record.length, record.at
            )
        else:
            yield record


class Ledger:
    """What commits leave behind. Refuses what a real ledger's audit would."""

    def __init__(self) -> None:
        self.runs: dict[int, dict[str, object]] = {}
        self.versions: list[rec.VersionPublished] = []
        self.groups: dict[int, rec.GroupCreated] = {}
        self.group_versions: dict[int, int] = {}
        self.samples: dict[int, Row] = {}
        self.episodes: dict[int, rec.EpisodeState] = {}
        self.deliveries: dict[int, rec.DeliveryState] = {}
        self.delivered_turns: dict[int, int] = {}  # turn -> its delivery
        self.delivered_advantages: dict[int, float] = {}  # turn -> its advantage in the step that took it
        self.turns: dict[int, rec.TurnBegun] = {}
        self.turn_rewards: dict[int, float] = {}
        self.turn_samples: dict[int, rec.TurnSampleFinished] = {}
        self.apart: dict[tuple[int, int, int], rec.DifferencesRecorded] = {}
        self.tool_calls: dict[int, rec.ToolCallState] = {}
        self.prompt_bytes = 0  # stored of turns' prompts
        self.workers: dict[int, rec.WorkerJoined] = {}
        self.delivered: dict[int, int] = {}
        self.taken: set[tuple[int, str, int]] = (
            set()
        )  # (run, purpose, step) of steps that were taken and not rewound
        self.events: list[rec.Event] = []
        self.log: list[rec.Record] = []
        self.consumed: dict[int, int] = {}  # sample -> times consumed and not reopened

    def apply(self, records: tuple[rec.Record, ...]) -> None:
        for record in plain(records):
            self.log.append(record)
            self._apply(record)

    def _apply(self, record: rec.Record) -> None:
        match record:
            case rec.RunCreated():
                assert record.run_id not in self.runs
                fresh = {
                    "created": record,
                    "attempt": 0,
                    "resume": 0,
                    "last": 0,
                    "config": "",
                    "engine": "",
                    "ended": False,
                }
                self.runs[record.run_id] = fresh
            case rec.AttemptGranted():
                run = self.runs[record.run_id]
                assert record.attempt == run["attempt"] + 1, "an attempt was granted twice"  # type: ignore[operator]
                run |= {
                    "attempt": record.attempt,
                    "resume": record.resume_step,
                    "config": record.config,
                    "engine": record.engine,
                }
                run |= {"ended": False, "job_id": record.job_id}
            case rec.StepsRewound():
                self.runs[record.run_id]["last"] = record.to_step
                self.taken = {t for t in self.taken if t[0] != record.run_id or t[2] <= record.to_step}
            case rec.RunEnded():
                self.runs[record.run_id]["ended"] = True
            case rec.VersionPublished():
                self.versions.append(record)
            case rec.StepCommitted():
                self.taken.add((record.run_id, record.purpose, record.step))
                if record.purpose == "train":
                    self.runs[record.run_id]["last"] = record.step
            case rec.GroupCreated():
                assert record.group_id not in self.groups
                self.groups[record.group_id], self.group_versions[record.group_id] = record, record.version
                for index in range(record.n):
                    assert record.first_sample_id + index not in self.samples
                    self.samples[record.first_sample_id + index] = Row(record.group_id, index)
            case rec.GroupAdopted():
                self.group_versions[record.group_id] = record.version
            case rec.GroupDeferred():
                made = self.groups[record.group_id]
                assert record.step == made.step + 1, "a group is put off by one step"
                self.groups[record.group_id] = msgspec.structs.replace(made, step=record.step)
            case rec.GroupDelivered():
                self.delivered[record.group_id] = record.attempt
            case rec.EpisodeBegun(episode_id=episode_id):
                assert episode_id not in self.episodes
                names = {e.name for e in self.episodes.values() if e.run_id == record.run_id}
                assert record.name not in names, "an episode of a name that an earlier one had"
                self.episodes[episode_id] = rec.EpisodeState(
                    episode_id, record.run_id, record.name, "open", record.at
                )
            case rec.EpisodeEnded(episode_id=episode_id):
                assert self.episodes[episode_id].state == "open", "an episode ended twice"
                self.episodes[episode_id] = msgspec.structs.replace(
                    self.episodes[episode_id], state=record.state
                )
            case rec.EpisodeSpent(episode_id=episode_id):
                assert self.episodes[episode_id].state == "open", "an episode that ended spends"
                self.episodes[episode_id] = msgspec.structs.replace(
                    self.episodes[episode_id], spent_turns=record.turns, spent_tokens=record.tokens
                )
            case rec.TurnBegun():
                assert self.episodes[record.episode_id].state == "open", "a turn of an episode that ended"
                for before in self.turns.values():
                    assert before.request != record.request or self._gone(before.group_id), (
                        "a turn was made twice"
                    )
                self.turns[record.group_id] = record
                assert sha256(self.prompt(record.group_id)).digest() == record.prompt_sha256, (
                    f"turn {record.group_id}: its prompt is not what is stored of it and of its parent"
                )
                assert len(self.prompt(record.group_id)) == 4 * record.prompt_tokens
                self.prompt_bytes += len(self.groups[record.group_id].prompt)
            case rec.Delivered():
                self._deliver(record)
            case rec.TurnDelivered(group_id=group_id):
                assert group_id not in self.delivered_turns, "a turn is delivered twice"
                delivery = self.deliveries[record.delivery_id]
                assert self.turns[group_id].run_id == delivery.run_id, "a turn is delivered to another policy"
                episode = self.episodes[self.turns[group_id].episode_id]
                assert episode.name == delivery.episode, "a turn of another episode"
                self.delivered_turns[group_id] = record.delivery_id
            case rec.DeliveryTaken():
                self._end_delivery(record.delivery_id, record.outcome, record.step)
            case rec.DeliveryReopened(delivery_id=delivery_id):
                found = self.deliveries[delivery_id]
                assert found.state in ("consumed", "filtered", "masked"), "what no step took is due again"
                self.deliveries[delivery_id] = msgspec.structs.replace(found, state="due", ended_step=0)
            case rec.DeliveredTurnTaken(group_id=group_id):
                assert group_id in self.delivered_turns, "an advantage of a turn that was not delivered"
                if record.advantage is None:
                    del self.delivered_advantages[group_id]
                else:
                    assert group_id not in self.delivered_advantages, "a delivered turn is trained twice"
                    self.delivered_advantages[group_id] = record.advantage
            case rec.DeliveryEnded():
                self._end_delivery(record.delivery_id, record.state, 0)
            case rec.ToolAsked():
                assert self.episodes[record.episode_id].state == "open", "a tool of an episode that ended"
                mine = (record.episode_id, record.call)
                for call in self.tool_calls.values():
                    assert (call.episode_id, call.call) != mine, "a tool is asked twice"
                self.tool_calls[record.call_id] = rec.ToolCallState(
                    record.call_id, record.episode_id, record.call, record.tool, record.asker, None
                )
            case rec.ToolAnswered(call_id=call_id):
                assert self.tool_calls[call_id].answer is None, "a tool's answer was replaced"
                self.tool_calls[call_id] = msgspec.structs.replace(
                    self.tool_calls[call_id], answer=record.answer
                )
            case rec.DifferencesRecorded():
                row = self.samples[record.sample_id]
                assert len(record.differences) == 2 * record.n_tokens == len(row.tokens) // 2
                trained = (record.sample_id, record.step, record.attempt)
                assert trained not in self.apart, "a sample's differences were recorded twice"
                self.apart[trained] = record
            case rec.TurnRewarded(group_id=group_id):
                assert group_id in self.turns
                self.turn_rewards[group_id] = record.reward
            case rec.TurnSampleFinished():
                row = self.samples[record.sample_id]
                assert row.state == "complete"
                assert sha256(self.prompt(row.group_id) + row.tokens).digest() == record.sha256, (
                    f"sample {record.sample_id}: the hash of another sequence"
                )
                assert record.sample_id not in self.turn_samples
                self.turn_samples[record.sample_id] = record
            case rec.WorkerJoined():
                assert record.worker_id not in self.workers
                self.workers[record.worker_id] = record
            case rec.WorkerLeft():
                del self.workers[record.worker_id]
            case rec.Event():
                self.events.append(record)
            case _:
                self._apply_sample(record)

    def _deliver(self, record: rec.Delivered) -> None:
        episode = self.episodes[record.episode_id]
        assert episode.run_id == record.run_id, "an episode of one policy is delivered to another"
        assert not episode.delivered, "an episode is delivered twice"
        self.episodes[record.episode_id] = msgspec.structs.replace(episode, delivered=True)
        source = self.runs[record.source_run_id]["created"]
        assert isinstance(source, rec.RunCreated)
        assert record.delivery_id not in self.deliveries
        self.deliveries[record.delivery_id] = rec.DeliveryState(
            record.delivery_id,
            record.run_id,
            source.name,
            record.group,
            record.step,
            record.prompt_index,
            record.episode_index,
            episode.name,
            record.reward,
            record.version,
            record.rows,
            record.state,
            0,
        )

    def _end_delivery(self, delivery_id: int, state: str, step: int) -> None:
        found = self.deliveries[delivery_id]
        assert found.state == "due", f"a delivery that is {found.state} is {state}"
        self.deliveries[delivery_id] = msgspec.structs.replace(found, state=state, ended_step=step)

    def prompt(self, group_id: int) -> bytes:
        """The whole prompt of a group, from what is stored."""
        turn, added = self.turns.get(group_id), self.groups[group_id].prompt
        if turn is None or not turn.parent_id:
            return added
        parent = self.samples[turn.parent_id]
        assert self.turns[parent.group_id].episode_id == turn.episode_id, "a parent of another episode"
        return (self.prompt(parent.group_id) + parent.tokens)[: 4 * turn.prefix_len] + added

    def _gone(self, group_id: int) -> bool:
        """Whether the turn was given up: what was whole of it was served."""
        states = {row.state for row in self.samples.values() if row.group_id == group_id}
        return "surplus" in states and states <= {"surplus", "served"}

    def _apply_sample(self, record: rec.Record) -> None:
        match record:
            case rec.LeaseGranted():
                row = self.samples[record.sample_id]
                assert row.lease is None, f"sample {record.sample_id} is leased twice"
                assert record.epoch == row.epoch + 1, (
                    f"sample {record.sample_id}: epoch {record.epoch} after {row.epoch}"
                )
                assert record.offset == len(row.tokens) // 4, (
                    f"sample {record.sample_id}: leased at another length than it has"
                )
                row.epoch, row.lease = record.epoch, (record.epoch, record.worker_id, record.version)
                row.moves += record.offset > 0
            case rec.LeaseEnded():
                row = self.samples[record.sample_id]
                assert row.lease is not None, f"sample {record.sample_id}: no lease to end"
                assert row.lease[0] == record.epoch, f"sample {record.sample_id}: another lease ended"
                assert record.length == len(row.tokens) // 4
                row.lease = None
            case rec.ChunkAccepted():
                row = self.samples[record.sample_id]
                assert row.lease == (record.epoch, record.worker_id, record.version), (
                    f"sample {record.sample_id}: a chunk without a lease"
                )
                assert record.offset == len(row.tokens) // 4, f"sample {record.sample_id}: a gap"
                row.tokens += record.tokens
                tokens = len(record.tokens) // 4
                if row.spans and row.spans[-1][0] == record.worker_id:
                    tokens += row.spans.pop()[1]
                row.spans.append((record.worker_id, tokens))
                tokens = len(record.tokens) // 4
                if row.versions and row.versions[-1][0] == record.version:
                    tokens += row.versions.pop()[1]
                row.versions.append((record.version, tokens))
                row.logprobs += record.logprobs
                row.raw_logprobs += record.raw_logprobs
                row.routing += record.routing
            case rec.SampleFinished():
                row = self.samples[record.sample_id]
                assert row.state == "open"
                row.state, row.finish = "complete", record.finish
            case rec.SampleEnded():
                row = self.samples[record.sample_id]
                row.state, row.reward, row.step = record.state, record.reward, record.step
                row.attempt, row.reason = record.attempt, record.reason
                row.ends.append(record.state)
                if record.state == "consumed":
                    self.consumed[record.sample_id] = self.consumed.get(record.sample_id, 0) + 1
                    assert self.consumed[record.sample_id] == 1, (
                        f"sample {record.sample_id} was consumed twice"
                    )
                elif record.state == "superseded":
                    self.consumed.pop(record.sample_id, None)
            case rec.SampleReopened():
                row = self.samples[record.sample_id]
                row.state, row.step, row.attempt, row.reason = "complete", 0, 0, ""
                row.ends.append("reopened")
                self.consumed.pop(record.sample_id, None)

    # ---- reading

    def _state(self, group_id: int) -> rec.OpenGroup:
        made = self.groups[group_id]
        if group_id in self.turns:
            under_way = group_id in self._under_way()
            made = msgspec.structs.replace(made, prompt=self.prompt(group_id) if under_way else b"")
        rows = ((i, self.samples[i]) for i in range(made.first_sample_id, made.first_sample_id + made.n))
        return rec.OpenGroup(
            made,
            self.group_versions[group_id],
            tuple(
                rec.SampleState(
                    i,
                    r.index,
                    r.state,
                    r.epoch,
                    r.moves,
                    len(r.tokens) // 4,
                    r.finish,
                    r.reward,
                    r.lease,
                    r.step,
                    r.attempt,
                    r.reason,
                    spans=tuple(r.spans),
                    versions=tuple(r.versions),
                )
                for i, r in rows
            ),
        )

    def _under_way(self) -> set[int]:
        """Turns of which a sample is open."""
        return {
            row.group_id
            for row in self.samples.values()
            if row.state == "open" and row.group_id in self.turns
        }

    def _wanted(self, run_id: int, after: int) -> tuple[rec.OpenGroup, ...]:
        ends = ("consumed", "filtered", "masked", "evaluated")
        found = {
            row.group_id
            for row in self.samples.values()
            if self.groups[row.group_id].run_id == run_id
            and (
                row.state in ("open", "complete")
                or (row.state in ends and row.step > after)
                or self._untaken_poison(row)
            )
        }
        return tuple(self._state(i) for i in sorted(found))

    def _untaken_poison(self, row: Row) -> bool:
        made = self.groups[row.group_id]
        return row.state == "poisoned" and (made.run_id, made.purpose, made.step) not in self.taken

    def _takes(self) -> tuple[tuple[int, str, int, int, int], ...]:
        newest: dict[tuple[int, str, int, int], int] = {}
        for row in self.samples.values():
            if row.state in ("superseded", "poisoned", "surplus"):
                if self.groups[row.group_id].purpose == "turn":
                    continue
                made = self.groups[row.group_id]
                key = (made.run_id, made.purpose, made.step, made.prompt_index)
                newest[key] = max(made.retry, newest.get(key, 0))
        return tuple((*key, retry) for key, retry in newest.items())

    def history(self, run_id: int, after_step: int) -> tuple[rec.OpenGroup, ...]:
        return self._wanted(run_id, after_step)

    def taken_deliveries(self, run_id: int, after_step: int) -> tuple[rec.DeliveryState, ...]:
        ends = ("consumed", "filtered", "masked")
        mine = (one for _, one in sorted(self.deliveries.items()) if one.run_id == run_id)
        return tuple(one for one in mine if one.state in ends and one.ended_step > after_step)

    def ended_episodes(self, run_id: int, most: int) -> tuple[str, ...]:
        mine = [e for _, e in sorted(self.episodes.items()) if e.run_id == run_id and e.state != "open"]
        return tuple(episode.name for episode in mine[len(mine) - min(most, len(mine)) :])

    def pass_rates(
        self, run_id: int, until_step: int, solved_at: float
    ) -> tuple[tuple[int, int, int, int], ...]:
        found: dict[tuple[int, int], list[float]] = {}
        for row in self.samples.values():
            made = self.groups[row.group_id]
            mine = (made.run_id, made.purpose) == (run_id, "train") and made.step <= until_step
            if row.reward is None or math.isnan(row.reward) or not mine:
                continue
            if row.state in ("consumed", "filtered", "masked"):
                found.setdefault((-made.step, made.prompt_index), []).append(row.reward)
        return tuple(
            (-step, index, sum(one >= solved_at for one in of), len(of))
            for (step, index), of in sorted(found.items())
        )

    def payloads(self, sample_ids: list[int]) -> dict[int, Payload]:
        return {
            i: (r.tokens, r.logprobs, r.raw_logprobs, r.routing)
            for i in sample_ids
            if (r := self.samples.get(i)) is not None
        }

    def _versions(self, run_id: int) -> tuple[rec.VersionPublished, ...]:
        """As the real one gives them: of an active run the newest four manifests, and those of their bases."""
        mine = [v for v in self.versions if v.run_id == run_id]
        newest = max((v.version for v in mine), default=0) - 4 if not self.runs[run_id]["ended"] else math.inf
        bases = {manifests.base_of(v.manifest) for v in mine if v.version > newest} - {b""}
        return tuple(
            v if v.version > newest or v.root in bases else msgspec.structs.replace(v, manifest=b"")
            for v in mine
        )

    def snapshot(self) -> rec.Snapshot:
        active = [i for i, run in self.runs.items() if not run["ended"]]
        runs = tuple(
            rec.RunState(
                run["created"],  # type: ignore[arg-type]
                run["attempt"],  # type: ignore[arg-type]
                run["resume"],  # type: ignore[arg-type]
                run["last"],  # type: ignore[arg-type]
                run["engine"],  # type: ignore[arg-type]
                run["config"],  # type: ignore[arg-type]
                self._versions(i),
                (),
                bool(run["ended"]),
                int(str(run.get("job_id", 0))),
            )
            for i, run in self.runs.items()
        )
        groups = tuple(g for i in active for g in self._wanted(i, -1))
        workers = tuple(rec.WorkerState(w) for w in self.workers.values())

        def after(ids: object) -> int:
            return max(ids, default=0) + 1  # type: ignore[call-overload, no-any-return]

        joined = [r.worker_id for r in self.log if isinstance(r, rec.WorkerJoined)]
        ids = (after(self.runs), after(self.groups), after(self.samples), after(joined))
        is_open = {i for i, episode in self.episodes.items() if episode.state == "open"}
        return rec.Snapshot(
            *ids,
            runs,
            groups,
            workers,
            (),
            self._takes(),
            next_episode_id=after(self.episodes),
            next_tool_call_id=after(self.tool_calls),
            next_delivery_id=after(self.deliveries),
            deliveries=tuple(
                one for one in self.deliveries.values() if one.state == "due" and one.run_id in active
            ),
            tool_calls=tuple(
                call
                for call in self.tool_calls.values()
                if call.episode_id in is_open and self.episodes[call.episode_id].run_id in active
            ),
            episodes=tuple(e for e in self.episodes.values() if e.run_id in active),
            turns=tuple(t for t in self.turns.values() if t.episode_id in is_open and t.run_id in active),
            turn_samples=tuple(
                found
                for i, found in sorted(self.turn_samples.items())
                if self.turns[self.samples[i].group_id].episode_id in is_open
            ),
            turn_tokens=tuple(
                (i, row.tokens)
                for i, row in self.samples.items()
                if row.state == "open" and row.tokens and row.group_id in self.turns
            ),
        )


class StoredLedger(Ledger):
    """The same, kept in a real SQLite ledger as well: what a restart or a resume reads comes from there."""

    def __init__(self, url: str) -> None:
        super().__init__()
        store.upgrade(url)
        self._engine = store.open_engine(url)
        self._connection = transaction.open_connection(self._engine)
        self._take_over()

    def _take_over(self) -> None:
        """As a daemon that starts: what the one before it left in the log of moves is folded."""
        self._generation = transaction.grant_generation(self._engine, "host", 1, "test", 0.0)
        self._batch, self._moves = 0, MoveLog()

    def apply(self, records: tuple[rec.Record, ...]) -> None:
        super().apply(records)
        self._batch += 1
        now = 0.3 * self._batch  # logged moves wait for a few transactions
        plan = self._moves.plan(records, now)
        transaction.commit_batch(self._connection, self._generation, self._batch, records, now, plan)
        self._moves.done(plan, now)

    def history(self, run_id: int, after_step: int) -> tuple[rec.OpenGroup, ...]:
        return reader.replay_groups(self._engine, run_id, after_step)

    def taken_deliveries(self, run_id: int, after_step: int) -> tuple[rec.DeliveryState, ...]:
        return reader.taken_deliveries(self._engine, run_id, after_step, deliveries.MAX_DUE_BYTES)

    def ended_episodes(self, run_id: int, most: int) -> tuple[str, ...]:
        return reader.ended_episodes(self._engine, run_id, most)

    def pass_rates(
        self, run_id: int, until_step: int, solved_at: float
    ) -> tuple[tuple[int, int, int, int], ...]:
        return reader.pass_rates(self._engine, run_id, until_step, solved_at)

    def payloads(self, sample_ids: list[int]) -> dict[int, Payload]:
        return reader.read_payloads(self._engine, sample_ids)

    def snapshot(self) -> rec.Snapshot:
        self._take_over()
        return reader.read_snapshot(self._engine)

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

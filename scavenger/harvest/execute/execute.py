"""Performs what was decided: jobs are drained, cancelled, released and submitted, in that order, each with its decision in the ledger.

    DrainAllocated        an event to the router; Slurm hears nothing of it
    CancelPending, Cancel one command for all. A job without an id yet is remembered, and leaves when it turns up
    Release               a standby job begins; one that Slurm does not let us steer is cancelled
    Submit                intent durable -> key file -> key allowed -> sbatch -> submitted

A process that dies anywhere in between leaves what its successor needs: an intent in the ledger, and a job that carries the intent in its
name and comment. Before every command that changes something a write is attempted: a daemon that another one replaced is fenced there
(`Fenced`), before it touches that one's jobs.

`Durable` bounds how long a cycle waits for its records. A ledger that cannot take a transaction (no space, no connection) stalls, and with
it all that wait for it. Harvesting must not: other users wait for GPUs, and an admin may have stopped it. After the bound the caller
decides what to do without.

`WorkerKeys` owns the files `workers/INTENT.key` and which worker is let in: minted -> written (before `sbatch`: the job reads the file) ->
allowed -> dropped when the job is closed, with its file and an empty log. A daemon that starts lets those in again whose files its
predecessor left, and removes the files of intents that the ledger has closed.

Boundary: commands, key files and the ledger's answer; IO.

Owns the order within one decision, and what becomes of a reply that is missing or a refusal. Must not know how often the cluster is polled,
nor why anything was decided; whether a decision still holds it asks.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from scavenger.cluster.port import Cluster, OneThread
from scavenger.config import DaemonConfig
from scavenger.errors import ClusterError, ClusterUnavailable, SubmitUnknown
from scavenger.harvest.decide.actions import (
    Action,
    Cancel,
    CancelPending,
    DrainAllocated,
    DrainKind,
    HarvestCode,
    HarvestDecision,
    Release,
    Submit,
)
from scavenger.harvest.execute.job_script import drop_empty_log, job_spec, read_template
from scavenger.harvest.track import observed_jobs
from scavenger.harvest.track.tracker import Output, Tracker
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand
from scavenger.protocol import keys
from scavenger.protocol.messages import RUN_NAME_PATTERN
from scavenger.router.core.events import CondemnedNode, IntentRevoked, PeerIdentity, RouterEvent, WorkerLife

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LedgerWrites:
    """How the harvester writes to the ledger. `commit` returns when its records are durable, `write` when they are queued.

    Both raise `Fenced` when another daemon has taken the ledger.
    """

    commit: Callable[[Sequence[rec.Record]], Awaitable[None]]
    write: Callable[[Sequence[rec.Record]], object]


@dataclass(frozen=True, slots=True)
class RouterLink:
    """What the harvester asks of the router, and what it reports to it and to its key ring.

    `leases`: for each connected worker, by intent: how many samples it generates, and since when it has none (Unix s). `lives`: the
    engines of our jobs that have registered. `condemned`: nodes where an engine was set aside, the newest last. `register` lets in the
    worker with this public key, `unregister` no longer.
    """

    post: Callable[[RouterEvent], None]
    demand: Callable[[], Sequence[Demand]]
    leases: Callable[[], Mapping[str, tuple[int, float]]]
    register: Callable[[str, PeerIdentity], None]
    unregister: Callable[[str], None]
    lives: Callable[[], Sequence[WorkerLife]] = tuple
    condemned: Callable[[], Sequence[CondemnedNode]] = tuple


@dataclass(frozen=True, slots=True)
class Sources:
    """Time and chance. `clock`: Unix s; `monotonic`: s; `draw`: uniform in [0, 1); `token`: 16 hex digits that name a new intent."""

    clock: Callable[[], float]
    monotonic: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    token: Callable[[], str] = lambda: secrets.token_hex(8)


class WorkerKeys:
    """The key files under `state_dir`, and what the daemon's key ring has of them."""

    def __init__(self, state_dir: Path, router: RouterLink) -> None:
        self._state_dir, self._register, self._unregister = state_dir, router.register, router.unregister
        self._public: dict[str, str] = {}  # intent -> public key that we let in

    def write(self, pair: keys.KeyPair) -> None:
        """Put the pair where its job will read it. Blocks; raises `OSError`."""
        keys.write_keypair(keys.worker_key_path(self._state_dir, pair.intent), pair)

    def allow(self, pair: keys.KeyPair) -> None:
        """Let the pair's holder in, as the worker of its run and intent."""
        self._public[pair.intent] = pair.public
        self._register(pair.public, PeerIdentity("worker", pair.public, pair.run, pair.intent))

    def allow_again(self, intent_id: str) -> None:
        """Let in whom a previous daemon made a key for. Raises `AuthError` where its file is missing or cannot be used."""
        self.allow(keys.read_keypair(keys.worker_key_path(self._state_dir, intent_id)))

    def drop(self, intent_id: str) -> None:
        """A closed job's key opens nothing any more."""
        public = self._public.pop(intent_id, "")
        if public:
            self._unregister(public)
        self._drop_files(intent_id)

    def drop_stale(self, opened: Collection[str]) -> None:
        """Remove the files of every intent that is not in `opened`: a daemon that died did not get to it."""
        for path in sorted((self._state_dir / "workers").glob("scv-*.key")):
            if path.stem not in opened:
                self._drop_files(path.stem)

    def _drop_files(self, intent_id: str) -> None:
        try:
            keys.worker_key_path(self._state_dir, intent_id).unlink(missing_ok=True)
            drop_empty_log(self._state_dir, intent_id)
        except OSError as error:  # its key opens nothing; the next daemon's start tries again
            log.warning("a closed job's files stay", intent=intent_id, reason=str(error))


class Durable:
    """A commit that is waited for at most `patience_s`, which is asked for at each."""

    def __init__(
        self, ledger: LedgerWrites, patience_s: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._commit, self._write, self._patience_s, self._clock = (
            ledger.commit,
            ledger.write,
            patience_s,
            clock,
        )
        self.stalled = False

    async def within(self, records: Sequence[rec.Record]) -> bool:
        """Whether the records are durable in time. False: they are queued, and will be if the ledger recovers. Raises `Fenced`."""
        patience_s = self._patience_s()
        try:
            async with asyncio.timeout(patience_s):
                await self._commit(records)
        except TimeoutError:
            why = f"no record became durable within {patience_s:g} s: nothing is submitted, and jobs are cancelled all the same"
            # written also when there is nothing new to tell: a writer that was fenced meanwhile says so here
            self._write(
                [] if self.stalled else [rec.Event("ledger_stalled", 0, "ledger", why, "{}", self._clock())]
            )
            if not self.stalled:
                log.warning("ledger stalled", reason=why)
            self.stalled = True
            return False
        if self.stalled:
            self.stalled = False
            self._write(
                [rec.Event("ledger_back", 0, "ledger", "records become durable again", "{}", self._clock())]
            )
        return True


def decided(action: Action, intent_id: str, inputs: str, now: float) -> rec.Decision:
    """The record of one action."""
    names = {
        Submit: "submit",
        Release: "release",
        CancelPending: "cancel_pending",
        DrainAllocated: "drain",
        Cancel: "cancel",
    }
    return rec.Decision("harvest", names[type(action)], intent_id, action.reason, inputs, now, action.code)


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


RUN_NAME = re.compile(RUN_NAME_PATTERN)


class Performer:
    """Carries out decisions. `absorb` passes on what the tracker concluded; `patience_s`: how long a commit is waited for."""

    def __init__(
        self,
        config: DaemonConfig,
        cluster: Cluster,
        thread: OneThread,
        uid: str,
        tracker: Tracker,
        worker_keys: WorkerKeys,
        ledger: LedgerWrites,
        router: RouterLink,
        sources: Sources,
        *,
        absorb: Callable[[Output], None],
        patience_s: Callable[[], float],
    ) -> None:
        self._cluster, self._thread, self._uid = cluster, thread, uid
        self._tracker, self._keys = tracker, worker_keys
        self._durable = Durable(ledger, patience_s, sources.clock)
        self._write, self._post, self._absorb = ledger.write, router.post, absorb
        self._clock, self._token = sources.clock, sources.token
        self._last_reason = ""  # why nothing was done, as last recorded
        self._refused_names = set[int]()  # runs
        self.steers = True  # whether Slurm lets us release a standby job: without that there are none
        self.obey(config)

    def obey(self, config: DaemonConfig) -> None:
        """Submit by this configuration from now on. Raises `ConfigError`, and then nothing changed."""
        template = read_template(config.harvest.job_template)
        probe = Submit(0, "probe", config.harvest.partition, 1, "")
        job_spec(
            config, template, config.cluster.backend, self._uid, observed_jobs.intent_name("0" * 16), probe
        )  # a bad template shows now
        self._config, self._template = config, template

    async def perform(
        self,
        decision: HarvestDecision,
        demand: Sequence[Demand],
        backend: str,
        overtaken: Callable[[], Awaitable[bool]],
    ) -> None:
        """Do all of it, unless it is `overtaken` between two commands. Raises `ClusterError` when Slurm does not answer, or refuses a
        cancellation: what is left is decided afresh."""
        asked = [[d.run, d.engines, d.gpus_per_engine] for d in demand]
        inputs = as_json(
            {"decision": decision.reason, "demand": asked, "start_benefits": decision.start_benefits}
        )
        if not decision.actions:
            if decision.reason != self._last_reason:
                self._write(
                    [
                        rec.Decision(
                            "harvest", "none", "", decision.reason, inputs, self._clock(), decision.code
                        )
                    ]
                )
            self._last_reason = decision.reason
            return
        self._last_reason = ""
        cancels = [action for action in decision.actions if isinstance(action, CancelPending | Cancel)]
        for action in decision.actions:
            if isinstance(action, DrainAllocated):
                self.drain(action, inputs)
        await self.cancel(cancels, inputs)
        starts = [action for action in decision.actions if isinstance(action, Submit | Release)]
        for number, action in enumerate(starts):
            if number and await overtaken():
                return
            if isinstance(action, Release):
                await self._release(action, inputs)
            elif not await self._submit(action, inputs, backend):
                return  # one that fails says enough about the next

    async def cancel(self, actions: Sequence[CancelPending | Cancel], inputs: str) -> None:
        """Cancel jobs with one command. What has no id yet is remembered, and cancelled when it turns up."""
        now = self._clock()
        if not actions:
            return
        self._write([decided(action, action.intent_id, inputs, now) for action in actions])
        ids = {action.intent_id: self._tracker.intents[action.intent_id].job_id for action in actions}
        for action in actions:
            if not ids[action.intent_id]:
                self._tracker.revoke(action.intent_id, DrainKind.DRAINING, action.reason, now)
        known = tuple(sorted(job_id for job_id in ids.values() if job_id))
        if known:
            # A daemon that another one replaced meanwhile is fenced here, before it takes that one's jobs away. A stalled ledger does not
            # keep our engines on GPUs that others wait for: that a job was cancelled the queue tells as well.
            await self._durable.within([])
            await self._thread.call(self._cluster.cancel, known)
        for action in actions:
            if ids[action.intent_id]:
                self._tracker.revoke(action.intent_id, DrainKind.CANCELLED, action.reason, self._clock())

    async def cancel_orphaned_jobs(self, job_ids: tuple[int, ...]) -> None:
        if not job_ids:
            return
        why = "it carries this ledger's id and an intent that the ledger does not have open"
        events = [
            rec.Event("orphaned_job_cancelled", 0, f"job {job_id}", why, "{}", self._clock())
            for job_id in job_ids
        ]
        if await self._durable.within(events):  # else they may be a successor's, of whom we cannot know
            await self._thread.call(self._cluster.cancel, job_ids)

    def drain(self, action: DrainAllocated, inputs: str) -> None:
        now = self._clock()
        self._write([decided(action, action.intent_id, inputs, now)])
        self._tracker.revoke(action.intent_id, DrainKind.DRAINING, action.reason, now, action.code)
        self._post(IntentRevoked(action.intent_id, action.reason))

    async def _release(self, action: Release, inputs: str) -> None:
        """Let a waiting job begin. One that Slurm does not let us steer is cancelled, and there are no standby jobs from then on."""
        one = self._tracker.intents[action.intent_id]
        await self._durable.within(
            [decided(action, action.intent_id, inputs, self._clock())]
        )  # who was replaced is fenced here
        try:
            await self._thread.call(self._cluster.release, one.job_id, action.node)
        except ClusterUnavailable:
            raise
        except ClusterError as error:
            self.steers = False
            why = f"job {one.job_id} was not released to {action.node}: {error.cause}"
            self._write(
                [
                    rec.Event(
                        "release_refused", one.intended.run_id, action.intent_id, why, "{}", self._clock()
                    )
                ]
            )
            await self.cancel([CancelPending(action.intent_id, why, HarvestCode.STANDBY)], inputs)
        else:
            self._tracker.released(action.intent_id, action.node, self._clock())

    def _refuse_name(self, action: Submit) -> None:
        """It is refused where runs are opened; a ledger may be older than that. Nobody else's jobs wait for it."""
        if action.run_id not in self._refused_names:
            self._refused_names.add(action.run_id)
            why = "no job can carry this name"
            self._write(
                [rec.Event("run_name_refused", action.run_id, repr(action.run), why, "{}", self._clock())]
            )

    async def _submit(self, action: Submit, inputs: str, backend: str) -> bool:
        """Submit one job. The intent is durable before Slurm can know of it. False when Slurm did not take it."""
        if not RUN_NAME.fullmatch(action.run):
            self._refuse_name(action)
            return True
        intent_id = observed_jobs.intent_name(self._token())
        pair = keys.generate(action.run, intent_id)
        spec = job_spec(self._config, self._template, backend, self._uid, intent_id, action)
        now = self._clock()
        pinned = spec.nodelist[0] if spec.nodelist else ""
        intended = rec.JobIntended(
            intent_id, action.run_id, action.partition, action.gpus, pair.public, now, pinned
        )
        durable = await self._durable.within([intended, decided(action, intent_id, inputs, now)])
        self._tracker.intend(intended, self._clock(), standby=action.standby)
        if (
            not durable
        ):  # Slurm never hears of it: the intent, should it become durable yet, is followed by its end
            self._absorb(
                self._tracker.submit_refused(
                    intent_id, "the ledger is stalled: the intent is not durable", self._clock()
                )
            )
            return False
        try:
            await self._thread.call(self._keys.write, pair)
        except OSError as error:
            self._absorb(
                self._tracker.submit_refused(
                    intent_id, f"its key file cannot be written: {error}", self._clock()
                )
            )
            return False
        self._keys.allow(pair)
        try:
            job_id = await self._thread.call(self._cluster.submit, spec)
        except (SubmitUnknown, ClusterUnavailable) as error:
            self._absorb(self._tracker.submit_unknown(intent_id, error.cause, self._clock()))
            return False
        except ClusterError as error:
            self._absorb(self._tracker.submit_refused(intent_id, error.cause, self._clock()))
            return False
        self._absorb(self._tracker.submitted(intent_id, job_id, self._clock()))
        return True

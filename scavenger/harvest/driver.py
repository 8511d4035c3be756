"""The harvester: observe -> tracker -> policy -> perform, round and round. Theory of operation:

    cluster.view()  (one thread, never on the loop)
      -> Tracker.observe(view)      records to the ledger, JobGone to the router, keys of closed jobs removed
      -> policy.decide(view, ...)   actions with reasons
      -> perform                    intent durable -> key file -> key allowed -> sbatch -> submitted

When to look again, and at how much, is `pace`'s. A look at the queue alone moves our jobs on; when it shows that one left its GPUs, a
whole look follows at once. A failed observation is an event: nothing is decided, cancelled or concluded on it. A process that dies
anywhere in between leaves what its successor needs: an intent in the ledger, and a job that carries the intent in its name and comment.

Owns the order. Decides nothing about jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pwd
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ParamSpec, TypeVar

import structlog

from scavenger import keys
from scavenger.cluster.model import ClusterInfo, ClusterView
from scavenger.cluster.port import Cluster
from scavenger.config import DaemonConfig
from scavenger.errors import AuthError, ClusterError, ClusterUnavailable, ConfigError, SubmitUnknown
from scavenger.harvest import policy, preflight, sights
from scavenger.harvest.durable import Durable, as_json, decided
from scavenger.harvest.idling import Idling
from scavenger.harvest.leave import leave_by, unseen
from scavenger.harvest.limits import pace_of, rules_of, stale_s
from scavenger.harvest.pace import Look, Pace
from scavenger.harvest.policy import Cancel, CancelPending, Code, Decision, GiveBack, Leaving, Release, Submit
from scavenger.harvest.room import owners
from scavenger.harvest.script import drop_empty_log, job_spec, read_template
from scavenger.harvest.standing import Standing
from scavenger.harvest.tracker import Output, Tracker
from scavenger.harvest.waiting import first, patience_s
from scavenger.ledger import records as rec
from scavenger.router.events import Identity, IntentRevoked, RouterEvent
from scavenger.router.machine import Demand
from scavenger.wire import RUN_NAME_PATTERN

P = ParamSpec("P")
R = TypeVar("R")
log = structlog.get_logger()

#: A drained engine's job that is still there after this is cancelled.
LEAVE_S = 30.0
RUN_NAME = re.compile(RUN_NAME_PATTERN)
#: How often the demand is compared with what was last decided on.
DEMAND_TICK_S = 1.0
#: How long a stop waits for the cycle under way, so that a submission's answer is still recorded.
STOP_S = 3.0
#: How long a shutdown that cancels waits for the jobs to leave the queue.
CANCEL_S = 20.0
#: A site changes whether Slurm preempts at all, and what it hides, without a word to us: by a reload, or a restart of slurmctld.
INFO_S = 900.0


class Harvester:
    """See the module. `commit` returns when its records are durable, `write` at once; `post` hands the router an event."""

    def __init__(
        self,
        config: DaemonConfig,
        cluster: Cluster,
        uid: str,
        *,
        commit: Callable[[Sequence[rec.Record]], Awaitable[None]],
        write: Callable[[Sequence[rec.Record]], object],
        post: Callable[[RouterEvent], None],
        demand: Callable[[], Sequence[Demand]],
        leases: Callable[[], Mapping[str, tuple[int, float]]],
        register: Callable[[str, Identity], None],
        unregister: Callable[[str], None],
        clock: Callable[[], float],
        learned: Callable[[ClusterInfo], None] = lambda _info: None,
        leave_s: float = LEAVE_S,
        token: Callable[[], str] = lambda: secrets.token_hex(8),
        draw: Callable[[], float] = random.random,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.cluster, self.uid = config, cluster, uid
        self._write, self._post = write, post
        self._durable = Durable(commit, write, lambda: patience_s(self.config.cluster.quick_s), clock)
        self._demand, self._leases, self._learned = demand, leases, learned
        self._register, self._unregister = register, unregister
        self._keys: dict[str, str] = {}  # intent -> public key that we let in
        self._clock, self._leave_s, self._token = clock, leave_s, token
        self._template = read_template(config.harvest.job_template)
        probe = Submit(0, "probe", config.harvest.partition, 1, "")
        job_spec(config, self._template, config.cluster.backend, uid, sights.intent_name("0" * 16), probe)  # a bad template shows now
        self._state_dir = config.daemon.state_dir
        self.tracker = Tracker(rules_of(config, uid, pwd.getpwuid(os.getuid()).pw_name))
        self.standing = Standing(lambda: self.config)
        self.idling = Idling()
        self.view: ClusterView | None = None  # the last complete observation, for the display
        self._info: ClusterInfo | None = None
        self._info_at = -math.inf
        self._spares: int | None = None  # how many spares there are, where it is not as configured: Slurm refused to release one
        self._refused = ""  # why the partition may no longer be harvested
        self._pace, self._monotonic = Pace(pace_of(config), draw, monotonic()), monotonic
        self._by = math.inf  # when somebody was promised GPUs (`monotonic`)
        self.troubles: Counter[str] = Counter()  # failed looks and commands by kind, for status and metrics
        self._last_reason = ""
        self._decided_on: tuple[tuple[int, int, int], ...] = ()
        self._poked = asyncio.Event()
        self._stopping = asyncio.Event()
        self._cycle_lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cluster")

    # ---------------------------------------------------------------- life

    def restore(self, jobs: Sequence[rec.JobState]) -> None:
        """Take over the jobs that the ledger has, and let their workers in again. Call before `run`."""
        now = self._clock()
        self.tracker.restore(jobs, now)
        for job in jobs:
            intended = job.intended
            try:
                pair = keys.read_keypair(keys.worker_key_path(self._state_dir, intended.intent_id))
            except AuthError as error:
                if job.job_id:  # without its key the job can never greet; before the submission there need not be one
                    self._write([rec.Event("worker_key_missing", intended.run_id, intended.intent_id, error.cause, "{}", now)])
                    self.tracker.revoke(intended.intent_id, Leaving.GIVEN_BACK, error.cause, now)
                continue
            self._allow(pair)
        known = {job.intended.intent_id for job in jobs}
        for path in sorted((self._state_dir / "workers").glob("scv-*.key")):
            if path.stem not in known:
                self._drop_files(path.stem)

    def reconfigure(self, config: DaemonConfig) -> None:
        """Go on with what `scavenger.reload` lets change live, from the next cycle on. Raises `ConfigError`, and then nothing changed."""
        template = read_template(config.harvest.job_template)
        probe = Submit(0, "probe", config.harvest.partition, 1, "")
        job_spec(config, template, config.cluster.backend, self.uid, sights.intent_name("0" * 16), probe)
        self.config, self._template = config, template
        self._pace.obey(pace_of(config), self._monotonic())
        self.poke()

    def poke(self) -> None:
        """Observe soon: something changed. Only from the event loop's thread."""
        self._poked.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Harvest until `stop` is set. Raises `ConfigError` when the partition may not be harvested, `ClusterError` when there is no
        scheduler to talk to; what fails later is an event and is tried again."""
        (self._state_dir / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
        look = Look.FULL
        while not stop.is_set():
            async with self._cycle_lock:
                if self._stopping.is_set():
                    return
                await self._cycle(look)
            look = await self._pause(stop)

    async def shutdown(self, cancel: bool) -> None:
        """Stop. Jobs stay for the next daemon unless `cancel`: then every one is cancelled, and waited for while that takes `CANCEL_S`."""
        self._stopping.set()
        with contextlib.suppress(TimeoutError):  # a hung command: what it did is found out by the next daemon
            async with asyncio.timeout(CANCEL_S if cancel else STOP_S):
                async with self._cycle_lock:
                    if cancel:
                        await self._cancel_all()
                    self._thread.shutdown(wait=False)

    async def _cancel_all(self) -> None:
        try:
            while jobs := self.tracker.jobs({}):
                staying = [job.intent_id for job in jobs if job.leaving is not Leaving.CANCELLED]
                chosen = [Cancel(intent_id, "the daemon shuts down", Code.SHUTDOWN) for intent_id in staying]
                await self._cancel([action for action in chosen if self.tracker.intents[action.intent_id].job_id], "{}")
                self._absorb(self.tracker.observe(await self._look(), self._clock()))
                await asyncio.sleep(min(1.0, self.config.cluster.quick_s))
        except ClusterError as error:
            log.warning("jobs may be left", reason=error.cause, jobs=sorted(self.tracker.job_ids()))

    # ---------------------------------------------------------------- one cycle

    async def _cycle(self, look: Look) -> None:
        """Observe and conclude; after a whole look also decide and perform."""
        before = self.cluster.rpc.total
        try:
            view, look = await self._observe(look)
        except ClusterError as error:
            if self._info is None and not isinstance(error, ClusterUnavailable):
                raise  # it never worked: no Slurm on PATH, not a cluster
            self._failed(error, before)
            return
        if failures := self._pace.failures:
            self._write([rec.Event("cluster_back", 0, self._name, f"answers again after {failures} failures", "{}", self._clock())])
        seen = self.cluster.rpc.total
        self._pace.looked(look, seen - before, self._monotonic())
        self.view = view
        self.tracker.works(intent for intent, (n_leases, _) in self._leases().items() if n_leases)
        output = self.tracker.observe(view, self._clock())
        self._absorb(output)
        if look is Look.JOBS:
            return  # the nodes in this view are those of the last whole look: nothing is decided on them
        self.idling.observe(view, self.config.harvest.partition, self.tracker.held(), self._clock())
        have, now = owners(view, self.config.harvest.partition, self.tracker.job_ids(), self._clock()), self._clock()
        self._write([rec.ClusterSampled(have.idle, have.harvested, have.others, have.reserved, have.unusable, have.pending_others, now)])
        await self.standing.look_now()
        demand = self._wanted()
        now = self._clock()
        assert self._info is not None  # by `_observe`
        limits = self.standing.limits(view, self._info, self.tracker, self._leave_s, now)
        spares = limits.spares if self._spares is None else self._spares
        limits = replace(limits, idle=self.idling.known(self.config.harvest.outlast, now), spares=spares)
        self._write(self.standing.events)
        self.standing.events.clear()
        decision = policy.decide(view, demand, self.tracker.jobs(self._leases()), limits, now)
        self.standing.decided(decision, now)
        try:
            await self._cancel_strangers(output.strangers)
            await self._perform(decision, demand)
        except ClusterError as error:
            self._failed(error, seen)
            return
        self._pace.spent(self.cluster.rpc.total - seen, self._monotonic())
        # Who was promised GPUs within a time gets them. A job that was cancelled is Slurm's to end; one without an id has no name there.
        promised = [job for job in self.tracker.jobs({}) if job.job_id and job.leaving is Leaving.GIVEN_BACK]
        due = min((leave_by(job, limits) for job in promised), default=math.inf)
        self._by = self._monotonic() + max(0.0, due - self._clock())

    async def _observe(self, look: Look) -> tuple[ClusterView, Look]:
        """What was seen, and by which look: a look at the queue becomes a whole one where it says too little."""
        if self._info is None:
            info = await self._call(self.cluster.info)
            view = await self._look()
            preflight.check(info, view.partitions, self.config.harvest.partition, self.config.harvest.qos)
            self._learn(info)
            return view, Look.FULL
        if look is Look.JOBS and self.view is not None:
            asked_at = self._clock()
            jobs = await self._call(self.cluster.jobs)
            if not self.tracker.surprised(jobs):
                return replace(self.view, jobs=jobs, observed_at=asked_at), Look.JOBS
        view = await self._look()
        if self._pace.failures or self._monotonic() - self._info_at >= INFO_S:  # a controller that was restarted has read another one
            self._learn(await self._call(self.cluster.info))
        self._check_again(view)
        return view, Look.FULL

    def _learn(self, info: ClusterInfo) -> None:
        if info != self._info:
            self._learned(info)
        self._info, self._info_at = info, self._monotonic()

    async def _look(self) -> ClusterView:
        """A view, stamped by our clock and with the time before it was asked for: it is at least as new as it says."""
        asked_at = self._clock()
        return replace(await self._call(self.cluster.view), observed_at=asked_at)

    def _check_again(self, view: ClusterView) -> None:
        """A partition that stops being harmless while we run gets no more jobs, and loses those it has."""
        assert self._info is not None
        refused = ""
        try:
            preflight.check(self._info, view.partitions, self.config.harvest.partition, self.config.harvest.qos)
        except ConfigError as error:
            refused = error.cause
        if refused != self._refused:
            kind = "partition_refused" if refused else "partition_allowed"
            self._write([rec.Event(kind, 0, self.config.harvest.partition, refused or "it is preemptible again", "{}", self._clock())])
        self._refused = refused

    def _failed(self, error: ClusterError, before: int) -> None:
        """A command failed: what it was to do is decided afresh on the next view. `before`: requests that had been counted by then."""
        trouble = error.trouble if isinstance(error, ClusterUnavailable) else "refused"
        retry_s = self._pace.failed(trouble, self.cluster.rpc.total - before, self._monotonic())
        self.troubles[trouble] += 1
        kind = "cluster_unavailable" if isinstance(error, ClusterUnavailable) else "cluster_refused"
        failures = self._pace.failures
        detail = {"trouble": trouble, "failures": failures, "retry_s": round(retry_s, 3)}
        self._write([rec.Event(kind, 0, self._name, error.cause, as_json(detail), self._clock())])
        log.warning(kind, reason=error.cause, **detail)

    def _absorb(self, output: Output) -> None:
        """Pass on what the tracker concluded: the ledger first, then the router, then the keys of closed jobs."""
        if output.records:
            self._write(output.records)
        for event in output.gone:
            self._post(event)
        for record in output.records:
            if isinstance(record, rec.JobEnded):
                self._drop_key(record.intent_id)

    def _wanted(self) -> list[Demand]:
        demand = list(self._demand())
        self._decided_on = _shape(demand)
        if self._refused:
            return [replace(d, engines=0, reason=self._refused) for d in demand]
        return demand

    # ---------------------------------------------------------------- perform

    async def _perform(self, decision: Decision, demand: Sequence[Demand]) -> None:
        asked = [[d.run, d.engines, d.gpus_per_engine] for d in demand]
        inputs = as_json({"decision": decision.reason, "demand": asked, "gates": decision.gates})
        if not decision.actions:
            if decision.reason != self._last_reason:
                self._write([rec.Decision("harvest", "none", "", decision.reason, inputs, self._clock(), decision.code)])
            self._last_reason = decision.reason
            return
        self._last_reason = ""
        cancels = [action for action in decision.actions if isinstance(action, CancelPending | Cancel)]
        for action in decision.actions:
            if isinstance(action, GiveBack):
                self._give_back(action, inputs)
        await self._cancel(cancels, inputs)
        starts = [action for action in decision.actions if isinstance(action, Submit | Release)]
        for number, action in enumerate(starts):
            if number and await self._overtaken():
                return
            if isinstance(action, Release):
                await self._release(action, inputs)
            elif not await self._submit(action, inputs):
                return  # one that fails says enough about the next

    async def _overtaken(self) -> bool:
        """Whether what was decided is to be done no more: a busy Slurm takes many seconds a job, and somebody may have stopped us."""
        assert self.view is not None
        await self.standing.look_now()
        old = self._clock() - self.view.observed_at > stale_s(self.config)
        return old or self._stopping.is_set() or self.standing.seen != self.standing.decided_on

    async def _cancel(self, actions: Sequence[CancelPending | Cancel], inputs: str) -> None:
        """Cancel jobs with one command. What has no id yet is remembered, and cancelled when it turns up."""
        now = self._clock()
        if not actions:
            return
        self._write([decided(action, action.intent_id, inputs, now) for action in actions])
        ids = {action.intent_id: self.tracker.intents[action.intent_id].job_id for action in actions}
        for action in actions:
            if not ids[action.intent_id]:
                self.tracker.revoke(action.intent_id, Leaving.GIVEN_BACK, action.reason, now)
        known = tuple(sorted(job_id for job_id in ids.values() if job_id))
        if known:
            # A daemon that another one replaced meanwhile is fenced here, before it takes that one's jobs away. A stalled ledger does not
            # keep our engines on GPUs that others wait for: that a job was cancelled the queue tells as well.
            await self._durable.within([])
            await self._call(self.cluster.cancel, known)
        for action in actions:
            if ids[action.intent_id]:
                self.tracker.revoke(action.intent_id, Leaving.CANCELLED, action.reason, self._clock())

    async def _cancel_strangers(self, job_ids: tuple[int, ...]) -> None:
        if not job_ids:
            return
        why = "it carries this ledger's id and an intent that the ledger does not have open"
        events = [rec.Event("stranger_cancelled", 0, f"job {job_id}", why, "{}", self._clock()) for job_id in job_ids]
        if await self._durable.within(events):  # else they may be a successor's, of whom we cannot know
            await self._call(self.cluster.cancel, job_ids)

    def _give_back(self, action: GiveBack, inputs: str) -> None:
        now = self._clock()
        self._write([decided(action, action.intent_id, inputs, now)])
        self.tracker.revoke(action.intent_id, Leaving.GIVEN_BACK, action.reason, now, action.code)
        self._post(IntentRevoked(action.intent_id, action.reason))

    async def _release(self, action: Release, inputs: str) -> None:
        """Let a waiting job begin. One that Slurm does not let us steer is cancelled, and there are no spares from then on."""
        one = self.tracker.intents[action.intent_id]
        await self._durable.within([decided(action, action.intent_id, inputs, self._clock())])  # who was replaced is fenced here
        try:
            await self._call(self.cluster.release, one.job_id, action.node)
        except ClusterUnavailable:
            raise
        except ClusterError as error:
            self._spares = 0
            why = f"job {one.job_id} was not released to {action.node}: {error.cause}"
            self._write([rec.Event("release_refused", one.intended.run_id, action.intent_id, why, "{}", self._clock())])
            await self._cancel([CancelPending(action.intent_id, why, Code.SPARE)], inputs)
        else:
            self.tracker.released(action.intent_id, action.node, self._clock())

    async def _submit(self, action: Submit, inputs: str) -> bool:
        """Submit one job. The intent is durable before Slurm can know of it. False when Slurm did not take it."""
        intent_id = sights.intent_name(self._token())
        pair = keys.generate(action.run, intent_id)
        assert self._info is not None
        if not RUN_NAME.fullmatch(action.run):  # refused where runs are opened; a ledger may be older than that
            self._write([rec.Event("run_name_refused", action.run_id, repr(action.run), "no job can carry this name", "{}", self._clock())])
            return False
        spec = job_spec(self.config, self._template, self._info.backend, self.uid, intent_id, action)
        now = self._clock()
        pinned = spec.nodelist[0] if spec.nodelist else ""
        intended = rec.JobIntended(intent_id, action.run_id, action.partition, action.gpus, pair.public, now, pinned)
        durable = await self._durable.within([intended, decided(action, intent_id, inputs, now)])
        self.tracker.intend(intended, self._clock(), spare=action.spare)
        if not durable:  # Slurm never hears of it: the intent, should it become durable yet, is followed by its end
            self._absorb(self.tracker.submit_refused(intent_id, "the ledger is stalled: the intent is not durable", self._clock()))
            return False
        try:
            await self._call(keys.write_keypair, keys.worker_key_path(self._state_dir, intent_id), pair)
        except OSError as error:
            self._absorb(self.tracker.submit_refused(intent_id, f"its key file cannot be written: {error}", self._clock()))
            return False
        self._allow(pair)
        try:
            job_id = await self._call(self.cluster.submit, spec)
        except (SubmitUnknown, ClusterUnavailable) as error:
            self._absorb(self.tracker.submit_unknown(intent_id, error.cause, self._clock()))
            return False
        except ClusterError as error:
            self._absorb(self.tracker.submit_refused(intent_id, error.cause, self._clock()))
            return False
        self._absorb(self.tracker.submitted(intent_id, job_id, self._clock()))
        return True

    def _allow(self, pair: keys.KeyPair) -> None:
        self._keys[pair.intent] = pair.public
        self._register(pair.public, Identity("worker", pair.public, pair.run, pair.intent))

    def _drop_key(self, intent_id: str) -> None:
        """A closed job's key opens nothing any more."""
        public = self._keys.pop(intent_id, "")
        if public:
            self._unregister(public)
        self._drop_files(intent_id)

    def _drop_files(self, intent_id: str) -> None:
        try:
            keys.worker_key_path(self._state_dir, intent_id).unlink(missing_ok=True)
            drop_empty_log(self._state_dir, intent_id)
        except OSError as error:  # its key opens nothing; the next daemon's start tries again
            log.warning("a closed job's files stay", intent=intent_id, reason=str(error))

    # ---------------------------------------------------------------- time and threads

    async def _call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking call in the cluster's one thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def _pause(self, stop: asyncio.Event) -> Look:
        """Until the next look is due, or it is time to stop. Says which look that is."""
        look = Look.FULL
        while not (stop.is_set() or self._stopping.is_set()):
            now = self._monotonic()
            changed = self.standing.changed
            if self._pace.failures and self.standing.seen is not None:  # no look, no decision: what needs no Slurm is done now
                for action in unseen(self.tracker.jobs(self._leases()), self.standing.seen.reason):
                    self._give_back(action, "{}")
            moved = self._poked.is_set() or changed or _shape(self._demand()) != self._decided_on
            rests = all(one.spare for one in self.tracker.intents.values()) and not any(d.engines for d in self._demand())
            # Who stops harvesting does not wait for a budget. Who resumes does, or a file that comes and goes would be a flood of looks.
            by = now if changed and self.standing.seen is not None else self._by
            due_at, look = self._pace.next(now, expecting=self.tracker.expecting(self._clock()), moved=moved, rests=rests, by=by)
            if now >= due_at:
                break
            await first(stop, self._stopping, *([] if moved else [self._poked]), timeout_s=min(DEMAND_TICK_S, due_at - now))
        if look is Look.FULL:
            self._poked.clear()
        return look

    @property
    def _name(self) -> str:
        return self._info.name if self._info is not None else "cluster"


def _shape(demand: Sequence[Demand]) -> tuple[tuple[int, int, int], ...]:
    return tuple(sorted((d.run_id, d.engines, d.gpus_per_engine) for d in demand))

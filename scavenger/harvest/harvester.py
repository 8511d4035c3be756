"""The harvester: poll -> track -> decide -> execute, round and round. Theory of operation:

    Poller.observe(poll)          a view of the cluster (in one thread, never on the loop)
      -> Tracker.observe(view)    records to the ledger, JobGone to the router, keys of closed jobs removed
      -> decide(view, ...)        actions with reasons
      -> Performer.perform        commands, each with what must be durable before it

When to poll again, and how much, is `pace`'s. A poll of the queue alone moves our jobs on; when it shows that one left its GPUs, a full
poll follows at once. A failed observation is an event: nothing is decided, cancelled or concluded on it.

Owns the order of a cycle, the wait between two, and the end. Decides nothing about jobs; knows of no command and no key file.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pwd
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from scavenger.asyncio_helpers import first, patience_s
from scavenger.cluster.model import ClusterInfo, ClusterView
from scavenger.cluster.port import Cluster, OneThread
from scavenger.config import DaemonConfig
from scavenger.errors import AuthError, ClusterError, ClusterUnavailable
from scavenger.harvest.decide import decide
from scavenger.harvest.decide.decide import Cancel, DrainKind, HarvestCode, Limits
from scavenger.harvest.decide.drain import must_end_by, unseen
from scavenger.harvest.decide.free_capacity import gpu_use, waiting_jobs
from scavenger.harvest.execute import job_logs, job_script
from scavenger.harvest.execute.execute import (
    LedgerWrites,
    Performer,
    RouterLink,
    Sources,
    WorkerKeys,
    as_json,
)
from scavenger.harvest.limits import StopState, limits_of, pace_of, rules_of, stale_s
from scavenger.harvest.pace import PollKind, PollPace
from scavenger.harvest.poller import Poller
from scavenger.harvest.track.node_health import without_failing
from scavenger.harvest.track.set_up import REMEDIES, FailedStart
from scavenger.harvest.track.tracker import Output, Tracker
from scavenger.harvest.track.waits import OtherUsersWaits
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand, within_owners
from scavenger.policy.idle_gpus import Idling

log = structlog.get_logger()

#: A drained engine's job that is still there after this is cancelled.
DRAIN_NOTICE_S = 30.0
#: How often the demand is compared with what was last decided on.
DEMAND_TICK_S = 1.0
#: How long a stop waits for the cycle under way, so that a submission's answer is still recorded.
STOP_S = 3.0
#: How long a shutdown that cancels waits for the jobs to leave the queue.
CANCEL_S = 20.0
#: Jobs that accounting is asked for at once, and how long one that did not answer is left alone: its commands wait for seconds.
MOST_JOBS = 200
ACCOUNT_RETRY_S = 300.0
#: Logs that are read in one cycle: where all engines fail they fail alike.
MOST_EXPLAINED = 3


class Harvester:
    """See the module. `uid`: of the ledger, in its jobs' names and comments. `learned` gets what Slurm says of itself when that changes,
    `observed` each view. `drain_notice_s`: how long a drained engine's job may stay."""

    def __init__(
        self,
        config: DaemonConfig,
        cluster: Cluster,
        uid: str,
        ledger: LedgerWrites,
        router: RouterLink,
        sources: Sources,
        *,
        learned: Callable[[ClusterInfo], None] = lambda _info: None,
        observed: Callable[[ClusterView], None] = lambda _view: None,
        drain_notice_s: float = DRAIN_NOTICE_S,
    ) -> None:
        self.config, self.cluster, self.uid = config, cluster, uid
        self._router, self._write, self._observed = router, ledger.write, observed
        self._clock, self._monotonic, self._drain_notice_s = sources.clock, sources.monotonic, drain_notice_s
        self._state_dir = config.daemon.state_dir
        self.tracker = Tracker(rules_of(config, uid, pwd.getpwuid(os.getuid()).pw_name))
        self.stop_state = StopState(lambda: self.config)
        self.idling = Idling()
        self._waits = OtherUsersWaits(self.tracker.rules.user)
        self._thread = OneThread("cluster")
        self._keys = WorkerKeys(self._state_dir, router)
        self._performer = Performer(
            config,
            cluster,
            self._thread,
            uid,
            self.tracker,
            self._keys,
            ledger,
            router,
            sources,
            absorb=self._absorb,
            patience_s=lambda: patience_s(self.config.cluster.fast_poll_interval_s),
        )
        self._poller = Poller(
            lambda: self.config,
            cluster,
            self._thread,
            surprised=self.tracker.surprised,
            learned=learned,
            write=ledger.write,
            sources=sources,
        )
        self._pace = PollPace(pace_of(config), sources.draw, sources.monotonic())
        self._account_at = -math.inf  # not before this is accounting asked again (`monotonic`)
        self._drains_due_at = math.inf  # when the first drained engine's job must be gone (`monotonic`)
        self.error_kinds: Counter[str] = (
            Counter()
        )  # failed polls and commands by kind, for status and metrics
        self.polls_fail = ""  # why the last poll failed, and since when; "" = it did not
        self._demand_decided_on: tuple[tuple[int, int, int], ...] = ()
        self._owners: dict[
            int, str
        ] = {}  # by run, of every run that ever wanted engines: those of a run that ended leave later
        self._poked = asyncio.Event()
        self._stopping = asyncio.Event()
        self._cycle_lock = asyncio.Lock()

    @property
    def view(self) -> ClusterView | None:
        """The last complete observation."""
        return self._poller.view

    def polls_late(self) -> str:
        """Why polls come later than promised, and how far; "" = they do not."""
        return self._pace.behind(self._monotonic())

    def connected(self) -> tuple[int, int]:
        """Engines of our jobs that are registered now, and their GPUs: what is known of them between two polls of Slurm."""
        here = {life.intent_id for life in self._router.lives() if life.here} & self.tracker.intents.keys()
        return len(here), sum(self.tracker.intents[intent_id].intended.gpus for intent_id in here)

    # ---------------------------------------------------------------- life

    def restore(
        self,
        jobs: Sequence[rec.OpenIntent],
        waits: Sequence[rec.OtherUserWaits] = (),
        quarantined: Sequence[str] = (),
    ) -> None:
        """Take over the jobs that the ledger has, and let their workers in again. Call before `run`.

        `waits`: of other users' jobs. `quarantined`: nodes; what was held against them is forgotten with a restart.
        """
        now = self._clock()
        self.tracker.restore(jobs, now)
        self._waits.restore(waits, now)
        if quarantined:
            self._write([rec.NodeReleased(node, now) for node in quarantined])
        for job in jobs:
            intended = job.intended
            try:
                self._keys.allow_again(intended.intent_id)
            except AuthError as error:
                if (
                    job.job_id
                ):  # without its key the job can never register; before the submission there need not be one
                    self._write(
                        [
                            rec.Event(
                                "worker_key_missing",
                                intended.run_id,
                                intended.intent_id,
                                error.cause,
                                "{}",
                                now,
                            )
                        ]
                    )
                    self.tracker.revoke(intended.intent_id, DrainKind.DRAINING, error.cause, now)
        self._keys.drop_stale({job.intended.intent_id for job in jobs})

    def reconfigure(self, config: DaemonConfig) -> None:
        """Go on with what `scavenger.daemon.reload` lets change live, from the next cycle on. Raises
        `ConfigError`, and then nothing changed."""
        self._performer.obey(config)
        if config.harvest != self.config.harvest:
            self.tracker.health.set_up_changed()
        self.config = config
        self._pace.obey(pace_of(config), self._monotonic())
        self.poke()

    def poke(self) -> None:
        """Observe soon: something changed. Only from the event loop's thread."""
        self._poked.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Harvest until `stop` is set. Raises `ConfigError` when the partition may not be harvested, `ClusterError` when there is no
        scheduler to talk to; what fails later is an event and is tried again."""
        (self._state_dir / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
        poll = PollKind.FULL
        while not stop.is_set():
            async with self._cycle_lock:
                if self._stopping.is_set():
                    return
                await self._cycle(poll)
            poll = await self._wait_for_next_poll(stop)

    async def shutdown(self, cancel: bool) -> None:
        """Stop. Jobs stay for the next daemon unless `cancel`: then every one is cancelled, and waited for while that takes `CANCEL_S`."""
        self._stopping.set()
        with contextlib.suppress(TimeoutError):  # a hung command: what it did is found out by the next daemon
            async with asyncio.timeout(CANCEL_S if cancel else STOP_S):
                async with self._cycle_lock:
                    if cancel:
                        await self._cancel_all()
                    self._thread.close()

    async def _cancel_all(self) -> None:
        try:
            while jobs := self.tracker.jobs({}):
                staying = [job.intent_id for job in jobs if job.drain_kind is not DrainKind.CANCELLED]
                chosen = [
                    Cancel(intent_id, "the daemon shuts down", HarvestCode.SHUTDOWN) for intent_id in staying
                ]
                await self._performer.cancel(
                    [action for action in chosen if self.tracker.intents[action.intent_id].job_id], "{}"
                )
                self._absorb(self.tracker.observe(await self._poller.whole(), self._clock()))
                await asyncio.sleep(min(1.0, self.config.cluster.fast_poll_interval_s))
        except ClusterError as error:
            log.warning("jobs may be left", reason=error.cause, jobs=sorted(self.tracker.job_ids()))

    # ---------------------------------------------------------------- one cycle

    async def _cycle(self, poll: PollKind) -> None:
        """Observe and conclude; after a whole poll also decide and perform."""
        rpcs_before_poll = self.cluster.rpc.total
        self._pace.begins(self._monotonic())
        try:
            view, poll = await self._poller.observe(poll, failed=self._pace.failures > 0)
        except ClusterError as error:
            if self._poller.info is None and not isinstance(error, ClusterUnavailable):
                raise  # it never worked: no Slurm on PATH, not a cluster
            self._failed(error, rpcs_before_poll)
            return
        if failures := self._pace.failures:
            why = f"answers again after {failures} failures"
            self._write([rec.Event("cluster_back", 0, self._poller.name, why, "{}", self._clock())])
        self.polls_fail = ""
        rpcs_after_poll = self.cluster.rpc.total
        self._pace.polled(poll, rpcs_after_poll - rpcs_before_poll, self._monotonic())
        self.tracker.works(intent for intent, (n_leases, _) in self._router.leases().items() if n_leases)
        self.tracker.heard(self._router.lives())
        self.tracker.condemned(self._router.condemned(), self._clock())
        output = self.tracker.observe(view, self._clock())
        self._absorb(output)
        await self._explain(output.failed_starts)
        self._observed(view)
        if poll is PollKind.JOBS:
            return  # the nodes in this view are those of the last whole poll: nothing is decided on them
        await self._decide_and_perform(view, output.orphaned_jobs, rpcs_after_poll)

    async def _decide_and_perform(
        self, view: ClusterView, orphaned_jobs: tuple[int, ...], rpcs_after_poll: int
    ) -> None:
        self.idling.observe(view, self.config.harvest.partition, self.tracker.held(), self._clock())
        self._record_gpu_use(view)
        self._record_waits(view)
        await self.stop_state.poll_now()
        demand = self._take_demand()
        now = self._clock()
        info = self._poller.info
        assert info is not None  # by `Poller.observe`
        limits = self._limits(view, info, now)
        self._write(self.stop_state.events)
        self.stop_state.events.clear()
        decided_at = self._monotonic()
        decision = decide.decide(
            view, demand, self.tracker.jobs(self._router.leases(), self._owners), limits, now
        )
        self.stop_state.decided(decision, now)
        try:
            await self._performer.cancel_orphaned_jobs(orphaned_jobs)
            await self._performer.perform(decision, demand, info.backend, self._overtaken)
        except ClusterError as error:
            self._failed(error, rpcs_after_poll, polling=False)
            return
        self._pace.spent(self.cluster.rpc.total - rpcs_after_poll, self._monotonic())
        self._pace.acted(self._monotonic() - decided_at)
        self._poll_when_drains_are_due(limits)
        if info.accounting:
            await self._account()

    async def _explain(self, failed_starts: Sequence[FailedStart]) -> None:
        """What the log of an engine that could not start ended with belongs to the reason why no more are submitted."""
        for failed in failed_starts[-MOST_EXPLAINED:]:
            words = ""
            with contextlib.suppress(OSError):  # the exit code stands
                words = await asyncio.to_thread(
                    job_logs.last_words, job_script.log_path(self._state_dir, failed.intent_id)
                )
            if words:
                self.tracker.health.explain(failed, words)
            why = f"{failed.words}: {words}" if words else failed.words
            self._write(
                [rec.Event("engine_cannot_start", failed.run_id, failed.node, why, "{}", self._clock())]
            )
            log.warning(
                "engine cannot start",
                run_id=failed.run_id,
                node=failed.node,
                reason=why,
                remedy=REMEDIES[failed.code],
            )

    def _record_gpu_use(self, view: ClusterView) -> None:
        now = self._clock()
        use = gpu_use(view, self.config.harvest.partition, self.tracker.job_ids(), now)
        pending = use.jobs_pending_other_users
        polled = rec.ClusterPolled(
            use.idle, use.harvested, use.other_users, use.reserved, use.unusable, pending, now
        )
        self._write([polled])

    def _record_waits(self, view: ClusterView) -> None:
        now, held = self._clock(), self.tracker.held()
        waiting = waiting_jobs(view, self.tracker.job_ids(), now)
        if records := self._waits.observe(view, waiting, held, now):
            self._write(records)

    def _limits(self, view: ClusterView, info: ClusterInfo, now: float) -> Limits:
        """What the configuration, the stop files and the cluster allow now. No standby jobs where Slurm does not let us release one."""
        limits = self.stop_state.update_limits(view, info, self.tracker, self._drain_notice_s, now)
        standby_jobs = limits.placement.standby_jobs if self._performer.steers else 0
        return replace(
            limits,
            idle=self.idling.known(self.config.harvest.min_expected_life, now),
            placement=replace(limits.placement, standby_jobs=standby_jobs),
        )

    def _poll_when_drains_are_due(self, limits: Limits) -> None:
        """The next full poll comes no later than the first drained engine's job must be gone: other users were promised its GPUs.

        A cancelled job is Slurm's to end, and one without an id cannot be cancelled: neither counts.
        """
        draining = [
            job for job in self.tracker.jobs({}) if job.job_id and job.drain_kind is DrainKind.DRAINING
        ]
        due = min((must_end_by(job, limits) for job in draining), default=math.inf)
        # When engines are to leave for a blackout is not left to the budget either.
        to_come = [decide.leave_for_blackout_at(one, limits) for one in limits.blackouts]
        due = min([due, *(at for at in to_come if at > self._clock())])
        self._drains_due_at = self._monotonic() + max(0.0, due - self._clock())

    async def _account(self) -> None:
        """Ask Slurm's accounting for the times of allocations that no poll saw whole. It is no part of a poll: without it all goes on."""
        asked = self.tracker.to_account()[:MOST_JOBS]
        if not asked or self._monotonic() < self._account_at:
            return
        try:
            lives = await self._thread.call(self.cluster.accounting, asked)
        except ClusterError as error:
            self._account_at = self._monotonic() + ACCOUNT_RETRY_S
            self._write(
                [rec.Event("accounting_unavailable", 0, self._poller.name, error.cause, "{}", self._clock())]
            )
            log.warning("accounting unavailable", reason=error.cause, retry_s=ACCOUNT_RETRY_S)
            return
        self._absorb(self.tracker.accounted(asked, lives, self._clock()))

    def _failed(self, error: ClusterError, rpcs_before: int, *, polling: bool = True) -> None:
        """A command failed: what it was to do is decided afresh on the next view. `rpcs_before`: requests counted by then."""
        error_kind = error.error_kind if isinstance(error, ClusterUnavailable) else "refused"
        rpcs = self.cluster.rpc.total - rpcs_before
        retry_s = self._pace.failed(error_kind, rpcs, self._monotonic(), polling=polling)
        self.error_kinds[error_kind] += 1
        if polling:
            info, failed = self._poller.info, self._pace.failures
            release = (
                f"Slurm {info.version}" if info is not None and info.backend != "local" else self._poller.name
            )
            self.polls_fail = f"{failed} polls of {release} in a row failed, the last: {error.cause}"
        kind = "cluster_unavailable" if isinstance(error, ClusterUnavailable) else "cluster_refused"
        failures = self._pace.failures
        detail = {"error_kind": error_kind, "failures": failures, "retry_s": round(retry_s, 3)}
        self._write([rec.Event(kind, 0, self._poller.name, error.cause, as_json(detail), self._clock())])
        log.warning(kind, reason=error.cause, **detail)

    def _absorb(self, output: Output) -> None:
        """Pass on what the tracker concluded: the ledger first, then the router, then the keys of closed jobs."""
        if output.records:
            self._write(output.records)
        for event in output.gone:
            self._router.post(event)
        for record in output.records:
            if isinstance(record, rec.JobEnded):
                self._keys.drop(record.intent_id)

    def _take_demand(self) -> list[Demand]:
        """What the runs want now, within their owners' limits; remembered, so that a change of it is seen."""
        asked = list(self._router.demand())
        self._demand_decided_on = _shape(asked)
        self._owners |= {want.run_id: want.owner for want in asked}
        demand = within_owners(asked, self.config.owners.most_gpus)
        if self._poller.refused:
            return [replace(d, engines=0, reason=self._poller.refused) for d in demand]
        self.tracker.health.owners = self._owners
        return without_failing(self.tracker.health, demand, self.tracker.jobs({}), self._clock())

    async def _overtaken(self) -> bool:
        """Whether what was decided is to be done no more: a busy Slurm takes many seconds a job, and an operator may have stopped us."""
        assert self.view is not None
        await self.stop_state.poll_now()
        old = self._clock() - self.view.observed_at > stale_s(self.config)
        return old or self._stopping.is_set() or self.stop_state.stop_read != self.stop_state.stop_in_force

    # ---------------------------------------------------------------- time

    async def _wait_for_next_poll(self, stop: asyncio.Event) -> PollKind:
        """Until the next poll is due, or it is time to stop. Says which poll that is."""
        poll = PollKind.FULL
        while not (stop.is_set() or self._stopping.is_set()):
            now = self._monotonic()
            changed = self.stop_state.poll_and_compare()
            self._drain_while_slurm_fails()
            due_at, poll, moved = self._next_poll(now, stop_changed=changed)
            if now >= due_at:
                break
            await first(
                stop,
                self._stopping,
                *([] if moved else [self._poked]),
                timeout_s=min(DEMAND_TICK_S, due_at - now),
            )
        if poll is PollKind.FULL:
            self._poked.clear()
        return poll

    def _next_poll(self, now: float, *, stop_changed: bool) -> tuple[float, PollKind, bool]:
        """When the next poll is due (`monotonic`), which it is, and whether something moved since the last decision."""
        demand = self._router.demand()
        moved = self._poked.is_set() or stop_changed or _shape(demand) != self._demand_decided_on
        no_jobs = all(one.standby for one in self.tracker.intents.values())
        at_rest = no_jobs and not any(d.engines for d in demand)
        # A new stop forces a poll now. Lifting it waits for the RPC budget, or a file toggled repeatedly would cause a poll each time.
        stopped_anew = stop_changed and self.stop_state.stop_read is not None
        by = now if stopped_anew else self._drains_due_at
        expecting = self.tracker.expecting(self._clock())
        return *self._pace.next(now, expecting=expecting, moved=moved, at_rest=at_rest, by=by), moved

    def _drain_while_slurm_fails(self) -> None:
        """An operator stopped us or a blackout comes, and there is no poll to decide on: what needs no Slurm is done now."""
        if not self._pace.failures:
            return
        now = self._clock()
        known = limits_of(
            self.config, self.tracker.health, self._drain_notice_s, now, stop=self.stop_state.stop_read
        )
        if closed := decide.harvesting_closed(known, now):
            for action in unseen(self.tracker.jobs(self._router.leases()), *closed):
                self._performer.drain(action, "{}")


def _shape(demand: Sequence[Demand]) -> tuple[tuple[int, int, int], ...]:
    return tuple(sorted((d.run_id, d.engines, d.gpus_per_engine) for d in demand))

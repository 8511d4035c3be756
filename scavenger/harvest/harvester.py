"""The harvester: poll -> track -> decide -> execute, round and round. Theory of operation:

    Poller.observe(poll)             a view of the cluster (in one thread, never on the loop)
      -> HarvestSession.observe      records to the ledger, JobGone to the router, keys of closed jobs removed
      -> HarvestSession.decide       actions with reasons
      -> HarvestSession.perform      commands, each with what must be durable before it; `_do` does them

When to poll again, and how much, is `pace`'s. A poll of the queue alone moves our jobs on; when it shows that one left its GPUs, a full
poll follows at once. A failed observation is an event: nothing is decided, cancelled or concluded on it.

Owns the observation (`Poller`), the wait between two cycles, the commands, and the end. Decides nothing about jobs, nor what becomes of a
reply: that is `session`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import structlog

from scavenger.asyncio_helpers import cycle_timeout_s, first
from scavenger.cluster import job_logs, partition_check
from scavenger.cluster.model import ClusterInfo, ClusterView, Job
from scavenger.cluster.port import Cluster, OneThread
from scavenger.cluster.proxy import client
from scavenger.config import DaemonConfig
from scavenger.errors import AuthError, ClusterError, ClusterUnavailable, ConfigError
from scavenger.harvest.decide import decide
from scavenger.harvest.decide.actions import (
    Action,
    Cancel,
    CancelPending,
    ChangeHands,
    DrainAllocated,
    DrainKind,
    HarvestCode,
    HarvestLimits,
    Submit,
    intent_name,
)
from scavenger.harvest.decide.drain import leave_for_blackout_at, must_end_by, unseen
from scavenger.harvest.decide.environments import EnvironmentLimits
from scavenger.harvest.execute import job_script
from scavenger.harvest.execute.edges import FurtherClusterJobs, LedgerWrites, RouterLink, Sources, WorkerKeys
from scavenger.harvest.limits import StopState, limits_of, pace_of, rules_of, stale_s
from scavenger.harvest.pace import PollKind, PollPace
from scavenger.harvest.session import (
    CancelJobs,
    ChangeKey,
    Command,
    Commit,
    Confirm,
    DropKey,
    HarvestSession,
    Outcome,
    Procedure,
    ReleaseJob,
    Report,
    SubmitJob,
    as_json,
    resume,
)
from scavenger.harvest.track.intents import ENGINE
from scavenger.harvest.track.set_up import REMEDIES, FailedStart
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import EnvironmentDemand
from scavenger.router.core.events import RouterEvent

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
#: After so many failed polls only engines that are connected count as this cluster's.
CLAIM_POLLS = 2
#: Logs that are read in one cycle: where all engines fail they fail alike.
MOST_EXPLAINED = 3

#: A cycle of backfill takes minutes at most (bf_max_time, by default bf_interval: 30 s); a job without a plan for longer has none.
KEPT_S = 300.0
#: A site changes whether Slurm preempts at all, and what it hides, without a word to us: by a reload, or a restart of slurmctld.
INFO_S = 900.0


class Plans:
    """Remembers what backfill planned last for each waiting job. Call `complete` with every poll's queue.

    Each cycle of backfill begins by forgetting the starts and nodes of all waiting jobs (Slurm's `_clear_job_estimates`) and finds them
    again one by one, so a queue that is polled in between shows none.
    """

    def __init__(self) -> None:
        self._seen: dict[
            int, tuple[Job, float]
        ] = {}  # by job id: how it was planned last, and when that was seen

    def complete(self, jobs: Sequence[Job], now: float) -> tuple[Job, ...]:
        """The queue, with the last plan of each waiting job that shows none, while that is still to come."""
        seen = self._seen
        self._seen = {}
        return tuple(self._completed(job, seen, now) if job.waits else job for job in jobs)

    def _completed(self, job: Job, seen: dict[int, tuple[Job, float]], now: float) -> Job:
        if job.planned:
            self._seen[job.job_id] = (job, now)
            return job
        found = seen.get(job.job_id)
        if found is None or now - found[1] > KEPT_S or found[0].start_time <= now:
            return job
        self._seen[job.job_id] = found
        return replace(job, planned=found[0].planned, start_time=found[0].start_time)


class Poller:
    """Observes the cluster: of the queue alone, or of everything. A poll of the queue becomes a full one where it says too little.

    Owns the last complete observation, what Slurm says of itself, and the verdict on the partition. Every observation is stamped by our
    clock, with the time before it was asked for. Knows no job of ours, and not when to poll. `surprised` says whether a queue shows more
    than the queue alone can explain; `learned` gets what Slurm says of itself. `called`: a further cluster's name.
    """

    def __init__(
        self,
        config: Callable[[], DaemonConfig],
        cluster: Cluster,
        thread: OneThread,
        *,
        surprised: Callable[[Sequence[Job]], bool],
        learned: Callable[[ClusterInfo], None],
        write: Callable[[Sequence[rec.Record]], object],
        sources: Sources,
        called: str = "",
    ) -> None:
        self._config, self._cluster, self._thread = config, cluster, thread
        self._surprised, self._learned, self._write = surprised, learned, write
        self._clock, self._monotonic, self._called = sources.clock, sources.monotonic, called
        self.view: ClusterView | None = None  # the last complete observation
        self.info: ClusterInfo | None = None  # None: Slurm never answered
        self._info_at = -math.inf
        self._plans = Plans()
        self.refused = ""  # why the partition may no longer be harvested

    @property
    def name(self) -> str:
        return self._called or (self.info.name if self.info is not None else "cluster")

    async def observe(self, poll: PollKind, failed: bool) -> tuple[ClusterView, PollKind]:
        """What was seen, and by which poll. `failed`: the last one did. Raises `ClusterError`, and the first one `ConfigError` when the
        partition may not be harvested."""
        view, poll = await self._observe(poll, failed)
        self.view = replace(view, jobs=self._plans.complete(view.jobs, view.observed_at))
        return self.view, poll

    async def _observe(self, poll: PollKind, failed: bool) -> tuple[ClusterView, PollKind]:
        if self.info is None:
            info = await self._thread.call(self._cluster.info)
            view = await self.whole()
            harvest = self._config().harvest
            partition_check.check(info, view.partitions, harvest.partition, harvest.qos)
            self._learn(info)
            return view, PollKind.FULL
        if poll is PollKind.JOBS and self.view is not None:
            asked_at = self._clock()
            jobs = await self._thread.call(self._cluster.jobs)
            if not self._surprised(jobs):
                return replace(self.view, jobs=jobs, observed_at=asked_at), PollKind.JOBS
        view = await self.whole()
        if (
            failed or self._monotonic() - self._info_at >= INFO_S
        ):  # a controller that was restarted has read another configuration
            self._learn(await self._thread.call(self._cluster.info))
        self._check_again(self.info, view)
        return view, PollKind.FULL

    async def whole(self) -> ClusterView:
        """A view, stamped by our clock and with the time before it was asked for: it is at least as new as it says."""
        asked_at = self._clock()
        return replace(await self._thread.call(self._cluster.view), observed_at=asked_at)

    def _learn(self, info: ClusterInfo) -> None:
        if info != self.info:
            self._learned(info)
        self.info, self._info_at = info, self._monotonic()

    def _check_again(self, info: ClusterInfo, view: ClusterView) -> None:
        """A partition that stops being harmless while we run gets no more jobs, and loses those it has."""
        harvest = self._config().harvest
        refused = ""
        try:
            partition_check.check(info, view.partitions, harvest.partition, harvest.qos)
        except ConfigError as error:
            refused = error.cause
        if refused != self.refused:
            kind = "partition_refused" if refused else "partition_allowed"
            self._write(
                [
                    rec.Event(
                        kind, 0, harvest.partition, refused or "it is preemptible again", "{}", self._clock()
                    )
                ]
            )
        self.refused = refused


class Durable:
    """A commit that is waited for at most `timeout_s`, which is asked for at each.

    A ledger that cannot take a transaction (no space, no connection) stalls, and with it all that wait for it. Harvesting must not: other
    users wait for GPUs, and an admin may have stopped it. After the bound the session decides what to do without.
    """

    def __init__(
        self, ledger: LedgerWrites, timeout_s: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._commit, self._write = ledger.commit, ledger.write
        self._timeout_s, self._clock = timeout_s, clock
        self.stalled = False

    async def within(self, records: Sequence[rec.Record]) -> bool:
        """Whether the records are durable in time. False: they are queued, and will be if the ledger recovers. Raises `Fenced`."""
        timeout_s = self._timeout_s()
        try:
            async with asyncio.timeout(timeout_s):
                await self._commit(records)
        except TimeoutError:
            why = f"no record became durable within {timeout_s:g} s: nothing is submitted, and jobs are cancelled all the same"
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


def _is_own(file: str) -> bool:
    """Whether it is there, and this process's own user's. A path that no job script can name is none."""
    try:
        return file.isprintable() and os.lstat(file).st_uid == os.getuid()
    except (OSError, ValueError):
        return False


class Harvester:
    """See the module. `uid`: of the ledger, in its jobs' names and comments. `learned` gets what Slurm says of itself when that changes,
    `observed` each view. `drain_notice_s`: how long a drained engine's job may stay. `further`: its jobs are on a further cluster."""

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
        further: FurtherClusterJobs | None = None,
    ) -> None:
        self.config, self.cluster, self.uid = config, cluster, uid
        self._router, self._write, self._observed = router, ledger.write, observed
        self._clock, self._monotonic, self._drain_notice_s = sources.clock, sources.monotonic, drain_notice_s
        self._state_dir = config.daemon.state_dir
        self._template, self._token = self._read_template(config), sources.token
        self._further = further
        user = client.jobs_user(config) if further is None else further.user
        self.session = HarvestSession(rules_of(config, uid, user), self._mint, self._mint_again)
        self.tracker = self.session.tracker
        self.stop_state = StopState(lambda: self.config, beyond_link=further is not None)
        self._thread = OneThread("cluster")
        self._engines = client.engines_user_of(config) if further is None else further.engines
        self._claims: Counter[int] = Counter()  # engines by run, as of the last decision
        self._keys = WorkerKeys(
            self._state_dir, router, self._engines, further.name if further is not None else ""
        )
        self._durable = Durable(
            ledger, lambda: cycle_timeout_s(self.config.cluster.fast_poll_interval_s), sources.clock
        )
        self._poller = Poller(
            lambda: self.config,
            cluster,
            self._thread,
            surprised=self.tracker.surprised,
            learned=learned,
            write=ledger.write,
            sources=sources,
            called=further.name if further is not None else "",
        )
        self._pace = PollPace(pace_of(config), sources.draw, sources.monotonic())
        self._account_at = -math.inf  # not before this is accounting asked again (`monotonic`)
        self._drains_due_at = math.inf  # when the first drained engine's job must be gone (`monotonic`)
        # Failed polls and commands by kind, for status and metrics.
        self.error_kinds: Counter[str] = Counter()
        self.polls_fail = ""  # why the last poll failed, and since when; "" = it did not
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

    def claimed(self) -> Counter[int]:
        """Engines that it has, or decided to start, by run: other clusters start the rest, and those that wait for long. While its polls
        fail: those connected."""
        if self._pace.failures < CLAIM_POLLS:
            return self._claims
        here = {life.intent_id for life in self._router.lives() if life.here}
        return Counter(
            one.intended.run_id for intent_id, one in self.tracker.intents.items() if intent_id in here
        )

    def _claim(self, actions: Sequence[Action]) -> None:
        """Nothing is awaited between the demand that was decided on and this: two clusters never start engines for one and the same."""
        now, fresh_after_s = self._clock(), self.config.harvest.fresh_after_s
        leaving = {
            one.intent_id
            for one in actions
            if isinstance(one, CancelPending | Cancel | DrainAllocated | ChangeHands)
        }
        staying = [
            job.run_id
            for job in self.tracker.jobs({})
            if job.drain_kind is DrainKind.NO and not job.standby and job.intent_id not in leaving
            if not job.waits or now - job.since < fresh_after_s  # one that waits for long starts elsewhere
        ]
        coming = [one.run_id for one in actions if isinstance(one, Submit) and not one.standby]
        coming += [one.run_id for one in actions if isinstance(one, ChangeHands)]
        self._claims = Counter(staying + coming)

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
        self.session.restore(jobs, waits, now)
        if quarantined:
            self._write([rec.NodeReleased(node, now) for node in quarantined])
        for job in jobs:
            intended = job.intended
            if intended.kind != ENGINE:
                continue  # it has no key of ours
            try:
                self._keys.allow_again(intended.intent_id, intended.worker_key if job.run_since else "")
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
        self._claim(())

    def reconfigure(self, config: DaemonConfig) -> None:
        """Go on with what `scavenger.daemon.reload` lets change live, from the next cycle on. Raises
        `ConfigError`, and then nothing changed."""
        self._template = self._read_template(config)
        if config.harvest != self.config.harvest:
            self.tracker.health.set_up_changed()
        self.config = config
        self._pace.obey(pace_of(config), self._monotonic())
        self.poke()

    def poke(self) -> None:
        """Observe soon: something changed. Only from the event loop's thread."""
        self._poked.set()

    def reachable(self) -> None:
        """The cluster answers again, as somebody else saw: a failed poll is repeated now, however long it was to wait."""
        self._pace.retry(self._monotonic())
        self.poke()

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
            while jobs := [*self.tracker.jobs({}), *self.session.environments.jobs({})]:
                staying = [
                    job.intent_id for job in jobs if job.drain_kind is not DrainKind.CANCELLED or job.returned
                ]
                chosen = [
                    Cancel(intent_id, "the daemon shuts down", HarvestCode.SHUTDOWN) for intent_id in staying
                ]
                known = {job.intent_id for job in jobs if job.job_id}
                listed = [action for action in chosen if action.intent_id in known]
                await self._perform(self.session.cancel(listed, "{}", self._clock()))
                output = self.session.observe(await self._poller.whole(), {}, (), (), self._clock())
                self._report(output.records, output.gone)
                await asyncio.sleep(min(1.0, self.config.cluster.fast_poll_interval_s))
        except ClusterError as error:
            log.warning("jobs may be left", reason=error.cause, jobs=sorted(self.tracker.job_ids()))

    # ---------------------------------------------------------------- one cycle

    async def _cycle(self, poll: PollKind) -> None:
        """Observe and conclude; after a whole poll also decide and perform."""
        rpcs_before_poll = self.cluster.rpc.total
        open_runs = {want.run_id for want in self._router.demand()}
        await self._perform(self.session.settle_loans(open_runs, self._clock()))
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
        router = self._router
        output = self.session.observe(
            view, router.leases(), router.lives(), router.condemned(), self._clock()
        )
        self._report(output.records, output.gone)
        for intent_id in output.changed:
            self._keys.changed(intent_id)
        await self._explain(output.failed_starts)
        self._observed(view)
        if poll is PollKind.JOBS:
            return  # the nodes in this view are those of the last whole poll: nothing is decided on them
        await self._decide_and_perform(view, output.orphaned_jobs, rpcs_after_poll)

    async def _decide_and_perform(
        self, view: ClusterView, orphaned_jobs: tuple[int, ...], rpcs_after_poll: int
    ) -> None:
        config, session = self.config, self.session
        self._write(session.use_records(view, config.harvest.partition, self._clock()))
        await self.stop_state.poll_now()
        now = self._clock()
        demand = session.take_demand(
            self._router.demand(), config.owners.most_gpus, self._poller.refused, now
        )
        info = self._poller.info
        assert info is not None  # by `Poller.observe`
        limits = self.stop_state.update_limits(view, info, self.tracker, self._drain_notice_s, now)
        self._write(self.stop_state.events)
        self.stop_state.events.clear()
        decided_at = self._monotonic()
        decision = session.decide(
            view, demand, self._router.leases(), limits, config.harvest.min_expected_life, now
        )
        self._claim(decision.actions)
        self.stop_state.decided(decision, now)
        try:
            await self._perform(session.perform(decision, demand, orphaned_jobs, self._clock()))
            await self._environments(view, limits)
        except ClusterError as error:
            self._failed(error, rpcs_after_poll, polling=False)
            return
        self._pace.spent(self.cluster.rpc.total - rpcs_after_poll, self._monotonic())
        self._pace.acted(self._monotonic() - decided_at)
        self._poll_when_drains_are_due(limits)
        if info.accounting:
            await self._account()

    async def _environments(self, view: ClusterView, limits: HarvestLimits) -> None:
        """Environment workers, once engines have what they want. Raises as `_perform`."""
        harvest, session, now = self.config.harvest, self.session, self._clock()
        demand = [] if self._poller.refused else self._environment_demand()
        if not demand and not session.environments.intents:
            return
        most = EnvironmentLimits(
            harvest.max_environment_workers, harvest.environment_cpus, harvest.environment_memory_mb
        )
        decision = session.decide_environments(view, demand, limits, most, now)
        await self._perform(session.perform_environments(decision, now))

    def _environment_demand(self) -> list[EnvironmentDemand]:
        """What runs of this daemon's own user want: an environment is a run's own code, and its job is the user's who submits it.

        On a further cluster none: their file is not there."""
        if not self.config.harvest.max_environment_workers or self._engines is not None or self._further:
            return []
        return [one for one in self._router.environments() if _is_own(one.file)]

    async def _explain(self, failed_starts: Sequence[FailedStart]) -> None:
        """What the log of an engine that could not start ended with belongs to the reason why no more are submitted."""
        for failed in failed_starts[-MOST_EXPLAINED:]:
            words = ""
            with contextlib.suppress(OSError, ClusterError):  # the exit code stands
                words = await self._thread.call(self._last_words, failed.intent_id)
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

    def _last_words(self, intent_id: str) -> str:
        if self._engines is not None:
            return job_logs.words_of(self._engines.end_of_log(intent_id))
        return job_logs.last_words(job_script.log_path(self._state_dir, intent_id))

    def bound_logs(self, live: Collection[str]) -> None:
        """Hold the logs of all jobs to `harvest.logs_mb`. Blocks; raises `OSError`, `ClusterError`."""
        most_bytes = self.config.harvest.logs_mb * 2**20
        if self._engines is not None:
            self._engines.tidy(live, most_bytes)
        else:
            job_logs.bound(self._state_dir / "logs", {f"{name}.log" for name in live}, most_bytes)

    def _poll_when_drains_are_due(self, limits: HarvestLimits) -> None:
        """The next full poll comes no later than the first drained engine's job must be gone: other users were promised its GPUs.

        A cancelled job is Slurm's to end, and one without an id cannot be cancelled: neither counts.
        """
        draining = [
            job for job in self.tracker.jobs({}) if job.job_id and job.drain_kind is DrainKind.DRAINING
        ]
        due = min((must_end_by(job, limits) for job in draining), default=math.inf)
        # When engines are to leave for a blackout is not left to the budget either.
        to_come = [leave_for_blackout_at(one, limits) for one in limits.blackouts]
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
        output = self.tracker.accounted(asked, lives, self._clock())
        self._report(output.records, output.gone)

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

    # ---------------------------------------------------------------- what the session orders

    async def _perform(self, procedure: Procedure[object]) -> None:
        """Do one command after the other. Raises what the procedure raises, and `Fenced`."""
        outcome = None
        while (command := resume(procedure, outcome)) is not None:
            outcome = await self._do(command)

    async def _do(self, command: Command) -> Outcome:
        done, job_id = True, 0
        try:
            match command:
                case Report(records, events):
                    self._report(records, events)
                case Commit(records):
                    done = await self._durable.within(records)
                case Confirm():
                    done = await self._holds()
                case CancelJobs(job_ids):
                    await self._thread.call(self.cluster.cancel, job_ids)
                case ReleaseJob(waiting, node):
                    await self._thread.call(self.cluster.release, waiting, node)
                case ChangeKey(intent_id):
                    await self._write_key(intent_id)
                case DropKey(intent_id):
                    self._keys.drop(intent_id)
                case SubmitJob(intent_id, action):
                    job_id = await self._submit(intent_id, action)
        except ClusterError as error:
            return Outcome(self._clock(), error=error)
        return Outcome(self._clock(), done, job_id)

    def _report(self, records: Sequence[rec.Record], events: Sequence[RouterEvent]) -> None:
        """The ledger first, then the router, then the keys of closed jobs."""
        if records:
            self._write(records)
        for event in events:
            self._router.post(event)
        for record in records:
            if isinstance(record, rec.JobEnded):
                self._keys.drop(record.intent_id)

    async def _holds(self) -> bool:
        """Whether what was decided still holds."""
        assert self.view is not None
        await self.stop_state.poll_now()
        old = self._clock() - self.view.observed_at > stale_s(self.config)
        stopped = self._stopping.is_set() or self.stop_state.changed
        return not (old or stopped)

    def _mint(self, run: str) -> tuple[str, str]:
        intent_id = intent_name(self._token())
        return intent_id, self._keys.mint(run, intent_id) if run else ""

    def _mint_again(self, run: str, intent_id: str) -> str:
        return self._keys.mint(run, intent_id)

    async def _write_key(self, intent_id: str) -> None:
        """Let the holder of the pair that was minted last in, once its file is there. Raises `ClusterError`."""
        try:
            await self._thread.call(self._keys.write, intent_id)
        except OSError as error:
            raise ClusterError(f"its key file cannot be written: {error}") from error
        except ClusterError as error:
            # Also no answer is a refusal: sbatch never ran, and there is no job to look for.
            raise ClusterError(f"its key cannot be written: {error.cause}", error.remedy) from error
        self._keys.allow(intent_id)

    async def _submit(self, intent_id: str, action: Submit) -> int:
        """The key file is there before its job, and the key is let in before its worker comes."""
        assert self._poller.info is not None  # a job is submitted on a view
        if self._further is not None:
            submit = partial(self._further.submit, self.uid, intent_id, action)
        else:
            backend = self._poller.info.backend
            template = job_script.read_template(None) if action.environment else self._template
            spec = job_script.job_spec(self.config, template, backend, self.uid, intent_id, action)
            submit = partial(self.cluster.submit, spec)
            if action.environment:
                return await self._thread.call(submit)
        await self._write_key(intent_id)
        return await self._thread.call(submit)

    def _read_template(self, config: DaemonConfig) -> str:
        """The job template of this configuration. Raises `ConfigError` where no job could be made of it."""
        template = job_script.read_template(config.harvest.job_template)
        intent_id, probe = (intent_name("0" * 16), Submit(0, "probe", config.harvest.partition, 1, ""))
        job_script.job_spec(config, template, config.cluster.backend, self.uid, intent_id, probe)
        return template

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
        environments = self._environment_demand()
        moved = self._poked.is_set() or stop_changed or self.session.moved(demand)
        moved |= self.session.environments_moved(environments)
        no_jobs = all(one.standby for one in self.tracker.intents.values())
        no_jobs &= not self.session.environments.intents
        at_rest = no_jobs and not any(d.engines for d in demand) and not environments
        # A new stop forces a poll now. Lifting it waits for the RPC budget, or a file toggled repeatedly would cause a poll each time.
        stopped_anew = stop_changed and self.stop_state.stop_read is not None
        by = now if stopped_anew else self._drains_due_at
        trackers = (self.tracker, self.session.environments)
        expecting = any(one.expecting(self._clock()) for one in trackers)
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
                report = self.session.drain(action, "{}", now)
                self._report(report.records, report.events)

"""The daemon: wires ledger, router, server and harvester together, and runs them until it is stopped.

Boundary: one subcommand; the process's composition root.

Owns the order of starting and stopping, signals, and the bridge between threads and the event loop. Decides nothing by itself.
A daemon that loses its generation (another one took the ledger) stops at once; one that finds another at work does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
import structlog

from scavenger import __version__
from scavenger.asyncio_helpers import LEAST_S, within
from scavenger.cluster.model import ClusterView
from scavenger.cluster.port import Cluster
from scavenger.cluster.unix_users import own_user
from scavenger.config import DaemonConfig
from scavenger.daemon import ownership, process
from scavenger.daemon.clusters import FurtherClusters, of_cluster
from scavenger.daemon.enrolment import Enrolment
from scavenger.daemon.key_requests import KeyRequests
from scavenger.daemon.ownership import Announcement
from scavenger.daemon.process import UnixClock
from scavenger.daemon.service_manager import ServiceManager
from scavenger.daemon.systemd import Notifier
from scavenger.daemon.takeover import BEAT_S, HolderVerdict, Manner, TakeoverWatch
from scavenger.errors import AuthError, Fenced, LedgerError, LedgerUnavailable, ScavengerError
from scavenger.harvest.execute.edges import LedgerWrites, RouterLink, Sources
from scavenger.harvest.harvester import Harvester
from scavenger.harvest.track import training_jobs, waits
from scavenger.harvest.track.training_jobs import TrainingGpus
from scavenger.host import descriptors, listening, storage
from scavenger.ledger import identity, retention, store
from scavenger.ledger.faults import REMEDIES, explain
from scavenger.ledger.maintain.keeper import Keeper
from scavenger.ledger.read import history, reader
from scavenger.ledger.records import DeliveryState, Event, Heartbeat, OpenGroup, Snapshot
from scavenger.ledger.write import transaction
from scavenger.ledger.write.transaction import Generation, history_began
from scavenger.ledger.write.writer import Writer, WriterState
from scavenger.observe import fleet, public_status, status
from scavenger.observe.training import TrainingJobs, UnclosedRun
from scavenger.policy import registry, warm_start
from scavenger.policy.fallback import with_fallback
from scavenger.policy.fleet_size import Demand, without
from scavenger.policy.interface import Fact
from scavenger.protocol import keys
from scavenger.protocol.key_requests import make_public
from scavenger.router.core import deliveries, worker_counts, workers
from scavenger.router.core.events import PastRead, TopologyRead
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import Payload, PayloadStore
from scavenger.router.core.state import RouterLimits
from scavenger.router.edge.server import KeyRing, RouterServer

log = structlog.get_logger()

#: Polling interval of a ledger that another daemon holds.
CHECK_INTERVAL_S = 1.0
#: How long a daemon that was fenced on this host may take to give up its ports: it sees it at its next heartbeat.
PORT_WAIT_S = 6 * BEAT_S

T = TypeVar("T")


class Daemon:
    """One generation of the daemon. `run` reads top-down."""

    def __init__(
        self,
        config: DaemonConfig,
        cluster: Cluster | None,
        manner: Manner = Manner.ASK,
        service_manager: ServiceManager | None = None,
    ) -> None:
        self.config = config
        self.service_manager = service_manager or ServiceManager(config)
        self.manner = manner
        self.new_ledger = False  # take the ledger that is named, whatever the state directory's was
        self.cancel_at_end = False  # of a daemon that ends with its one run: no daemon would adopt its jobs
        self.cluster = cluster
        self.state_dir: Path = config.daemon.state_dir
        self.clock = UnixClock()
        self.keyring = KeyRing()
        self.stop = asyncio.Event()
        self.failure: BaseException | None = None
        self.training = TrainingJobs()
        self._training_gpus = TrainingGpus()
        self.harvester: Harvester | None = None
        self.clusters: FurtherClusters | None = None  # where others may link
        self._own_user = ""  # this process's, not that of engines; from `_harvester` on
        self._announcement = Announcement(self.state_dir, config.daemon)
        self._key_requests: KeyRequests | None = None  # where other users may own runs
        self._clusters_port = 0  # 0: none may link
        self._waits_for = ""  # the holder that was logged last, while this daemon waits to claim
        #: A daemon of this host that lives is followed: its ports may take a while to be free.
        self._predecessor_may_hold_ports = False
        # What comes to be as `run` goes on, in this order.
        self._ownership: ownership.Ownership  # from `_claim` on
        self._engine: sa.Engine  # from `_construct` on, as the two that follow
        self.server: RouterServer
        self._status_now: Callable[[], status.Status]
        self._enrolment: Enrolment  # from `_restore` on

    async def run(self) -> int | None:
        """Serve until SIGTERM, SIGINT or `stop`. The generation that it was; None when it was stopped before it had one.

        Raises `LedgerHeld` when another daemon is at work, `Fenced` when another one took over, `LedgerError` when writing ended.
        """
        self._listen_to_signals()
        pair = self._open_state_dir()
        if not await self._claim():
            return None
        writer = self._take_ledger()
        server = self._construct(writer, pair)
        try:
            snapshot = await self._patiently(lambda: self._restore(server, writer, pair))
            port = await self._bind_ports(server)
            self._resume(server, writer, snapshot)
            await self._announce(server, pair.public, port, writer.granted)
            await self._serve(server, self._keeper(server, writer))
        except BaseException as error:
            self.failure = self.failure or error
            raise
        finally:
            await self._shut_down(server, writer)
        if self.failure is not None:
            raise self.failure
        return int(writer.granted)

    async def _serve(self, server: RouterServer, keeper: Keeper | None) -> None:
        """Run every part until one of them ends or fails, or the daemon is stopped; then end them all."""
        stop, status_now, harvester = self.stop, self._status_now, self.harvester
        works: list[Coroutine[Any, Any, None]] = [
            server.run(stop),
            self._watch_files(),
            status.publish(self.state_dir, status_now, stop),
            self._beat(server),
            # None of these ends before the daemon does; one that fails ends it.
            *map(
                self._run_until_stopped,
                self.service_manager.work(
                    server,
                    harvester,
                    lambda: self.clusters.harvesters() if self.clusters is not None else {},
                    status_now,
                    self.clock,
                    self._reconfigure,
                    stop,
                ),
            ),
        ]
        if self._key_requests is not None:
            works.append(self._key_requests.run(self._enrolment.read))
        if (public_dir := self.config.daemon.public_dir) is not None:
            works.append(public_status.publish(public_dir, lambda: public_status.of(status_now()), stop))
        works += [part.run(stop) for part in (harvester, self.clusters, keeper) if part is not None]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(
                [*tasks, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            stop.set()
            cancel = self.cancel_at_end and self.failure is None
            await asyncio.gather(
                *(part.shutdown(cancel) for part in (harvester, self.clusters) if part is not None)
            )
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _shut_down(self, server: RouterServer, writer: Writer) -> None:
        """Commit what was received, release the ledger to a successor, and close everything."""
        self.service_manager.notifier.stopping("committing what was received")
        durable = await asyncio.to_thread(writer.close)
        if durable and self.failure is None:
            await asyncio.to_thread(self._release, writer.granted)
        await self._write_last_status(self._status_now())
        if self.clusters is not None:
            self.clusters.close()
        server.close()
        self._ownership.close()
        self.service_manager.close()

    # ---------------------------------------------------------------- before it serves, in this order

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)
        self.service_manager.open(loop)
        loop.set_exception_handler(self._broken)

    def _open_state_dir(self) -> keys.KeyPair:
        """The daemon's own key pair. Raises `ScavengerError` when the state directory is missing or may not be written."""
        storage.require_state_dir(self.state_dir)
        pair = keys.read_keypair(keys.server_key_path(self.state_dir))
        storage.require_writable(self.state_dir, "daemon.state_dir")
        public_dir = self.config.daemon.public_dir
        if public_dir is not None:
            make_public(public_dir)
            self._key_requests = KeyRequests(self.state_dir, public_dir, self.config.owners, self.clock)
        return pair

    async def _claim(self) -> bool:
        """Claim the state directory; wait for a daemon that holds it or its ledger as `manner` says. False: stopped meanwhile."""
        me = ownership.LedgerHolder(socket.gethostname(), os.getpid(), self.clock())
        self._ownership = ownership.Ownership(self.state_dir, me)
        watch, claimed = TakeoverWatch(self.manner), False
        try:
            while not (claimed or self.stop.is_set()):
                claimed = await self._poll_holders(watch) is HolderVerdict.TAKE
                if not claimed:
                    await self._pause()
            return claimed
        finally:
            if not claimed:
                self._ownership.close()

    async def _poll_holders(self, watch: TakeoverWatch) -> HolderVerdict:
        """One look at who holds the ledger: TAKE or WAIT. Raises `LedgerHeld` where this daemon is not to start."""
        try:
            there = await asyncio.to_thread(ownership.holders, self._ownership, self.config.ledger_url)
        except LedgerError as error:  # a failed poll says nothing of who is there
            if self.manner is not Manner.STAND_BY:
                raise
            log.warning("standing by; who holds the ledger cannot be asked", reason=error.cause)
            return HolderVerdict.WAIT
        verdict, why, sign = watch.poll(there, time.time(), time.monotonic())
        if sign is not None and verdict is HolderVerdict.REFUSE:
            raise ownership.refused(there[sign], why)
        if verdict is HolderVerdict.TAKE:
            for holder in there.values():
                log.warning("taking over", held_by=str(holder), why=why)
                self._predecessor_may_hold_ports |= holder.here and not holder.gone
            return verdict
        self.service_manager.waiting(f"waiting for another daemon: {why}")
        if sign is not None and sign.who != self._waits_for:
            self._waits_for = sign.who
            log.warning("waiting", held_by=str(there[sign]), why=why)
        return verdict

    def _take_ledger(self) -> Writer:
        """Upgrade the ledger and become its writer. The daemon that was its writer until now is fenced."""
        try:
            # Nothing is written before it is known that this daemon can serve.
            if not self._predecessor_may_hold_ports:
                listening.require_free(listening.ROUTER, self.config.daemon.listen, self.config.daemon.port)
                self.service_manager.serve_metrics()
            self._require_ledger()
            store.upgrade(self.config.ledger_url)
            return self._start_writer()
        except LedgerError as error:
            self._ownership.close()
            raise ownership.explained(error, self.state_dir, self.config.ledger_url) from error
        except ScavengerError:
            self._ownership.close()
            raise

    def _construct(self, writer: Writer, pair: keys.KeyPair) -> RouterServer:
        """Policy, payload memory, router and server of the generation that `writer` was granted."""
        generation, self._engine = writer.granted, writer.engine
        payloads = PayloadStore(self.config.daemon.payload_memory_mb * 2**20)
        policy = with_fallback(
            registry.named(self.config.router.policy, self.config.router.harvested_gpu_price),
            self._policy_failed,
        )
        router = Router(
            RouterLimits.of(self.config),
            generation,
            payloads,
            generation.timeline,
            generation.restored,
            policy,
        )
        counted = self.service_manager.counted(writer, self.clock)
        self.server = server = RouterServer(
            router,
            counted,
            self.keyring,
            pair,
            self.clock,
            self._read_replay_groups,
            payloads,
            self._read_payloads,
            self._read_pass_rates,
            self._read_taken,
            self._read_ended_episodes,
        )
        self._status_now = functools.partial(self._status, server, writer, payloads, self.clock())
        return server

    def _restore(self, server: RouterServer, writer: Writer, pair: keys.KeyPair) -> Snapshot:
        """Read the ledger and the key files; tell metrics, key ring and harvester what they have. The router follows in `_resume`."""
        snapshot, in_force = reader.read_snapshot(writer.engine), reader.keys_in_force(writer.engine)
        identity.record(self.state_dir, self.config.ledger_url, self.clock())
        self.service_manager.restore(snapshot)
        self._enrolment = Enrolment(
            self.state_dir, pair.public, self.keyring, server.write, self.clock, in_force
        )
        self._enrolment.read()
        uid, own = keys.site_uid(self.state_dir, pair.public), of_cluster(snapshot, "")
        self.clusters = self._further(server, pair, uid)
        self.harvester = self._harvester(server, uid)
        if self.harvester is not None:
            self.harvester.restore(*own)
            self._training_gpus.restore(snapshot.training_jobs)
        elif own.waits or snapshot.training_jobs:
            # No harvester polls: they would grow with every commit.
            now = self.clock()
            server.write([*waits.unseen(own.waits, now), *training_jobs.unseen(snapshot.training_jobs, now)])
        if self.clusters is not None:
            self.clusters.own = self.harvester
            self.clusters.restore(snapshot)
        elif left := {job.intended.cluster for job in snapshot.jobs} - {""}:
            log.warning(
                "jobs on further clusters are not followed",
                clusters=sorted(left),
                remedy="set daemon.clusters_port again",
            )
        return snapshot

    async def _patiently(self, read: Callable[[], T]) -> T:
        """What `read` gives, asked again while the ledger cannot be read: the database may come back, as it may while it is written.

        Raises `LedgerUnavailable` when the daemon is stopped meanwhile.
        """
        while True:
            try:
                return read()
            except LedgerUnavailable as error:
                if self.stop.is_set():
                    raise
                log.warning("waiting for the ledger", reason=error.cause, remedy=error.remedy)
                self.service_manager.waiting(f"waiting for the ledger: {error.cause}")
            await self._pause()

    async def _bind_ports(self, server: RouterServer) -> int:
        if self._predecessor_may_hold_ports:
            await self._retry_bind(self.service_manager.serve_metrics)
        section, clusters = self.config.daemon, self.clusters
        if clusters is not None and section.clusters_port is not None:
            at = section.clusters_port
            self._clusters_port = await self._retry_bind(lambda: clusters.link.bind(section.listen, at))
        return await self._retry_bind(lambda: server.bind(self.config.daemon.listen, self.config.daemon.port))

    def _resume(self, server: RouterServer, writer: Writer, snapshot: Snapshot) -> None:
        """The router goes on from the snapshot, and its policies from what they had learned."""
        server.perform(server.router.restore(snapshot, self.clock()))
        self._warm_start(server, writer)
        process.tune()
        self._report_new_timeline(server, writer.granted)

    async def _announce(self, server: RouterServer, public: str, port: int, generation: Generation) -> None:
        """Commit once to prove that this generation still owns the ledger. Then publish the rendezvous file, unless the daemon was
        stopped or the file names a newer generation.

        Raises `Fenced` or `LedgerError` where the writer has ended: its own report of that may still be on its way to this thread.
        """
        ours = asyncio.create_task(server.commit([Heartbeat(self.clock())]))
        stopped = asyncio.create_task(self.stop.wait())
        await asyncio.wait({ours, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (ours, stopped):
            task.cancel()
        error = ours.exception() if ours.done() else None
        if error is not None and not self.stop.is_set():
            raise error
        if self.stop.is_set() or self._announcement.newest() > generation:
            return
        endpoint = self._announcement.publish(public, port, generation, self._clusters_port)
        if self.clusters is not None and self._announcement.mine is not None:
            self.clusters.link.announce(self._announcement.mine)
        self.service_manager.notifier.ready(f"serving at {endpoint}, generation {int(generation)}")
        log.info(
            "serving",
            endpoint=endpoint,
            generation=int(generation),
            ledger=store.parse(self.config.ledger_url).render_as_string(),
        )

    # ---------------------------------------------------------------- while it serves

    async def _run_until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        await work
        await self.stop.wait()

    async def _beat(self, server: RouterServer) -> None:
        """A commit now and then, also when nothing happens: by it others know that we live, and we that we are not fenced."""
        while True:
            await asyncio.sleep(BEAT_S)
            await server.commit([Heartbeat(self.clock())])

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            self._check_files()

    def _check_files(self) -> None:
        """Owners come and go; an older daemon that was slow to die may have overwritten the rendezvous; the lock is touched as a sign
        of life. A fault of one of the three is logged under its own name, and keeps back neither the others nor the daemon.
        """
        for check, fault in (
            (self._enrolment.read, "owners not read again; those known stay"),
            (self._defend_rendezvous, "the rendezvous file was not checked for another daemon; tried again"),
            (self._ownership.claim, "daemon.lock was not touched: this daemon may look silent; tried again"),
        ):
            try:
                check()
            except (OSError, AuthError) as error:
                log.warning(fault, reason=str(error))

    def _reconfigure(self, config: DaemonConfig) -> None:
        """Take over what may change live. Raises `ConfigError`, and then nothing changed."""
        if self.harvester is not None:
            self.harvester.reconfigure(config)
        if self.clusters is not None:
            self.clusters.reconfigure(config)
        if self._key_requests is not None:
            self._key_requests.reconfigure(config.owners)

    def _defend_rendezvous(self) -> None:
        """A newer daemon's announcement ends this daemon, whatever ledger that one writes to."""
        why = self._announcement.defend()
        if why:
            self.failure = Fenced(why, "let only one daemon run on a ledger and a state directory")
            self.stop.set()

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: a bug. Going on with half an event would corrupt the core, so the daemon ends; a restart rebuilds it."""
        error = context.get("exception")
        if isinstance(error, Exception) and not self.stop.is_set():
            self.failure = error
            self.stop.set()
        loop.default_exception_handler(context)

    def _writer_changed(self, state: WriterState, reason: str) -> None:
        if state in (WriterState.OK, WriterState.CLOSED):
            log.info("ledger", state=str(state), reason=reason)
        else:
            log.warning("ledger", state=str(state), reason=reason, remedy=REMEDIES.get(state, ""))
        if state is WriterState.FENCED:
            self.failure = Fenced(f"this daemon may write no more: {reason}", REMEDIES[state])
            self.stop.set()
        elif state is WriterState.FAILED:
            self.failure = LedgerError(
                f"the ledger's writer failed: {reason}", "mend the cause, then start the daemon again"
            )
            self.stop.set()

    def _status(
        self, server: RouterServer, writer: Writer, payloads: PayloadStore, started_at: float
    ) -> status.Status:
        stop_state = self.harvester.stop_state if self.harvester is not None else None
        files, guard = descriptors.now(), server.guard
        return status.Status(
            self.clock(),
            writer.generation,
            socket.gethostname(),
            os.getpid(),
            started_at,
            ledger_state=str(writer.state),
            ledger_reason=writer.reason,
            backlog_records=writer.backlog,
            backlog_bytes=writer.backlog_bytes,
            wal_bytes=writer.wal.nbytes,
            wal_written_back=writer.wal.written_back,
            wal_blocked=writer.wal.blocked,
            payload_bytes=payloads.nbytes,
            payload_bound_bytes=payloads.bound,
            payload_evictions=payloads.evictions,
            payload_reads=server.pipeline.reads,
            database=writer.engine.dialect.name,
            metrics=self.service_manager.address,
            logged_moves=writer.logged_moves,
            hidden=stop_state.hidden if stop_state else "",
            blind=stop_state is not None and stop_state.blind,
            training=self.training.found,
            open_files=files.used,
            open_files_limit=files.most,
            unproven_connections=len(guard) if guard else 0,
            ended_connections=guard.ended if guard is not None else 0,
            harvest=status.take(self.harvester, self.clock()),
            gpu_memory=tuple(self._shared_gpus(server)),
            weights_pauses=tuple(self._weights_pauses(server)),
            speculation=tuple(self._speculation(server)),
            kv_blocks=tuple(self._kv_blocks(server)),
            engines=fleet.engines_of(server.router.core.runs.values(), self._outlooks()),
            runs=fleet.runs_of(server.router.core.runs.values()),
            clusters=self.clusters.status(self.clock()) if self.clusters is not None else (),
        )

    def _outlooks(self) -> dict[str, fleet.JobOutlook]:
        """By intent, of all clusters' jobs."""
        found = status.outlooks(self.harvester, self.clock())
        for one in self.clusters.clusters.values() if self.clusters is not None else ():
            found |= status.outlooks(one.harvester, self.clock())
        return found

    def _shared_gpus(self, server: RouterServer) -> Iterator[status.SharedGpus]:
        """Of open runs whose engines share the trainer's GPUs: what each side says that it holds."""
        for run in server.router.core.runs.values():
            memory = worker_counts.memory_of(run)
            if not run.ended and (memory.asleep or memory.holding):
                yield status.SharedGpus(
                    run.name,
                    run.reserved.awake,
                    run.reserved.trainer_bytes,
                    memory.bytes_held,
                    len(memory.asleep),
                    len(memory.holding),
                )

    def _weights_pauses(self, server: RouterServer) -> Iterator[status.WeightsPause]:
        for run in server.router.core.runs.values():
            found = worker_counts.pauses(run)
            if found and not run.ended:
                yield status.WeightsPause(run.name, len(found), found[len(found) // 2], found[-1])

    def _speculation(self, server: RouterServer) -> Iterator[status.Speculation]:
        for run in server.router.core.runs.values():
            found = run.speculated
            if found.verifications and not run.ended:
                yield status.Speculation(
                    run.name, found.drafted, found.accepted, found.verifications, run.siblings_sent
                )

    def _kv_blocks(self, server: RouterServer) -> Iterator[status.KvBlocks]:
        for run in server.router.core.runs.values():
            found = run.kv
            if (found.offered or found.turns_kept) and not run.ended:
                yield status.KvBlocks(
                    run.name,
                    found.moved,
                    found.prefilled,
                    found.gone,
                    found.refused,
                    found.tokens,
                    found.nbytes,
                    found.seconds,
                    found.turns_kept,
                    found.turns_handed,
                )

    # ---------------------------------------------------------------- what router and harvester ask of it

    async def _read_replay_groups(self, run_id: int, after_step: int) -> tuple[OpenGroup, ...]:
        # Behind the record that grants the attempt: from then on neither retention nor a purge takes what is about to be read.
        await self.server.commit([])
        return await asyncio.to_thread(reader.replay_groups, self._engine, run_id, after_step)

    async def _read_pass_rates(
        self, run_id: int, until_step: int, solved_at: float
    ) -> tuple[tuple[int, int, int, int], ...]:
        return await asyncio.to_thread(reader.pass_rates, self._engine, run_id, until_step, solved_at)

    async def _read_taken(self, run_id: int, after_step: int) -> tuple[DeliveryState, ...]:
        most = deliveries.MAX_DUE_BYTES
        return await asyncio.to_thread(reader.taken_deliveries, self._engine, run_id, after_step, most)

    async def _read_ended_episodes(self, run_id: int, most: int) -> tuple[str, ...]:
        return await asyncio.to_thread(reader.ended_episodes, self._engine, run_id, most)

    async def _read_payloads(self, sample_ids: Sequence[int]) -> dict[int, Payload]:
        return await asyncio.to_thread(reader.read_payloads, self._engine, sample_ids)

    def _policy_failed(self, run: str, error: Exception) -> None:
        """A policy's fault: its run goes on with the standard one."""
        log.error("the run's policy failed; the standard one decides from now on", run=run, exc_info=error)
        self.server.write([Event("policy_failed", 0, run, type(error).__name__, "{}", self.clock())])

    def _follow_training(self, view: ClusterView) -> None:
        """A training job that ended while its run is open is reported with the poll that shows it, not when its silence does."""
        assert self.harvester is not None  # whose view it is
        runs = [run for run in self.server.router.core.runs.values() if not run.ended]
        users = {run.id: self._enrolment.unix_user(run.owner_key, self._own_user) for run in runs}
        opened = [  # a trainer without a connection was heard by the daemon before this one, if at all
            UnclosedRun(
                run.name,
                run.trainer.job_id,
                run.trainer.seen_at if run.trainer.conn is not None else 0.0,
                users[run.id],
            )
            for run in runs
        ]
        for job in self.training.observe(opened, view.jobs):
            log.warning("training job ended", run=job.run, job_id=job.job_id, reason=job.ended)
        held = [(run.id, run.trainer.job_id, users[run.id]) for run in runs]
        if records := self._training_gpus.observe(held, view.jobs, self.clock()):
            self.server.write(records)

    # ---------------------------------------------------------------- parts

    def _require_ledger(self) -> None:
        """Before anything is written to it: it is the one of this state directory, and its disk takes what is written."""
        url, path = self.config.ledger_url, store.sqlite_file(self.config.ledger_url)
        if not self.new_ledger:
            identity.check(self.state_dir, url, ownership.announced(self.state_dir).generation)
        if path is not None and path.parent.is_dir() and path.parent != self.state_dir:
            storage.require_writable(path.parent, "daemon.ledger")
        if why := store.volatile(url):
            log.warning(
                "the ledger does not outlive a boot",
                reason=why,
                remedy="name a disk in daemon.ledger, or PostgreSQL",
            )

    def _start_writer(self) -> Writer:
        loop = asyncio.get_running_loop()

        def committed(ticket: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the last commits have no listener
                loop.call_soon_threadsafe(lambda: self.server.committed(ticket))

        def changed(state: WriterState, reason: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._writer_changed, state, reason)

        writer = Writer(
            self.config.ledger_url,
            socket.gethostname(),
            os.getpid(),
            __version__,
            self.clock,
            on_commit=committed,
            on_state=changed,
            announced=ownership.announced(self.state_dir),
        )
        writer.start()
        return writer

    def _harvester(self, server: RouterServer, uid: str) -> Harvester | None:
        if self.cluster is None or not self.config.harvest.enabled:
            return None
        self._own_user = own_user()  # once: a directory that fails or is slow holds up no poll
        return Harvester(
            self.config,
            self.cluster,
            uid,
            LedgerWrites(server.commit, server.write),
            self._router_link(server, ""),
            Sources(self.clock),
            learned=lambda info: server.post(TopologyRead(info.switches)),
            observed=self._follow_training,
        )

    def _router_link(self, server: RouterServer, cluster: str) -> RouterLink:
        """`cluster`: whose harvester it is for, "" = the daemon's own. Its demand is what others leave."""
        router = server.router

        def demand() -> list[Demand]:
            asked = self._enrolment.of_owners(router.demand(self.clock()))
            return (
                asked if self.clusters is None else without(asked, self.clusters.engines_of_others(cluster))
            )

        return RouterLink(
            post=server.post,
            demand=demand,
            leases=lambda: workers.leases(router.core),
            register=self.keyring.allow,
            unregister=self.keyring.revoke,
            lives=lambda: workers.lives(router.core),
            condemned=lambda: tuple(router.core.condemned),
            environments=lambda: self._enrolment.environments_of_owners(router.environments(self.clock())),
        )

    def _further(self, server: RouterServer, pair: keys.KeyPair, uid: str) -> FurtherClusters | None:
        if self.config.daemon.clusters_port is None:
            return None
        return FurtherClusters(
            self.config,
            pair,
            uid,
            LedgerWrites(server.commit, server.write),
            functools.partial(self._router_link, server),
            self.clock,
            lambda: self._enrolment.clusters,
        )

    def _keeper(self, server: RouterServer, writer: Writer) -> Keeper | None:
        policy = retention.Policy(self.config.ledger.retention, self.config.ledger.retention_steps)
        if policy.retention == "keep":
            return None
        return Keeper(
            writer.engine,
            policy,
            commit=server.commit,
            backlog_bytes=lambda: writer.backlog_bytes,
            clock=self.clock,
        )

    def _warm_start(self, server: RouterServer, writer: Writer) -> None:
        """What the runs' policies had learned lies in the ledger: a restart forgets little of it. Serving does not hang on that."""
        if self.config.router.policy == "standard":
            return
        policy = registry.named(self.config.router.policy, self.config.router.harvested_gpu_price)
        known: dict[int, tuple[tuple[float, Fact], ...]] = {}
        for run in server.router.core.runs.values():
            if run.ended:
                continue
            scratch = policy(run.name)
            try:
                past = history.read(
                    writer.engine,
                    run.name,
                    max(0, run.progress.last_committed - warm_start.STEPS),
                    warm_start.CHUNKS,
                )
                facts = warm_start.facts(past)
                warm_start.observe_all(scratch, facts)  # what no policy can take shows here
            except Exception as error:  # what lies there was told by peers under clocks of their own
                reason = error.cause if isinstance(error, LedgerError) else type(error).__name__
                log.warning(
                    "the run's past was not learned: it begins with priors",
                    run=run.name,
                    reason=reason,
                    exc_info=error,
                )
            else:
                known[run.id] = tuple(facts)
                log.info("recalled", run=run.name, steps=len(past.steps), facts=len(facts))
        if known:
            server.post(PastRead(known))

    def _report_new_timeline(self, server: RouterServer, generation: Generation) -> None:
        """That the ledger is an older one is no secret: it is logged, and its own events say it."""
        if generation.began:
            log.warning(
                "the ledger begins another history", reason=generation.began, generation=int(generation)
            )
            server.write([history_began(generation, generation.began, self.clock())])

    async def _retry_bind(self, bind: Callable[[], T]) -> T:
        """What `bind` gives. A daemon of this host that was taken over holds its ports until it has seen that it is fenced."""
        deadline = time.monotonic() + (PORT_WAIT_S if self._predecessor_may_hold_ports else 0.0)
        while True:
            try:
                return bind()
            except listening.PortInUse:
                if time.monotonic() >= deadline or self.stop.is_set():
                    raise
            await self._pause()

    async def _pause(self) -> None:
        await within(self.stop, CHECK_INTERVAL_S)

    # ---------------------------------------------------------------- at the end

    def _release(self, generation: Generation) -> None:
        """A successor, on whatever host, need not wait for our silence."""
        try:
            transaction.release(self._engine, generation, self.clock())
        except sa.exc.DBAPIError as error:
            log.warning(
                "the ledger was not given back; a successor on another host waits for our silence",
                reason=explain(error),
            )
        finally:
            self._engine.dispose()

    async def _write_last_status(self, seen: status.Status) -> None:
        """The last figures say how it ended, or `scavenger status` would go on calling this daemon well. Of one of the files also where
        the other cannot be written; a public folder that hangs is not waited for longer than `LEAST_S`.
        """
        failure = self.failure
        state = (
            status.CLOSED
            if failure is None
            else status.FENCED
            if isinstance(failure, Fenced)
            else status.FAILED
        )
        reason = (
            failure.cause
            if isinstance(failure, ScavengerError)
            else type(failure).__name__
            if failure
            else ""
        )
        last = msgspec.structs.replace(seen, state=state, reason=reason, stopped_at=self.clock())
        try:
            await asyncio.to_thread(status.write_last, self.state_dir, last)
        except OSError as error:
            log.warning("the end is not in the status file", path=error.filename, reason=str(error))
        if (public_dir := self.config.daemon.public_dir) is None:
            return
        try:
            async with asyncio.timeout(LEAST_S):
                await asyncio.to_thread(public_status.write_last, public_dir, public_status.of(last))
        except OSError as error:  # a timeout is one too
            why = str(error) or f"it took over {LEAST_S:g} s"
            log.warning("the end is not in the public status file", path=str(public_dir), reason=why)


def run(
    config: DaemonConfig,
    cluster: Cluster | None,
    manner: Manner = Manner.ASK,
    *,
    reread: Callable[[], DaemonConfig] | None = None,
    notifier: Notifier | None = None,
    cancel_at_end: bool = False,
    new_ledger: bool = False,
) -> int | None:
    """Run a daemon in this process until it is told to stop. `reread`: the configuration as its file has it now, for SIGHUP.

    `cancel_at_end`: its jobs end with it. Else they go on, and the next daemon adopts them. `new_ledger`: the state directory
    takes the ledger that is named now. Returns as `Daemon.run` does.
    """

    async def main() -> int | None:
        daemon = Daemon(config, cluster, manner, ServiceManager(config, reread, notifier))
        daemon.cancel_at_end, daemon.new_ledger = cancel_at_end, new_ledger
        return await daemon.run()

    try:
        return asyncio.run(main())
    except OSError as error:
        if storage.is_about_storage(error):
            path = Path(error.filename) if isinstance(error.filename, str) else config.daemon.state_dir
            raise storage.explained(error, path, "daemon.state_dir") from error
        raise

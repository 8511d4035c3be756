"""Further clusters of one daemon: a `Harvester` for each, whose commands a process there carries out (`harvest.further`).

    harvester's process --Ready--> ClusterLink --> this: limits.json, drain, drained-nodes in <state_dir>/clusters/NAME --> Harvester
                                                   records to the ledger, with the cluster's name; demand, less what others have

Owns which of them there are, what is remembered of each while its link is down (its limits, what its admin ordered), and how their records
and nodes are kept apart from those of the daemon's own cluster. A cluster whose key was removed loses its engines. A fault of one is
logged, shown in `scavenger status`, and ends neither the daemon nor the others. Decides nothing about jobs.

Boundary: files of the state directory, and the tasks of further harvesters; IO.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
from blake3 import blake3
from pydantic import ValidationError

from scavenger.cluster import job_logs
from scavenger.cluster.port import OneThread
from scavenger.cluster.proxy.client import EnginesUser
from scavenger.config import ClusterSection, DaemonConfig, HarvestSection
from scavenger.errors import AuthError, ClusterError, ConfigError
from scavenger.harvest import limits as harvest_limits
from scavenger.harvest.execute.edges import FurtherClusterJobs, LedgerWrites, RouterLink, Sources
from scavenger.harvest.further.link import ClusterLink, LinkedCluster, LinkLine
from scavenger.harvest.further.messages import CLUSTER_KEYS, HARVEST_KEYS_THERE
from scavenger.harvest.harvester import STOP_S, Harvester
from scavenger.ledger import records as rec
from scavenger.observe import status
from scavenger.parsing import MALFORMED
from scavenger.protocol import keys

log = structlog.get_logger()

#: How often links are looked at, and after which a cluster whose harvester ended with a fault is tried again (s).
LOOK_S = 0.5
RETRY_S = 30.0
#: Limits of a cluster that change are read so often at most (s).
LIMITS_S = 1.0
#: One request may take so many of its commands.
COMMANDS = 6
#: What a harvester may report of these at its worst: the daemon's time is everybody's.
LEAST_POLL_S, MOST_COMMAND_S = 0.2, 600.0
LIMITS = "limits.json"
#: Characters that are told of a fault in what a cluster reported.
MOST_FAULT = 1000


class ReportedLimits(msgspec.Struct, frozen=True):
    """What a cluster's harvester reported last of its limits. `limits`: as `further.messages.Ready` has them. `session`: which
    process did."""

    user: str
    limits: str
    session: str = ""


@dataclass(slots=True)
class Further:
    """One further cluster."""

    name: str
    harvester: Harvester
    reported: ReportedLimits
    line: LinkLine
    fault: str = ""
    task: asyncio.Task[None] | None = None
    logs: asyncio.Task[None] | None = None
    #: Of its own: a link that hangs must leave the threads that all of the daemon shares.
    thread: OneThread = field(default_factory=lambda: OneThread("cluster-logs"))
    retry_at: float = 0.0
    up: bool = False  # its link, when it was looked at last


def tagged(records: Sequence[rec.Record], cluster: str) -> list[rec.Record]:
    """Records of one cluster's harvester, as the ledger has them beside those of others. Pure."""
    return [_tagged(record, cluster) for record in records]


def _tagged(record: rec.Record, cluster: str) -> rec.Record:
    match record:
        case (
            rec.JobIntended()
            | rec.ClusterPolled()
            | rec.OtherUserWaits()
            | rec.OtherUserWaited()
            | rec.EngineDied()
            | rec.NodeQuarantined()
            | rec.NodeReleased()
            | rec.Decision()
        ):
            return msgspec.structs.replace(record, cluster=cluster)
    return record


class ClusterState(NamedTuple):
    """What of a snapshot is one cluster's, as `Harvester.restore` takes it."""

    jobs: tuple[rec.OpenIntent, ...]
    waits: tuple[rec.OtherUserWaits, ...]
    quarantined: tuple[str, ...]


def of_cluster(snapshot: rec.Snapshot, name: str) -> ClusterState:
    """What of a snapshot is one cluster's; "" = the daemon's own. Pure."""
    return ClusterState(
        tuple(job for job in snapshot.jobs if job.intended.cluster == name),
        tuple(one for one in snapshot.waits if one.cluster == name),
        tuple(node for cluster, node in snapshot.quarantined if cluster == name),
    )


def config_of(own: DaemonConfig, name: str, reported: ReportedLimits) -> DaemonConfig:
    """The daemon's configuration with what a further cluster reports of [cluster] and [harvest], and nothing of its own there. Raises
    `ConfigError`. Pure."""
    try:
        sections = msgspec.json.decode(reported.limits, type=dict[str, dict[str, Any]])
        paced = {key: value for key, value in sections["cluster"].items() if key in CLUSTER_KEYS}
        asked = {key: value for key, value in sections["harvest"].items() if key not in HARVEST_KEYS_THERE}
        cluster = ClusterSection.model_validate(paced)
        harvest = HarvestSection.model_validate_json(msgspec.json.encode(asked))
    except (*MALFORMED, ValidationError, KeyError) as error:
        raise ConfigError(
            f"the limits of cluster {name} cannot be read: {str(error)[:MOST_FAULT]}",
            "run the same release of scavenger there and here",
        ) from error
    least = {
        key: max(LEAST_POLL_S, getattr(cluster, key)) for key in ("poll_interval_s", "fast_poll_interval_s")
    }
    timeout_s = min(cluster.command_timeout_s, MOST_COMMAND_S)
    folder = keys.cluster_dir(own.daemon.state_dir, name)
    return own.model_copy(
        update={
            "daemon": own.daemon.model_copy(update={"state_dir": folder}),
            "cluster": cluster.model_copy(update={**least, "command_timeout_s": timeout_s}),
            # `scavenger drain` on the daemon's host is for all of its clusters.
            "harvest": harvest.model_copy(
                update={
                    "logs_mb": own.harvest.logs_mb,
                    "stop_file": harvest_limits.drain_path(own.daemon.state_dir),
                }
            ),
        }
    )


class FurtherClusters:
    """See the module. `admitted`: public key -> cluster, by the key files. `router`: given the demand that is left for a cluster.
    `own`: the harvester of the daemon's own cluster, None where it harvests nothing there. Used on the event loop alone."""

    def __init__(
        self,
        config: DaemonConfig,
        pair: keys.KeyPair,
        uid: str,
        ledger: LedgerWrites,
        router: Callable[[str], RouterLink],
        clock: Callable[[], float],
        admitted: Callable[[], Mapping[str, str]],
    ) -> None:
        self._config, self._uid, self._ledger, self._router = config, uid, ledger, router
        self._clock, self._admitted = clock, admitted
        self._changed = asyncio.Event()
        self.own: Harvester | None = None
        self.clusters: dict[str, Further] = {}
        self._faults: dict[str, str] = {}  # of what a cluster reported last, or of what is remembered of it
        # What was refused last and why: not read again. None: what cannot be written down, which may be tried again.
        self._refused: dict[str, tuple[ReportedLimits | None, ConfigError | OSError]] = {}
        self._read_at: dict[str, float] = {}  # when limits of a cluster were read last (the loop's time)
        self._left: dict[
            str, ClusterState
        ] = {}  # of clusters whose limits were forgotten: they come with `Ready`
        self._mirrored: dict[str, tuple[str, dict[str, str]]] = {}
        loop = asyncio.get_running_loop()

        def heard(_name: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._changed.set)

        self.link = ClusterLink(pair, heard=heard, uid_of=lambda name: uid_of(uid, name))
        self.link.admit(admitted())

    # ---------------------------------------------------------------- life

    def restore(self, snapshot: rec.Snapshot) -> None:
        """Take over the jobs of clusters that are known from before, their links up or not. Call before `run`."""
        folder = self._config.daemon.state_dir / "clusters"
        for path in sorted(folder.glob(f"*/{LIMITS}")):
            name = path.parent.name
            try:
                reported = msgspec.json.decode(path.read_bytes(), type=ReportedLimits)
                self._add(name, reported, of_cluster(snapshot, name))
                if reported.session:
                    self.link.expect(name, reported.session)
            except (OSError, *MALFORMED, AuthError, ConfigError) as error:
                self._faulty(name, str(error))
        lost = {job.intended.cluster for job in snapshot.jobs} - {"", *self.clusters}
        for name in sorted(lost):
            self._left[name] = of_cluster(snapshot, name)
            why = f"the ledger has jobs there, and {folder / name / LIMITS} cannot be read"
            self._faulty(name, f"{why}: their engines are let in again when its harvester dials in")

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the links until `stop` is set. Raises what ends the daemon: `Fenced`, a bug."""
        try:
            while not stop.is_set():
                if not self.link.alive():  # a bug: the log has it. The next daemon's answers again
                    raise RuntimeError("the thread of the links to further clusters ended")
                self._changed.clear()
                self.link.admit(self._admitted())
                for name in sorted({*self._admitted().values(), *self.clusters}):
                    await self._follow(name, stop)
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({changed}, timeout=LOOK_S)
                changed.cancel()
        finally:
            tasks = [task for one in self.clusters.values() for task in (one.task, one.logs) if task]
            try:
                if tasks:  # a submission's answer is still recorded
                    await asyncio.wait(tasks, timeout=STOP_S + 1.0)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def shutdown(self, cancel: bool) -> None:
        """Stop. Jobs stay for the next daemon unless `cancel`."""
        await asyncio.gather(*(one.harvester.shutdown(cancel) for one in self.clusters.values()))

    def close(self) -> None:
        self.link.close()
        for one in self.clusters.values():
            one.thread.close()

    def reconfigure(self, config: DaemonConfig) -> None:
        """Go on with what may change live of the daemon's own file. Raises `ConfigError`."""
        self._config = config
        self._refused.clear()
        for one in self.clusters.values():
            one.harvester.reconfigure(config_of(config, one.name, one.reported))

    # ---------------------------------------------------------------- one cluster

    async def _follow(self, name: str, stop: asyncio.Event) -> None:
        ready, _age_s = self.link.ready(name)
        revoked = name not in self._admitted().values()
        try:
            if ready is not None and not revoked:
                reported = ReportedLimits(ready.user, ready.limits.decode("utf-8", "replace"), ready.session)
                await self._take_limits(name, reported)
            if revoked and name in self.clusters:
                await self._mirror(name, "drain the key of its harvester was removed", {})
            elif ready is not None and not revoked:
                await self._mirror(name, ready.stop, ready.drained)
            if ready is not None:
                self._faults.pop(name, None)
        except (OSError, ConfigError) as error:
            self._faulty(name, str(error))
        if (one := self.clusters.get(name)) is not None:
            up, was = self.link.up(name) and not revoked, one.up
            one.up = up
            if up and not was:
                one.harvester.reachable()
            self._keep_running(one, stop)

    async def _take_limits(self, name: str, reported: ReportedLimits) -> None:
        """Raises `ConfigError`, `OSError`; then what was in force stays. What was refused is not read again, and what changes all the time
        is read every `LIMITS_S`: reading holds up every cluster and every engine."""
        one = self.clusters.get(name)
        if one is not None and one.reported == reported:
            return
        refused, fault = self._refused.get(name, (None, None))
        if fault is not None and refused == reported:
            raise fault.with_traceback(None)
        now = asyncio.get_running_loop().time()
        if now - self._read_at.get(name, float("-inf")) < LIMITS_S:
            if fault is not None:
                raise fault.with_traceback(None)
            return
        try:
            await self._read_limits(name, one, reported)
        except ConfigError as error:
            self._refused[name], self._read_at[name] = (reported, error), now
            raise
        except OSError as error:  # a full disk, say: read again after `LIMITS_S`
            self._refused[name], self._read_at[name] = (None, error), now
            raise
        self._refused.pop(name, None)
        self._read_at[name] = now

    async def _read_limits(self, name: str, one: Further | None, reported: ReportedLimits) -> None:
        config = config_of(self._config, name, reported)
        if one is None:
            await asyncio.to_thread(self._remember, name, reported)
            self._add(name, reported, self._left.pop(name, ClusterState((), (), ())))
            return
        if reported.user != one.reported.user:
            raise ConfigError(
                f"jobs of cluster {name} would be user {reported.user}'s, and were {one.reported.user}'s",
                "run its harvester as the user that it was; else restart the daemon without its jobs",
            )
        if reported.limits != one.reported.limits:
            one.harvester.reconfigure(config)
        await asyncio.to_thread(self._remember, name, reported)
        one.reported = reported

    def _remember(self, name: str, reported: ReportedLimits) -> None:
        folder = keys.cluster_dir(self._config.daemon.state_dir, name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys.write_private(folder / LIMITS, msgspec.json.encode(reported))

    def _add(self, name: str, reported: ReportedLimits, state: ClusterState) -> None:
        """Raises `ConfigError`."""
        config = config_of(self._config, name, reported)
        line = LinkLine(self.link, name, COMMANDS * config.cluster.command_timeout_s)
        cluster = LinkedCluster(line)

        async def commit(records: Sequence[rec.Record]) -> None:
            await self._ledger.commit(tagged(records, name))

        def write(records: Sequence[rec.Record]) -> object:
            return self._ledger.write(tagged(records, name))

        harvester = Harvester(
            config,
            cluster,
            uid_of(self._uid, name),
            LedgerWrites(commit, write),
            self._router(name),
            Sources(self._clock),
            further=FurtherClusterJobs(
                name, reported.user, EnginesUser(line, config.daemon.state_dir), cluster.submit_engine
            ),
        )
        harvester.restore(*state)
        self.clusters[name] = Further(name, harvester, reported, line)
        log.info("further cluster", cluster=name, partition=config.harvest.partition, user=reported.user)

    def _keep_running(self, one: Further, stop: asyncio.Event) -> None:
        """Its harvester runs; where it ended with a fault of its cluster it is tried again. Raises any other fault."""
        if one.task is not None and one.task.done() and not stop.is_set():
            error, one.task = one.task.exception(), None
            if not isinstance(error, ClusterError | ConfigError):
                raise error or RuntimeError(f"the harvester of cluster {one.name} ended")
            one.fault = str(error)
            log.error("a further cluster is not harvested; tried again", cluster=one.name, reason=one.fault)
            one.retry_at = self._clock() + RETRY_S
        if one.task is None and self._clock() >= one.retry_at:
            one.task = asyncio.create_task(one.harvester.run(stop))
        elif one.task is not None and one.harvester.view is not None:
            one.fault = ""
        if one.logs is None:
            tracked = one.harvester.tracker.intents
            one.logs = asyncio.create_task(
                job_logs.watch(one.harvester.bound_logs, lambda: tracked.keys(), stop, call=one.thread.call)
            )

    async def _mirror(self, name: str, stop: str, drained: Mapping[str, str]) -> None:
        """What its admin ordered there lies in files here, where its harvester reads it, and stays in force while the link is down."""
        orders = (stop, dict(drained))
        if self._mirrored.get(name) != orders:
            await asyncio.to_thread(_write_orders, self._config.daemon.state_dir, name, *orders)
            self._mirrored[name] = orders

    def _faulty(self, name: str, why: str) -> None:
        if self._faults.get(name) != why:
            log.error("a further cluster is at fault", cluster=name, reason=why)
        self._faults[name] = why

    # ---------------------------------------------------------------- what others ask of it

    def engines_of_others(self, name: str) -> Counter[int]:
        """Engines by run that other clusters than this one have; "" = the daemon's own."""
        found: Counter[int] = Counter()
        for other, harvester in (("", self.own), *((o.name, o.harvester) for o in self.clusters.values())):
            if harvester is not None and other != name:
                found += harvester.claimed()
        return found

    def harvesters(self) -> dict[str, Harvester]:
        """By cluster."""
        return {name: one.harvester for name, one in self.clusters.items()}

    def status(self, now: float) -> tuple[status.ClusterNow, ...]:
        shown = []
        for name in sorted({*self._admitted().values(), *self.clusters, *self._faults}):
            ready, age_s = self.link.ready(name)
            one = self.clusters.get(name)
            shown.append(
                status.ClusterNow(
                    name,
                    heard_at=now - age_s if ready is not None else 0.0,
                    fault=self._faults.get(name, "") or (one.fault if one is not None else ""),
                    revoked=name not in self._admitted().values(),
                    harvest=status.take(one.harvester, now) if one is not None else None,
                )
            )
        return tuple(shown)


def uid_of(uid: str, name: str) -> str:
    """By what the daemon's jobs are known on a further cluster: a job of one is never taken for another's, were both one Slurm."""
    return blake3(f"{uid}:{name}".encode()).hexdigest()[:8]


def _write_orders(state_dir: Path, name: str, stop: str, drained: Mapping[str, str]) -> None:
    """Raises `OSError`."""
    folder = keys.cluster_dir(state_dir, name)
    word, _, reason = stop.partition(" ")
    if stop:
        harvest_limits.drain(folder, reason, at_once=word == "now")
    else:
        harvest_limits.resume(folder)
    for node, why in drained.items():
        harvest_limits.drain_node(folder, node, why)
    with contextlib.suppress(FileNotFoundError):
        for node in set(os.listdir(folder / harvest_limits.DRAINED_NODES)) - drained.keys():
            (folder / harvest_limits.DRAINED_NODES / node).unlink(missing_ok=True)

"""Slurm through its commands.

Owns which are run when, in which environment, and the reading of exit statuses. What is run and how it is read is in
`commands`, the running in `runner`. An observation is two commands whatever the number of jobs, and a third every `PARTITIONS_S`.

One observation out of two answers: nodes, and the queue a moment later. Pure.

    nodes' own figures  --what the queue shows besides-->  the same nodes, with no GPU idle that a listed job holds

A job that started between the two answers holds GPUs that the nodes still call idle; those of one that completes are no longer counted by
Slurm (22.05: `GresUsed` drops them at once), though its processes are on them still. Both would be taken twice. A job that ended in
between leaves its GPUs busy until the next poll: too little is taken, for one poll.

Owns the reckoning. Knows nothing of who asks, or how; what was seen running at an earlier poll is given.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import structlog

from scavenger.cluster import port
from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.model import (
    ClusterInfo,
    ClusterView,
    Job,
    JobFlag,
    JobLife,
    JobSpec,
    Node,
    NodeHost,
    Partition,
    Qos,
    Reservation,
)
from scavenger.cluster.port import RpcCounter
from scavenger.cluster.slurm import commands, json_output, runner
from scavenger.cluster.unix_users import own_user
from scavenger.errors import ClusterError, ClusterUnavailable, ConfigError, SubmitUnknown

#: One life of a job: a requeued one may start anew between two answers.
Life = tuple[int, int]


def settled(jobs: Iterable[Job]) -> frozenset[Life]:
    """Jobs that run and do not complete: nodes that are asked about after this count them."""
    return frozenset(
        (job.job_id, job.restart_count)
        for job in jobs
        if job.has_gpus_allocated and JobFlag.COMPLETING not in job.flags
    )


@dataclass(slots=True)
class _AllocatedByJob:
    """On one node, by the queue: what jobs have that the nodes' answer counted for certain, and what others have."""

    gpus: int = 0
    cpus: int = 0
    new_gpus: int = 0
    new_cpus: int = 0


def agree(nodes: Sequence[Node], jobs: Iterable[Job], before: Set[Life]) -> tuple[Node, ...]:
    """`nodes` with at least as much allocated as `jobs`, asked for later, hold there. `before`: `settled` of the poll before this one.

    A node's figure that the jobs of before do not explain is taken to count what is new: only the rest is added. Of a job whose nodes need
    not have the same share each the largest is assumed while it is new; after that the nodes' own figure says what it has.
    """
    held = _held(jobs, before)
    return tuple(node if (here := held.get(node.name)) is None else _raised(node, here) for node in nodes)


def _held(jobs: Iterable[Job], before: Set[Life]) -> dict[str, _AllocatedByJob]:
    found: dict[str, _AllocatedByJob] = {}
    for job in jobs:
        if not job.has_gpus_allocated or not job.nodes:
            continue
        new = JobFlag.COMPLETING in job.flags or (job.job_id, job.restart_count) not in before
        share, cpus = -(-job.gpus // len(job.nodes)), -(-job.cpus // len(job.nodes))
        gpus = dict(job.gpus_by_node)
        for name in job.nodes:
            here = found.setdefault(name, _AllocatedByJob())
            if new:
                here.new_gpus, here.new_cpus = here.new_gpus + gpus.get(name, share), here.new_cpus + cpus
            else:
                here.gpus, here.cpus = here.gpus + gpus.get(name, share), here.cpus + cpus
    return found


def _raised(node: Node, here: _AllocatedByJob) -> Node:
    gpus = _with_new(node.gpus_allocated, here.gpus, here.new_gpus, node.gpus)
    cpus = _with_new(node.cpus_allocated, here.cpus, here.new_cpus, node.cpus)
    if (gpus, cpus) == (node.gpus_allocated, node.cpus_allocated):
        return node
    return replace(node, gpus_allocated=gpus, cpus_allocated=cpus)


def _with_new(allocated: int, old: int, new: int, most: int) -> int:
    """What is allocated, jobs that the figure may not count yet included; never lowered, never more than there is."""
    counted = max(0, allocated - old)
    return max(allocated, min(most, allocated + max(0, new - counted)))


log = structlog.get_logger()

#: Partitions change with the site's configuration, not with its jobs: they are asked for this often, not at every poll.
PARTITIONS_S = 300.0
# sbatch sent its request and then lost the answer: the job may exist.
_REPLY_LOST = re.compile(
    r"Socket timed out|Zero Bytes|timed out|Unexpected message|Transport endpoint|"
    r"Connection reset|Header lengths",
    re.I,
)
_GONE = re.compile(r"Invalid job id|already complet(ed|ing)|Job/step already", re.I)
_STEERING = ("SLURM", "SBATCH", "SALLOC", "SQUEUE", "SINFO", "SCANCEL", "SCONTROL", "SACCT")
_JOB_BASE = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "SLURM_CONF",
)
_CANCEL_BATCH = 500
#: So long slurmdbd is not asked for QOS again after it did not reply.
QOS_AGAIN_S = 300.0
#: Characters of a value that a warning shows.
_SHOWN = 200
#: Admins make reservations hours before; asking more often would only cost requests.
RESERVATIONS_S = 300.0


class SlurmCluster:
    """`port.Cluster` over Slurm's commands.

    `env` is the environment for them (default: this process's, without what an outer Slurm job left in it). `rpc` counts the
    requests that the commands send to the controller, so that the load we put on it can be seen. `output`: see `json_output`.
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 20.0,
        partitions_s: float = PARTITIONS_S,
        output: Literal["fields", "json"] = "fields",
    ) -> None:
        inherited = os.environ if env is None else env
        self._env = {
            key: value
            for key, value in inherited.items()
            if not key.startswith(_STEERING) or key == "SLURM_CONF"
        }
        self._env["SLURM_TIME_FORMAT"] = "%s"
        self._env["LC_ALL"] = "C.UTF-8"
        self._timeout_s, self._output = timeout_s, output
        self._version = ""
        self._partitions = PartitionCache(partitions_s)
        self._reservations: tuple[Reservation, ...] = ()
        self._reservations_at = -math.inf
        self._switches: tuple[tuple[str, str], ...] | None = None
        self._qos: tuple[Qos, ...] | None = None
        self._ask_qos_at = -math.inf
        self._settled: frozenset[Life] = frozenset()
        self._warned: set[str] = set()
        self._user = ""  # this process's, once it was asked for
        self.rpc = RpcCounter()

    @property
    def environment(self) -> dict[str, str]:
        """What our commands run in: a Slurm of its own is found by SLURM_CONF, and nothing of an outer job steers it."""
        return dict(self._env)

    def version(self) -> str:
        """Of Slurm's commands, as they say it themselves; asks no controller. Raises `ClusterError`."""
        return commands.parse_version(self._ask(commands.version_argv(), {}))

    def node_hosts(self) -> dict[str, NodeHost]:
        """On which host each node lies. Raises `ClusterError`."""
        return commands.parse_node_hosts(self._ask(commands.nodes_argv(), port.NODES))

    def info(self) -> ClusterInfo:
        info = commands.parse_info(self._ask(commands.config_argv(), port.CONFIG), user=self._own_user())
        if self._switches is None:  # cables are asked for once; the configuration again and again
            topology = self._command(
                commands.topology_argv(), port.TOPOLOGY
            )  # a site without a topology may answer with an error: it then has none
            self._switches = commands.parse_topology(topology.stdout if topology.returncode == 0 else "")
        return replace(info, switches=self._switches, qos=self._qos_of(info))

    def _qos_of(self, info: ClusterInfo) -> tuple[Qos, ...] | None:
        """The site's QOS as slurmdbd last had them; None where there is none, or it never replied. slurmctld is not asked."""
        if info.accounting and time.monotonic() >= self._ask_qos_at:
            try:
                self._qos = commands.parse_qos(self._ask(commands.qos_argv(), {}))
            except ClusterError as error:
                self._ask_qos_at = time.monotonic() + QOS_AGAIN_S  # each question may last until its deadline
                log.warning("qos_not_read", reason=error.cause, means="what was read before holds")
        return self._qos if info.accounting else None

    def view(self) -> ClusterView:
        # nodes first: a GPU taken between two commands then has its owner in the queue (`agree`); in the other order a GPU would be
        # busy without it being known whether other users took it, and ours that has just started would look like others'
        nodes = self._nodes()
        return self.view_of(nodes, self.jobs())

    def _nodes(self) -> tuple[Node, ...]:
        if self._output == "fields":
            return commands.parse_nodes(self._ask(commands.nodes_argv(), port.NODES))
        self._version = self._version or self.version()
        return json_output.parse_nodes(self._ask(json_output.nodes_argv(self._version), port.NODES))

    def view_of(self, nodes: tuple[Node, ...], jobs: tuple[Job, ...]) -> ClusterView:
        """An observation of which nodes and then jobs were asked for, with what changes seldom: partitions and reservations."""
        partitions = self._partitions.agreeing(nodes, self._ask_partitions)
        self._warn(nodes, jobs)
        before, self._settled = self._settled, settled(jobs)
        return ClusterView(
            observed_at=time.time(),
            nodes=agree(nodes, jobs, before),
            jobs=jobs,
            partitions=partitions,
            reservations=self._booked(),
        )

    def _warn(self, nodes: Sequence[Node], jobs: Sequence[Job]) -> None:
        """Once of each field that could not be read: this release prints it in a way that is not known here."""
        # a node that is down need not print what it holds: that is no news
        of_nodes = (
            (f"node {node.name}", one)
            for node in nodes
            if node.unread
            for one in node.unread
            if node.usable or one.field in ("State", "state")
        )
        of_jobs = ((f"job {job.job_id}", one) for job in jobs if job.unread for one in job.unread)
        for record, unread in chain(of_nodes, of_jobs):
            if unread.field not in self._warned:
                self._warned.add(unread.field)
                log.warning(
                    "field_not_read",
                    release=self._release(),
                    field=unread.field,
                    value=unread.value[:_SHOWN],
                    record=record,
                    means="unknown in each such record; the poll goes on",
                    remedy="report it with this line",
                )

    def _release(self) -> str:
        try:
            self._version = self._version or self.version()
        except ClusterError as error:
            return f"not known ({error.cause})"
        return self._version

    def _booked(self) -> tuple[Reservation, ...]:
        """Reservations, at most `RESERVATIONS_S` old."""
        if time.monotonic() - self._reservations_at >= RESERVATIONS_S:
            self._reservations = commands.parse_reservations(
                self._ask(commands.reservations_argv(), port.RESERVATIONS)
            )
            self._reservations_at = time.monotonic()
        return self._reservations

    def jobs(self) -> tuple[Job, ...]:
        if self._output == "json":
            return json_output.parse_jobs(self._ask(json_output.jobs_argv(), port.JOBS_JSON))
        # 64 random bits cannot be guessed, and the answer holds 24 marks a job; a leading digit would be read as a width
        mark = "x" + secrets.token_hex(8)
        return commands.parse_jobs(self._ask(commands.squeue_argv(mark), port.JOBS), mark)

    def _ask_partitions(self) -> tuple[Partition, ...]:
        return commands.parse_partitions(self._ask(commands.partitions_argv(), port.PARTITIONS))

    def submit(self, spec: JobSpec) -> int:
        argv = commands.sbatch_argv(spec)
        # the job's environment is what we say and a plain base: nothing of the daemon's own leaks into it
        env = {key: self._env[key] for key in _JOB_BASE if key in self._env} | commands.job_environment(spec)
        try:
            self.rpc.add(port.SUBMIT)
            done = runner.run(argv, env, self._timeout_s, stdin=spec.script)
        except runner.NotStarted as error:
            raise ClusterError(
                error.cause, error.remedy
            ) from error  # nothing ran: there is no job to look for
        except subprocess.TimeoutExpired as error:
            raise SubmitUnknown(f"sbatch gave no answer within {self._timeout_s:.0f} s") from error
        if done.returncode != 0:
            said = runner.words(done)
            if done.returncode < 0 or _REPLY_LOST.search(said):  # killed, perhaps after it had asked
                raise SubmitUnknown(f"sbatch: {runner.explained(said)}")
            raise runner.failure("sbatch", said)
        try:
            return commands.parse_submitted(done.stdout)
        except ClusterUnavailable as error:
            raise SubmitUnknown(error.cause) from error

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        for start in range(0, len(job_ids), _CANCEL_BATCH):
            some = job_ids[start : start + _CANCEL_BATCH]
            done = self._command(commands.cancel_argv(some), {port.KILL: len(some)})
            real = [line for line in done.stderr.splitlines() if line.strip() and not _GONE.search(line)]
            if done.returncode != 0 and real:
                raise runner.failure("scancel", " ".join(real))

    def requeue(self, job_id: int) -> None:
        self._ask(commands.requeue_argv(job_id), port.REQUEUE)

    def release(self, job_id: int, node: str) -> None:
        self._ask(commands.release_argv(job_id, node), port.UPDATE)

    def accounting(self, job_ids: tuple[int, ...]) -> tuple[JobLife, ...]:
        # asks slurmdbd, not the controller: no request of `rpc`
        return commands.parse_accounting(self._ask(commands.accounting_argv(job_ids), {})) if job_ids else ()

    def close(self) -> None:
        """Nothing is held between calls."""

    def _own_user(self) -> str:
        """Asked for once. Raises `ClusterUnavailable`."""
        if not self._user:
            try:
                self._user = own_user()
            except ConfigError as error:
                raise ClusterUnavailable(error.cause, error.remedy, error_kind=ErrorKind.BACKEND) from error
        return self._user

    def _ask(self, argv: Sequence[str], cost: Mapping[str, int]) -> str:
        done = self._command(argv, cost)
        if done.returncode != 0:
            raise runner.failure(argv[0], runner.words(done))
        return done.stdout

    def _command(self, argv: Sequence[str], cost: Mapping[str, int]) -> runner.Done:
        self.rpc.add(cost)
        return runner.asked(argv, self._env, self._timeout_s)


class PartitionCache:
    """The partitions as last asked for, for `every_s`; asked for afresh when they name a node that a newer poll does not have."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._kept: tuple[Partition, ...] = ()
        self._asked_at = -math.inf

    def agreeing(
        self, nodes: Sequence[Node], ask: Callable[[], tuple[Partition, ...]]
    ) -> tuple[Partition, ...]:
        """Partitions all of whose nodes are among `nodes`. Raises `ClusterUnavailable` when also fresh ones name others."""
        known = {node.name for node in nodes}
        if self._clock() - self._asked_at < self._every_s and not _missing(self._kept, known):
            return self._kept
        asked_at = self._clock()
        fresh = ask()
        lost = _missing(fresh, known)
        if lost:
            raise ClusterUnavailable(
                f"the list of nodes leaves out {', '.join(lost[:5])}", error_kind=ErrorKind.PARTIAL
            )
        self._kept, self._asked_at = fresh, asked_at
        return fresh


def _missing(partitions: Sequence[Partition], known: set[str]) -> list[str]:
    return sorted({name for part in partitions for name in part.nodes} - known)

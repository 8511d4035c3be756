"""What the daemon says of itself: figures in `<state_dir>/status.json`, the same now and then in its log, and `scavenger status`.

Owns the file, the rhythm, the words, and whether a file tells of a daemon that serves. Knows neither ledger nor router: the daemon hands
the figures over, the last ones when it ends. Counters begin with the daemon.

What the harvester holds, waits for and last saw, as one struct for `scavenger status`. Looks on the event loop; changes nothing.

Owns where each figure comes from; the words are `observe.status`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import structlog

from scavenger.asyncio_helpers import within, written
from scavenger.errors import DaemonUnavailable
from scavenger.harvest.decide.actions import DrainKind, OurJob
from scavenger.harvest.decide.free_capacity import gpu_use
from scavenger.harvest.harvester import Harvester
from scavenger.host.descriptors import HIGH
from scavenger.observe import fleet
from scavenger.observe.training import TrainingJob
from scavenger.parsing import MALFORMED
from scavenger.printable import amount, printable
from scavenger.protocol import keys


@dataclass(frozen=True, slots=True)
class JobCounts:
    """Our jobs as status counts them. `draining`: of `engines`, those that were asked to leave, or cancelled."""

    engines: int
    gpus: int
    waiting: int
    standby_jobs: int
    draining: int


def counted(jobs: Sequence[OurJob]) -> JobCounts:
    """What holds GPUs, what waits for some, and what drains. Pure.

    A job that was asked to leave and holds no GPU any more is counted nowhere: its engine is gone, and it takes no other.
    """
    holding = [job for job in jobs if not job.waits]
    staying = [job for job in jobs if job.waits and job.drain_kind is DrainKind.NO]
    standby_jobs = sum(job.standby for job in staying)
    return JobCounts(
        engines=len(holding),
        gpus=sum(job.gpus for job in holding),
        waiting=len(staying) - standby_jobs,
        standby_jobs=standby_jobs,
        draining=sum(job.drain_kind is not DrainKind.NO for job in holding),
    )


def of_owners(jobs: Sequence[OurJob]) -> tuple[OwnerGpus, ...]:
    """Who has how much of what our jobs hold, the most first, `OWNERS_SHOWN` at most; empty where it is one owner's. Pure.

    A run that has not asked for engines since the daemon began has no known owner (""): its jobs are counted for nobody.
    """
    holding = [job for job in jobs if not job.waits and job.owner]
    gpus = Counter[str]()
    for job in holding:
        gpus[job.owner] += job.gpus
    engines = Counter(job.owner for job in holding)
    found = [
        OwnerGpus(owner, engines[owner], gpus[owner]) for owner in sorted(gpus, key=lambda o: (-gpus[o], o))
    ]
    return tuple(found[:OWNERS_SHOWN]) if len(found) > 1 else ()


def take(harvester: Harvester | None, now: float) -> Harvest | None:
    """None where the daemon harvests nothing (`harvest.enabled = false`)."""
    if harvester is None:
        return None
    partition, view, stop_state = harvester.config.harvest.partition, harvester.view, harvester.stop_state
    jobs = harvester.tracker.jobs({}, harvester.session.owners)
    ours = counted(jobs)
    seen = gpu_use(view, partition, harvester.tracker.job_ids(), now) if view is not None else None
    connected, connected_gpus = harvester.connected()
    quarantined = dict(harvester.tracker.health.quarantined(now))
    closed = quarantined | stop_state.drained_nodes
    nodes = fleet.nodes_of(view, partition, harvester.tracker.job_ids(), jobs, closed) if view else ()
    return Harvest(
        partition,
        engines=ours.engines,
        gpus=ours.gpus,
        waiting=ours.waiting,
        standby_jobs=ours.standby_jobs,
        draining=ours.draining,
        seen_at=view.observed_at if view is not None else 0.0,
        idle=seen.idle if seen is not None else 0,
        gpus_other_users=seen.other_users if seen is not None else 0,
        jobs_pending_other_users=seen.jobs_pending_other_users if seen is not None else 0,
        stopped=stop_state.stop_read.reason if stop_state.stop_read is not None else "",
        concluded=stop_state.concluded,
        connected=connected,
        connected_gpus=connected_gpus,
        unread=stop_state.files.unread,
        set_up=harvester.tracker.health.set_up_fault(),
        polls_late=harvester.polls_late(),
        polls_fail=harvester.polls_fail,
        nodes=nodes,
        public=stop_state.concluded_public,
        drained=len(stop_state.drained_nodes),
        owners=of_owners(jobs),
        closed=closed_nodes(
            quarantined, stop_state.drained_nodes, {one.name for one in nodes} if view else None
        ),
    )


def closed_nodes(
    quarantined: Mapping[str, str], drained: Mapping[str, str], known: Set[str] | None
) -> tuple[str, ...]:
    """What to say of the nodes that get no engine, whatever Slurm says of them. Pure.

    `drained`: with reasons that name their node. `known`: nodes that Slurm has; None: not polled yet.
    """
    said = [f"{node} is quarantined: {why}" for node, why in quarantined.items() if node not in drained]
    for node, why in drained.items():
        strange = known is not None and node not in known
        said.append(f"{why} (NO NODE HAS THIS NAME in Slurm)" if strange else why)
    more = len(said) - CLOSED_SHOWN
    return tuple(sorted(said)[:CLOSED_SHOWN]) + ((f"and {amount(more, 'node')} more",) if more > 0 else ())


def outlooks(harvester: Harvester | None, now: float) -> dict[str, fleet.JobOutlook]:
    """By intent, what is known of how long our jobs' GPUs stay ours; nothing where nothing is harvested."""
    if harvester is None:
        return {}
    known = harvester.session.idling.known(0.0, now)
    return fleet.outlooks(harvester.tracker.jobs({}), harvester.view, known, now)


log = structlog.get_logger()

FILE = "status.json"
WRITE_S = 10.0
#: Of nodes that get no engine: `scavenger ledger report bad_nodes` and `scavenger top` have all.
CLOSED_SHOWN = 8
#: Of owners that share what is harvested: the ledger's `v_allocation_runs` has all.
OWNERS_SHOWN = 16
LOG_S = 60.0
#: Figures older than this are of a daemon that stopped, or hangs.
STALE_S = 3 * WRITE_S
#: Silence of a further cluster's harvester, of which the status speaks.
LINK_S = 15.0
BLIND = "nothing is harvested, as some users of the partition might not be able to preempt us."
CANNOT_SEE_JOBS = "engines leave for jobs that are not seen only when Slurm preempts them."
SERVING, CLOSED, FENCED, FAILED = "SERVING", "CLOSED", "FENCED", "FAILED"


class OwnerGpus(msgspec.Struct, frozen=True):
    """What the runs of one owner hold: engines, and their GPUs."""

    owner: str
    engines: int
    gpus: int


class Harvest(msgspec.Struct, frozen=True):
    """What the harvester has of the partition. Jobs of ours hold GPUs or wait; `draining`: of `engines`, those that are to leave.

    `seen_at` (Unix seconds, 0 = never) is of the last complete poll, whose figures `idle`, `gpus_other_users` (GPUs)
    and `jobs_pending_other_users` (jobs) are.
    `engines` and `gpus` are what our jobs held by it; `connected`, `connected_gpus` what engines are registered now (None: a daemon of an
    older release). `stopped`: who stopped harvesting, "" = it is not stopped. `concluded`: the last decision's reason.
    """

    partition: str
    engines: int
    gpus: int
    waiting: int
    draining: int
    seen_at: float
    idle: int
    gpus_other_users: int
    jobs_pending_other_users: int
    stopped: str
    concluded: str
    set_up: str = (
        ""  # why engines cannot start, whichever node they start on; "" = they can, as far as is known
    )
    polls_fail: str = ""  # why nothing is known of the queue since `seen_at`; "" = the last poll did not fail
    unread: str = ""  # why a stop file cannot be read, "" = each can; what was last known holds for a while
    standby_jobs: int = 0  # jobs that wait for the daemon to say where they begin; none of `waiting`
    connected: int | None = None
    connected_gpus: int = 0
    polls_late: str = ""  # by how much polls are behind the promised interval, and why; "" = they are not
    nodes: tuple[fleet.NodeGpus, ...] = ()  # of the whole cluster, by name, at the last complete poll
    public: str = ""  # `concluded` without names of runs, owners, jobs and nodes
    drained: int = 0  # nodes that `scavenger drain --node` names
    closed: tuple[str, ...] = ()  # of the nodes that are drained so or quarantined, `CLOSED_SHOWN` at most
    owners: tuple[OwnerGpus, ...] = ()  # of `engines`, by `of_owners`


class ClusterNow(msgspec.Struct, frozen=True):
    """A further cluster. `heard_at`: when its harvester last said anything (Unix s, 0 = never since the daemon began); `fault`: why
    nothing is harvested there, "" = nothing is wrong; `harvest`: None until its harvester has dialled in once."""

    name: str
    heard_at: float
    fault: str
    revoked: bool
    harvest: Harvest | None = None


class SharedGpus(msgspec.Struct, frozen=True):
    """The memory of a training job's GPUs: `trainer_bytes` is what its ranks held yet when they last had engines woken, `engine_bytes` what
    the `asleep` engines hold; `holding` are the others. Each side's own word.
    """

    run: str
    awake: bool
    trainer_bytes: int
    engine_bytes: int
    asleep: int
    holding: int


class WeightsPause(msgspec.Struct, frozen=True):
    """Between the last token under one version and the first under the next, by the word of `engines` engines: the middle, the longest."""

    run: str
    engines: int
    median_s: float
    most_s: float


class Speculation(msgspec.Struct, frozen=True):
    """What a run's engines drafted from siblings since the daemon began; as in `Speculated`. `sent`: siblings' tokens from other engines
    that they were sent for it."""

    run: str
    drafted: int
    accepted: int
    verifications: int
    sent: int = 0


class KvBlocks(msgspec.Struct, frozen=True):
    """What became of the KV blocks of a run's moved samples, and of its turns, since the daemon began; as in `KvMoves`."""

    run: str
    moved: int
    prefilled: int
    gone: int
    refused: int
    tokens: int
    nbytes: int
    seconds: float
    turns_kept: int = 0
    turns_handed: int = 0


class Status(msgspec.Struct, frozen=True):
    """Times are Unix seconds. `backlog`: submitted to the ledger and not durable. `wal`: SQLite's write-ahead log, all 0 on PostgreSQL."""

    at: float
    generation: int
    host: str
    pid: int
    started_at: float
    ledger_state: str
    ledger_reason: str
    backlog_records: int
    backlog_bytes: int
    wal_bytes: int  # after the last commit
    wal_written_back: int  # how often it was too large and could be written back whole
    wal_blocked: int  # how often it was too large and a reader's open transaction prevented that
    payload_bytes: int
    payload_bound_bytes: int
    payload_evictions: int  # samples that lost tokens from memory, which the ledger has
    payload_reads: int  # how often tokens were read back from the ledger
    state: str = (
        SERVING  # at the daemon's end: CLOSED (it was told to stop), FENCED (another took over), FAILED
    )
    reason: str = ""  # of FENCED and FAILED
    stopped_at: float | None = None
    database: str = "sqlite"  # or "postgresql"
    metrics: str = ""  # host:port where Prometheus finds them, "" = nowhere
    logged_moves: int = 0  # durable, and not in `leases` and `samples` yet: what reports lag behind
    hidden: str = ""  # why other users' jobs cannot be seen: no GPU is given up for them; "" = they can be, or nothing is harvested
    blind: bool = False  # and nothing is harvested for that, because some of them could not preempt us
    open_files: int = 0  # of the process, connections among them; 0 = not known
    open_files_limit: int = 0
    unproven_connections: int = 0  # that have sent nothing yet under a key that the daemon knows
    ended_connections: int = 0  # of such, those that were ended because there were too many
    harvest: Harvest | None = None  # None: nothing is harvested (`harvest.enabled = false`)
    training: tuple[TrainingJob, ...] = ()  # of open runs, as the queue last showed them
    gpu_memory: tuple[SharedGpus, ...] = ()  # of open runs with reserved engines
    weights_pauses: tuple[
        WeightsPause, ...
    ] = ()  # of open runs whose engines went from one version to the next
    speculation: tuple[Speculation, ...] = ()  # of open runs whose engines verified a draft
    kv_blocks: tuple[KvBlocks, ...] = ()  # of open runs whose engines kept some
    engines: tuple[fleet.EngineNow, ...] = ()  # of open runs, by id
    runs: tuple[fleet.RunNow, ...] = ()  # the open ones, by name
    clusters: tuple[ClusterNow, ...] = ()  # further ones, by name


def path(state_dir: Path) -> Path:
    return state_dir / FILE


def write(state_dir: Path, status: Status) -> None:
    """Replace the file. Raises `OSError`."""
    keys.write_private(path(state_dir), msgspec.json.format(msgspec.json.encode(status)) + b"\n")


def read(state_dir: Path) -> Status:
    """Raises `DaemonUnavailable` when no daemon wrote one here."""
    try:
        return msgspec.json.decode(path(state_dir).read_bytes(), type=Status)
    except FileNotFoundError as error:
        raise DaemonUnavailable(
            f"no daemon has run with {state_dir}",
            "start it: `scavenger daemon`; a try (`--local`) is without one",
        ) from error
    except (OSError, *MALFORMED) as error:
        remedy = "ask as the daemon's user, with the daemon's release"
        raise DaemonUnavailable(f"{path(state_dir)} cannot be read: {error}", remedy) from error


def write_last(state_dir: Path, status: Status) -> None:
    """Replace the file by the figures of a daemon's end, unless a newer generation has written its own. Raises `OSError`."""
    with contextlib.suppress(DaemonUnavailable):
        if read(state_dir).generation > status.generation:
            return
    write(state_dir, status)


def absent(status: Status, now: float, runs: bool | None) -> str:
    """Why no daemon serves, as far as the file tells; "" when it does. Pure.

    `runs`: whether its process is there; None on another host than the daemon's, where that cannot be told.
    """
    if status.state != SERVING:
        why = f" ({status.reason})" if status.reason else ""
        return f"{status.state}{why}, stopped at {utc(status.stopped_at or status.at)}"
    if runs is False:
        return f"DIED: no process {status.pid} is left on {status.host}; its last word is of {utc(status.at)}"
    if now - status.at > STALE_S:
        return f"SILENT for {now - status.at:.0f} s: it {'hangs' if runs else 'stopped, or hangs'}"
    return ""


def lines(status: Status, now: float, runs: bool | None = None) -> list[str]:
    """For a terminal. `runs` as in `absent`."""
    s, gone = status, absent(status, now, runs)
    ill = f" ({s.ledger_reason})" if s.ledger_reason else ""
    was = f"was {s.ledger_state} at {utc(s.at)}" if gone else s.ledger_state
    said = [
        f"daemon    generation {s.generation}, pid {s.pid} on {s.host}, since {utc(s.started_at)}",
        f"ledger    {was}{ill}; {s.backlog_records:,} records ({_mb(s.backlog_bytes)}) not durable {'then' if gone else 'yet'}",
    ]
    if s.logged_moves:
        said.append(f"moves     {s.logged_moves:,} are durable and not yet in what reports read")
    if s.database == "sqlite":
        said.append(
            f"log       {_mb(s.wal_bytes)} (SQLite's); when too large written back {s.wal_written_back} times, "
            f"prevented by a reader {s.wal_blocked} times"
        )
    said.append(
        f"payloads  {_mb(s.payload_bytes)} of {_mb(s.payload_bound_bytes)} in memory; {s.payload_evictions:,} samples evicted, "
        f"{s.payload_reads:,} reads back from the ledger"
    )
    if s.hidden:
        follows = BLIND if s.blind else CANNOT_SEE_JOBS
        said.append(
            f"yielding  {'was ' if gone else ''}OFF: {s.hidden}; {follows} `scavenger doctor` has the remedy"
        )
    if s.ended_connections or (s.open_files_limit and s.open_files >= HIGH * s.open_files_limit):
        scarce = (
            ", FEW ARE LEFT: raise the limit (LimitNOFILE=, ulimit -n)"
            if s.open_files >= HIGH * s.open_files_limit
            else ""
        )
        said.append(
            f"sockets   {s.open_files:,} of {s.open_files_limit:,} files open{scarce}; {s.ended_connections:,} connections without a key "
            f"ended, {s.unproven_connections:,} there"
        )
    if s.metrics and not gone:
        said.append(f"metrics   http://{s.metrics}/metrics")
    said[1:1] = [
        *harvested(s.harvest, s.at, now, gone),
        *(line for one in s.clusters for line in further(one, s.at, now, gone)),
        *map(trains, s.training),
        *map(shares, s.gpu_memory),
        *map(paused, s.weights_pauses),
        *map(speculates, s.speculation),
        *map(moves_kv, s.kv_blocks),
    ]
    said = [f"NO DAEMON SERVES: {gone}; the figures are its last ones", *said] if gone else said
    return list(map(printable, said))


def further(cluster: ClusterNow, at: float, now: float, gone: str) -> list[str]:
    """Of a further cluster: its link, then as `harvested`. Pure."""
    heard = f"heard {max(0.0, now - cluster.heard_at):.0f} s ago"
    if not cluster.heard_at:
        heard = "NOT HEARD since the daemon began"
    elif at - cluster.heard_at > LINK_S:
        heard = f"LINK DOWN, last {heard}: nothing is submitted or cancelled there until it is back"
    said = [f"cluster   {cluster.name}: {heard}"]
    if cluster.revoked:
        said.append("          REVOKED: the key of its harvester was removed; its engines leave")
    if cluster.fault:
        said.append(f"          AT FAULT: {cluster.fault}")
    return said + [f"  {line}" for line in harvested(cluster.harvest, at, now, gone)]


def harvested(h: Harvest | None, at: float, now: float, gone: str) -> list[str]:
    """What it holds of the partition, whether it was stopped, and why it took no more. Pure. `at`: of the status; `gone` as `absent` says
    it."""
    if h is None:
        return []
    had = "held" if gone else "holds" if h.engines == 1 else "hold"
    draining = f", {h.draining} of them draining" if h.draining else ""
    queue = (
        f"{amount(h.waiting, 'job')} of ours {'waited' if gone else 'waits' if h.waiting == 1 else 'wait'}"
        + (
            f" and {h.standby_jobs} {'is a standby job' if h.standby_jobs == 1 else 'are standby jobs'}"
            if h.standby_jobs
            else ""
        )
    )
    held = f"{amount(h.engines, 'engine')} {had} {amount(h.gpus, 'GPU')}"
    if not gone and h.connected is not None and (h.connected, h.connected_gpus) != (h.engines, h.gpus):
        # Between two polls engines come and go: both are told, each with its age.
        polled = (
            f"at the last poll, {max(0.0, now - h.seen_at):.0f} s ago"
            if h.seen_at
            else "as the ledger has it, before the first poll"
        )
        since = f"{max(0.0, now - at):.0f} s ago"
        held = (
            f"{amount(h.engines, 'engine')} held {amount(h.gpus, 'GPU')} {polled}; "
            + f"connected {since}: {amount(h.connected, 'engine')} on {amount(h.connected_gpus, 'GPU')}"
        )
    said = [f"harvest   partition {h.partition}: {held}{draining}, {queue}"]
    if h.owners:
        shares_of = ", ".join(f"{one.owner} {one.engines} on {amount(one.gpus, 'GPU')}" for one in h.owners)
        said.append(f"owners    {shares_of}")
    if gone and h.engines + h.waiting + h.standby_jobs:
        said.append(f"          {left_behind(h.partition)}")
    if h.stopped:
        said.append(f"          STOPPED by {h.stopped}")
    if h.set_up:
        said.append(f"          SET-UP AT FAULT: {h.set_up}")
    if h.unread:
        said.append(f"          NOT KNOWN whether it is stopped: {h.unread}")
    said += [f"          NO ENGINE: {why}" for why in h.closed]
    if h.seen_at:
        seen = f"{max(0.0, now - h.seen_at):.0f} s ago" if not gone else f"at {utc(h.seen_at)}"
        gpus = f"{h.idle} GPUs idle, {h.gpus_other_users} used by other users"
        said.append(
            f"slurm     seen {seen}: {gpus}; {h.jobs_pending_other_users} jobs of other users wait for GPUs there"
        )
    else:
        said.append("slurm     not seen yet")
    if h.polls_late and not gone:
        said.append(f"          BEHIND: {h.polls_late}")
    if h.polls_fail:
        said.append(
            f"          POLLS FAIL: {h.polls_fail}; nothing is submitted or cancelled until one succeeds"
        )
    if h.concluded:
        said.append(f"decided   {h.concluded}")
    return said


def trains(job: TrainingJob) -> str:
    """Pure."""
    if not job.ended:
        return f"training  run {job.run}: job {job.job_id} {job.state}"
    return f"training  run {job.run}: job {job.job_id} {job.ended}; its log says why; submitted again, the run goes on"


def shares(found: SharedGpus) -> str:
    """Pure."""
    to = "generate" if found.awake else "sleep"
    return (
        f"memory    run {found.run}: reserved engines are to {to}; {found.holding} hold their memory, {found.asleep} sleep with "
        f"{_mb(found.engine_bytes)}; the ranks kept {_mb(found.trainer_bytes)} when they last had engines woken"
    )


def paused(found: WeightsPause) -> str:
    """Pure."""
    return (
        f"weights   run {found.run}: from the last token under one version to the first under the next, {found.median_s:.1f} s, "
        f"{found.most_s:.1f} s at most ({amount(found.engines, 'engine')}, each its last time)"
    )


def speculates(found: Speculation) -> str:
    """Pure."""
    mean = 1 + found.accepted / max(found.verifications, 1)
    return (
        f"drafts    run {found.run}: {found.accepted:,} of {found.drafted:,} tokens accepted in {found.verifications:,} verifications, "
        f"{mean:.2f} tokens each; {found.sent:,} siblings' tokens sent between engines"
    )


def moves_kv(found: KvBlocks) -> str:
    """Pure."""
    turns = (
        f"; {found.turns_kept:,} turns' were kept, {found.turns_handed:,} of these from engines that left"
        if found.turns_kept
        else ""
    )
    return (
        f"kv        run {found.run}: {found.moved:,} moved samples took {found.tokens:,} tokens' blocks along "
        f"({found.nbytes / 1e6:,.1f} MB, {found.seconds:.3f} s); {found.prefilled:,} prefilled as no slower, {found.gone:,} gone, "
        f"{found.refused:,} refused{turns}"
    )


def left_behind(partition: str) -> str:
    """What becomes of engines without a daemon, and how to end them now. Pure."""
    return f"engines without a daemon leave after 15 minutes; at once, as its user: scancel -u $USER -p {partition}"


def utc(at: float) -> str:
    """For a terminal, whatever the number. Pure."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # the file has it from elsewhere
        return f"no time ({at:g})"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


async def publish(
    state_dir: Path,
    read: Callable[[], Status],
    stop: asyncio.Event,
    *,
    write_s: float = WRITE_S,
    log_s: float = LOG_S,
) -> None:
    """Write the figures every `write_s` seconds and log them every `log_s`, what is harvested when it changed, until `stop`.

    A file that cannot be written ends nothing.
    """
    loop = asyncio.get_running_loop()
    logged_at, logged = loop.time(), None
    while not stop.is_set():
        status = read()
        if status.harvest is not None and _counts(status.harvest) != logged:
            logged = _counts(status.harvest)
            log.info("harvest", **logged, because=status.harvest.concluded)
        try:
            await written(functools.partial(write, state_dir, status))
        except OSError as error:
            log.warning("status not written; tried again", path=str(path(state_dir)), reason=str(error))
        if loop.time() - logged_at >= log_s:
            logged_at = loop.time()
            log.info("status", **{name: getattr(status, name) for name in _LOGGED})
        await within(stop, write_s)


def _counts(harvest: Harvest) -> dict[str, int | str]:
    """What is logged when it changes. The rest changes with every poll."""
    return {name: getattr(harvest, name) for name in ("engines", "gpus", "waiting", "draining", "stopped")}


_ENDS = (
    "state",
    "reason",
    "stopped_at",
    "database",
    "metrics",
    "hidden",
    "blind",
    "harvest",
    "training",
    "gpu_memory",
    "weights_pauses",
    "speculation",
    "kv_blocks",
    "engines",
    "runs",
)
#: What an earlier line of the log does not say already.
_LOGGED = tuple(
    name
    for name in Status.__struct_fields__
    if name not in ("at", "host", "pid", "started_at", "ledger_reason", "clusters", *_ENDS)
)

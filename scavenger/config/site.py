"""`scavenger.toml`, the daemon's: every key, its unit, its default, what is allowed and what it does.

docs/config.md is generated from this module: a class's docstring opens its section, the text below a key is its description
(`scavenger.config.reference`). Knows nothing of runs, and reads no file.
"""

from __future__ import annotations

import datetime
import ipaddress
import zoneinfo
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from scavenger.config.section import Allowed, Fraction, Host, NonNegative, Positive, Seconds, Section

_DAY = "Mon|Tue|Wed|Thu|Fri|Sat|Sun"


class DaemonSection(Section):
    """Where the daemon keeps its state, and how workers and trainers reach it."""

    state_dir: Path
    """Directory of the keys, the rendezvous file, the engines' logs and, by default, the ledger. Daemon
    and engines must see it, under one path and one user id; with `cluster.submit_socket` the daemon alone. A
    relative path is relative to this file."""
    public_dir: Path | None = None
    """Folder that all users of the site can read, of the daemon's user: where other users find the daemon
    (`run.state_dir` of their runs), ask it to accept their keys (`scavenger join`, `[owners]`), and read why
    there are no more engines (`scavenger status`). The daemon makes it, in a folder that exists. A relative
    path is relative to this file. None: only the daemon's own user can train."""
    ledger: Annotated[str, Allowed("SQLAlchemy URL")] = ""
    """Database of the ledger: `sqlite:////absolute/path` or `postgresql://user@host/database`. Empty: SQLite
    at `<state_dir>/ledger.sqlite3`. The daemon refuses SQLite on a network file system and a relative path;
    it warns of a ledger in memory (tmpfs). `<state_dir>/ledger.json` names the ledger: the daemon refuses
    another one, or an empty one, unless it is started with `--new-ledger`."""
    listen: Host = "127.0.0.1"
    """Interface that the daemon binds. `0.0.0.0`: all of them. Loopback is refused where the partition has nodes on
    other hosts, unless `advertise` names another address (a proxy or a tunnel)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port. 0: the system chooses one, and another one after each restart."""
    clusters_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """TCP port where harvesters of further clusters dial in (`scavenger harvester`, [fleet.md](fleet.md#several-clusters)).
    0: the system chooses one, for harvesters on this host. None: none may."""
    advertise: Annotated[str, Allowed("host name")] = ""
    """Host name that workers and trainers connect to. Empty: the text of `listen`, or this host's name where
    `listen` is `0.0.0.0`."""
    heartbeat_s: Seconds = 1.0
    """Seconds between two heartbeats of a worker. Must be below `suspect_s`."""
    suspect_s: Seconds = 4.0
    """Seconds of silence after which a worker gets no new leases. Must be below `dead_s`."""
    dead_s: Seconds = 12.0
    """Seconds of silence after which the router moves a worker's samples, even when Slurm reports nothing."""
    reconnect_s: Seconds = 15.0
    """Seconds that a restarted daemon waits for the workers with open leases. Then it moves their samples."""
    engine_stalled_s: Seconds = 300.0
    """Seconds without a new token after which the router moves an engine's samples and drains the engine,
    though its worker still replies. Must be more than the engine takes to compile."""
    trainer_silent_s: Seconds = 60.0
    """Seconds of a trainer's silence after which its run wants no harvested engines, if none of its samples
    is waiting or being generated."""
    trainer_gone_s: Seconds = 600.0
    """Seconds of a trainer's silence after which its run wants no harvested engines in any case. At least
    `trainer_silent_s`."""
    flush_ms: Annotated[float, Field(ge=1, le=10_000)] = 100.0
    """Milliseconds after which a worker sends the tokens that it has generated. With `flush_tokens` it bounds
    what a worker loses when it ends without notice."""
    flush_tokens: Positive = 32
    """Tokens of one sample after which a worker sends them at once."""
    payload_memory_mb: NonNegative = 512
    """Mebibytes of tokens that the daemon caches, so that a sample can move without a read of the ledger.
    Tokens that are not committed yet always stay in memory."""

    @field_validator("ledger")
    @classmethod
    def _absolute(cls, url: str) -> str:
        """Of a relative path another working directory would make another ledger."""
        scheme, _, path = url.partition(":///")
        if scheme.split("+")[0] == "sqlite" and path and not path.startswith(("/", ":memory:", "file:")):
            raise ValueError(
                "the path of an SQLite ledger is relative; write sqlite:////absolute/path, with four slashes"
            )
        return url

    @model_validator(mode="after")
    def _ordered(self) -> DaemonSection:
        if not self.heartbeat_s < self.suspect_s < self.dead_s:
            raise ValueError("heartbeat_s < suspect_s < dead_s must hold")
        if self.trainer_silent_s > self.trainer_gone_s:
            raise ValueError("trainer_silent_s <= trainer_gone_s must hold")
        if self.clusters_port and self.clusters_port == self.port:
            raise ValueError(f"port and clusters_port are both {self.port}: each needs its own")
        if self.clusters_port and not self.advertise and _is_loopback(self.listen):
            raise ValueError(
                f"clusters_port is set, and listen = {self.listen!r} is reached from this host alone: write listen as an address that other"
                " clusters reach (0.0.0.0 = every one), or advertise as that of a tunnel; clusters_port = 0 is for a harvester on this host"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class OwnersSection(Section):
    """Who may own runs, besides those that the admin enrols by hand (`scavenger enroll`). Needs
    `daemon.public_dir`."""

    users: Annotated[tuple[str, ...], Allowed("list of user names")] = ()
    """Users whose keys the daemon accepts when they ask (`scavenger join`)."""
    groups: Annotated[tuple[str, ...], Allowed("list of group names or gids")] = ()
    """The same for all members of these Unix groups. Who leaves them loses access within a minute."""
    deny: Annotated[tuple[str, ...], Allowed("list of user names")] = ()
    """Users who may not, whatever else names them. Their keys are out of force within seconds of a reload, and in
    force again once they are taken out of this list."""
    proof: Literal["file", "munge"] = "file"
    """How a user who asks shows who it is. `file`: by having made a file in the public folder. `munge`: by a MUNGE
    credential too, as Slurm's own requests do; set it where Slurm has `AuthType=auth/munge`."""
    max_gpus: NonNegative | None = None
    """GPUs that harvested engines of one owner's runs hold at most, all runs together. None: no limit but
    `harvest.max_gpus`."""
    max_gpus_of: dict[str, NonNegative] = {}
    """The same for single owners, by name (`scavenger keys list`), instead of `max_gpus`."""

    share_of: dict[str, Positive] = {}
    """Shares of owners, by name, where runs want more engines than `harvest.max_engines` and `harvest.max_gpus` give:
    `{ ada = 3 }` has three engines for each of an owner with share 1, which is every unnamed owner's."""
    gpu_types_of: Annotated[dict[str, tuple[str, ...]], Allowed("lists of GRES types by owner")] = {}
    """GRES types that engines of single owners' runs may use, by name: `{ ada = ["a100"] }`. Who is not named may use
    all. It bounds what starts."""
    partitions_of: Annotated[dict[str, tuple[str, ...]], Allowed("lists of partitions by owner")] = {}
    """The same by partitions: engines start only on nodes that are also in one of these. Jobs are submitted to
    `harvest.partition` all the same."""

    def most_gpus(self, owner: str) -> int | None:
        """GPUs that engines of this owner's runs may hold; None: any number."""
        return self.max_gpus_of.get(owner, self.max_gpus)


class RouterSection(Section):
    """Which engine generates which sample, when reserved engines sleep, and how many engines a run asks
    for."""

    policy: Literal["predictive", "standard"] = "predictive"
    """`predictive` learns completion lengths and the engines' speed, start-up time and lifetime, and solves
    for the shortest step ([architecture.md](architecture.md)). `standard` fills engines evenly, moves no
    sample, takes the window from `reserved.window`, and asks for every engine that the step's samples can
    use. If `predictive` fails, the run goes on with `standard`, and the log has an event `policy_failed`."""
    harvested_gpu_price: Annotated[float, Field(ge=0)] = 1.0
    """`predictive` only: what a harvested GPU-second costs, in GPU-seconds of the training job's own. The run
    asks for an engine while the engine is expected to save more than its start costs. 0: idle GPUs cost
    nothing, so the run asks for every engine that shortens the step, though most may be preempted before they
    generate."""
    disagreement: Literal["set-aside", "report", "off"] = "set-aside"
    """What becomes of an engine whose logprobs disagree with the trainer's more than its peers' do
    ([recovery.md](recovery.md#a-gpu-that-computes-wrong)). `set-aside`: it gets no more samples and leaves, its
    unfinished ones move, those that no step has taken are masked, and its node is quarantined for
    `harvest.quarantine_s`. `report`: the ledger's decisions and events name it, nothing else is done."""
    disagreement_ratio: Annotated[float, Field(gt=1)] = 3.0
    """An engine disagrees when the absolute difference between its logprobs and the trainer's, a token on
    average, is above this multiple of its peers' median, or its signed difference as far from theirs as a tenth of
    that, and chance does not explain it. Raise it where engines of one run compute in different types."""
    disagreement_samples: Annotated[int, Field(ge=4)] = 16
    """Samples of an engine that must have been trained before it is judged."""
    sibling_bytes_per_s: NonNegative = 262_144
    """Bytes a second at most, before compression, of siblings' tokens that the daemon sends to each engine of a run with
    `engine.speculation = "group"` ([engines.md](engines.md#grouped-speculation)); a token has four. 0: an engine
    drafts from its own samples alone."""
    share_prompts: bool = False
    """`true`: new samples of one prompt are put on one engine where that changes no engine's number of samples, so that an
    engine that keeps prefixes (vLLM) prefills the prompt once ([engines.md](engines.md#prompts-that-are-shared)).
    A lost engine then has more of a group."""


class LedgerSection(Section):
    """What becomes of the tokens of samples that no resume from a kept checkpoint needs."""

    retention: Literal["keep", "compact", "drop"] = "keep"
    """Applies to samples that are final (consumed, filtered, masked, evaluated, superseded or surplus) in a
    step that the oldest kept checkpoint covers. `compact`: one row a lease instead of one a chunk, with every
    token. `drop`: tokens and logprobs are deleted; lengths, rewards and leases stay."""
    retention_steps: NonNegative = 2
    """Optimizer steps that the run must have taken since the sample's own before `retention` applies."""


class ClusterSection(Section):
    """How the daemon talks to the scheduler, and how often."""

    backend: Literal["auto", "slurm", "pyslurm", "local"] = "auto"
    """`slurm` runs Slurm's commands. `pyslurm` polls through pyslurm in a process of its own, and submits and
    cancels by the commands; it must be built for this Slurm's X.Y (`scripts/build-pyslurm`). `local` talks to
    a running `python -m scavenger.cluster.local.client serve`. `auto`: `local` when `local_dir` is set, else
    `pyslurm` where it fits, else `slurm`; the log names the backend and the reason."""
    local_dir: Path | None = None
    """Directory of the local backend's server. `local` needs it. A relative path is relative to this file."""
    poll_interval_s: Seconds = 60.0
    """Polling interval: seconds between two observations of nodes and queue, at random up to a tenth more or
    less. It is three times as long while no run is open and the daemon has no job. An observation older than two intervals
    (and older than `command_timeout_s`) decides nothing."""
    fast_poll_interval_s: Seconds = 15.0
    """Polling interval while something is expected (a job was just submitted or preempted), within
    `max_rpc_per_min`: where that is too little for a whole observation, the daemon polls the queue alone.
    Also the first wait after a failed command; the wait doubles up to 300 s, and starts at `poll_interval_s`
    where Slurm asked for fewer requests."""
    min_poll_interval_s: Annotated[float, Field(ge=0)] = 5.0
    """Lower bound of both polling intervals."""
    max_rpc_per_min: Annotated[float, Field(gt=0)] = 4.0
    """Requests to slurmctld a minute, as `sdiag` counts them, on average over ten minutes: what is not used
    in quiet times is left for fast polling. A whole observation takes 4, the queue alone 2 (`pyslurm`: 1).
    Submissions and cancellations count too, and are never delayed: they put off fast polls, never the regular ones."""
    absent_s: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that a job must be missing from the queue, in at least two observations, before it counts as
    ended."""
    command_timeout_s: Seconds = 20.0
    """Seconds that one Slurm command may take."""
    command_output: Literal["fields", "json"] = "fields"
    """Output format of Slurm's commands. `json` takes them ten times as long, and an observation then takes 3
    requests instead of 4. The schemas of Slurm 22.05 to 26.05 are read."""
    submit_socket: Path | None = None
    """Socket of `scavenger slurm-proxy --role submit`: it submits and cancels as `engines_user`, so that engines cannot
    read the daemon's keys and ledger ([site.md](site.md#engines-as-a-user-of-their-own)). Needs `engines_user`,
    `engines_dir` and `daemon.public_dir`. None: engines run as the daemon's user."""
    engines_user: Annotated[
        str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$"), Allowed("user name")
    ] = ""
    """Unix user of that process, and so of all engines. The daemon trusts no other process at the socket."""
    engines_dir: Path | None = None
    """Absolute path of the folder of `engines_user` for engines' keys and logs, mode 0700, on a file system that compute
    nodes share: `--dir` of that process."""
    view_socket: Path | None = None
    """Socket of `scavenger slurm-proxy --role view`: it reads nodes and queue as a user who sees every job, and does
    nothing else. Needs `view_user`. None: the daemon reads them as its own user."""
    view_user: Annotated[
        str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$"), Allowed("user name")
    ] = ""
    """Unix user of that process. The daemon believes no other process at the socket."""


class Hours(Section):
    """Limits for some hours of the week, in `harvest.timezone`. The first table that holds now replaces those
    of `max_engines` and `max_gpus` that it names. Engines over the new limit are drained."""

    days: Annotated[
        str, Field(pattern=rf"^({_DAY})(-({_DAY}))?$"), Allowed('days as `"Sun"` or `"Mon-Fri"`')
    ] = "Mon-Sun"
    """Days of the week."""
    hours: Annotated[
        str, Field(pattern=r"^([01]?\d|2[0-3])-([01]?\d|2[0-4])$"), Allowed('hours as `"8-18"`')
    ] = "0-24"
    """Hours of these days. `"20-6"` goes on into the next morning."""
    max_engines: NonNegative | None = None
    """Takes the place of `harvest.max_engines`."""
    max_gpus: NonNegative | None = None
    """Takes the place of `harvest.max_gpus`."""


class Blackout(Section):
    """Dated times in which nothing is harvested: a deadline, a benchmark, a course. Engines leave before it begins
    (`harvest.drain_before_s` and a poll), and no engine starts that would have less than `harvest.min_runtime_s` before."""

    start: Annotated[datetime.datetime, Allowed("date and time: `2026-12-24T18:00:00`")]
    """When it begins. Without an offset (`+01:00`, `Z`) it is of `harvest.timezone`. Where clocks are put forward or back
    at that time, the blackout begins at the earlier of two readings and ends at the later."""
    end: Annotated[datetime.datetime, Allowed("the same, later")]
    """When it is over. One that is over holds nothing up, and may stay in the file."""
    reason: str = ""
    """Why: shown by `scavenger status`, in decisions and in drained engines' reasons."""


class HarvestSection(Section):
    """Which GPUs the daemon may use, what it does for other users' jobs, and how its own jobs are
    submitted."""

    enabled: bool = True
    """`false`: the daemon neither polls the cluster nor submits. Running harvested engines lose their keys
    and end."""
    partition: str = "scavenge"
    """The preemptible partition. The daemon refuses to start on one whose jobs could block other users' jobs."""
    # what may be used
    max_engines: NonNegative = 4
    """Harvested jobs at most, over all runs; pending and draining ones count. 0: all of them are drained."""
    max_gpus: NonNegative | None = None
    """GPUs at most that the daemon's jobs are allocated or wait for, over all runs. None: no such limit."""
    max_pending: Positive = 2
    """Jobs of the daemon that may be pending at once, requeued ones included."""
    max_gpus_per_node: NonNegative | None = None
    """GPUs of one node at most that the daemon's jobs are allocated. None: no such limit."""
    max_nodes_per_engine: Positive = 1
    """Nodes of one engine at most (`run.nodes_per_engine`). A run whose engines need more gets none. On a cluster
    without Slurm (`cluster.backend = "local"`) it must be 1."""
    max_environment_workers: NonNegative = 0
    """Jobs of environment workers at most, over all runs, without a GPU: for runs of the daemon's own user with
    `data.environment_jobs` ([agents.md](agents.md#environment-workers-in-jobs)). Of each node the CPUs of engines on its idle GPUs
    stay free. 0: none."""
    environment_cpus: Positive = 4
    """`--cpus-per-task` of such a job."""
    environment_memory_mb: Positive = 8192
    """`--mem` of such a job in mebibytes."""
    max_gpus_by_partition: dict[str, NonNegative] = {}
    """GPUs at most that the daemon's jobs are allocated on the nodes of each of the other partitions: `{ a100 = 8 }`.
    It bounds what starts; engines over a limit that was lowered stay until they end."""
    max_gpus_by_type: dict[str, NonNegative] = {}
    """The same for each GRES type: `{ h100 = 16 }`."""
    max_gpus_per_user: NonNegative | None = None
    """GPUs of the partition at most that all jobs of the daemon's Unix user are allocated or wait for; jobs
    of the user's other daemons count. None: no such limit. The limits of a QOS or an account apply besides:
    while Slurm keeps a job pending for one, the daemon submits no other."""
    schedule: Annotated[tuple[Hours, ...], Allowed("tables `[[harvest.schedule]]`")] = ()
    """Other limits for some hours of the week: see [below](#harvestschedule)."""
    timezone: Annotated[str, Allowed("IANA name")] = "UTC"
    """Time zone of `schedule`, and of times in `blackout` that have none."""
    blackout: Annotated[tuple[Blackout, ...], Allowed("tables `[[harvest.blackout]]`")] = ()
    """Dated times in which nothing is harvested: see [below](#harvestblackout)."""
    stop_file: Path | None = None
    """Kill switch: while this file exists, the daemon submits nothing and drains its engines. If the file's
    first word is `now`, the daemon cancels its jobs at once. `scavenger drain` does the same for one
    daemon."""
    max_preemptions_per_hour: NonNegative | None = None
    """After so many preemptions within an hour the daemon submits nothing and cancels its pending jobs, until
    fewer lie within the last hour. None: no such limit."""
    headroom_gpus: NonNegative = 0
    """Idle GPUs to leave idle."""
    headroom_per_node: NonNegative = 0
    """Idle GPUs to leave idle on each node."""
    headroom_by_type: dict[str, NonNegative] = {}
    """Idle GPUs of each GRES type to leave idle: `{ h100 = 8 }`."""
    headroom_by_partition: dict[str, NonNegative] = {}
    """Idle GPUs to leave idle on the nodes of each of the other partitions: `{ interactive = 4 }`."""
    division: Literal["shares", "value"] = "shares"
    """How engines are divided among runs. `shares`: in turn, by `owners.share_of`, where `max_engines` and `max_gpus` are
    less than runs want; what is idle goes to whoever asks first. `value`: all GPUs that there are, by what one more
    engine saves each run, times its owner's share ([fleet.md](fleet.md)); engines leave for runs that gain more."""
    division_floor: Annotated[float, Field(ge=0, le=1)] = 0.95
    """`value` only: a run keeps as many engines as give it, by its own forecast, this part of the throughput that it
    would have with its share of the GPUs (`owners.share_of`). 0: value alone decides. 1: value decides only over
    what shares leave."""
    division_wait_s: Annotated[float, Field(ge=0)] = 900.0
    """`value` only: a run that wants engines and has had none for so many seconds comes first."""
    division_hold_s: Annotated[float, Field(ge=0)] = 300.0
    """`value` only: seconds that an engine stays after its start, whatever others would save with its GPUs; and until
    it has registered, within 120 s."""
    change_hands: bool = False
    """`true`: an engine that its run has too many of goes on for another run, in the same process, where both runs' engines
    are of one kind and the runs allow it (`run.isolation`). It forgets the first run before it gets the second one's key
    ([fleet.md](fleet.md#engines-that-change-hands)). `false`: its job ends, and another starts."""
    change_models: bool = True
    """With `change_hands` only. `true`: an engine goes on also for a run of another model, or with other `[engine]` settings, where no idle
    GPU gives that run one and a new start is predicted to take longer: its process ends the old engine and builds the other one
    ([fleet.md](fleet.md#to-another-model)). `false`: only between runs whose engines are of one kind."""
    lend_slots: NonNegative = 0
    """Slots that an engine lends at most to samples of another run, in one batch with its own run's, where both runs set
    `run.share_engines` ([fleet.md](fleet.md#engines-that-lend-slots)). At most half of its batch is lent. 0: none."""
    # other users' jobs
    other_users_window_s: Annotated[float, Field(ge=0)] = 60.0
    """GPUs that other users' jobs are expected to need within so many seconds (begin times, Slurm's planned
    starts) do not count as idle. 0: only GPUs that a pending job could use now are left.
    [harmless.md](harmless.md)"""
    yield_after_s: Annotated[float, Field(ge=0)] = 10.0
    """Voluntary preemption: when another user's job may preempt the daemon's jobs, could start without them,
    and still waits after so many seconds, the daemon drains engines for it. Where Slurm preempts by QOS the
    daemon does not wait: it drains at once for every such job."""
    same_tier_yield_s: Seconds = 30.0
    """A same-tier job of another user cannot preempt the daemon's jobs; where Slurm preempts by QOS, the
    daemon treats every job so. When such a job could start without them, the daemon drains engines for it,
    and cancels those that still run after so many seconds."""
    sees_all_jobs: bool = False
    """`true`: the daemon's user sees other users' jobs although `PrivateData=jobs` is set: a coordinator of their
    accounts does ([site.md](site.md#who-may-see-the-queue-privatedata))."""
    sole_user: bool = False
    """`true`: only the daemon's user may use the partition. The daemon then harvests it even if other users'
    jobs are hidden, because all of them can preempt its jobs."""
    # the jobs
    placement: Literal["node", "slurm"] = "node"
    """`node`: the daemon submits each job for the node with the smallest gap that it fits into
    (`--nodelist`), so that headroom and limits hold on each node. `slurm`: Slurm chooses the node."""
    cpus_per_engine: Positive = 1
    """`--cpus-per-task` of a job, and its `OMP_NUM_THREADS`. At most its GPUs' share of the node's CPUs. An engine of
    several nodes has so many on each."""
    memory_mb_per_engine: NonNegative = 0
    """`--mem` of a job in mebibytes, on each of its nodes. A node where that is more than the share of the job's GPUs is not used.
    0: that share. Set what an engine needs: where the share exceeds Slurm's `MaxMemPerCPU`, Slurm adds CPUs
    for it."""
    gpu_type: str = ""
    """GRES type, as in `--gres=gpu:TYPE:N`. Empty: any."""
    time_limit_s: Seconds = 3600.0
    """`--time` of a job, less `time_stagger`, rounded up to whole minutes."""
    time_min_s: Annotated[float, Field(ge=0)] = 0.0
    """`--time-min`, less the same share as the time limit: Slurm's backfill may shorten a job to this, so
    that it fits before a planned start (22.05 does so whenever backfill starts it). 0, or not below the
    limit: not given."""
    min_runtime_s: Seconds = 600.0
    """The daemon submits no engine where a reservation, or another user's job that backfill plans to start,
    leaves it less than this."""
    time_stagger: Fraction = 0.25
    """Each job's time limit is shorter by a random share up to this, so that engines that started together do
    not end together."""
    drain_before_s: Annotated[float, Field(ge=0)] = 30.0
    """Seconds before its time limit, or before a reservation on its node begins, at which an engine is
    drained."""
    fresh_after_s: Seconds = 30.0
    """The daemon cancels a pending job and submits another if there is free capacity elsewhere and the job
    begins later than this (a requeued one waits 121 s by default), or has waited so long for a node that is
    now taken."""
    min_expected_life: Fraction = 0.985
    """Start-benefit check: the share of the taken GPUs that shall stay idle for longer than an engine takes
    to start. The daemon waits until a GPU has been idle for long enough, judged by the GPUs that it has
    observed since it started (other users' jobs must have taken 100 of a kind first). 0: an idle GPU is taken
    at once. Needs a run whose policy predicts an engine's benefit. Does not apply to jobs that are pending
    already, nor with `placement = "slurm"` or a `constraint`. [harmless.md](harmless.md)"""
    standby_jobs: NonNegative = 4
    """Pending jobs with a start time far away, until the daemon sets the node where they start. Engines
    beside other users' jobs are then older than engines on otherwise idle nodes. Slurm preempts the oldest
    first, so it breaks up no idle node for a small job. A standby job has no allocation, and counts as no
    engine and no pending job. [harmless.md](harmless.md)"""
    after_drain: Literal["requeue", "wait"] = "requeue"
    """What a job does after Slurm's notice, once its engine is drained. `requeue`: it requeues itself, so
    that the preempting job starts at once. `wait`: Slurm requeues it at the end of the grace."""
    pull_mb_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Megabytes of weights a second that all harvested engines of this user on one node together fetch from
    other machines and from the spool, so that the node's network stays free for other users' jobs. Applies to
    jobs that are submitted later; a job template of your own passes it on (`--pull-mb-per-s`). 0: no
    bound."""
    nice: NonNegative = 10_000
    """`--nice`: how far behind other jobs the daemon's stand in the queue."""
    account: str = ""
    """`--account`. Empty: not given. `{owner}` stands for the name of the run's owner: an engine is charged
    to an account of that name."""
    qos: str = ""
    """`--qos`. Empty: not given. Needed where Slurm preempts by QOS."""
    wckey: str = ""
    """`--wckey`. Empty: not given. `{owner}` stands for the name of the run's owner: `sacct --wckeys` and
    `sreport` then add up each owner's engines."""
    constraint: str = ""
    """`--constraint`. Empty: not given."""
    contact: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9.+@_-]{0,100}$"), Allowed("letters, digits and `.+@_-`, 100 at most")
    ] = ""
    """Whom other users ask about the daemon's jobs, a mail address: part of each job's comment (`squeue -o %k`)."""
    container: str = ""
    """Runs the engine in a container: options of `srun` for pyxis (`--container-image=...`), or a command
    (`apptainer exec --nv IMAGE`), split as a shell splits words. Python and the state directory must have the
    same paths in the container (`--bind`); `scavenger doctor --submit` looks for both there."""
    quarantine_after: Positive = 3
    """Engine deaths on a node within `quarantine_s` after which the node gets no engines for
    `quarantine_s`. Where engines of one owner's runs die on two nodes and none of these runs ever worked, no
    node is blamed; nor where deaths in one owner's runs alone would close more than two. An engine that
    could not start (no daemon answered it, an import failed, its key cannot be read) counts only once one
    that started later on another node has worked."""
    quarantine_s: Seconds = 600.0
    """Seconds of a quarantine. It doubles each further time, up to eight times this."""
    backoff_s: Seconds = 5.0
    """Seconds without submissions for an owner whose job died at once. They double up to 600 s, until an engine has
    lived; where none could start, until one has worked, and then one at a time is tried."""
    job_template: Path | None = None
    """Jinja2 template of the engines' batch script. None: the shipped `scripts/rollout.sbatch.j2`."""
    vllm_options: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], ...], Allowed("names")
    ] = ()
    """Engine arguments of vLLM that harvested engines take of a run's `[engine.vllm]` besides numbers, switches
    and plain names. Such an option may name files or code, and engines run as the daemon's user, or as `cluster.engines_user`."""
    python: Annotated[str, Allowed("path")] = ""
    """Python interpreter of the engines on the compute nodes. Empty: the path of the daemon's own."""
    logs_mb: Positive = 512
    """Mebibytes of `<state_dir>/logs`, the logs of all engines' jobs. The oldest of ended jobs are deleted
    first; a log larger than an eighth of this keeps its end only."""

    @model_validator(mode="after")
    def _blackouts_end(self) -> HarvestSection:
        for one in self.blackout:
            start, end = self.span(one)
            clocks_alone = one.start.tzinfo is None and one.end.tzinfo is None
            if not 0 <= start < end or (clocks_alone and one.start >= one.end):
                raise ValueError(f"blackout: its end {one.end} is not after its start {one.start}")
        return self

    def span(self, blackout: Blackout) -> tuple[float, float]:
        """When it begins and ends, Unix seconds. A time that the zone's clocks show twice, or leave out, has two readings: the earlier one
        begins it, the later one ends it."""
        return min(self._moments(blackout.start)), max(self._moments(blackout.end))

    def _moments(self, at: datetime.datetime) -> tuple[float, float]:
        if at.tzinfo is None:
            at = at.replace(
                tzinfo=datetime.UTC if self.timezone == "UTC" else zoneinfo.ZoneInfo(self.timezone)
            )
        return at.replace(fold=0).timestamp(), at.replace(fold=1).timestamp()

    @field_validator("timezone")
    @classmethod
    def _exists(cls, name: str) -> str:
        try:
            if name != "UTC":
                zoneinfo.ZoneInfo(name)
        except (ValueError, zoneinfo.ZoneInfoNotFoundError) as error:
            raise ValueError(
                f"{name!r} is no time zone of this machine; write it as Europe/Berlin"
            ) from error
        return name


class PrometheusSection(Section):
    """Metrics for Prometheus. Off unless an address is given."""

    listen: Annotated[
        str, Field(pattern=r"^$|^[A-Za-z0-9_.-]+:\d{1,5}$"), Allowed("empty, or `host:port`")
    ] = ""
    """Address of `http://host:port/metrics`. Empty: the daemon serves and counts nothing. `127.0.0.1:0`: the
    system chooses a port, which the log and `scavenger status` name. Anyone who reaches the address can read
    the metrics: they hold names of runs, and no prompts or completions."""


class DaemonConfig(Section):
    """The daemon's file. `scavenger daemon` reads it; `scavenger samples`, `scavenger ledger` and `scavenger
    enroll` read it to find the ledger and the state directory. `--config FILE` or `SCAVENGER_CONFIG` names
    it; the default is `scavenger.toml` in the working directory.

    On SIGHUP (`systemctl reload`) the daemon reads the file again. Keys marked *live* change at once. The log
    names every other key that changed; it keeps its old value until a restart."""

    daemon: DaemonSection
    owners: OwnersSection = OwnersSection()
    router: RouterSection = RouterSection()
    ledger: LedgerSection = LedgerSection()
    cluster: ClusterSection = ClusterSection()
    harvest: HarvestSection = HarvestSection()
    prometheus: PrometheusSection = PrometheusSection()

    #: Paths that are relative to their file, not to the process's working directory.
    FILE_RELATIVE: ClassVar[frozenset[str]] = frozenset(
        {"daemon.state_dir", "daemon.public_dir", "cluster.local_dir"}
    )

    @model_validator(mode="after")
    def _owners_can_ask(self) -> DaemonConfig:
        if (self.owners.users or self.owners.groups) and self.daemon.public_dir is None:
            raise ValueError("[owners] needs daemon.public_dir: where those users find the daemon")
        return self

    @model_validator(mode="after")
    def _engines_fit_the_backend(self) -> DaemonConfig:
        nodes = self.harvest.max_nodes_per_engine
        if self.cluster.backend == "local" and nodes > 1:
            raise ValueError(
                f'harvest.max_nodes_per_engine = {nodes} needs Slurm, and cluster.backend = "local" starts a job\'s processes on one node'
            )
        return self

    @model_validator(mode="after")
    def _proxies_are_whole(self) -> DaemonConfig:
        c = self.cluster
        proxied = c.submit_socket is not None
        if {proxied, bool(c.engines_user), c.engines_dir is not None} != {proxied}:
            raise ValueError(
                "cluster.submit_socket, engines_user and engines_dir are set together, or none is"
            )
        if (c.view_socket is not None) != bool(c.view_user):
            raise ValueError("cluster.view_socket and view_user are set together, or neither is")
        for name, path in (
            ("submit_socket", c.submit_socket),
            ("view_socket", c.view_socket),
            ("engines_dir", c.engines_dir),
        ):
            if path is not None and not path.is_absolute():
                raise ValueError(f"cluster.{name} = {str(path)!r} is relative; write an absolute path")
        if proxied and self.daemon.public_dir is None:
            raise ValueError("cluster.submit_socket needs daemon.public_dir: where engines find the daemon")
        if (proxied or c.view_socket) and (c.backend in ("local", "pyslurm") or c.local_dir is not None):
            raise ValueError(
                'cluster.submit_socket and view_socket need Slurm\'s commands: backend = "slurm"'
            )
        return self

    @property
    def engines_home(self) -> Path:
        """Where engines' keys and logs lie."""
        return (self.cluster.engines_dir or self.daemon.state_dir).resolve()

    @property
    def ledger_url(self) -> str:
        return self.daemon.ledger or f"sqlite:///{self.daemon.state_dir / 'ledger.sqlite3'}"


#: What a daemon that runs takes over on SIGHUP, because `harvest.harvester` reads it afresh at every cycle. All else needs a restart.
LIVE = frozenset(
    {
        "cluster.fast_poll_interval_s",
        "cluster.max_rpc_per_min",
        "cluster.min_poll_interval_s",
        "cluster.poll_interval_s",
        "harvest.account",
        "harvest.after_drain",
        "harvest.blackout",
        "harvest.change_hands",
        "harvest.change_models",
        "harvest.constraint",
        "harvest.contact",
        "harvest.container",
        "harvest.cpus_per_engine",
        "harvest.division",
        "harvest.division_floor",
        "harvest.division_hold_s",
        "harvest.division_wait_s",
        "harvest.drain_before_s",
        "harvest.fresh_after_s",
        "harvest.gpu_type",
        "harvest.headroom_by_partition",
        "harvest.headroom_by_type",
        "harvest.headroom_gpus",
        "harvest.headroom_per_node",
        "harvest.job_template",
        "harvest.lend_slots",
        "harvest.environment_cpus",
        "harvest.environment_memory_mb",
        "harvest.max_engines",
        "harvest.max_environment_workers",
        "harvest.max_gpus",
        "harvest.max_gpus_by_partition",
        "harvest.max_gpus_by_type",
        "harvest.max_gpus_per_node",
        "harvest.max_gpus_per_user",
        "harvest.max_nodes_per_engine",
        "harvest.max_pending",
        "harvest.max_preemptions_per_hour",
        "harvest.memory_mb_per_engine",
        "harvest.min_expected_life",
        "harvest.min_runtime_s",
        "harvest.nice",
        "harvest.other_users_window_s",
        "harvest.placement",
        "harvest.pull_mb_per_s",
        "harvest.python",
        "harvest.qos",
        "harvest.same_tier_yield_s",
        "harvest.schedule",
        "harvest.sees_all_jobs",
        "harvest.sole_user",
        "harvest.standby_jobs",
        "harvest.stop_file",
        "harvest.time_limit_s",
        "harvest.time_min_s",
        "harvest.time_stagger",
        "harvest.timezone",
        "harvest.wckey",
        "harvest.yield_after_s",
        "owners.deny",
        "owners.gpu_types_of",
        "owners.groups",
        "owners.max_gpus",
        "owners.max_gpus_of",
        "owners.partitions_of",
        "owners.share_of",
        "owners.users",
    }
)

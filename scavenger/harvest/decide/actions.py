"""The vocabulary of the harvest policy: what it knows of our jobs, what is allowed now, what it may do and why. Frozen dataclasses.

And how a job of ours is named, so that it is found again (`track.observed_jobs.intent_in`). Owns no rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scavenger.cluster.model import nodes_in
from scavenger.policy.division import Division, DivisionRules
from scavenger.policy.idle_gpus import Idle


class DrainKind(StrEnum):
    """Whether a job of ours drains or was cancelled."""

    NO = "no"
    DRAINING = "draining"  # its engine was asked to drain
    CANCELLED = "cancelled"


class HarvestCode(StrEnum):
    """A decision's reason in a word. Ledgers hold these and reports rely on them: they are added to, never renamed."""

    # why nothing, or nothing more, was submitted
    STALE_VIEW = "stale_view"
    NO_RUN = "no_run"
    NO_DEMAND = "no_demand"  # runs are open and want no engine; of a job that drains: its run wants none
    NOT_ENCRYPTED = "not_encrypted"  # its weights would cross the link to a further cluster in the clear
    SERVED = "served"  # every wanted engine runs
    OWN_PENDING = "own_pending"  # our own pending jobs are to take what is idle
    PARTITION_DOWN = "partition_down"
    BACKOFF = "backoff"
    MAX_ENGINES = "max_engines"
    MAX_GPUS = "max_gpus"
    MAX_PENDING = "max_pending"
    MAX_PER_USER = "max_per_user"
    MAX_PER_OWNER = "max_per_owner"  # owners.max_gpus: engines of this owner's runs, draining ones counted
    ACCOUNT_LIMIT = (
        "account_limit"  # Slurm itself holds a job of ours back: a limit of its QOS, account or user
    )
    MAX_ENVIRONMENTS = "max_environments"  # harvest.max_environment_workers
    PREEMPTIONS = "preemptions"  # max_preemptions_per_hour
    OTHER_USERS_PENDING = "other_users_pending"
    HEADROOM = "headroom"
    QUARANTINE = "quarantine"
    PLANNED = "planned"  # backfill expects other users' jobs soon where it is idle
    RESERVED = "reserved"  # a reservation or a maintenance comes; of a job that drains: its node's
    PER_NODE = "per_node"  # max_gpus_per_node
    PER_PARTITION = "per_partition"  # max_gpus_by_partition, max_gpus_by_type
    PER_OWNER_NODES = (
        "per_owner_nodes"  # owners.gpu_types_of, owners.partitions_of: none of the owner's nodes has room
    )
    BLACKOUT = "blackout"  # a dated time in which nothing is harvested is on, or so near that no engine would have its least life
    SETTLING = "settling"  # what is idle has not been so for long enough to outlast a start, or is not worth one (`StartBenefits`)
    NO_CAPACITY = "no_capacity"
    HIDDEN = "hidden"  # other users' jobs cannot be seen, and some of them could not preempt us
    # why a job was submitted, cancelled or drained
    WANTED = "wanted"
    WRONG_SIZE = "wrong_size"
    OVER_SHARE = "over_share"
    HANDED_OVER = "handed_over"  # its engine goes on for another run of ours (`decide.hands`)
    LENT = "lent"  # slots of its engine are lent to another run of ours, or no longer (`decide.lending`)
    DIVISION = "division"  # another run's engine saves more on its GPUs, or that run has waited for too long (`policy.division`)
    HELD = "held"
    REQUEUED = "requeued"  # it had left for good, and Slurm put it back into the queue
    OVERDUE = "overdue"
    SHUTDOWN = "shutdown"
    STOPPED = "stopped"  # the kill switch, or `scavenger drain`
    SAME_TIER_JOB = "same_tier_job"  # a user who cannot preempt us waits
    QOS = "qos"  # a user waits where Slurm preempts by QOS: whether this one may preempt us is not seen
    VOLUNTARY_PREEMPTION = "voluntary_preemption"  # a user who can preempt us waits all the same, or will
    ENDING = "ending"  # its time limit comes
    NODE_DRAINED = "node_drained"  # its node is taken out of service, or `scavenger drain --node` names it
    STANDBY = "standby"  # one more that waits for us to say where it begins; or such a one that is not needed
    FRESH = "fresh"  # a fresh job starts sooner elsewhere than this one where it waits


@dataclass(frozen=True, slots=True)
class OurJob:
    """A harvested job as the tracker has it. `job_id` 0: not known to be in the queue. `waits`: holds no GPU and will, or may, take one.

    `held` is why a waiting job never starts by itself, or "". `asked_at`: when it was asked to leave (Unix s). The router says whether an
    engine of the job is `connected`, how many `leases` it holds and `idle_since` when it has had none (Unix s, 0 = unknown). `node`: where
    it runs; `pinned`: the node that it was submitted for, "" when Slurm chooses; of an engine of several nodes (`n_nodes`) all of them,
    joined by ",". `gpus`: on all of them. `since`: when it came to wait, or to run (Unix s).
    `standby`: it waits for us to say where it begins (`standby`). `owner`: of its run, "" = not known. `started_at`: when Slurm started it
    where it runs, or its engine changed hands there (Unix s), 0 while it waits. `returned`: why it is not to be there:
    it had left for good, and Slurm put it back; or "".
    `changing_since`: when its engine was asked to go on for this run, for which it has not registered yet (Unix s); 0: it was not.
    """

    intent_id: str
    run_id: int
    job_id: int
    gpus: int
    waits: bool
    node: str = ""
    held: str = ""
    drain_kind: DrainKind = DrainKind.NO
    asked_at: float = 0.0
    connected: bool = False
    leases: int = 0
    idle_since: float = 0.0
    pinned: str = ""
    since: float = 0.0
    why_draining: HarvestCode | None = None
    standby: bool = False
    owner: str = ""
    started_at: float = 0.0
    returned: str = ""
    n_nodes: int = 1
    changing_since: float = 0.0

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where it runs."""
        return (self.node,) if self.n_nodes == 1 and self.node else nodes_in(self.node)

    @property
    def gpus_on_node(self) -> int:
        """On each of its nodes: they share its GPUs equally."""
        return self.gpus // self.n_nodes


@dataclass(frozen=True, slots=True)
class Caps:
    """How much may be harvested. `None`: no limit. `max_nodes_per_engine`: an engine of more nodes is not started."""

    max_engines: int
    max_pending: int
    max_gpus: int | None = None
    max_gpus_per_node: int | None = None
    max_gpus_per_user: int | None = None  # in the partition, other daemons' of the same user included
    max_preemptions_per_hour: int | None = None
    by_partition: tuple[tuple[str, int], ...] = ()  # GPUs of ours on the nodes of other partitions
    by_type: tuple[tuple[str, int], ...] = ()  # the same of GRES types
    max_nodes_per_engine: int = 1


@dataclass(frozen=True, slots=True)
class OwnerRule:
    """What engines of one owner's runs may use. `gpu_types`, `partitions`: None: all."""

    owner: str
    share: int = 1
    gpu_types: frozenset[str] | None = None
    partitions: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class BlackoutTime:
    """A dated time in which nothing is harvested (Unix s). `words`: its times and reason as a person reads them."""

    start: float
    end: float
    words: str


@dataclass(frozen=True, slots=True)
class Headroom:
    """Idle GPUs that stay idle."""

    gpus: int = 0
    per_node: int = 0
    by_type: tuple[tuple[str, int], ...] = ()
    by_partition: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What the job of one engine asks for, and how long it must be able to run."""

    gpu_type: str = ""
    cpus: int = 1
    memory_mb: int = 0
    drain_before_s: float = 0.0  # an engine leaves so long before its time limit or a reservation
    #: No engine is started where a reservation, or another user's job that backfill plans, begins sooner.
    min_life_s: float = 0.0


@dataclass(frozen=True, slots=True)
class YieldLimits:
    """When GPUs stay idle, or are released, for other users' pending jobs."""

    horizon_s: float = 0.0  # other users' jobs that become eligible within this count as waiting
    window_s: float = (
        0.0  # GPUs that they are expected to need within this are not idle; 0: only those needed now
    )
    after_s: float = 10.0  # a job that may preempt us, could start, and still waits after this gets our GPUs
    same_tier_s: float = (
        30.0  # an engine that drains for a same-tier job, or for one that may be that, is gone after this
    )
    by_qos: bool = False  # Slurm preempts by QOS: tiers do not say who may preempt us
    plan_step_s: float = 60.0  # backfill lets a start that it plans begin at a whole one of these
    could_start_since: tuple[
        tuple[int, float], ...
    ] = ()  # (job, Unix s): `HarvestDecision.could_start` of earlier polls, when first seen


@dataclass(frozen=True, slots=True)
class JobPlacement:
    """How jobs are put on nodes."""

    pin: bool = False  # each job is submitted for one node
    standby_jobs: int = 0  # jobs that wait for us to say where they begin
    fresh_after_s: float = float(
        "inf"
    )  # a job that waits longer than this is submitted anew where it could start now


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What keeps us from harvesting now.

    `stop`: why every engine is to drain, "" where harvesting is not stopped; `stop_now`: without waiting for engines to drain.
    `hidden`: why other users' jobs cannot be seen, "" when they can; `blind`: and some of those could not preempt us.
    `quarantined`, `drained`: (node, reason) pairs; engines leave the latter. `not_before`: until when nothing is
    submitted (Unix s), and why. `doubted`: nodes that get an engine only where no other can.
    """

    stop: str = ""
    stop_now: bool = False
    hidden: str = ""
    blind: bool = False
    quarantined: tuple[tuple[str, str], ...] = ()
    not_before: float = 0.0
    not_before_reason: str = ""
    preempted_last_hour: int = 0
    doubted: frozenset[str] = frozenset()
    drained: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class HandsRules:
    """Engines may change hands. `by_owner`: Slurm accounts each job to its run's owner, so only between runs of one owner. `models`: also
    where the engine is built anew, for another model or with other settings.

    `switch_s`, `start_s`: predicted seconds until an engine has weights of a run, by a change of hands and by a new start, for each run
    that has measured it. `build_s`: by a change of hands where the engine came from another model and was built anew; `ready_s`: the part
    of a new start that comes after its engine registered, so without scheduler and job start. `no_builds`: why no engine is built anew
    for a run now. `stuck`: why no engine of a run goes on for another now.
    """

    by_owner: bool = False
    switch_s: Mapping[int, float] = field(default_factory=dict)
    start_s: Mapping[int, float] = field(default_factory=dict)
    models: bool = True
    build_s: Mapping[int, float] = field(default_factory=dict)
    ready_s: Mapping[int, float] = field(default_factory=dict)
    no_builds: Mapping[int, str] = field(default_factory=dict)
    stuck: Mapping[int, str] = field(default_factory=dict)


#: Between whom loans may have been short: two owners, or two runs of one.
LoanPair = tuple[str, str] | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Loan:
    """Slots of one engine that are lent. `since`, `ended_at`: Unix s; the latter 0 while it lasts. `lender`: the run whose engine it is.
    `owners`: of the run that lends, and of the one that borrows."""

    run_id: int
    run: str
    slots: int
    since: float
    ended_at: float = 0.0
    lender: int = 0
    owners: tuple[str, str] = ("", "")

    @property
    def pair(self) -> LoanPair:
        """Against whom it is held that it was short."""
        return loan_pair((self.lender, self.run_id), self.owners)


def loan_pair(runs: tuple[int, int], owners: tuple[str, str]) -> LoanPair:
    """The one that lends, and the one that borrows. An owner who opens run after run stays the same one."""
    return runs if owners[0] == owners[1] else owners


@dataclass(frozen=True, slots=True)
class LoanPause:
    """Loans of two owners, or of two runs of one, that were short, in a row, and until when (Unix s) there is none between them."""

    short: int
    until: float


@dataclass(frozen=True, slots=True)
class LendingRules:
    """`slots`: that an engine lends at most; 0: none any more. `loans`: by the intent of the engine's job. `barred`: until when an engine
    lends this run nothing (Unix s). `held`: by intent, as `OurJob.leases` and `idle_since`, of borrowers that are there. `paused`: by
    `Loan.pair`."""

    slots: int
    loans: Mapping[str, Loan] = field(default_factory=dict)
    barred: Mapping[tuple[str, int], float] = field(default_factory=dict)
    held: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    paused: Mapping[LoanPair, LoanPause] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HarvestLimits:
    """What is allowed now. Times in Unix seconds, durations in seconds."""

    partition: str
    caps: Caps
    headroom: Headroom = Headroom()
    job: JobLimits = JobLimits()
    yielding: YieldLimits = YieldLimits()
    placement: JobPlacement = JobPlacement()
    restrictions: Restrictions = Restrictions()
    owners: tuple[OwnerRule, ...] = ()  # of those who have one
    blackouts: tuple[BlackoutTime, ...] = ()  # that are not over, the first to begin first
    user: str = ""  # the Unix user whose jobs ours are
    beyond_link: bool = (
        False  # the cluster is a further one: only runs whose weights are encrypted have engines there
    )
    stale_s: float = 60.0  # a view older than this decides nothing
    drain_notice_s: float = (
        30.0  # a job that was asked to leave and is still there after this is cancelled (again)
    )
    #: Since when GPUs are idle, and for how long such last. None: not known, and what is idle is taken.
    idle: Idle | None = None
    #: How GPUs are divided among runs by value; None: by shares of `caps` alone.
    division: DivisionRules | None = None
    waiting_since: tuple[
        tuple[int, float], ...
    ] = ()  # (run, Unix s): it has wanted engines since, and none has run
    #: Which engines go on for another run when theirs has too many. None: none does, its job ends.
    hands: HandsRules | None = None
    #: What engines may lend of their slots, and lend now. None: nothing.
    lending: LendingRules | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    """One job for one engine, or for one environment worker. `nodelist` empty: Slurm chooses among the partition's nodes less `exclude`.

    `gpus`, `cpus`, `memory_mb`: on each of its `nodes`; the latter two at most its GPUs' share of the node's; 0: as configured.
    `most_s`: what its time limit may be at most; 0: no such.
    """

    run_id: int
    run: str
    partition: str
    gpus: int
    reason: str
    nodelist: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    code: HarvestCode = HarvestCode.WANTED
    engine: str = "reference"  # which one the job imports ahead of the daemon's answer
    cpus: int = 0
    memory_mb: int = 0
    most_s: float = 0.0
    standby: bool = False  # it begins where and when it is released
    owner: str = ""  # of the run, as the job's comment says it
    nodes: int = 1
    #: By which file an environment worker joins its run; "": it is the job of an engine.
    environment: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Let a waiting job begin, on this node."""

    intent_id: str
    node: str
    reason: str
    code: HarvestCode = HarvestCode.WANTED


@dataclass(frozen=True, slots=True)
class CancelPending:
    intent_id: str
    reason: str
    code: HarvestCode


@dataclass(frozen=True, slots=True)
class DrainAllocated:
    """Drain the engine; its job then ends by itself."""

    intent_id: str
    reason: str
    code: HarvestCode


@dataclass(frozen=True, slots=True)
class ChangeHands:
    """The engine leaves its run and goes on for this one; its job stays. `owner`: of the run that it goes to. `builds`: that run's engine
    is another one, so that it is built anew in the process."""

    intent_id: str
    run_id: int
    run: str
    owner: str
    reason: str
    code: HarvestCode = HarvestCode.HANDED_OVER
    builds: bool = False


@dataclass(frozen=True, slots=True)
class BeginLoan:
    """This run may generate samples in so many slots of the engine, beside the engine's own run."""

    intent_id: str
    run_id: int
    run: str
    slots: int
    reason: str
    code: HarvestCode = HarvestCode.LENT


@dataclass(frozen=True, slots=True)
class EndLoan:
    """The borrower of slots of the engine leaves it. `came_to_nothing`: it was never there, or left by itself. `short`: how many loans of
    these two runs in a row were short, this one counted in; `pause_s`: for how long there is none between them then."""

    intent_id: str
    reason: str
    came_to_nothing: bool = False
    short: int = 0
    pause_s: float = 0.0
    code: HarvestCode = HarvestCode.LENT


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a job that holds GPUs: no engine is there to drain, or it was asked to leave and did not."""

    intent_id: str
    reason: str
    code: HarvestCode


Action = Submit | Release | CancelPending | DrainAllocated | Cancel | ChangeHands | BeginLoan | EndLoan


@dataclass(frozen=True, slots=True)
class HarvestDecision:
    """`reason` explains the whole: what was done, or why nothing; `code` why nothing more was submitted.

    `could_start`: other users' pending jobs that would start now if our engines left, and for which Slurm may preempt us.
    `start_benefits`: from which age on an idle GPU is worth a start, and the numbers behind it. `division`: of GPUs by value; None: by
    shares. `public`: `reason` as every user of the site may read it, without names of runs, owners, jobs and nodes (`public_reason`).
    """

    actions: tuple[Action, ...]
    reason: str
    code: HarvestCode
    could_start: tuple[int, ...] = ()
    start_benefits: tuple[str, ...] = ()
    division: Division | None = None
    public: str = ""


#: An intent's id: its job's name.
INTENT = re.compile(r"scv-[0-9a-f]{16}")
_PLAIN = re.compile(r"[A-Za-z0-9_.@-]+")


def intent_name(token: str) -> str:
    """The intent id for sixteen random hex digits. It is the job's name too: plugins rewrite comments."""
    name = f"scv-{token}"
    if not INTENT.fullmatch(name):
        raise ValueError(f"not sixteen hex digits: {token!r}")
    return name


def comment_of(uid: str, intent_id: str, run: str = "", owner: str = "", contact: str = "") -> str:
    """A job's comment: what identifies it, then for people whose run it works for, where those are plain names, and whom to ask."""
    told = [f"{what}={name}" for what, name in (("run", run), ("owner", owner)) if _PLAIN.fullmatch(name)]
    told += [f"contact={contact}"] if contact else []
    return ",".join([f"scavenger:{uid}:{intent_id}", *told])

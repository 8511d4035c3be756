"""`scavenger.toml`, the daemon's: every key, its unit, its default and what is allowed. Knows nothing of runs, and reads no file."""

from __future__ import annotations

import zoneinfo
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from scavenger.config.section import Fraction, NonNegative, Positive, Seconds, Section

_DAY = "Mon|Tue|Wed|Thu|Fri|Sat|Sun"


class DaemonSection(Section):
    """Where the daemon keeps its state and how it is reached."""

    state_dir: Path
    ledger: str = ""  # SQLAlchemy URL; empty = SQLite at <state_dir>/ledger.sqlite3
    listen: str = "127.0.0.1"  # interface to bind; 0.0.0.0 = every one
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0 = the system gives one
    advertise: str = ""  # host name that workers connect to; empty = `listen`, or this host's name for 0.0.0.0
    heartbeat_s: Seconds = 1.0
    suspect_s: Seconds = 4.0  # silence after which a worker gets no new leases
    dead_s: Seconds = 12.0  # silence after which its samples move even without a word from Slurm
    reconnect_s: Seconds = 15.0  # how long a restarted daemon waits for the holders of open leases
    engine_stalled_s: Seconds = 300.0  # an engine that answers and moves none of its samples for so long is given up
    trainer_silent_s: Seconds = 60.0  # silence of a trainer after which no engines are wanted when nothing waits for them
    trainer_gone_s: Seconds = 600.0  # silence of a trainer after which no engines are wanted whatever waits for them
    flush_ms: Annotated[float, Field(ge=1, le=10_000)] = 100.0
    flush_tokens: Positive = 32
    payload_memory_mb: NonNegative = 512  # tokens of samples in flight that are kept in memory beside the ledger

    @model_validator(mode="after")
    def _ordered(self) -> DaemonSection:
        if not self.heartbeat_s < self.suspect_s < self.dead_s:
            raise ValueError("heartbeat_s < suspect_s < dead_s must hold")
        if self.trainer_silent_s > self.trainer_gone_s:
            raise ValueError("trainer_silent_s <= trainer_gone_s must hold")
        return self


class ClusterSection(Section):
    backend: Literal["auto", "slurm", "pyslurm", "local"] = "auto"
    local_dir: Path | None = None  # the local backend's directory
    observe_s: Seconds = 60.0  # seconds between observations
    quick_s: Seconds = 15.0  # while something is expected (just submitted, just preempted)
    observe_floor_s: Annotated[float, Field(ge=0)] = 5.0  # the site's: no two observations are closer
    max_rpc_per_min: Annotated[float, Field(gt=0)] = 4.0  # requests to the controller, on average over ten minutes
    absent_s: Annotated[float, Field(ge=0)] = 30.0  # a job is ended only after it was absent this long
    command_timeout_s: Seconds = 20.0
    command_output: Literal["fields", "json"] = "fields"  # what Slurm's commands are asked to print


class Hours(Section):
    """Limits for some hours of the week, in `harvest.timezone`; those that are not named stay as they are."""

    days: Annotated[str, Field(pattern=rf"^({_DAY})(-({_DAY}))?$")] = "Mon-Sun"
    hours: Annotated[str, Field(pattern=r"^([01]?\d|2[0-3])-([01]?\d|2[0-4])$")] = "0-24"  # 20-6 goes on into the next morning
    max_engines: NonNegative | None = None
    max_gpus: NonNegative | None = None


class HarvestSection(Section):
    enabled: bool = True
    partition: str = "scavenge"
    # what may be used
    max_engines: NonNegative = 4
    max_gpus: NonNegative | None = None
    max_pending: Positive = 2
    max_gpus_per_node: NonNegative | None = None
    max_gpus_per_user: NonNegative | None = None  # in the partition, with other daemons of the same user
    schedule: tuple[Hours, ...] = ()  # the first that holds now
    timezone: str = "UTC"
    stop_file: Path | None = None  # while it is there nothing is harvested
    max_preemptions_per_hour: NonNegative | None = None
    headroom_gpus: NonNegative = 0  # idle GPUs to leave alone
    headroom_per_node: NonNegative = 0
    headroom_by_type: dict[str, NonNegative] = {}
    headroom_by_partition: dict[str, NonNegative] = {}
    # others
    courtesy_window_s: Annotated[float, Field(ge=0)] = 60.0
    courtesy_after_s: Annotated[float, Field(ge=0)] = 10.0
    peer_yield_s: Seconds = 30.0
    sees_all_jobs: bool = False  # the daemon's user may see others' jobs though PrivateData hides them
    sole_user: bool = False  # nobody else may use the partition
    # the jobs
    placement: Literal["node", "slurm"] = "node"
    cpus_per_engine: Positive = 1
    memory_mb_per_engine: NonNegative = 0
    gpu_type: str = ""
    time_limit_s: Seconds = 3600.0
    time_min_s: Annotated[float, Field(ge=0)] = 0.0  # 0 = no --time-min
    least_life_s: Seconds = 600.0  # no engine is submitted where a reservation, or a start that backfill plans, leaves it less
    time_stagger: Fraction = 0.25  # a job's limit is up to this share shorter, so that not all end at once
    drain_before_s: Annotated[float, Field(ge=0)] = 30.0  # leave so long before the time limit or a reservation
    fresh_after_s: Seconds = 30.0
    outlast: Fraction = 0.985  # of the idle GPUs that are taken, the share that shall outlast an engine's start; 0 = take what is idle
    spares: NonNegative = 4  # jobs that wait until we say where they begin, so that others' small jobs do not break up idle nodes
    leave: Literal["requeue", "wait"] = "requeue"
    pull_mb_per_s: Annotated[float, Field(ge=0)] = 0.0  # of weights, by all harvested engines of a node together; 0 = no bound
    nice: NonNegative = 10_000
    account: str = ""
    qos: str = ""
    wckey: str = ""
    constraint: str = ""
    container: str = ""
    quarantine_after: Positive = 3  # engine deaths on a node within quarantine_s
    quarantine_s: Seconds = 600.0
    backoff_s: Seconds = 5.0  # first wait after a job that died at once; doubles up to 10 min
    job_template: Path | None = None  # Jinja2; empty = the shipped scripts/rollout.sbatch.j2
    python: str = ""  # interpreter of the engines; empty = the daemon's
    logs_mb: Positive = 512  # what all engines' logs may take

    @field_validator("timezone")
    @classmethod
    def _exists(cls, name: str) -> str:
        try:
            if name != "UTC":
                zoneinfo.ZoneInfo(name)
        except (ValueError, zoneinfo.ZoneInfoNotFoundError) as error:
            raise ValueError(f"{name!r} is no time zone of this machine; write it as Europe/Berlin") from error
        return name


class RouterSection(Section):
    """What decides which engine generates which sample, when reserved engines sleep, and how many engines are asked for."""

    policy: Literal["predictive", "standard"] = "predictive"
    harvested_gpu_price: Annotated[float, Field(ge=0)] = 1.0  # of a GPU-second, in GPU-seconds of the run's own; 0 = idle GPUs cost nothing


class LedgerSection(Section):
    """What becomes of the tokens of samples that no resume from a kept checkpoint can want again."""

    retention: Literal["keep", "compact", "drop"] = "keep"
    retention_steps: NonNegative = 2  # steps that the run must have taken since the sample's own


class PrometheusSection(Section):
    """For Prometheus. Off unless an address is given: whoever reaches it may read it."""

    listen: Annotated[str, Field(pattern=r"^$|^[A-Za-z0-9_.-]+:\d{1,5}$")] = ""  # host:port; port 0 = the system gives one


class DaemonConfig(Section):
    daemon: DaemonSection
    router: RouterSection = RouterSection()
    ledger: LedgerSection = LedgerSection()
    cluster: ClusterSection = ClusterSection()
    harvest: HarvestSection = HarvestSection()
    prometheus: PrometheusSection = PrometheusSection()

    @property
    def ledger_url(self) -> str:
        return self.daemon.ledger or f"sqlite:///{self.daemon.state_dir / 'ledger.sqlite3'}"

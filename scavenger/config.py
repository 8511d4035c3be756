"""Configuration: `scavenger.toml` (the daemon's) and `run.toml` (a run's), read once, checked once, never changed afterwards.

Owns every key, its unit, its default and what is allowed. Reads files and nothing else. An unknown key, a wrong unit or an impossible
value is refused with the file, the key and what is allowed.
"""

from __future__ import annotations

import tomllib
import zoneinfo
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from scavenger.errors import ConfigError
from scavenger.wire.common import MAX_GROUP_SAMPLES

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)


_DAY = "Mon|Tue|Wed|Thu|Fri|Sat|Sun"


# ---------------------------------------------------------------- scavenger.toml


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
    time_stagger: Fraction = 0.25  # a job's limit is up to this share shorter, so that not all end at once
    drain_before_s: Annotated[float, Field(ge=0)] = 30.0  # leave so long before the time limit or a reservation
    fresh_after_s: Seconds = 30.0
    outlast: Fraction = 0.985  # of the idle GPUs that are taken, the share that shall outlast an engine's start; 0 = take what is idle
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


# ---------------------------------------------------------------- run.toml


class RunSection(Section):
    name: Name
    seed: NonNegative = 0
    steps: Positive
    state_dir: Path  # the daemon's state directory: its rendezvous file lies there
    out_dir: Path  # checkpoints, metrics.jsonl
    deterministic: bool = False
    harvest: bool = True
    max_engines: NonNegative = 64  # the daemon's own limit applies too
    gpus_per_engine: Positive = 1
    poison_after: Positive = 3
    on_poison: Literal["stop", "mask"] = "stop"
    key: Path | None = None  # the owner's key; empty = <state_dir>/keys/owner.key


class EmbeddedSection(Section):
    """A daemon of the run's own, on the training job's first node: for a site that runs none."""

    embedded: bool = False
    config: Path | None = None  # its scavenger.toml; none = the one beside this file


class ModelSection(Section):
    path: Path  # Hugging Face folder: config.json, model.safetensors, tokenizer.json
    context_length: Positive


class DataSection(Section):
    """`task` is "sort" (built in, makes its own problems), or how the files at `path` are written: "jsonl" or "parquet"."""

    task: Literal["sort", "jsonl", "parquet"] = "sort"
    path: Path | None = None  # a file, or a folder of them
    prompt_field: Annotated[str, Field(min_length=1)] = "prompt"  # text, or a list of {role, content}
    answer_field: Annotated[str, Field(min_length=1)] = "answer"
    chat: bool = False  # render prompts with the model's chat template
    system: str = ""  # the system turn; without chat, text before every prompt
    chat_options: dict[str, bool | int | float | str] = {}  # further variables of the template
    on_overlong: Literal["stop", "drop"] = "stop"  # prompts that leave no room for an answer
    prompts_per_step: Positive = 32
    samples_per_prompt: Annotated[int, Field(ge=2, le=MAX_GROUP_SAMPLES)] = 8
    seed: NonNegative = 0

    @model_validator(mode="after")
    def _path(self) -> DataSection:
        if self.task != "sort" and self.path is None:
            raise ValueError(f'task = "{self.task}" needs data.path')
        return self


class SamplingSection(Section):
    max_tokens: Positive
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()  # texts that end an answer
    min_tokens: NonNegative = 0  # before so many no stop token is drawn and no stop text ends the answer
    allow_truncated: bool = False  # opt-in that top_p < 1, top_k > 0 or min_tokens > 0 needs
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0

    @model_validator(mode="after")
    def _truncation(self) -> SamplingSection:
        if (self.top_p < 1 or self.top_k > 0 or self.min_tokens > 0) and not self.allow_truncated:
            raise ValueError(
                "top_p < 1, top_k > 0 or min_tokens > 0 makes the sampling distribution differ from the trained one; "
                "set allow_truncated = true to accept that (the mismatch is reported)"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must not exceed max_tokens")
        return self

    @model_validator(mode="after")
    def _penalties(self) -> SamplingSection:
        if self.presence_penalty or self.frequency_penalty:
            raise ValueError(
                "presence_penalty and frequency_penalty count the tokens of one request: an engine that goes on with a moved sample would "
                "count anew, so that moves would change what is sampled; leave them at 0"
            )
        if self.repetition_penalty != 1:
            raise ValueError(
                "repetition_penalty makes a token's distribution depend on which came before; the trainer does not compute it"
            )
        return self


class EngineSection(Section):
    name: Literal["reference", "vllm"] = "reference"
    max_batch: Positive = 64
    pace: Annotated[float, Field(ge=0)] = 0.0  # tokens a second and sample at most; 0 = unpaced
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9  # of a GPU's memory that vLLM takes
    eager: bool = False  # vLLM: no compilation and no CUDA graphs


class RewardSection(Section):
    function: str = "trainer.tasks.sort:reward"  # "module:function"
    version: Annotated[str, Field(max_length=256)] = ""  # recorded with each reward; empty = the name and a hash of the module's file
    options: dict[str, bool | int | float | str] = {}  # keyword arguments of the function
    timeout_s: Seconds = 10.0
    memory_gb: Annotated[float, Field(ge=0)] = 4.0  # beyond what the function's process has once it is imported; 0 = unbounded
    retries: NonNegative = 2
    on_reward_error: Literal["stop", "mask"] = "stop"


class AlgorithmSection(Section):
    """What `name` leaves open; the rows themselves, with each one's defaults, are in `trainer/algorithms/rows.py`."""

    name: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo"] = "grpo"
    aggregation: Literal["", "token", "sequence", "constant"] = ""  # empty = the algorithm's own
    scale_by_std: bool | None = None  # none = the algorithm's own, like clip_low and clip_high
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    clip_high: Annotated[float, Field(gt=0)] | None = None
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    kl_estimator: Literal["", "k1", "k2", "k3"] = ""  # empty = the algorithm's own
    kl_reference: Literal["start", "proximal"] = "start"  # the model at model.path, kept in memory; or the step's first weights
    importance: Literal["truncate", "mask", "off"] = "truncate"  # what is done with proximal/behaviour
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    importance_floor: Annotated[float, Field(ge=0)] = 0.0  # of the mask
    on_length: Literal["reward", "mask", "overlong-shape"] = "reward"  # answers that sampling.max_tokens ended
    overlong_buffer_tokens: NonNegative = 0
    dynamic_sampling: bool | None = None  # prompts whose answers compare nothing are replaced; none = the algorithm's own
    dynamic_limit: Annotated[float, Field(ge=1)] = 4.0  # groups of a step at most, as a multiple of data.prompts_per_step
    updates_per_step: Positive = 1
    max_off_policy_steps: Annotated[int, Field(ge=0, le=1)] = 0  # how many steps in advance samples are generated

    @model_validator(mode="after")
    def _mask(self) -> AlgorithmSection:
        if self.importance_floor and self.importance != "mask":
            raise ValueError('importance_floor needs importance = "mask"')
        if self.max_off_policy_steps and self.importance == "off":
            raise ValueError('max_off_policy_steps = 1 needs the correction: importance = "truncate" or "mask"')
        if self.importance == "mask" and self.importance_floor >= self.importance_cap:
            raise ValueError("importance_floor < importance_cap must hold")
        return self


class LoraSection(Section):
    """Low-rank adapters instead of all weights; `rank` 0 = off."""

    rank: NonNegative = 0
    alpha: Annotated[float, Field(gt=0)] = 32.0
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class OptimizerSection(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-4
    warmup_steps: NonNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    final_lr_share: Share = 0.0  # of lr, in the last step
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_norm: Annotated[float, Field(gt=0)] = 1.0


class ReservedSection(Section):
    """Engines on the training job's own GPUs. `window` is the share of a step's samples after which they sleep."""

    workers: NonNegative = 1
    window: Share = 0.5
    wake_after_s: Seconds = 5.0  # no harvested engine for this long with samples outstanding: wake


class CheckpointSection(Section):
    every: Positive = 20
    keep: Positive = 2
    grace_s: Seconds = 120.0  # what a training job that was told to end may take for its checkpoint


class EvalSection(Section):
    every: NonNegative = 0  # steps; 0 = before the first and after the last only
    problems: NonNegative = 0
    samples: Annotated[int, Field(gt=0, le=MAX_GROUP_SAMPLES)] = 1  # answers of each at temperature 1, beside the greedy one
    path: Path | None = None  # held-out problems, written like those of data.path; none = taken out of data.path


class WeightsSection(Section):
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    listen: str = "127.0.0.1"  # interface that the weights source binds
    advertise: str = ""  # host name that engines pull from; empty = `listen`
    deltas: Annotated[int, Field(ge=0, le=8)] = 4  # versions back that engines are sent only what changed since; 0 = everything
    encrypt: bool = False  # the bytes too go under CURVE; what they are is authenticated either way
    nixl: bool = False  # let engines read the trainer's memory by NIXL (RDMA); needs the extra `nixl`; not with `encrypt`
    spool_dir: Path | None = None  # a folder that engines see too; versions are written there as well


class TrainerSection(Section):
    micro_batch_tokens: Positive = 8192  # tokens of one micro-batch and rank at most; deterministic: one group
    packing: bool = True  # samples of a micro-batch lie in one line without padding
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto = bfloat16 on a GPU
    activation_checkpointing: bool = False
    idle_poll_ms: Annotated[float, Field(ge=1, le=1000)] = 5.0
    stuck_s: Seconds = 300.0  # a rank that is so long at one command, or gives no sign of life, is named
    stuck_end_s: Seconds = 1800.0  # and after so long the job ends, to be resumed

    @model_validator(mode="after")
    def _stuck(self) -> TrainerSection:
        if self.stuck_s > self.stuck_end_s:
            raise ValueError("stuck_s <= stuck_end_s must hold")
        return self


class MonitorSection(Section):
    """Where a step's figures go beside `<out_dir>/metrics.jsonl` and standard output."""

    tensorboard: bool = False  # <out_dir>/tensorboard
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: Annotated[str, Field(min_length=1, max_length=128)] = "scavenger"
    wandb_entity: str = ""  # empty = the user's own


class RunConfig(Section):
    run: RunSection
    daemon: EmbeddedSection = EmbeddedSection()
    model: ModelSection
    data: DataSection = DataSection()
    sampling: SamplingSection
    engine: EngineSection = EngineSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    lora: LoraSection = LoraSection()
    optimizer: OptimizerSection = OptimizerSection()
    reserved: ReservedSection = ReservedSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    weights: WeightsSection = WeightsSection()
    trainer: TrainerSection = TrainerSection()
    monitor: MonitorSection = MonitorSection()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.sampling.max_tokens >= self.model.context_length:
            raise ValueError("sampling.max_tokens must be below model.context_length: the prompt needs room")
        if self.run.deterministic and self.engine.name != "reference":
            raise ValueError('run.deterministic = true needs engine.name = "reference": no other engine computes in float64')
        if self.run.deterministic and self.algorithm.max_off_policy_steps:
            raise ValueError(
                "run.deterministic = true needs algorithm.max_off_policy_steps = 0: "
                "after a restart samples come from newer weights than they would have without it"
            )
        if not self.run.harvest and self.algorithm.max_off_policy_steps:
            raise ValueError(
                "algorithm.max_off_policy_steps = 1 needs run.harvest = true: on the trainer's own GPUs nobody generates while it trains"
            )
        if not self.run.harvest and self.reserved.workers == 0:
            raise ValueError("run.harvest = false needs reserved.workers >= 1: somebody must generate")
        if self.weights.nixl and self.weights.encrypt:
            raise ValueError("weights.nixl reads memory in the clear, which weights.encrypt forbids: set one of them")
        return self


C = TypeVar("C", bound=Section)


def _explain(path: Path, error: ValidationError) -> ConfigError:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(file)"
        if item["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key {key!r}")
        elif item["type"] == "missing":
            lines.append(f"{path}: key {key!r} is missing")
        else:
            lines.append(f"{path}: {key} = {item['input']!r}: {item['msg']}")
    return ConfigError("\n".join(lines), "every key with its unit and default is in docs/config.md")


def parse(model: type[C], path: Path, data: dict[str, Any]) -> C:
    """Check a parsed TOML document; `path` is named in errors. Raises `ConfigError`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain(path, error) from error


def _read(model: type[C], path: Path) -> C:
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "name it (--config, SCAVENGER_CONFIG); `scavenger init` writes one") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return parse(model, path, data)


def read_daemon(path: Path) -> DaemonConfig:
    """Read `scavenger.toml`. Raises `ConfigError`."""
    return _read(DaemonConfig, path)


def read_run(path: Path) -> RunConfig:
    """Read `run.toml`. Relative paths in it are relative to the file. Raises `ConfigError`."""
    config = _read(RunConfig, path)
    base = path.resolve().parent
    run = config.run.model_copy(
        update={"state_dir": base / config.run.state_dir, "out_dir": base / config.run.out_dir}
        | ({"key": base / config.run.key} if config.run.key else {})
    )
    daemon = config.daemon.model_copy(update={"config": base / (config.daemon.config or "scavenger.toml")})
    weights = config.weights
    if weights.spool_dir:
        weights = weights.model_copy(update={"spool_dir": base / weights.spool_dir})
    data = config.data.model_copy(update={"path": base / config.data.path} if config.data.path else {})
    held_out = config.eval.model_copy(update={"path": base / config.eval.path} if config.eval.path else {})
    model = config.model.model_copy(update={"path": base / config.model.path})
    return config.model_copy(update={"run": run, "daemon": daemon, "data": data, "eval": held_out, "model": model, "weights": weights})

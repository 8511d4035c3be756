"""`run.toml`, a run's: every key, its unit, its default and what is allowed. Knows nothing of the daemon's keys, and reads no file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from scavenger.config.section import Fraction, Name, NonNegative, Positive, Seconds, Section, Share
from scavenger.wire.common import MAX_GROUP_SAMPLES


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
    pause: Literal["abort", "keep"] = "abort"  # what becomes of samples under way when other weights come

    @model_validator(mode="after")
    def _pause(self) -> EngineSection:
        if self.pause == "keep":
            raise ValueError(
                'engine.pause = "keep" would finish a sample with other weights than began it, and every token of a sample carries one '
                'version; leave it at "abort": what was generated stays, and another engine goes on with the same version'
            )
        return self


class RewardSection(Section):
    function: str = "trainer.tasks.sort:reward"  # "module:function"
    version: Annotated[str, Field(max_length=256)] = ""  # recorded with each reward; empty = the name and a hash of the module's file
    options: dict[str, JsonValue] = {}  # keyword arguments of the function
    timeout_s: Seconds = 10.0
    start_timeout_s: Seconds = 120.0  # for importing it, and for loading what it prepares
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
    gpus_per_engine: Positive = 1  # of the training job's, on one node
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
    mismatch_alarm: Annotated[float, Field(ge=0)] = 0.02  # mean k3 of trainer and engines above which a step says so; 0 = never


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

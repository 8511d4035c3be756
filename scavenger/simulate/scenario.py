"""What is simulated: one training run, its reserved GPUs, the GPUs that others leave idle, and the policy that is tried. Pure data.

Owns the truth that no policy may see: completion lengths, engines' parameters, the fleet's future. Everything random comes from `seed` by
named streams, so policies that are compared meet the same lengths, the same fleet and the same cold starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from scavenger.errors import ConfigError
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.fleet import FleetTrace
from scavenger.simulate.lengths import Lengths
from scavenger.simulate.presets import WARM_CACHE
from scavenger.simulate.speculation import AcceptanceCurve
from scavenger.simulate.startup import ColdStart, Deltas
from scavenger.simulate.trainer_model import TrainerSpec

ENGINE_BYTES_S = 50e9 / 8  # a harvested engine's interface
#: Under CURVE, as measured on two cores: 32 % of iperf3's 2.6 GB/s (docs/benchmarks-archive.md, `benchmarks/weights.py`).
KV_BYTES_S = 0.83e9
_SHORTER = "give fewer sampling.max_tokens or --prompt-tokens, a smaller model, or more GPUs an engine"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run on one site. All engines of a kind are alike. GPUs of the fleet are one type.

    `reserved_engines` of `reserved`; they share GPUs with the trainer. `prompts` x `samples` completions a step, of which `lengths`
    knows the length. `engine_bytes_s`: a harvested engine's interface; `relay`: engines that have a version serve it on.
    `offload`: training state goes to host memory while reserved GPUs generate. `round_tokens`: of a rank in a micro-step.
    `reward_s`: from group to reward. Until `steps` are done or `horizon_s` is over. `hangs`: faults, as (slot, n): the first
    engine of this reserved slot hangs when it is told to sleep for the n-th time; after `sleep_timeout_s` it is ended, and
    another one takes its slot. `max_off_policy_steps`, `on_new_version`, `kv`, `on_late`: `algorithm`'s keys of these names;
    `move_kv`: `engine`'s, `share_prompts`: `router`'s, `share_engines`: `run`'s. `adapter_share`: of the weights' bytes, where a version
    is adapters beside its base (`lora.serve = "unmerged"`); 0: each is all weights. `context_tokens`: `model.context_length`, what engines
    are built for; 0: a prompt and the longest completion. `kv_bytes_s`: of one reader's connection for blocks that move.

    Slurm: `schedule_s` from a job's submission, or its place getting free, to its start; `requeue_s` until a preempted job may start again;
    `poll_interval_s` between looks at the queue. `heartbeat_s` and `tick_s` are the daemon's, coarser than live ones.
    """

    reserved: SimulatedEngine
    reserved_engines: int
    harvested: SimulatedEngine
    trainer: TrainerSpec
    lengths: Lengths
    fleet: FleetTrace
    prompts: int = 128
    samples: int = 8
    prompt_tokens: int = 512
    steps: int = 0
    horizon_s: float = math.inf
    max_engines: int = 0
    max_batch: int = 256
    engine_bytes_s: float = ENGINE_BYTES_S
    relay: bool = True
    deltas: Deltas | None = None
    cold_start: ColdStart = field(default_factory=lambda: WARM_CACHE)
    offload: bool = True
    round_tokens: int = 32_768
    reward_s: float = 0.0
    schedule_s: float = 2.0
    requeue_s: float = 10.0
    poll_interval_s: float = 5.0
    heartbeat_s: float = 5.0
    tick_s: float = 5.0
    wake_after_s: float = 5.0
    sleep_timeout_s: float = 60.0
    hangs: tuple[tuple[str, int], ...] = ()
    max_off_policy_steps: int = 0
    on_new_version: Literal["switch", "finish"] = "switch"
    kv: Literal["recompute", "keep"] = "recompute"
    on_late: Literal["wait", "later"] = "wait"
    move_kv: bool = False
    share_prompts: bool = False
    context_tokens: int = 0
    adapter_share: float = 0.0
    share_engines: bool = False
    kv_bytes_s: float = KV_BYTES_S
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 and math.isinf(self.horizon_s):
            raise ConfigError("a simulation without an end", "give steps, or horizon_s")
        if self.prompts < 1 or self.samples < 1 or self.prompt_tokens < 1 or self.reserved_engines < 0:
            what = f"a step of {self.prompts} prompts x {self.samples} completions after {self.prompt_tokens} tokens"
            raise ConfigError(what, "each is at least 1")
        longest = self.prompt_tokens + self.lengths.cap
        if 0 < self.context_tokens < longest:
            what = f"completions of up to {longest} tokens, prompt included, and engines for {self.context_tokens}"
            raise ConfigError(what, "give more context_tokens, or 0")
        for spec in (self.reserved, self.harvested):
            if longest > spec.kv_capacity:
                what = f"completions of up to {longest} tokens do not fit the {spec.kv_capacity} tokens of an engine's KV cache"
                raise ConfigError(what, _SHORTER)
        if not 0 <= self.adapter_share <= 1 or (self.share_engines and not self.adapter_share):
            what = f"adapters of {self.adapter_share:g} of the weights, share_engines = {self.share_engines}"
            raise ConfigError(
                what,
                "give adapter_share between 0 and 1, above 0 where runs share engines: such have adapters",
            )
        if self.move_kv and max(self.reserved.gpus, self.harvested.gpus) > 1:
            raise ConfigError(
                f"KV blocks that move between engines of {max(self.reserved.gpus, self.harvested.gpus)} GPUs",
                "live, engine.move_kv is for engines of one GPU: leave move_kv out",
            )
        curves = {self.reserved.acceptance, self.harvested.acceptance}
        if len(curves) > 1:
            raise ConfigError(
                "reserved and harvested engines speculate otherwise",
                "engine.speculation is the run's: give both one curve",
            )
        if curves != {None} and max(self.reserved.gpus, self.harvested.gpus) > 1:
            raise ConfigError(
                f"speculation on engines of {max(self.reserved.gpus, self.harvested.gpus)} GPUs",
                "live, engine.speculation is for engines of one GPU: leave the acceptance curve out",
            )

    def speculating(self, curve: AcceptanceCurve | None) -> Scenario:
        """The same with `engine.speculation = "group"`, and this truth of what siblings' drafts are worth; None: without."""
        return replace(
            self,
            reserved=replace(self.reserved, acceptance=curve),
            harvested=replace(self.harvested, acceptance=curve),
        )

    @property
    def gpus_reserved(self) -> int:
        """GPUs of the training job."""
        return self.trainer.ranks

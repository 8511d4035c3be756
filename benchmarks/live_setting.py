"""The live setting of the policies' table: what `scavenger init` writes for the model, and the defaults of the daemon. Pure.

Owns that translation and what it had to assume. The published setting is `baselines.points`. Knows nothing of policies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.policies_table import Unit
from scavenger.config import ClusterSection, ReservedSection, TrainerSection
from scavenger.simulate import presets
from scavenger.simulate.fleet import FleetTrace
from scavenger.simulate.lengths import CachedLengths
from scavenger.simulate.plan import SHAPE_KEYS, RunAssumptions, SimulationPlan, TrainingSettings
from scavenger.simulate.play import scenario_of
from scavenger.simulate.presets import STACK
from scavenger.simulate.scenario import Scenario
from scavenger.sizing import engine
from scavenger.sizing.shape import of_config
from trainer.prepare import draft, sizes

#: A run that is open expects something most of the time: the daemon polls at its faster pace.
POLL_S = ClusterSection().fast_poll_interval_s


@dataclass(frozen=True, slots=True)
class LiveSetting:
    """A model on so many reserved H100, with engines of as many GPUs as the fleet's nodes lose at once."""

    model: str
    reserved_gpus: int
    engine_gpus: int = STACK.engine_gpus

    def plan(self, most_engines: int) -> SimulationPlan:
        """The run that `scavenger init` drafts, for `most_engines` harvested engines at most."""
        model, assumed = presets.model(self.model), RunAssumptions(self.reserved_gpus)
        prompts, samples = draft.PROMPTS_PER_STEP, draft.SAMPLES_PER_PROMPT
        context, completion = draft.lengths(0, assumed.prompt_tokens)
        config = {theirs: getattr(model, ours) for ours, theirs in SHAPE_KEYS.items()}
        shape = of_config(config | {"tie_word_embeddings": model.tied})
        gpu_gb = presets.H100.memory_bytes / 1e9
        chosen = sizes.choose(
            sizes.SizingRequest(
                shape,
                "vllm",
                min(8, self.reserved_gpus),
                max(1, self.reserved_gpus // 8),
                gpu_gb,
                assumed.prompt_tokens,
                completion,
                context,
                prompts * samples,
            )
        )
        cache = engine.of_gpus(shape, self.engine_gpus, gpu_gb, chosen.share)
        expected = engine.expected_tokens(assumed.prompt_tokens, completion)
        return SimulationPlan(
            name="live",
            model=model,
            gpu=presets.H100,
            reserved_gpus=self.reserved_gpus,
            gpus_per_engine=self.engine_gpus,
            most_engines=most_engines,
            prompts=prompts,
            samples=samples,
            prompt_tokens=assumed.prompt_tokens,
            lengths=CachedLengths(assumed.lengths(completion)),
            max_batch=engine.batch(cache, expected, prompts * samples),
            training=TrainingSettings(
                offload=TrainerSection().offload,
                memory_share=chosen.share,
                recompute=chosen.checkpointing,
                forwards=0,  # `init` writes no kl_coef and one update a step
                round_tokens=chosen.micro_tokens,
                wake_after_s=draft.WAKE_AFTER_S,
                sleep_timeout_s=ReservedSection().sleep_timeout_s,
            ),
        )


def live_scenario(plan: SimulationPlan, unit: Unit, fleet: FleetTrace, heartbeat_s: float) -> Scenario:
    """The plan over the whole segment. Links and cold starts are the published setting's: they are a site's, not ours."""
    efficiency = replace(presets.VLLM_H100, overhead_s=STACK.engine_overhead_s)
    return replace(
        scenario_of(plan, fleet, efficiency, steps=0, seed=unit.seed),
        engine_bytes_s=STACK.engine_bytes_s,
        relay=True,
        cold_start=presets.WARM_CACHE,
        heartbeat_s=heartbeat_s,
        poll_interval_s=POLL_S,
    )


def described(plan: SimulationPlan) -> str:
    """The setting in one line, for the page."""
    training = plan.training
    activations = "computed again" if training.recompute else "kept"
    return (
        f"{plan.model.name} on {plan.reserved_gpus} reserved GPUs: {plan.prompts} prompts x {plan.samples} up to {plan.lengths.cap:,} "
        f"tokens, max_batch {plan.max_batch}, gpu_memory_share {training.memory_share:.2f}, micro_batch_tokens "
        f"{training.round_tokens:,}, activations {activations}"
    )

"""What the ledger keeps of the words that a trainer gives: its own outcomes' reasons, versions of reward functions, names of metrics. Pure.

Our trainer quotes nothing; another's may put a completion into any of them, and people read them who may not see completions. So a reason
is kept where it is one of those that we know, and a name where it looks like one; of anything else there remains that it was there, or a
digest, by which equal ones are known as equal. Reasons of masked samples are kept for whoever runs the trainer: the views hide them. A
purge is stricter: it keeps only what we know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from blake3 import blake3

#: In the place of a reason in a trainer's own words.
OTHER = "other (the trainer's own words, which are in its log)"
#: Outcomes that a trainer gives, with its reasons.
OUTCOMES = ("consumed", "filtered", "masked", "evaluated")
_NUMBER = r"[-+]?(\d+(\.\d+)?(e[-+]?\d+)?|inf|nan)"
_REASON = re.compile(
    rf"|zero variance: every reward is {_NUMBER}|zero variance over the batch of \d+ usable sample\(s\)"
    rf"|\d+ usable sample\(s\): nothing to compare|ended by the length limit|{re.escape(OTHER)}",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@/+=-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"(metric|version)-[0-9a-f]{12}", re.ASCII)
#: The figures of a step or an evaluation that this release's own trainer gives.
METRICS = frozenset(
    {
        "reward",
        "loss",
        "tokens",
        "tokens_trained",
        "samples",
        "samples_trained",
        "groups_filtered",
        "length_mean",
        "length_max",
        "kl",
        "clip_fraction",
        "mismatch_k3",
        "mismatch_max",
        "mismatch_p99",
        "truncated_fraction",
        "lr",
        "updates",
        "grad_norm",
        "moves",
        "micro_steps",
        "rounds",
        "seconds",
        "seconds_seed",
        "seconds_wait",
        "seconds_reward",
        "seconds_train",
        "seconds_update",
        "seconds_publish",
        "masked_fraction",
        "groups_asked",
        "eval_sampled",
        "eval_greedy",
        "eval_length_mean",
        "eval_cut_fraction",
        "rewards_late",
        "entropy",
        "seconds_checkpoint",
        "staleness_mean",
        "staleness_max",
        "tokens_reserved",
        "tokens_harvested",
        "tokens_unknown",
        "tokens_wasted",
        "tokens_per_s_reserved",
        "tokens_per_s_harvested",
        "gpu_hours_trainer",
        "gpu_hours_reserved",
        "gpu_hours_harvested",
        *(f"eval_pass_at_{1 << power}" for power in range(13)),
    }
)


def is_known(reason: str) -> bool:
    """Whether an outcome's reason holds nobody's own words."""
    return _REASON.fullmatch(reason) is not None


def reason(outcome: str, said: str) -> str:
    """An outcome's reason as the ledger keeps it."""
    return said if outcome == "masked" or is_known(said) else OTHER


def version(said: str) -> str:
    """A reward function's version as the ledger keeps it."""
    return said if not said or _NAME.fullmatch(said) else _digest("version", said)


def metrics(said: Mapping[str, float]) -> dict[str, float]:
    """A step's figures as the ledger keeps them: those that are numbers."""
    return {
        name if _NAME.fullmatch(name) else _digest("metric", name): value
        for name, value in said.items()
        if math.isfinite(value)
    }


def purged_version(kept: str) -> str:
    return kept if not kept or _DIGEST.fullmatch(kept) else _digest("version", kept)


def purged_metrics(kept: Mapping[str, float | None]) -> dict[str, float | None]:
    return {
        name if name in METRICS or _DIGEST.fullmatch(name) else _digest("metric", name): value
        for name, value in kept.items()
    }


def _digest(what: str, said: str) -> str:
    return f"{what}-{blake3(said.encode()).hexdigest()[:12]}"

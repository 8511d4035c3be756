"""Each algorithm's row: which advantage, which surrogate, what a step's denominator is, and whether a step may stream. A table.

Owns the names of `[algorithm] name`, each one's defaults and what of the settings it admits. Knows no model and no rank.

Aggregation. With l_it the loss of token t of sample i, |o_i| its tokens, N the step's samples:

    token     sum_i sum_t l_it / sum_i |o_i|
    sequence  1/N sum_i 1/|o_i| sum_t l_it
    constant  1/(N * C) sum_i sum_t l_it, with C = sampling.max_tokens or 1

A sample of a group whose rewards are all equal has no gradient and counts, unless the group was replaced (`dynamic`); one without a
reward does not. `masked_count` says whether tokens that a mask takes out (of the mismatch, or of completions ended by length) count in
|o_i|, N and the sum of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scavenger.config import AlgorithmSection
from scavenger.errors import ConfigError
from trainer.algorithms import advantages, surrogates
from trainer.algorithms.advantages import Scope, each
from trainer.algorithms.surrogates import Surrogate

Aggregation = Literal["token", "sequence", "constant"]
#: Clips nothing.
OFF = float("inf")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`constant`: C of the "constant" aggregation, 0 = sampling.max_tokens. `scales`: None = never by a deviation, whatever is asked."""

    name: str
    paper: str
    aggregation: Aggregation
    masked_count: bool
    scope: Literal["group", "batch"]
    streaming: Literal["exact", "barrier"]
    advantages: Scope
    surrogate: Surrogate
    clip_low: float
    clip_high: float
    scales: bool | None = True
    constant: int = 0
    default_kl: str = "k3"
    dynamic: bool = False


_grpo, _rloo = each(advantages.grpo), each(advantages.leave_one_out)
_ppo, _gspo, _cispo = surrogates.ppo_clip, surrogates.gspo, surrogates.cispo
_batch, _baseline = advantages.batch_normalised, advantages.batch_normalised_over_baseline

ROWS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        # name, paper, aggregation, masked_count, scope, streaming, advantages, surrogate, clip_low, clip_high
        Algorithm(
            "grpo", "arXiv 2402.03300, eq. 3", "sequence", True, "group", "exact", _grpo, _ppo, 0.2, 0.2
        ),
        Algorithm(
            "dr_grpo",
            "arXiv 2503.20783, eq. 3",
            "constant",
            True,
            "group",
            "exact",
            _grpo,
            _ppo,
            0.2,
            0.2,
            scales=False,
        ),
        Algorithm(
            "dapo",
            "arXiv 2503.14476, eq. 8-13",
            "token",
            False,
            "group",
            "exact",
            _grpo,
            _ppo,
            0.2,
            0.28,
            dynamic=True,
        ),
        Algorithm(
            "rloo",
            "arXiv 2402.14740, eq. 6",
            "constant",
            True,
            "group",
            "exact",
            _rloo,
            _ppo,
            0.2,
            0.2,
            scales=None,
            constant=1,
        ),
        Algorithm(
            "reinforce++",
            "arXiv 2501.03262, eq. 8",
            "token",
            True,
            "batch",
            "barrier",
            _batch,
            _ppo,
            0.2,
            0.2,
            default_kl="k2",
        ),
        Algorithm(
            "reinforce++-baseline",
            "arXiv 2501.03262",
            "token",
            True,
            "batch",
            "barrier",
            _baseline,
            _ppo,
            0.2,
            0.2,
            default_kl="k2",
        ),
        Algorithm(
            "gspo", "arXiv 2507.18071, eq. 5-7", "sequence", True, "group", "exact", _grpo, _gspo, 3e-4, 4e-4
        ),
        Algorithm(
            "cispo", "arXiv 2506.13585, eq. 4-5", "token", True, "group", "exact", _grpo, _cispo, 1.0, 4.0
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """An algorithm's row with a run's settings in it."""

    algorithm: Algorithm
    aggregation: Aggregation
    constant: int
    scale: bool
    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: str
    kl_reference: str
    importance: str
    importance_level: str
    importance_floor: float
    importance_cap: float
    on_length: str
    overlong_buffer_tokens: int
    max_tokens: int
    dynamic: bool
    dynamic_limit: float

    @property
    def needs_reference(self) -> bool:
        """The starting model is kept in memory."""
        return self.kl_coef > 0 and self.kl_reference == "start"


def resolve(section: AlgorithmSection, max_tokens: int) -> Recipe:
    """The row that `section` names, with the row's defaults where it is silent. Raises `ConfigError` for what the row does not admit."""
    row = ROWS.get(section.name)
    if row is None:
        raise ConfigError(
            f"algorithm.name = {section.name!r} is not known", f"choose one of {', '.join(ROWS)}"
        )
    _admit(section, row, max_tokens)
    return Recipe(
        algorithm=row,
        aggregation=section.aggregation or row.aggregation,
        constant=row.constant or max_tokens,
        scale=bool(row.scales if section.scale_by_std is None else section.scale_by_std),
        clip_low=row.clip_low if section.clip_low is None else section.clip_low,
        clip_high=row.clip_high if section.clip_high is None else section.clip_high,
        kl_coef=section.kl_coef,
        kl_estimator=section.kl_estimator or row.default_kl,
        kl_reference=section.kl_reference,
        importance=section.importance,
        importance_level=section.importance_level,
        importance_floor=section.importance_floor,
        importance_cap=section.importance_cap,
        on_length=section.on_length,
        overlong_buffer_tokens=section.overlong_buffer_tokens,
        max_tokens=max_tokens,
        dynamic=row.dynamic if section.dynamic_sampling is None else section.dynamic_sampling,
        dynamic_limit=section.dynamic_limit,
    )


def _admit(section: AlgorithmSection, row: Algorithm, max_tokens: int) -> None:
    if section.scale_by_std and row.scales is None:
        raise ConfigError(
            f"algorithm.scale_by_std = true: {row.name} does not divide by a deviation",
            "leave scale_by_std out",
        )
    if section.max_off_policy_steps and (
        row.dynamic if section.dynamic_sampling is None else section.dynamic_sampling
    ):
        raise ConfigError(
            f"algorithm.max_off_policy_steps = {section.max_off_policy_steps}: with dynamic sampling a step's prompts are known only once "
            "it is over, not in advance",
            "set dynamic_sampling = false, or max_off_policy_steps = 0",
        )
    if section.dynamic_sampling and row.scope == "batch":
        raise ConfigError(
            f"algorithm.dynamic_sampling = true: in {row.name} a group of equal rewards says something too",
            "leave dynamic_sampling out",
        )
    if row.surrogate is surrogates.gspo and section.aggregation not in ("", "sequence"):
        raise ConfigError(
            f'algorithm.aggregation = "{section.aggregation}": the ratio of {row.name} is the sequence\'s',
            "leave aggregation out",
        )
    if section.kl_reference == "proximal" and section.kl_coef > 0 and section.updates_per_step == 1:
        raise ConfigError(
            'algorithm.kl_reference = "proximal" with one update a step: that KL is zero',
            'raise algorithm.updates_per_step, or set kl_reference = "start"',
        )
    if section.on_length == "overlong-shape" and not 0 < section.overlong_buffer_tokens < max_tokens:
        raise ConfigError(
            f"algorithm.overlong_buffer_tokens = {section.overlong_buffer_tokens} is not between 0 and sampling.max_tokens = {max_tokens}",
            "set the last tokens over which the penalty grows; DAPO takes a fifth of max_tokens",
        )


@dataclass(frozen=True, slots=True)
class DenominatorShare:
    """What of some samples counts in a step's denominator."""

    samples: int = 0
    tokens: int = 0

    def __add__(self, other: DenominatorShare) -> DenominatorShare:
        return DenominatorShare(self.samples + other.samples, self.tokens + other.tokens)


def denominator(recipe: Recipe, counted: DenominatorShare) -> float:
    """What a step's summed gradients are divided by."""
    if recipe.aggregation == "token":
        return float(counted.tokens)
    return float(counted.samples * (recipe.constant if recipe.aggregation == "constant" else 1))

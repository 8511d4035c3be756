"""The metrics of a step and of an evaluation: what the monitors show and the ledger keeps. Pure; docs/metrics.md explains the names.

`math.fsum` rounds once, so no order of arrival shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scavenger.protocol import messages
from trainer.algorithms.mismatch import quantile
from trainer.algorithms.scoring import ScoredGroup
from trainer.model.learner import RowStats


@dataclass(slots=True)
class Seconds:
    """Where a step's time went. `seed`: the trainer's own GPUs generated; `wait`: they waited for others' groups."""

    seed: float = 0.0
    wait: float = 0.0
    reward: float = 0.0
    train: float = 0.0
    update: float = 0.0


def summarise(
    groups: Sequence[ScoredGroup], stats: Mapping[int, RowStats], *, divisor: float
) -> dict[str, float]:
    """Of what was trained; ratios are per trained token, the loss per `divisor`."""
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [length for group in groups for length in group.lengths]
    rows = list(stats.values())
    tokens, trained = sum(lengths), sum(row.tokens for row in rows)
    per_token = 1.0 / trained if trained else 0.0
    mismatch_max = max((row.mismatch_max for row in rows), default=0.0)
    return {
        **spread(rewards),
        "loss": math.fsum(row.loss for row in rows) / max(divisor, 1.0),
        "tokens": float(tokens),
        "tokens_trained": float(trained),
        "samples": float(len(rewards)),
        "samples_trained": float(
            len({row.whole for group in groups for row in group.rows if row.sample_id in stats})
        ),
        "rows_trained": float(len(rows)),
        "groups_filtered": float(sum(not group.informative for group in groups)),
        "length_mean": math.fsum(lengths) / len(lengths) if lengths else 0.0,
        "length_max": float(max(lengths, default=0)),
        "entropy": math.fsum(row.entropy for row in rows) * per_token,
        "kl": math.fsum(row.kl for row in rows) * per_token,
        "clip_fraction": math.fsum(row.clipped for row in rows) * per_token,
        "mismatch_k3": math.fsum(row.mismatch_k3 for row in rows) * per_token,
        # A bin's upper edge may lie beyond the greatest difference in it.
        "mismatch_p99": min(
            mismatch_max,
            quantile(
                [sum(column) for column in zip(*(row.mismatch_bins for row in rows), strict=True)], 0.99
            ),
        ),
        "mismatch_max": mismatch_max,
        "mismatch_nan": float(sum(row.tokens - sum(row.mismatch_bins) for row in rows if row.mismatch_bins)),
        "masked_fraction": math.fsum(row.tokens - row.kept for row in rows) * per_token,
        "truncated_fraction": math.fsum(row.truncated for row in rows) * per_token,
        "effective_fraction": effective_fraction(rows),
    } | parts(one for group in groups for one in group.parts)


def effective_fraction(rows: Sequence[RowStats]) -> float:
    """Effective sample size of the trained tokens, as a share of their number: (sum w)^2 / (n sum w^2) with the weights w =
    proximal/behaviour before they are truncated or masked (Kong 1992). 1: all count alike; 0: nothing was trained."""
    tokens = sum(row.tokens for row in rows)
    squares = math.fsum(row.weight_squares for row in rows)
    if not tokens or squares <= 0:
        return 0.0
    return min(1.0, math.fsum(row.weight for row in rows) ** 2 / (tokens * squares))


def spread(rewards: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (of these, not an estimate for more), least and most."""
    mean = _mean(rewards)
    return {
        "reward": mean,
        "reward_std": math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards])),
        "reward_min": min(rewards, default=0.0),
        "reward_max": max(rewards, default=0.0),
    }


def parts(scored: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part of the reward, without its weight, over the samples that have it: those that this attempt scored."""
    found: dict[str, list[float]] = {}
    for of_sample in scored:
        for name, value in of_sample.items():
            found.setdefault(f"reward_{name}", []).append(value)
    return {name: _mean(values) for name, values in sorted(found.items())}


def alarm(metrics: Mapping[str, float], limit: float) -> str:
    """What a person is told when engines and trainer disagree on the sampled tokens by more than `limit` (k3, nats a token; 0 = any)."""
    k3 = metrics.get("mismatch_k3", 0.0)
    if not limit or k3 <= limit:  # NaN is over every limit
        return ""
    nan = metrics.get("mismatch_nan", 0.0)
    no_number = f", of {nan:,.0f} tokens no number (NaN)" if nan else ""
    return (
        f"LOOK: trainer and engines give the sampled tokens other probabilities: k3 = {k3:.3g} a token, 99 % within "
        f"{metrics.get('mismatch_p99', 0.0):.3g} nats{no_number}; monitor.mismatch_alarm = {limit:g}. "
        "Lower optimizer.lr if samples are a step old; "
        "else compare the engines' types and versions with the trainer's"
    )


@dataclass(slots=True)
class TokenSources:
    """Who generated a step's tokens, what was lost, and how old the weights were that did it."""

    reserved: int = 0
    harvested: int = 0
    unknown: int = 0  # accepted before the present daemon began
    wasted: int = 0
    moves: int = 0
    samples: int = 0
    stale: int = (
        0  # optimizer steps between the weights of a token and those that train it, summed over tokens
    )
    aged: int = 0  # tokens whose weights are known: all, where steps are submitted in advance
    stalest: int = 0
    mixed: int = 0  # samples whose tokens are of more than one version
    by_version: Counter[int] = field(default_factory=Counter)  # tokens

    def add_ages(self, versions: Iterable[tuple[int, int, int]], step: int) -> None:
        """Tokens that `step` trains, as in `DoneSample.versions`: all that there is to say of a replayed sample, which others generated."""
        for version, of_step, tokens in versions:
            self.stale += (step - 1 - of_step) * tokens
            self.aged += tokens
            self.stalest = max(self.stalest, step - 1 - of_step)
            self.by_version[version] += tokens

    def add(self, samples: Iterable[messages.DoneSample], step: int) -> None:
        """Samples that `step` trains, by the weights after `step` - 1 steps."""
        for sample in samples:
            self.add_ages(sample.versions, step)
            self.mixed += len({version for version, _, _ in sample.versions}) > 1
            self.reserved += sample.by_reserved
            self.harvested += sample.by_harvested
            self.unknown += max(
                0, messages.token_count(sample.tokens) - sample.by_reserved - sample.by_harvested
            )
            self.wasted += sample.regenerated
            self.moves += sample.moves
            self.samples += 1

    def as_metrics(self, seconds: float) -> dict[str, float]:
        per_second = 1.0 / seconds if seconds > 0 else 0.0
        return {
            "moves": float(self.moves),
            "tokens_reserved": float(self.reserved),
            "tokens_harvested": float(self.harvested),
            "tokens_unknown": float(self.unknown),
            "tokens_wasted": float(self.wasted),
            "tokens_per_s_reserved": self.reserved * per_second,
            "tokens_per_s_harvested": self.harvested * per_second,
            "staleness_mean": self.stale / self.aged if self.aged else 0.0,
            "staleness_max": float(self.stalest),
        } | self._versions()

    def _versions(self) -> dict[str, float]:
        """Of steps whose samples may be of several versions."""
        if not self.by_version:
            return {}
        return {
            "staleness_versions": float(len(self.by_version)),
            "staleness_mixed": self.mixed / max(1, self.samples),
        }


class Capacity:
    """GPU-time of the fleet between looks. The ledger has it to the second, from Slurm; this is what the trainer saw."""

    def __init__(self, ranks: int, gpus_per_engine: int, gpus_per_reserved: int, now: float) -> None:
        self._ranks, self._gpus, self._of_reserved = ranks, gpus_per_engine, gpus_per_reserved
        self._began = self._at = now
        self._reserved_s = self._harvested_s = 0.0

    def observe(self, fleet: messages.Fleet, now: float) -> None:
        """`fleet` is what there was since the last look."""
        seconds, self._at = now - self._at, now
        self._reserved_s += fleet.reserved_awake * self._of_reserved * seconds
        self._harvested_s += fleet.harvested * self._gpus * seconds

    def as_metrics(self) -> dict[str, float]:
        """In GPU-hours. `gpu_hours_trainer`: of the ranks, whatever they did; engines awake on the same GPUs count for themselves."""
        return {
            "gpu_hours_trainer": self._ranks * (self._at - self._began) / 3600,
            "gpu_hours_reserved": self._reserved_s / 3600,
            "gpu_hours_harvested": self._harvested_s / 3600,
        }


class Drafts:
    """What the run's engines drafted between two looks, from the totals that the daemon tells."""

    def __init__(self, fleet: messages.Fleet) -> None:
        self._before = fleet

    def as_metrics(self, fleet: messages.Fleet) -> dict[str, float]:
        """Since the last look. `fleet` is what there is now; of a daemon that began anew its totals are all there is to say."""
        before, self._before = self._before, fleet
        if fleet.verifications < before.verifications:
            before = messages.Fleet(0, 0, 0, 0, 0)
        verified, accepted = fleet.verifications - before.verifications, fleet.accepted - before.accepted
        return {
            "tokens_drafted": float(fleet.drafted - before.drafted),
            "tokens_accepted": float(accepted),
            # The model's own next token comes with each verification.
            "tokens_per_verification": 1.0 + (accepted / verified if verified else 0.0),
        }


@dataclass(frozen=True, slots=True)
class Judgement:
    """One usable completion of an evaluation: its reward, its tokens, and whether the length limit ended it."""

    reward: float
    tokens: int
    cut: bool


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that one of k completions drawn from n, of which `right` are right, is right (Chen et al., arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def summarise_evaluation(
    sampled: Sequence[Sequence[Judgement]],
    greedy: Sequence[Sequence[Judgement]],
    solved_at: float = 1.0,
    scored: Iterable[Mapping[str, float]] = (),
    name: str = "",
) -> dict[str, float]:
    """Metrics over the prompts, in their order: mean rewards, pass@k for k = 1, 2, 4, ... up to the completions of a prompt, lengths.

    A prompt with fewer than k usable completions is left out of pass@k. `solved_at`: the least reward of a right one. `scored`: parts of
    the rewards of sampled completions. `name`: of a data set of its own.
    """
    completions = [one for prompt in sampled for one in prompt]
    of = f"eval_{name}_" if name else "eval_"
    metrics = {
        f"{of}sampled": _mean([one.reward for one in completions]),
        f"{of}greedy": _mean([one.reward for prompt in greedy for one in prompt]),
        f"{of}length_mean": _mean([float(one.tokens) for one in completions]),
        f"{of}cut_fraction": _mean([float(one.cut) for one in completions]),
    } | {f"{of}{part}": value for part, value in parts(scored).items()}
    k, most = 1, max((len(prompt) for prompt in sampled), default=0)
    while k <= most:
        enough = [prompt for prompt in sampled if len(prompt) >= k]
        metrics[f"{of}pass_at_{k}"] = _mean(
            [pass_at_k(len(prompt), sum(one.reward >= solved_at for one in prompt), k) for prompt in enough]
        )
        k *= 2
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0

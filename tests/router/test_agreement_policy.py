"""Which engine disagrees with the trainer: wrong ones are found within few samples, and no healthy one ever is.

The noise is that of an engine and a trainer that compute the same model in bfloat16 with other kernels: most tokens are all but certain and
differ by nothing, the others by a heavy-tailed amount; prompts, lengths, steps and kinds of GPU differ; now and then one token, or a whole
sample, differs by far more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from scavenger.policy.agreement import (
    DEFAULT_RULES,
    WINDOW_STEPS,
    AgreementRules,
    AgreementSpan,
    SpanWindow,
    SuspectWorker,
    rates_of,
)

Array = np.ndarray
#: Runs of `test_no_healthy_engine...`: RUNS in each of BATCHES.
BATCHES, RUNS = 12, 100
#: |d| of an uncertain token: float32 on a CPU, bfloat16 of dense models, of mixtures of experts.
SIGMAS = (1e-6, 0.003, 0.01, 0.03, 0.08)
WARM = 1.2


class Noise:
    """d of the tokens of many samples at once."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def uncertainty(self, lengths: Array) -> Array:
        """Of each token, 0 to 1; some samples are harder than others."""
        hard = np.repeat(np.exp(self.rng.normal(0, 0.5, len(lengths))), lengths)
        return self.rng.beta(0.3, 1.2 / hard)

    def healthy(self, lengths: Array, sigma: float, uncertainty: Array) -> Array:
        rng, tokens = self.rng, int(lengths.sum())
        of_sample = np.exp(rng.normal(0, 0.3, len(lengths))) * np.where(
            rng.random(len(lengths)) < 0.005, 10, 1
        )
        scale = sigma * np.repeat(of_sample, lengths) * uncertainty
        spikes = np.where(rng.random(tokens) < 1e-4, rng.normal(0, 1.5, tokens), 0.0)
        return rng.standard_t(3, tokens) * scale - scale**2 / 2 + spikes

    def warm(self, uncertainty: Array, others: int = 3) -> Array:
        """log p - log q of tokens that are drawn from q, p at temperature 1.2: the likely one, and `others` that share the rest."""
        top = 1 - uncertainty * 0.4
        p = np.stack([np.log(top), np.log1p(-top + 1e-12) - np.log(others)])
        q = p / WARM
        q -= np.log(np.exp(q[0]) + others * np.exp(q[1]))
        which = (self.rng.random(len(top)) >= np.exp(q[0])).astype(int)
        return (p - q)[which, np.arange(len(top))]


def spans(d: Array, lengths: Array, first: int, workers: Array) -> list[AgreementSpan]:
    d = np.clip(d, -30, 30)
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    sums = [np.add.reduceat(part, starts) for part in (d, np.abs(d), np.exp(d) - d - 1)]
    return [
        AgreementSpan(
            first + i,
            int(workers[i]),
            int(lengths[i]),
            float(sums[0][i]),
            float(sums[1][i]),
            float(sums[2][i]),
        )
        for i in range(len(lengths))
    ]


def play(
    seed: int,
    engines: int,
    each: int,
    sigma: float,
    *,
    steps: int = 5,
    wrong: Callable[[Noise, Array], Array] | None = None,
    wrong_from: int = 1,
    kinds: tuple[float, ...] = (1.0, 1.3, 1.7),
    rules: AgreementRules = DEFAULT_RULES,
) -> tuple[list[SuspectWorker], int]:
    """The first verdicts of a run whose engine 0 is `wrong`, and how many samples of it had been trained by then."""
    noise, window, sample = Noise(seed), SpanWindow(rules), 0
    kind = noise.rng.choice(kinds, engines)
    of_wrong = 0
    for step in range(1, steps + 1):
        drift = float(np.exp(noise.rng.normal(0, 0.15)))
        for _ in range(each // 4):
            workers = np.repeat(np.arange(engines), 4)
            lengths = np.clip(noise.rng.lognormal(4.5, 1.0, len(workers)), 1, 3000).astype(int)
            uncertainty = noise.uncertainty(lengths)
            d = noise.healthy(lengths, sigma * drift, uncertainty) * np.repeat(kind[workers], lengths)
            if wrong is not None and step >= wrong_from:
                mine = np.repeat(workers == 0, lengths)
                d[mine] += wrong(noise, uncertainty[mine])
                of_wrong += 4
            window.add(step, spans(d, lengths, sample, workers))
            sample += len(workers)
            if verdicts := window.judge():
                return verdicts, of_wrong
    return [], of_wrong


def warm(noise: Noise, uncertainty: Array) -> Array:
    return noise.warm(uncertainty)


def flipped(noise: Noise, uncertainty: Array) -> Array:
    """A weight is off by a power of two: every logit is a little, some tokens far."""
    return noise.rng.normal(-0.05, 0.3, len(uncertainty)) * (uncertainty + 0.05)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_healthy_engine_is_set_aside_in_any_of_many_runs(batch: int) -> None:
    for seed in range(batch * RUNS, (batch + 1) * RUNS):
        choose = np.random.default_rng(seed)
        engines, each = int(choose.choice([1, 2, 3, 4, 8, 16])), int(choose.choice([4, 12, 24]))
        verdicts, _ = play(seed, engines, each, float(choose.choice(SIGMAS)))
        assert not verdicts, (seed, engines, each, [one.reason for one in verdicts])


@pytest.mark.parametrize("wrong", [warm, flipped])
@pytest.mark.parametrize(
    "sigma", SIGMAS[:-1]
)  # in the noise of the last, a temperature of 1.2 is not thrice the usual
def test_a_wrong_engine_alone_is_found_within_few_samples(
    sigma: float, wrong: Callable[[Noise, Array], Array]
) -> None:
    most = 0
    for seed in range(20):
        verdicts, samples = play(seed, 8, 24, sigma, wrong=wrong, steps=10)
        assert [one.worker_id for one in verdicts] == [0], (seed, sigma, verdicts)
        most = max(most, samples)
    assert most <= 64, most


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_an_engine_that_goes_wrong_among_few_is_found_by_the_runs_own_past(engines: int) -> None:
    for seed in range(10):
        verdicts, samples = play(
            seed, engines, 24, 0.003, wrong=lambda noise, u: 3 * noise.warm(u), wrong_from=6, steps=12
        )
        assert [(one.worker_id, one.against) for one in verdicts] == [(0, "history")], (seed, verdicts)
        assert samples <= 64


def rate(
    worker: int, first: int, absolute: float, signed: float = 0.0, samples: int = 16
) -> list[AgreementSpan]:
    return [
        AgreementSpan(first + i, worker, 20, 20 * signed, 20 * absolute * (1 + (i % 2) / 50), 0.0)
        for i in range(samples)
    ]


def judged(
    *of_workers: list[AgreementSpan], rules: AgreementRules = DEFAULT_RULES, step: int = 1
) -> list[SuspectWorker]:
    window = SpanWindow(rules)
    for one in of_workers:
        window.add(step, one)
    return window.judge()


def test_who_agrees_better_than_its_peers_is_never_wrong_and_who_differs_by_little_neither() -> None:
    peers = [rate(w, 1000 * w, 0.02 + w / 1000) for w in range(2, 6)]
    assert not judged(rate(1, 0, 0.0), *peers)
    assert not judged(rate(1, 0, 0.06), *peers), "less than thrice as much"
    assert [one.worker_id for one in judged(rate(1, 0, 0.09), *peers)] == [1]
    tiny = [rate(w, 1000 * w, 1e-7) for w in range(2, 6)]
    assert not judged(rate(1, 0, 1e-3), *tiny), "a thousand times as much, and no harm"


def test_the_signed_rate_shows_what_the_absolute_one_does_not() -> None:
    peers = [rate(w, 1000 * w, 0.03, -0.0005) for w in range(2, 6)]
    (verdict,) = judged(rate(1, 0, 0.05, -0.02), *peers)
    assert (verdict.worker_id, verdict.by, verdict.compared) == (1, "signed", 4)
    assert "signed -0.02 nats a token over 320 tokens of 16 samples" in verdict.reason
    assert verdict.numbers["usual"] == pytest.approx(-0.0005)
    assert [one.by for one in judged(rate(1, 0, 0.05, 0.02), *peers)] == ["signed"], "no sign is a good one"


def test_too_little_is_not_judged_and_too_few_are_not_compared() -> None:
    peers = [rate(w, 1000 * w, 0.01) for w in range(2, 6)]
    assert not judged(rate(1, 0, 0.5, samples=15), *peers)
    assert not judged(rate(1, 0, 0.5), *peers[:2])
    assert not judged(rate(1, 0, 0.5), *(one[:15] for one in peers)), (
        "peers of whom as little is known are none"
    )


def test_one_strange_sample_is_no_wrong_engine() -> None:
    peers = [rate(w, 1000 * w, 0.01) for w in range(2, 6)]
    strange = [*rate(1, 0, 0.01, samples=31), AgreementSpan(99, 1, 400, -4000.0, 4000.0, 9e9)]
    assert rates_of(strange).absolute > 3.0
    assert not judged(strange, *peers)


def test_where_half_of_all_engines_disagree_nobody_knows_which_half_is_wrong() -> None:
    fleet = [rate(w, 1000 * w, 0.3 if w % 2 else 0.01) for w in range(8)]
    assert not judged(*fleet)


def test_a_large_fleet_is_compared_with_one_median() -> None:
    fleet = [rate(w, 1000 * w, 0.3 if w == 3 else 0.01) for w in range(40)]
    (verdict,) = judged(*fleet)
    assert (verdict.worker_id, verdict.compared) == (3, 39)


def test_a_span_that_is_said_again_counts_once_and_old_steps_count_no_more() -> None:
    window = SpanWindow(DEFAULT_RULES)
    for _ in range(5):
        window.add(1, rate(1, 0, 0.5, samples=4))
    peers = [rate(w, 1000 * w, 0.01) for w in range(2, 6)]
    window.add(1, [span for one in peers for span in one])
    assert not window.judge(), "4 samples"
    window.add(1 + WINDOW_STEPS, [span for one in peers for span in one])
    window.add(1 + WINDOW_STEPS, rate(1, 500, 0.5, samples=15))
    assert not window.judge(), "those of the first step are forgotten"
    window.add(1 + WINDOW_STEPS, rate(1, 600, 0.5, samples=1))
    assert [one.worker_id for one in window.judge()] == [1]

"""Answer lengths have the moments, the correlation and the capped share that were asked for."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from scavenger.errors import ConfigError
from scavenger.simulate.clock import Streams
from scavenger.simulate.lengths import CachedLengths, Lengths, Lognormal, Sampled, parse, read
from tests.simulate.real import TRACES, needs_traces

SAMPLE = Path(__file__).resolve().parents[1] / "data/simulate/lengths.csv"


def drawn(lengths: Lengths, groups: int = 2000, samples: int = 8, step: int = 0, seed: int = 1) -> np.ndarray:
    return np.array([lengths.group(Streams(seed), step, prompt, samples) for prompt in range(groups)])


def within_group(logs: np.ndarray) -> float:
    """Mean correlation of two samples of one group."""
    centred = (logs - logs.mean()) / logs.std()
    n = logs.shape[1]
    return float(((centred.sum(axis=1) ** 2 - (centred**2).sum(axis=1)) / (n * (n - 1))).mean())


@pytest.mark.parametrize("sigma", [0.4, 1.2])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_log_lengths_have_their_mean_spread_and_correlation(sigma: float, correlation: float) -> None:
    logs = np.log(drawn(Lognormal(math.log(3000), sigma, 10**9, correlation)))
    # the spread of a mean over 2,000 groups of correlated samples
    assert logs.mean() == pytest.approx(math.log(3000), abs=4 * sigma / math.sqrt(2000))
    assert logs.std() == pytest.approx(sigma, rel=0.05)
    assert within_group(logs) == pytest.approx(correlation, abs=0.05)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_the_capped_share_is_what_was_asked_for(share: float) -> None:
    lengths = Lognormal.with_capped_share(0.8, 14_000, share, correlation=0.3)
    found = drawn(lengths)
    assert lengths.capped_share() == pytest.approx(share)
    assert found.max() == 14_000
    assert (found == 14_000).mean() == pytest.approx(share, rel=0.2)
    assert found.mean() == pytest.approx(lengths.mean(), rel=0.02)


@pytest.mark.parametrize(("mean", "sigma"), [(2000, 0.4), (5000, 1.2), (9000, 0.8)])
def test_the_mean_after_the_cap_is_what_was_asked_for(mean: float, sigma: float) -> None:
    lengths = Lognormal.with_mean(mean, sigma, 14_000)
    assert lengths.mean() == pytest.approx(mean, rel=1e-6)
    assert drawn(lengths).mean() == pytest.approx(mean, rel=0.03)


def test_lengths_drift_over_steps() -> None:
    lengths = Lognormal(math.log(1000), 0.5, 10**9, drift=0.01)
    assert drawn(lengths, step=50).mean() / drawn(lengths, step=0).mean() == pytest.approx(
        math.exp(0.5), rel=0.05
    )
    assert lengths.mean(50) / lengths.mean(0) == pytest.approx(math.exp(0.5))


def test_a_group_is_the_same_whoever_asked_before_and_another_by_seed_step_and_prompt() -> None:
    lengths = Lognormal(7.0, 0.8, 14_000, 0.4)
    first = lengths.group(Streams(1), 3, 5, 8)
    lengths.group(Streams(1), 3, 4, 8)
    assert lengths.group(Streams(1), 3, 5, 8) == first
    assert (
        len(
            {
                first,
                lengths.group(Streams(2), 3, 5, 8),
                lengths.group(Streams(1), 4, 5, 8),
                lengths.group(Streams(1), 3, 6, 8),
            }
        )
        == 4
    )


def test_lengths_are_whole_and_at_least_one_token() -> None:
    assert set(Lognormal(-5.0, 0.1, 10).group(Streams(0), 0, 0, 50)) == {1}
    assert all(type(length) is int for length in Sampled((3, 4), 10).group(Streams(0), 0, 0, 5))


def test_sampled_lengths_have_the_files_distribution_scale_cap_and_correlation() -> None:
    tokens = read(SAMPLE)
    found = drawn(Sampled(tokens, 10**6, correlation=0.6))
    assert set(np.unique(found)) == set(tokens)
    assert found.mean() == pytest.approx(np.mean(tokens), rel=0.05)
    assert 0.4 < within_group(np.log(found)) < 0.65  # of ranks with ties: below that of the scores
    assert set(np.unique(drawn(Sampled(tokens, 250, scale=2.0), 200))) == {
        min(250, 2 * token) for token in tokens
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: Lognormal(5.0, 0.0, 100),
        lambda: Lognormal(5.0, 1.0, 100, 1.5),
        lambda: Lognormal(5.0, 1.0, 0),
        lambda: Lognormal.with_capped_share(1.0, 100, 0.0),
        lambda: Lognormal.with_mean(100, 1.0, 100),
        lambda: Sampled((), 10),
        lambda: Lognormal(5.0, math.nan, 100),
        lambda: Lognormal(5.0, math.inf, 100),
        lambda: Lognormal(5.0, 50.0, 100),
        lambda: Lognormal(math.nan, 1.0, 100),
        lambda: Lognormal(5.0, 1.0, 100, drift=math.inf),
        lambda: Sampled((1,), 10, scale=math.nan),
    ],
)
def test_lengths_that_cannot_be_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError):
        make()


def test_a_file_is_read_plain_or_gzipped_whole_or_one_source(tmp_path: Path) -> None:
    assert read(SAMPLE) == (44, 109, 55, 16, 2000)
    assert read(SAMPLE, "mooncake") == (2000,)
    packed = tmp_path / "lengths.csv.gz"
    packed.write_bytes(gzip.compress(SAMPLE.read_bytes()))
    assert read(packed) == read(SAMPLE)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("source,tokens\na,5\n", "output_tokens"),
        ("output_tokens\n5\nfive\n", "line 3"),
        ("# x\noutput_tokens\n-5\n", "line 3"),
        ("output_tokens\n5,6\n", "line 2"),
        ("output_tokens\n", "no completion lengths"),
    ],
)
def test_a_wrong_file_names_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text.splitlines(keepends=True))


def test_an_unknown_source_names_the_known_ones_and_a_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['azure', 'mooncake'\]"):
        read(SAMPLE, "nobody")
    broken = tmp_path / "lengths.csv.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match=r"lengths\.csv\.gz"):
        read(broken)


@needs_traces
def test_the_real_answers_have_the_statistics_of_their_readme() -> None:
    chat = np.array(read(TRACES / "output_lengths.csv.gz", "azure2023_conv"))
    assert (round(chat.mean()), np.percentile(chat, 50), round(np.percentile(chat, 99))) == (211, 129, 601)
    mooncake = np.array(read(TRACES / "output_lengths.csv.gz", "mooncake_conversation"))
    assert (round(mooncake.mean()), np.percentile(mooncake, 50), round(np.percentile(mooncake, 99))) == (
        343,
        350,
        1119,
    )


def test_what_is_remembered_is_what_is_drawn_and_drawn_once_for_a_seed() -> None:
    asked: list[tuple[int, int, int]] = []

    class Counted:
        cap = 100

        def group(self, streams: Streams, step: int, prompt: int, samples: int) -> tuple[int, ...]:
            asked.append((streams.seed, step, prompt))
            return truth.group(streams, step, prompt, samples)

    truth = Lognormal(3.0, 0.6, 100, 0.5)
    lengths = CachedLengths(Counted())
    for seed in (1, 1, 2, 1):
        for step, prompt in ((1, 0), (2, 0), (1, 3)):
            assert lengths.group(Streams(seed), step, prompt, 8) == truth.group(
                Streams(seed), step, prompt, 8
            )
    assert asked == [(seed, step, prompt) for seed in (1, 2, 1) for step, prompt in ((1, 0), (2, 0), (1, 3))]
    assert lengths.cap == 100

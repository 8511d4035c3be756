"""Each function of `trainer.algorithms` against values worked out by hand from its paper's equation."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from scavenger.config import AlgorithmSection
from scavenger.errors import ConfigError
from trainer.algorithms import advantages, mismatch, surrogates
from trainer.algorithms.advantages import overlong_penalty
from trainer.algorithms.loss import KL_ESTIMATORS, Tokens, policy_loss, token_logprobs
from trainer.algorithms.rows import ROWS, DenominatorShare, Recipe, denominator, resolve

F64 = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def all_of(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)


def recipe(name: str = "dapo", **settings: Any) -> Recipe:
    return resolve(AlgorithmSection(name=name, **settings), max_tokens=10)  # type: ignore[arg-type]


def one_sample(*logprobs: float) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor(*logprobs).requires_grad_(), torch.zeros(len(logprobs), dtype=torch.int64)


# ---------------------------------------------------------------- advantages


def test_grpo_divides_by_the_group_s_sample_deviation() -> None:
    found = advantages.grpo(tensor(1, 0, 0, 1), all_of(4), True)
    assert found.informative
    assert found.values.tolist() == pytest.approx(
        [0.8660254037844386, -0.8660254037844386, -0.8660254037844386, 0.8660254037844386]
    )


def test_dr_grpo_centres_only() -> None:
    assert advantages.grpo(tensor(3, 1), all_of(2), False).values.tolist() == [1.0, -1.0]


def test_an_unusable_sample_neither_counts_nor_gets_an_advantage() -> None:
    usable = torch.tensor([True, False, True])
    assert advantages.grpo(tensor(1, 99, 0), usable, False).values.tolist() == [0.5, 0.0, -0.5]
    assert advantages.leave_one_out(tensor(1, 99, 0), usable, False).values.tolist() == [1.0, 0.0, -1.0]


@pytest.mark.parametrize("function", [advantages.grpo, advantages.leave_one_out])
@pytest.mark.parametrize(
    ("rewards", "usable", "why"),
    [([1.0, 1.0], [True, True], "zero variance"), ([1.0, 0.0], [True, False], "1 usable")],
)
def test_a_group_that_compares_nothing_is_flagged(
    function: Any, rewards: list[float], usable: list[bool], why: str
) -> None:
    found = function(tensor(*rewards), torch.tensor(usable), False)
    assert not found.informative
    assert why in found.reason
    assert found.values.tolist() == [0.0, 0.0]


def test_leave_one_out_compares_with_the_others_mean() -> None:
    found = advantages.leave_one_out(tensor(3, 0, 0), all_of(3), False)
    assert found.values.tolist() == pytest.approx([3.0, -1.5, -1.5])


def test_the_batch_normalises_over_all_groups() -> None:
    """Rewards 0 0 | 2 2: mean 1, sample deviation sqrt(4/3)."""
    found = advantages.batch_normalised([(tensor(0, 0), all_of(2)), (tensor(2, 2), all_of(2))], True)
    unit = 1 / math.sqrt(4 / 3)
    assert [one.values.tolist() for one in found] == [
        pytest.approx([-unit, -unit]),
        pytest.approx([unit, unit]),
    ]
    assert all(one.informative for one in found), "a group of equal rewards says something against the batch"


def test_with_a_baseline_each_group_is_centred_before_the_batch_normalises() -> None:
    """Rewards 0 2 | 5 5 and one unusable: centred -1 1 | 0 0, sample deviation sqrt(2/3)."""
    groups = [(tensor(0, 2), all_of(2)), (tensor(5, 77, 5), torch.tensor([True, False, True]))]
    found = advantages.batch_normalised_over_baseline(groups, True)
    unit = 1 / math.sqrt(2 / 3)
    assert [one.values.tolist() for one in found] == [pytest.approx([-unit, unit]), [0.0, 0.0, 0.0]]


def test_a_batch_without_variance_says_nothing() -> None:
    (found,) = advantages.batch_normalised([(tensor(1, 1), all_of(2))], True)
    assert not found.informative
    assert "zero variance over the batch" in found.reason


@pytest.mark.parametrize(
    ("length", "penalty"), [(10, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (21, -1.0)]
)
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_tokens=20, buffer_tokens=4) == penalty


# ---------------------------------------------------------------- surrogates


def test_ppo_clips_where_the_advantage_pushes_further() -> None:
    """Ratios 1.1 (free), 1.5 (held at 1.28) with A = 2; ratios .5 (held at .8), 1.5 (free) with A = -1."""
    current, _ = one_sample(math.log(1.1), math.log(1.5), math.log(0.5), math.log(1.5))
    loss, held = surrogates.ppo_clip(
        current, tensor(0, 0, 0, 0), tensor(2, -1), torch.tensor([0, 0, 1, 1]), 0.2, 0.28
    )
    assert loss.tolist() == pytest.approx([-2.2, -2.56, 0.8, 1.5])
    assert held.tolist() == [False, True, True, False]
    loss.sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-2.2, 0.0, 0.0, 1.5])


def test_gspo_s_ratio_is_the_geometric_mean_of_the_sample_s() -> None:
    """Ratios 4 and 1: s = 2, free at clip_high 2; the gradient is -s A / |o| for each token of a sample averaged over its tokens."""
    current, row = one_sample(math.log(4.0), 0.0)
    loss, held = surrogates.gspo(current, tensor(0, 0), tensor(3), row, 0.5, 2.0)
    assert loss.tolist() == pytest.approx([-6.0, -6.0])
    assert held.tolist() == [False, False]
    loss.mean().backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-3.0, -3.0])
    loss, held = surrogates.gspo(current, tensor(0, 0), tensor(3), row, 0.5, 0.5)
    assert loss.tolist() == pytest.approx([-4.5, -4.5])
    assert held.tolist() == [True, True]


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    """Ratio 8 is weighted 5 = 1 + 4; ratio .1 keeps its weight with clip_low = 1."""
    current, row = one_sample(math.log(8.0), math.log(0.1))
    loss, clipped = surrogates.cispo(current, tensor(0, 0), tensor(2), row, 1.0, 4.0)
    assert loss.tolist() == pytest.approx([-10 * math.log(8.0), -0.2 * math.log(0.1)])
    assert clipped.tolist() == [True, False]
    loss.sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-10.0, -0.2])


# ---------------------------------------------------------------- KL


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", math.exp(-1.0), 1 - math.exp(-1.0))],
)
def test_kl_estimators(name: str, value: float, slope: float) -> None:
    """current = -1, reference = -2, so d = -1: k1 = 1, k2 = 1/2, k3 = e^-1 + 1 - 1; slopes by hand."""
    current, _ = one_sample(-1.0)
    found = KL_ESTIMATORS[name](current, tensor(-2.0))
    assert found.item() == pytest.approx(value)
    found.sum().backward()
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(slope)


def test_k2_s_gradient_is_the_kl_s_over_the_whole_vocabulary_and_k1_s_is_zero() -> None:
    logits, reference = tensor(0.3, -1.0, 0.5).requires_grad_(), tensor(0.0, 0.2, -0.4).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)

    def mean_gradient(name: str) -> torch.Tensor:
        values = KL_ESTIMATORS[name](logprobs, reference)
        (found,) = torch.autograd.grad((logprobs.exp().detach() * values).sum(), logits, retain_graph=True)
        return found

    assert torch.allclose(mean_gradient("k2"), exact)
    assert torch.allclose(mean_gradient("k1"), torch.zeros(3, dtype=F64))
    assert not torch.allclose(mean_gradient("k3"), exact)


# ---------------------------------------------------------------- mismatch


def test_the_ratio_of_token_sequence_and_geometric_mean() -> None:
    proximal, behaviour, row = tensor(-1.0, -2.0, -1.0), tensor(-1.5, -1.0, -1.0), torch.tensor([0, 0, 1])
    found = {
        level: mismatch.log_ratio(proximal, behaviour, row, 2, level).tolist()
        for level in ("token", "sequence", "geometric")
    }
    assert found == {
        "token": [0.5, -1.0, 0.0],
        "sequence": [-0.5, -0.5, 0.0],
        "geometric": [-0.25, -0.25, 0.0],
    }


def test_truncation_caps_and_a_mask_drops() -> None:
    ratio = tensor(math.log(0.4), math.log(1.5), math.log(3.0))
    weight, kept = mismatch.truncated(ratio, 2.0)
    assert (weight.tolist(), kept.tolist()) == (pytest.approx([0.4, 1.5, 2.0]), [1.0, 1.0, 1.0])
    weight, kept = mismatch.masked(ratio, 0.5, 2.0)
    assert (weight.tolist(), kept.tolist()) == (pytest.approx([0.0, 1.5, 0.0]), [0.0, 1.0, 0.0])


def test_differences_are_counted_by_sample_in_bins_whose_quantile_is_an_upper_edge() -> None:
    row = torch.tensor([0] * 3 + [1] * 197)
    difference = tensor(*[0.0, 5e-6, -0.2], *[3.0, math.nan], *[0.1] * 195)
    bins = mismatch.binned(difference, row, 2)
    assert bins.sum(1).tolist() == [3, 196], "what is no number is in no bin"
    assert bins[0, 0] == 2
    assert mismatch.largest(difference, row, 2).tolist() == pytest.approx([0.2, 3.0])
    whole = bins.sum(0).tolist()
    assert 0.1 <= mismatch.quantile(whole, 0.98) < 0.1 * 1.42
    assert 0.2 <= mismatch.quantile(whole, 0.99) < 0.2 * 1.42
    assert 3.0 <= mismatch.quantile(whole, 1.0) < 3.0 * 1.42
    assert mismatch.quantile(bins[0].tolist(), 0.5) == 0.0
    assert mismatch.quantile([], 0.99) == 0.0
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mismatch.binned(difference[order], row[order], 2), bins)


# ---------------------------------------------------------------- the whole loss


def test_the_policy_ratio_is_current_over_proximal_and_the_weight_proximal_over_behaviour() -> None:
    """Token 1: ratio 1.1 (free), weight e^.2; token 2: ratio 1.5 held at 1.28, weight truncated at 2."""
    current, row = one_sample(math.log(1.1), math.log(1.5))
    terms = policy_loss(Tokens(current, tensor(0, 0), tensor(-0.2, -5.0), row, tensor(2)), recipe("dapo"))
    assert terms.loss.item() == pytest.approx(-(math.exp(0.2) * 1.1 * 2.0 + 2.0 * 1.28 * 2.0))
    assert (terms.clipped.tolist(), terms.truncated.tolist(), terms.mismatch_max.tolist()) == (
        [1.0],
        [1.0],
        [5.0],
    )
    terms.loss.backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-math.exp(0.2) * 1.1 * 2.0, 0.0])


def test_rounding_of_the_engine_alone_never_clips() -> None:
    """current = proximal far from behaviour: the gradient is kept, weighted, not dropped."""
    current, row = one_sample(-1.0)
    terms = policy_loss(
        Tokens(current, current.detach(), tensor(-2.0), row, tensor(1)), recipe("dapo", importance_cap=5.0)
    )
    terms.loss.backward()
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(-math.e)


@pytest.mark.parametrize(
    ("settings", "gradient", "kept"),
    [
        ({"importance": "off"}, [-1.0, -1.0], 2.0),
        ({"importance_cap": 1.5}, [-math.exp(0.1), -1.5], 2.0),
        ({"importance": "mask", "importance_cap": 1.5}, [-math.exp(0.1), 0.0], 1.0),
        ({"importance": "mask", "importance_cap": 1.5, "importance_level": "sequence"}, [0.0, 0.0], 0.0),
        (
            {"importance": "mask", "importance_cap": 2.0, "importance_level": "geometric"},
            [-math.exp(0.55)] * 2,
            2.0,
        ),
    ],
)
def test_each_correction_weighs_the_gradient(
    settings: dict[str, Any], gradient: list[float], kept: float
) -> None:
    """proximal - behaviour = .1 and 1; A = 1 and ratio 1."""
    current, row = one_sample(-1.0, -1.0)
    terms = policy_loss(
        Tokens(current, current.detach(), tensor(-1.1, -2.0), row, tensor(1)), recipe("dapo", **settings)
    )
    terms.loss.backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx(gradient)
    assert terms.kept.tolist() == [kept]


def test_sequence_aggregation_averages_each_sample_over_its_tokens() -> None:
    current = tensor(-1, -1, -1).requires_grad_()
    tokens = Tokens(current, current.detach(), current.detach(), torch.tensor([0, 0, 1]), tensor(2, 3))
    policy_loss(tokens, recipe("grpo")).loss.backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-1.0, -1.0, -3.0])


def test_kl_is_weighted_like_the_policy_and_needs_a_reference() -> None:
    current, row = one_sample(-1.0, -1.0)
    tokens = Tokens(current, current.detach(), current.detach(), row, tensor(1), reference=tensor(-2, -1))
    terms = policy_loss(tokens, recipe("grpo", kl_coef=0.5))
    assert terms.loss.item() == pytest.approx(-1.0 + 0.5 * math.exp(-1) / 2)
    assert terms.kl.tolist() == pytest.approx([math.exp(-1)])
    with pytest.raises(ValueError, match="reference"):
        policy_loss(
            Tokens(current, current.detach(), current.detach(), row, tensor(1)), recipe("grpo", kl_coef=0.5)
        )


def test_kl_to_the_step_s_start_needs_no_reference_model() -> None:
    current, row = one_sample(-1.0)
    made = recipe("grpo", kl_coef=1.0, kl_reference="proximal", kl_estimator="k2", updates_per_step=2)
    assert not made.needs_reference
    terms = policy_loss(Tokens(current, tensor(-1.1), tensor(-1.1), row, tensor(0)), made)
    assert terms.loss.item() == pytest.approx(0.005)


def test_logprobs_are_taken_under_the_sampling_temperature() -> None:
    found = token_logprobs(torch.tensor([[2.0, 0.0]], dtype=F64), torch.tensor([0]), temperature=2.0)
    assert found.item() == pytest.approx(1.0 - math.log(math.e + 1.0))


# ---------------------------------------------------------------- rows


def test_every_name_of_the_configuration_has_a_row_and_no_other_does() -> None:
    assert set(get_args(AlgorithmSection.model_fields["name"].annotation)) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_batch_advantages_wait_and_group_advantages_stream(name: str) -> None:
    row = ROWS[name]
    assert row.streaming == ("barrier" if row.scope == "batch" else "exact")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", 3.0),
        ("dr_grpo", 30.0),
        ("dapo", 12.0),
        ("rloo", 3.0),
        ("reinforce++", 12.0),
        ("gspo", 3.0),
        ("cispo", 12.0),
    ],
)
def test_denominators(name: str, expected: float) -> None:
    """3 samples of 12 tokens, at most 10 each."""
    assert denominator(recipe(name), DenominatorShare(3, 12)) == expected


def test_a_row_s_defaults_hold_where_the_run_is_silent() -> None:
    assert (recipe("dapo").clip_low, recipe("dapo").clip_high) == (0.2, 0.28)
    assert (recipe("dapo", clip_high=0.5).clip_high, recipe("dr_grpo").scale, recipe("grpo").scale) == (
        0.5,
        False,
        True,
    )
    assert recipe("grpo", aggregation="token").aggregation == "token"
    assert (recipe("reinforce++").kl_estimator, recipe("grpo").kl_estimator) == ("k2", "k3")


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("rloo", {"scale_by_std": True}, "rloo does not divide"),
        ("gspo", {"aggregation": "token"}, "the ratio of gspo is the sequence's"),
        ("grpo", {"kl_coef": 0.1, "kl_reference": "proximal"}, "that KL is zero"),
        ("dapo", {"on_length": "overlong-shape"}, "overlong_buffer_tokens = 0"),
        (
            "dapo",
            {"on_length": "overlong-shape", "overlong_buffer_tokens": 10},
            "between 0 and sampling.max_tokens = 10",
        ),
    ],
)
def test_what_a_row_does_not_admit_is_refused_by_name(name: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        recipe(name, **settings)

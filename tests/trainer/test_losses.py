from __future__ import annotations

import math

import pytest
import torch

from trainer import losses
from trainer.advantages import group_normalised

F64 = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=F64)


def test_advantages_are_normalised_by_the_sample_deviation() -> None:
    found = group_normalised(torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=F64), torch.ones(4, dtype=torch.bool), scale_by_std=True)
    assert found.informative
    assert found.values.tolist() == pytest.approx([0.8660254037844386, -0.8660254037844386, -0.8660254037844386, 0.8660254037844386])


def test_without_scaling_advantages_are_centred_rewards() -> None:
    found = group_normalised(torch.tensor([3.0, 1.0], dtype=F64), torch.ones(2, dtype=torch.bool), scale_by_std=False)
    assert found.values.tolist() == [1.0, -1.0]


def test_a_masked_sample_neither_counts_nor_gets_an_advantage() -> None:
    usable = torch.tensor([True, False, True])
    found = group_normalised(torch.tensor([1.0, 99.0, 0.0], dtype=F64), usable, scale_by_std=False)
    assert found.values.tolist() == [0.5, 0.0, -0.5]


@pytest.mark.parametrize(
    ("rewards", "usable", "why"), [([1.0, 1.0], [True, True], "zero variance"), ([1.0, 0.0], [True, False], "1 usable")]
)
def test_a_group_that_compares_nothing_is_flagged_with_the_reason(rewards: list[float], usable: list[bool], why: str) -> None:
    found = group_normalised(torch.tensor(rewards, dtype=F64), torch.tensor(usable), scale_by_std=True)
    assert not found.informative
    assert why in found.reason
    assert found.values.tolist() == [0.0, 0.0]


def test_logprobs_are_taken_under_the_sampling_temperature() -> None:
    logits = torch.tensor([[[2.0, 0.0]]], dtype=F64)
    found = losses.token_logprobs(logits, torch.tensor([[0]]), temperature=2.0)
    assert found.item() == pytest.approx(1.0 - math.log(math.e + 1.0))


def test_the_ratio_is_current_over_proximal_and_the_weight_proximal_over_behaviour() -> None:
    """Hand-computed: token 1 ratio 1.1 (free), weight e^.2; token 2 ratio 1.5 clipped at 1.2, weight truncated at 2; token 3 masked."""
    current = tensor(math.log(1.1), math.log(1.5), 0.0).requires_grad_()
    proximal, behaviour = tensor(0.0, 0.0, 0.0), tensor(-0.2, -5.0, -1.0)
    terms = losses.policy_loss(
        current, proximal, behaviour, torch.tensor([2.0], dtype=F64), tensor(1, 1, 0), clip_low=0.2, clip_high=0.2, importance_cap=2.0
    )
    assert terms.loss.item() == pytest.approx(-(math.exp(0.2) * 1.1 * 2.0 + 2.0 * 1.2 * 2.0))
    assert terms.clipped.tolist() == [1.0]
    assert terms.truncated.tolist() == [1.0]
    terms.loss.backward()
    assert current.grad is not None
    assert current.grad[0].tolist() == pytest.approx([-math.exp(0.2) * 1.1 * 2.0, 0.0, 0.0])


def test_rounding_of_the_engine_alone_never_clips() -> None:
    """current = proximal far from behaviour: the gradient is kept, weighted, not dropped."""
    current = tensor(-1.0).requires_grad_()
    terms = losses.policy_loss(
        current, current.detach(), tensor(-2.0), torch.tensor([1.0], dtype=F64), tensor(1), clip_low=0.2, clip_high=0.2, importance_cap=5.0
    )
    terms.loss.backward()
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(-math.e)


def test_a_negative_advantage_clips_on_the_other_side() -> None:
    loss, clipped = losses.ppo_clip(tensor(math.log(0.5), math.log(1.5)), tensor(0.0, 0.0), torch.tensor([[-1.0]], dtype=F64), 0.2, 0.2)
    assert loss.tolist()[0] == pytest.approx([0.8, 1.5])
    assert clipped.tolist() == [[True, False]]


def test_kl_is_k3_and_needs_a_reference() -> None:
    assert losses.kl_k3(tensor(-1.0), tensor(-2.0)).item() == pytest.approx(math.exp(-1) + 1 - 1)
    one = torch.tensor([1.0], dtype=F64)
    terms = losses.policy_loss(
        tensor(-1.0), tensor(-1.0), tensor(-1.0), one, tensor(1),
        clip_low=0.2, clip_high=0.2, importance_cap=2.0, kl_coef=0.5, reference=tensor(-2.0),
    )  # fmt: skip
    assert terms.loss.item() == pytest.approx(-1.0 + 0.5 * math.exp(-1))
    with pytest.raises(ValueError, match="reference"):
        losses.policy_loss(
            tensor(-1.0), tensor(-1.0), tensor(-1.0), one, tensor(1), clip_low=0.2, clip_high=0.2, importance_cap=2.0, kl_coef=0.5
        )

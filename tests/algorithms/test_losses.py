import math

import pytest
import torch

from strop.algorithms.losses import grpo_token_loss, k3_token_kl, policy_gradient_token_loss, ratio_statistics

ONE = torch.ones(1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, +1.0, -1.0),  # on policy: minus the advantage
        (2.0, +1.0, -1.28),  # good, already past 1 + clip_high: no further gain
        (0.5, +1.0, -0.5),  # good, made less likely: never clipped
        (0.5, -1.0, +0.8),  # bad, already below 1 - clip_low: no further gain
        (2.0, -1.0, +2.0),  # bad, yet made likelier: never clipped
    ],
)
def test_grpo_clips_only_in_the_direction_of_improvement(ratio, advantage, expected):
    policy = torch.tensor([math.log(ratio)])
    loss = grpo_token_loss(policy, torch.zeros(1), torch.tensor([advantage]), ONE, clip_low=0.2, clip_high=0.28)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(1.5, 2.0, 0.0), (1.2, 2.0, -2.4), (0.7, -2.0, 0.0)])
def test_a_clipped_token_has_no_gradient_and_any_other_has_ratio_times_advantage(ratio, advantage, expected):
    policy = torch.tensor([math.log(ratio)], requires_grad=True)
    grpo_token_loss(policy, torch.zeros(1), torch.tensor([advantage]), ONE, clip_low=0.2, clip_high=0.28).sum().backward()
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss_name", ["grpo", "policy_gradient", "k3"])
def test_law_2_masked_tokens_have_zero_loss_and_zero_gradient_whatever_they_hold(loss_name):
    mask = torch.tensor([True, False, False])
    policy = torch.tensor([-1.0, math.nan, 500.0], requires_grad=True)
    other = torch.tensor([-1.1, math.inf, -500.0])
    advantages = torch.tensor([1.0, math.nan, math.inf])
    losses = {
        "grpo": lambda: grpo_token_loss(policy, other, advantages, mask),
        "policy_gradient": lambda: policy_gradient_token_loss(policy, advantages, mask),
        "k3": lambda: k3_token_kl(policy, other, mask),
    }
    loss = losses[loss_name]()
    loss.sum().backward()
    assert policy.grad is not None
    assert loss.detach()[1:].tolist() == [0.0, 0.0]
    assert policy.grad[1:].tolist() == [0.0, 0.0]
    assert policy.grad[0].item() != 0.0


def test_policy_gradient_loss_is_minus_advantage_times_logprob():
    logprobs, advantages = torch.tensor([-0.5, -2.0]), torch.tensor([3.0, -1.0])
    assert policy_gradient_token_loss(logprobs, advantages, torch.tensor([True, True])).tolist() == [1.5, -2.0]


def test_k3_of_a_reference_twice_as_likely_is_one_minus_log_two():
    kl = k3_token_kl(torch.tensor([-1.0]), torch.tensor([-1.0 + math.log(2)]), ONE)
    assert kl.item() == pytest.approx(2 - math.log(2) - 1, abs=1e-6)


def test_clip_fractions_count_the_tokens_whose_gradient_was_taken_away():
    policy = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    mask = torch.tensor([True, True, True, True, False])
    sampled = torch.full((5,), 0.25)
    figures = ratio_statistics(policy, torch.zeros(5), sampled, advantages, mask, clip_low=0.2, clip_high=0.28)
    assert figures["clip_fraction_high"].tolist() == [1, 0, 0, 0, 0]
    assert figures["clip_fraction_low"].tolist() == [0, 0, 0, 1, 0]
    assert figures["ratio"].tolist() == pytest.approx([1.5, 1.5, 0.5, 0.5, 0.0])
    assert figures["sampler_gap_nats"].tolist() == [0.25, 0.25, 0.25, 0.25, 0.0]

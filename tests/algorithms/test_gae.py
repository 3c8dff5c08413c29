import math

import pytest
import torch

from strop.algorithms.ppo import generalized_advantages, penalized_rewards, value_token_loss

# Prompt, two trained tokens, an observation, one trained token, padding.
MASK = torch.tensor([[False, True, True, False, True, False]])
VALUES = torch.tensor([[9.0, 0.5, 0.25, 9.0, 1.0, 9.0]])
REWARDS = torch.tensor([[9.0, 0.1, -0.2, 9.0, 2.0, 9.0]])


def test_with_lambda_one_the_advantage_is_the_rewards_to_come_less_the_value():
    advantages, returns = generalized_advantages(REWARDS, VALUES, MASK)
    # To come: 1.9, 1.8 and 2.0.
    assert advantages[0].tolist() == pytest.approx([0, 1.4, 1.55, 0, 1.0, 0], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0, 1.9, 1.8, 0, 2.0, 0], abs=1e-6)


def test_with_lambda_zero_it_is_the_error_of_one_step_over_the_observation():
    advantages, _ = generalized_advantages(REWARDS, VALUES, MASK, gamma=0.5, lam=0.0)
    # 0.1 + 0.5 * 0.25 - 0.5; -0.2 + 0.5 * 1.0 - 0.25; 2.0 - 1.0
    assert advantages[0].tolist() == pytest.approx([0, -0.275, 0.05, 0, 1.0, 0], abs=1e-6)


def test_gamma_and_lambda_discount_the_errors_that_follow():
    advantages, returns = generalized_advantages(REWARDS, VALUES, MASK, gamma=0.5, lam=0.8)
    # Errors -0.275, 0.05 and 1.0 as above; γλ = 0.4: 0.05 + 0.4 * 1.0 = 0.45; -0.275 + 0.4 * 0.45 = -0.095.
    assert advantages[0].tolist() == pytest.approx([0, -0.095, 0.45, 0, 1.0, 0], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0, 0.405, 0.7, 0, 2.0, 0], abs=1e-6)


def test_the_kl_penalty_stands_at_every_trained_token_and_the_reward_at_the_last():
    policy = torch.tensor([[0.0, -1.0, -2.0, 0.0, -0.5, 0.0], [0.0] * 6])
    reference = torch.tensor([[0.0, -1.5, -1.0, 0.0, -0.5, 0.0], [0.0] * 6])
    mask = torch.cat([MASK, torch.zeros_like(MASK)])
    rewards = penalized_rewards(torch.tensor([1.0, 7.0]), policy, reference, mask, kl_coefficient=0.1)
    # -0.1 * 0.5; -0.1 * -1; 0 + 1. The second row has no token to hold its reward.
    assert rewards[0].tolist() == pytest.approx([0, -0.05, 0.1, 0, 1.0, 0], abs=1e-6)
    assert rewards[1].tolist() == [0.0] * 6


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        (1.5, 0.125, -0.5),  # (1.5 - 2)² / 2, within 0.6 of the old value 1
        (1.9, 0.08, 0.0),  # held at 1.6: (1.6 - 2)² / 2, no gradient
        (0.2, 1.62, -1.8),  # moved away from the return: the larger error, unclipped
        (3.0, 0.5, 1.0),  # past the return: the larger error is that of 3.0
    ],
)
def test_moving_a_value_further_than_the_clip_gains_nothing(value, loss, gradient):
    values = torch.tensor([value], requires_grad=True)
    mask = torch.tensor([True])
    found = value_token_loss(values, torch.tensor([1.0]), torch.tensor([2.0]), mask, value_clip=0.6)
    found.sum().backward()
    assert (found.item(), values.grad.item()) == pytest.approx((loss, gradient), abs=1e-6)


def test_without_a_value_clip_the_loss_is_half_the_squared_error():
    mask = torch.tensor([True])
    assert value_token_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), mask).item() == 2.0


def test_masked_positions_change_nothing_whatever_they_hold():
    hidden = ~MASK
    dirty = {"rewards": REWARDS.masked_fill(hidden, math.nan), "values": VALUES.masked_fill(hidden, math.inf)}
    clean_result = generalized_advantages(REWARDS, VALUES, MASK, gamma=0.9, lam=0.7)
    dirty_result = generalized_advantages(dirty["rewards"], dirty["values"], MASK, gamma=0.9, lam=0.7)
    assert torch.equal(clean_result[0], dirty_result[0])
    assert torch.equal(clean_result[1], dirty_result[1])
    values = dirty["values"].requires_grad_()
    value_token_loss(values, dirty["rewards"], dirty["rewards"], MASK, value_clip=0.1).sum().backward()
    assert values.grad[hidden].tolist() == [0.0] * 3
    assert values.grad.isfinite().all()
    penalties = penalized_rewards(torch.ones(1), dirty["values"].detach(), dirty["rewards"], MASK, kl_coefficient=0.1)
    assert penalties.isfinite().all()

import math

import pytest
import torch

from strop.algorithms.losses import KLEstimator
from strop.algorithms.method import Column, LossInputs, RewardedRows, ValueInputs
from strop.algorithms.ppo import PPO, explained_variance
from strop.errors import ConfigError

# Prompt, two trained tokens, an observation, one trained token, padding; then a row of a prompt and one token.
MASK = torch.tensor([[False, True, True, False, True, False], [False, True, False, False, False, False]])
OLD = torch.tensor([[0.0, -1.0, -2.0, 0.0, -0.5, 0.0], [0.0, -1.0, 0.0, 0.0, 0.0, 0.0]])
REFERENCE = torch.tensor([[0.0, -1.5, -1.0, 0.0, -0.5, 0.0], [0.0, -3.0, 0.0, 0.0, 0.0, 0.0]])
VALUES = torch.tensor([[0.0, 0.5, 0.25, 0.0, 0.75, 0.0], [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]])


def rows_of(rewards=(1.0, 0.0), mask=MASK, **columns):
    columns = {Column.OLD_LOGPROBS: OLD, Column.REFERENCE_LOGPROBS: REFERENCE, Column.VALUES: VALUES} | columns
    return RewardedRows(rewards=torch.tensor(rewards), loss_mask=mask, columns=columns)


def test_advantages_are_the_reward_less_its_kl_penalty_and_less_what_was_expected():
    [estimate] = PPO(kl_coefficient=0.1).token_advantages([rows_of()])
    # Penalties -0.1 * 0.5, -0.1 * -1, -0.1 * 0, and -0.1 * 2: to come are 1.05, 1.1, 1.0 and -0.2.
    assert estimate.returns[0].tolist() == pytest.approx([0, 1.05, 1.1, 0, 1.0, 0], abs=1e-6)
    assert estimate.returns[1].tolist() == pytest.approx([0, -0.2, 0, 0, 0, 0], abs=1e-6)
    assert estimate.advantages[0].tolist() == pytest.approx([0, 0.55, 0.85, 0, 0.25, 0], abs=1e-6)
    assert estimate.advantages[1].tolist() == pytest.approx([0, -0.7, 0, 0, 0, 0], abs=1e-6)


def test_gamma_and_lambda_reach_the_estimate():
    [estimate] = PPO(gamma=0.5, lam=0.5).token_advantages([rows_of()])
    # Errors: 0.5 * 0.25 - 0.5 = -0.375; 0.5 * 0.75 - 0.25 = 0.125; 1 - 0.75 = 0.25. With γλ = 0.25:
    # 0.25; 0.125 + 0.0625 = 0.1875; -0.375 + 0.046875 = -0.328125.
    assert estimate.advantages[0].tolist() == pytest.approx([0, -0.328125, 0.1875, 0, 0.25, 0], abs=1e-6)


@pytest.mark.parametrize("settings", [{}, {"kl_coefficient": 0.1}, {"gamma": 0.9, "lam": 0.8}])
def test_masked_positions_and_padding_change_no_estimate_whatever_they_hold(settings):
    method = PPO(**settings)
    [clean] = method.token_advantages([rows_of()])
    dirty = {
        column: torch.cat([tensor.masked_fill(~MASK, math.nan), torch.full((2, 3), math.inf)], 1)
        for column, tensor in rows_of().columns.items()
    }
    wider = torch.cat([MASK, torch.zeros(2, 3, dtype=torch.bool)], 1)
    [found] = method.token_advantages([RewardedRows(rewards=torch.tensor([1.0, 0.0]), loss_mask=wider, columns=dirty)])
    assert torch.equal(found.advantages[:, :6], clean.advantages)
    assert torch.equal(found.returns[:, :6], clean.returns)
    assert not found.advantages[:, 6:].any()


def test_the_kl_coefficient_is_no_part_of_the_loss():
    inputs = LossInputs(
        loss_mask=MASK,
        advantages=MASK.float(),
        sampled_logprobs=OLD,
        entropies=torch.zeros_like(OLD),
        columns=rows_of().columns,
    )
    with_kl, without = (PPO(kl_coefficient=beta).token_loss(OLD + 0.1, inputs) for beta in (0.5, 0.0))
    assert torch.equal(with_kl, without)
    assert with_kl[1, 1].item() == pytest.approx(-math.exp(0.1), abs=1e-6)
    assert PPO(kl_coefficient=0.5).token_statistics(OLD, inputs)["reference_kl_nats"].any()


def test_the_gain_stops_at_both_ends_of_a_symmetric_clip():
    columns = {Column.OLD_LOGPROBS: torch.zeros(1, 2)}
    mask, advantages = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
    inputs = LossInputs(
        loss_mask=mask, advantages=advantages, sampled_logprobs=torch.zeros(1, 2), entropies=torch.zeros(1, 2), columns=columns
    )
    loss = PPO().token_loss(torch.tensor([[math.log(1.5), math.log(0.5)]]), inputs)
    assert loss[0].tolist() == pytest.approx([-1.2, 0.8], abs=1e-6)


def test_the_share_of_clipped_values_counts_those_without_gradient():
    mask = torch.tensor([[True, True, True, False]])
    inputs = ValueInputs(loss_mask=mask, old_values=torch.ones(1, 4), returns=torch.full((1, 4), 2.0))
    values = torch.tensor([[1.9, 0.2, 1.5, 1.9]], requires_grad=True)  # past the clip; away from the return; within the clip
    method = PPO(value_clip=0.6)
    method.value_loss(values, inputs).sum().backward()
    clipped = method.value_statistics(values.detach(), inputs)["clip_fraction"]
    assert clipped.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert (values.grad == 0).tolist() == [[True, False, False, True]]


def test_without_a_penalty_no_reference_is_needed():
    assert PPO().needs == {Column.OLD_LOGPROBS, Column.VALUES}
    assert PPO().estimates_need == {Column.VALUES}
    assert PPO(kl_coefficient=0.01).needs == {Column.OLD_LOGPROBS, Column.VALUES, Column.REFERENCE_LOGPROBS}
    assert PPO(kl_coefficient=0.01).estimates_need == PPO(kl_coefficient=0.01).needs
    [estimate] = PPO().token_advantages([RewardedRows(rewards=torch.ones(2), loss_mask=MASK, columns={Column.VALUES: VALUES})])
    assert estimate.returns[0].tolist() == [0, 1, 1, 0, 1, 0]


def test_a_tied_group_and_a_group_of_one_are_learnt_from(make_group):
    tied = PPO().select(make_group([1.0, 1.0]), group_size=2, seed=0)
    assert len(tied.kept) == 2
    assert PPO().num_rollouts(1) == 1
    alone = PPO().select(make_group([0.5]), group_size=1, seed=0)
    assert [of_tokens.unique().tolist() for of_tokens in PPO().advantages([alone])[0]] == [[0.5]]
    void = PPO().select(make_group([]), group_size=1, seed=0)
    assert (void.kept, PPO().advantages([void])) == ((), [[]])


def test_a_setting_of_a_kl_in_the_loss_is_refused():
    with pytest.raises(ConfigError, match="in the reward"):
        PPO(kl_coefficient=0.1, kl_estimator=KLEstimator.K2)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant():
    returns = torch.tensor([0.0, 1.0, 1.0, 2.0])
    assert explained_variance(returns + 5.0, returns) == pytest.approx(1.0, abs=1e-6)  # a shift is no lack of explanation
    assert explained_variance(torch.zeros(4), returns) == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(torch.tensor([0.0, 1.0, 1.0, 1.0]), returns) == pytest.approx(1 - 0.1875 / 0.5, abs=1e-6)
    assert math.isnan(explained_variance(returns, torch.ones(4)))

import pytest
import torch

from strop.algorithms import GRPO, Column, LossInputs
from strop.errors import ConfigError


def test_grpo_keeps_every_rollout_and_gives_each_token_of_it_one_advantage(make_group):
    method = GRPO(eps=0.0)
    selection = method.select(make_group([1, 0, 0, 0]), group_size=4, seed=0)
    [advantages] = method.advantages([selection])
    assert [decision.is_kept for decision in selection.decisions] == [True] * 4
    assert [of_tokens.tolist() for of_tokens in advantages] == [[1.5] * 5] + [[-0.5] * 5] * 3  # 1 prompt id, 2 turns of 2


def test_without_std_it_is_dr_grpo(make_group):
    method = GRPO(normalize_std=False)
    [advantages] = method.advantages([method.select(make_group([1, 0, 0, 0]), group_size=4, seed=0)])
    assert [of_tokens[0].item() for of_tokens in advantages] == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(("reward", "side"), [(0.0, "wrong"), (1.0, "right")])
def test_a_tied_group_is_kept_unless_ties_are_dropped(make_group, reward, side):
    tied = make_group([reward] * 4)
    assert len(GRPO().select(tied, group_size=4, seed=0).kept) == 4
    dropped = GRPO(drop_tied=True).select(tied, group_size=4, seed=0)
    assert dropped.kept == ()
    assert {decision.reason for decision in dropped.decisions} == {f"dropped: tied group, all {side} (reward {reward:g})"}


def test_voids_leave_a_smaller_group_and_no_group_at_all_below_two(make_group):
    assert len(GRPO().select(make_group([1, 0, 0]), group_size=4, seed=0).kept) == 3
    dropped = GRPO().select(make_group([1]), group_size=4, seed=0)
    assert dropped.kept == ()
    assert "only 1 of 4 rollouts were not voided" in dropped.decisions[0].reason


def test_a_group_of_one_must_be_asked_for(make_group):
    with pytest.raises(ConfigError, match="allow_group_of_one"):
        GRPO().num_rollouts(1)
    method = GRPO(allow_group_of_one=True)
    [advantages] = method.advantages([method.select(make_group([0.25]), group_size=1, seed=0)])
    assert advantages[0].tolist() == [0.25] * 5


def test_the_reference_is_needed_only_where_kl_is_paid_for():
    assert GRPO().needs == {Column.OLD_LOGPROBS}
    assert GRPO(kl_coefficient=0.001).needs == {Column.OLD_LOGPROBS, Column.REFERENCE_LOGPROBS}


def test_kl_is_added_to_the_loss_of_the_token():
    policy = torch.tensor([-1.0])
    columns = {Column.OLD_LOGPROBS: policy, Column.REFERENCE_LOGPROBS: policy + torch.tensor(2.0).log()}
    mask = torch.ones(1, dtype=torch.bool)
    inputs = LossInputs(loss_mask=mask, advantages=torch.ones(1), sampled_logprobs=policy, columns=columns)
    # -1 (on policy, A = 1) + 0.5 * (2 - ln 2 - 1)
    assert GRPO(kl_coefficient=0.5).token_loss(policy, inputs).item() == pytest.approx(-1 + 0.5 * 0.306853, abs=1e-6)

from dataclasses import replace

import pytest

from strop.algorithms.grpo import GRPO, Advantage
from strop.config import validate
from strop.errors import ConfigError


def test_grpo_keeps_every_rollout_and_gives_each_token_of_it_one_advantage(make_group):
    method = GRPO(eps=0.0)
    selection = method.select(make_group([1, 0, 0, 0]), group_size=4, seed=0)
    [advantages] = method.advantages([selection])
    assert [decision.is_kept for decision in selection.decisions] == [True] * 4
    assert [of_tokens.tolist() for of_tokens in advantages] == [[1.5] * 5] + [[-0.5] * 5] * 3  # 1 prompt id, 2 turns of 2


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("group_normalized", [[1.5, -0.5, -0.5, -0.5], [-0.5, 1.5, -0.5, -0.5]]),
        ("mean_centered", [[0.75, -0.25, -0.25, -0.25], [-0.75, 2.25, -0.75, -0.75]]),  # Dr. GRPO
        ("leave_one_out", [[1, -1 / 3, -1 / 3, -1 / 3], [-1, 3, -1, -1]]),  # RLOO
        ("none", [[1, 0, 0, 0], [0, 3, 0, 0]]),
        # Mean 1/2; squares 1/4 + 25/4 + 6/4 = 8 over 7: std 1.0690450
        (
            "batch_normalized",
            [[0.4677072, -0.4677072, -0.4677072, -0.4677072], [-0.4677072, 2.3385359, -0.4677072, -0.4677072]],
        ),
        # REINFORCE++-baseline: of the centred ones, mean 0; squares 3/4 + 27/4 = 7.5 over 7: std 1.0350983
        (
            "group_centered_batch_normalized",
            [[0.7245688, -0.2415229, -0.2415229, -0.2415229], [-0.7245688, 2.1737065, -0.7245688, -0.7245688]],
        ),
        # TRL's scale_rewards = "batch": of the centred ones over 1.0690450, the std of all rewards
        (
            "group_centered_batch_scaled",
            [[0.7015607, -0.2338536, -0.2338536, -0.2338536], [-0.7015607, 2.1046821, -0.7015607, -0.7015607]],
        ),
    ],
)
def test_the_advantage_of_a_trajectory_is_a_setting(make_group, advantage, expected):
    method = GRPO(advantage=Advantage(advantage), eps=0.0)
    selections = [method.select(make_group(rewards), group_size=4, seed=0) for rewards in ([1, 0, 0, 0], [0, 3, 0, 0])]
    advantages = method.advantages(selections)
    for of_group, expected_of_group in zip(advantages, expected, strict=True):
        assert [of_tokens[0].item() for of_tokens in of_group] == pytest.approx(expected_of_group, abs=1e-6)


@pytest.mark.parametrize("advantage", ["none", "batch_normalized"])
def test_a_rollout_that_is_not_compared_with_its_group_needs_no_other(make_group, advantage):
    method = GRPO(advantage=Advantage(advantage), eps=0.0)
    assert method.num_rollouts(1) == 1
    assert len(method.select(make_group([1]), group_size=4, seed=0).kept) == 1  # the others were voided


@pytest.mark.parametrize(("reward", "side"), [(0.0, "wrong"), (1.0, "right")])
def test_a_tied_group_is_kept_unless_ties_are_dropped(make_group, reward, side):
    tied = make_group([reward] * 4)
    assert len(GRPO().select(tied, group_size=4, seed=0).kept) == 4
    dropped = GRPO(drop_tied=True).select(tied, group_size=4, seed=0)
    assert dropped.kept == ()
    assert {decision.reason for decision in dropped.decisions} == {f"dropped: tied group, all {side} (reward {reward:g})"}


def judged(group, parts):
    """The group, with these values of the part `accuracy`."""
    scored = zip(group.trajectories, parts, strict=True)
    return replace(group, trajectories=tuple(replace(each, reward_parts={"accuracy": value}) for each, value in scored))


@pytest.mark.parametrize(
    ("rewards", "parts", "by_reward", "by_accuracy"),
    [
        ([2.0, 1.5, 2.0, 1.0], [1, 1, 1, 1], 4, "all right (accuracy 1)"),  # some were penalised for their length
        ([0.0, -0.5, 0.0, -1.0], [0, 0, 0, 0], 4, "all wrong (accuracy 0)"),
        ([1.0, 0.0, 1.0, 0.0], [1, 0, 1, 0], 4, None),
        ([0.5, 0.5, 0.5, 0.5], [1, 0, 1, 0], 0, None),  # a penalty of one makes up for the answer of the other
    ],
)
def test_a_tie_is_judged_by_the_reward_or_by_the_part_that_says_what_is_right(
    make_group, rewards, parts, by_reward, by_accuracy
):
    group = judged(make_group(rewards), parts)
    assert len(GRPO(drop_tied=True).select(group, group_size=4, seed=0).kept) == by_reward
    selection = GRPO(drop_tied=True, tied_by="accuracy").select(group, group_size=4, seed=0)
    assert len(selection.kept) == (4 if by_accuracy is None else 0)
    if by_accuracy is not None:
        assert {decision.reason for decision in selection.decisions} == {f"dropped: tied group, {by_accuracy}"}


def test_a_task_that_the_part_is_not_for_is_tied_by_its_reward(make_group):
    method = GRPO(drop_tied=True, tied_by="accuracy")
    assert len(method.select(make_group([0.2, 0.4]), group_size=2, seed=0).kept) == 2
    tied = method.select(make_group([0.2, 0.2]), group_size=2, seed=0)
    assert tied.decisions[0].reason == "dropped: tied group, all right (reward 0.2)"


def test_saying_what_ties_a_group_without_leaving_ties_out_is_refused():
    with pytest.raises(ConfigError, match=r"tied_by is 'accuracy'.*Set drop_tied = true"):
        validate(GRPO.Config, {"tied_by": "accuracy"}, place="recipe")


def test_voids_leave_a_smaller_group_and_no_group_at_all_below_two(make_group):
    assert len(GRPO().select(make_group([1, 0, 0]), group_size=4, seed=0).kept) == 3
    dropped = GRPO().select(make_group([1]), group_size=4, seed=0)
    assert dropped.kept == ()
    assert "only 1 of 4 rollouts are left" in dropped.decisions[0].reason


def test_a_group_of_one_must_be_asked_for(make_group):
    with pytest.raises(ConfigError, match='advantage = "none"'):
        GRPO().num_rollouts(1)
    method = GRPO(advantage="none")
    [advantages] = method.advantages([method.select(make_group([0.25]), group_size=1, seed=0)])
    assert advantages[0].tolist() == [0.25] * 5

import math

import pytest

from strop.algorithms.grpo import (
    batch_normalized_advantages,
    group_centered_batch_normalized_advantages,
    group_centered_batch_scaled_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
    mean_centered_advantages,
    tree_advantages,
)


def test_group_advantages_divide_by_the_unbiased_std_of_the_group():
    # Mean 0.25; squared deviations 0.5625 + 3 * 0.0625 = 0.75, over 3: std 0.5.
    assert group_normalized_advantages([1.0, 0.0, 0.0, 0.0], eps=0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-12)


def test_eps_is_added_to_the_std():
    # Mean 0.5, std sqrt(2 * 0.25 / 1) = 0.70711; 0.5 / (0.70711 + 0.29289) = 0.5.
    eps = 1.0 - math.sqrt(0.5)
    assert group_normalized_advantages([1.0, 0.0], eps=eps) == pytest.approx([0.5, -0.5], abs=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7, 0.1, -1 / 3])
def test_equal_rewards_give_exact_zeros_fractional_ones_too(reward):
    assert group_normalized_advantages([reward] * 16, eps=1e-6) == [0.0] * 16
    assert mean_centered_advantages([reward] * 16) == [0.0] * 16
    assert leave_one_out_advantages([reward] * 16) == [0.0] * 16
    for advantages in (
        batch_normalized_advantages,
        group_centered_batch_normalized_advantages,
        group_centered_batch_scaled_advantages,
    ):
        assert advantages([[reward] * 9, [reward] * 7], eps=1e-6) == [[0.0] * 9, [0.0] * 7]
        assert advantages([[], []], eps=1e-6) == [[], []]


def test_mean_centered_advantages_keep_the_size_of_the_rewards():
    assert mean_centered_advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_leave_one_out_advantages_compare_with_the_mean_of_the_others():
    # 1 - (0 + 0.5) / 2; 0 - (1 + 0.5) / 2; 0.5 - (1 + 0) / 2
    assert leave_one_out_advantages([1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0], abs=1e-12)


def test_tree_advantages_add_what_a_rollout_is_worth_in_its_tree_and_in_its_group():
    # Group: mean 0.4, std 0.5477226, so +1.0954451 and -0.7302967. Trees of 1 and 0: +-0.7071068; of one: 0.
    found = tree_advantages([[1.0, 0.0, 1.0, 0.0, 0.0], [], [1.0, 0.0]], [[0, 0, 1, 1, 4], [], [0, 1]], eps=0.0)
    assert found[0] == pytest.approx([1.8025519, -1.4374035, 1.8025519, -1.4374035, -0.7302967], abs=1e-6)
    assert found[1] == []
    assert found[2] == pytest.approx([0.7071068, -0.7071068], abs=1e-6)  # without branches it is GRPO's
    three = tree_advantages([[1.0, 0.0, 0.0, 1.0]], [[2, 2, 2, 3]], eps=0.0)  # mean 1/3 and std 0.5773503 in the tree
    assert three[0] == pytest.approx(
        [0.8660254 + 1.1547005, -0.8660254 - 0.5773503, -0.8660254 - 0.5773503, 0.8660254], abs=1e-6
    )


def test_tree_advantages_sum_to_zero_in_a_group_and_leave_a_tied_tree_to_the_group():
    rewards, trees = [1.0, 1.0, 0.3, 0.0, 0.7], [5, 5, 6, 6, 6]
    (found,) = tree_advantages([rewards], [trees], eps=1e-6)
    assert sum(found) == pytest.approx(0.0, abs=1e-9)
    assert found[:2] == group_normalized_advantages(rewards, eps=1e-6)[:2]


def test_batch_normalized_advantages_compare_across_groups():
    # All four: mean 0.25 and std 0.5, as in the group of four above. By group the first two would be +-0.707, the others 0.
    assert batch_normalized_advantages([[1.0, 0.0], [], [0.0, 0.0]], eps=0.0) == [
        pytest.approx([1.5, -0.5], abs=1e-12),
        [],
        pytest.approx([-0.5, -0.5], abs=1e-12),
    ]


def test_a_batch_of_one_or_of_none_has_nothing_to_learn():
    assert batch_normalized_advantages([[], [1.0]], eps=1e-6) == [[], [0.0]]
    assert batch_normalized_advantages([[]], eps=1e-6) == [[]]


@pytest.mark.parametrize(
    "advantages",
    [
        lambda rewards: group_normalized_advantages(rewards, eps=1e-6),
        mean_centered_advantages,
        leave_one_out_advantages,
        lambda rewards: group_centered_batch_normalized_advantages([rewards, [1.0, 0.0]], eps=1e-6),
        lambda rewards: group_centered_batch_scaled_advantages([rewards, [1.0, 0.0]], eps=1e-6),
    ],
)
def test_a_group_of_one_is_refused(advantages):
    with pytest.raises(ValueError, match="advantage = 'none'"):
        advantages([1.0])

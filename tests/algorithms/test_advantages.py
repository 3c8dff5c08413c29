import math

import pytest

from strop.algorithms.advantages import group_normalized_advantages, mean_centered_advantages


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


def test_mean_centered_advantages_keep_the_size_of_the_rewards():
    assert mean_centered_advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(
    "advantages", [lambda rewards: group_normalized_advantages(rewards, eps=1e-6), mean_centered_advantages]
)
def test_a_group_of_one_is_refused(advantages):
    with pytest.raises(ValueError, match="allow_group_of_one"):
        advantages([1.0])


def test_a_group_of_one_that_was_asked_for_is_its_own_advantage():
    assert group_normalized_advantages([0.3], eps=1e-6, allow_group_of_one=True) == [0.3]
    assert mean_centered_advantages([0.3], allow_group_of_one=True) == [0.0]

import math

import pytest
import torch

from strop.algorithms.losses import (
    RatioLevel,
    cispo_token_loss,
    clip_token_loss,
    no_clip_token_loss,
    policy_gradient_token_loss,
    probability_ratio,
)

ONE = torch.ones(1, dtype=torch.bool)


def clip_loss_and_gradient(ratio, advantage, *, dual_clip=None, keeps_gradient=False):
    """The loss of a token, and its derivative by the log-prob."""
    policy = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = clip_token_loss(
        probability_ratio(policy, torch.zeros(1), ONE),
        torch.tensor([advantage]),
        ONE,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
        kept_log_ratio=policy if keeps_gradient else None,
    )
    loss.sum().backward()
    return loss.item(), policy.grad.item()


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
    assert clip_loss_and_gradient(ratio, advantage)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(1.5, 2.0, 0.0), (1.2, 2.0, -2.4), (0.7, -2.0, 0.0)])
def test_a_clipped_token_has_no_gradient_and_any_other_has_ratio_times_advantage(ratio, advantage, expected):
    assert clip_loss_and_gradient(ratio, advantage)[1] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -1.0, 3.0, 0.0),  # bad and five times likelier: held at c = 3, no gradient
        (2.5, -1.0, 2.5, 2.5),  # below c: as without
        (0.5, -1.0, 0.8, 0.0),  # the ordinary clip still holds
        (5.0, +1.0, -1.28, 0.0),  # good tokens: as without
        (0.5, +1.0, -0.5, -0.5),
    ],
)
def test_the_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likelier(ratio, advantage, loss, gradient):
    assert clip_loss_and_gradient(ratio, advantage, dual_clip=3.0) == pytest.approx((loss, gradient), abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (2.0, +1.5, -1.92),  # F = 1 + clip_high: -1.28 * 1.5, where the plain clip has none
        (1.2, +1.5, -1.8),  # F = r within the range
        (0.5, +1.5, -0.75),  # and below it, for a good token
        (0.5, -1.5, 0.0),  # F = 0: a bad token that became unlikely
        (2.0, -1.5, 3.0),  # F = r: one that became likelier
    ],
)
def test_the_stop_gradient_clip_scales_gradients_as_aepo_says_and_has_the_loss_of_the_plain_clip(ratio, advantage, gradient):
    loss, found = clip_loss_and_gradient(ratio, advantage, keeps_gradient=True)
    assert found == pytest.approx(gradient, abs=1e-6)
    assert loss == pytest.approx(clip_loss_and_gradient(ratio, advantage)[0], abs=1e-6)


def test_the_stop_gradient_clip_keeps_the_dual_clip():
    assert clip_loss_and_gradient(5.0, -1.0, dual_clip=3.0, keeps_gradient=True) == pytest.approx((3.0, 0.0), abs=1e-6)


def test_a_ratio_that_overflows_keeps_its_gradient_under_the_stop_gradient_clip():
    policy, mask = torch.full((1, 1), FAR, requires_grad=True), torch.ones(1, 1, dtype=torch.bool)
    ratio = probability_ratio(policy, torch.zeros(1, 1), mask)
    loss = clip_token_loss(ratio, torch.ones(1, 1), mask, kept_log_ratio=policy)
    loss.sum().backward()
    assert (loss.item(), policy.grad.item()) == pytest.approx((-1.28, -1.28), abs=1e-6)


def test_a_lower_clip_of_more_than_one_never_binds():
    """DeepSeek-R1 with ε = 10."""
    ratio, advantages = torch.tensor([1e-6, 10.0, 12.0]), torch.tensor([-1.0, 1.0, 1.0])
    loss = clip_token_loss(ratio, advantages, torch.ones(3, dtype=torch.bool), clip_low=10, clip_high=10)
    assert loss.tolist() == pytest.approx([1e-6, -10.0, -11.0], abs=1e-6)


def test_without_clipping_the_loss_is_minus_ratio_times_advantage_and_so_is_its_gradient():
    policy = torch.tensor([3.0, 0.25]).log().requires_grad_()
    mask = torch.ones(2, dtype=torch.bool)
    loss = no_clip_token_loss(probability_ratio(policy, torch.zeros(2), mask), torch.tensor([2.0, -1.0]), mask)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-6.0, 0.25], abs=1e-6)
    assert policy.grad.tolist() == pytest.approx([-6.0, 0.25], abs=1e-6)


def test_cispo_weighs_every_tokens_gradient_by_its_clipped_ratio():
    policy = torch.tensor([2.0, 0.5, 1.1]).log().requires_grad_()
    old, advantages, mask = torch.zeros(3), torch.tensor([1.0, -1.0, 3.0]), torch.ones(3, dtype=torch.bool)
    ratio = probability_ratio(policy, old, mask)
    loss = cispo_token_loss(policy, ratio, advantages, mask, clip_low=0.2, clip_high=0.28)
    loss.sum().backward()
    # -weight * A * log π with weights 1.28, 0.8 and 1.1
    expected = [-1.28 * math.log(2), 0.8 * math.log(0.5), -3.3 * math.log(1.1)]
    assert loss.tolist() == pytest.approx(expected, abs=1e-6)
    assert policy.grad.tolist() == pytest.approx([-1.28, 0.8, -3.3], abs=1e-6)


def test_policy_gradient_loss_is_minus_advantage_times_logprob():
    logprobs, advantages = torch.tensor([-0.5, -2.0]), torch.tensor([3.0, -1.0])
    assert policy_gradient_token_loss(logprobs, advantages, torch.tensor([True, True])).tolist() == [1.5, -2.0]


FAR = 100.0  # nats; e^100 is infinite in float32


@pytest.mark.parametrize("level", list(RatioLevel))
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_token_without_advantage_costs_nothing_however_far_the_policy_has_moved(level, dual_clip):
    ratio = probability_ratio(torch.full((1, 2), FAR), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), level)
    assert ratio.isinf().all()
    ratio.requires_grad_()
    advantages, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for loss in (clip_token_loss(ratio, advantages, mask, dual_clip=dual_clip), no_clip_token_loss(ratio, advantages, mask)):
        loss.sum().backward()
        assert loss.tolist() == ratio.grad.tolist() == [[0.0, 0.0]]
        ratio.grad = None


@pytest.mark.parametrize("level", list(RatioLevel))
@pytest.mark.parametrize(
    ("advantage", "settings", "expected"),
    [
        (0.0, {}, 0.0),  # nothing to gain
        (1.0, {}, -1.28),  # clipped
        (-1.0, {"dual_clip": 3.0}, 3.0),  # clipped by the second clip
    ],
)
def test_a_ratio_that_overflows_has_no_gradient_where_nothing_depends_on_it(level, advantage, settings, expected):
    policy = torch.tensor([[FAR, FAR], [0.0, 0.0]], requires_grad=True)
    mask, advantages = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[advantage] * 2, [2.0, 2.0]])
    loss = clip_token_loss(probability_ratio(policy, torch.zeros(2, 2), mask, level), advantages, mask, **settings)
    loss.sum().backward()
    assert loss.tolist() == [pytest.approx([expected] * 2), [-2.0, -2.0]]
    learned = -4.0 if level is RatioLevel.SEQUENCE_SUM else -2.0  # of a product each of two tokens counts twice
    assert policy.grad.tolist() == [[0.0, 0.0], [learned] * 2]  # the other row learns

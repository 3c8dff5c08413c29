import logging
import math

import pytest
import torch

from strop.cs336 import (
    compute_group_normalized_rewards,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    grpo_microbatch_train_step,
)


def says(response, truth):
    """The reward is what the response says; the format is right where it is the truth."""
    return {"reward": float(response), "format_reward": float(response == truth), "answer_reward": 0.5}


def normalized(rewards, group_size, *, eps=0.0, by_std=True):
    responses = [str(reward) for reward in rewards]
    advantages, raw, metadata = compute_group_normalized_rewards(says, responses, ["1"] * len(rewards), group_size, eps, by_std)
    assert raw.tolist() == pytest.approx(rewards, abs=1e-6)
    assert advantages.shape == raw.shape == (len(rewards),)
    return advantages.tolist(), metadata


def test_advantages_compare_each_response_with_its_own_group_by_the_unbiased_std():
    # (1, 0): mean 1/2, std 1/√2. (1, 2): mean 3/2, the same std.
    advantages, _ = normalized([1, 0, 1, 2], 2)
    assert advantages == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(0.5)], abs=1e-6)
    # (0, 0, 1): mean 1/3, std √(1/3) = 1/√3.
    assert normalized([0, 0, 1], 3)[0] == pytest.approx([-1 / math.sqrt(3), -1 / math.sqrt(3), 2 / math.sqrt(3)], abs=1e-6)


def test_without_std_the_mean_alone_is_taken_away():
    assert normalized([1, 0, 0, 0, 3, 5, 3, 5], 4, by_std=False)[0] == pytest.approx(
        [0.75, -0.25, -0.25, -0.25, -1, 1, -1, 1], abs=1e-6
    )


def test_a_group_of_one_has_no_std_and_learns_nothing_from_its_mean(caplog):
    with pytest.raises(ValueError, match=r"group_size is 1.* Set normalize_by_std = False"):
        normalized([1, 0], 1)
    with caplog.at_level(logging.WARNING):
        assert normalized([1, 0], 1, by_std=False)[0] == [0.0, 0.0]
    assert "group of one" in caplog.text


def test_the_metadata_tells_of_the_rewards():
    assert normalized([1, 0, 0, 1], 2)[1] == pytest.approx(
        {
            "reward_mean": 0.5,
            "reward_std": math.sqrt(1 / 3),
            "reward_min": 0.0,
            "reward_max": 1.0,
            "format_reward_mean": 0.5,
            "answer_reward_mean": 0.5,
        },
        abs=1e-6,
    )


@pytest.mark.parametrize(("num_responses", "num_truths", "group_size"), [(2, 1, 2), (3, 3, 2), (0, 0, 2), (2, 2, 0)])
def test_responses_that_are_no_whole_groups_are_refused(num_responses, num_truths, group_size):
    with pytest.raises(ValueError, match=r"ground truths|whole number of groups"):
        compute_group_normalized_rewards(says, ["1"] * num_responses, ["1"] * num_truths, group_size, 1e-6, True)


def test_the_naive_loss_is_minus_advantage_times_log_prob():
    loss = compute_naive_policy_gradient_loss(torch.tensor([[2.0], [-0.5]]), torch.tensor([[-1.0, -3.0], [-4.0, 0.0]]))
    assert loss.tolist() == [[2.0, 6.0], [-2.0, 0.0]]


@pytest.mark.parametrize("shape", [(2,), (2, 2), (1, 2), ()])
def test_advantages_that_would_broadcast_over_tokens_are_refused(shape):
    log_probs = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"must be \(2, 1\)"):
        compute_naive_policy_gradient_loss(torch.ones(shape), log_probs)
    with pytest.raises(ValueError, match=r"must be \(2, 1\)"):
        compute_grpo_clip_loss(torch.ones(shape), log_probs, log_probs, 0.2)
    with pytest.raises(ValueError, match=r"must be \(2, 1\)"):
        compute_policy_gradient_loss(log_probs, "grpo_no_clip", advantages=torch.ones(shape), old_log_probs=log_probs)


CASES = [  # ratio, advantage, loss, is it clipped, loss without clipping
    (1.0, +1.0, -1.0, False, -1.0),
    (1.1, +1.0, -1.1, False, -1.1),
    (2.0, +1.0, -1.2, True, -2.0),  # good, already likelier by more than ε
    (0.5, +1.0, -0.5, False, -0.5),
    (0.5, -2.0, +1.6, True, +1.0),  # bad, already less likely by more than ε
    (2.0, -2.0, +4.0, False, +4.0),  # bad, yet made likelier: never clipped
    (2.0, 0.0, 0.0, False, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "is_clipped", "unclipped_loss"), CASES)
def test_grpo_clips_only_gains(ratio, advantage, loss, is_clipped, unclipped_loss):
    policy = torch.tensor([[math.log(ratio) - 3.0]], requires_grad=True)
    old = torch.tensor([[-3.0]], requires_grad=True)
    advantages = torch.tensor([[advantage]])
    token_loss, metadata = compute_grpo_clip_loss(advantages, policy, old, 0.2)
    assert token_loss.item() == pytest.approx(loss, abs=1e-6)
    assert metadata["is_clipped"].tolist() == [[is_clipped]]
    assert metadata["ratio"].item() == pytest.approx(ratio, abs=1e-6)
    token_loss.sum().backward()
    assert policy.grad.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage, abs=1e-6)
    assert old.grad is None
    free, _ = compute_policy_gradient_loss(policy, "grpo_no_clip", advantages=advantages, old_log_probs=old)
    assert free.item() == pytest.approx(unclipped_loss, abs=1e-6)


POLICY = torch.log(torch.tensor([[2.0, 1.0, 0.5], [0.5, 1.0, 1.0]]))
OLD = torch.zeros(2, 3)
COLUMN = torch.tensor([[1.0], [-1.0]])
ARGUMENTS = {
    "no_baseline": {"raw_rewards": COLUMN},
    "reinforce_with_baseline": {"advantages": COLUMN},
    "grpo_clip": {"advantages": COLUMN, "old_log_probs": OLD, "cliprange": 0.2},
    "grpo_no_clip": {"advantages": COLUMN, "old_log_probs": OLD},
}
LOG2 = math.log(2)
LOSSES = {
    "no_baseline": [[-LOG2, 0, LOG2], [-LOG2, 0, 0]],
    "reinforce_with_baseline": [[-LOG2, 0, LOG2], [-LOG2, 0, 0]],
    "grpo_clip": [[-1.2, -1, -0.5], [0.8, 1, 1]],
    "grpo_no_clip": [[-2, -1, -0.5], [0.5, 1, 1]],
}


@pytest.mark.parametrize("loss_type", ARGUMENTS)
def test_each_loss_is_known_by_its_name(loss_type):
    loss, metadata = compute_policy_gradient_loss(POLICY, loss_type, **ARGUMENTS[loss_type])
    for row, expected in zip(loss.tolist(), LOSSES[loss_type], strict=True):
        assert row == pytest.approx(expected, abs=1e-6)
    assert ("is_clipped" in metadata) == (loss_type == "grpo_clip")


@pytest.mark.parametrize(("loss_type", "missing"), [(name, key) for name, keys in ARGUMENTS.items() for key in keys])
def test_a_loss_without_what_it_needs_is_refused_by_name(loss_type, missing):
    arguments = {name: value for name, value in ARGUMENTS[loss_type].items() if name != missing}
    with pytest.raises(ValueError, match=f"'{loss_type}' needs {missing}"):
        compute_policy_gradient_loss(POLICY, loss_type, **arguments)


def test_a_loss_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"'grpo': no such loss\. There are no_baseline, reinforce_with_baseline, grpo_clip"):
        compute_policy_gradient_loss(POLICY, "grpo", advantages=COLUMN)


MASK = torch.tensor([[1, 1, 0], [0, 1, 0]])
MEAN = {  # of row means, over 2 rows and 4 steps
    "no_baseline": (-LOG2 / 2 + 0) / 8,
    "reinforce_with_baseline": (-LOG2 / 2 + 0) / 8,
    "grpo_clip": (-1.1 + 1) / 8,
    "grpo_no_clip": (-1.5 + 1) / 8,
}


@pytest.mark.parametrize("loss_type", ARGUMENTS)
def test_the_grpo_step_averages_tokens_then_rows_and_divides_by_the_accumulation(loss_type):
    policy = POLICY.clone().requires_grad_()
    loss, metadata = grpo_microbatch_train_step(policy, MASK, 4, loss_type, **ARGUMENTS[loss_type])
    assert loss.item() == pytest.approx(MEAN[loss_type], abs=1e-6)
    assert not loss.requires_grad
    # d/d log π of -A log π is -A; of -ratio A it is -ratio A; 0 where clipped.
    first = {"grpo_clip": 0.0, "grpo_no_clip": -2.0}.get(loss_type, -1.0)
    expected = [first / 16, -1 / 16, 0, 0, 1 / 8, 0]
    assert policy.grad.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    if loss_type == "grpo_clip":
        assert metadata["clip_fraction"].item() == pytest.approx(1 / 3, abs=1e-6)
        assert metadata["ratio_mean"].item() == pytest.approx(4 / 3, abs=1e-6)


def test_with_a_constant_each_row_is_summed_and_divided_by_it():
    policy = POLICY.clone().requires_grad_()
    loss, _ = grpo_microbatch_train_step(policy, MASK, 1, "grpo_no_clip", **ARGUMENTS["grpo_no_clip"], normalize_constant=10)
    assert loss.item() == pytest.approx((-3 + 1) / 10 / 2, abs=1e-6)
    assert policy.grad.flatten().tolist() == pytest.approx([-0.1, -0.05, 0, 0, 0.05, 0], abs=1e-6)


@pytest.mark.parametrize("loss_type", ARGUMENTS)
def test_gradients_add_up_in_place_and_two_micro_batches_are_one_batch(loss_type):
    whole, halves = (POLICY.clone().requires_grad_() for _ in range(2))
    whole_loss, _ = grpo_microbatch_train_step(whole, MASK, 1, loss_type, **ARGUMENTS[loss_type])
    parts = []
    for row in (slice(0, 1), slice(1, 2)):
        of_row = {
            name: value[row] if isinstance(value, torch.Tensor) else value for name, value in ARGUMENTS[loss_type].items()
        }
        parts.append(grpo_microbatch_train_step(halves[row], MASK[row], 2, loss_type, **of_row)[0].item())
    assert sum(parts) == pytest.approx(whole_loss.item(), abs=1e-6)
    assert halves.grad.flatten().tolist() == pytest.approx(whole.grad.flatten().tolist(), abs=1e-6)
    once = whole.grad.clone()
    grpo_microbatch_train_step(whole, MASK, 1, loss_type, **ARGUMENTS[loss_type])
    assert torch.equal(whole.grad, 2 * once)


@pytest.mark.parametrize("loss_type", ARGUMENTS)
def test_rows_without_a_response_take_no_part(loss_type):
    policy, alone = POLICY.clone().requires_grad_(), POLICY[:1].clone().requires_grad_()
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    loss, _ = grpo_microbatch_train_step(policy, mask, 1, loss_type, **ARGUMENTS[loss_type])
    first = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in ARGUMENTS[loss_type].items()}
    expected, _ = grpo_microbatch_train_step(alone, mask[:1], 1, loss_type, **first)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert policy.grad[0].tolist() == pytest.approx(alone.grad[0].tolist(), abs=1e-6)
    assert policy.grad[1].tolist() == [0.0] * 3
    nothing = POLICY.clone().requires_grad_()
    loss, _ = grpo_microbatch_train_step(nothing, torch.zeros(2, 3), 1, loss_type, **ARGUMENTS[loss_type])
    assert loss.item() == 0.0
    assert nothing.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("loss_type", ARGUMENTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probs_of_padding_change_neither_loss_nor_gradient(loss_type, value):
    def step(policy, old):
        policy = policy.clone().requires_grad_()
        arguments = ARGUMENTS[loss_type] | ({"old_log_probs": old} if "old_log_probs" in ARGUMENTS[loss_type] else {})
        loss, _ = grpo_microbatch_train_step(policy, MASK, 1, loss_type, **arguments)
        return loss.item(), policy.grad.tolist()

    hidden = torch.where(MASK.bool(), 0.0, value)
    assert step(POLICY + hidden, OLD + hidden) == step(POLICY, OLD)


def test_with_a_constant_rows_without_a_response_count_as_zero():
    policy = POLICY.clone().requires_grad_()
    mask = MASK.clone()
    mask[1] = 0
    arguments = ARGUMENTS["grpo_no_clip"] | {"normalize_constant": 10}
    loss, _ = grpo_microbatch_train_step(policy, mask, 1, "grpo_no_clip", **arguments)
    tokens, _ = compute_policy_gradient_loss(POLICY, "grpo_no_clip", **ARGUMENTS["grpo_no_clip"])
    assert loss.item() == pytest.approx((tokens[0] * MASK[0]).sum().item() / 10 / 2, abs=1e-6)

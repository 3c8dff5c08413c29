import pytest
import torch

from strop.algorithms.losses import RatioLevel, log_ratio, probability_ratio

# Ratios 2, (9), 8 and 1/2, (9), (9); those in parentheses are masked.
POLICY = torch.tensor([[2.0, 9.0, 8.0], [0.5, 9.0, 9.0]]).log()
OLD = torch.zeros(2, 3)
MASK = torch.tensor([[True, False, True], [True, False, False]])


def test_a_token_ratio_is_that_of_its_probabilities_and_one_where_masked():
    assert probability_ratio(POLICY, OLD, MASK).flatten().tolist() == pytest.approx([2, 1, 8, 0.5, 1, 1], abs=1e-6)


def test_a_sequence_ratio_is_the_geometric_mean_over_trained_tokens():
    """GSPO: (2 * 8)^(1/2) = 4; a row of one token has that token's ratio."""
    ratios = probability_ratio(POLICY, OLD, MASK, RatioLevel.SEQUENCE)
    assert ratios.flatten().tolist() == pytest.approx([4, 1, 4, 0.5, 1, 1], abs=1e-6)


def test_the_ratio_of_a_product_is_that_of_the_whole_row():
    """DeepSeek-R1 Eq. 1: 2 * 8 = 16."""
    ratios = probability_ratio(POLICY, OLD, MASK, RatioLevel.SEQUENCE_SUM)
    assert ratios.flatten().tolist() == pytest.approx([16, 1, 16, 0.5, 1, 1], abs=1e-5)


@pytest.mark.parametrize(("level", "expected"), [(RatioLevel.SEQUENCE, 4.0), (RatioLevel.SEQUENCE_SUM, 2 * 16.0)])
def test_the_gradient_of_a_row_reaches_a_token_through_its_own_value_only(level, expected):
    policy = POLICY.clone().requires_grad_()
    probability_ratio(policy, OLD, MASK, level)[0, 0].backward()
    assert policy.grad.flatten().tolist() == pytest.approx([expected, 0, 0, 0, 0, 0], abs=1e-5)


@pytest.mark.parametrize("level", [RatioLevel.SEQUENCE, RatioLevel.SEQUENCE_SUM])
def test_with_one_advantage_a_row_has_the_gradient_of_its_whole_ratio(level):
    """Both sides: -A times the ratio of the row, averaged over rows; on the left by token, with 1 / |o| each."""
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(4, 7, generator=generator, dtype=torch.float64) / 4
    mask = torch.rand(4, 7, generator=generator) < 0.6
    mask[:, 1] = True
    advantages = torch.tensor([1.5, -0.5, 0.25, -2.0], dtype=torch.float64)
    of_tokens, of_rows = ((old + 0.1).requires_grad_() for _ in range(2))
    weights = mask.double() / mask.sum(-1, keepdim=True) / 4
    (-(weights * probability_ratio(of_tokens, old, mask, level)) * advantages[:, None]).sum().backward()
    total = torch.where(mask, of_rows - old, 0.0).sum(-1)
    ratio = (total / mask.sum(-1) if level is RatioLevel.SEQUENCE else total).exp()
    (-advantages * ratio / 4).sum().backward()
    torch.testing.assert_close(of_tokens.grad, of_rows.grad, rtol=1e-9, atol=1e-12)


def test_a_clamped_log_ratio_ends_at_20_nats_without_gradient():
    policy = torch.tensor([[50.0, -50.0, 1.0]], requires_grad=True)
    clamped = log_ratio(policy, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), is_clamped=True)
    clamped.sum().backward()
    assert clamped[0].tolist() == [20.0, -20.0, 1.0]
    assert policy.grad[0].tolist() == [0.0, 0.0, 1.0]


def test_a_clamped_mean_over_a_row_ends_at_10_nats_without_gradient():
    policy = torch.tensor([[16.0, 14.0], [-16.0, -14.0]], requires_grad=True)
    other, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    clamped = log_ratio(policy, other, mask, RatioLevel.SEQUENCE, is_clamped=True)
    clamped.sum().backward()
    assert clamped.tolist() == [[10.0, 10.0], [-15.0, -15.0]]
    assert policy.grad is not None
    assert policy.grad.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_a_row_of_thousands_of_tokens_has_a_finite_sequence_ratio():
    policy = torch.full((1, 32_768), 0.5)
    mask = torch.ones(1, 32_768, dtype=torch.bool)
    assert log_ratio(policy, torch.zeros_like(policy), mask, RatioLevel.SEQUENCE)[0, 0].item() == pytest.approx(0.5, abs=1e-6)


def test_a_row_without_a_trained_token_has_ratio_one():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert probability_ratio(torch.full((1, 2), torch.nan), OLD[:1, :2], nothing, RatioLevel.SEQUENCE).tolist() == [[1.0, 1.0]]

import pytest
import torch

from strop.algorithms import RatioLevel
from strop.algorithms.losses import log_ratio, probability_ratio

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


def test_the_gradient_of_a_sequence_ratio_is_shared_by_its_tokens():
    policy = POLICY.clone().requires_grad_()
    probability_ratio(policy, OLD, MASK, RatioLevel.SEQUENCE)[0, 0].backward()
    # d/dx exp(mean) = exp(mean) / 2 for each of the two trained tokens
    assert policy.grad.flatten().tolist() == pytest.approx([2, 0, 2, 0, 0, 0], abs=1e-6)


def test_a_row_of_thousands_of_tokens_has_a_finite_sequence_ratio():
    policy = torch.full((1, 32_768), 0.5)
    mask = torch.ones(1, 32_768, dtype=torch.bool)
    assert log_ratio(policy, torch.zeros_like(policy), mask, RatioLevel.SEQUENCE)[0, 0].item() == pytest.approx(0.5, abs=1e-6)


def test_a_row_without_a_trained_token_has_ratio_one():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert probability_ratio(torch.full((1, 2), torch.nan), OLD[:1, :2], nothing, RatioLevel.SEQUENCE).tolist() == [[1.0, 1.0]]

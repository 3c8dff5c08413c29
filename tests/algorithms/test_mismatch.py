import pytest
import torch

from strop.algorithms.losses import Mismatch, mismatch_weights

# π_old / π_sampled: row 1 has 0.5, 3 and 1.5 (product 2.25), row 2 has 0.25 and 4 (product 1); the last of row 2 is masked.
OLD = torch.tensor([[0.5, 3.0, 1.5], [0.25, 4.0, 100.0]]).log()
SAMPLED = torch.zeros(2, 3)
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("mismatch", "weights", "is_over"),
    [
        ("off", [[1, 1, 1], [1, 1, 1]], [[0, 0, 0], [0, 0, 0]]),
        ("truncate_token", [[0.5, 2, 1.5], [0.25, 2, 1]], [[0, 1, 0], [0, 1, 0]]),
        ("mask_token", [[0.5, 0, 1.5], [0.25, 0, 1]], [[0, 1, 0], [0, 1, 0]]),
        ("truncate_sequence", [[2, 2, 2], [1, 1, 1]], [[1, 1, 1], [0, 0, 0]]),
        ("mask_sequence", [[0, 0, 0], [1, 1, 1]], [[1, 1, 1], [0, 0, 0]]),
    ],
)
def test_weights_beyond_the_cap_are_cut_or_left_out_by_token_or_by_row(mismatch, weights, is_over):
    found = mismatch_weights(OLD, SAMPLED, MASK, mismatch=Mismatch(mismatch), cap=2.0)
    torch.testing.assert_close(found[0], torch.tensor(weights, dtype=torch.float32), rtol=0, atol=1e-6)
    assert found[1].int().tolist() == is_over


@pytest.mark.parametrize(("mismatch", "expected"), [("truncate_sequence", 5.0), ("mask_sequence", 0.0)])
def test_a_product_that_exceeds_any_float_is_over_the_cap_and_not_infinite(mismatch, expected):
    old, mask = torch.full((1, 2000), 1.0), torch.ones(1, 2000, dtype=torch.bool)
    weights, _ = mismatch_weights(old, torch.zeros_like(old), mask, mismatch=Mismatch(mismatch), cap=5.0)
    assert weights[0, 0].item() == pytest.approx(expected, abs=1e-6)


def test_truncated_weights_are_unbiased_where_the_cap_does_not_bind():
    """E over π_sampled of w f is E over π_old of f."""
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    sampled = torch.tensor([0.4, 0.25, 0.35], dtype=torch.float64)
    mask = torch.ones(3, 1, dtype=torch.bool)
    weights, _ = mismatch_weights(old.log()[:, None], sampled.log()[:, None], mask, mismatch=Mismatch.TRUNCATE_TOKEN, cap=2.0)
    values = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    assert (sampled * weights[:, 0] * values).sum().item() == pytest.approx((old * values).sum().item(), abs=1e-9)

import math

import pytest
import torch

from strop.cs336 import masked_mean, masked_normalize

TENSOR = torch.tensor([[1.0, 2.0, 6.0], [4.0, math.nan, math.inf]], dtype=torch.float64)
MASK = torch.tensor([[1, 0, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("dim", "mean", "total"), [(None, 11 / 3, 11.0), (0, [2.5, math.nan, 6.0], [5.0, 0.0, 6.0]), (1, [3.5, 4.0], [7.0, 4.0])]
)
def test_mean_and_sum_see_only_what_the_mask_shows(dim, mean, total):
    for mask in (MASK, MASK.bool(), MASK.double()):
        assert masked_mean(TENSOR, mask, dim).tolist() == pytest.approx(mean, abs=1e-6, nan_ok=True)
        expected = [one / 8 for one in total] if dim is not None else total / 8
        assert masked_normalize(TENSOR, mask, 8.0, dim).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_the_mean_of_nothing_is_nan_and_its_sum_is_0(dim):
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert masked_mean(TENSOR, nothing, dim).isnan().all()
    assert (masked_normalize(TENSOR, nothing, 2.0, dim) == 0).all()


def test_what_is_masked_has_gradient_0_whatever_it_is():
    for reduce in (lambda tensor: masked_mean(tensor, MASK), lambda tensor: masked_normalize(tensor, MASK, 3.0)):
        tensor = TENSOR.clone().requires_grad_()
        reduce(tensor).backward()
        assert tensor.grad.flatten().tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0, 0], abs=1e-6)


def test_a_mask_of_a_column_counts_every_element_it_covers():
    assert masked_mean(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1], [0]]), 1)[0].item() == 2.0


def test_whole_numbers_are_averaged_as_fractions():
    assert masked_mean(torch.tensor([1, 2]), torch.tensor([1, 1])).item() == 1.5


def test_the_worked_example_of_section_8():
    """Responses of 4 and 7 tokens, all with advantage 2: a mean per row pays each token of the short one more."""
    masks = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    advantages = torch.full((2, 7), 2)

    def reduced(reduce):
        ratio = torch.ones(2, 7, requires_grad=True)
        result = reduce(ratio * advantages)
        result.mean().backward()
        return result.tolist(), ratio.grad.tolist()

    mean, of_mean = reduced(lambda gain: masked_mean(gain, masks, dim=1))
    assert mean == pytest.approx([2.0, 2.0], abs=1e-6)
    assert of_mean[0] == pytest.approx([1 / 4] * 4 + [0.0] * 3, abs=1e-6)
    assert of_mean[1] == pytest.approx([1 / 7] * 7, abs=1e-6)

    total, of_total = reduced(lambda gain: masked_normalize(gain, masks, dim=1, normalize_constant=7))
    assert total == pytest.approx([8 / 7, 2.0], abs=1e-6)
    assert of_total[0] == pytest.approx([1 / 7] * 4 + [0.0] * 3, abs=1e-6)
    assert of_total[1] == pytest.approx([1 / 7] * 7, abs=1e-6)

import pytest
import torch

from strop.algorithms.losses import Aggregation, token_weights

# Rows of 1, 3, 2 and 0 tokens; the first two are of one group.
MASK = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
GROUPS = torch.tensor([4, 4, 9, 9])


@pytest.mark.parametrize(
    ("aggregation", "constant", "of_each_row"),
    [
        (Aggregation.TOKEN_MEAN, None, [1 / 6, 1 / 6, 1 / 6]),  # T = 6
        (Aggregation.GROUP_TOKEN_MEAN, None, [1 / 8, 1 / 8, 1 / 4]),  # Q = 2; T_q = 4 and 2
        (Aggregation.SEQUENCE_MEAN, None, [1 / 3, 1 / 9, 1 / 6]),  # N = 3 rows that have tokens
        (Aggregation.CONSTANT, 10, [1 / 30, 1 / 30, 1 / 30]),  # N = 3, C = 10
    ],
)
def test_every_token_has_its_share_of_the_whole_update(aggregation, constant, of_each_row):
    weights = token_weights(MASK, GROUPS, aggregation, constant=constant)
    expected = MASK[:3] * torch.tensor(of_each_row)[:, None]
    torch.testing.assert_close(weights[:3], expected, rtol=1e-6, atol=0)
    assert weights[3].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("aggregation", [Aggregation.TOKEN_MEAN, Aggregation.GROUP_TOKEN_MEAN, Aggregation.SEQUENCE_MEAN])
def test_the_weights_of_a_mean_add_up_to_one(aggregation):
    assert token_weights(MASK, GROUPS, aggregation).sum().item() == pytest.approx(1.0, abs=1e-6)


def test_a_group_without_tokens_has_no_part_in_the_number_of_groups():
    mask = torch.tensor([[0, 1], [0, 0]], dtype=torch.bool)
    assert token_weights(mask, torch.tensor([0, 1]), Aggregation.GROUP_TOKEN_MEAN).tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_an_update_without_any_token_has_zero_weights(aggregation):
    constant = 5 if aggregation is Aggregation.CONSTANT else None
    weights = token_weights(torch.zeros(2, 3, dtype=torch.bool), torch.tensor([0, 1]), aggregation, constant=constant)
    assert weights.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("aggregation", "constant"), [(Aggregation.CONSTANT, None), (Aggregation.TOKEN_MEAN, 7)])
def test_a_constant_is_refused_unless_it_is_what_divides(aggregation, constant):
    with pytest.raises(ValueError, match="constant"):
        token_weights(MASK, GROUPS, aggregation, constant=constant)

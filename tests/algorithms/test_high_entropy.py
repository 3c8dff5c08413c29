from dataclasses import replace

import pytest
import torch

from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import entropy_aware_advantages, high_entropy_mask
from strop.algorithms.method import Column, LossInputs
from strop.training.batch import Row, pack_rows, reweighted

MASK = torch.tensor([[False, True, True, True, False, True], [False, True, False, False, False, False]])
ENTROPIES = torch.tensor([[9.0, 0.1, 0.4, 0.3, 9.0, 0.2], [9.0, 0.5, 9.0, 9.0, 9.0, 9.0]])


@pytest.mark.parametrize(
    ("share", "first_row", "second_row"),
    [
        (1.0, [1, 2, 3, 5], [1]),
        (0.75, [2, 3, 5], []),  # floor(0.75 * 1) of the second row is none
        (0.5, [2, 3], []),
        (0.49, [2], []),
        (0.2, [], []),
    ],
)
def test_each_row_keeps_its_share_of_sampled_tokens_rounded_down_and_never_a_tools(share, first_row, second_row):
    kept = high_entropy_mask(ENTROPIES, MASK, share=share)
    assert [row.nonzero().flatten().tolist() for row in kept] == [first_row, second_row]


def test_three_tenths_of_ten_tokens_are_three():
    kept = high_entropy_mask(torch.arange(10.0)[None], torch.ones(1, 10, dtype=torch.bool), share=0.3)
    assert kept.sum().item() == 3


def test_of_equal_entropies_the_first_are_kept():
    kept = high_entropy_mask(torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), share=0.5)
    assert kept.tolist() == [[True, True, False, False]]


def test_by_row_only_tokens_of_high_entropy_are_learnt_from():
    logprobs = torch.zeros_like(ENTROPIES, requires_grad=True)
    inputs = LossInputs(
        loss_mask=MASK,
        advantages=torch.ones_like(ENTROPIES),
        sampled_logprobs=torch.zeros_like(ENTROPIES),
        entropies=ENTROPIES,
        columns={Column.OLD_LOGPROBS: torch.zeros_like(ENTROPIES)},
    )
    loss = GRPO(high_entropy_share=0.5, high_entropy_over="row").token_loss(logprobs, inputs)
    [gradient] = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.nonzero().tolist() == [[0, 2], [0, 3]]


def test_of_an_update_the_tokens_of_highest_entropy_share_its_whole_weight():
    """Wang et al.: of five sampled tokens over two rows the two highest, 0.5 and 0.4, each with 1/2 in a token mean."""
    method = GRPO(high_entropy_share=0.4)
    rows = [
        Row(ids=[1] * 6, loss_mask=mask.tolist(), advantages=torch.ones(6), sampled_logprobs=[0.0] * 6, group=row)
        for row, mask in enumerate(MASK)
    ]
    batch = pack_rows(rows, aggregation=method.aggregation, temperature=1.0)
    assert reweighted(batch, GRPO()) is batch
    batch = reweighted(replace(batch, columns={Column.OLD_ENTROPIES: ENTROPIES}), method)
    assert batch.loss_weights.nonzero().tolist() == [[0, 2], [1, 1]]
    assert batch.loss_weights[0, 2].item() == batch.loss_weights[1, 1].item() == pytest.approx(0.5, abs=1e-6)
    assert torch.equal(batch.loss_mask, MASK)  # a ratio of rows is still that of all sampled tokens


def test_advantages_grow_with_the_entropies_of_an_update():
    """Five entropies 0.1, 0.4, 0.3, 0.2, 0.5: mean 0.3, squares 0.1 over 4, std 0.1581139; 0.2 of a deviation is 0.2529822."""
    method = GRPO(entropy_advantage=0.2)
    assert method.needs == {Column.OLD_LOGPROBS, Column.OLD_ENTROPIES}
    rows = [
        Row(ids=[1] * 6, loss_mask=mask.tolist(), advantages=advantage * torch.ones(6), sampled_logprobs=[0.0] * 6, group=0)
        for mask, advantage in zip(MASK, (1.0, -2.0), strict=True)
    ]
    batch = pack_rows(rows, aggregation=method.aggregation, temperature=1.0)
    batch = replace(batch, columns={Column.OLD_ENTROPIES: ENTROPIES})
    found = reweighted(batch, method).advantages
    assert found[0].tolist() == pytest.approx([0, 0.7470178, 1.1264911, 1.0, 0, 0.8735089], abs=1e-6)
    assert found[1].tolist() == pytest.approx([0, -2.5059644, 0, 0, 0, 0], abs=1e-6)
    assert found[MASK].dtype == torch.float32
    assert torch.equal(reweighted(batch, method).loss_weights, batch.loss_weights)
    alike = replace(batch, columns={Column.OLD_ENTROPIES: torch.full_like(ENTROPIES, 0.1)})
    assert reweighted(alike, method).advantages is batch.advantages


def test_the_mean_weight_of_an_entropy_aware_advantage_is_one():
    entropies, mask = torch.rand(3, 50), torch.rand(3, 50) < 0.7
    found = entropy_aware_advantages(torch.ones(3, 50), entropies, mask, weight=0.7)
    assert found[mask].mean().item() == pytest.approx(1.0, abs=1e-6)
    assert found[mask].std().item() == pytest.approx(0.7, abs=1e-5)
    assert torch.equal(found[~mask], torch.ones(3, 50)[~mask])


def test_ranks_over_an_update_need_entropies_of_the_scoring_pass():
    assert Column.OLD_ENTROPIES in GRPO(high_entropy_share=0.2).needs
    assert Column.OLD_ENTROPIES not in GRPO(high_entropy_share=0.2, high_entropy_over="row").needs
    assert Column.OLD_ENTROPIES not in GRPO().needs

import math

import pytest
import torch

from strop.algorithms.dpo import (
    dpo_loss,
    implicit_margins,
    implicit_rewards,
    ranked_rightly,
    response_advantages,
    sequence_logprobs,
)


def test_the_loss_of_a_pair_by_hand():
    # 0.5 * ((-10 + 12) - (-20 + 19)) = 1.5; -log σ(1.5) = log(1 + e^-1.5)
    margins = implicit_margins(
        torch.tensor([-10.0]), torch.tensor([-20.0]), torch.tensor([-12.0]), torch.tensor([-19.0]), beta=0.5
    )
    assert margins.item() == pytest.approx(1.5, abs=1e-6)
    assert dpo_loss(margins).item() == pytest.approx(math.log(1 + math.exp(-1.5)), abs=1e-6)


def test_a_policy_that_is_the_reference_pays_log_two_and_is_pulled_by_half_of_beta():
    chosen, rejected = torch.tensor([-3.0], requires_grad=True), torch.tensor([-4.0], requires_grad=True)
    loss = dpo_loss(implicit_margins(chosen, rejected, chosen.detach(), rejected.detach(), beta=0.1))
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert chosen.grad.item() == pytest.approx(-0.05, abs=1e-6)  # -β σ(-margin)
    assert rejected.grad.item() == pytest.approx(0.05, abs=1e-6)


def test_a_margin_that_would_overflow_an_exponential_has_a_finite_loss():
    assert dpo_loss(torch.tensor([-500.0, 500.0])).tolist() == pytest.approx([500.0, 0.0], abs=1e-6)


def test_a_sequence_counts_its_tokens_alone_and_a_shared_prompt_cancels():
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, -4.0, math.nan]])
    response = torch.tensor([[False, True, True], [False, True, False]])
    assert sequence_logprobs(logprobs, response).tolist() == [-2.5, -4.0]
    whole = sequence_logprobs(logprobs, torch.tensor([[True, True, True], [True, True, False]]))
    assert (whole[0] - whole[1]).item() == pytest.approx(1.5, abs=1e-6)  # as without the prompt: -2.5 + 4


@pytest.mark.parametrize(
    ("margin", "advantage"),
    [
        (0.0, 0.05),  # β / 2: nothing is known yet
        (math.log(3), 0.025),  # σ(-log 3) = 1/4: a pair that is ranked rightly pulls less,
        (-math.log(3), 0.075),  # one that is not, more,
        (-500.0, 0.1),  # and never more than β
        (500.0, 0.0),
    ],
)
def test_a_token_deserves_as_much_as_its_pair_is_ranked_wrongly(margin, advantage):
    assert response_advantages(torch.tensor([margin]), beta=0.1).item() == pytest.approx(advantage, abs=1e-6)


def test_the_advantages_are_minus_the_gradient_of_the_loss():
    generator = torch.Generator().manual_seed(3)
    chosen, rejected, *reference = (3 * torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(4))
    chosen.requires_grad_(), rejected.requires_grad_()
    margins = implicit_margins(chosen, rejected, *reference, beta=0.7)
    dpo_loss(margins).sum().backward()
    advantages = response_advantages(margins.detach(), beta=0.7)
    torch.testing.assert_close(chosen.grad, -advantages, rtol=1e-12, atol=0)
    torch.testing.assert_close(rejected.grad, advantages, rtol=1e-12, atol=0)


def test_the_implicit_reward_is_how_much_likelier_a_response_became():
    assert implicit_rewards(torch.tensor([-10.0, -3.0]), torch.tensor([-12.0, -3.0]), beta=0.1).tolist() == pytest.approx(
        [0.2, 0.0], abs=1e-6
    )


def test_a_tie_counts_half():
    assert ranked_rightly(torch.tensor([0.1, 0.0, -2.0, 3.0])).tolist() == [1.0, 0.5, 0.0, 1.0]

import math

import pytest
import torch

from strop.algorithms.dpo import dpo_loss, implicit_margins, sequence_logprobs


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

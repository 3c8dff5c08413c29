import math

import pytest
import torch

from strop.algorithms.losses import KLEstimator, token_kl

ONE = torch.ones(1, 1, dtype=torch.bool)
LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.4, 0.2, 0.9], dtype=torch.float64).log_softmax(0)


def test_k3_of_a_reference_twice_as_likely_is_one_minus_log_two():
    kl = token_kl(torch.tensor([[-1.0]]), torch.tensor([[-1.0 + math.log(2)]]), ONE)
    assert kl.item() == pytest.approx(2 - math.log(2) - 1, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", -math.log(2)), ("k2", 0.5 * math.log(2) ** 2), ("k3", 1 - math.log(2))]
)
def test_the_three_estimators_of_a_reference_twice_as_likely(estimator, expected):
    kl = token_kl(torch.tensor([[-1.0]]), torch.tensor([[-1.0 + math.log(2)]]), ONE, estimator=KLEstimator(estimator))
    assert kl.item() == pytest.approx(expected, abs=1e-6)


def test_a_clamped_k3_ends_at_10_without_gradient():
    """verl's bounds: a token with a log-ratio of 50 has e^50 of the loss of one with a log-ratio of 0."""
    policy = torch.tensor([[-50.0, -1.0]], requires_grad=True)
    kl = token_kl(policy, torch.tensor([[0.0, -1.0 + math.log(2)]]), torch.ones(1, 2, dtype=torch.bool), is_clamped=True)
    kl.sum().backward()
    assert kl[0].tolist() == pytest.approx([10, 1 - math.log(2)], abs=1e-6)
    assert policy.grad[0].tolist() == pytest.approx([0, 1 - 2], abs=1e-6)


def expectation_and_gradient(estimator):
    """Over every token of a vocabulary of 4, each weighted by its probability, which is held fixed as samples are."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    kl = token_kl(policy[None], REFERENCE[None], torch.ones(1, 4, dtype=torch.bool), estimator=estimator)
    mean = (policy.detach().exp() * kl[0]).sum()
    mean.backward()
    return mean.item(), logits.grad


def exact_kl(*, is_reverse):
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    kl = (REFERENCE.exp() * (REFERENCE - policy)).sum() if is_reverse else (policy.exp() * (policy - REFERENCE)).sum()
    kl.backward()
    return kl.item(), logits.grad


@pytest.mark.parametrize(("estimator", "kl", "grad"), [(KLEstimator.K1, -30.0, 1.0), (KLEstimator.K2, 450.0, -30.0)])
def test_only_k3_is_clamped(estimator, kl, grad):
    policy = torch.tensor([[-30.0]], requires_grad=True)
    found = token_kl(policy, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), estimator=estimator, is_clamped=True)
    found.sum().backward()
    assert (found.item(), policy.grad.item()) == (kl, grad)


@pytest.mark.parametrize("estimator", [KLEstimator.K1, KLEstimator.K3])
def test_k1_and_k3_are_unbiased(estimator):
    assert expectation_and_gradient(estimator)[0] == pytest.approx(exact_kl(is_reverse=False)[0], abs=1e-9)


def test_in_a_loss_k1_pulls_nowhere_k2_to_the_kl_and_k3_to_the_kl_the_other_way_round():
    torch.testing.assert_close(
        expectation_and_gradient(KLEstimator.K1)[1], torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        expectation_and_gradient(KLEstimator.K2)[1], exact_kl(is_reverse=False)[1], rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(expectation_and_gradient(KLEstimator.K3)[1], exact_kl(is_reverse=True)[1], rtol=1e-9, atol=1e-12)

"""How far the policy has moved from another: estimates of a KL divergence, token by token.

k1, k2 and k3 are Schulman's names (Approximating KL Divergence, 2020).
"""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor

from strop.algorithms.ratios import RatioLevel, log_ratio


class KLEstimator(StrEnum):
    """Of KL(π || π_ref) on tokens sampled from π; ρ is π_ref / π. As values k1 and k3 are unbiased, k2 nearly.

    In a loss their gradients count, and these are other things: of k1 it is zero in expectation, noise alone, so that it
    regularises nothing; of k2 it is that of KL(π || π_ref); of k3 that of KL(π_ref || π).
    """

    K1 = "k1"  # -log ρ
    K2 = "k2"  # (log ρ)² / 2; never negative
    K3 = "k3"  # ρ - log ρ - 1; never negative. DeepSeekMath (arXiv:2402.03300) Eq. 4, DeepSeek-R1 (arXiv 2501.12948) Eq. 2


def token_kl(
    policy_logprobs: Tensor,
    reference_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    estimator: KLEstimator = KLEstimator.K3,
    level: RatioLevel = RatioLevel.TOKEN,
) -> Tensor:
    """Estimate of KL(π || π_ref) of each token, in nats, or of its row with ρ as a geometric mean; 0 where masked.

    Args:
        policy_logprobs: nats, (n, T), of tokens that π sampled; carries the gradient.
        reference_logprobs: nats; no gradient.
        loss_mask: bool (n, T).
    """
    log_rho = log_ratio(reference_logprobs, policy_logprobs, loss_mask, level)
    match estimator:
        case KLEstimator.K1:
            return -log_rho
        case KLEstimator.K2:
            return log_rho.square() / 2
        case KLEstimator.K3:
            return log_rho.exp() - log_rho - 1

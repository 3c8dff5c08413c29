"""Probability ratios, the loss of each token, KL, weights for the gap between sampler and trainer, and means over tokens."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO, MAX_K3 = 20.0, 10.0  # of one token, in nats; the bounds of verl (`core_algos.py`)
MAX_MEAN_LOG_RATIO = 10.0  # of a row, in nats; the bound of verl's GSPO


class RatioLevel(StrEnum):
    """Whose probability is compared. Rows are whole in every micro-batch, so a row can be reduced where it stands."""

    TOKEN = "token"  # GRPO in every released code; rStar2-Agent (arXiv 2508.20722) Eq. 6
    SEQUENCE = "sequence"  # the row's geometric mean, the |o|-th root of the product: GSPO (arXiv:2507.18071)
    SEQUENCE_SUM = "sequence_sum"  # the row's product, as DeepSeek-R1 (arXiv 2501.12948) prints Eq. 1


def log_ratio(
    logprobs: Tensor,
    other_logprobs: Tensor,
    loss_mask: Tensor,
    level: RatioLevel = RatioLevel.TOKEN,
    *,
    is_clamped: bool = False,
) -> Tensor:
    """log(p / other p) of each token in nats, or the mean or sum over the row's trained tokens at each of them; 0 where masked.

    At the level of rows the gradient of each value is that of its own token, as in GSPO-token (arXiv:2507.18071 section 4.3):
    the others are constants. Where all tokens of a row have one advantage, the gradient of the row's loss under
    `Aggregation.SEQUENCE_MEAN` is that of its whole ratio; where they differ, each token keeps its own. On a row of one token
    all levels are equal.

    Args:
        logprobs, other_logprobs: nats, (n, T); gradient flows through both.
        loss_mask: bool (n, T).
        is_clamped: to ±`MAX_LOG_RATIO`, the mean of a row to at most `MAX_MEAN_LOG_RATIO`, without gradient beyond.
    """
    # Mask before anything else: a where() after exp() would still send nan through the gradient of padded positions.
    ratios = torch.where(loss_mask, logprobs - other_logprobs, 0.0)
    if level is not RatioLevel.TOKEN:
        num_tokens = loss_mask.sum(-1, keepdim=True).clamp(min=1)
        total, own = ratios.detach().sum(-1, keepdim=True), ratios - ratios.detach()
        of_row = total / num_tokens + own if level is RatioLevel.SEQUENCE else total + num_tokens * own
        ratios = torch.where(loss_mask, of_row, 0.0)
    upper = MAX_MEAN_LOG_RATIO if level is RatioLevel.SEQUENCE else MAX_LOG_RATIO
    return ratios.clamp(-MAX_LOG_RATIO, upper) if is_clamped else ratios


def probability_ratio(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    level: RatioLevel = RatioLevel.TOKEN,
    *,
    is_clamped: bool = False,
) -> Tensor:
    """π / π_old of each token, or of its row; 1 where masked.

    Beyond 88 nats it is infinite. Where nothing depends on it, since it is clipped or there is no advantage, its gradient is 0.
    """
    exponent = log_ratio(policy_logprobs, old_logprobs, loss_mask, level, is_clamped=is_clamped)
    ratio: Tensor = _Exp.apply(exponent)  # type: ignore[no-untyped-call]
    return ratio


class _Exp(torch.autograd.Function):
    """exp, whose gradient is 0 where that of its result is: 0 times infinity is no number."""

    @staticmethod
    def forward(ctx: Any, exponent: Tensor) -> Tensor:
        power = exponent.exp()
        ctx.save_for_backward(power)
        return power

    @staticmethod
    def backward(ctx: Any, of_power: Tensor) -> Tensor:
        (power,) = ctx.saved_tensors
        return torch.where(of_power == 0, 0.0, of_power * power)


def policy_gradient_token_loss(policy_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """-A log π of each token. REINFORCE, CS336 assignment 5 Eq. 32; with A = 1 it is the loss of SFT.

    Args:
        policy_logprobs: nats; carries the gradient.
    """
    return -torch.where(loss_mask, policy_logprobs, 0.0) * torch.where(loss_mask, advantages, 0.0)


def no_clip_token_loss(ratio: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """-(π / π_old) A of each token, 0 where A is: GRPO-No-Clip, CS336 assignment 5 Eq. 34.

    Args:
        ratio: π / π_old; carries the gradient.
    """
    return -_where_it_counts(ratio, advantages, loss_mask) * torch.where(loss_mask, advantages, 0.0)


def clip_token_loss(
    ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    kept_log_ratio: Tensor | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token; with `dual_clip` c, at most -c A where A < 0.

    With `kept_log_ratio` the upper bound is AEPO's (arXiv 2510.14545), (1 + clip_high) r / sg(r); `sg` stops the gradient. The
    loss is the same, but a good token beyond the bound, often one of high entropy, keeps the gradient of
    (1 + clip_high) A log r.

    The clipped term of PPO and of DeepSeekMath's GRPO (arXiv:2402.03300); rStar2-Agent (arXiv 2508.20722) Eq. 6; CS336
    assignment 5 Eq. 33. Clip-higher is DAPO's (arXiv:2503.14476), the dual clip that of Ye et al. (arXiv:1912.09729).

    Args:
        ratio: r = π / π_old, of tokens or of rows; carries the gradient.
        clip_low, clip_high: how far the ratio may fall below or rise above 1 before a gain stops counting.
        dual_clip: where a bad token has become this many times likelier, its loss stops growing; more than 1. None: it grows.
        kept_log_ratio: log r, 0 where masked; only its gradient is used.
    """
    ratio = _where_it_counts(ratio, advantages, loss_mask)
    advantages = torch.where(loss_mask, advantages, 0.0)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if kept_log_ratio is not None:  # r / sg(r) as 1 + log r - sg(log r)
        clipped = torch.where(ratio > 1 + clip_high, clipped.detach() * (1 + kept_log_ratio - kept_log_ratio.detach()), clipped)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -gain


def cispo_token_loss(
    policy_logprobs: Tensor, ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π of each token; `sg` stops the gradient, so that no token loses its own.

    CISPO, MiniMax-M1 (arXiv:2506.13585). Its authors clip from above alone: `clip_low` of 1 or more.

    Args:
        policy_logprobs: nats; carries the gradient.
        ratio: r = π / π_old; its gradient is not used.
        clip_low, clip_high: the range of the weight, below and above 1.
    """
    weight = torch.where(loss_mask, ratio.detach(), 1.0).clamp(1 - clip_low, 1 + clip_high)
    return weight * policy_gradient_token_loss(policy_logprobs, advantages, loss_mask)


def _where_it_counts(ratio: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """`ratio`, and 1 without gradient where a token is masked or has no advantage: infinity times 0 is no number."""
    return torch.where(loss_mask & (advantages != 0), ratio, 1.0)


class Mismatch(StrEnum):
    """What weighs a token's loss; w is π_old / π_sampled of the token, or the product over the row's trained tokens.

    Truncated importance sampling: Yao et al. (Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025).
    Masked, and both of whole rows: Liu, Li et al. (When Speed Kills Stability, 2025). IcePop (arXiv:2510.18855) also leaves
    out what lies below a lower bound; here small weights stay, since they count for little as they are.
    """

    OFF = "off"  # 1
    TRUNCATE_TOKEN = "truncate_token"  # min(w, cap)
    MASK_TOKEN = "mask_token"  # w, but 0 beyond the cap
    TRUNCATE_SEQUENCE = "truncate_sequence"
    MASK_SEQUENCE = "mask_sequence"

    @property
    def is_of_sequence(self) -> bool:
        return self in (Mismatch.TRUNCATE_SEQUENCE, Mismatch.MASK_SEQUENCE)

    @property
    def is_mask(self) -> bool:
        return self in (Mismatch.MASK_TOKEN, Mismatch.MASK_SEQUENCE)


def mismatch_weights(
    old_logprobs: Tensor, sampled_logprobs: Tensor, loss_mask: Tensor, *, mismatch: Mismatch, cap: float
) -> tuple[Tensor, Tensor]:
    """The weight of each token, and whether its ratio was over the cap; no gradient. Where masked: 1 and False.

    A token that is left out still counts in the update's averages: weights there are laid down before anything is scored.

    Args:
        old_logprobs: nats, (n, T), the sampled tokens as the trainer scores them with the weights that sampled.
        sampled_logprobs: nats, (n, T), the same tokens as the engine reported them.
        loss_mask: bool (n, T).
        mismatch: which weight.
        cap: C, positive.
    """
    log_weights = torch.where(loss_mask, old_logprobs - sampled_logprobs, 0.0).detach()
    if mismatch.is_of_sequence:
        log_weights = torch.where(loss_mask, log_weights.sum(-1, keepdim=True), 0.0)
    if mismatch is Mismatch.OFF:
        return torch.ones_like(log_weights), torch.zeros_like(loss_mask)
    log_cap = math.log(cap)
    is_over = loss_mask & (log_weights > log_cap)
    weights = torch.where(loss_mask, log_weights.clamp(max=log_cap), 0.0).exp()  # a product over a row may exceed any float
    return weights.masked_fill(is_over, 0.0) if mismatch.is_mask else weights, is_over


def high_entropy_mask(entropies: Tensor, loss_mask: Tensor, *, share: float) -> Tensor:
    """True on the floor(share * tokens) trained tokens of highest entropy in each row; of equal ones the first.

    The training code that rStar2-Agent was released with has it as an option that keeps all by default. Only tokens that the
    policy sampled are ranked and counted, so tool output has no part in it. For the tokens of a whole update, give them as one
    row.

    Args:
        entropies: nats, (n, T); no gradient flows from here.
        loss_mask: bool (n, T).
        share: more than 0, up to 1.
    """
    sunk = torch.where(loss_mask, entropies.detach(), -math.inf)
    order = sunk.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    # A share of 0.3 of ten tokens is 2.9999... in binary.
    num_kept = (loss_mask.sum(-1, keepdim=True).double() * share + 1e-9).floor()
    return loss_mask & (rank < num_kept)


def entropy_aware_advantages(advantages: Tensor, entropies: Tensor, loss_mask: Tensor, *, weight: float) -> Tensor:
    """A (1 + weight (H - mean H) / std H) of each trained token: AEPO (arXiv 2510.14545), entropy-aware advantage estimation.

    Mean and std (unbiased, as in its released code) are those of the update's tokens; the code takes them of a micro-batch,
    where a gradient would depend on its size. Equal entropies change nothing.

    Args:
        advantages: (N, T), of the whole update.
        entropies: nats, (N, T), before the first update of the step; no gradient.
        loss_mask: bool (N, T).
    """
    found = entropies[loss_mask].double()
    if found.numel() == 0 or bool((found == found[0]).all()):
        return advantages
    standardized = (entropies.double() - found.mean()) / found.std(correction=1)
    return torch.where(loss_mask, advantages * (1 + weight * standardized), advantages).to(advantages.dtype)


class KLEstimator(StrEnum):
    """Estimates of KL(π || π_ref) on tokens sampled from π; ρ is π_ref / π. As values k1 and k3 are unbiased, k2 nearly.

    The names are Schulman's (Approximating KL Divergence, 2020).

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
    is_clamped: bool = False,
) -> Tensor:
    """Estimate of KL(π || π_ref) of each token, in nats; 0 where masked.

    Args:
        policy_logprobs: nats, (n, T), of tokens that π sampled; carries the gradient.
        reference_logprobs: nats; no gradient.
        loss_mask: bool (n, T).
        is_clamped: of k3, log ρ to ±`MAX_LOG_RATIO` and the estimate to `MAX_K3`, without gradient beyond: one token that the
            reference holds likely and the policy does not would otherwise outweigh all others.
    """
    is_clamped = is_clamped and estimator is KLEstimator.K3
    log_rho = log_ratio(reference_logprobs, policy_logprobs, loss_mask, is_clamped=is_clamped)
    match estimator:
        case KLEstimator.K1:
            return -log_rho
        case KLEstimator.K2:
            return log_rho.square() / 2
        case KLEstimator.K3:
            kl = log_rho.exp() - log_rho - 1
            return kl.clamp(max=MAX_K3) if is_clamped else kl


class Aggregation(StrEnum):
    """The share of a token in the loss of an update, computed once over the whole update.

    T: tokens trained on in the update; T_q: in its group; |o|: in its row; N rows, Q groups.

    Rows and groups without a single token to train on have no part in N and Q.
    """

    TOKEN_MEAN = "token_mean"  # 1/T; rStar2-Agent's released code
    GROUP_TOKEN_MEAN = "group_token_mean"  # 1/(Q T_q); rStar2-Agent (arXiv 2508.20722) Eq. 6, DAPO (arXiv:2503.14476)
    SEQUENCE_MEAN = "sequence_mean"  # 1/(N |o|); GRPO, rStar2-Agent Eq. 1; CS336 assignment 5
    CONSTANT = "constant"  # 1/(N C); Dr. GRPO (arXiv:2503.20783)


def token_weights(loss_mask: Tensor, group_of_row: Tensor, aggregation: Aggregation, *, constant: int | None = None) -> Tensor:
    """Each token's share of the update: loss = sum(weights * token loss). 0 where masked.

    Args:
        loss_mask: bool (N, T), the whole update.
        group_of_row: int64 (N,), equal for rows of one task.
        aggregation: which mean.
        constant: C of `Aggregation.CONSTANT`, in tokens; must be None for the others.

    Returns:
        float32 (N, T).

    Raises:
        ValueError: `constant` is missing, not positive, or set where it has no meaning.
    """
    if (constant is not None) != (aggregation is Aggregation.CONSTANT):
        raise ValueError(f"constant is {constant}, but aggregation is {aggregation}: one is needed exactly where the other is")
    if constant is not None and constant <= 0:
        raise ValueError(f"constant is {constant}: it divides the loss, so it must be positive")
    tokens_of_row = loss_mask.sum(1)
    if not bool(tokens_of_row.any()):
        return torch.zeros(loss_mask.shape, dtype=torch.float32)
    num_rows = int((tokens_of_row > 0).sum())
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            divisor = tokens_of_row.sum().expand_as(tokens_of_row)
        case Aggregation.GROUP_TOKEN_MEAN:
            group = torch.unique(group_of_row, return_inverse=True)[1]
            tokens_of_group = torch.zeros(int(group.max()) + 1, dtype=torch.int64).index_add_(0, group, tokens_of_row)
            divisor = int((tokens_of_group > 0).sum()) * tokens_of_group[group]
        case Aggregation.SEQUENCE_MEAN:
            divisor = num_rows * tokens_of_row
        case Aggregation.CONSTANT:
            assert constant is not None
            divisor = torch.full_like(tokens_of_row, num_rows * constant)
    weight_of_row = 1.0 / divisor.clamp(min=1).double()  # a row without tokens is masked throughout
    return (loss_mask * weight_of_row[:, None]).float()

"""What tokens cost a policy: the settings that methods which differ elsewhere share, and the loss that they make."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from strop.algorithms.aggregation import Aggregation
from strop.algorithms.high_entropy import high_entropy_mask
from strop.algorithms.kl import KLEstimator, token_kl
from strop.algorithms.losses import cispo_token_loss, clip_token_loss, no_clip_token_loss, policy_gradient_token_loss
from strop.algorithms.mismatch import Mismatch, mismatch_weights
from strop.algorithms.protocol import Column, CriticMethod, LossInputs
from strop.algorithms.ratios import RatioLevel, log_ratio, probability_ratio
from strop.config import Config


class Loss(StrEnum):
    """The surrogate whose gradient improves the policy; r is π / π_old."""

    CLIP = "clip"  # min(r A, clip(r) A); PPO, GRPO
    NO_CLIP = "no_clip"  # r A; CS336 assignment 5 Eq. 34
    CISPO = "cispo"  # sg(clip(r)) A log π; MiniMax-M1 (arXiv:2506.13585)
    POLICY_GRADIENT = "policy_gradient"  # A log π; REINFORCE, right only for the first update after sampling

    @property
    def is_clipped(self) -> bool:
        return self in (Loss.CLIP, Loss.CISPO)


class PolicyLoss(Config):
    """token loss = mismatch weight * surrogate + kl_in_loss * KL - entropy_coefficient * entropy."""

    also_called: ClassVar[Mapping[str, str]] = {  # in papers, and in TRL
        "beta": "kl_coefficient",
        "epsilon": "clip_low",
        "epsilon_high": "clip_high",
    }

    loss: Loss = Loss.CLIP
    ratio: RatioLevel = RatioLevel.TOKEN  # of the surrogate and of the KL; sequence: GSPO (arXiv:2507.18071)
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.28, ge=0)  # rStar2-Agent (arXiv 2508.20722) section 2.2.1
    dual_clip: float | None = Field(default=None, gt=1)  # 3 in the released code of rStar2-Agent and ARPO
    kl_coefficient: float = Field(default=0.0, ge=0)  # β of the KL to the reference, in the loss; 0 needs no reference
    kl_estimator: KLEstimator = KLEstimator.K3  # DeepSeek-R1 (arXiv 2501.12948) Eq. 2
    entropy_coefficient: float = Field(default=0.0, ge=0)
    high_entropy_share: float = Field(default=1.0, gt=0, le=1)  # of a row's tokens, those of highest entropy; 1: all
    mismatch: Mismatch = Mismatch.OFF  # a server engine wants one; the embedded engine's gap is rounding
    mismatch_cap: float = Field(default=2.0, gt=0)
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant: int | None = Field(default=None, gt=0)  # C of aggregation = "constant", in tokens

    @model_validator(mode="after")
    def _every_setting_has_a_meaning(self) -> Self:
        loss = f"method.loss is {self.loss.value!r}"
        if not self.loss.is_clipped:
            self._refuse("clip_low", f"{loss}, which does not clip", 'loss = "clip"')
            self._refuse("clip_high", f"{loss}, which does not clip", 'loss = "clip"')
        if self.loss is not Loss.CLIP:
            self._refuse("dual_clip", f"{loss}, which has no second clip", 'loss = "clip"')
        if self.loss is Loss.POLICY_GRADIENT:
            self._refuse("ratio", f"{loss}, which has no ratio", 'loss = "no_clip"')
        if self.kl_coefficient == 0:
            self._refuse("kl_estimator", "method.kl_coefficient is 0", "kl_coefficient = 0.001")
        if self.mismatch is Mismatch.OFF:
            self._refuse("mismatch_cap", "method.mismatch is 'off'", 'mismatch = "truncate_token"')
        check_constant(self.aggregation, self.constant)
        return self

    @property
    def needs(self) -> frozenset[Column]:
        """Only what the settings read, so that nothing else is scored."""
        needed = set()
        if self.loss is not Loss.POLICY_GRADIENT or self.mismatch is not Mismatch.OFF:
            needed.add(Column.OLD_LOGPROBS)
        if self.kl_coefficient > 0:
            needed.add(Column.REFERENCE_LOGPROBS)
        return frozenset(needed)

    @property
    def kl_in_loss(self) -> float:
        """β of the KL that `token_loss` adds."""
        return self.kl_coefficient

    @property
    def critic(self) -> CriticMethod | None:
        """None: rewards are compared with each other."""
        return None

    def token_loss(self, policy_logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """The loss of each token, (n, T), 0 where masked. Only the surrogate is weighted for the mismatch."""
        loss = self._surrogate(policy_logprobs, inputs)
        if self.mismatch is not Mismatch.OFF:
            weights = self._mismatch_weights(inputs)[0]
            loss = torch.where(weights > 0, loss, 0.0) * weights  # what is left out may be infinite
        if self.kl_in_loss > 0:
            reference = inputs.columns[Column.REFERENCE_LOGPROBS]
            kl = token_kl(policy_logprobs, reference, inputs.loss_mask, estimator=self.kl_estimator, level=self.ratio)
            loss = loss + self.kl_in_loss * kl
        if self.entropy_coefficient > 0:
            loss = loss - self.entropy_coefficient * torch.where(inputs.loss_mask, inputs.entropies, 0.0)
        if self.high_entropy_share < 1:
            is_learnt = high_entropy_mask(inputs.entropies, inputs.loss_mask, share=self.high_entropy_share)
            loss = torch.where(is_learnt, loss, 0.0)
        return loss

    @torch.no_grad()
    def token_statistics(self, policy_logprobs: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        """Per-token figures of an update, (n, T), 0 where masked; no gradient.

        `ratio`: π / π_old, at the level of the loss. `clip_fraction_low`, `_high`, `_dual`: 1 where the clip took the gradient
        away (of CISPO: where it held the weight). `old_kl_nats`: k3 estimate of KL(π_old || π), on tokens of π_old.
        `sampler_ratio`: π_old / π_sampled, uncapped. `sampler_gap_nats`: |its log|; `sampler_kl_nats`: k3
        estimate of KL(π_sampled || π_old). `mismatch_weight`: by which the loss was
        weighted. `mismatch_over_cap_fraction`: 1 where that was capped or masked. `sampler_row_log_ratio`: of a mismatch by
        row, log of the row's uncapped weight, in nats. `reference_kl_nats`: k3, by token.

        They are averaged, so quantiles of the ratios are not among them; who holds the batch's columns can take those. A loss
        without old log-probs is on policy: π stands for π_old.
        """
        mask = inputs.loss_mask
        old_logprobs = inputs.columns.get(Column.OLD_LOGPROBS, policy_logprobs)
        ratio = probability_ratio(policy_logprobs, old_logprobs, mask, self.ratio)
        old_log_ratio = log_ratio(policy_logprobs, old_logprobs, mask)
        sampler_log_ratio = log_ratio(old_logprobs, inputs.sampled_logprobs, mask)
        statistics = {
            "ratio": torch.where(mask, ratio, 0.0),
            **self._clip_fractions(ratio, inputs),
            "old_kl_nats": old_log_ratio.exp() - old_log_ratio - 1,
            "sampler_ratio": torch.where(mask, sampler_log_ratio.exp(), 0.0),
            "sampler_gap_nats": sampler_log_ratio.abs(),
            "sampler_kl_nats": sampler_log_ratio.exp() - sampler_log_ratio - 1,
        }
        if self.mismatch is not Mismatch.OFF:
            weights, is_over = self._mismatch_weights(inputs)
            statistics["mismatch_weight"] = torch.where(mask, weights, 0.0)
            statistics["mismatch_over_cap_fraction"] = is_over.to(weights.dtype)
            if self.mismatch.is_of_sequence:  # its log: a product over a row may exceed any float
                statistics["sampler_row_log_ratio"] = torch.where(mask, sampler_log_ratio.sum(-1, keepdim=True), 0.0)
        if self.kl_coefficient > 0:
            statistics["reference_kl_nats"] = token_kl(policy_logprobs, inputs.columns[Column.REFERENCE_LOGPROBS], mask)
        return statistics

    def _surrogate(self, policy_logprobs: Tensor, inputs: LossInputs) -> Tensor:
        advantages, mask = inputs.advantages, inputs.loss_mask
        if self.loss is Loss.POLICY_GRADIENT:
            return policy_gradient_token_loss(policy_logprobs, advantages, mask)
        ratio = probability_ratio(policy_logprobs, inputs.columns[Column.OLD_LOGPROBS], mask, self.ratio)
        low, high = self.clip_low, self.clip_high
        match self.loss:
            case Loss.CLIP:
                return clip_token_loss(ratio, advantages, mask, clip_low=low, clip_high=high, dual_clip=self.dual_clip)
            case Loss.NO_CLIP:
                return no_clip_token_loss(ratio, advantages, mask)
            case Loss.CISPO:
                return cispo_token_loss(policy_logprobs, ratio, advantages, mask, clip_low=low, clip_high=high)

    def _mismatch_weights(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        return mismatch_weights(
            inputs.columns[Column.OLD_LOGPROBS],
            inputs.sampled_logprobs,
            inputs.loss_mask,
            mismatch=self.mismatch,
            cap=self.mismatch_cap,
        )

    def _clip_fractions(self, ratio: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        is_below = inputs.loss_mask & (ratio < 1 - self.clip_low) & self.loss.is_clipped
        is_above = inputs.loss_mask & (ratio > 1 + self.clip_high) & self.loss.is_clipped
        if self.loss is Loss.CLIP:  # the other side of each is never clipped
            is_below = is_below & (inputs.advantages < 0)
            is_above = is_above & (inputs.advantages > 0)
        fractions = {"clip_fraction_low": is_below, "clip_fraction_high": is_above}
        if self.dual_clip is not None:
            fractions["clip_fraction_dual"] = inputs.loss_mask & (ratio > self.dual_clip) & (inputs.advantages < 0)
        return {name: is_clipped.to(ratio.dtype) for name, is_clipped in fractions.items()}

    def _refuse(self, name: str, why: str, instead: str) -> None:
        """Raises `ValueError` unless the setting `name`, which has no effect because of `why`, is at its default."""
        value = getattr(self, name)
        if value != type(self).model_fields[name].default:
            shown = repr(value.value) if isinstance(value, StrEnum) else value
            raise ValueError(f"method.{name} is {shown} but {why}. Remove it, or set {instead}.")


def check_constant(aggregation: Aggregation, constant: int | None) -> None:
    """Raises `ValueError` unless `constant` is there exactly where `aggregation` divides by it."""
    if aggregation is Aggregation.CONSTANT and constant is None:
        raise ValueError(
            'method.aggregation is "constant" but method.constant is not set. Set it to the number of tokens to divide by'
            " (Dr. GRPO uses the largest response length, 3000)."
        )
    if aggregation is not Aggregation.CONSTANT and constant is not None:
        raise ValueError(
            f"method.constant is {constant} but method.aggregation is {aggregation.value!r}, which does not use it. Remove it,"
            ' or set aggregation = "constant".'
        )

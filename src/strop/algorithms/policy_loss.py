"""What tokens cost a policy: the settings that methods which differ elsewhere share, and the loss that they make."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from strop.algorithms.losses import (
    Aggregation,
    KLEstimator,
    Mismatch,
    RatioLevel,
    cispo_token_loss,
    clip_token_loss,
    entropy_aware_advantages,
    high_entropy_mask,
    log_ratio,
    mismatch_weights,
    no_clip_token_loss,
    policy_gradient_token_loss,
    probability_ratio,
    token_kl,
)
from strop.algorithms.method import Column, LossInputs, Method


class Loss(StrEnum):
    """The surrogate whose gradient improves the policy; r is π / π_old."""

    CLIP = "clip"  # min(r A, clip(r) A); PPO, GRPO
    STOP_GRADIENT_CLIP = "stop_gradient_clip"  # the same, with the gradient of good tokens above the bound; AEPO
    NO_CLIP = "no_clip"  # r A; CS336 assignment 5 Eq. 34
    CISPO = "cispo"  # sg(clip(r)) A log π; MiniMax-M1 (arXiv:2506.13585)
    POLICY_GRADIENT = "policy_gradient"  # A log π; REINFORCE, right only for the first update after sampling

    @property
    def is_clipped(self) -> bool:
        return self.is_pessimistic or self is Loss.CISPO

    @property
    def is_pessimistic(self) -> bool:
        """Whether only gains are clipped: above the range with A > 0, and below it with A < 0."""
        return self in (Loss.CLIP, Loss.STOP_GRADIENT_CLIP)


class PolicyLoss(Method):
    """token loss = mismatch weight * surrogate + kl_in_loss * KL - entropy_coefficient * entropy."""

    class Config(Method.Config):
        """Keys that methods with this loss share."""

        also_called: ClassVar[Mapping[str, str]] = {  # in papers, and in TRL
            "beta": "kl_coefficient",
            "epsilon": "clip_low",
            "epsilon_high": "clip_high",
        }
        loss: Loss = Field(Loss.CLIP, description="The surrogate of a token.")
        # sequence: GSPO (arXiv:2507.18071)
        ratio: RatioLevel = Field(
            RatioLevel.TOKEN,
            description="Probability ratio of the surrogate: of the token, or of its sequence as a geometric mean (sequence) or"
            " as a product (sequence_sum).",
        )
        clamp_log_ratios: bool = Field(
            True, description="Keep log-ratios within 20 nats, their mean over a sequence and k3 below 10, as verl does."
        )
        clip_low: float = Field(0.2, ge=0, description="How far the ratio may fall below 1; 1 or more never clips.")
        # rStar2-Agent (arXiv:2508.20722) section 2.2.1
        clip_high: float = Field(0.28, ge=0, description="How far the ratio may rise above 1.")
        # 3 in the released code of rStar2-Agent and ARPO
        dual_clip: float | None = Field(
            None, gt=1, description="Upper bound of the ratio for tokens with a negative advantage. Default: none."
        )
        kl_coefficient: float = Field(
            0.0, ge=0, description="Weight of the KL divergence from the reference model; 0 loads no reference."
        )
        # DeepSeek-R1 (arXiv:2501.12948) Eq. 2
        kl_estimator: KLEstimator = Field(KLEstimator.K3, description="Estimator of the KL divergence.")
        entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
        # 0.2 in the released code of AEPO (arXiv 2510.14545)
        entropy_advantage: float = Field(
            0.0,
            ge=0,
            description="How much an advantage grows with its token's entropy before the first update of the step, per standard"
            " deviation over an update.",
        )
        high_entropy_share: float = Field(
            1.0, gt=0, le=1, description="Share of the tokens that are trained: those of highest entropy."
        )
        # update: Wang et al. (arXiv:2506.01939); row: the training code that rStar2-Agent was released with
        high_entropy_over: Literal["update", "row"] = Field(
            "update",
            description="Which tokens are ranked. update: all of an update, by their entropy before the first update of the"
            " step, and the loss is averaged over those that are trained; row: each row's, and all tokens count in averages.",
        )
        mismatch: Mismatch = Field(
            Mismatch.OFF,
            description="Correction for the difference between sampler and trainer. Default with a server engine or"
            " with async_rollouts: truncate_token.",
        )
        mismatch_cap: float = Field(2.0, gt=0, description="Upper bound of the correction weight.")
        aggregation: Aggregation = Field(Aggregation.TOKEN_MEAN, description="How token losses are averaged.")
        constant: int | None = Field(None, gt=0, description='Divisor of aggregation = "constant", in tokens.')

        @model_validator(mode="after")
        def _every_setting_has_a_meaning(self) -> Self:
            loss = f"method.loss is {self.loss.value!r}"
            if not self.loss.is_clipped:
                self._refuse("clip_low", f"{loss}, which does not clip", 'loss = "clip"')
                self._refuse("clip_high", f"{loss}, which does not clip", 'loss = "clip"')
            if not self.loss.is_pessimistic:
                self._refuse("dual_clip", f"{loss}, which has no second clip", 'loss = "clip"')
            if self.loss is Loss.POLICY_GRADIENT:
                self._refuse("ratio", f"{loss}, which has no ratio", 'loss = "no_clip"')
            if self.kl_coefficient == 0:
                self._refuse("kl_estimator", "method.kl_coefficient is 0", "kl_coefficient = 0.001")
            if self.high_entropy_share == 1:
                self._refuse("high_entropy_over", "method.high_entropy_share is 1", "high_entropy_share = 0.2")
            if self.mismatch is Mismatch.OFF:
                self._refuse("mismatch_cap", "method.mismatch is 'off'", 'mismatch = "truncate_token"')
            check_constant(self.aggregation, self.constant)
            return self

        def _refuse(self, name: str, why: str, instead: str) -> None:
            """Raises `ValueError` unless the setting `name`, which has no effect because of `why`, is at its default."""
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                shown = repr(value.value) if isinstance(value, StrEnum) else value
                raise ValueError(f"method.{name} is {shown} but {why}. Remove it, or set {instead}.")

    config: Config

    @property
    def aggregation(self) -> Aggregation:
        return self.config.aggregation

    @property
    def constant(self) -> int | None:
        return self.config.constant

    @property
    def makes_one_update(self) -> bool:
        return self.config.loss is Loss.POLICY_GRADIENT

    def notes(self, num_updates: int) -> list[str]:
        is_on_policy = self.config.loss.is_clipped and num_updates == 1
        return ["clipping has no effect: one update per step, whose ratio is 1"] if is_on_policy else []

    @property
    def needs(self) -> frozenset[Column]:
        """Only what the settings read, so that nothing else is scored."""
        needed = set()
        if self.config.loss is not Loss.POLICY_GRADIENT or self.config.mismatch is not Mismatch.OFF:
            needed.add(Column.OLD_LOGPROBS)
        if self.config.kl_coefficient > 0:
            needed.add(Column.REFERENCE_LOGPROBS)
        if self._ranks_the_update or self.config.entropy_advantage > 0:
            needed.add(Column.OLD_ENTROPIES)
        return frozenset(needed)

    @property
    def kl_in_loss(self) -> float:
        """β of the KL that `token_loss` adds."""
        return self.config.kl_coefficient

    @property
    def _ranks_the_update(self) -> bool:
        return self.config.high_entropy_share < 1 and self.config.high_entropy_over == "update"

    def trained_tokens(self, loss_mask: Tensor, columns: Mapping[Column, Tensor]) -> Tensor:
        """All, or those of highest entropy in the update."""
        if not self._ranks_the_update:
            return loss_mask
        flat = (columns[Column.OLD_ENTROPIES].reshape(1, -1), loss_mask.reshape(1, -1))
        return high_entropy_mask(*flat, share=self.config.high_entropy_share).view_as(loss_mask)

    def scaled_advantages(self, advantages: Tensor, loss_mask: Tensor, columns: Mapping[Column, Tensor]) -> Tensor:
        """As they are, or by entropy."""
        if self.config.entropy_advantage == 0:
            return advantages
        entropies = columns[Column.OLD_ENTROPIES]
        return entropy_aware_advantages(advantages, entropies, loss_mask, weight=self.config.entropy_advantage)

    def token_loss(self, policy_logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """The loss of each token, (n, T), 0 where masked. Only the surrogate is weighted for the mismatch."""
        loss = self._surrogate(policy_logprobs, inputs)
        if self.config.mismatch is not Mismatch.OFF:
            weights = self._mismatch_weights(inputs)[0]
            loss = torch.where(weights > 0, loss, 0.0) * weights  # what is left out may be infinite
        if self.kl_in_loss > 0:
            reference = inputs.columns[Column.REFERENCE_LOGPROBS]
            kl = self._kl(policy_logprobs, reference, inputs.loss_mask, self.config.kl_estimator)
            loss = loss + self.kl_in_loss * kl
        if self.config.entropy_coefficient > 0:
            loss = loss - self.config.entropy_coefficient * torch.where(inputs.loss_mask, inputs.entropies, 0.0)
        if self.config.high_entropy_share < 1 and not self._ranks_the_update:
            is_learnt = high_entropy_mask(inputs.entropies, inputs.loss_mask, share=self.config.high_entropy_share)
            loss = torch.where(is_learnt, loss, 0.0)
        return loss

    @torch.no_grad()
    def token_statistics(self, policy_logprobs: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        """Per-token figures of an update, (n, T), 0 where masked; no gradient.

        `ratio`: π / π_old, at the level of the loss. `clip_fraction_low`, `_high`, `_dual`: 1 where the clip took the gradient
        away (of CISPO and the stop-gradient clip: where it held the weight). `old_kl_nats`: k3 estimate of KL(π_old || π), on
        tokens of π_old. `sampler_ratio`: π_old / π_sampled, uncapped. `sampler_gap_nats`: |its log|; `sampler_kl_nats`: k3
        estimate of KL(π_sampled || π_old). `mismatch_weight`: by which the loss was
        weighted. `mismatch_over_cap_fraction`: 1 where that was capped or masked. `sampler_row_log_ratio`: of a mismatch by
        row, log of the row's uncapped weight, in nats. `reference_kl_nats`: k3, by token.

        They are averaged, so quantiles of the ratios are not among them; who holds the batch's columns can take those. A loss
        without old log-probs is on policy: π stands for π_old.
        """
        mask = inputs.loss_mask
        old_logprobs = inputs.columns.get(Column.OLD_LOGPROBS, policy_logprobs)
        ratio = self._ratio(policy_logprobs, old_logprobs, mask)
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
        if self.config.mismatch is not Mismatch.OFF:
            weights, is_over = self._mismatch_weights(inputs)
            statistics["mismatch_weight"] = torch.where(mask, weights, 0.0)
            statistics["mismatch_over_cap_fraction"] = is_over.to(weights.dtype)
            if self.config.mismatch.is_of_sequence:  # its log: a product over a row may exceed any float
                statistics["sampler_row_log_ratio"] = torch.where(mask, sampler_log_ratio.sum(-1, keepdim=True), 0.0)
        if self.config.kl_coefficient > 0:
            reference = inputs.columns[Column.REFERENCE_LOGPROBS]
            statistics["reference_kl_nats"] = self._kl(policy_logprobs, reference, mask, KLEstimator.K3)
        return statistics

    def _surrogate(self, policy_logprobs: Tensor, inputs: LossInputs) -> Tensor:
        advantages, mask = inputs.advantages, inputs.loss_mask
        if self.config.loss is Loss.POLICY_GRADIENT:
            return policy_gradient_token_loss(policy_logprobs, advantages, mask)
        old_logprobs = inputs.columns[Column.OLD_LOGPROBS]
        ratio = self._ratio(policy_logprobs, old_logprobs, mask)
        low, high = self.config.clip_low, self.config.clip_high
        match self.config.loss:
            case Loss.CLIP | Loss.STOP_GRADIENT_CLIP as loss:
                kept = None if loss is Loss.CLIP else log_ratio(policy_logprobs, old_logprobs, mask, self.config.ratio)
                return clip_token_loss(
                    ratio,
                    advantages,
                    mask,
                    clip_low=low,
                    clip_high=high,
                    dual_clip=self.config.dual_clip,
                    kept_log_ratio=kept,
                )
            case Loss.NO_CLIP:
                return no_clip_token_loss(ratio, advantages, mask)
            case Loss.CISPO:
                return cispo_token_loss(policy_logprobs, ratio, advantages, mask, clip_low=low, clip_high=high)

    def _ratio(self, policy_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        is_clamped = self.config.clamp_log_ratios
        return probability_ratio(policy_logprobs, old_logprobs, mask, self.config.ratio, is_clamped=is_clamped)

    def _kl(self, policy_logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: KLEstimator) -> Tensor:
        return token_kl(policy_logprobs, reference, mask, estimator=estimator, is_clamped=self.config.clamp_log_ratios)

    def _mismatch_weights(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        return mismatch_weights(
            inputs.columns[Column.OLD_LOGPROBS],
            inputs.sampled_logprobs,
            inputs.loss_mask,
            mismatch=self.config.mismatch,
            cap=self.config.mismatch_cap,
        )

    def _clip_fractions(self, ratio: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        is_below = inputs.loss_mask & (ratio < 1 - self.config.clip_low) & self.config.loss.is_clipped
        is_above = inputs.loss_mask & (ratio > 1 + self.config.clip_high) & self.config.loss.is_clipped
        if self.config.loss.is_pessimistic:
            is_below = is_below & (inputs.advantages < 0)
            is_above = is_above & (inputs.advantages > 0)
        fractions = {"clip_fraction_low": is_below, "clip_fraction_high": is_above}
        if self.config.dual_clip is not None:
            fractions["clip_fraction_dual"] = inputs.loss_mask & (ratio > self.config.dual_clip) & (inputs.advantages < 0)
        return {name: is_clipped.to(ratio.dtype) for name, is_clipped in fractions.items()}


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

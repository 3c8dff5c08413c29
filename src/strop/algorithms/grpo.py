"""GRPO: group-relative advantages and a clipped, token-level ratio. DeepSeekMath (arXiv:2402.03300).

Its variants are settings: Dr. GRPO (arXiv:2503.20783) is `normalize_std = false, aggregation = "constant"`; the GRPO of
DeepSeek-R1 (arXiv 2501.12948) has `kl_coefficient = 0.001`; clip-higher and dropped ties are DAPO's (arXiv:2503.14476).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from strop.algorithms.advantages import outcome_advantages
from strop.algorithms.aggregation import Aggregation
from strop.algorithms.losses import grpo_token_loss, k3_token_kl, ratio_statistics
from strop.algorithms.protocol import Column, LossInputs, Selection
from strop.algorithms.selection import check_group_size, describe_tie, describe_voids, drop_all, keep_all, num_to_keep
from strop.config import Config
from strop.types import Group


class GRPO(Config):
    """Learns from every rollout of a group, or from none of them."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.28, ge=0)  # rStar2-Agent (arXiv 2508.20722) section 2.2.1
    eps: float = Field(default=1e-6, ge=0)  # added to the std of rewards
    normalize_std: bool = True  # False: Dr. GRPO
    drop_tied: bool = False  # True: leave groups with equal rewards out, which makes the remaining tokens weigh more
    allow_group_of_one: bool = False
    kl_coefficient: float = Field(default=0.0, ge=0)  # β of the KL to the reference, in the loss; 0 needs no reference
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant: int | None = Field(default=None, gt=0)  # C of aggregation = "constant", in tokens

    @model_validator(mode="after")
    def _constant_goes_with_its_aggregation(self) -> Self:
        check_constant(self.aggregation, self.constant)
        return self

    @property
    def needs(self) -> frozenset[Column]:
        reference = {Column.REFERENCE_LOGPROBS} if self.kl_coefficient > 0 else set()
        return frozenset({Column.OLD_LOGPROBS} | reference)

    def num_rollouts(self, group_size: int) -> int:
        """As many as are kept. Raises `ConfigError` for a group of one, unless that is allowed."""
        check_group_size(group_size, allow_group_of_one=self.allow_group_of_one)
        return group_size

    def select(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """Keeps all; none of a group that voids left with less than 2, or that is tied while ties are dropped."""
        num_kept = num_to_keep(group, group_size=group_size, num_rollouts=self.num_rollouts(group_size))
        if num_kept < min(2, group_size):
            return drop_all(group, describe_voids(group, group_size))
        if group.is_tied and self.drop_tied and group_size > 1:
            return drop_all(group, describe_tie(group.rewards))
        return keep_all(group, "kept: GRPO learns from every rollout")

    def advantages(self, selections: Sequence[Selection]) -> list[list[Tensor]]:
        return outcome_advantages(
            selections, normalize_std=self.normalize_std, eps=self.eps, allow_group_of_one=self.allow_group_of_one
        )

    def token_loss(self, policy_logprobs: Tensor, inputs: LossInputs) -> Tensor:
        loss = grpo_token_loss(
            policy_logprobs,
            inputs.columns[Column.OLD_LOGPROBS],
            inputs.advantages,
            inputs.loss_mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        if self.kl_coefficient > 0:
            reference = inputs.columns[Column.REFERENCE_LOGPROBS]
            loss = loss + self.kl_coefficient * k3_token_kl(policy_logprobs, reference, inputs.loss_mask)
        return loss

    def token_statistics(self, policy_logprobs: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        statistics = ratio_statistics(
            policy_logprobs,
            inputs.columns[Column.OLD_LOGPROBS],
            inputs.sampled_logprobs,
            inputs.advantages,
            inputs.loss_mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        if self.kl_coefficient > 0:
            reference = inputs.columns[Column.REFERENCE_LOGPROBS]
            with torch.no_grad():
                statistics["reference_kl_nats"] = k3_token_kl(policy_logprobs, reference, inputs.loss_mask)
        return statistics


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

"""Preference pairs as token batches: DPO as a policy gradient whose advantages are known before the backward pass.

The loss of a pair depends on both of its responses, but its gradient is that of their log-probs, each times a number that a
forward pass tells (`response_advantages`). So both are rows of their own, and may lie in two micro-batches (law 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop.algorithms.dpo import dpo_loss, implicit_rewards, ranked_rightly, response_advantages, sequence_logprobs
from strop.algorithms.losses import Aggregation, policy_gradient_token_loss
from strop.algorithms.method import Column, LossInputs
from strop.training.batch import Row, TokenBatch, pack_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PairIds:
    """A pair as a policy reads it: the prompt, and two responses to it, each as it would have been sampled."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def length(self) -> int:
        """Of the longer of its rows."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRewards:
    """The implicit rewards of some pairs, in nats; float64 (n,)."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margins(self) -> Tensor:
        return self.chosen - self.rejected

    def figures(self) -> dict[str, float]:
        """Means over the pairs."""
        of_pair = {
            "loss": dpo_loss(self.margins),
            "accuracy": ranked_rightly(self.margins),
            "margin": self.margins,
            "chosen_reward": self.chosen,
            "rejected_reward": self.rejected,
        }
        return {name: values.mean().item() for name, values in of_pair.items()}


def pack_pairs(pairs: Sequence[PairIds]) -> TokenBatch:
    """The pairs of one update: two rows each, the chosen response before the rejected one, each token weighing 1/(pairs).

    Trained on are the tokens of responses. They deserve nothing yet: `with_advantages` says what. The temperature is 1.
    """
    rows = [
        Row(
            ids=(*pair.prompt, *response),
            loss_mask=[False] * len(pair.prompt) + [True] * len(response),
            advantages=torch.zeros(len(pair.prompt) + len(response)),
            sampled_logprobs=[0.0] * (len(pair.prompt) + len(response)),
            group=index,
        )
        for index, pair in enumerate(pairs)
        for response in (pair.chosen, pair.rejected)
    ]
    batch = pack_rows(rows, aggregation=Aggregation.CONSTANT, temperature=1.0, constant=1)
    return replace(batch, loss_weights=2 * batch.loss_weights)  # that mean is over rows, of which a pair has two


def rewards_of(batch: TokenBatch, *, beta: float) -> PairRewards:
    """What the columns of a batch of `pack_pairs` say: log-probs of policy and reference."""
    policy, reference = (
        sequence_logprobs(batch.columns[column].double(), batch.loss_mask)  # sums of thousands, whose difference counts
        for column in (Column.OLD_LOGPROBS, Column.REFERENCE_LOGPROBS)
    )
    rewards = implicit_rewards(policy, reference, beta=beta)
    return PairRewards(chosen=rewards[::2], rejected=rewards[1::2])


def with_advantages(batch: TokenBatch, margins: Tensor, *, beta: float) -> TokenBatch:
    """`batch` of `pack_pairs` with what each of its tokens deserves.

    Args:
        margins: of its pairs, (n,), under the policy as it is before the update.
    """
    of_chosen = response_advantages(margins, beta=beta)
    of_row = torch.stack([of_chosen, -of_chosen], dim=1).flatten().to(batch.advantages.dtype)
    return replace(batch, advantages=torch.where(batch.loss_mask, of_row[:, None], 0.0))


def pair_token_loss(policy_logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """-A log π of each token of a response, 0 where masked; added up, it has the gradient of DPO's loss and another value."""
    return policy_gradient_token_loss(policy_logprobs, inputs.advantages, inputs.loss_mask)


def pair_token_statistics(policy_logprobs: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
    """`logprob_nats` of each token of a response, chosen or rejected."""
    return {"logprob_nats": torch.where(inputs.loss_mask, policy_logprobs, 0.0)}

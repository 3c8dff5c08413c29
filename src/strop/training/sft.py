"""Demonstrations as token batches: supervised fine-tuning is the policy-gradient loss with advantage 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.losses import Aggregation, policy_gradient_token_loss
from strop.algorithms.method import LossInputs
from strop.training.batch import Row, TokenBatch, pack_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive ids of one origin. Only a demonstrator's turns are imitated."""

    ids: tuple[int, ...]
    is_demonstrator: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation to imitate: prompt, turns and observations, each with its provenance."""

    segments: tuple[Segment, ...]

    @property
    def ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.ids]

    @property
    def loss_mask(self) -> list[bool]:
        """True on tokens that lie in a demonstrator's turn."""
        return [segment.is_demonstrator for segment in self.segments for _ in segment.ids]


def cut_into_rows(demonstrations: Iterable[Demonstration], length: int) -> Iterator[Demonstration]:
    """Place demonstrations end to end and cut them into rows of `length` tokens that are imitated, prompts included.

    CS336 assignment 5, supplement, section 3.2: a row begins with the last id of the row before it, which nothing predicts; it
    may begin within a demonstration, and its tokens see those of others before them. A last row that is not full is dropped.
    """
    ids: list[int] = []
    for each in demonstrations:
        ids += each.ids
        while len(ids) > length:
            yield Demonstration(segments=(Segment(ids=tuple(ids[: length + 1]), is_demonstrator=True),))
            ids = ids[length:]


def pack_demonstrations(demonstrations: Sequence[Demonstration]) -> TokenBatch:
    """One update's demonstrations, in the order given; every trained token weighs 1/T over the whole update.

    The temperature is 1: the likelihood of the data under the model itself. Raises `ValueError` for a demonstration of no ids.
    """
    rows = []
    for index, demonstration in enumerate(demonstrations):
        ids = demonstration.ids
        if not ids:
            raise ValueError(f"demonstration {index} has no ids")
        rows.append(
            Row(
                ids=ids,
                loss_mask=demonstration.loss_mask,
                advantages=torch.ones(len(ids)),
                group=index,
            )
        )
    return pack_rows(rows, aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)


def sft_token_loss(policy_logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """-A log π of each trained token, in nats; 0 where masked. A demonstrated token has the advantage 1.

    With the advantages of DPO (`preferences.with_advantages`) its sum has the gradient of DPO's loss and another value.
    """
    return policy_gradient_token_loss(policy_logprobs, inputs.advantages, inputs.loss_mask)


def sft_token_statistics(policy_logprobs: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
    """`logprob_nats` of each trained token: its mean over demonstrations is minus the log of the perplexity."""
    return {"logprob_nats": torch.where(inputs.loss_mask, policy_logprobs, 0.0)}

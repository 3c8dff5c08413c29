"""Is the loss put on the tokens that the policy sampled, and on no other?"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from strop.doctor.examination import Examination, origins
from strop.doctor.finding import Finding, Origin

NAME = "loss mask"


async def check_mask(examination: Examination) -> Finding:
    """Compare the packed mask with the provenance of each token, which the conversations recorded."""
    batch = examination.batch
    expected = torch.zeros_like(batch.loss_mask)
    num_of: Counter[Origin] = Counter()
    wrong: Counter[str] = Counter()
    for index, conversation in enumerate(examination.conversations):
        for position, origin in enumerate(origins(conversation.trajectory)):
            num_of[origin] += 1
            is_sampled = expected[index, position] = origin is Origin.SAMPLED
            is_trained = bool(batch.loss_mask[index, position])
            if is_sampled != is_trained:
                wrong[f"{origin} tokens {'left out' if is_sampled else 'trained on'}"] += 1
    padding = int((batch.loss_mask & ~_within(batch.lengths, batch.loss_mask.shape[1])).sum())
    if padding:
        wrong["padding tokens trained on"] = padding
    if not wrong:
        num_sampled, num_rollouts = num_of[Origin.SAMPLED], len(examination.conversations)
        others = ", ".join(f"{num_of[origin]} {origin}" for origin in Origin if origin is not Origin.SAMPLED)
        return Finding.fine(NAME, f"trains on the {num_sampled} sampled tokens of {num_rollouts} rollouts, not on {others}")
    told = ", ".join(f"{num} {what}" for what, num in wrong.most_common())
    shift = _shift(expected, batch.loss_mask)
    if shift:
        side = "right" if shift > 0 else "left"
        return Finding(
            check=NAME,
            detail=f"the packed mask lies {abs(shift)} to the {side} of the tokens that were sampled: {told}.",
            remedy=(
                "Do not shift the mask in pack(): column t speaks of the token ids[:, t]; the step from a token to the logits"
                " that predict it belongs to token_logprobs alone."
            ),
        )
    return Finding(
        check=NAME,
        detail=f"the packed mask is not the provenance of the tokens: {told}.",
        remedy="Let pack() take the mask from Trajectory.loss_mask, row by row and unchanged.",
    )


def _shift(expected: Tensor, mask: Tensor) -> int:
    """By how many columns `mask` is moved against `expected`; 0 when that does not explain it."""
    for shift in (1, -1, 2, -2):
        moved = torch.zeros_like(expected)
        if shift > 0:
            moved[:, shift:] = expected[:, :-shift]
        else:
            moved[:, :shift] = expected[:, -shift:]
        if torch.equal(moved, mask) or torch.equal(torch.roll(expected, shift, dims=1), mask):
            return shift
    return 0


def _within(lengths: Tensor, num_columns: int) -> Tensor:
    """Bool (N, T): True on tokens, False on padding."""
    return torch.arange(num_columns)[None] < lengths[:, None]

"""ARPO: rollouts branch where tool results raise the policy's entropy, and share the credit for what they share.

ARPO (arXiv 2507.19849) section 2.2. It is GRPO on a branch tree: with no branches every number is GRPO's. Hard credit gives a
token that k rollouts share the mean of their advantages. Soft credit, the paper's choice and all that its released code has,
is plain GRPO on one row for each rollout, where a shared token stands k times with k advantages. The gradients are equal
where tokens are averaged alike (`token_mean`) and the ratio is 1. They differ where a row's tokens weigh by its length
(`sequence_mean`), where off policy the clip treats good and bad advantages of one token apart, and where a shared token is
counted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from strop.algorithms.advantages import outcome_advantages, scalar_advantages
from strop.algorithms.branch_tree import repeated_lengths, shared_lengths
from strop.algorithms.group_method import GroupMethod
from strop.algorithms.protocol import Decision, Selection
from strop.algorithms.selection import check_group_size, keep_group, leave_truncated_out
from strop.types import Group, Trajectory


class ARPO(GroupMethod):
    """Learns from every rollout of a branch tree, or from none of them."""

    name: Literal["arpo"] = "arpo"
    clip_high: float = Field(default=0.2, ge=0)  # symmetric, as in its scripts
    credit: Literal["soft", "hard"] = "soft"  # section 2.2.2, and 2.2.1
    # once: the rollout with the lowest key is trained on what it shares, the others on what is their own. With soft credit
    # its own advantage stands there; that of the others never reaches what they share.
    shared_token_weight: Literal["per_descendant", "once"] = "per_descendant"

    def num_rollouts(self, group_size: int) -> int:
        """M, as many as are kept, branches among them. Raises `ConfigError` for a group of one."""
        check_group_size(group_size, allow_group_of_one=False)
        return group_size

    def select(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """As GRPO's; each decision says how many shared tokens are counted elsewhere."""

        def keep(rollouts: Group) -> Selection:
            return keep_group(
                rollouts,
                group_size=group_size,
                drop_tied=self.drop_tied,
                tied_by=self.tied_by,
                needs_group=self.advantage.needs_group,
                reason="kept: ARPO learns from every rollout",
            )

        selection = leave_truncated_out(group, keep) if self.overlong_filter else keep(group)
        return _told_of_its_tree(selection, counts_once=self.shared_token_weight == "once")

    def advantages(self, selections: Sequence[Selection]) -> list[list[Tensor]]:
        if self.credit == "soft":
            return outcome_advantages(selections, self.advantage, eps=self.eps, allow_group_of_one=False)
        of_groups = scalar_advantages(selections, self.advantage, eps=self.eps, allow_group_of_one=False)
        return [
            hard_advantages([scored.trajectory for scored in selection.kept], of_group, tree=selection.group.tree)
            for selection, of_group in zip(selections, of_groups, strict=True)
        ]


def hard_advantages(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], *, tree: Iterable[Trajectory] = ()
) -> list[Tensor]:
    """Each token gets the mean advantage of the trajectories that share it; ARPO section 2.2.1, "hard" advantage estimation.

    Args:
        trajectories: those of one task that are learnt from, in any order.
        advantages: of each trajectory as a whole.
        tree: the rest of their branch tree. It has no part in the mean, but joins those that are learnt from.

    Returns:
        Per trajectory float32 (len(trajectory.ids),). The prompt, which is never trained on, gets the trajectory's own.
    """
    shared = shared_lengths(trajectories, tree=tree)
    per_token = []
    for trajectory, own, with_others in zip(trajectories, advantages, shared, strict=True):
        tokens = torch.full((len(trajectory.ids),), own, dtype=torch.float32)
        num_prompt = len(trajectory.prompt_ids)
        start = 0
        for end in sorted(set(with_others) - {0}):  # between two of these lengths the same trajectories share every token
            sharing = [each for each, length in zip(advantages, with_others, strict=True) if length >= end]
            tokens[num_prompt + start : num_prompt + end] = math.fsum(sharing) / len(sharing)
            start = end
        per_token.append(tokens)
    return per_token


def _told_of_its_tree(selection: Selection, *, counts_once: bool) -> Selection:
    """`selection` with the shared tokens of each kept rollout in its figures, and left out of its loss if they count once."""
    lengths = iter(repeated_lengths([scored.trajectory for scored in selection.kept], tree=selection.group.tree))
    decisions = []
    for decision in selection.decisions:
        if decision.is_kept:
            length = next(lengths)
            decision = Decision(
                is_kept=True,
                reason=decision.reason,
                figures={**decision.figures, "shared_tokens": float(length)},
                num_repeated=length if counts_once else 0,
            )
        decisions.append(decision)
    return Selection(group=selection.group, decisions=tuple(decisions))

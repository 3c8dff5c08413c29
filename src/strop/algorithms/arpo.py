"""What the rollouts of a branch tree have in common: by the tree, never by comparing their tokens.

Two rollouts that happen to begin alike share nothing; a branch and its parent share what was sampled once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from strop.algorithms.grpo import GroupMethod, scalar_advantages
from strop.algorithms.method import Selection, check_group_size
from strop.types import Group, RolloutKey, Trajectory


def shared_lengths(trajectories: Sequence[Trajectory], *, tree: Iterable[Trajectory] = ()) -> list[list[int]]:
    """How many response tokens each two have in common, counted from the prompt; on the diagonal all that one has.

    Symmetric. A parent that is nowhere still joins its branches with each other, but not with its own parent.

    Args:
        trajectories: those that are asked about.
        tree: whatever else they may have branched off, and that in turn: rollouts that are not learnt from.
    """
    known = {each.key: each for each in [*tree, *trajectories]}
    lines = [_line(trajectory, known) for trajectory in trajectories]
    return [[_in_common(one, other) for other in lines] for one in lines]


def repeated_lengths(trajectories: Sequence[Trajectory], *, tree: Iterable[Trajectory] = ()) -> list[int]:
    """Of each, how many of its first response tokens an earlier one (by key) has too: there they are counted once.

    Args as of `shared_lengths`.
    """
    shared = shared_lengths(trajectories, tree=tree)
    keys = [trajectory.key for trajectory in trajectories]
    return [
        max((shared[row][other] for other, key in enumerate(keys) if key < keys[row]), default=0) for row in range(len(keys))
    ]


def _line(trajectory: Trajectory, known: Mapping[RolloutKey, Trajectory]) -> dict[RolloutKey, int]:
    """The rollout and its forebears, each with the response tokens that it shares with the rollout."""
    line = {trajectory.key: trajectory.num_response_tokens}
    at: Trajectory | None = trajectory
    num_shared = trajectory.num_response_tokens
    while at is not None and at.parent is not None:
        num_shared = min(num_shared, at.forked_at)
        line[at.parent] = num_shared
        at = known.get(at.parent)
    return line


def _in_common(one: Mapping[RolloutKey, int], other: Mapping[RolloutKey, int]) -> int:
    """Through the forebear with whom both share most; 0 for rollouts of two trees."""
    return max((min(one[key], other[key]) for key in one.keys() & other.keys()), default=0)


class ARPO(GroupMethod):
    """Learns from every rollout of a branch tree, or from none of them."""

    class Config(GroupMethod.Config):
        """Keys of `kind = "arpo"`."""

        # symmetric, as in its scripts
        clip_high: float = Field(0.2, ge=0, description="How far the ratio may rise above 1.")
        # sections 2.2.2 and 2.2.1
        credit: Literal["soft", "hard"] = Field(
            "soft", description="Advantage of a shared token: each rollout's own (soft), or the mean over the rollouts (hard)."
        )
        shared_token_weight: Literal["per_descendant", "once"] = Field(
            "per_descendant",
            description="Train a shared token in every rollout that has it, or once, in the rollout with the lowest key.",
        )

        @model_validator(mode="after")
        def _scores_what_it_penalizes(self) -> Self:
            if self.kl_in == "reward" and self.shared_token_weight == "once":
                raise ValueError(
                    "method.kl_in is 'reward', which sums over all tokens of a rollout, but shared_token_weight is 'once',"
                    " which scores a shared token in one rollout only. Set shared_token_weight = 'per_descendant', or kl_in ="
                    " 'loss'."
                )
            return self

    config: Config

    def num_rollouts(self, group_size: int) -> int:
        """M, as many as are kept, branches among them. Raises `ConfigError` for a group of one."""
        check_group_size(group_size)
        return group_size

    def select(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """As GRPO's; each decision says how many shared tokens are counted elsewhere."""
        selection = super().select(group, group_size=group_size, seed=seed)
        return _with_shared_tokens(selection, counts_once=self.config.shared_token_weight == "once")

    def advantages(self, selections: Sequence[Selection]) -> list[list[Tensor]]:
        if self.config.credit == "soft":
            return super().advantages(selections)
        of_groups = scalar_advantages(selections, self.config.advantage, eps=self.config.eps)
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


def _with_shared_tokens(selection: Selection, *, counts_once: bool) -> Selection:
    """`selection` with the shared tokens of each kept rollout in its figures, and left out of its loss if they count once."""
    lengths = iter(repeated_lengths([scored.trajectory for scored in selection.kept], tree=selection.group.tree))
    decisions = []
    for decision in selection.decisions:
        if decision.is_kept:
            length = next(lengths)
            figures = {**decision.figures, "shared_tokens": float(length)}
            decision = replace(decision, figures=figures, num_repeated=length if counts_once else 0)
        decisions.append(decision)
    return Selection(group=selection.group, decisions=tuple(decisions))

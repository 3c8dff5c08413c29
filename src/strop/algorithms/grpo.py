"""GRPO: group-relative advantages and a clipped ratio. DeepSeekMath (arXiv:2402.03300).

Its variants are settings: Dr. GRPO (arXiv:2503.20783) is `advantage = "mean_centered", aggregation = "constant"`; the GRPO of
DeepSeek-R1 (arXiv 2501.12948) has `kl_coefficient = 0.001`; clip-higher and dropped ties are DAPO's (arXiv:2503.14476); GSPO
(arXiv:2507.18071) is `ratio = "sequence", aggregation = "sequence_mean"`; RLOO (arXiv:2402.14740) is `advantage =
"leave_one_out", loss = "policy_gradient"`; REINFORCE++ (arXiv:2501.03262) is `advantage = "batch_normalized"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from strop.algorithms.advantages import Advantage, outcome_advantages
from strop.algorithms.policy_loss import PolicyLoss
from strop.algorithms.protocol import Selection
from strop.algorithms.selection import check_group_size, describe_tie, describe_voids, drop_all, keep_all, num_to_keep
from strop.types import Group


class GRPO(PolicyLoss):
    """Learns from every rollout of a group, or from none of them."""

    name: Literal["grpo"] = "grpo"
    advantage: Advantage = Advantage.GROUP_NORMALIZED
    eps: float = Field(default=1e-6, ge=0)  # added to the std of rewards
    drop_tied: bool = False  # True: leave groups with equal rewards out, which makes the remaining tokens weigh more
    allow_group_of_one: bool = False

    def num_rollouts(self, group_size: int) -> int:
        """As many as are kept. Raises `ConfigError` for a group of one, unless its advantage is allowed or needs no group."""
        check_group_size(group_size, allow_group_of_one=self.allow_group_of_one or not self.advantage.needs_group)
        return group_size

    def select(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """Keeps all; none of a group that voids left with less than it needs, or that is tied while ties are dropped."""
        num_kept = num_to_keep(group, group_size=group_size, num_rollouts=self.num_rollouts(group_size))
        if num_kept < (min(2, group_size) if self.advantage.needs_group else 1):
            return drop_all(group, describe_voids(group, group_size))
        if group.is_tied and self.drop_tied and group_size > 1:
            return drop_all(group, describe_tie(group.rewards))
        return keep_all(group, "kept: GRPO learns from every rollout")

    def advantages(self, selections: Sequence[Selection]) -> list[list[Tensor]]:
        return outcome_advantages(selections, self.advantage, eps=self.eps, allow_group_of_one=self.allow_group_of_one)

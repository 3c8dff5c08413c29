"""GRPO: group-relative advantages and a clipped ratio. DeepSeekMath (arXiv:2402.03300).

Its variants are settings: Dr. GRPO (arXiv:2503.20783) is `advantage = "mean_centered", aggregation = "constant"`; the GRPO of
DeepSeek-R1 (arXiv 2501.12948) has `kl_coefficient = 0.001`; DAPO (arXiv:2503.14476) is clip-higher, `aggregation =
"group_token_mean"`, `drop_tied`, `tied_by` and `refill_rounds`; GSPO (arXiv:2507.18071) is `ratio = "sequence", aggregation =
"sequence_mean"`; RLOO (arXiv:2402.14740) is `advantage = "leave_one_out", loss = "policy_gradient"`; REINFORCE++
(arXiv:2501.03262) is `advantage = "batch_normalized"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from strop.algorithms.advantages import outcome_advantages
from strop.algorithms.group_method import GroupMethod
from strop.algorithms.protocol import Selection
from strop.algorithms.selection import check_group_size, keep_group, leave_truncated_out
from strop.types import Group


class GRPO(GroupMethod):
    """Learns from every rollout of a group, or from none of them."""

    name: Literal["grpo"] = "grpo"
    allow_group_of_one: bool = False

    def num_rollouts(self, group_size: int) -> int:
        """As many as are kept. Raises `ConfigError` for a group of one, unless its advantage is allowed or needs no group."""
        check_group_size(group_size, allow_group_of_one=self.allow_group_of_one or not self.advantage.needs_group)
        return group_size

    def select(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """Keeps all; none of a group that voids left with less than it needs, or that is tied while ties are dropped."""

        def keep(rollouts: Group) -> Selection:
            return keep_group(
                rollouts,
                group_size=group_size,
                drop_tied=self.drop_tied,
                tied_by=self.tied_by,
                needs_group=self.advantage.needs_group,
                reason="kept: GRPO learns from every rollout",
            )

        return leave_truncated_out(group, keep) if self.overlong_filter else keep(group)

    def advantages(self, selections: Sequence[Selection]) -> list[list[Tensor]]:
        return outcome_advantages(selections, self.advantage, eps=self.eps, allow_group_of_one=self.allow_group_of_one)

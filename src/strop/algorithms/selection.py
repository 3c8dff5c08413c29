"""What every `select` shares: what voided rollouts leave, what a tie is called, all of a group kept or dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.algorithms.protocol import Decision, Selection
from strop.errors import ConfigError
from strop.types import Group


def num_to_keep(group: Group, *, group_size: int, num_rollouts: int) -> int:
    """G' = floor(G N' / N): how many to keep of the N' rollouts that were not voided, of N that were asked for."""
    return group_size * min(len(group.trajectories), num_rollouts) // num_rollouts


def keep_all(group: Group, reason: str) -> Selection:
    return Selection(group=group, decisions=(Decision(is_kept=True, reason=reason, figures={}),) * len(group.trajectories))


def drop_all(group: Group, reason: str, figures: Sequence[Mapping[str, float]] | None = None) -> Selection:
    """`figures`: of each trajectory, what the method computed before it came to drop them."""
    of_each = figures if figures is not None else [{} for _ in group.trajectories]
    return Selection(
        group=group, decisions=tuple(Decision(is_kept=False, reason=f"dropped: {reason}", figures=each) for each in of_each)
    )


def describe_tie(rewards: Sequence[float], *, positive_above: float = 0.0) -> str:
    """How people call it: all right, or all wrong."""
    side = "right" if rewards[0] > positive_above else "wrong"
    return f"tied group, all {side} (reward {rewards[0]:g})"


def describe_voids(group: Group, num_rollouts: int) -> str:
    return f"only {len(group.trajectories)} of {num_rollouts} rollouts were not voided, which leaves less than 2 to compare"


def check_group_size(group_size: int, *, allow_group_of_one: bool) -> None:
    """Raises `ConfigError` for a group without two trajectories to compare."""
    if group_size < (1 if allow_group_of_one else 2):
        raise ConfigError(
            f"group_size is {group_size}: a trajectory is judged against the others of its group, so 2 is the least."
            " Raise it (GRPO alone also takes method.allow_group_of_one = true)."
        )

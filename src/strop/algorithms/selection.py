"""What every `select` shares: what voided rollouts leave, what a tie is called, overlong filtering, all or none of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from strop.algorithms.protocol import Decision, Selection
from strop.errors import ConfigError
from strop.types import Group, ScoredTrajectory

WHOLE_REWARD = "reward"
"""What decides by itself that a group is tied, where no part of the reward does."""


def keep_group(group: Group, *, group_size: int, drop_tied: bool, tied_by: str, needs_group: bool, reason: str) -> Selection:
    """Keeps all; none of a group that voids left with less than it needs, or that is tied while ties are dropped."""
    if len(group.trajectories) < (min(2, group_size) if needs_group else 1):
        return drop_all(group, describe_voids(group, group_size))
    if drop_tied and group_size > 1 and (tie := tie_of(group.trajectories, by=tied_by)):
        return drop_all(group, tie)
    return keep_all(group, reason)


def leave_truncated_out(group: Group, select: Callable[[Group], Selection]) -> Selection:
    """`select` of the rollouts that were not cut off; the others are dropped, from loss and baseline: overlong filtering.

    rStar2-Agent (arXiv 2508.20722) section 4.3.1 describes it so, and finds that it makes rollouts longer: nothing says to a
    policy which is cut off that it should not repeat itself. DAPO (arXiv:2503.14476) proposes it.
    """
    ended = tuple(scored for scored in group.trajectories if not scored.trajectory.is_truncated)
    of_ended = iter(select(replace(group, trajectories=ended)).decisions)
    cut_off = Decision(is_kept=False, reason="dropped: cut off, and overlong_filter is on", figures={})
    decisions = tuple(cut_off if scored.trajectory.is_truncated else next(of_ended) for scored in group.trajectories)
    return Selection(group=group, decisions=decisions)


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


def tie_of(trajectories: Sequence[ScoredTrajectory], *, by: str, positive_above: float = 0.0) -> str:
    """How people call a group that nothing tells apart: all right, or all wrong; empty where it is not tied.

    Args:
        trajectories: one at least.
        by: `WHOLE_REWARD`, or the part of the reward that is compared. Where a task has no such part, rewards are.
        positive_above: a reward is right if it is more; a part if it is above 0.
    """
    if by == WHOLE_REWARD or any(by not in scored.reward_parts for scored in trajectories):
        name, values, wrong_up_to = WHOLE_REWARD, [scored.reward for scored in trajectories], positive_above
    else:
        name, values, wrong_up_to = by, [scored.reward_parts[by] for scored in trajectories], 0.0
    if len(set(values)) > 1:
        return ""
    return f"tied group, all {'right' if values[0] > wrong_up_to else 'wrong'} ({name} {values[0]:g})"


def describe_voids(group: Group, num_rollouts: int) -> str:
    return f"only {len(group.trajectories)} of {num_rollouts} rollouts are left, which is less than 2 to compare"


def check_group_size(group_size: int, *, allow_group_of_one: bool) -> None:
    """Raises `ConfigError` for a group without two trajectories to compare."""
    if group_size < (1 if allow_group_of_one else 2):
        raise ConfigError(
            f"group_size is {group_size}: a trajectory is judged against the others of its group, so 2 is the least."
            ' Raise it; GRPO alone also takes one, with method = {name = "grpo", allow_group_of_one = true}.'
        )

"""What the rollouts of a branch tree have in common: by the tree, never by comparing their tokens.

Two rollouts that happen to begin alike share nothing; a branch and its parent share what was sampled once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from strop.types import RolloutKey, Trajectory


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

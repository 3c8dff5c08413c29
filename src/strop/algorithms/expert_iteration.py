"""Expert iteration: sample, keep what is right, imitate it, and begin again with the policy that this gives.

Anthony, Tian and Barber (arXiv 1705.08439); with language models STaR (Zelikman et al., arXiv 2203.14465); Algorithm 2 of CS336
assignment 5, section 5.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from strop.algorithms.method import Decision, Selection
from strop.types import Group, ScoredTrajectory, derive_seed

_ItemT = TypeVar("_ItemT")


def select_right(group: Group, *, is_right: Callable[[ScoredTrajectory], bool]) -> Selection:
    """Keep the rollouts that are right. What was voided is not in the group, so it is neither right nor wrong (law 3).

    Args:
        group: the rollouts of one task, in canonical order.
        is_right: whether a rollout is one to imitate.
    """
    right = Decision(is_kept=True, reason="kept: it is right", figures={})
    wrong = Decision(is_kept=False, reason="dropped: it is wrong", figures={})
    return Selection(group=group, decisions=tuple(right if is_right(scored) else wrong for scored in group.trajectories))


def epoch_batches(rows: Sequence[_ItemT], *, batch_size: int, epoch: int, seed: int) -> list[list[_ItemT]]:
    """All of `rows` once, in an order that seed and epoch decide, in batches of at most `batch_size` and of nearly equal size.

    The last rows are not left out, and they make no batch of their own: each token of a batch weighs 1/T, so one update on two
    rows would move the weights as far as one on thirty-two.
    """
    order = list(range(len(rows)))
    random.Random(derive_seed("expert-iteration", seed, epoch)).shuffle(order)
    num_batches = -(-len(order) // batch_size)
    return [[rows[index] for index in order[start::num_batches]] for start in range(num_batches)]

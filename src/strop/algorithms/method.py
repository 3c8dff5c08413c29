"""The base of all methods: what to sample, what to keep, what each token deserves, what each token costs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from strop import user_code
from strop.algorithms.losses import Aggregation
from strop.errors import ConfigError
from strop.registry import Component
from strop.types import Group, ScoredTrajectory


class Column(StrEnum):
    """A per-token column of a batch that a method may need. Log-probs in nats, after temperature."""

    OLD_LOGPROBS = "old_logprobs"  # the sampled tokens rescored by the trainer, before the first update of the step
    REFERENCE_LOGPROBS = "reference_logprobs"
    OLD_ENTROPIES = "old_entropies"  # nats, of the policy's distribution, before the first update of the step
    VALUES = "values"  # what the critic expected before the first update of the step
    RETURNS = "returns"  # what it should have expected; made of the others, never scored


# Of `token_statistics`: their extremes say more than means.
SPREAD_FIGURES = ("ratio", "sampler_ratio", "sampler_gap_nats", "sampler_row_log_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Why one rollout was kept or dropped; the report shows it next to the rollout."""

    is_kept: bool
    reason: str
    figures: Mapping[str, float]  # of the method: p_err, p_format, weight, draw order
    num_repeated: int = 0  # of a kept branch: its first response tokens that another rollout of the group is trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A group after selection: one decision per trajectory of the group, in its order."""

    group: Group
    decisions: tuple[Decision, ...]

    @property
    def kept(self) -> tuple[ScoredTrajectory, ...]:
        pairs = zip(self.group.trajectories, self.decisions, strict=True)
        return tuple(scored for scored, decision in pairs if decision.is_kept)

    @property
    def loss_masks(self) -> list[list[bool]]:
        """Of each kept rollout, the tokens that are trained on: sampled by the policy, and not counted elsewhere."""
        masks = []
        for scored, decision in zip(self.group.trajectories, self.decisions, strict=True):
            if decision.is_kept:
                num_before = len(scored.trajectory.prompt_ids) + decision.num_repeated
                masks.append([False] * num_before + scored.trajectory.loss_mask[num_before:])
        return masks


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Columns of one micro-batch, all of shape (n, T), of whole rows; without gradient but for the entropies."""

    loss_mask: Tensor  # bool, True on tokens the policy sampled
    advantages: Tensor
    sampled_logprobs: Tensor
    entropies: Tensor  # nats, of the policy's distribution at each token; for an entropy bonus, so with gradient
    columns: Mapping[Column, Tensor]  # those that the method needs


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedRows:
    """The rows of one update, with what they earned and what was scored of them; no gradient."""

    rewards: Tensor  # (n,), of each row's trajectory
    loss_mask: Tensor  # bool (n, T), True on tokens the policy sampled
    columns: Mapping[Column, Tensor]  # (n, T); all that the method needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a critic's values make of the rewards of some rows: float32 (n, T), 0 where masked."""

    advantages: Tensor
    returns: Tensor  # `Column.RETURNS`


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs:
    """What the critic's loss is made of, in one micro-batch: (n, T), no gradient."""

    loss_mask: Tensor  # bool
    old_values: Tensor  # `Column.VALUES`
    returns: Tensor  # `Column.RETURNS`


class CriticMethod(Protocol):
    """What a method also defines if a critic is trained next to the policy."""

    @property
    def estimates_need(self) -> frozenset[Column]:
        """Columns that `token_advantages` reads, so that they are scored even where the updates could do without."""

    def token_advantages(self, updates: Sequence[RewardedRows]) -> list[Estimate]:
        """One estimate per update. All updates of a step come at once, in canonical order: a mini-batch is no baseline."""

    def value_loss(self, values: Tensor, inputs: ValueInputs) -> Tensor:
        """The critic's loss of each token, of the shape of `values`, 0 where masked; averaged as the policy's is."""

    def value_statistics(self, values: Tensor, inputs: ValueInputs) -> dict[str, Tensor]:
        """As `Method.token_statistics`, of the critic."""


class Method(Component):
    """Base of all methods: what to sample, what to keep, what each token deserves, what each token costs.

    A method is a frozen value, and all its functions are pure. A subclass gives at least `advantages` and `token_loss`; of
    those in strop, `GRPO` is the one to derive from where only one of them differs.
    """

    kinds = {  # noqa: RUF012  (a constant table)
        "grpo": "strop.algorithms.grpo:GRPO",
        "grpo_roc": "strop.algorithms.grpo_roc:GRPORoC",
        "arpo": "strop.algorithms.arpo:ARPO",
        "ppo": "strop.algorithms.ppo:PPO",
    }

    class Config(Component.Config):
        """A method has no keys by itself."""

    config: Config

    @property
    def needs(self) -> frozenset[Column]:
        """Columns that the trainer scores before the first update of a step."""
        return frozenset()

    @property
    def aggregation(self) -> Aggregation:
        """How the losses of tokens become the loss of an update."""
        return Aggregation.TOKEN_MEAN

    @property
    def constant(self) -> int | None:
        """What `Aggregation.CONSTANT` divides by, in tokens; None with any other."""
        return None

    @property
    def critic(self) -> CriticMethod | None:
        """What the method does with a critic; None when it has none."""
        return None

    @property
    def estimates_need(self) -> frozenset[Column]:
        """Columns that advantages depend on, so that they are scored even where the updates could do without."""
        return frozenset() if self.critic is None else self.critic.estimates_need

    def penalties(self, rows: RewardedRows) -> Tensor | None:
        """What is taken off the reward of each row, (n,), before `advantages` compares them; None: nothing."""
        return None

    @property
    def refill_rounds(self) -> int:
        """How often, at most, a step plays further tasks in place of those of which `select` keeps nothing; 0: never."""
        return 0

    @property
    def makes_one_update(self) -> bool:
        """Whether the loss is right only for the first update after sampling."""
        return False

    def notes(self, num_updates: int) -> list[str]:
        """What the plan says of the method's settings when a step makes `num_updates` updates."""
        return []

    def num_rollouts(self, group_size: int) -> int:
        """How many rollouts of a task to sample so that `group_size` can be kept. Raises `ConfigError` where none would do."""
        return group_size

    def select(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """Which rollouts of a closed group to learn from. Keeps none where nothing can be learnt."""
        kept = Decision(is_kept=True, reason="kept", figures={})
        return Selection(group=group, decisions=tuple(kept for _ in group.trajectories))

    @abstractmethod
    def advantages(self, selections: Sequence[Selection]) -> list[list[Tensor]]:
        """Per selection and kept trajectory, one float32 tensor of shape (len(trajectory.ids),), from the rewards alone.

        Of a method with a critic they stand until its `token_advantages` are known.
        """

    @abstractmethod
    def token_loss(self, policy_logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """The loss of each token, of the shape of `policy_logprobs`, 0 where masked; averaging is not decided here.

        It may reduce over the tokens of a row, never over rows.
        """

    def trained_tokens(self, loss_mask: Tensor, columns: Mapping[Column, Tensor]) -> Tensor:
        """Of the sampled tokens of one update, bool (N, T), those whose losses are averaged; the others have no weight.

        Args:
            columns: those that the method needs, (N, T).
        """
        return loss_mask

    def scaled_advantages(self, advantages: Tensor, loss_mask: Tensor, columns: Mapping[Column, Tensor]) -> Tensor:
        """The advantages of one update, (N, T), that its tokens are trained with, from those of their rollouts or of a critic.

        Args:
            loss_mask: bool (N, T).
            columns: those that the method needs, (N, T).
        """
        return advantages

    def token_statistics(self, policy_logprobs: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        """Named per-token figures (clip fractions, ratio) that the trainer averages over unmasked tokens; no gradient."""
        return {}


WHOLE_REWARD = "reward"
"""What decides by itself that a group is tied, where no part of the reward does."""


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


def keep_all(group: Group, reason: str) -> Selection:
    return Selection(group=group, decisions=(Decision(is_kept=True, reason=reason, figures={}),) * len(group.trajectories))


def drop_all(group: Group, reason: str, figures: Sequence[Mapping[str, float]] | None = None) -> Selection:
    """`figures`: of each trajectory, what the method computed before it came to drop them."""
    of_each = figures if figures is not None else [{} for _ in group.trajectories]
    return Selection(
        group=group, decisions=tuple(Decision(is_kept=False, reason=f"dropped: {reason}", figures=each) for each in of_each)
    )


def tie_of(trajectories: Sequence[ScoredTrajectory], *, by: str) -> str:
    """How people call a group that nothing tells apart: all right, or all wrong; empty where it is not tied.

    Args:
        trajectories: one at least.
        by: `WHOLE_REWARD`, or the part of the reward that is compared. Where a task has no such part, rewards are.
    """
    if by == WHOLE_REWARD or any(by not in scored.reward_parts for scored in trajectories):
        name, values = WHOLE_REWARD, [scored.reward for scored in trajectories]
    else:
        name, values = by, [scored.reward_parts[by] for scored in trajectories]
    if len(set(values)) > 1:
        return ""
    return f"tied group, all {'right' if values[0] > 0 else 'wrong'} ({name} {values[0]:g})"


def describe_voids(group: Group, num_rollouts: int) -> str:
    return f"only {len(group.trajectories)} of {num_rollouts} rollouts are left, which is less than 2 to compare"


def check_group_size(group_size: int) -> None:
    """Raise `ConfigError` for a group without two trajectories to compare."""
    if group_size < 2:
        raise ConfigError(
            f"group_size is {group_size}: a trajectory is compared with the others of its group, so 2 is the least. Raise it;"
            ' GRPO also takes 1 with method = {kind = "grpo", advantage = "none"}.'
        )


def checked_selection(method: Method, group: Group, *, group_size: int, seed: int) -> Selection:
    """Return `method.select(...)`. Raises `ConfigError` if a trajectory of the group has no decision."""
    what, about = f"{type(method).__qualname__}.select", f"for task {group.task.id!r}"
    with user_code.blaming(about):
        selection = method.select(group, group_size=group_size, seed=seed)
    user_code.expect(selection, Selection, method.select, what=what, about=about)
    if len(selection.decisions) != len(group.trajectories):
        problem = f"made {len(selection.decisions)} decisions {about}, but the group has {len(group.trajectories)} trajectories"
        raise user_code.mistake(method.select, problem, what=what)
    return selection


def checked_advantages(method: Method, selections: Sequence[Selection]) -> list[list[Tensor]]:
    """Return `method.advantages(selections)`. Raises `ConfigError` if a kept rollout has no finite tensor."""
    what = f"{type(method).__qualname__}.advantages"
    with user_code.blaming():
        found = method.advantages(selections)
    lengths = [[len(scored.trajectory.ids) for scored in selection.kept] for selection in selections]
    try:
        is_right = [[len(each) for each in rows if each.isfinite().all()] for rows in found] == lengths
    except (TypeError, AttributeError):
        is_right = False
    if not is_right:
        remedy = "Return a list for each selection, with a finite tensor of shape (len(trajectory.ids),) for each kept rollout"
        raise user_code.returned(method.advantages, found, remedy, what=what)
    return found


def checked_token_loss(loss: Callable[[Tensor, LossInputs], Tensor], policy_logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """Return `loss(...)`. Raises `ConfigError` if it returns no tensor of the shape of `policy_logprobs`."""
    what = getattr(loss, "__qualname__", "token_loss")
    with user_code.blaming():
        found = loss(policy_logprobs, inputs)
    if not isinstance(found, Tensor) or found.shape != policy_logprobs.shape:
        shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.200}"
        problem = f"returned {shown}. Return one loss for each token, a tensor of shape {tuple(policy_logprobs.shape)}"
        raise user_code.mistake(loss, problem, what=what)
    return found

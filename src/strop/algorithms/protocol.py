"""What a method owes: what to sample, what to keep, what each token deserves, what each token costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from strop.algorithms.aggregation import Aggregation
from strop.types import Group, ScoredTrajectory


class Column(StrEnum):
    """A per-token column of a batch that a method may need. Log-probs in nats, after temperature."""

    OLD_LOGPROBS = "old_logprobs"  # the sampled tokens rescored by the trainer, before the first update of the step
    REFERENCE_LOGPROBS = "reference_logprobs"
    VALUES = "values"  # what the critic expected before the first update of the step
    RETURNS = "returns"  # what it should have expected; made of the others, never scored


# Of `token_statistics`: their extremes say more than means.
SPREAD_FIGURES = ("ratio", "sampler_ratio", "sampler_gap_nats", "sampler_row_log_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Why one rollout was kept or dropped; the report shows it beside the rollout."""

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
        """Of each kept rollout, the tokens that are trained on: sampled by the policy (law 2), and not counted elsewhere."""
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
    """What a method owes besides when a critic is trained beside the policy."""

    @property
    def estimates_need(self) -> frozenset[Column]:
        """Columns that `token_advantages` reads, so that they are scored even where the updates could do without."""

    def token_advantages(self, updates: Sequence[RewardedRows]) -> list[Estimate]:
        """One estimate per update. All updates of a step come at once, in canonical order: a mini-batch is no baseline."""

    def value_loss(self, values: Tensor, inputs: ValueInputs) -> Tensor:
        """The critic's loss of each token, of the shape of `values`, 0 where masked; averaged as the policy's is."""

    def value_statistics(self, values: Tensor, inputs: ValueInputs) -> dict[str, Tensor]:
        """As `Method.token_statistics`, of the critic."""


class Method(Protocol):
    """A frozen value; every function of it is pure."""

    @property
    def needs(self) -> frozenset[Column]: ...

    @property
    def aggregation(self) -> Aggregation:
        """How the losses of tokens become the loss of an update."""

    @property
    def constant(self) -> int | None:
        """What `Aggregation.CONSTANT` divides by, in tokens; None with any other."""

    @property
    def critic(self) -> CriticMethod | None:
        """What it does with a critic; None when it has none."""

    @property
    def refill_rounds(self) -> int:
        """How often, at most, a step plays further tasks in place of those of which `select` keeps nothing; 0: never."""

    def num_rollouts(self, group_size: int) -> int:
        """How many rollouts of a task to sample so that `group_size` can be kept."""

    def select(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """Which rollouts of a closed group to learn from. Keeps none where nothing can be learnt."""

    def advantages(self, selections: Sequence[Selection]) -> list[list[Tensor]]:
        """Per selection and kept trajectory, one float32 tensor of shape (len(trajectory.ids),), from the rewards alone.

        Of a method with a critic they stand until its `token_advantages` can be told.
        """

    def token_loss(self, policy_logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """The loss of each token, of the shape of `policy_logprobs`, 0 where masked; averaging is not decided here.

        It may reduce over the tokens of a row, never over rows.
        """

    def token_statistics(self, policy_logprobs: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        """Named per-token figures (clip fractions, ratio) that the trainer averages over unmasked tokens; no gradient."""

"""Trajectories laid out as token columns, with each token's share of the update.

One row per trajectory, in canonical order; `T` is the longest row. Column `t` of every per-token tensor speaks of the token
`ids[:, t]`, which the model predicts from `ids[:, :t]`; so column 0 is never trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop.algorithms.aggregation import Aggregation, token_weights
from strop.algorithms.protocol import Column, Selection
from strop.training.packing import shared_lengths
from strop.training.world import World
from strop.types import ScoredTrajectory, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """Ids that could not be drawn at the first tokens of each completion: stop ids, before `sampling.min_tokens`."""

    ids: frozenset[int]
    num_tokens: int


NO_BAN = Ban(ids=frozenset(), num_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """All rows of one update. Shapes: (N, T), `lengths` (N,)."""

    ids: Tensor  # int64; padding is 0, beyond `lengths`
    lengths: Tensor  # int64
    loss_mask: Tensor  # bool, True on tokens the policy sampled; False on column 0 and on padding
    loss_weights: Tensor  # float32, each token's share of the update (law 4); 0 where masked
    advantages: Tensor  # float32, 0 where masked
    sampled_logprobs: Tensor  # float32, nats, 0 where nothing was sampled
    columns: Mapping[Column, Tensor]  # float32; those that were asked for
    temperature: float  # at which the tokens were sampled, and are scored (law 5)
    is_banned: Tensor  # bool, True on tokens in whose place none of `banned_ids` could be drawn: scored likewise
    banned_ids: tuple[int, ...]

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are trained on."""
        return int(self.loss_mask.sum())

    def to(self, device: torch.device) -> TokenBatch:
        return TokenBatch(
            ids=self.ids.to(device),
            lengths=self.lengths.to(device),
            loss_mask=self.loss_mask.to(device),
            loss_weights=self.loss_weights.to(device),
            advantages=self.advantages.to(device),
            sampled_logprobs=self.sampled_logprobs.to(device),
            columns={column: values.to(device) for column, values in self.columns.items()},
            temperature=self.temperature,
            is_banned=self.is_banned.to(device),
            banned_ids=self.banned_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row before padding; all sequences are of one length."""

    ids: Sequence[int]
    loss_mask: Sequence[bool]
    advantages: Tensor  # float32 (len(ids),)
    sampled_logprobs: Sequence[float]
    group: int  # equal for rows that are compared with each other
    is_banned: Sequence[bool] = ()  # empty: nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Rows of a batch that go through the model at once, as a batch of their own, cut after their last trained token."""

    rows: Tensor  # int64 (n,), where they stand in the whole batch
    batch: TokenBatch


def pack(
    selections: Sequence[Selection],
    advantages: Sequence[Sequence[Tensor]],
    *,
    aggregation: Aggregation,
    temperature: float,
    constant: int | None = None,
    ban: Ban = NO_BAN,
) -> TokenBatch:
    """The kept trajectories of one update as a batch, in canonical order (law 4); of no rows if none was kept.

    Masks come from each trajectory's provenance (law 2), by way of its selection. Weights are computed here, over the whole
    update, and never again.

    Args:
        selections: the groups of one update, in any order.
        advantages: `method.advantages(selections)`: per selection and kept trajectory a tensor (len(trajectory.ids),).
        aggregation, constant: the method's.
        temperature: at which the tokens were sampled.
        ban: under which they were sampled.

    Raises:
        ValueError: advantages do not match the trajectories.
    """
    keyed = []
    for group, (selection, of_group) in enumerate(zip(selections, advantages, strict=True)):
        for scored, loss_mask, of_tokens in zip(selection.kept, selection.loss_masks, of_group, strict=True):
            trajectory = scored.trajectory
            row = Row(
                ids=trajectory.ids,
                loss_mask=loss_mask,
                advantages=of_tokens,
                sampled_logprobs=trajectory.sampled_logprobs,
                group=group,
                is_banned=_is_banned(trajectory, ban),
            )
            keyed.append((trajectory.key, row))
    keyed.sort(key=lambda pair: pair[0])
    rows = [row for _, row in keyed]
    return pack_rows(
        rows, aggregation=aggregation, temperature=temperature, constant=constant, banned_ids=tuple(sorted(ban.ids))
    )


def _is_banned(trajectory: Trajectory, ban: Ban) -> list[bool]:
    found = [False] * len(trajectory.prompt_ids)
    for turn in trajectory.turns:
        found += [position < ban.num_tokens for position in range(len(turn.completion.ids))]
        found += [False] * len(turn.observation_ids)
    return found


def in_canonical_order(selections: Sequence[Selection]) -> list[ScoredTrajectory]:
    """What was kept, in the order of the rows of `pack`."""
    kept = (scored for selection in selections for scored in selection.kept)
    return sorted(kept, key=lambda scored: scored.trajectory.key)


def pack_rows(
    rows: Sequence[Row],
    *,
    aggregation: Aggregation,
    temperature: float,
    constant: int | None = None,
    banned_ids: tuple[int, ...] = (),
) -> TokenBatch:
    """`rows` of one update in the order given, padded on the right to the longest of them.

    Raises:
        ValueError: the sequences of a row differ in length.
    """
    num_columns = max((len(row.ids) for row in rows), default=1)
    shape = (len(rows), num_columns)
    ids = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    advantages = torch.zeros(shape)
    sampled_logprobs = torch.zeros(shape)
    is_banned = torch.zeros(shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row.ids)
        if not length == len(row.loss_mask) == len(row.sampled_logprobs) == row.advantages.numel():
            raise ValueError(
                f"row {index} has {length} ids, but {len(row.loss_mask)} mask values, {len(row.sampled_logprobs)} log-probs"
                f" and {row.advantages.numel()} advantages: one of each belongs to every token"
            )
        ids[index, :length] = torch.tensor(row.ids)
        loss_mask[index, :length] = torch.tensor(row.loss_mask)
        advantages[index, :length] = row.advantages
        sampled_logprobs[index, :length] = torch.tensor(row.sampled_logprobs)
        is_banned[index, : len(row.is_banned)] = torch.tensor(row.is_banned, dtype=torch.bool)
    loss_mask[:, 0] = False  # nothing comes before it, so nothing predicts it
    groups = torch.tensor([row.group for row in rows], dtype=torch.int64)
    return TokenBatch(
        ids=ids,
        lengths=torch.tensor([len(row.ids) for row in rows], dtype=torch.int64),
        loss_mask=loss_mask,
        loss_weights=token_weights(loss_mask, groups, aggregation, constant=constant),
        advantages=torch.where(loss_mask, advantages, 0.0),
        sampled_logprobs=sampled_logprobs,
        columns={},
        temperature=temperature,
        is_banned=is_banned & loss_mask,
        banned_ids=banned_ids,
    )


def split_by_group(selections: Sequence[Selection], num_minibatches: int) -> list[list[Selection]]:
    """The groups that kept something, in canonical order, in `num_minibatches` runs of nearly equal numbers of groups.

    A mini-batch is one update: `pack` each of them by itself, and score it by itself, so that each update's weights sum as its
    aggregation says. Groups are never torn. With fewer groups than mini-batches asked for, there is one mini-batch a group;
    with none, there is none. The first mini-batches hold the one group more that an uneven division leaves.

    Raises:
        ValueError: `num_minibatches` is not positive.
    """
    if num_minibatches < 1:
        raise ValueError(f"num_minibatches is {num_minibatches}: a batch cannot be split into less than one part")
    groups = sorted((selection for selection in selections if selection.kept), key=lambda each: each.group.task_index)
    num_parts = min(num_minibatches, len(groups))
    parts = []
    start = 0
    for part in range(num_parts):
        end = start + len(groups) // num_parts + (part < len(groups) % num_parts)
        parts.append(groups[start:end])
        start = end
    return parts


def microbatches(batch: TokenBatch, max_tokens: int, *, is_packed: bool = False) -> list[Microbatch]:
    """`batch` in parts of at most `max_tokens` tokens that go through the model; a longer row goes by itself.

    Packed, rows stay in canonical order, where those of a group are neighbours, and what a row shares with the row before it
    is not counted again. Otherwise shortest rows come first, rows of equal length in canonical order, and padding counts.

    A row counts up to its last trained token, since nothing after it reaches the loss; a row without one is left out. The
    parts are a pure function of the batch.
    """
    positions = torch.arange(1, batch.loss_mask.shape[1] + 1)
    lengths = (batch.loss_mask * positions).amax(1) if len(batch.lengths) else torch.zeros(0, dtype=torch.int64)
    rows = lengths.nonzero().squeeze(1)
    parts = _packed(batch.ids[rows], lengths[rows], max_tokens) if is_packed else _padded(lengths[rows], max_tokens)
    return [_take(batch, rows[part], int(lengths[rows[part]].max())) for part in parts]


def shares(batch: TokenBatch, max_tokens: int, is_packed: bool, world: World) -> list[Microbatch]:
    """This rank's micro-batches of `batch`; every rank gets as many, some of them blank.

    Those of a rank alone are those of `microbatches`. For several they are made so small that all ranks have some, and about
    as much each. A blank one weighs nothing: its rank only takes part in what all ranks do together.
    """
    parts = microbatches(batch, max_tokens, is_packed=is_packed)
    if world.size == 1 or not parts:
        return parts
    num_rounds = -(-len(parts) // world.size)
    num_tokens = sum(int(part.batch.lengths.sum()) for part in parts)
    smaller = microbatches(batch, min(max_tokens, -(-num_tokens // (num_rounds * world.size))), is_packed=is_packed)
    if len(smaller) <= num_rounds * world.size:
        parts = smaller
    mine = parts[world.rank :: world.size]
    return mine + [_blank(parts[0])] * (num_rounds - len(mine))


def _blank(part: Microbatch) -> Microbatch:
    """The first two tokens of a part, none of which is trained on."""
    taken = _take(part.batch, torch.zeros(1, dtype=torch.int64), 2).batch
    nothing = torch.zeros_like(taken.loss_mask)
    blank = replace(taken, loss_mask=nothing, loss_weights=nothing.float(), advantages=nothing.float())
    return Microbatch(rows=part.rows[:1], batch=blank)


def _packed(ids: Tensor, lengths: Tensor, max_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    num_tokens = 0
    shared = shared_lengths(ids, lengths - 1)  # the last token is only predicted
    for row, length in enumerate(lengths.tolist()):
        num_tokens += length - shared[row]
        if parts and num_tokens <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
            num_tokens = length
    return parts


def _padded(lengths: Tensor, max_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    for row in lengths.argsort(stable=True).tolist():
        if parts and (len(parts[-1]) + 1) * int(lengths[row]) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _take(batch: TokenBatch, index: Tensor, num_columns: int) -> Microbatch:
    def cut(values: Tensor) -> Tensor:
        return values[index, :num_columns]

    taken = TokenBatch(
        ids=cut(batch.ids),
        lengths=batch.lengths[index].clamp(max=num_columns),
        loss_mask=cut(batch.loss_mask),
        loss_weights=cut(batch.loss_weights),
        advantages=cut(batch.advantages),
        sampled_logprobs=cut(batch.sampled_logprobs),
        columns={column: cut(values) for column, values in batch.columns.items()},
        temperature=batch.temperature,
        is_banned=cut(batch.is_banned),
        banned_ids=batch.banned_ids,
    )
    return Microbatch(rows=index, batch=taken)

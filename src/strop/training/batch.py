"""Trajectories as padded rows of tokens, with each token's share of the update; and the micro-batches of an update.

One row per trajectory, in canonical order; `T` is the longest row. Column `t` of every per-token tensor belongs to the token
`ids[:, t]`, which the model predicts from `ids[:, :t]`. Column 0 is never trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from strop.algorithms.losses import Aggregation, token_weights
from strop.algorithms.method import Column, Method, Selection
from strop.errors import MachineError, RunError
from strop.training.config import TrainerConfig
from strop.types import ScoredTrajectory, Trajectory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from strop.training.sharded import SequenceGroup

ResultT = TypeVar("ResultT")
MIN_SHARED = 16  # tokens; below, computing them again costs less than attending to them apart
# On CUDA a row behind a shared beginning needs a mask, with which kernels compute the half of its own scores that causal ones
# leave out: 2 h L^2 operations a layer of width h for L own tokens, against 24 h^2 for each shared one. Here h is 1024.
# One rule for all devices: micro-batches depend only on the batch.
_MOST_OWN_SQUARED = 12 * 1024


@dataclass(frozen=True, slots=True)
class World:
    """The processes that train one model together, as one of them sees it. By default there is only this one."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None  # over which weights are divided: (shard,) or (replicate, shard)
    sequence: SequenceGroup | None = None  # the ranks that compute each micro-batch together

    @property
    def num_shares(self) -> int:
        """Into how many shares a batch is divided."""
        return self.size if self.sequence is None else self.size // self.sequence.size

    @property
    def share(self) -> int:
        """The share of this rank, which it has in common with its `sequence`."""
        return self.rank * self.num_shares // self.size

    @property
    def counts(self) -> bool:
        """Whether this rank is the first of its `sequence`, which reports what all of them computed."""
        return self.sequence is None or self.sequence.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks, on every rank."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], ResultT]) -> list[ResultT]:
        """Return what `work` gives on each rank, on every rank.

        A `MachineError` or `RunError` of one rank is raised on all, so that no rank waits for one that has failed.
        """
        result: ResultT | None = None
        failure: MachineError | RunError | None = None
        try:
            result = work()
        except (MachineError, RunError) as error:
            failure = error
        of_ranks = self.gather((result, failure))
        if failures := [each for _, each in of_ranks if each is not None]:
            raise failures[0]
        return [each for each, _ in of_ranks]

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """Ids that cannot be drawn in the first tokens of each completion: stop ids before `sampling.min_tokens`."""

    ids: frozenset[int]
    num_tokens: int


NO_BAN = Ban(ids=frozenset(), num_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """All rows of one update. Shapes: (N, T), `lengths` (N,)."""

    ids: Tensor  # int64; padding is 0, beyond `lengths`
    lengths: Tensor  # int64
    loss_mask: Tensor  # bool, True on tokens the policy sampled; False on column 0 and on padding
    loss_weights: Tensor  # float32, each token's share of the update; 0 where masked
    advantages: Tensor  # float32, 0 where masked
    sampled_logprobs: Tensor  # float32, nats, 0 where nothing was sampled
    columns: Mapping[Column, Tensor]  # float32; the requested ones
    temperature: float  # at which the tokens were sampled, and are scored
    is_banned: Tensor  # bool, True on tokens that were drawn, and are scored, without `banned_ids`
    banned_ids: tuple[int, ...]
    groups: Tensor  # int64 (N,), equal for rows that are compared with each other

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are trained on."""
        return int(self.loss_mask.sum())

    def to(self, device: torch.device) -> TokenBatch:
        return self._map(lambda values: values.to(device))

    def rows(self, index: Tensor, num_columns: int) -> TokenBatch:
        """Return the first columns of some rows."""
        taken = self._map(lambda values: values[index] if values.dim() == 1 else values[index, :num_columns])
        return replace(taken, lengths=taken.lengths.clamp(max=num_columns))

    def _map(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        fields: dict[str, Any] = {
            name: change(value) for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **fields, columns={column: change(values) for column, values in self.columns.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row before padding; all sequences are of one length."""

    ids: Sequence[int]
    loss_mask: Sequence[bool]
    advantages: Tensor  # float32 (len(ids),)
    group: int  # equal for rows that are compared with each other
    sampled_logprobs: Sequence[float] = ()  # empty: nothing was sampled
    is_banned: Sequence[bool] = ()  # empty: nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Rows of a batch that go through the model together, cut after their last trained token."""

    rows: Tensor  # int64 (n,), where they stand in the whole batch
    batch: TokenBatch
    lengths: tuple[int, ...]  # of each row, the tokens that predict others
    shared: tuple[int, ...]  # of each row, how many of them the row before computes

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the decoder."""
        return sum(self.lengths) - sum(self.shared)


def pack(
    selections: Sequence[Selection],
    advantages: Sequence[Sequence[Tensor]],
    *,
    aggregation: Aggregation,
    temperature: float,
    constant: int | None = None,
    ban: Ban = NO_BAN,
) -> TokenBatch:
    """Return the kept trajectories of one update as a batch, in canonical order; without rows if none was kept.

    Masks come from the selections. The weights of the tokens are computed here, once, over the whole update.

    Args:
        selections: the groups of one update, in any order.
        advantages: `method.advantages(selections)`: per selection and kept trajectory a tensor (len(trajectory.ids),).
        aggregation, constant: the method's.
        temperature: at which the tokens were sampled.
        ban: the ban with which they were sampled.

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
    """Return the kept trajectories in the order of the rows of `pack`."""
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
    """Return the rows of one update in the given order, padded on the right to the longest.

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
        num_sampled = len(row.sampled_logprobs)
        if not length == len(row.loss_mask) == row.advantages.numel() == (num_sampled or length):
            raise ValueError(
                f"row {index} has {length} ids, but {len(row.loss_mask)} mask values, {num_sampled} log-probs"
                f" and {row.advantages.numel()} advantages: one of each belongs to every token"
            )
        ids[index, :length] = torch.tensor(row.ids)
        loss_mask[index, :length] = torch.tensor(row.loss_mask)
        advantages[index, :length] = row.advantages
        sampled_logprobs[index, :num_sampled] = torch.tensor(row.sampled_logprobs)
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
        groups=groups,
    )


def reweighted(batch: TokenBatch, method: Method) -> TokenBatch:
    """Return `batch`, which has all columns that `method` needs, with weights and advantages of the tokens that are trained."""
    advantages = method.scaled_advantages(batch.advantages, batch.loss_mask, batch.columns)
    if advantages is not batch.advantages:
        batch = replace(batch, advantages=advantages)
    trained = method.trained_tokens(batch.loss_mask, batch.columns)
    if trained is batch.loss_mask:
        return batch
    return replace(batch, loss_weights=token_weights(trained, batch.groups, method.aggregation, constant=method.constant))


def split_by_group(selections: Sequence[Selection], num_minibatches: int) -> list[list[Selection]]:
    """Split the groups with kept trajectories, in canonical order, into `num_minibatches` parts of nearly equal size.

    A mini-batch is one update: `pack` and score each separately, so that the weights of each update sum as its aggregation
    says. Groups are never split. With fewer groups than mini-batches, each group is a mini-batch; without groups there is
    none. If the division is uneven, the first mini-batches hold one group more.

    Raises:
        ValueError: `num_minibatches` is not positive.
    """
    if num_minibatches < 1:
        raise ValueError(f"num_minibatches is {num_minibatches}: a batch cannot be split into less than one part")
    groups = sorted((selection for selection in selections if selection.kept), key=lambda each: each.group.task_index)
    if not groups:
        return []
    parts = torch.arange(len(groups)).tensor_split(min(num_minibatches, len(groups)))
    return [[groups[place] for place in part.tolist()] for part in parts]


def microbatches(batch: TokenBatch, max_tokens: int, *, is_packed: bool = False) -> list[Microbatch]:
    """Split `batch` into parts of at most `max_tokens` tokens that go through the model. A longer row is a part of its own.

    If packed, rows are sorted by their ids, so that those that begin alike, at any depth, are neighbours: a forest. A prefix
    shared with the row before is not counted again. Otherwise rows are sorted by length, and padding counts.

    A row counts up to its last trained token, because later tokens do not reach the loss. A row without one is left out. The
    parts are a pure function of the batch.
    """
    positions = torch.arange(batch.loss_mask.shape[1])
    lengths = (batch.loss_mask * positions).amax(1) if len(batch.lengths) else torch.zeros(0, dtype=torch.int64)
    rows = lengths.nonzero().squeeze(1)  # the last trained token is only predicted
    if is_packed:
        rows = rows[_sorted(batch.ids[rows], lengths[rows])]
        shared = shared_lengths(batch.ids[rows], lengths[rows])
        parts = _packed(lengths[rows].tolist(), shared, max_tokens)
    else:
        rows = rows[lengths[rows].argsort(stable=True)]
        shared = [0] * len(rows)
        parts = _padded(lengths[rows].tolist(), max_tokens)
    return [
        Microbatch(
            rows=rows[part],
            batch=batch.rows(rows[part], int(lengths[rows[part]].max()) + 1),
            lengths=tuple(lengths[rows[part]].tolist()),
            shared=(0, *shared[part.start + 1 : part.stop]),
        )
        for part in parts
    ]


def tokens_saved(group_size: int, prompt: int, response: int, config: TrainerConfig) -> int:
    """Return how many tokens `microbatches` leave out of a group whose rows share their prompt and no more.

    Args:
        prompt, response: tokens of each row.
    """
    shared = int(_worth_sharing(torch.tensor(prompt), torch.tensor(response))) if config.packing else 0
    num_at_once = 1 + max(0, config.max_tokens_per_microbatch - prompt - response) // (prompt + response - shared)
    return shared * (group_size - -(-group_size // num_at_once))


def shares(batch: TokenBatch, max_tokens: int, is_packed: bool, world: World) -> list[Microbatch]:
    """Return this rank's micro-batches of `batch`. Every rank gets the same number, some of them blank.

    A single rank gets those of `microbatches`. For several ranks they are
    smaller, so that each rank has about as much work. A blank one has no weight: its rank only joins collective operations.
    """
    parts = microbatches(batch, max_tokens, is_packed=is_packed)
    num = world.num_shares
    if num == 1 or not parts:
        return parts
    num_rounds = -(-len(parts) // num)
    num_tokens = sum(part.num_tokens + len(part.rows) for part in parts)
    smaller = microbatches(batch, min(max_tokens, -(-num_tokens // (num_rounds * num))), is_packed=is_packed)
    if len(smaller) <= num_rounds * num:
        parts = smaller
    mine = parts[world.share :: num]
    return mine + [_blank(parts[0])] * (num_rounds - len(mine))


def _blank(part: Microbatch) -> Microbatch:
    """Return the first two tokens of a part, without loss."""
    taken = part.batch.rows(torch.zeros(1, dtype=torch.int64), 2)
    nothing = torch.zeros_like(taken.loss_mask)
    blank = replace(taken, loss_mask=nothing, loss_weights=nothing.float(), advantages=nothing.float())
    return Microbatch(rows=part.rows[:1], batch=blank, lengths=(1,), shared=(0,))


def _sorted(ids: Tensor, lengths: Tensor) -> list[int]:
    """The order of rows by their ids, in which each stands next to those with which it has most in common."""
    keys = [row[:length].astype(">i4").tobytes() for row, length in zip(ids.numpy(), lengths.tolist(), strict=True)]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _packed(lengths: Sequence[int], shared: Sequence[int], max_tokens: int) -> list[slice]:
    """Runs of rows. Past half of `max_tokens`, a run ends where the next one has the fewest tokens to repeat."""
    parts: list[slice] = []
    start = 0
    while start < len(lengths):
        num_tokens = lengths[start] + 1
        end = stop = start + 1
        while end < len(lengths):
            if num_tokens <= max_tokens / 2 or shared[end] <= shared[stop]:
                stop = end
            num_tokens += lengths[end] + 1 - shared[end]
            if num_tokens > max_tokens:
                break
            end += 1
        else:
            stop = end
        parts.append(slice(start, stop))
        start = stop
    return parts


def _padded(lengths: Sequence[int], max_tokens: int) -> list[slice]:
    """Runs of rows, which are sorted by length."""
    parts: list[slice] = []
    for row, length in enumerate(lengths):
        if parts and (row + 1 - parts[-1].start) * (length + 1) <= max_tokens:
            parts[-1] = slice(parts[-1].start, row + 1)
        else:
            parts.append(slice(row, row + 1))
    return parts


@torch.no_grad()
def score_rows(batch: TokenBatch, config: TrainerConfig, world: World, score: Callable[[TokenBatch], Tensor]) -> Tensor:
    """Return float32 (N, T) on the CPU: the scores of all rows, of which each rank computes its share.

    Args:
        score: (n, T') for a micro-batch on the device; depends only on its own rows, up to rounding.
    """
    scores = torch.zeros(batch.ids.shape)
    for part in shares(batch, config.max_tokens_per_microbatch, config.packing, world):
        of_part = score(part.batch.to(config.torch_device))
        if part.batch.num_loss_tokens and world.counts:
            scores[part.rows, : of_part.shape[1]] = of_part.cpu()
    return world.sum(scores)


def shared_lengths(ids: Tensor, lengths: Tensor) -> list[int]:
    """How many of its first tokens each row shares with the row before it; 0 where sharing them would cost more than it saves.

    Args:
        ids: int64 (n, T).
        lengths: int64 (n,), of each row.
    """
    if len(ids) < 2:
        return [0] * len(ids)
    both = torch.minimum(lengths[1:], lengths[:-1])
    is_same = (ids[1:] == ids[:-1]) & (torch.arange(ids.shape[1], device=ids.device) < both[:, None])
    counts = is_same.cumprod(1, dtype=torch.int8).sum(1)
    return [0, *_worth_sharing(counts, lengths[1:] - counts).tolist()]


def _worth_sharing(counts: Tensor, own: Tensor) -> Tensor:
    """`counts` of shared tokens, 0 where rows with so many `own` tokens are better off without."""
    return counts * ((counts >= MIN_SHARED) & (own**2 <= _MOST_OWN_SQUARED * counts))

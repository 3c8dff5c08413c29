"""Log-probs and entropies of given tokens under a causal language model, with few logits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.engine.torch.cpu.products import add_weight_gradient, input_gradient, products_for
from strop.training.attention import UNIT, lay_out
from strop.training.cpu.kernels import Kernels, compiled
from strop.training.weights import embed, gradient_sum, master_of

if TYPE_CHECKING:
    import transformers

    from strop.training.sharded import SequenceGroup

_LOGITS_IN_CACHE = 3 * 2**19  # float32, 6 MiB: what is done to them one after the other then stays in a CPU's cache
_LOGITS_ON_DEVICE = 2**26  # float32, 256 MiB, and as much for the products
_BANNED = -1e30  # a logit without probability; finite, so that probability * log-prob is 0 and not nan


class LogprobModule(nn.Module):
    """The log-probs of given tokens under `model`; a module, because ranks that divide its weights hook into module calls.

    Args:
        model: a decoder-only model with a head; the caller decides on grad mode and autocast.
        max_logits: held at once, in the precision of the products.
        is_packed: lay the rows end to end, which wants a model with `use_row_attention`: no padding is computed, and what a
            row shares with the row before it is computed once.
        group: the ranks that divide the tokens of packed rows, and make the same call. Each gets the result of all, and the
            gradient of its own tokens.
    """

    def __init__(
        self, model: transformers.PreTrainedModel, *, max_logits: int, is_packed: bool, group: SequenceGroup | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self._max_logits, self._is_packed, self._group = max_logits, is_packed, group

    def forward(
        self, ids: Tensor, where: Tensor, temperature: float, is_banned: Tensor | None = None, banned_ids: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return log π(ids[:, t] | ids[:, :t]) and the entropy of the whole distribution, after temperature.

        Rows are padded on the right or packed. Padding needs no mask: attention is causal, so no token sees the padding after
        it, and outputs at padding are not read. This keeps the fast causal kernels. Positions count from 0 in every row.

        The decoder runs once. The head runs only on the positions of `where`, in chunks, in the forward pass and again in the
        backward pass, so that at most `max_logits` logits are in memory.

        Args:
            ids: int64 (n, T).
            where: bool (n, T), False in column 0.
            temperature: divides the logits.
            is_banned: bool (n, T), True where the distribution is that without `banned_ids`; None: nowhere.

        Returns:
            Two float32 tensors (n, T), in nats, 0 where `where` is False; gradients flow through both.
        """
        hidden, places, predicted = hidden_before(
            self.model.base_model, ids, where, is_packed=self._is_packed, group=self._group
        )
        targets = ids[:, 1:].reshape(-1).index_select(0, predicted)
        head = self.model.get_output_embeddings()
        banned = None
        if is_banned is not None and banned_ids:
            banned = is_banned[:, 1:].reshape(-1).index_select(0, predicted)
        # A trained token that rows share has the same place, target and ban in each of them.
        num_ids = ids.max() + 1
        keys = (places * num_ids + targets) * 2 + (0 if banned is None else banned)
        distinct, back = torch.unique(keys, return_inverse=True)
        is_shared = len(distinct) < len(keys)
        if is_shared:
            places, targets = distinct // (2 * num_ids), distinct // 2 % num_ids
            banned = None if banned is None else (distinct % 2).bool()
        figures = head_logprobs(
            hidden.index_select(0, places),
            head.weight,
            head.bias,
            targets,
            temperature=temperature,
            max_logits=self._max_logits,
            banned=banned,
            banned_ids=banned_ids,
        )
        logprobs, entropies = (each.index_select(0, back) if is_shared else each for each in figures)
        return spread(logprobs, predicted, where, self._group), spread(entropies, predicted, where, self._group)

    def full_logprobs(self, ids: Tensor) -> Tensor:
        """Return log π(ids[:, t] | ids[:, :t]) of t > 0, (n, T - 1), by the model's own forward pass."""
        logits = self.model(input_ids=ids, use_cache=False).logits.float()
        of_ids: Tensor = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return of_ids


def hidden_before(
    decoder: transformers.PreTrainedModel, ids: Tensor, where: Tensor, *, is_packed: bool, group: SequenceGroup | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (S, H); for each of the m tokens t of `where` the place among them of ids[:, :t], (m,); and the places of
    these tokens for `spread`, (m,). All of them only of the tokens that this rank of `group` has.

    Args as of `LogprobModule` and its call.
    """
    predicted = where[:, 1:].reshape(-1).nonzero().squeeze(1)
    # The last column predicts nothing here, so it need not be computed.
    if is_packed:
        lengths = (where[:, 1:] * torch.arange(1, where.shape[1], device=where.device)).amax(1).clamp(min=1)
        layout = lay_out(ids[:, :-1], lengths, group)
        num_tokens = layout.ids.shape[1] // (1 if group is None else group.size)
        first = 0 if group is None else group.rank * num_tokens
        own = slice(first, first + num_tokens)
        embedded = embed(decoder.get_input_embeddings(), layout.ids[:, own])
        outputs = decoder(inputs_embeds=embedded, position_ids=layout.positions[:, own], use_cache=False, layout=layout)
        hidden = outputs.last_hidden_state
        places = layout.places.reshape(-1).index_select(0, predicted) - first
        if group is not None:
            is_here = (places >= 0) & (places < num_tokens)
            places, predicted = places[is_here], predicted[is_here]
    else:
        embedded = embed(decoder.get_input_embeddings(), ids[:, :-1])
        hidden = decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
        places = predicted
    return hidden.reshape(-1, hidden.shape[-1]), places, predicted


def spread(values: Tensor, predicted: Tensor, where: Tensor, group: SequenceGroup | None = None) -> Tensor:
    """Values of predicted positions, (m,), at their tokens in a float32 tensor of the shape of `where`; 0 elsewhere."""
    num_rows, num_columns = where.shape
    flat = values.new_zeros(num_rows * (num_columns - 1)).index_copy(0, predicted, values)
    if group is not None:
        flat = group.sum(flat)
    return torch.cat([flat.new_zeros(num_rows, 1), flat.view(num_rows, num_columns - 1)], dim=1)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    max_logits: int,
    banned: Tensor | None = None,
    banned_ids: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each position, both float32 (m,), in nats, both with gradient.

    Args:
        hidden: (m, H), what the decoder gives for the positions that predict the targets.
        weight, bias: of the head, (V, H) and (V,).
        targets: int64 (m,).
        temperature: divides the logits.
        max_logits: held at once, in the precision of the products.
        banned: bool (m,), True where `banned_ids` have no probability; None: nowhere.
    """
    kind = hidden.device.type
    # As a linear layer under autocast would; autocast does not reach into a function of our own.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    chunk = max_logits // weight.shape[0]
    chunk = max(1, chunk // UNIT * UNIT or chunk)
    of_ban = None if banned is None else torch.tensor(banned_ids, device=hidden.device)
    num_given = len(targets)
    if num_given >= UNIT**2:
        num_more = -num_given % UNIT
        hidden, targets = F.pad(hidden, (0, 0, 0, num_more)), F.pad(targets, (0, num_more))
        banned = None if banned is None else F.pad(banned, (0, num_more))
    logprobs, entropies = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, chunk, dtype, banned, of_ban
    )
    return logprobs[:num_given], entropies[:num_given]


class _HeadLogprobs(torch.autograd.Function):
    """With p = softmax(z / T) and H its entropy: d log p_y / dz = (1_y - p) / T and dH / dz = -p (log p + H) / T."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        dtype: torch.dtype,
        banned: Tensor | None,
        banned_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies, normalizers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        logits = _Logits(weight.to(dtype), bias, temperature, chunk, banned, banned_ids)
        of_part = None
        for part, of_part in logits.chunks(hidden):
            logprobs[part], entropies[part], normalizers[part] = logits.figures(part, of_part, targets[part])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, banned, banned_ids, normalizers, entropies)
        ctx.temperature, ctx.chunk, ctx.dtype, ctx.master = temperature, chunk, dtype, master_of(weight)
        ctx.last_logits = of_part if any(ctx.needs_input_grad) else None  # as many as are held at once anyway
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, to_logprobs: Tensor | None, to_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        if to_logprobs is None and to_entropies is None:
            return (None,) * 9
        hidden, weight, bias, targets, banned, banned_ids, normalizers, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        matrix = weight.to(ctx.dtype)
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = gradient_sum(weight, ctx.master) if needs_weight else None
        of_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if needs_bias else None
        to_logprobs, to_entropies = (
            None if each is None else each * (-1 / ctx.temperature) for each in (to_logprobs, to_entropies)
        )
        logits = _Logits(matrix, bias, ctx.temperature, ctx.chunk, banned, banned_ids)
        last, ctx.last_logits = ctx.last_logits, None  # overwritten here: a second backward pass computes them again
        for part, of_part in logits.chunks(hidden, last):
            logits.become_gradients(
                part,
                of_part,
                targets[part],
                normalizers[part],
                entropies[part],
                to_logprobs=None if to_logprobs is None else to_logprobs[part],
                to_entropies=None if to_entropies is None else to_entropies[part],
                of_bias=of_bias,
            )
            if of_hidden is not None:
                of_hidden[part] = input_gradient(of_part, matrix)
            if of_weight is not None:
                add_weight_gradient(of_weight, of_part, hidden[part].to(ctx.dtype))
        return (
            of_hidden,
            None if of_weight is None or ctx.master is not None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 6,
        )


@dataclass(frozen=True, slots=True)
class _Logits:
    """Logits of many positions, in room for a few that is used again and again: fresh room costs a CPU more than it does."""

    matrix: Tensor  # (V, H), in the precision of the products
    bias: Tensor | None
    temperature: float
    chunk: int  # positions
    banned: Tensor | None
    banned_ids: Tensor | None

    def figures(self, part: slice, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the positions `part`: log-probs of their targets, entropies and log-normalizers."""
        if (kernels := self._kernels()) is not None:
            return kernels.head(logits, targets, self.temperature)
        logprobs, entropies, normalizers = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
        for own, scaled, spare in self._blocks(part, logits):
            p = torch.softmax(scaled, -1, out=spare)
            # The largest logit, and its probability e^(z - n): they give n without another sum of exponentials.
            normalizers[own] = scaled.amax(-1) - p.amax(-1).log_()
            log_p = scaled.sub_(normalizers[own, None])
            logprobs[own] = log_p.gather(1, targets[own, None]).squeeze(1)
            entropies[own] = -_dots(p, log_p)
        return logprobs, entropies, normalizers

    def become_gradients(
        self,
        part: slice,
        logits: Tensor,
        targets: Tensor,
        normalizers: Tensor,
        entropies: Tensor,
        *,
        to_logprobs: Tensor | None,
        to_entropies: Tensor | None,
        of_bias: Tensor | None,
    ) -> None:
        """Overwrite the logits of the positions `part`; `to_logprobs` and `to_entropies` are times -1 / T."""
        if (kernels := self._kernels()) is not None:
            zeros = torch.zeros_like(normalizers)
            to_both = (zeros if each is None else each for each in (to_logprobs, to_entropies))
            kernels.head_backward(logits, targets, self.temperature, normalizers, entropies, *to_both)
            return
        for own, scaled, spare in self._blocks(part, logits):
            log_p = scaled.sub_(normalizers[own, None])
            p = log_p.exp_() if to_entropies is None else torch.exp(log_p, out=spare)
            if to_entropies is not None:
                factors = log_p.add_(entropies[own, None]).mul_(to_entropies[own, None])
                of_logits = p.mul_(factors if to_logprobs is None else factors.add_(to_logprobs[own, None]))
            elif to_logprobs is not None:
                of_logits = p.mul_(to_logprobs[own, None])
            if to_logprobs is not None:
                of_logits.scatter_add_(1, targets[own, None], -to_logprobs[own, None])
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            logits[own] = of_logits

    def _kernels(self) -> Kernels | None:
        """What goes through them once, where nothing is banned and nothing added."""
        is_plain = self.bias is None and self.banned is None and self.matrix.device.type == "cpu"
        return compiled(self.matrix.dtype) if is_plain else None

    def chunks(self, hidden: Tensor, last: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Of each `chunk` positions (the first may have fewer), which they are and their logits, overwritten by the next ones'.

        Args:
            last: what was given last for the same positions, not overwritten yet: with these it begins, without their products.
        """
        parts = [slice(max(0, stop - self.chunk), stop) for stop in range(len(hidden), 0, -self.chunk)]
        if last is None:
            room = self.matrix.new_empty(min(self.chunk, len(hidden)), len(self.matrix))
            parts.reverse()
        else:
            room = last
            yield parts.pop(0), last
        for part in parts:
            logits, inputs = room[: part.stop - part.start], hidden[part].to(self.matrix.dtype)
            if products := products_for(self.matrix):
                products.product(inputs, self.matrix, is_packed=False, out=logits)
            else:
                torch.mm(inputs, self.matrix.T, out=logits)
            if self.bias is not None:
                logits += self.bias
            yield part, logits

    def _blocks(self, part: slice, logits: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Of each few positions of `part`: where they are in it, and their logits in float32 after temperature and ban, with as
        much room next to them; both are overwritten by the next ones'."""
        num_logits = len(self.matrix)
        size = max(1, (_LOGITS_IN_CACHE if logits.device.type == "cpu" else _LOGITS_ON_DEVICE) // num_logits)
        room = torch.empty(2, min(size, len(logits)), num_logits, dtype=torch.float32, device=logits.device)
        banned = None if self.banned is None else self.banned[part]
        for first in range(0, len(logits), size):
            own = slice(first, min(first + size, len(logits)))
            scaled, spare = room[:, : own.stop - own.start]
            scaled.copy_(logits[own])
            if self.temperature != 1.0:
                scaled.div_(self.temperature)
            if banned is not None and self.banned_ids is not None:
                scaled[banned[own].nonzero(), self.banned_ids] = _BANNED
            yield own, scaled, spare


def _dots(left: Tensor, right: Tensor) -> Tensor:
    """The dot product of each row of `left` with that of `right`, without their elementwise product: twice (m, V) -> (m,)."""
    return torch.bmm(left[:, None, :], right[:, :, None]).flatten()

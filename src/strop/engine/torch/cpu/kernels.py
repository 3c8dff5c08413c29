"""Attention, norms, the KV cache and the draw of a decode step in C, where this machine has a C compiler and, for the model's
precision, AVX-512 BF16 (bfloat16) or AVX2 (float32).

torch's own operators read the cache at half the speed of this memory and cost their dispatch, dozens of times a layer. Where
the functions cannot be compiled or are not proven (`strop.engine.torch.cpu.compiled`), they do the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from strop.engine.model_directory import Architecture
from strop.engine.torch.attention import Tables, Tokens, TorchAttention
from strop.engine.torch.cpu.compiled import AVX2, AVX512_BF16, addresses, proven, typed
from strop.engine.torch.kv_cache import KV_STEP, Chunk, KvCache, Row, StepShape
from strop.engine.torch.weights import LayerWeights

_SOURCES = {
    torch.bfloat16: (Path(__file__).with_name("kernels.c"), AVX512_BF16),
    torch.float32: (Path(__file__).with_name("kernels_float32.c"), AVX2),
}
_PAIRED, _LANES, _MAX_DIM, _MAX_GROUP = 32, 16, 256, 16  # of kernels.c and avx512.h


class Kernels:
    """The compiled functions. All tensors are contiguous, of one precision and on the CPU; slots and lengths are int64."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = typed(library.strop_attend, 8 * "i" + 7 * "p" + "fp")
        self._norm = typed(library.strop_norm, "iiippfp")
        self._place = typed(library.strop_place, 7 * "i" + 5 * "p" + "f" + 4 * "p")
        self._draw = typed(library.strop_draw, "iii" + 4 * "p")

    def attend(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        lengths: Tensor,
        lenders: Tensor,
        lent: Tensor,
        *,
        num_heads: int,
    ) -> Tensor:
        """What the queries of each token read: softmax(query keysᵀ / sqrt(head_dim)) values, the softmax in float32.

        Args:
            qkv: (N, (heads + 2 kv_heads) * head_dim), the queries first.
            keys, values: the cache of one layer, (blocks, slots, kv_heads, columns of a block, head_dim).
            slots, lengths: (n,) of the first n <= N tokens: which slot a token reads, and how many of its columns.
            lenders, lent: (n,): a slot whose first so many columns are the same, and may be read there; it changes no bit.

        Returns:
            (N, heads * head_dim); zeros beyond n.
        """
        _, _, num_kv_heads, block, head_dim = keys.shape
        num_tokens, width = len(slots), num_heads * head_dim
        out = qkv.new_empty(len(qkv), width)
        if num_tokens < len(qkv):
            out[num_tokens:] = 0
        sizes = num_tokens, num_heads, num_kv_heads, head_dim, block, keys.stride(0), qkv.shape[1]
        places = addresses(qkv, keys, values, slots, lengths, lenders, lent)
        self._attend(torch.get_num_threads(), *sizes, *places, head_dim**-0.5, out.data_ptr())
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last axis of (N, width)."""
        out = torch.empty_like(x)
        self._norm(torch.get_num_threads(), *x.shape, x.data_ptr(), weight.data_ptr(), eps, out.data_ptr())
        return out

    def place(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        positions: Tensor,
        *,
        num_heads: int,
        tables: tuple[Tensor, Tensor],
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
    ) -> None:
        """Norm and turn queries and keys of the first n <= N tokens in place, and put their keys and values into the cache.

        Args:
            qkv, keys, values, slots: as for `attend`.
            positions: (n,), the column that each token takes.
            tables: cos and sin of every position, (positions, head_dim), the first half of each sin negated.
            norms: the weights of the norms of queries and keys, (head_dim,), where there are any.
        """
        _, _, num_kv_heads, block, head_dim = keys.shape
        sizes = len(slots), num_heads, num_kv_heads, head_dim, block, keys.stride(0)
        given, written = addresses(qkv, *tables, *norms), addresses(slots, positions, keys, values)
        self._place(torch.get_num_threads(), *sizes, *given, eps, *written)

    def draw(self, logits: Tensor, temperatures: Tensor, uniform: Tensor) -> Tensor:
        """As `strop.engine.torch.sampling.draw`, with nothing banned."""
        drawn = torch.empty(3, len(logits), dtype=torch.float64)
        given = logits.contiguous(), temperatures.float().contiguous(), uniform.double().contiguous()
        self._draw(torch.get_num_threads(), *logits.shape, *addresses(*given, drawn))
        return drawn


def kernels_for(shape: Architecture, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The compiled functions, if they are made for such a model and this machine can have them."""
    fits = (
        dtype in _SOURCES
        and device.type == "cpu"
        and shape.head_dim <= _MAX_DIM
        and shape.num_heads % shape.num_kv_heads == 0
        and shape.num_heads // shape.num_kv_heads <= _MAX_GROUP
    )
    if dtype is torch.bfloat16:
        fits &= shape.head_dim % _PAIRED == 0 and shape.hidden_size % _LANES == 0
    return _compiled(dtype) if fits else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    slots: Tensor  # (real tokens,) int64
    positions: Tensor  # (real tokens,) int64
    lengths: Tensor  # (real tokens,) int64: columns that each reads, its own included
    lenders: Tensor  # (real tokens,) int64: where the first of them may be read
    lent: Tensor  # (real tokens,) int64: how many
    num_rows: int


class KernelAttention:
    """With compiled kernels. Rows and tokens of chunks are alike: each reads its own columns, and no padding."""

    def __init__(self, kernels: Kernels, cache: KvCache, architecture: Architecture, tables: Tables) -> None:
        self._kernels, self._cache, self._architecture, self._tables = kernels, cache, architecture, tables

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.norm(hidden, weight, self._architecture.norm_eps)

    def plan(self, tokens: Tokens, rows: Sequence[Row], chunks: Sequence[Chunk], shape: StepShape) -> KernelPlan:
        return self._planned(tokens, tokens.positions + 1)

    def plan_slots(self, tokens: Tokens, num_columns: int) -> KernelPlan:
        # A slot without a token writes to the last column of all, and reads no more than the others.
        return self._planned(tokens, (tokens.positions + 1).clamp_max(num_columns))

    def read(self, layer: LayerWeights, index: int, qkv: Tensor, plan: KernelPlan, *, with_chunks: bool) -> Tensor:
        shape, keys, values = self._architecture, self._cache.keys[index], self._cache.values[index]
        self._kernels.place(
            qkv,
            keys,
            values,
            plan.slots,
            plan.positions,
            num_heads=shape.num_heads,
            tables=self._tables,
            norms=(layer.q_norm, layer.k_norm),
            eps=shape.norm_eps,
        )
        num_wanted = len(plan.slots) if with_chunks else plan.num_rows
        reads = [each[:num_wanted] for each in (plan.slots, plan.lengths, plan.lenders, plan.lent)]
        wanted = qkv if with_chunks else qkv[:num_wanted]
        return self._kernels.attend(wanted, keys, values, *reads, num_heads=shape.num_heads)

    def _planned(self, tokens: Tokens, lengths: Tensor) -> KernelPlan:
        real = slice(tokens.num_real)
        return KernelPlan(
            slots=tokens.slots[real],
            positions=tokens.positions[real],
            lengths=lengths[real],
            lenders=tokens.lenders[real],
            lent=torch.minimum(tokens.lent[real], lengths[real]),
            num_rows=tokens.num_rows,
        )


def attention_over(cache: KvCache, architecture: Architecture, tables: Tables) -> TorchAttention | KernelAttention:
    """The fastest that this machine and model allow."""
    kernels = kernels_for(architecture, cache.keys.dtype, cache.keys.device)
    if kernels is None:
        return TorchAttention(cache, architecture, tables)
    return KernelAttention(kernels, cache, architecture, tables)


def draw_kernels(logits: Tensor) -> Kernels | None:
    """The compiled functions, if this machine can have them for such logits; only `draw` fits every model."""
    return _compiled(logits.dtype) if logits.dtype in _SOURCES and logits.device.type == "cpu" else None


@cache
def _compiled(dtype: torch.dtype) -> Kernels | None:
    return proven(*_SOURCES[dtype], Kernels, lambda kernels: _attends(kernels, dtype) and _draws(kernels, dtype))


@torch.inference_mode()
def _attends(kernels: Kernels, dtype: torch.dtype) -> bool:
    """Whether a small attention, its rotations and norms included, is torch's to the rounding of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-5

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_heads, num_kv_heads, dim, eps = 6, 2, 64, 1e-5
    keys, values = some(2, 3, num_kv_heads, KV_STEP, dim), some(2, 3, num_kv_heads, KV_STEP, dim)
    qkv, q_norm, k_norm = some(4, (num_heads + 2 * num_kv_heads) * dim), some(dim), some(dim)
    angles = torch.rand(2 * KV_STEP, dim, generator=generator)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    slots, lengths = torch.tensor([0, 2, 2]), torch.tensor([1, KV_STEP + 17, 30])
    heads = qkv[:3].view(3, -1, dim).to(torch.float32, copy=True)
    kernels.place(qkv, keys, values, slots, lengths - 1, num_heads=num_heads, tables=tables, norms=(q_norm, k_norm), eps=eps)
    keys[:, 1, :, :32], values[:, 1, :, :32] = keys[:, 2, :, :32], values[:, 2, :, :32]  # where slot 2 may read, too
    lent = torch.tensor([0, 32, 17])
    attended = kernels.attend(qkv, keys, values, slots, lengths, torch.ones_like(slots), lent, num_heads=num_heads)
    attended = attended.view(4, num_heads, dim)
    num_turned = num_heads + num_kv_heads
    weights = torch.cat((q_norm.expand(num_heads, dim), k_norm.expand(num_kv_heads, dim))).float()
    normed = torch.nn.functional.rms_norm(heads[:, :num_turned], (dim,), eps=eps) * weights
    cosines, sines = (table[lengths - 1].float().unsqueeze(1) for table in tables)
    turned = normed * cosines + normed.roll(dim // 2, -1) * sines
    is_right = torch.allclose(qkv[:3, : num_turned * dim].view(3, -1, dim).float(), turned, rtol=tolerance, atol=tolerance)
    for token, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        own_keys, own_values = (
            cache[:, slot].transpose(0, 1).reshape(num_kv_heads, -1, dim)[:, :length].float() for cache in (keys, values)
        )
        is_right &= torch.equal(own_values[:, -1], heads[token, num_turned:])
        query = qkv[token, : num_heads * dim].view(num_kv_heads, -1, dim).float()
        expected = (query @ own_keys.mT * dim**-0.5).softmax(-1) @ own_values
        is_right &= torch.allclose(attended[token].float(), expected.reshape(num_heads, dim), rtol=tolerance, atol=tolerance)
    return is_right and not attended[3].any()


@torch.inference_mode()
def _draws(kernels: Kernels, dtype: torch.dtype) -> bool:
    """Whether ids are drawn where torch's cumulative probability passes their uniform, with its log-probs and entropies."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(40, 700, generator=generator)).to(dtype)
    temperatures = torch.rand(40, generator=generator) + 0.5
    uniform = torch.rand(40, 1, generator=generator, dtype=torch.float64)
    ids, logprobs, entropies = kernels.draw(logits, temperatures, uniform)
    expected = (logits.double() / temperatures.unsqueeze(1)).log_softmax(1)
    drawn = expected.gather(1, ids.long().unsqueeze(1))
    upper = expected.exp().cumsum(1).gather(1, ids.long().unsqueeze(1))
    is_right = bool(((upper - drawn.exp() - 1e-6 <= uniform) & (uniform <= upper + 1e-6)).all())
    is_right &= torch.allclose(logprobs, drawn.squeeze(1), rtol=1e-5, atol=1e-5)
    return is_right and torch.allclose(entropies, -(expected.exp() * expected).sum(1), rtol=1e-5, atol=1e-5)

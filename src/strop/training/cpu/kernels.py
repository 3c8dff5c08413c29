"""Attention of rows, norms, gates and what follows the head in C, with gradients: in bfloat16 for processors with AVX-512 BF16,
in float32 for those with AVX2. Where there is AMX, attention in bfloat16 uses it.

torch's attention on a CPU is slower in bfloat16 than in float32, and for short rows takes longer to begin than to compute; each
operator of a norm or a gate goes through memory by itself. Where the functions cannot be compiled or are not proven
(`strop.engine.torch.cpu.compiled`), torch's operators do the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engine.torch.cpu.compiled import AMX, AVX2, AVX512_BF16, addresses, proven, typed

_SOURCES = {
    torch.bfloat16: (Path(__file__).with_name("kernels.c"), AVX512_BF16),
    torch.float32: (Path(__file__).with_name("kernels_float32.c"), AVX2),
}
HEAD_UNIT = {torch.bfloat16: 32, torch.float32: 8}  # of whose multiples heads can be
WIDTH_UNIT = {torch.bfloat16: 16, torch.float32: 1}  # of whose multiples the widths of norms and gates can be
MAX_DIM, _ROWS_AT_ONCE = 256, 64  # of the sources
_TILE, _MIN_PART, _MAX_PARTS = 128, 256, 4  # tokens of a tile of keys; tokens of a part of a shared read, and parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Tokens that attend to others: a row to itself, causally, or rows to all of a piece that they share."""

    queries: slice
    keys: slice
    is_own: bool


@dataclass(frozen=True, slots=True)
class Waves:
    """Reads in the order in which threads compute them: of a wave no two have a query, or a key, in common."""

    reads: Tensor  # int64 (R, 5): the first query, how many, the first key, how many, whether it is a row's own
    starts: Tensor  # int64 (waves + 1,), of each wave the first of its reads, and how many there are in all

    @classmethod
    def of(cls, reads: Sequence[Read]) -> Waves:
        """First the own reads of rows; then each block of a shared one after all earlier blocks with a query or key of it."""
        waves: list[list[Read]] = [[each for each in reads if each.is_own]]
        for read in (block for each in reads if not each.is_own for block in _blocks(each)):
            touched = (number for number, wave in enumerate(waves[1:], start=1) if any(_touch(read, other) for other in wave))
            number = max(touched, default=0) + 1
            if number == len(waves):
                waves.append([])
            waves[number].append(read)
        rows = [
            [read.queries.start, _length(read.queries), read.keys.start, _length(read.keys), int(read.is_own)]
            for wave in waves  # of a wave, the longest first: the last ones then end at about the same time
            for read in sorted(wave, key=lambda read: -_length(read.queries) * _length(read.keys))
        ]
        return cls(torch.tensor(rows), torch.tensor([0, *accumulate(map(len, waves))]))


def _blocks(read: Read) -> Iterable[Read]:
    """A long read in n x n blocks. Of each n in a row no two have a query or a key in common: threads take them at once."""
    n = max(1, min(_MAX_PARTS, _length(read.queries) // _MIN_PART, _length(read.keys) // _MIN_PART))
    queries, keys = _parts(read.queries, n), _parts(read.keys, n)
    return (replace(read, queries=queries[part], keys=keys[(part + shift) % n]) for shift in range(n) for part in range(n))


def _parts(whole: slice, n: int) -> list[slice]:
    ends = [whole.start + _length(whole) * part // n // _TILE * _TILE for part in range(n)]
    return [slice(*each) for each in pairwise([*ends, whole.stop])]


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _touch(one: Read, other: Read) -> bool:
    both = (one.queries, other.queries), (one.keys, other.keys)
    return any(a.start < b.stop and b.start < a.stop for a, b in both)


class Kernels:
    """The compiled functions; all that they take is of their precision and on the CPU. Heads are (1, heads, T, head_dim)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = typed(library.strop_attend_rows, "iippiiii" + 6 * "p" + "fpppi")
        self._backward = typed(library.strop_attend_rows_backward, "iippiiii" + 11 * "p" + "fppppi")
        self._scratch_bytes = typed(library.strop_attend_scratch, "ii", "i")
        self._backward_scratch_bytes = typed(library.strop_attend_backward_scratch, "ii", "i")
        self._norm = typed(library.strop_norm_rows, "iiippfpp")
        self._norm_backward = typed(library.strop_norm_rows_backward, "iiipppppp")
        self._gate = typed(library.strop_gate, "iippp")
        self._gate_backward = typed(library.strop_gate_backward, "iippppp")
        self._head = typed(library.strop_head, "iiipfpppp")
        self._head_backward = typed(library.strop_head_backward, "iiipfppppp")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, waves: Waves, scale: float) -> tuple[Tensor, Tensor]:
        """What queries read, (1, T, H, D), and log-normalizers, float32 (1, H, T)."""
        _, num_heads, num_tokens, dim = query.shape
        query, key, value = _whole_heads(query), _whole_heads(key), _whole_heads(value)
        out = _floats(1, num_tokens, num_heads, dim)
        normalizers = _floats(1, num_heads, num_tokens)
        scratch = _scratch(self._scratch_bytes(dim, _most_keys(waves)))
        what = _what_is_read(waves, scratch, query, key)
        self._attend(*what, *_heads(query, key, value), scale, *addresses(out, normalizers, scratch), scratch.shape[1])
        return out.to(query.dtype), normalizers

    def attend_backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        outputs: Tensor,
        normalizers: Tensor,
        to_outputs: Tensor,
        waves: Waves,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value from that of `outputs`, both (1, T, H, D)."""
        outputs, to_outputs = outputs.transpose(1, 2), to_outputs.transpose(1, 2)
        heads = [_whole_heads(each) for each in (query, key, value, outputs, to_outputs)]
        gradients = [_floats(*each.shape) for each in (query, key, value)]
        scratch = _scratch(self._backward_scratch_bytes(query.shape[-1], _most_keys(waves)))
        what = _what_is_read(waves, scratch, query, key)
        places = addresses(*gradients, scratch)
        self._backward(*what, *_heads(*heads), normalizers.data_ptr(), scale, *places, scratch.shape[1])
        of_query, of_key, of_value = (each.to(query.dtype) for each in gradients)
        return of_query, of_key, of_value

    def norm(self, inputs: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """weight * x / rms(x) over the last dimension, the second factor rounded; and 1 / rms(x), float32 (...)."""
        inputs, weight = inputs.contiguous(), weight.contiguous()
        normed, scales = torch.empty_like(inputs), _floats(*inputs.shape[:-1])
        shape = scales.numel(), inputs.shape[-1]
        self._norm(torch.get_num_threads(), *shape, *addresses(inputs, weight), eps, *addresses(normed, scales))
        return normed, scales

    def norm_backward(self, inputs: Tensor, weight: Tensor, scales: Tensor, to_normed: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of inputs, and of weight, float32 (H,)."""
        inputs, weight, to_normed = inputs.contiguous(), weight.contiguous(), to_normed.contiguous()
        num_rows, width = scales.numel(), inputs.shape[-1]
        of_inputs, of_weight = torch.empty_like(inputs), _floats(-(-num_rows // _ROWS_AT_ONCE), width)
        places = addresses(inputs, weight, scales, to_normed, of_inputs, of_weight)
        self._norm_backward(torch.get_num_threads(), num_rows, width, *places)
        return of_inputs, of_weight.sum(0)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, the first factor rounded."""
        gate, up = gate.contiguous(), up.contiguous()
        gated = torch.empty_like(gate)
        self._gate(torch.get_num_threads(), gate.numel(), *addresses(gate, up, gated))
        return gated

    def gate_backward(self, gate: Tensor, up: Tensor, to_gated: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        gate, up, to_gated = gate.contiguous(), up.contiguous(), to_gated.contiguous()
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        self._gate_backward(torch.get_num_threads(), gate.numel(), *addresses(gate, up, to_gated, of_gate, of_up))
        return of_gate, of_up

    def head(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the targets, entropies and log-normalizers of (m, V) logits, all float32 (m,)."""
        targets = targets.to(torch.int64).contiguous()
        is_outside = (targets < 0) | (targets >= logits.shape[1])
        if is_outside.any():
            worst = int(targets[is_outside][0])
            raise IndexError(f"token id {worst} is none of the {logits.shape[1]} that the model's head knows")
        figures = _floats(3, len(logits))
        places = addresses(targets, *figures)
        self._head(torch.get_num_threads(), *logits.shape, logits.data_ptr(), temperature, *places)
        logprobs, entropies, normalizers = figures
        return logprobs, entropies, normalizers

    def head_backward(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        normalizers: Tensor,
        entropies: Tensor,
        to_logprobs: Tensor,
        to_entropies: Tensor,
    ) -> None:
        """Put the gradient of (m, V) logits in their place; those of log-probs and entropies are times -1 / temperature."""
        columns = [each.contiguous() for each in (targets, normalizers, entropies, to_logprobs, to_entropies)]
        self._head_backward(torch.get_num_threads(), *logits.shape, logits.data_ptr(), temperature, *addresses(*columns))


def compiled(dtype: torch.dtype) -> Kernels | None:
    """The compiled functions for a precision, if there are any and this machine can have them."""
    return _compiled(dtype) if dtype in _SOURCES else None


@cache
def _compiled(dtype: torch.dtype) -> Kernels | None:
    useful = AMX if dtype is torch.bfloat16 else frozenset[str]()
    return proven(*_SOURCES[dtype], Kernels, lambda kernels: _is_proven(kernels, dtype), useful=useful)


def _whole_heads(heads: Tensor) -> Tensor:
    """With each head's numbers side by side."""
    return heads if heads.stride(-1) == 1 and all(each % 2 == 0 for each in heads.stride()[1:3]) else heads.contiguous()


def _heads(*heads: Tensor) -> list[int | ctypes.Array[ctypes.c_int64]]:
    """Of each where it lies, and its strides."""
    return [part for each in heads for part in (each.data_ptr(), (ctypes.c_int64 * 2)(each.stride(1), each.stride(2)))]


def _what_is_read(waves: Waves, scratch: Tensor, query: Tensor, key: Tensor) -> tuple[int, ...]:
    """What both directions of attention begin with: threads, waves of reads, tokens, heads, key heads, head_dim."""
    _, num_heads, num_tokens, dim = query.shape
    of_waves = len(waves.starts) - 1, waves.starts.data_ptr(), waves.reads.data_ptr()
    return len(scratch), *of_waves, num_tokens, num_heads, key.shape[1], dim


def _most_keys(waves: Waves) -> int:
    return int(waves.reads[:, 3].max())


def _scratch(num_bytes: int) -> Tensor:
    """Room for each thread, (threads, bytes): whole lines of a processor's cache."""
    return torch.empty(torch.get_num_threads(), -(-num_bytes // 64) * 64, dtype=torch.uint8, device="cpu")


def _floats(*shape: int) -> Tensor:
    """As C writes them, whatever torch makes by default."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _is_proven(kernels: Kernels, dtype: torch.dtype) -> bool:
    """Whether all functions are torch's to the rounding of `dtype`."""
    tolerance = 0.01 if dtype is torch.bfloat16 else 1e-5
    return all(
        are_proven(kernels, dtype, tolerance) for are_proven in (_is_attention_proven, _are_others_proven, _is_head_proven)
    )


def _is_head_proven(kernels: Kernels, dtype: torch.dtype, tolerance: float) -> bool:
    """Log-probs, entropies and their gradients."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = (3 * torch.randn(5, 75, generator=generator)).to(dtype), torch.tensor([0, 74, 16, 63, 64])
    to_both = torch.randn(2, 5, generator=generator)
    leaf = logits.to(torch.float32, copy=True).requires_grad_()
    with torch.enable_grad():
        every = (leaf / 0.8).log_softmax(-1)
        logprobs, entropies = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
        gradients = torch.autograd.grad((logprobs, entropies), leaf, to_both.unbind())
    with torch.no_grad():
        ours, own_entropies, normalizers = kernels.head(logits, targets, 0.8)
        kernels.head_backward(logits, targets, 0.8, normalizers, own_entropies, *(to_both / -0.8))
        figures, expected = torch.stack((ours, own_entropies)), torch.stack((logprobs, entropies))
        return torch.allclose(figures, expected, rtol=0, atol=1e-5) and _are_near((logits,), gradients, tolerance)


def _are_others_proven(kernels: Kernels, dtype: torch.dtype, tolerance: float) -> bool:
    """Norm, gate and their gradients."""
    generator = torch.Generator().manual_seed(0)
    inputs, other, to_outputs = (torch.randn(70, 48, generator=generator).to(dtype) for _ in range(3))
    leaves = [each.to(torch.float32, copy=True).requires_grad_() for each in (inputs, other[0])]
    pairs = [each.to(torch.float32, copy=True).requires_grad_() for each in (inputs, other)]
    with torch.enable_grad():
        expected = F.rms_norm(leaves[0], (48,), leaves[1], 1e-3), F.silu(pairs[0]) * pairs[1]
        gradients = torch.autograd.grad(expected, (*leaves, *pairs), [to_outputs.float()] * 2)
    with torch.no_grad():
        normed, scales = kernels.norm(inputs, other[0], 1e-3)
        ours = [normed, kernels.gate(inputs, other), *kernels.norm_backward(inputs, other[0], scales, to_outputs)]
        return _are_near([*ours, *kernels.gate_backward(inputs, other, to_outputs)], (*expected, *gradients), tolerance)


def _is_attention_proven(kernels: Kernels, dtype: torch.dtype, tolerance: float) -> bool:
    """Own and shared reads of more than a tile, and their gradients."""
    generator = torch.Generator().manual_seed(0)
    own, shared = (slice(0, 150), slice(150, 171)), (slice(150, 171), slice(0, 139))
    reads = [Read(queries=each, keys=each, is_own=True) for each in own]
    reads.append(Read(queries=shared[0], keys=shared[1], is_own=False))
    query, key, value, to_outputs = (
        torch.randn(1, 171, num_heads, 64, generator=generator).to(dtype).transpose(1, 2) for num_heads in (6, 2, 2, 6)
    )
    is_seen = torch.ones(171, 171, dtype=torch.bool).tril()
    is_seen[150:, 139:150] = False
    leaves = [heads.detach().float().requires_grad_() for heads in (query, key, value)]
    with torch.enable_grad():
        keys, values = (heads.repeat_interleave(3, 1) for heads in leaves[1:])
        scores = (leaves[0] @ keys.mT / 8).masked_fill(~is_seen, -torch.inf)
        expected = scores.softmax(-1) @ values
        gradients = torch.autograd.grad(expected, leaves, to_outputs.float())
    waves = Waves.of(reads)
    with torch.no_grad():
        outputs, normalizers = kernels.attend(query, key, value, waves, 0.125)
        ours = kernels.attend_backward(query, key, value, outputs, normalizers, to_outputs.transpose(1, 2), waves, 0.125)
        is_near = _are_near((outputs, *ours), (expected.transpose(1, 2), *gradients), tolerance)
        return is_near and torch.allclose(normalizers, scores.logsumexp(-1), rtol=0, atol=1e-4)


def _are_near(ours: Iterable[Tensor], theirs: Iterable[Tensor], tolerance: float) -> bool:
    return all((own.float() - other).norm() < tolerance * other.norm() for own, other in zip(ours, theirs, strict=True))

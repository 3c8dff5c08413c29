"""Attention of rows, norms, gates and what follows the head in C, with gradients: in bfloat16 for processors with AVX-512 BF16,
in float32 for those with AVX2. Where there is AMX, attention in bfloat16 uses it.

torch's attention on a CPU is slower in bfloat16 than in float32, and for short rows takes longer to begin than to compute; each
operator of a norm or a gate goes through memory by itself. Where the functions cannot be compiled or are not proven
(`strop.engine.torch.cpu.compiled`), torch's operators do the same.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engine.torch.cpu.compiled import AMX, AVX2, AVX512_BF16, proven
from strop.training.batch import Read, Waves

_SOURCES = {
    torch.bfloat16: (Path(__file__).with_name("kernels.c"), AVX512_BF16),
    torch.float32: (Path(__file__).with_name("kernels_float32.c"), AVX2),
}
HEAD_UNIT = {torch.bfloat16: 32, torch.float32: 8}  # of whose multiples heads can be
WIDTH_UNIT = {torch.bfloat16: 16, torch.float32: 1}  # of whose multiples the widths of norms and gates can be
MAX_DIM, _ROWS_AT_ONCE = 256, 64  # of the sources
_INT, _FLOAT, _PLACE = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Kernels:
    """The compiled functions; all that they take is of their precision and on the CPU. Heads are (1, heads, T, head_dim)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend, self._backward = library.strop_attend_rows, library.strop_attend_rows_backward
        self._scratch_bytes = library.strop_attend_scratch
        self._backward_scratch_bytes = library.strop_attend_backward_scratch
        self._attend.argtypes = [_INT] * 2 + [_PLACE] * 2 + [_INT] * 4 + [_PLACE] * 6 + [_FLOAT] + [_PLACE] * 3 + [_INT]
        self._backward.argtypes = [_INT] * 2 + [_PLACE] * 2 + [_INT] * 4 + [_PLACE] * 11 + [_FLOAT] + [_PLACE] * 4 + [_INT]
        self._norm, self._norm_backward = library.strop_norm_rows, library.strop_norm_rows_backward
        self._gate, self._gate_backward = library.strop_gate, library.strop_gate_backward
        self._norm.argtypes = [_INT] * 3 + [_PLACE] * 2 + [_FLOAT] + [_PLACE] * 2
        self._norm_backward.argtypes = [_INT] * 3 + [_PLACE] * 6
        self._gate.argtypes = [_INT] * 2 + [_PLACE] * 3
        self._gate_backward.argtypes = [_INT] * 2 + [_PLACE] * 5
        self._head, self._head_backward = library.strop_head, library.strop_head_backward
        self._head.argtypes = [*[_INT] * 3, _PLACE, _FLOAT, *[_PLACE] * 4]
        self._head_backward.argtypes = [*[_INT] * 3, _PLACE, _FLOAT, *[_PLACE] * 5]
        others = (self._norm, self._norm_backward, self._gate, self._gate_backward, self._head, self._head_backward)
        for function in (self._attend, self._backward, *others):
            function.restype = None
        for function in (self._scratch_bytes, self._backward_scratch_bytes):
            function.argtypes, function.restype = [_INT, _INT], _INT

    def attend(self, query: Tensor, key: Tensor, value: Tensor, waves: Waves, scale: float) -> tuple[Tensor, Tensor]:
        """What queries read, (1, T, H, D), and log-normalizers, float32 (1, H, T)."""
        _, num_heads, num_tokens, dim = query.shape
        query, key, value = _whole_heads(query), _whole_heads(key), _whole_heads(value)
        out = _floats(1, num_tokens, num_heads, dim)
        normalizers = _floats(1, num_heads, num_tokens)
        scratch = _scratch(self._scratch_bytes(dim, _most_keys(waves)))
        what = _what_is_read(waves, scratch, query, key)
        self._attend(*what, *_heads(query, key, value), scale, *_places(out, normalizers, scratch), scratch.shape[1])
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
        places = _places(*gradients, scratch)
        self._backward(*what, *_heads(*heads), normalizers.data_ptr(), scale, *places, scratch.shape[1])
        of_query, of_key, of_value = (each.to(query.dtype) for each in gradients)
        return of_query, of_key, of_value

    def norm(self, inputs: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """weight * x / rms(x) over the last dimension, the second factor rounded; and 1 / rms(x), float32 (...)."""
        inputs, weight = inputs.contiguous(), weight.contiguous()
        normed, scales = torch.empty_like(inputs), _floats(*inputs.shape[:-1])
        shape = scales.numel(), inputs.shape[-1]
        self._norm(torch.get_num_threads(), *shape, *_places(inputs, weight), eps, *_places(normed, scales))
        return normed, scales

    def norm_backward(self, inputs: Tensor, weight: Tensor, scales: Tensor, to_normed: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of inputs, and of weight, float32 (H,)."""
        inputs, weight, to_normed = inputs.contiguous(), weight.contiguous(), to_normed.contiguous()
        num_rows, width = scales.numel(), inputs.shape[-1]
        of_inputs, of_weight = torch.empty_like(inputs), _floats(-(-num_rows // _ROWS_AT_ONCE), width)
        places = _places(inputs, weight, scales, to_normed, of_inputs, of_weight)
        self._norm_backward(torch.get_num_threads(), num_rows, width, *places)
        return of_inputs, of_weight.sum(0)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, the first factor rounded."""
        gate, up = gate.contiguous(), up.contiguous()
        gated = torch.empty_like(gate)
        self._gate(torch.get_num_threads(), gate.numel(), *_places(gate, up, gated))
        return gated

    def gate_backward(self, gate: Tensor, up: Tensor, to_gated: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        gate, up, to_gated = gate.contiguous(), up.contiguous(), to_gated.contiguous()
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        self._gate_backward(torch.get_num_threads(), gate.numel(), *_places(gate, up, to_gated, of_gate, of_up))
        return of_gate, of_up

    def head(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the targets, entropies and log-normalizers of (m, V) logits, all float32 (m,)."""
        targets = targets.to(torch.int64).contiguous()
        is_outside = (targets < 0) | (targets >= logits.shape[1])
        if is_outside.any():
            worst = int(targets[is_outside][0])
            raise IndexError(f"token id {worst} is none of the {logits.shape[1]} that the model's head knows")
        figures = _floats(3, len(logits))
        places = _places(targets, *figures)
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
        self._head_backward(torch.get_num_threads(), *logits.shape, logits.data_ptr(), temperature, *_places(*columns))


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
    return [part for each in heads for part in (each.data_ptr(), (_INT * 2)(each.stride(1), each.stride(2)))]


def _places(*tensors: Tensor) -> list[int]:
    return [each.data_ptr() for each in tensors]


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
        (logprobs * to_both[0] + entropies * to_both[1]).sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        *ours, normalizers = kernels.head(logits, targets, 0.8)
        kernels.head_backward(logits, targets, 0.8, normalizers, ours[1], *(to_both / -0.8))
        are_near = (
            torch.allclose(one, other, rtol=0, atol=1e-5) for one, other in zip(ours, (logprobs, entropies), strict=True)
        )
        of_leaf = leaf.grad
        return all(are_near) and of_leaf is not None and bool((logits.float() - of_leaf).norm() < tolerance * of_leaf.norm())


def _are_others_proven(kernels: Kernels, dtype: torch.dtype, tolerance: float) -> bool:
    """Norm, gate and their gradients."""
    generator = torch.Generator().manual_seed(0)
    inputs, other, to_outputs = (torch.randn(70, 48, generator=generator).to(dtype) for _ in range(3))
    leaves = [each.to(torch.float32, copy=True).requires_grad_() for each in (inputs, other[0])]
    pairs = [each.to(torch.float32, copy=True).requires_grad_() for each in (inputs, other)]
    with torch.enable_grad():
        expected = (
            F.rms_norm(leaves[0], (48,), leaves[1], 1e-3),
            F.silu(pairs[0]) * pairs[1],
        )
        for each in expected:
            each.backward(to_outputs.float())  # type: ignore[no-untyped-call]
    with torch.no_grad():
        normed, scales = kernels.norm(inputs, other[0], 1e-3)
        ours = [normed, kernels.gate(inputs, other), *kernels.norm_backward(inputs, other[0], scales, to_outputs)]
        ours += kernels.gate_backward(inputs, other, to_outputs)
        theirs = [*expected, *(leaf.grad for leaf in (*leaves, *pairs))]
        return all((a.float() - b).norm() < tolerance * b.norm() for a, b in zip(ours, theirs, strict=True) if b is not None)


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
        (scores.softmax(-1) @ values).backward(to_outputs.float())  # type: ignore[no-untyped-call]
    waves = Waves.of(reads)
    with torch.no_grad():
        expected = (scores.softmax(-1) @ values).transpose(1, 2)
        outputs, normalizers = kernels.attend(query, key, value, waves, 0.125)
        gradients = kernels.attend_backward(query, key, value, outputs, normalizers, to_outputs.transpose(1, 2), waves, 0.125)
        pairs = [(outputs, expected), *((ours, leaf.grad) for ours, leaf in zip(gradients, leaves, strict=True))]
        is_near = all(
            (ours.float() - theirs).norm() < tolerance * theirs.norm() for ours, theirs in pairs if theirs is not None
        )
        return is_near and torch.allclose(normalizers, scores.logsumexp(-1), rtol=0, atol=1e-4)

"""Attention of rows in C, in bfloat16 and forward and backward, where this machine has a C compiler and AVX-512 BF16.

torch's kernels for a CPU are slower in bfloat16 than in float32, and in float32 reach a quarter of what its products do. Where
`kernels.c` cannot be compiled or is not proven (`strop.engine.compiled`), they do the same.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from strop.engine.compiled import proven
from strop.training.packing import Read, Waves

_SOURCE = Path(__file__).with_name("kernels.c")
_PAIRED, _MAX_DIM = 32, 256  # of avx512.h
_INT, _FLOAT, _PLACE = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Kernels:
    """The compiled functions. Heads are bfloat16 on the CPU, (1, heads, T, head_dim) with whole heads in memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend, self._backward = library.strop_attend_rows, library.strop_attend_rows_backward
        self._scratch_bytes = library.strop_attend_scratch
        self._backward_scratch_bytes = library.strop_attend_backward_scratch
        self._attend.argtypes = [_INT] * 2 + [_PLACE] * 2 + [_INT] * 4 + [_PLACE] * 6 + [_FLOAT] + [_PLACE] * 3 + [_INT]
        self._backward.argtypes = [_INT] * 2 + [_PLACE] * 2 + [_INT] * 4 + [_PLACE] * 11 + [_FLOAT] + [_PLACE] * 4 + [_INT]
        for function in (self._attend, self._backward):
            function.restype = None
        for function in (self._scratch_bytes, self._backward_scratch_bytes):
            function.argtypes, function.restype = [_INT, _INT], _INT

    def attend(self, query: Tensor, key: Tensor, value: Tensor, waves: Waves, scale: float) -> tuple[Tensor, Tensor]:
        """What queries read, bfloat16 (1, T, H, D), and log-normalizers, float32 (1, H, T)."""
        _, num_heads, num_tokens, dim = query.shape
        query, key, value = _whole_heads(query), _whole_heads(key), _whole_heads(value)
        out = torch.empty(1, num_tokens, num_heads, dim)
        normalizers = torch.empty(1, num_heads, num_tokens)
        scratch = _scratch(self._scratch_bytes(dim, _most_keys(waves)))
        strides = [_strides(heads) for heads in (query, key, value)]
        self._attend(
            len(scratch),
            len(waves.starts) - 1,
            waves.starts.data_ptr(),
            waves.reads.data_ptr(),
            num_tokens,
            num_heads,
            key.shape[1],
            dim,
            query.data_ptr(),
            strides[0],
            key.data_ptr(),
            strides[1],
            value.data_ptr(),
            strides[2],
            scale,
            out.data_ptr(),
            normalizers.data_ptr(),
            scratch.data_ptr(),
            scratch.shape[1],
        )
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
        """Gradients of query, key and value, bfloat16, from that of `outputs`, both (1, T, H, D)."""
        _, num_heads, num_tokens, dim = query.shape
        outputs, to_outputs = outputs.transpose(1, 2), to_outputs.transpose(1, 2)
        heads = [_whole_heads(each) for each in (query, key, value, outputs, to_outputs)]
        places = [place for each in heads for place in (each.data_ptr(), _strides(each))]
        gradients = [torch.empty(each.shape) for each in (query, key, value)]
        scratch = _scratch(self._backward_scratch_bytes(dim, _most_keys(waves)))
        self._backward(
            len(scratch),
            len(waves.starts) - 1,
            waves.starts.data_ptr(),
            waves.reads.data_ptr(),
            num_tokens,
            num_heads,
            key.shape[1],
            dim,
            *places,
            normalizers.data_ptr(),
            scale,
            *(each.data_ptr() for each in gradients),
            scratch.data_ptr(),
            scratch.shape[1],
        )
        of_query, of_key, of_value = (each.to(query.dtype) for each in gradients)
        return of_query, of_key, of_value


def kernels_for(query: Tensor, key: Tensor, value: Tensor) -> Kernels | None:
    """The compiled functions, if they are made for such heads and this machine can have them."""
    dim = query.shape[-1]
    fits = (
        query.dtype is torch.bfloat16
        and query.device.type == "cpu"
        and dim == value.shape[-1]
        and dim % _PAIRED == 0
        and dim <= _MAX_DIM
        and query.shape[1] % key.shape[1] == 0
    )
    return _compiled() if fits else None


@cache
def _compiled() -> Kernels | None:
    return proven(_SOURCE, Kernels, _is_proven)


def _whole_heads(heads: Tensor) -> Tensor:
    """With each head's numbers side by side."""
    return heads if heads.stride(-1) == 1 and all(each % 2 == 0 for each in heads.stride()[1:3]) else heads.contiguous()


def _strides(heads: Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (_INT * 2)(heads.stride(1), heads.stride(2))


def _most_keys(waves: Waves) -> int:
    return int(waves.reads[:, 3].max())


def _scratch(num_bytes: int) -> Tensor:
    """Room for each thread, (threads, bytes): whole lines of a processor's cache."""
    return torch.empty(torch.get_num_threads(), -(-num_bytes // 64) * 64, dtype=torch.uint8)


def _is_proven(kernels: Kernels) -> bool:
    """Whether own and shared reads of more than a tile, and their gradients, are torch's to the rounding of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    own, shared = (slice(0, 150), slice(150, 171)), (slice(150, 171), slice(0, 139))
    reads = [Read(queries=each, keys=each, is_own=True) for each in own]
    reads.append(Read(queries=shared[0], keys=shared[1], is_own=False))
    query, key, value, to_outputs = (
        torch.randn(1, 171, num_heads, 64, generator=generator).bfloat16().transpose(1, 2) for num_heads in (6, 2, 2, 6)
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
        is_near = all((ours.float() - theirs).norm() < 0.01 * theirs.norm() for ours, theirs in pairs if theirs is not None)
        return is_near and torch.allclose(normalizers, scores.logsumexp(-1), rtol=0, atol=1e-4)

"""The forward of a Llama-like decoder over a KV cache, and which sizes of a step give the same bits in deterministic mode.

Written for few operations, because a small model's step on a CPU is mostly overhead: q, k and v are one product, residuals,
activations and gates are part of the products, and q and k turn together. Every function is the same arithmetic as
`transformers`' own forward up to rounding; tests hold the gap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # without the models, whose import takes 2 s

from strop.engine.model_directory import Architecture
from strop.engine.torch.attention import Tables, Tokens
from strop.engine.torch.cpu.kernels import attention_over
from strop.engine.torch.kv_cache import KV_STEP, Chunk, KvCache, Row, StepShape
from strop.engine.torch.weights import DecoderWeights, LayerWeights
from strop.errors import ModelError

_log = logging.getLogger(__name__)
_MEASURED_LAYERS = 2  # all have one shape; the last one computes its products only for rows
_MAX_COLUMN_SIZES = 20
_MAX_SIZES, _ROW_STEP = 8, 8  # each size is measured before the first step
# oneDNN generates code for every size of every weight's shape and keeps it: 0.6 MiB each, five shapes in SmolLM2-135M.
_MAX_SIZES_OF_LIBRARY = 3  # of rows, and of chunk tokens next to all rows
CHUNK_BUDGET = 256  # tokens of prompts and observations in one step, next to the rows


class Decoder:
    """Weights, KV cache and one step: a token for each of many conversations, and chunks of prompts."""

    def __init__(self, model_config: Any, *, dtype: torch.dtype, device: torch.device, num_slots: int, max_length: int) -> None:
        self.architecture = Architecture.of(model_config)
        self.weights = DecoderWeights(self.architecture, dtype=dtype, device=device)
        self.device, self.num_slots = device, num_slots
        self.cache = KvCache(self.architecture, dtype=dtype, device=device, num_slots=num_slots, num_columns=max_length)
        self.num_columns = self.cache.num_columns
        self._tables = self._rotary_tables(model_config, dtype)
        self._attention: Any = attention_over(self.cache, self.architecture, self._tables)

    def step(self, rows: Sequence[Row], chunks: Sequence[Chunk], shape: StepShape, *, num_layers: int | None = None) -> Tensor:
        """Compute every token of `rows` and `chunks` and leave its keys and values in the cache.

        Rows and chunks do not see each other, except that a chunk may go on where another of the same slot ended.

        Args:
            num_layers: stop after so many, to measure with.

        Returns:
            (rows, V) logits in the engine's dtype.
        """
        ids, tokens = self._tokens(rows, chunks, shape)
        plan = self._attention.plan(tokens, rows, chunks, shape)
        logits = self._forward(ids, plan, shape.num_rows, num_layers)
        return logits[: len(rows)]

    def step_slots(self, ids: Tensor, positions: Tensor, num_columns: int) -> Tensor:
        """As `step`, of one token for each of the first slots. Nothing but sizes decides what is computed, and where.

        Args:
            ids, positions: int64 (slots,), on the device. A slot that has no token takes the last position of the cache.
            num_columns: of each slot that is read.

        Returns:
            (slots, V) logits in the engine's dtype.
        """
        num_slots = len(ids)
        slots = torch.arange(num_slots, device=self.device)
        tokens = Tokens(
            positions=positions,
            slots=slots,
            lenders=slots,
            lent=torch.zeros_like(slots),
            num_rows=num_slots,
            num_real=num_slots,
        )
        return self._forward(ids, self._attention.plan_slots(tokens, num_columns), num_slots, None)

    def _forward(self, ids: Tensor, plan: Any, num_rows: int, num_layers: int | None) -> Tensor:
        attention = self._attention
        hidden = F.embedding(ids, self.weights.embedding)
        num_layers = min(num_layers or self.architecture.num_layers, self.architecture.num_layers)
        for index, layer in enumerate(self.weights.layers[:num_layers]):
            qkv = layer.qkv.product(attention.norm(hidden, layer.input_norm), layer.qkv_bias)
            is_last = index == num_layers - 1
            if is_last:  # of chunks, only keys and values are wanted
                hidden = hidden[:num_rows]
            attended = attention.read(layer, index, qkv, plan, with_chunks=not is_last)
            hidden = self._finish_layer(layer, hidden, _padded(attended, len(hidden)))
        return self.weights.head.product(attention.norm(hidden, self.weights.norm))

    def _tokens(self, rows: Sequence[Row], chunks: Sequence[Chunk], shape: StepShape) -> tuple[Tensor, Tokens]:
        """Ids (N,) and places of all tokens of a step, padding included."""
        ids, positions, slots = [row.id for row in rows], [row.position for row in rows], [row.slot for row in rows]
        for chunk in chunks:
            ids += chunk.ids
            positions += range(chunk.start, chunk.start + len(chunk.ids))
            slots += [chunk.slot] * len(chunk.ids)
        for slot, position in zip(slots, positions, strict=True):
            self.cache.note_write(slot, position)
        lenders, lent = zip(*map(self.cache.loan, slots), strict=True) if slots else ((), ())
        num_real = len(ids)
        padding = [0] * (shape.num_tokens - num_real)
        columns = [[*column, *padding] for column in (ids, positions, slots, lenders, lent)]
        all_ids, all_positions, all_slots, all_lenders, all_lent = torch.tensor(columns, device=self.device)
        return all_ids, Tokens(
            positions=all_positions,
            slots=all_slots,
            lenders=all_lenders,
            lent=all_lent,
            num_rows=len(rows),
            num_real=num_real,
        )

    def _finish_layer(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer, after attention."""
        hidden = layer.output.onto(hidden, attended)
        normed = self._attention.norm(hidden, layer.mlp_norm)
        gated = layer.up.times(layer.gate.silu(normed), normed)
        return layer.down.onto(hidden, gated)

    def _rotary_tables(self, model_config: Any, dtype: torch.dtype) -> Tables:
        """What `transformers` computes for every architecture that is implemented, to the bit."""
        rope, head_dim = model_config.rope_parameters, self.architecture.head_dim
        if rope["rope_type"] == "default":
            frequencies, scale = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](model_config)
        positions = torch.arange(self.num_columns)
        angles = (positions[:, None].float() * frequencies).repeat(1, 2)
        cos, sin = ((function(angles) * scale).to(dtype) for function in (torch.cos, torch.sin))
        if cos.shape[-1] != head_dim:
            raise ModelError(
                f"the torch engine does not implement rotary embeddings of a part of each head ({cos.shape[-1]} of"
                f" {head_dim}), which this {self.architecture.model_type} model uses."
            )
        sign = torch.ones(head_dim, dtype=dtype)
        sign[: len(sign) // 2] = -1  # where rotate_half negates
        return cos.to(self.device), (sin * sign).to(self.device)


def _padded(tokens: Tensor, num_tokens: int) -> Tensor:
    """`tokens` (N, width) with rows of zeros appended, up to `num_tokens` of them; or its first ones."""
    if len(tokens) >= num_tokens:
        return tokens[:num_tokens]
    return F.pad(tokens, (0, 0, 0, num_tokens - len(tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The allowed sizes of a step, each ascending. The largest hold all slots and columns."""

    tokens: tuple[int, ...]  # of the products over rows and chunks
    slots: tuple[int, ...]  # that the rows' attention covers
    columns: tuple[int, ...]  # of each slot that it reads
    can_mix: bool  # chunks may be computed in one step with rows
    is_invariant: bool  # a row's bits depend neither on its slot nor on the size chosen

    def shape(self, *, num_rows: int, num_chunk_tokens: int, num_slots: int, num_columns: int) -> StepShape:
        """Return the smallest sizes that hold the content. A single chunk keeps its own size, unless chunks can be mixed."""
        num_tokens = num_rows + num_chunk_tokens
        return StepShape(
            num_tokens=covering(self.tokens, num_tokens) if num_rows or self.can_mix else num_tokens,
            num_rows=covering(self.tokens, num_rows) if num_rows else 0,
            num_slots=covering(self.slots, num_slots),
            num_columns=covering(self.columns, num_columns),
        )


def covering(sizes: Sequence[int], number: int) -> int:
    """Return the smallest of ascending sizes that holds `number`."""
    return next(size for size in sizes if size >= number)


def all_sizes(decoder: Decoder) -> StepSizes:
    """Return the candidate sizes: at most 8 of slots, 8 or 3 of rows and of chunk tokens next to all rows, 20 KV lengths."""
    max_sizes = _MAX_SIZES if decoder.weights.multiply_in_c else _MAX_SIZES_OF_LIBRARY
    slots = _evenly_up_to(decoder.num_slots, _ROW_STEP, _MAX_SIZES)
    rows = _evenly_up_to(_most_rows(decoder), _ROW_STEP, max_sizes)
    chunk_sizes = _evenly_up_to(CHUNK_BUDGET, _ROW_STEP, max_sizes)
    return StepSizes(
        tokens=(*rows, *(rows[-1] + size for size in chunk_sizes)),
        slots=slots,
        columns=_evenly_up_to(decoder.num_columns, KV_STEP, _MAX_COLUMN_SIZES),
        can_mix=True,
        is_invariant=False,
    )


def _most_rows(decoder: Decoder) -> int:
    """Rows of the largest step. Kernels compute the last row of an odd number in another way."""
    return -(-decoder.num_slots // _ROW_STEP) * _ROW_STEP


def _evenly_up_to(largest: int, unit: int, max_sizes: int) -> tuple[int, ...]:
    """Multiples of a multiple of `unit` below `largest`, and `largest`."""
    step = -(-largest // (max_sizes * unit)) * unit
    return (*range(step, largest, step), largest)


@torch.inference_mode()
def invariant_sizes(decoder: Decoder) -> StepSizes:
    """Return the sizes of `all_sizes` whose logits equal, bit for bit and in every row, the first row of the largest size.

    Every slot is given the same content, so all rows of all sizes should agree. Kernels are chosen by shape, not by value,
    so weights of any later version behave alike. The weights held now must be real ones, since zeros agree always. The KV
    cache is used for it and empty afterwards.
    """
    every = all_sizes(decoder)
    most_rows, most_slots, most_columns = _most_rows(decoder), decoder.num_slots, decoder.num_columns
    decoder.cache.fill(torch.Generator().manual_seed(0), _MEASURED_LAYERS)
    position = min(KV_STEP, most_columns) * 2 // 3

    def logits(num_slots: int, num_tokens: int, num_columns: int) -> torch.Tensor:
        rows = [Row(slot=slot, id=0, position=position) for slot in range(min(num_slots, num_tokens))]
        num_rows = min(num_tokens, most_rows)
        shape = StepShape(num_tokens=num_tokens, num_rows=num_rows, num_slots=num_slots, num_columns=num_columns)
        return decoder.step(rows, (), shape, num_layers=_MEASURED_LAYERS)

    reference = logits(most_slots, most_rows, most_columns)[:1]

    def agreeing(sizes: Sequence[int], of_size: Callable[[int], torch.Tensor]) -> tuple[int, ...]:
        return tuple(size for size in sizes if torch.equal(found := of_size(size), reference.expand_as(found)))

    tokens = agreeing(every.tokens, lambda size: logits(most_slots, size, most_columns))
    slots = agreeing(every.slots[:-1], lambda size: logits(size, most_rows, most_columns))
    columns = agreeing(every.columns[:-1], lambda size: logits(most_slots, most_rows, size))
    decoder.cache.clear()
    largest = every.tokens[-1]
    sizes = StepSizes(
        tokens=tokens if largest in tokens else tuple(sorted({*(size for size in tokens if size < most_rows), most_rows})),
        slots=(*slots, most_slots),
        columns=(*columns, most_columns),
        can_mix=largest in tokens,
        is_invariant=most_rows in tokens,
    )
    _log.debug("steps give equal bits with %s", sizes)
    if not sizes.is_invariant:
        _log.warning(
            "deterministic mode: on this machine the rows of one decode step differ in their bits although their content is"
            " equal; completions may depend on the slot they get"
        )
    return sizes

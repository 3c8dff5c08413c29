"""Decode steps of fixed sizes over buffers that never move, which a CUDA device can capture once and replay.

A step of a small model is hundreds of short kernels, and launching them one by one takes a GPU longer than computing them. So
on CUDA the rows that sample are computed in few sizes, one for each of the first slots, whether it has a token or not; all that
differs between two steps of a size is written into buffers before, in one transfer, and what was drawn comes back in another.
A graph is captured when a size is first needed. It stays valid: on a GPU weights are published in place, and neither they nor
the KV cache are ever freed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engine.config import EngineConfig
from strop.engine.torch.decoder import Decoder, StepSizes
from strop.engine.torch.kv_cache import Row
from strop.engine.torch.sampling import DRAWN_AT_ONCE, banned_mask, draw

_log = logging.getLogger(__name__)
_ONE_CAPTURE = threading.Lock()  # at a time in a process: torch asks for it
_WARM_UPS = 3  # in which libraries choose kernels and take their workspaces, which a capture must not

Size: TypeAlias = tuple[int, int]  # slots, columns


class CudaGraphs:
    """Captures the step of each size once and replays it. All graphs share one pool of memory, as one runs at a time.

    Args:
        is_off: compute each step without graphs, on devices that have none and for comparison.
    """

    def __init__(self, *, is_off: bool = False) -> None:
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # torch's handle of it, of a type that it does not export
        self._is_off = is_off

    def run(self, size: Size, work: Callable[[], Tensor]) -> Tensor:
        """Return the result of `work`, which is the step of `size`: the same each time, over the same buffers."""
        if self._is_off:
            return work()
        if size not in self._graphs:
            try:
                with _ONE_CAPTURE:
                    self._graphs[size] = self._capture(work)
            except RuntimeError as error:
                self._is_off = True
                _log.warning(
                    "a decode step of %d slots and %d columns could not be captured (%s): decoding goes on without graphs",
                    *size,
                    error,
                )
                return work()
        graph, result = self._graphs[size]
        graph.replay()
        return result

    def _capture(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):  # each writes the same keys and values to the same places
                work()
        torch.cuda.current_stream().wait_stream(aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a trainer's, may go on with the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return graph, result


class StaticSteps:
    """Decode steps of a decoder in fixed sizes. Used by one thread."""

    def __init__(self, decoder: Decoder, graphs: CudaGraphs) -> None:
        self._decoder, self._graphs = decoder, graphs
        num_slots, device = decoder.num_slots, decoder.device
        width = -(-num_slots // DRAWN_AT_ONCE) * DRAWN_AT_ONCE
        # Of each slot: id, position, and the bits of two float64, uniform and temperature.
        self._given_here = torch.zeros(4, width, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._given = self._given_here.to(device, copy=True)
        self._drawn = torch.zeros(3, width, dtype=torch.float64, device=device)  # id, log-prob, entropy

    def step(self, rows: Sequence[Row], sizes: StepSizes) -> Tensor:
        """Feed a token of each row and draw the next. Waits for the device once, for what was drawn.

        Returns:
            (3, rows) float64 on the CPU: ids, log-probs, entropies.
        """
        size = self._size(rows, sizes)
        self._fill(rows)
        logits = self._graphs.run(size, lambda: self._compute(size))
        if bans := [(row.slot, each) for row in rows for each in row.banned]:  # rare, and of any number: never captured
            self._draw(logits, bans)
        return self._drawn.cpu()[:, [row.slot for row in rows]]

    def _size(self, rows: Sequence[Row], sizes: StepSizes) -> Size:
        """The smallest that holds the rows, of those that deterministic mode may use for both products and attention."""
        num_slots, num_columns = rows[-1].slot + 1, max(row.position for row in rows) + 1
        whole = (size for size in sizes.tokens if size in sizes.slots and size >= num_slots)
        return next(whole, self._decoder.num_slots), next(size for size in sizes.columns if size >= num_columns)

    def _fill(self, rows: Sequence[Row]) -> None:
        given = self._given_here
        table, numbers = given.numpy(), given[2:].view(torch.float64).numpy()
        # A slot without a token feeds 0 into the cache's last column, which no request reaches: its last id is never fed.
        table[0], table[1] = 0, self._decoder.num_columns - 1
        numbers[0], numbers[1] = 0.0, 1.0
        for row in rows:
            self._decoder.cache.note_write(row.slot, row.position)
        slots = [row.slot for row in rows]
        table[0, slots] = [row.id for row in rows]
        table[1, slots] = [row.position for row in rows]
        numbers[0, slots] = [row.uniform for row in rows]
        numbers[1, slots] = [row.temperature for row in rows]
        self._given.copy_(given, non_blocking=True)  # the last step's was read: that step was waited for

    def _compute(self, size: Size) -> Tensor:
        """What is captured: (slots, V) logits; what was drawn of them lies in `_drawn`."""
        num_slots, num_columns = size
        logits = self._decoder.step_slots(self._given[0, :num_slots], self._given[1, :num_slots], num_columns)
        self._draw(logits, ())
        return logits

    def _draw(self, logits: Tensor, bans: Sequence[tuple[int, int]]) -> None:
        """Args: bans: (slot, id) that must not be drawn."""
        # Always so many rows at once: how a device adds a row up may depend on how many there are.
        logits = F.pad(logits, (0, 0, 0, -len(logits) % DRAWN_AT_ONCE))
        uniform, temperature = self._given[2:, : len(logits)].view(torch.float64)
        self._drawn[:, : len(logits)] = draw(logits, temperature.float(), uniform, banned_mask(logits, bans))


def open_static_steps(config: EngineConfig, decoder: Decoder) -> StaticSteps | None:
    """What `engine.decode` asks for; None: every step is launched as it comes."""
    is_cuda = decoder.device.type == "cuda"
    if config.decode == "eager" or (config.decode == "auto" and not is_cuda):
        return None
    return StaticSteps(decoder, CudaGraphs(is_off=not is_cuda))

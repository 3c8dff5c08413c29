"""Weights on their way to engines in other processes: one copy in memory that all of them can read."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from strop.engine.protocol import NamedTensor
from strop.errors import MachineError, WeightsNotProven

_ALIGNMENT = 64  # bytes; more than any dtype asks for
_DTYPES = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where one weight lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes


class SharedWeights:
    """A file without a name, in memory, that child processes inherit: it is gone when the last of them is.

    Each engine takes a publication and leaves it when it has read it. Those that take the same one at the same time, by its
    checksum, share the copy of the first; another publication waits until all have left.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("strop-weights", os.MFD_CLOEXEC)
        self._writing = asyncio.Lock()
        self._unused = asyncio.Event()
        self._unused.set()
        self._num_users = 0
        self._checksum = ""
        self._stored: tuple[Stored, ...] = ()

    async def take(self, tensors: AsyncIterator[NamedTensor], *, checksum: str) -> tuple[Stored, ...]:
        """Where the weights lie, until `leave`. Raises `MachineError` when there is no memory for them."""
        async with self._writing:
            if not (self._num_users and self._checksum == checksum):
                await self._unused.wait()
                self._checksum, self._stored = checksum, await self._write(tensors)
            self._num_users += 1
            self._unused.clear()
            return self._stored

    def leave(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            if self.descriptor >= 0:
                os.ftruncate(self.descriptor, 0)
            self._unused.set()

    def close(self) -> None:
        """Free the memory. No user may be left. Safe to call twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    async def _write(self, tensors: AsyncIterator[NamedTensor]) -> tuple[Stored, ...]:
        stored, end = [], 0
        try:
            async for name, tensor in tensors:
                dtype, offset = str(tensor.dtype).removeprefix("torch."), -(-end // _ALIGNMENT) * _ALIGNMENT
                place = Stored(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset)
                end = await asyncio.to_thread(self._append, tensor, place.offset)
                stored.append(place)
        except BaseException:
            os.ftruncate(self.descriptor, 0)
            raise
        return tuple(stored)

    def _append(self, tensor: torch.Tensor, offset: int) -> int:
        """Returns where it ends."""
        left = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        while left.nbytes:
            try:
                written = os.pwrite(self.descriptor, left, offset)
            except OSError as error:
                raise MachineError(f"no shared memory for weights after {offset >> 20} MiB: {error.strerror}.") from error
            left, offset = left[written:], offset + written
        return offset


def read_weights(descriptor: int, weights: Sequence[Stored]) -> Iterator[NamedTensor]:
    """What lies in shared memory; each tensor is to be copied before the memory is left.

    Raises `WeightsNotProven` when it cannot be what was meant.
    """
    size = os.fstat(descriptor).st_size
    for stored in weights:
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None:
            raise WeightsNotProven(f"weight {stored.name!r} was sent as {stored.dtype}; an engine takes {', '.join(_DTYPES)}.")
        num_bytes = prod(stored.shape) * dtype.itemsize
        if min(stored.offset, *stored.shape, 0) < 0 or stored.offset + num_bytes > size:
            raise WeightsNotProven(
                f"weight {stored.name!r} was sent as {num_bytes} bytes at {stored.offset}, but the shared memory holds {size}."
            )
    memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) if size else None  # unmapped with its last tensor
    for stored in weights:
        dtype, count = _DTYPES[stored.dtype], prod(stored.shape)
        if memory is None or not count:
            yield stored.name, torch.empty(stored.shape, dtype=dtype)
        else:
            yield stored.name, torch.frombuffer(memory, dtype=dtype, count=count, offset=stored.offset).reshape(stored.shape)

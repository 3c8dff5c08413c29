"""Moments in a file instead of memory: they are read and written while a step is at them (ZeRO-Infinity, arXiv 2104.07857)."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.errors import RunError

_PART = 2**22  # numbers whose moments are in memory together: 32 MiB, or those of one tensor that is larger
_MEMORY = {"tmpfs", "ramfs"}  # file systems that are none


class PagedAdamW(torch.optim.AdamW):
    """AdamW for a CPU whose moments lie in files; its steps are those of AdamW to the bit.

    The files have no name and end with the process. The system may keep their pages as long as nobody else needs the memory.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._mappings: list[mmap.mmap] = []

    def zeros(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Zeros of these shapes in a new file, divided as `like` is.

        Raises:
            RunError: there is no room, or the directory for temporary files is in memory itself.
        """
        of_rank = [each.to_local() if isinstance(each, DTensor) else each for each in like]
        sizes = [each.numel() for each in of_rank]
        mapping = _map_file(max(1, sum(sizes)) * of_rank[0].itemsize)  # a rank may have no part of anything, a file has some
        self._mappings.append(mapping)
        block = torch.frombuffer(mapping, dtype=of_rank[0].dtype)[: sum(sizes)]
        parts = [part.view(each.shape) for part, each in zip(torch.split(block, sizes), of_rank, strict=True)]
        return [_divided_as(each, part) for each, part in zip(like, parts, strict=True)]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        if closure is not None:
            raise ValueError("this optimizer takes its steps a part of the weights at a time: it has no use for a closure")
        groups = self.param_groups
        if any(parameter.grad is not None and not self.state[parameter] for group in groups for parameter in group["params"]):
            raise ValueError("a parameter has no moments yet: make them by zeros(), or they would lie in memory")
        try:
            for group in groups:
                for part in _parts(group["params"]):
                    self.param_groups = [{**group, "params": part}]
                    super().step()
                    self.release()
        finally:
            self.param_groups = groups
        return None

    def release(self) -> None:
        """Give the memory back that the moments take now; what was written stays in the files."""
        for each in self._mappings:
            each.madvise(mmap.MADV_DONTNEED)


def _parts(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, as many together as `_PART` has room for."""
    ends = itertools.accumulate(each.numel() for each in parameters)
    places = [(end - each.numel()) // _PART for end, each in zip(ends, parameters, strict=True)]
    for _, part in itertools.groupby(zip(places, parameters, strict=True), key=lambda each: each[0]):
        yield [parameter for _, parameter in part]


def _divided_as(like: Tensor, of_rank: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return of_rank
    whole: Tensor = DTensor.from_local(of_rank, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return whole


def _map_file(num_bytes: int) -> mmap.mmap:
    directory = Path(tempfile.gettempdir()).resolve()
    key = 'trainer.optimizer.moments = "disk"'
    if (kind := _file_system(directory)) in _MEMORY:
        raise RunError(f"{directory}: is in memory itself ({kind}), so {key} would save none. Set TMPDIR to one on a disk.")
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # or a full disk would end the process in the middle of a step
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise RunError(
            f"{directory}: no file of {num_bytes / 2**20:.0f} MiB for {key} ({error}). Make room, or set TMPDIR to a directory"
            " with more."
        ) from error


def _file_system(directory: Path) -> str:
    """Its kind, such as "ext4"; "" where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    above = [(len(place), kind) for _, place, kind, *_ in mounts if directory.is_relative_to(place)]
    return max(above, default=(0, ""), key=lambda each: each[0])[1]

"""AdamW with its moments in files, for a CPU with little memory."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.errors import RunError

_PART = 2**22  # numbers whose moments are in memory together: 32 MiB, or those of one tensor that is larger


class PagedAdamW(torch.optim.AdamW):
    """AdamW for a CPU with moments in files. Its steps equal those of AdamW bit for bit.

    The files have no name and end with the process. The system may keep their pages in memory that is free.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._mappings: list[mmap.mmap] = []

    def zeros(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return zeros of these shapes in a new file. Raises `RunError` if the disk is full."""
        sizes = [each.numel() for each in like]
        mapping = _map_file(sum(sizes) * like[0].itemsize)
        self._mappings.append(mapping)
        block = torch.frombuffer(mapping, dtype=like[0].dtype)
        return [part.view(each.shape) for part, each in zip(torch.split(block, sizes), like, strict=True)]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update a part of the weights at a time. All moments must exist: others would lie in memory."""
        groups = self.param_groups
        try:
            for group in groups:
                for part in _parts(group["params"]):
                    self.param_groups = [{**group, "params": part}]
                    super().step()
                    self.release()
        finally:
            self.param_groups = groups

    def release(self) -> None:
        """Free the memory of the moments. Their values stay in the files."""
        for each in self._mappings:
            each.madvise(mmap.MADV_DONTNEED)


def _parts(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters in order, in parts of about `_PART` numbers."""
    ends = itertools.accumulate(each.numel() for each in parameters)
    places = [(end - each.numel()) // _PART for end, each in zip(ends, parameters, strict=True)]
    for _, part in itertools.groupby(zip(places, parameters, strict=True), key=lambda each: each[0]):
        yield [parameter for _, parameter in part]


def _map_file(num_bytes: int) -> mmap.mmap:
    directory = Path(tempfile.gettempdir())
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # or a full disk would end the process in the middle of a step
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise RunError(
            f'{directory}: no file of {num_bytes / 2**20:.0f} MiB for trainer.optimizer.moments = "disk" ({error}). Make room,'
            " or set TMPDIR to a directory with more."
        ) from error

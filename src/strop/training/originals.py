"""What frozen weights were before they were rounded, without a second copy of them in memory."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from strop.errors import ModelError

logger = logging.getLogger(__name__)

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors call them


class Originals:
    """Float32 values of weights that a model holds rounded, read each time from the files that the model was loaded from.

    A weight that rounding left as it was needs no file. One that no file holds under its name, as where the model library
    renames on loading, is kept in the memory of the host.

    Args:
        directory: of the model; None: nothing can be read, so all are kept.
        called: what the files call a weight, by its name in the model.
    """

    def __init__(self, directory: Path | None = None, *, called: Callable[[str], str] = str) -> None:
        self._called = called
        self._places = {} if directory is None else dict(_places_in(directory))
        self._read: dict[str, _Place] = {}
        self._kept: dict[str, Tensor] = {}

    def remember(self, name: str, exact: Tensor, rounded: Tensor) -> None:
        """See to it that `exact` can be had again, once the model has `rounded` alone."""
        if torch.equal(rounded.to(exact.dtype), exact):
            return
        place = self._places.get(self._called(name))
        if place is not None and _is_equal(place.read(), exact):
            self._read[name] = place
            return
        logger.info("%s is in no file under this name as it was loaded: its float32 values are kept in memory", name)
        self._kept[name] = exact.to("cpu", copy=True)

    def exact(self, name: str, rounded: Tensor) -> Tensor:
        """The float32 values of a weight that the model has as `rounded`, on its device. Do not write into them.

        Raises:
            ModelError: the file is gone, or holds something else by now.
        """
        if name in self._kept:
            return self._kept[name].to(rounded.device)
        if name not in self._read:
            return rounded.float()
        found = self._read[name].read()
        if found is None or not _is_equal(found.to(rounded.dtype), rounded):
            raise ModelError(
                f"{self._read[name].path}: {self._called(name)} is no longer there as it was loaded. An adapter is merged with"
                " the weights in the files of its model: put the file back, then give the same command again."
            )
        return found.to(rounded.device, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a tensor lies."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> Tensor | None:
        """None where the file is gone, or ends before. Read, not mapped: mapped pages count as memory of the process."""
        content = bytearray(math.prod(self.shape) * self.dtype.itemsize)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                view = memoryview(content)
                while view and (num_read := file.readinto(view)):
                    view = view[num_read:]
        except OSError:
            return None
        return None if view else torch.frombuffer(content, dtype=self.dtype).view(self.shape)


def _places_in(directory: Path) -> Iterator[tuple[str, _Place]]:
    """Every tensor of a model's files: 8 bytes of length, a header in JSON with offsets behind it, then the tensors."""
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in _DTYPES and math.prod(entry["shape"]):
                begin = 8 + length + entry["data_offsets"][0]
                yield name, _Place(path=path, offset=begin, dtype=_DTYPES[entry["dtype"]], shape=tuple(entry["shape"]))


def _is_equal(found: Tensor | None, exact: Tensor) -> bool:
    return found is not None and found.shape == exact.shape and torch.equal(found.to(exact.device, exact.dtype), exact)

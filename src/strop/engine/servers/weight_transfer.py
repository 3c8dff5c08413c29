"""Transfers weights to servers on this machine by files in shared memory, one copy of a publication for all servers.

The process that makes a directory holds a lock on it. The next publication removes directories without a lock, which killed
processes left. This also works in containers that share /dev/shm but not process ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import save_file
from torch import Tensor

from strop.engine.model_directory import ModelFacts
from strop.engine.protocol import NamedTensor
from strop.errors import MachineError, WeightsNotProven

_SHARED_MEMORY = Path("/dev/shm")
_NEW, _LOCKED = "strop-new-", "strop-publication-"
_FILE_BYTES = 512 << 20  # this process holds as much at the same time
_SPARE = 1.1


@asynccontextmanager
async def transferred(
    tensors: AsyncIterator[NamedTensor], model: ModelFacts, *, itemsize: int, version: int, checksum: str
) -> AsyncIterator[Path]:
    """A directory of safetensors files with all that `tensors` yields; gone when the last context of this `checksum` ends.

    A caller that enters while another holds the same publication gets the same copy; its `tensors` are not read.

    Raises:
        WeightsNotProven: a weight of `model` is missing, has another shape, or is none of its.
        MachineError: there is no room for the files.
    """
    copies = _copies_of_loop.setdefault(asyncio.get_running_loop(), _Copies())
    key = (checksum, model.directory)
    async with copies.writing:  # one at a time, so that each finds the room that the one before has left
        if key not in copies.held:
            copies.held[key] = await _write_copy(tensors, model, itemsize=itemsize, version=version)
        copy = copies.held[key]
        copy.num_users += 1
    try:
        yield copy.directory
    finally:
        copy.num_users -= 1
        if not copy.num_users:
            del copies.held[key]
            await asyncio.to_thread(copy.remove)


@dataclass(slots=True)
class _Copy:
    """One publication in files. `lock` is the open directory."""

    directory: Path
    lock: int
    num_users: int = 0

    @classmethod
    def make(cls, parent: Path) -> _Copy:
        """An empty one, which bears its final name only when it is locked."""
        directory = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(directory.rename(parent / directory.name.replace(_NEW, _LOCKED)), lock)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self.lock)


@dataclass(slots=True)
class _Copies:
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    held: dict[tuple[str, Path], _Copy] = field(default_factory=dict)


_copies_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Copies] = WeakKeyDictionary()


async def _write_copy(tensors: AsyncIterator[NamedTensor], model: ModelFacts, *, itemsize: int, version: int) -> _Copy:
    await asyncio.to_thread(_remove_what_killed_processes_left)
    copy = _Copy.make(_place(int(model.num_elements * itemsize * _SPARE)))
    try:
        names = await _write(tensors, copy.directory, model)
        missing = sorted(set(model.shapes) - model.optional - names)
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightsNotProven(f"publication of version {version} lacks {len(missing)} weights: {shown}.")
    except BaseException:
        await asyncio.to_thread(copy.remove)
        raise
    return copy


def _remove_what_killed_processes_left() -> None:
    for parent in (_SHARED_MEMORY, Path(tempfile.gettempdir())):
        for directory in parent.glob(f"{_LOCKED}*"):
            with contextlib.suppress(OSError):  # another user's, or just being removed
                lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError while its maker lives
                    shutil.rmtree(directory, ignore_errors=True)
                finally:
                    os.close(lock)


async def _write(tensors: AsyncIterator[NamedTensor], directory: Path, model: ModelFacts) -> set[str]:
    names: set[str] = set()
    batch: dict[str, Tensor] = {}
    num_files = 0
    async for name, tensor in tensors:
        _check(name, tensor, model)
        names.add(name)
        batch[name] = tensor.detach()
        if sum(each.nbytes for each in batch.values()) >= _FILE_BYTES:
            await asyncio.to_thread(_save, batch, directory / f"model-{num_files:05d}.safetensors")
            num_files, batch = num_files + 1, {}
    if batch:
        await asyncio.to_thread(_save, batch, directory / f"model-{num_files:05d}.safetensors")
    return names


def _check(name: str, tensor: Tensor, model: ModelFacts) -> None:
    expected = model.shapes.get(name)
    if expected is None and name not in model.optional:
        raise WeightsNotProven(f"weight {name!r} was sent, but the model in {model.directory} has no such weight.")
    if expected is not None and tuple(tensor.shape) != expected:
        raise WeightsNotProven(f"weight {name!r} was sent with shape {tuple(tensor.shape)}; it is {expected} here.")


def _save(batch: dict[str, Tensor], path: Path) -> None:
    seen: set[int] = set()
    separate = {}
    for name, tensor in batch.items():
        flat = tensor.cpu().contiguous()
        # The format refuses tensors that share memory, as views of one buffer do.
        address = flat.untyped_storage().data_ptr()
        separate[name] = flat.clone(memory_format=torch.contiguous_format) if address in seen else flat
        seen.add(address)
    try:
        save_file(separate, path)
    except Exception as error:  # a SafetensorError for what the file system says
        raise MachineError(f"{path}: the weights for the server cannot be written: {error}.") from error


def _place(num_bytes: int) -> Path:
    """Shared memory where there is room; else the temporary directory, which may be a disk."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= num_bytes:
        return _SHARED_MEMORY
    return Path(tempfile.gettempdir())

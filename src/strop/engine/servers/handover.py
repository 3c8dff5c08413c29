"""Weights on their way into a server on this machine: files in shared memory, written as they are streamed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from strop.engine.protocol import NamedTensor
from strop.engine.servers.facts import ModelFacts
from strop.errors import MachineError, WeightsNotProven

_SHARED_MEMORY = Path("/dev/shm")
_FILE_BYTES = 512 << 20  # as much is held in this process besides
_SPARE = 1.1


@asynccontextmanager
async def handed_over(
    tensors: AsyncIterator[NamedTensor], model: ModelFacts, *, itemsize: int, version: int
) -> AsyncIterator[Path]:
    """A directory of safetensors files with all that `tensors` yields; gone when the context ends.

    Raises:
        WeightsNotProven: a weight of `model` is missing, has another shape, or is none of its.
        MachineError: there is no room for the files.
    """
    directory = Path(tempfile.mkdtemp(prefix="strop-weights-", dir=_place(int(model.num_elements * itemsize * _SPARE))))
    try:
        names = await _write(tensors, directory, model)
        missing = sorted(set(model.shapes) - model.optional - names)
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightsNotProven(f"publication of version {version} lacks {len(missing)} weights: {shown}.")
        yield directory
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


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


def _place(num_bytes: int) -> Path | None:
    """Shared memory where there is room; else the temporary directory, which may be a disk."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= num_bytes:
        return _SHARED_MEMORY
    return None

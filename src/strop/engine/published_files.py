"""The files of a publication, in a directory that lasts as long as its process holds a lock.

A publication removes directories without a lock, which killed processes left. This also works in containers that share /dev/shm
but not process ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cluster.connection import copy_file, run_on
from strop.cluster.placement import Node
from strop.engine.model_directory import UNREADABLE, tensors_in
from strop.engine.protocol import NamedTensor, digests_of, in_parts
from strop.errors import ActorsLost, MachineError, WeightsNotProven

if TYPE_CHECKING:
    from torch import Tensor

_SHARED_MEMORY = Path("/dev/shm")
_NEW, _LOCKED = "strop-new-", "strop-publication-"
_FILE_BYTES = 128 << 20  # a rank of the trainer holds as much at the same time
_SPARE = 1.1
_DIGESTS = ".digests"  # JSON: of each tensor that one rank wrote
_ADAPTER = "adapter_config.json"  # as `peft` calls it


def write_files(tensors: Iterable[NamedTensor], directory: Path, *, part: str) -> list[bytes]:
    """Write `tensors` as safetensors files whose names begin with `part`. Return the digest of each tensor.

    Raises:
        MachineError: the disk or the shared memory is full.
    """

    def written() -> Iterator[NamedTensor]:
        for number, of_file in enumerate(in_parts(tensors, _FILE_BYTES)):
            yield from of_file
            _save(dict(of_file), directory / f"{part}-{number:05d}.safetensors")
            of_file.clear()  # before the next ones are there

    return _noting_digests(written(), directory / f"{part}{_DIGESTS}")


def write_adapter(adapter: Mapping[str, Tensor], description: Mapping[str, Any], directory: Path) -> list[bytes]:
    """Write a LoRA adapter in the format of `peft`. Return the digest of each tensor. Raises as `write_files`."""
    _save(adapter, directory / "adapter_model.safetensors")
    path = directory / _ADAPTER
    with _naming_failures(path):
        path.write_text(json.dumps(description))
    return _noting_digests(adapter.items(), directory / f"adapter{_DIGESTS}")


def is_adapter(directory: Path) -> bool:
    """Whether the published files in `directory` are a LoRA adapter's."""
    return (directory / _ADAPTER).exists()


def _noting_digests(tensors: Iterable[NamedTensor], path: Path) -> list[bytes]:
    digests = dict(digests_of(tensors))
    with _naming_failures(path):
        path.write_text(json.dumps({name: digest.hex() for name, digest in digests.items()}))
    return list(digests.values())


@contextlib.asynccontextmanager
async def naming_damage(directory: Path) -> AsyncIterator[None]:
    """Say in a `WeightsNotProven` which tensors in `directory` are not as they were written."""
    try:
        yield
    except WeightsNotProven as error:
        names = await asyncio.to_thread(_damaged, directory)
        if names and names[0] not in str(error):  # another process may have named them
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise WeightsNotProven(f"{error} The files were damaged after they were written: {shown}.") from error
        raise


def _damaged(directory: Path) -> list[str]:
    written: dict[str, str] = {}
    held: list[tuple[str, bytes]] = []
    with contextlib.suppress(*UNREADABLE):
        for path in directory.glob(f"*{_DIGESTS}"):
            written |= json.loads(path.read_text())
        held = list(digests_of(tensors_in(directory.glob("*.safetensors"))))
    return sorted(name for name, digest in held if written.get(name, digest.hex()) != digest.hex())


def _save(batch: Mapping[str, Tensor], path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    seen: set[int] = set()
    separate = {}
    for name, tensor in batch.items():
        flat = tensor.detach().cpu().contiguous()
        # The format refuses tensors that share memory, as views of one buffer do.
        address = flat.untyped_storage().data_ptr()
        separate[name] = flat.clone(memory_format=torch.contiguous_format) if address in seen else flat
        seen.add(address)
    with _naming_failures(path):
        save_file(separate, path)


@contextlib.contextmanager
def _naming_failures(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a SafetensorError for what the file system says
        what = str(error).rstrip(".")
        raise MachineError(
            f"{path}: the weights for engines cannot be written: {what}. Free space in {path.parent.parent}."
        ) from error


@dataclass(frozen=True, slots=True)
class PublishedFiles:
    """A directory of one machine, and its descriptor in the process that made it, which holds the lock."""

    directory: Path
    lock: int
    pid: int


def make_directory(num_bytes: int) -> PublishedFiles:
    """Make an empty directory. What killed processes left is removed.

    It is in shared memory if there is room for so much, else in the temporary directory, which may be a disk.
    """
    _remove_what_killed_processes_left()
    has_room = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= _SPARE * num_bytes
    parent = _SHARED_MEMORY if has_room else Path(tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Its name only now that it is locked.
    return PublishedFiles(directory.rename(parent / directory.name.replace(_NEW, _LOCKED)), lock, os.getpid())


def remove_directory(files: PublishedFiles) -> None:
    """Remove the directory, in the process that made it or one that has taken its place."""
    shutil.rmtree(files.directory, ignore_errors=True)
    if os.getpid() == files.pid:
        os.close(files.lock)


def collect(written: Mapping[Node | None, PublishedFiles], node: Node | None, num_bytes: int) -> PublishedFiles:
    """Return a directory on `node` with what was written on all nodes. Files go from node to node.

    Raises:
        MachineError: a disk or shared memory is full.
        ActorsLost: a node does not answer, or a file is not there in time.
    """
    if list(written) == [node]:
        return written[node]
    whole = run_on(node, make_directory, num_bytes)
    try:
        for source, files in written.items():
            if source == node:
                run_on(node, _link, files.directory, whole.directory)
            else:
                for name in run_on(source, os.listdir, files.directory):
                    copy_file(source, files.directory / name, node, whole.directory / name)
    except BaseException:
        with contextlib.suppress(ActorsLost):
            run_on(node, remove_directory, whole)
        raise
    return whole


def _link(files: Path, directory: Path) -> None:
    for path in files.iterdir():
        (directory / path.name).symlink_to(path)


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

"""One version of a policy's weights: in the trainer's memory, or in files that engines of other processes read.

The files are in shared memory. They are written when the first engine asks for them, once for all engines of this machine, and
removed when the publication is closed. The process that makes their directory holds a lock on it. The next publication removes
directories without a lock, which killed processes left. This also works in containers that share /dev/shm but not process ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from strop.engine.protocol import NamedTensor
from strop.errors import MachineError, ModelError

if TYPE_CHECKING:
    from torch import Tensor

_SHARED_MEMORY = Path("/dev/shm")
_NEW, _LOCKED = "strop-new-", "strop-publication-"
_FILE_BYTES = 128 << 20  # a rank of the trainer holds as much at the same time
_SPARE = 1.1
_NUM_THREADS = min(4, os.cpu_count() or 1)  # of hashing


class WeightSource(Protocol):
    """A trainer, as a publication sees it: weights in the dtype of the engines. They do not change while it is used."""

    @property
    def num_bytes(self) -> int: ...

    def tensors(self) -> AsyncIterator[NamedTensor]:
        """Yield each weight once, in the memory of this process."""

    async def checksum(self) -> str:
        """Return `weights_checksum` of the weights."""

    async def write(self, directory: Path) -> str:
        """Write the weights into the empty `directory` as safetensors files. Return their checksum."""


class Publication:
    """The weights of one version, for every engine that asks for them. Close it when no engine reads it any more."""

    def __init__(self, source: WeightSource | None, *, version: int) -> None:
        self.version = version
        self.error: Exception | None = None  # of the trainer, not of an engine
        self._source = source
        self._checksum = ""
        self._writing = asyncio.Lock()
        self._directory: Path | None = None
        self._lock = -1  # descriptor of the directory, if it is ours

    @classmethod
    def in_files(cls, directory: Path, *, version: int, checksum: str) -> Self:
        """Return a publication whose files another process wrote and removes."""
        publication = cls(None, version=version)
        publication._directory, publication._checksum = directory, checksum
        return publication

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def tensors(self) -> AsyncIterator[NamedTensor]:
        """Yield each weight once: from the files if there are any, else from the trainer's memory. Do not write into them."""
        with self._noting_errors():
            if self._directory is None:
                assert self._source is not None
                async for named in self._source.tensors():
                    yield named
                return
        for named in read_tensors(sorted(self._directory.glob("*.safetensors"))):
            yield named

    async def checksum(self) -> str:
        """Return `weights_checksum` of the weights."""
        with self._noting_errors():
            if not self._checksum:
                assert self._source is not None
                self._checksum = await self._source.checksum()
        return self._checksum

    async def files(self) -> Path:
        """Return a directory with the weights in safetensors files, which exist until `close`.

        Raises:
            MachineError: there is no room for them.
        """
        async with self._writing:
            if self._directory is None:
                assert self._source is not None
                with self._noting_errors():
                    await asyncio.to_thread(_remove_what_killed_processes_left)
                    directory, lock = _make_locked(_place(int(self._source.num_bytes * _SPARE)))
                    try:
                        self._checksum = await self._source.write(directory)
                    except BaseException:
                        _remove(directory, lock)
                        raise
                    self._directory, self._lock = directory, lock
            return self._directory

    async def close(self) -> None:
        """Remove the files. Safe to call twice."""
        if self._directory is not None and self._lock >= 0:
            directory, self._directory = self._directory, None
            await asyncio.to_thread(_remove, directory, self._lock)

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error
            raise


def weights_checksum(tensors: Iterable[NamedTensor]) -> str:
    """Return a digest of names, shapes, dtypes and bytes. The order of `tensors` does not matter."""
    return checksum_of(digests_of(tensors))


def checksum_of(digests: Iterable[bytes]) -> str:
    """Return `weights_checksum` of the tensors that have these digests, in any order."""
    total = hashlib.blake2b(digest_size=16)
    for each in sorted(digests):
        total.update(each)
    return total.hexdigest()


def digests_of(tensors: Iterable[NamedTensor]) -> Iterator[bytes]:
    """Yield the digest of each tensor, a few computed at once. Few tensors are held at the same time."""
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        pending: deque[Future[bytes]] = deque()
        for name, tensor in tensors:
            pending.append(threads.submit(_digest, name, tensor))
            if len(pending) > _NUM_THREADS:
                yield pending.popleft().result()
        for each in pending:
            yield each.result()


def _digest(name: str, tensor: Tensor) -> bytes:
    import torch

    flat = tensor.detach().contiguous().cpu()
    digest = hashlib.blake2b(f"{name} {tuple(flat.shape)} {flat.dtype}".encode(), digest_size=16)
    digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def write_files(tensors: Iterable[NamedTensor], directory: Path, *, part: str) -> list[bytes]:
    """Write `tensors` as safetensors files whose names begin with `part`. Return the digest of each tensor.

    Raises:
        MachineError: the disk or the shared memory is full.
    """

    def written() -> Iterator[NamedTensor]:
        batch: dict[str, Tensor] = {}
        num_files = 0
        for name, tensor in tensors:
            batch[name] = tensor.detach()
            yield name, tensor
            if sum(each.nbytes for each in batch.values()) >= _FILE_BYTES:
                _save(batch, directory / f"{part}-{num_files:05d}.safetensors")
                num_files, batch = num_files + 1, {}
        if batch:
            _save(batch, directory / f"{part}-{num_files:05d}.safetensors")

    return list(digests_of(written()))


def read_tensors(files: Iterable[Path]) -> Iterator[NamedTensor]:
    """Yield the tensors of safetensors files, a file at a time. Raises `ModelError` if one is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, FileNotFoundError) as error:
            raise ModelError(f"{path}: missing or damaged: {error}. Save or download the model again.") from error
        with file:
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)  # type: ignore[no-untyped-call]


def _save(batch: dict[str, Tensor], path: Path) -> None:
    import torch
    from safetensors.torch import save_file

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
        raise MachineError(f"{path}: the weights for engines cannot be written: {error}.") from error


def _place(num_bytes: int) -> Path:
    """Shared memory where there is room; else the temporary directory, which may be a disk."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= num_bytes:
        return _SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _make_locked(parent: Path) -> tuple[Path, int]:
    """Return an empty directory, which has its final name only when it is locked, and its descriptor."""
    directory = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory.rename(parent / directory.name.replace(_NEW, _LOCKED)), lock


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


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

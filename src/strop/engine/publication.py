"""One version of a policy's weights: in the trainer's memory, or in files that engines of other processes read.

The files are in shared memory. They are written when the first engine asks for them, once for all engines of this machine, and
removed when the publication is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol, Self

from strop.engine import published_files
from strop.engine.model_directory import UNREADABLE, tensors_in
from strop.engine.protocol import NamedTensor
from strop.errors import WeightsNotProven


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
        self._hashing = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
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
        """Yield each weight once: from the files if there are any, else from the trainer's memory. Do not write into them.

        Raises:
            WeightsNotProven: a file is missing or damaged.
        """
        if self._directory is None:
            assert self._source is not None
            with self._noting_errors():
                async for named in self._source.tensors():
                    yield named
            return
        try:
            for named in tensors_in(sorted(self._directory.glob("*.safetensors"))):
                yield named
        except UNREADABLE as error:
            raise WeightsNotProven(f"the files of version {self.version} cannot be read: {error}") from error

    async def checksum(self) -> str:
        """Return `weights_checksum` of the weights."""
        async with self._hashing:
            if not self._checksum:
                assert self._source is not None
                with self._noting_errors():
                    self._checksum = await self._source.checksum()
        return self._checksum

    async def files(self) -> Path:
        """Return a directory with the weights in safetensors files, which exist until `close`.

        Raises:
            MachineError: there is no room for them.
        """
        if self._directory is None:
            if self._writing is None:
                self._writing = asyncio.create_task(self._write())
            writing = self._writing
            with self._noting_errors():
                try:
                    await asyncio.shield(writing)  # for all who ask, though one of them goes away
                finally:
                    if writing.done() and self._writing is writing:
                        self._writing = None
        assert self._directory is not None
        return self._directory

    async def close(self) -> None:
        """Remove the files. Safe to call twice."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._directory is not None and self._lock >= 0:
            directory, self._directory = self._directory, None
            await asyncio.to_thread(published_files.remove_directory, directory, self._lock)

    async def _write(self) -> None:
        assert self._source is not None
        directory, lock = await asyncio.to_thread(published_files.make_directory, self._source.num_bytes)
        try:
            self._checksum = await self._source.write(directory)
        except BaseException:
            published_files.remove_directory(directory, lock)
            raise
        self._directory, self._lock = directory, lock

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error
            raise

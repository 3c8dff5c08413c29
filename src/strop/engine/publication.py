"""One version of a policy's weights: in the trainer's memory, or in files that engines of other processes read.

The files are in shared memory. They are written when the first engine asks for them, by each rank of the trainer on its own
node, copied once to each other node that has an engine, and removed when the publication is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

from strop.cluster.connection import run_on
from strop.cluster.placement import Node
from strop.engine import published_files
from strop.engine.model_directory import UNREADABLE, tensors_in
from strop.engine.protocol import NamedTensor
from strop.engine.published_files import PublishedFiles
from strop.errors import ActorsLost, WeightsNotProven


class WeightSource(Protocol):
    """A trainer, as a publication sees it: weights in the dtype of the engines. They do not change while it is used."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def nodes(self) -> Sequence[Node | None]:
        """Return the node of each rank; None is this machine."""

    def tensors(self) -> AsyncIterator[NamedTensor]:
        """Yield each weight once, in the memory of this process."""

    async def checksum(self) -> str:
        """Return `weights_checksum` of the weights."""

    async def write(self, directories: Sequence[Path]) -> str:
        """Write the weights as safetensors files into the directory of each rank. Return their checksum."""


class Publication:
    """The weights of one version, for every engine that asks for them. Close it when no engine reads it any more.

    Args:
        keeps_requests: whether requests go on with the new weights. Otherwise an engine that has any refuses the weights.
    """

    def __init__(self, source: WeightSource | None, *, version: int, keeps_requests: bool = False) -> None:
        self.version, self.keeps_requests = version, keeps_requests
        self.error: Exception | None = None  # of the trainer, not of an engine
        self._source = source
        self._checksum = ""
        self._hashing = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._directory: Path | None = None  # of another process's publication
        self._written: dict[Node | None, PublishedFiles] = {}
        self._whole: dict[Node | None, PublishedFiles] = {}  # those with all files
        self._copying: dict[Node | None, asyncio.Lock] = {}

    @classmethod
    def in_files(cls, directory: Path, *, version: int, checksum: str, keeps_requests: bool = False) -> Self:
        """Return a publication whose files another process wrote and removes."""
        publication = cls(None, version=version, keeps_requests=keeps_requests)
        publication._directory, publication._checksum = directory, checksum
        return publication

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def tensors(self) -> AsyncIterator[NamedTensor]:
        """Yield each weight once: from files of this machine if there are any, else from the trainer's memory. Do not write
        into them.

        Raises:
            WeightsNotProven: a file is missing or damaged.
        """
        if self._directory is None and not self._written:
            assert self._source is not None
            with self._noting_errors():
                async for named in self._source.tensors():
                    yield named
            return
        directory = await self.files()
        try:
            for named in tensors_in(sorted(directory.glob("*.safetensors"))):
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

    async def write(self) -> None:
        """Write the files, each rank on its node. The trainer may then compute again.

        Raises:
            MachineError: there is no room for them.
        """
        if self._directory is None and not self._written:
            if self._writing is None:
                self._writing = asyncio.create_task(self._write())
            writing = self._writing
            with self._noting_errors():
                try:
                    await asyncio.shield(writing)  # for all who ask, though one of them goes away
                finally:
                    if writing.done() and self._writing is writing:
                        self._writing = None

    async def files(self, node: Node | None = None) -> Path:
        """Return a directory on `node`, by default this machine, with the weights in safetensors files, until `close`.

        Raises:
            MachineError: there is no room for them.
            ActorsLost: a node does not answer, or a file is not there in time.
        """
        if self._directory is not None:
            return self._directory
        await self.write()
        async with self._copying.setdefault(node, asyncio.Lock()):
            if node not in self._whole:
                assert self._source is not None
                self._whole[node] = await asyncio.to_thread(
                    published_files.collect, self._written, node, self._source.num_bytes
                )
        return self._whole[node].directory

    async def close(self) -> None:
        """Remove the files. Safe to call twice."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        found = {(node, files) for part in (self._written, self._whole) for node, files in part.items()}
        self._written, self._whole = {}, {}
        await _remove(found)

    async def _write(self) -> None:
        assert self._source is not None
        ranks = self._source.nodes
        made: dict[Node | None, PublishedFiles] = {}
        try:
            for node in dict.fromkeys(ranks):
                num_bytes = self._source.num_bytes * ranks.count(node) // len(ranks)
                made[node] = await asyncio.to_thread(run_on, node, published_files.make_directory, num_bytes)
            self._checksum = await self._source.write([made[node].directory for node in ranks])
        except BaseException:
            await _remove(made.items())
            raise
        self._written = made

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error
            raise


async def _remove(found: Iterable[tuple[Node | None, PublishedFiles]]) -> None:
    for node, files in found:
        with contextlib.suppress(ActorsLost):  # a lost node's files are gone, or removed by the next publication there
            await asyncio.to_thread(run_on, node, published_files.remove_directory, files)

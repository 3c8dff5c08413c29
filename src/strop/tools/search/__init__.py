"""The protocol of search backends, and the file of saved results: a backend itself, and the cache of services and pages.

A file of saved results (query -> the text that the policy reads) is a backend of its own, and the cache of services. It has two
forms, by its name:

    .jsonl   one {"query": ..., "results": ..., "service": ..., "top_k": ...} a line; `service` and `top_k` may be missing. Many
             processes may add to one file, and it stays readable if one of them is killed.
    .json    ARPO's (arXiv 2507.19849): one object. It is only read.
"""

from __future__ import annotations

import asyncio
import fcntl
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from strop.config import Config
from strop.errors import StropError, UserError
from strop.run_directory import LineWriter, is_whole_line, parse_json, raw_lines
from strop.tools.protocol import encodable

_PREFIX = re.compile(r"^(search )?query:\s*")


class QueryRefused(StropError):  # noqa: N818 - named for what happened
    """The backend does not answer this query: a mistake of the policy, which gets the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A piece of text in a corpus or an answer."""

    id: str
    title: str  # empty if it has none
    text: str


class Backend(Protocol):
    """A source of results, shared by all rollouts."""

    @property
    def longest_call_s(self) -> float:
        """See `Tool.longest_call_s`."""
        return 0.0

    async def results(self, query: str, *, top_k: int) -> str:
        """The text for the policy, best result first; empty if nothing was found.

        Raises:
            QueryRefused: the query itself cannot be answered.
            MachineError: the backend failed, after its retries.
        """


def as_pages(passages: Sequence[Passage]) -> str:
    """One line a passage, as in ARPO's search results: `Page 1: ...`."""
    lines = []
    for number, passage in enumerate(passages, start=1):
        text = f"{passage.title}: {passage.text}" if passage.title else passage.text
        lines.append(f"Page {number}: {' '.join(text.split())}")
    return "\n".join(lines)


class KeptConfig(Config):
    """Results from a file, for example ARPO's search cache or the `cache` of a service."""

    kind: Literal["kept"] = Field(description="Backend kind.")
    path: str = Field(description="The file, a .json or .jsonl. A query may differ in case, spaces and punctuation.")


class KeptResults(Backend):
    """Raises `UserError` if the file is missing or has another form."""

    def __init__(self, config: KeptConfig) -> None:
        if not Path(config.path).is_file():
            raise UserError(f"{config.path}: no such file of search results. Set path to a file, or use another backend.")
        results = read_results(Path(config.path))
        # The first of each form: a query that differs only in case, spaces and punctuation gets its results.
        self._results = {_similar_form(query): results[query] for query in reversed(results)} | results

    async def results(self, query: str, *, top_k: int) -> str:
        """The text of the file; `top_k` does not change it."""
        return self._results.get(query) or self._results.get(_similar_form(query), "")


class Origin(NamedTuple):
    """The service that gave the results, and how many were asked for."""

    service: str
    top_k: int


class ResultFile:
    """The results in `path`, a .jsonl that need not exist yet. Entries that other processes add later are not seen.

    Raises:
        UserError: the file has another form.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix != ".jsonl":
            raise UserError(f"cache is {path}: a file that results are added to is a .jsonl. Change its name.")
        self.path = path
        self._results = {(query, origin): text for query, text, origin in _lines(path)}

    def get(self, query: str, origin: Origin) -> str | None:
        """The results with this origin, or with none."""
        known = self._results.get((query, origin))
        return self._results.get((query, None)) if known is None else known

    async def add(self, query: str, text: str, origin: Origin) -> None:
        """Add the results of a query; they are on disk when this returns."""
        query, text = encodable(query), encodable(text)
        self._results[query, origin] = text
        await asyncio.to_thread(self._write, {"query": query, "results": text, **origin._asdict()})

    def _write(self, row: dict[str, str | int]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(f".{self.path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with closing(LineWriter(self.path)) as writer:  # removes the cut line of a process that was killed
                writer.append(row)
                writer.sync()


def read_results(path: Path) -> dict[str, str]:
    """Query -> text, the last of each. Without the last line of a .jsonl if it is cut.

    Raises:
        UserError: the file has another form.
    """
    if path.suffix == ".jsonl":
        return {query: text for query, text, _ in _lines(path)}
    try:
        results = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as search results: {error}.") from error
    if not isinstance(results, dict) or not all(isinstance(each, str) for each in results.values()):
        raise UserError(f"{path}: search results are one JSON object, from each query to the text that was found.")
    return {encodable(query): encodable(each) for query, each in results.items()}


class _Line(BaseModel):
    model_config = ConfigDict(strict=True)
    query: str
    results: str
    service: str | None = None
    top_k: int | None = None


def _lines(path: Path) -> Iterator[tuple[str, str, Origin | None]]:
    for number, line in enumerate((line.removeprefix(BOM_UTF8) for line in raw_lines(path)), start=1):
        if line.isspace() or not (line.endswith(b"\n") or is_whole_line(line)):
            continue  # blank, or the process that wrote it was killed
        try:
            row = _Line.model_validate(parse_json(line))
        except ValueError as error:
            raise UserError(f'{path}:{number}: not {{"query": ..., "results": ...}}: {error}.') from error
        origin = None if row.service is None or row.top_k is None else Origin(row.service, row.top_k)
        yield encodable(row.query), encodable(row.results), origin


def _similar_form(query: str) -> str:
    """The words of a query, without case, punctuation and the prefix of ARPO's keys."""
    return " ".join(re.findall(r"\w+", _PREFIX.sub("", query.casefold().strip())))

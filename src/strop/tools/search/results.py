"""A file of search results that were kept: query -> the text that the policy reads.

Two forms, by the file's name:

    .json    ARPO's (arXiv 2507.19849): one object. An addition writes the whole file anew and puts it in place.
    .jsonl   one {"query": ..., "results": ..., "service": ..., "top_k": ...} a line. An addition is one line at the end, which
             costs the same however long the file is. The last two may be missing: then nobody knows who was asked.

Either way many processes may add to one file, and whoever is killed meanwhile leaves it readable.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strop.errors import UserError
from strop.runs import LineWriter, write_text
from strop.tools.text import encodable

_PREFIX = re.compile(r"^(search )?query:\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who was asked, and for how much."""

    service: str
    top_k: int


class ResultFile:
    """The results in `path`, which need not exist yet. Entries that others add after it was read are not seen.

    Raises:
        UserError: the file is not of its form.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in (".json", ".jsonl"):
            raise UserError(
                f"{path}: results are kept in a file that ends in .json (ARPO's form) or .jsonl (better to add to)."
            )
        self.path = path
        self._results: dict[str, str] = {}  # the last of each query
        self._by_origin: dict[tuple[str, Origin | None], str] = {}
        for query, text, origin in _entries(path) if path.exists() else ():
            self._results[query] = self._by_origin[query, origin] = text
        self._similar = {similar_form(query): query for query in reversed(self._results)}  # the first of each form
        self._writing = threading.Lock()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, query: str) -> str | None:
        """The results of exactly this query, whoever was asked."""
        return self._results.get(query)

    def get_from(self, query: str, origin: Origin) -> str | None:
        """Those that came from there, or nobody knows where from."""
        known = self._by_origin.get((query, origin))
        return self._by_origin.get((query, None)) if known is None else known

    def get_similar(self, query: str) -> str | None:
        """The results of this query, or of the first that differs from it in case, space and punctuation alone."""
        exact = self._results.get(query)
        if exact is not None:
            return exact
        kept = self._similar.get(similar_form(query))
        return None if kept is None else self._results[kept]

    async def add(self, query: str, text: str, origin: Origin | None = None) -> None:
        """Keep the results of a query; they are on disk when this returns. ARPO's form has no place for `origin`."""
        query, text = encodable(query), encodable(text)
        if self.path.suffix == ".json":
            origin = None
        self._results[query] = self._by_origin[query, origin] = text
        self._similar.setdefault(similar_form(query), query)
        await asyncio.to_thread(self._write, query, text, origin)

    def _write(self, query: str, text: str, origin: Origin | None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._writing, _locked(self.path):
            if self.path.suffix == ".json":
                results = read_results(self.path) if self.path.exists() else {}
                write_text(self.path, json.dumps(results | {query: text}, ensure_ascii=False, indent=2))
            else:
                with closing(LineWriter(self.path)) as writer:  # takes a line off whose writer was killed
                    writer.append({"query": query, "results": text, **({} if origin is None else asdict(origin))})
                    writer.sync()


def similar_form(query: str) -> str:
    """What queries that ask for the same have in common: words, without case, punctuation and the prefix of ARPO's keys."""
    return " ".join(re.findall(r"\w+", _PREFIX.sub("", query.casefold().strip())))


def read_results(path: Path) -> dict[str, str]:
    """Query -> text, the last of each. Of a .jsonl, a last line that was cut off is left out.

    Raises:
        UserError: the file is not of its form.
    """
    return {query: text for query, text, _ in _entries(path)}


def _entries(path: Path) -> list[tuple[str, str, Origin | None]]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return list(_lines(text, path))
        results = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read as search results: {error}.") from error
    if not isinstance(results, dict) or not all(isinstance(each, str) for each in results.values()):
        raise UserError(f"{path}: search results are one JSON object, from each query to the text that was found.")
    return [(encodable(query), encodable(each), None) for query, each in results.items()]


def _lines(text: str, path: Path) -> Iterator[tuple[str, str, Origin | None]]:
    origins: dict[Origin, Origin] = {}  # few, of many lines: each is there once
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            query, results = row["query"], row["results"]
            if not isinstance(query, str) or not isinstance(results, str):
                raise TypeError("query and results must be text")
            origin = _origin(row)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError):
                return  # its writer was killed
            raise UserError(f'{path}, line {number}: not {{"query": ..., "results": ...}}: {error}.') from error
        yield encodable(query), encodable(results), None if origin is None else origins.setdefault(origin, origin)


def _origin(row: dict[str, Any]) -> Origin | None:
    if "service" not in row and "top_k" not in row:
        return None
    service, top_k = row["service"], row["top_k"]
    if not isinstance(service, str) or not isinstance(top_k, int):
        raise TypeError("service must be text, and top_k an integer")
    return Origin(service=service, top_k=top_k)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time, over all processes of this machine."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

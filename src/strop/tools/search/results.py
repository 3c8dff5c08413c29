"""A file of search results that were kept: query -> the text that the policy reads.

Two forms, by the file's name:

    .json    ARPO's (arXiv 2507.19849): one object. An addition writes the whole file anew and puts it in place.
    .jsonl   one {"query": ..., "results": ...} a line. An addition is one line at the end, which costs the same however long
             the file is.

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
from pathlib import Path

from strop.errors import UserError
from strop.runs import LineWriter, write_text
from strop.tools.text import encodable

_PREFIX = re.compile(r"^(search )?query:\s*")


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
        self._results = read_results(path) if path.exists() else {}
        self._similar = {similar_form(query): query for query in reversed(self._results)}  # the first of each form
        self._writing = threading.Lock()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, query: str) -> str | None:
        """The results of exactly this query."""
        return self._results.get(query)

    def get_similar(self, query: str) -> str | None:
        """The results of this query, or of the first that differs from it in case, space and punctuation alone."""
        exact = self._results.get(query)
        if exact is not None:
            return exact
        kept = self._similar.get(similar_form(query))
        return None if kept is None else self._results[kept]

    async def add(self, query: str, text: str) -> None:
        """Keep the results of a query; they are on disk when this returns."""
        query, text = encodable(query), encodable(text)
        self._results[query] = text
        self._similar.setdefault(similar_form(query), query)
        await asyncio.to_thread(self._write, query, text)

    def _write(self, query: str, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._writing, _locked(self.path):
            if self.path.suffix == ".json":
                results = read_results(self.path) if self.path.exists() else {}
                write_text(self.path, json.dumps(results | {query: text}, ensure_ascii=False, indent=2))
            else:
                with closing(LineWriter(self.path)) as writer:  # takes a line off whose writer was killed
                    writer.append({"query": query, "results": text})
                    writer.sync()


def similar_form(query: str) -> str:
    """What queries that ask for the same have in common: words, without case, punctuation and the prefix of ARPO's keys."""
    return " ".join(re.findall(r"\w+", _PREFIX.sub("", query.casefold().strip())))


def read_results(path: Path) -> dict[str, str]:
    """Query -> text. Of a .jsonl, a last line that was cut off is left out.

    Raises:
        UserError: the file is not of its form.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return dict(_lines(text, path))
        results = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read as search results: {error}.") from error
    if not isinstance(results, dict) or not all(isinstance(each, str) for each in results.values()):
        raise UserError(f"{path}: search results are one JSON object, from each query to the text that was found.")
    return {encodable(query): encodable(each) for query, each in results.items()}


def _lines(text: str, path: Path) -> Iterator[tuple[str, str]]:
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            query, results = row["query"], row["results"]
            if not isinstance(query, str) or not isinstance(results, str):
                raise TypeError("query and results must be text")
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError):
                return  # its writer was killed
            raise UserError(f'{path}, line {number}: not {{"query": ..., "results": ...}}: {error}.') from error
        yield encodable(query), encodable(results)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time, over all processes of this machine."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

"""BM25 over your own passages: the index is built once and cached on disk.

The ranking is Lucene's form of BM25, by the library bm25s (arXiv 2407.03618), which scores a query against a sparse matrix in
memory: some 10 ms over 100 000 passages. Words are stemmed by Snowball. Passages stay in memory too, so a corpus of tens of
millions belongs behind a retriever server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from strop.config import Config
from strop.errors import UserError
from strop.run_directory import parse_json
from strop.tools.search import Backend, Passage, as_pages, read_results

logger = logging.getLogger(__name__)

_WORD = re.compile(r"\w+")
_K1, _B = 0.9, 0.4  # those of Anserini for passages
_VERSION = 1  # of the index format; part of the index's name
_TEXT_KEYS = ("text", "contents", "body", "passage")
_WORDS = 100  # of a passage that is cut from a longer text, as usual in passage retrieval
_PAGE = re.compile(r"^Page \d+: ", re.MULTILINE)


class Bm25Config(Config):
    """An index of passages of your own; needs `strop[search]`."""

    kind: Literal["bm25"] = Field(description="Backend kind.")
    path: str = Field(description="A .jsonl, a directory of texts, or a .json of search results.")
    index: str | None = Field(default=None, description="Directory of the built index; by default the user's cache directory.")
    language: str = Field(default="english", description='Stemmer, by its Snowball name; "none" does not stem.')


class Bm25Index(Backend):
    """An index of passages. Equal scores keep the order of the corpus.

    Raises:
        UserError: a library is missing, the corpus cannot be read, or the language is unknown.
    """

    def __init__(self, config: Bm25Config) -> None:
        self._stem = _stemmer(config.language)
        self.passages: Sequence[Passage] = read_corpus(Path(config.path))
        place = _place(config, self.passages)
        if not place.exists():
            self._build(config, place)
        self._index: Any = _bm25s().BM25.load(str(place), show_progress=False)
        self._scoring = threading.Lock()  # the library is not documented as thread-safe

    async def results(self, query: str, *, top_k: int) -> str:
        return as_pages(await asyncio.to_thread(self.search, query, top_k))

    def search(self, query: str, top_k: int) -> list[Passage]:
        """The best passages for `query` that share a word with it, best first."""
        import numpy as np  # not at the top: `strop --help` starts without numpy

        words = [word for word in self._words(query) if word in self._index.vocab_dict]
        if not words:
            return []
        with self._scoring:
            scores = self._index.get_scores(words)
        order = np.argsort(-scores, kind="stable")[:top_k]
        return [self.passages[place] for place in order if scores[place] > 0]

    def _words(self, text: str) -> list[str]:
        stemmed: list[str] = self._stem(_WORD.findall(text.casefold()))
        return stemmed

    def _build(self, config: Bm25Config, place: Path) -> None:
        logger.info("building the search index of %d passages of %s", len(self.passages), config.path)
        index = _bm25s().BM25(method="lucene", k1=_K1, b=_B)
        index.index([self._words(f"{each.title} {each.text}") for each in self.passages], show_progress=False)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
            try:
                index.save(str(made), show_progress=False)
                os.rename(made, place)
            except OSError:
                if not place.exists():  # otherwise another process has built the same index
                    raise
            finally:
                shutil.rmtree(made, ignore_errors=True)
        except OSError as error:
            raise UserError(
                f"the search index cannot be written to {place}: {error}. Set `index` to a writable directory."
            ) from error


def _place(config: Bm25Config, passages: Sequence[Passage]) -> Path:
    """The path of the index of these passages with these settings."""
    digest = hashlib.blake2b(json.dumps([_VERSION, config.language, _K1, _B]).encode(), digest_size=12)
    for passage in passages:
        digest.update(f"{len(passage.title)} {passage.title} {len(passage.text)} {passage.text}\0".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strop" / "search"
    return Path(config.index or cache) / f"bm25-{digest.hexdigest()}"


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise UserError("BM25 needs the library bm25s: pip install 'strop[search]'.") from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # the library sets itself to DEBUG
    return bm25s


def _stemmer(language: str) -> Any:
    if language == "none":
        return list
    try:
        import Stemmer
    except ImportError as error:
        raise UserError("BM25 needs the library PyStemmer: pip install 'strop[search]', or set language = 'none'.") from error
    try:
        stemmer = Stemmer.Stemmer(language)
    except KeyError as error:
        known = ", ".join(Stemmer.algorithms())
        raise UserError(f"language is {language!r}, which Snowball does not have. Use 'none' or one of {known}.") from error
    return stemmer.stemWords


def read_corpus(path: Path) -> list[Passage]:
    """Every passage of `path`, in a fixed order. Passages without an id get one.

    corpus.jsonl   one object a line: `text` (or `contents`, `body`, `passage`), `title` and `id` are optional
    directory/     every .jsonl as above; every .txt and .md is cut into passages of about 100 words, titled by its name
    results.json   ARPO's search cache: query -> "Page 1: ...", each page one passage

    Raises:
        UserError: it is missing, empty, or a line of it holds no text; the message names file and line.
    """
    is_directory = os.path.isdir(path)  # which is false for a name that is too long, where `path.is_dir` raises
    inside = sorted(path.rglob("*")) if is_directory else []
    files = [each for each in inside if each.suffix in (".jsonl", ".txt", ".md") and each.is_file()]
    named = {each.relative_to(path).as_posix(): each for each in files} or ({path.name: path} if os.path.isfile(path) else {})
    passages = [passage for name, file in named.items() for passage in _read_file(file, name)]
    if not passages:
        problem = "no passage in it" if is_directory or named else "no such corpus"
        raise UserError(f"{path}: {problem}. Give a .jsonl file with a `text` on each line, or a directory of texts.")
    return passages


def _read_file(path: Path, name: str) -> Iterator[Passage]:
    try:
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _passage(line, place=f"{path}, line {number}", default_id=f"{name}#{number}")
        elif path.suffix == ".json":
            yield from _pages(path)
        else:
            words = path.read_text(encoding="utf-8").split()
            for start in range(0, len(words), _WORDS):
                text = " ".join(words[start : start + _WORDS])
                yield Passage(id=f"{name}#{start // _WORDS + 1}", title=path.stem, text=text)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}.") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error


def _passage(line: bytes, *, place: str, default_id: str) -> Passage:
    try:
        row = parse_json(line.removeprefix(BOM_UTF8))
    except ValueError as error:
        raise UserError(f"{place}: {error}.") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: {type(row).__name__} instead of an object with a `text`.")
    text = next((row[key] for key in _TEXT_KEYS if isinstance(row.get(key), str)), None)
    if text is None:
        raise UserError(f"{place}: none of {', '.join(_TEXT_KEYS)} holds text; its keys are {', '.join(row) or 'none'}.")
    title: Any = row.get("title")
    if not isinstance(title, str):
        title = ""
        first, newline, rest = text.partition("\n")
        if "contents" in row and newline:  # the convention of Pyserini and Search-R1: the title on a line of its own
            title, text = first.strip().strip('"'), rest
    return Passage(id=str(row.get("id", default_id)), title=title, text=text)


def _pages(path: Path) -> Iterator[Passage]:
    for query, text in read_results(path).items():
        pages = [" ".join(page.split()) for page in _PAGE.split(text)[1:]]
        for number, page in enumerate(pages, start=1):
            if page:
                yield Passage(id=f"{query}#{number}", title="", text=page)

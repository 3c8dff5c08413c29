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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from strop.config import Config
from strop.errors import UserError
from strop.tools.search.corpus import read_corpus
from strop.tools.search.protocol import Backend, Passage, as_pages

logger = logging.getLogger(__name__)

_WORD = re.compile(r"\w+")
_VERSION = 1  # of the index format; part of the index's name


class Bm25Config(Config):
    """An index of passages of your own; needs `strop[search]`."""

    kind: Literal["bm25"] = Field(description="Backend kind.")
    path: str = Field(description="A .jsonl, a directory of texts, or a .json of search results.")
    index: str | None = Field(default=None, description="Directory of the built index; by default the user's cache directory.")
    language: str = Field(default="english", description='Stemmer, by its Snowball name; "none" does not stem.')
    k1: float = Field(default=0.9, ge=0, le=1000, description="BM25's k1; the default is Anserini's for passages.")
    b: float = Field(default=0.4, ge=0, le=1, description="BM25's b; the default is Anserini's for passages.")


class Bm25Index(Backend):
    """An index of passages. Equal scores keep the order of the corpus.

    Raises:
        UserError: a library is missing, the corpus cannot be read, or the language is unknown.
    """

    def __init__(self, config: Bm25Config) -> None:
        self._stem = _stemmer(config.language)
        self.passages: Sequence[Passage] = read_corpus(Path(config.path))
        place = _place(config, self.passages)
        self.was_built = not place.exists()
        if self.was_built:
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
        index = _bm25s().BM25(method="lucene", k1=config.k1, b=config.b)
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
    digest = hashlib.blake2b(json.dumps([_VERSION, config.language, config.k1, config.b]).encode(), digest_size=12)
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

"""Reads passages: JSON lines, a directory of texts, or the pages in a file of search results.

corpus.jsonl   one object a line: `text` (or `contents`, `body`, `passage`), `title` and `id` are optional
directory/     every .jsonl as above; every .txt and .md is cut into passages of about 100 words, titled by its name
results.json   ARPO's search cache: query -> "Page 1: ...", each page one passage
"""

from __future__ import annotations

import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.errors import UserError
from strop.run_directory import parse_json
from strop.tools.search.cached_results import read_results
from strop.tools.search.protocol import Passage

_TEXT_KEYS = ("text", "contents", "body", "passage")
_WORDS = 100  # of a passage that is cut from a longer text, as usual in passage retrieval
_PAGE = re.compile(r"^Page \d+: ", re.MULTILINE)


def read_corpus(path: Path) -> list[Passage]:
    """Every passage of `path`, in a fixed order. Passages without an id get one.

    Raises:
        UserError: it is missing, empty, or a line of it holds no text; the message names file and line.
    """
    if os.path.isdir(path):  # which is false for a name that is too long, where `path.is_dir` raises
        files = sorted(each for each in path.rglob("*") if each.suffix in (".jsonl", ".txt", ".md") and each.is_file())
        passages = [passage for file in files for passage in _read_file(file, file.relative_to(path).as_posix())]
    elif os.path.isfile(path):
        passages = list(_read_file(path, path.name))
    else:
        raise UserError(f"{path}: no such corpus. Give a .jsonl file with a `text` on each line, or a directory of texts.")
    if not passages:
        raise UserError(f"{path}: no passage in it. Give a .jsonl file with a `text` on each line, or a directory of texts.")
    _check_ids(passages, path)
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


def _check_ids(passages: list[Passage], path: Path) -> None:
    seen: set[str] = set()
    for passage in passages:
        if passage.id in seen:
            raise UserError(f"{path}: two passages have the id {passage.id!r}. Give each its own id, or none.")
        seen.add(passage.id)

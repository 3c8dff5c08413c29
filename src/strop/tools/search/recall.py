"""Measures how often the first results of a search index hold what a question needs."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import UserError
from strop.run_directory import parse_json
from strop.tools.search import Passage
from strop.tools.search.bm25 import Bm25Index

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A query and the right results: the passages with these ids, or any passage that holds an answer."""

    query: str
    passage_ids: tuple[str, ...]
    answers: tuple[str, ...]  # used if no ids are given


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """`at[k]` is the mean over questions of the share of named passages among the first k results, or, without names, of 1 if
    one of them holds an answer."""

    num_questions: int
    num_passages: int
    at: Mapping[int, float]


def measure_recall(index: Bm25Index, questions: Sequence[Question], *, ks: Sequence[int]) -> Recall:
    """Search for every question once.

    Raises:
        UserError: a question names a passage that is not in the corpus.
    """
    known = {passage.id for passage in index.passages}
    totals = dict.fromkeys(ks, 0.0)
    for question in questions:
        missing = next((each for each in question.passage_ids if each not in known), None)
        if missing is not None:
            raise UserError(f"question {question.query!r} names the passage {missing!r}, which is not in the corpus.")
        found = index.search(question.query, max(ks))
        for k in ks:
            totals[k] += _share_found(question, found[:k])
    return Recall(
        num_questions=len(questions), num_passages=len(index.passages), at={k: totals[k] / len(questions) for k in ks}
    )


def read_questions(path: Path) -> list[Question]:
    """One JSON object a line: `question` (or `query`), and `passages` (ids) or `answer` (a text, or several).

    Raises:
        UserError: the file is missing or empty, or a line lacks one of these keys.
    """
    try:
        with path.open(encoding="utf-8") as file:  # splitlines() would also split at U+2028 within a text
            lines = list(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from error
    questions = [_question(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not questions:
        raise UserError(f"{path}: it holds no question.")
    return questions


def _question(line: str, place: str) -> Question:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{place}: {error}.") from error
    query = row.get("question", row.get("query")) if isinstance(row, dict) else None
    if not isinstance(query, str):
        raise UserError(f"{place}: `question` or `query` must hold text.")
    ids, answers = _texts(row.get("passages")), _texts(row.get("answer"))
    if not ids and not answers:
        raise UserError(f"{place}: `passages` (ids) or `answer` must say which results are right.")
    return Question(query=query, passage_ids=ids, answers=answers)


def _texts(value: Any) -> tuple[str, ...]:
    given = value if isinstance(value, list) else [value]
    return tuple(str(each) for each in given if isinstance(each, str | int | float))


def _share_found(question: Question, found: Sequence[Passage]) -> float:
    if question.passage_ids:
        ids = {passage.id for passage in found}
        return sum(each in ids for each in question.passage_ids) / len(question.passage_ids)
    texts = [f" {_plain(f'{passage.title} {passage.text}')} " for passage in found]
    return float(any(f" {_plain(answer)} " in text for answer in question.answers for text in texts))


def _plain(text: str) -> str:
    """The text without case, punctuation and articles, as usual in question answering."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())

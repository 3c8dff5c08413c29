"""Judged tasks on disk: one file a chunk of the input, whole or not there, so that a killed curation goes on behind them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from strop.curation.curate import Judged
from strop.curation.verdict import Verdict
from strop.runs import read_lines, write_text
from strop.tasks.readers import Row
from strop.tasks.rows import BadRow, LeftOut
from strop.types import Task

UNREADABLE = "unreadable"
"""The rule's name of rows that are no tasks."""


def part_path(directory: Path, number: int) -> Path:
    return directory / f"part-{number:06d}.jsonl"


def write_part(path: Path, judged: Iterable[Judged]) -> None:
    write_text(path, "".join(json.dumps(_line(each), ensure_ascii=False) + "\n" for each in judged))


def read_parts(directory: Path) -> Iterator[Judged]:
    """All judged tasks, in the order of the input."""
    for path in sorted(directory.glob("part-*.jsonl")):
        for line in read_lines(path):
            yield Judged(
                verdict=Verdict(task=task_of(line["task"]), rule=line["rule"], reason=line["reason"]),
                prepared=tuple(base64.b64decode(each) for each in line["prepared"]),
            )


def unreadable(bad: BadRow) -> Judged:
    """A row that is no task, in the form of one: its question is the row itself."""
    shown = json.dumps(bad.row, ensure_ascii=False, default=str)
    task = Task(id=Path(bad.place).name, question=shown, answer="", source=bad.source)
    return Judged(verdict=Verdict(task=task, rule=UNREADABLE, reason=bad.problem))


def left_out(row: LeftOut) -> Judged:
    """A task that its source's limits leave out; the rule is the key that does."""
    return Judged(verdict=Verdict(task=row.task, rule=row.key, reason=row.reason))


def row_of(task: Task) -> dict[str, Any]:
    """A task as a row of kept.jsonl."""
    return {
        "id": task.id,
        "question": task.question,
        "answer": task.answer,
        "source": task.source,
        "facts": dict(task.facts),
    }


def task_of(row: Row) -> Task:
    return Task(id=row["id"], question=row["question"], answer=row["answer"], source=row["source"], facts=row["facts"])


def _line(judged: Judged) -> dict[str, Any]:
    verdict = judged.verdict
    prepared: Sequence[str] = [base64.b64encode(each).decode() for each in judged.prepared]
    return {"task": row_of(verdict.task), "rule": verdict.rule, "reason": verdict.reason, "prepared": prepared}

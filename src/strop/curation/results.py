"""The results of a curation: judged tasks on disk, counts and samples by rule, and the page."""

from __future__ import annotations

import base64
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.curation.config import Judged, Verdict
from strop.reports.html import render
from strop.run_directory import read_lines, write_text
from strop.tasks.columns import BadRow, LeftOut
from strop.tasks.readers import Row
from strop.types import Task, derive_seed

UNREADABLE = "unreadable"
"""Name of the rule for rows that are not tasks."""


def part_path(directory: Path, number: int) -> Path:
    return directory / f"part-{number:06d}.jsonl"


def write_part(path: Path, judged: Iterable[Judged]) -> None:
    write_text(path, "".join(json.dumps(_line(each), ensure_ascii=False) + "\n" for each in judged))


def read_parts(directory: Path) -> Iterator[Judged]:
    """Return all judged tasks in the order of the input."""
    for path in sorted(directory.glob("part-*.jsonl")):
        for line in read_lines(path):
            yield Judged(
                verdict=Verdict(task=task_of(line["task"]), rule=line["rule"], reason=line["reason"]),
                prepared=tuple(base64.b64decode(each) for each in line["prepared"]),
            )


def unreadable(bad: BadRow) -> Judged:
    """Return a row that is not a task as a dropped task whose question is the row."""
    shown = json.dumps(bad.row, ensure_ascii=False, default=str)
    task = Task(id=Path(bad.place).name, question=shown, answer="", source=bad.source)
    return Judged(verdict=Verdict(task=task, rule=UNREADABLE, reason=bad.problem))


def left_out(row: LeftOut) -> Judged:
    """Return a task that a limit of its source leaves out; the rule is the key of the limit."""
    return Judged(verdict=Verdict(task=row.task, rule=row.key, reason=row.reason))


def row_of(task: Task) -> dict[str, Any]:
    """Return a task as a row of kept.jsonl."""
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


_NUM_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTally:
    """Counts of one rule, over the tasks that earlier rules kept and whose source it judges."""

    name: str
    num_seen: int
    num_dropped: int
    samples: tuple[Verdict, ...]


@dataclass(slots=True)
class Tally:
    """Counts verdicts and keeps samples: those with the smallest hash of rule and id, so that chunks do not matter."""

    num_tasks: int = 0
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)  # source -> rule that dropped ("": none) -> tasks
    _samples: dict[str, list[tuple[int, int, Verdict]]] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        return sum(counts[""] for counts in self.verdicts.values())

    def add(self, verdict: Verdict) -> None:
        self.num_tasks += 1
        self.verdicts.setdefault(verdict.task.source, Counter())[verdict.rule] += 1
        heap = self._samples.setdefault(verdict.rule, [])
        entry = (-derive_seed("shown", verdict.rule, verdict.task.id), -self.num_tasks, verdict)
        if len(heap) < _NUM_SAMPLES:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)

    def samples(self, rule: str = "") -> tuple[Verdict, ...]:
        """Return samples of what `rule` dropped, or of what was kept."""
        return tuple(verdict for *_, verdict in sorted(self._samples.get(rule, ()), reverse=True))

    def by_rule(self, scopes: Mapping[str, frozenset[str] | None]) -> list[RuleTally]:
        """Return one tally for each rule, in the order in which they judged.

        Args:
            scopes: the sources of each rule by its name; None: all.
        """
        found = []
        left = {source: counts.total() for source, counts in self.verdicts.items()}
        for name, scope in scopes.items():
            num_seen = sum(num for source, num in left.items() if scope is None or source in scope)
            num_dropped = sum(counts[name] for counts in self.verdicts.values())
            found.append(RuleTally(name=name, num_seen=num_seen, num_dropped=num_dropped, samples=self.samples(name)))
            left = {source: num - self.verdicts[source][name] for source, num in left.items()}
        return found


_SHOWN_CHARS = 600
_ID_CHARS = 22


def write_page(path: Path, name: str, summary: Mapping[str, Any], rules: Sequence[RuleTally], kept: Sequence[Verdict]) -> None:
    """Write the page, which needs no other file. Raises `RunError` if it cannot be written."""
    page = render(
        "curation.html.j2", name=name, summary=summary, rules=rules, kept=kept, shorten=_shorten, shorten_id=_shorten_id
    )
    write_text(path, page)


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} … ({len(text)} characters)"


def _shorten_id(name: str) -> str:
    """Return both ends of a long id, and more of the second, which differs between rows of a file."""
    return name if len(name) <= _ID_CHARS else f"{name[: _ID_CHARS // 3]}…{name[1 - _ID_CHARS + _ID_CHARS // 3 :]}"

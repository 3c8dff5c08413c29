"""The curation file: where problems come from, and which rules they must pass, in which order; how the rules are applied.

Each dropped task gets the rule that dropped it, and the reason. Judged tasks are kept on disk, counts and samples by rule, and
drawn as a page.
"""

from __future__ import annotations

import base64
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeAlias, runtime_checkable

from pydantic import Field, model_validator

from strop.config import Config, load_toml, validate, with_paths
from strop.curation.answers import IntegerAnswer, SimpleAnswer, SmallNumbers, VerifiableAnswer
from strop.curation.decontamination import DecontaminationRule
from strop.curation.duplicates import ExactDuplicatesRule, NearDuplicatesRule
from strop.curation.outcomes import AgreementRule
from strop.errors import did_you_mean
from strop.reports.html import render
from strop.run_directory import read_lines, write_text
from strop.tasks.columns import BadRow, LeftOut
from strop.tasks.readers import Row
from strop.tasks.rows import RowSource
from strop.types import Task, derive_seed

RuleConfig: TypeAlias = Annotated[
    IntegerAnswer
    | VerifiableAnswer
    | SimpleAnswer
    | SmallNumbers
    | DecontaminationRule
    | AgreementRule
    | ExactDuplicatesRule
    | NearDuplicatesRule,
    Field(discriminator="kind"),
]

COMPARISONS = (ExactDuplicatesRule, NearDuplicatesRule)
"""Rules that compare a task with those before it."""


class CurationConfig(Config):
    """The root of a curation file."""

    name: str = Field(description="Title of the report.")
    sources: tuple[RowSource, ...] = Field(min_length=1, description="Where problems come from.")
    rules: tuple[RuleConfig, ...] = Field(min_length=1, description="Rules in the order in which they judge.")

    @model_validator(mode="after")
    def _compares_last(self) -> Self:
        kinds = [rule.kind for rule in self.rules]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice is not None:
            raise ValueError(f"rules has {twice} twice. Keep one of them.")
        is_comparison = [isinstance(rule, COMPARISONS) for rule in self.rules]
        if is_comparison != sorted(is_comparison):
            first = kinds[is_comparison.index(True)]
            raise ValueError(
                f"rules has {first} before {kinds[-1 - is_comparison[::-1].index(False)]}: if a later rule drops the first of"
                " two duplicates, both are lost. Put exact_duplicates and near_duplicates last."
            )
        return self

    @model_validator(mode="after")
    def _names_sources_that_are_there(self) -> Self:
        known = sorted({name for source in self.sources for name in source.names})
        tells_itself = any(source.config.dataset == "strop" for source in self.sources)
        for rule in self.rules:
            for name in rule.sources:
                if tells_itself or any(_is_called(source, name) for source in self.sources):
                    continue
                hint = did_you_mean(name, known)
                raise ValueError(
                    f"sources of {rule.kind} has {name!r}, which is not one of the sources: {', '.join(known)}.{hint}"
                    " Use a dataset, path or hub name."
                )
        return self

    def scope(self, rule: RuleConfig) -> frozenset[str] | None:
        """Return the source names of the problems that `rule` judges, or None for all."""
        if not rule.sources:
            return None
        called = (source.source("train") for name in rule.sources for source in self.sources if _is_called(source, name))
        return frozenset([*rule.sources, *called])


def _is_called(source: RowSource, name: str) -> bool:
    if source.config.dataset == "strop":
        return False  # its rows have their own source column
    return name in source.names or str(source.files.get("train")).endswith(f"/{name}")


_PATH_KEYS = ("path", "test_path", "outcomes")


def load_curation(path: Path, overrides: Sequence[str] = ()) -> CurationConfig:
    """Return the curation in `path`. Relative paths are looked up next to it first. Raises `ConfigError` with each mistake."""
    return validate(CurationConfig, with_paths(load_toml(path, overrides), path, _PATH_KEYS), place=str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A task with the rule that dropped it and the reason, or with neither if it was kept."""

    task: Task
    rule: str = ""
    reason: str = ""

    @property
    def is_kept(self) -> bool:
        return not self.rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A task after the independent rules. A kept task carries the preparations of the comparisons."""

    verdict: Verdict
    prepared: tuple[bytes, ...] = ()


class Rule(Protocol):
    """Judges each task independently, so in parallel and in any order."""

    @property
    def name(self) -> str: ...

    def judge(self, task: Task) -> str | None:
        """Return the reason why `task` is dropped, or None."""


@runtime_checkable
class Comparison(Protocol):
    """Compares a task with those before it, so it sees all tasks in order.

    `prepare` computes what depends on the task only; other processes run it.
    """

    @property
    def name(self) -> str: ...

    def prepare(self, task: Task) -> bytes: ...

    def judge(self, task: Task, prepared: bytes) -> str | None:
        """Return the reason why `task` is dropped, or None; a task that stays is remembered."""


AnyRule: TypeAlias = Rule | Comparison
Sources: TypeAlias = frozenset[str] | None
"""The sources whose problems a rule judges; None: all. Others stay, and are not compared."""


class Rules:
    """The rules of a file, in order: first those that judge each task independently, then the comparisons."""

    def __init__(self, rules: Iterable[tuple[AnyRule, Sources]]) -> None:
        self._independent: list[tuple[Rule, Sources]] = []
        self._comparisons: list[tuple[Comparison, Sources]] = []
        for rule, sources in rules:
            if isinstance(rule, Comparison):
                self._comparisons.append((rule, sources))
            else:
                self._independent.append((rule, sources))

    @property
    def names(self) -> list[str]:
        return [rule.name for rule, _ in self._independent] + [rule.name for rule, _ in self._comparisons]

    def judge(self, task: Task) -> Judged:
        """Apply the independent rules, and prepare the comparisons. Runs in parallel."""
        for rule, sources in self._independent:
            if _applies_to(task, sources) and (reason := rule.judge(task)) is not None:
                return Judged(verdict=Verdict(task=task, rule=rule.name, reason=reason))
        prepared = (rule.prepare(task) if _applies_to(task, sources) else b"" for rule, sources in self._comparisons)
        return Judged(verdict=Verdict(task=task), prepared=tuple(prepared))

    def compare(self, judged: Iterable[Judged]) -> Iterator[Verdict]:
        """Apply the comparisons to judged tasks, in order."""
        for each in judged:
            yield self._compared(each) if each.verdict.is_kept else each.verdict

    def _compared(self, judged: Judged) -> Verdict:
        task = judged.verdict.task
        for (rule, sources), prepared in zip(self._comparisons, judged.prepared, strict=True):
            if _applies_to(task, sources) and (reason := rule.judge(task, prepared)) is not None:
                return Verdict(task=task, rule=rule.name, reason=reason)
        return judged.verdict


def _applies_to(task: Task, sources: Sources) -> bool:
    return sources is None or task.source in sources


def make_rule(config: RuleConfig) -> AnyRule:
    """Return the rule that `config` describes. Raises `TaskError` if its benchmark or outcomes cannot be read."""
    rule: AnyRule = config.opened()
    return rule


def make_rules(config: CurationConfig) -> Rules:
    """Return the rules of a file, each for its sources. Raises the errors of `make_rule`."""
    return Rules((make_rule(rule), config.scope(rule)) for rule in config.rules)


def curate(tasks: Iterable[Task], rules: Iterable[AnyRule]) -> Iterator[Verdict]:
    """Return a verdict for each task. Comparisons judge after all other rules."""
    all_rules = Rules((rule, None) for rule in rules)
    return all_rules.compare(map(all_rules.judge, tasks))


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

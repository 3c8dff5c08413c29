"""What curation says of one task, and the two kinds of rules that say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from strop.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A task with the rule that dropped it and why, or with neither: it was kept."""

    task: Task
    rule: str = ""
    reason: str = ""

    @property
    def is_kept(self) -> bool:
        return not self.rule


class Rule(Protocol):
    """Judges a task by itself, so that many may be judged at once and in any order."""

    @property
    def name(self) -> str: ...

    def judge(self, task: Task) -> str | None:
        """Why `task` is dropped, in words for a person; None when it stays."""


@runtime_checkable
class Comparison(Protocol):
    """Judges a task by those that came before it, so that it sees all of them, in order.

    What can be computed of a task alone is in `prepare`, which other processes run.
    """

    @property
    def name(self) -> str: ...

    def prepare(self, task: Task) -> bytes: ...

    def judge(self, task: Task, prepared: bytes) -> str | None:
        """Why `task` is dropped; None when it stays, and is then remembered."""


AnyRule: TypeAlias = Rule | Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScopedRule:
    """A rule for problems of some sources; those of others stay."""

    rule: Rule
    sources: frozenset[str]

    @property
    def name(self) -> str:
        return self.rule.name

    def judge(self, task: Task) -> str | None:
        return self.rule.judge(task) if task.source in self.sources else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScopedComparison:
    """A comparison among problems of some sources; those of others stay, and are not remembered."""

    rule: Comparison
    sources: frozenset[str]

    @property
    def name(self) -> str:
        return self.rule.name

    def prepare(self, task: Task) -> bytes:
        return self.rule.prepare(task) if task.source in self.sources else b""

    def judge(self, task: Task, prepared: bytes) -> str | None:
        return self.rule.judge(task, prepared) if task.source in self.sources else None


def scoped(rule: AnyRule, sources: frozenset[str] | None) -> AnyRule:
    """`rule` for problems whose source is one of `sources`; for all where that is None."""
    if sources is None:
        return rule
    if isinstance(rule, Comparison):
        return _ScopedComparison(rule=rule, sources=sources)
    return _ScopedRule(rule=rule, sources=sources)


def rules_alone(rules: Sequence[AnyRule]) -> list[Rule]:
    """Those of `rules` that judge a task by itself, in order."""
    return [rule for rule in rules if not isinstance(rule, Comparison)]


def comparisons(rules: Sequence[AnyRule]) -> list[Comparison]:
    """Those of `rules` that judge a task by those before it, in order; they judge last."""
    return [rule for rule in rules if isinstance(rule, Comparison)]

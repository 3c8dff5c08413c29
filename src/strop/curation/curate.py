"""Applies rules to tasks, one after the other; each dropped task gets the rule that dropped it, and the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from strop.curation.config import CurationConfig, RuleConfig
from strop.types import Task


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
RuleT = TypeVar("RuleT", Rule, Comparison)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoped(Generic[RuleT]):
    """A rule for problems of some sources; others stay, and are not compared."""

    rule: RuleT
    sources: frozenset[str] | None  # None: all

    def applies_to(self, task: Task) -> bool:
        return self.sources is None or task.source in self.sources


class Rules:
    """The rules of a file, in order: first those that judge each task independently, then the comparisons."""

    def __init__(self, rules: Iterable[tuple[AnyRule, frozenset[str] | None]]) -> None:
        self._independent: list[Scoped[Rule]] = []
        self._comparisons: list[Scoped[Comparison]] = []
        for rule, sources in rules:
            if isinstance(rule, Comparison):
                self._comparisons.append(Scoped(rule=rule, sources=sources))
            else:
                self._independent.append(Scoped(rule=rule, sources=sources))

    @property
    def names(self) -> list[str]:
        independent = [each.rule.name for each in self._independent]
        return independent + [each.rule.name for each in self._comparisons]

    def judge(self, task: Task) -> Judged:
        """Apply the independent rules, and prepare the comparisons. Runs in parallel."""
        for each in self._independent:
            if each.applies_to(task) and (reason := each.rule.judge(task)) is not None:
                return Judged(verdict=Verdict(task=task, rule=each.rule.name, reason=reason))
        prepared = (each.rule.prepare(task) if each.applies_to(task) else b"" for each in self._comparisons)
        return Judged(verdict=Verdict(task=task), prepared=tuple(prepared))

    def compare(self, judged: Iterable[Judged]) -> Iterator[Verdict]:
        """Apply the comparisons to judged tasks, in order."""
        for each in judged:
            yield self._compared(each) if each.verdict.is_kept else each.verdict

    def _compared(self, judged: Judged) -> Verdict:
        task = judged.verdict.task
        for each, prepared in zip(self._comparisons, judged.prepared, strict=True):
            if each.applies_to(task) and (reason := each.rule.judge(task, prepared)) is not None:
                return Verdict(task=task, rule=each.rule.name, reason=reason)
        return judged.verdict


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

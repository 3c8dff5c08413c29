"""Applies rules to tasks, one after the other: what stays, and of all else which rule dropped it and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from strop.curation.answers import IntegerAnswer, SimpleAnswer, SmallNumbers, VerifiableAnswer
from strop.curation.config import (
    AgreementRule,
    CurationConfig,
    DecontaminationRule,
    DifficultyRule,
    ExactDuplicatesRule,
    IntegerAnswerRule,
    NearDuplicatesRule,
    RowsSource,
    RuleConfig,
    SimpleAnswerRule,
    SmallNumbersRule,
    VerifiableAnswerRule,
)
from strop.curation.decontamination import Decontamination
from strop.curation.outcomes import Agreement, Difficulty, read_outcomes
from strop.curation.verdict import AnyRule, Verdict, comparisons, rules_alone, scoped
from strop.tasks import iterate_rows
from strop.tasks.rows import has_test_rows
from strop.types import Task


def make_rule(config: RuleConfig) -> AnyRule:
    """The rule that `config` describes.

    Raises:
        TaskError: its benchmark or its outcomes cannot be read.
    """
    match config:
        case IntegerAnswerRule():
            return IntegerAnswer()
        case VerifiableAnswerRule():
            return VerifiableAnswer(max_words=config.max_words)
        case SimpleAnswerRule():
            return SimpleAnswer(max_chars=config.max_chars, max_commands=config.max_commands, max_parts=config.max_parts)
        case SmallNumbersRule():
            return SmallNumbers(max_digits=config.max_digits)
        case DecontaminationRule():
            benchmarks = (task for source in config.against for task in read_benchmark(source))
            return Decontamination(benchmarks, n=config.n, min_share=config.min_share, short_share=config.short_share)
        case AgreementRule():
            outcomes = read_outcomes(config.outcomes)
            return Agreement(outcomes=outcomes, num_rollouts=config.num_rollouts, min_right=config.min_right)
        case DifficultyRule():
            outcomes = read_outcomes(config.outcomes)
            return Difficulty(outcomes=outcomes, num_rollouts=config.num_rollouts, min_right=config.min_right)
        case ExactDuplicatesRule():
            from strop.curation.duplicates import ExactDuplicates

            return ExactDuplicates()
        case NearDuplicatesRule():
            from strop.curation.duplicates import NearDuplicates  # imports numpy: law 10

            return NearDuplicates(threshold=config.threshold, needs_same_answer=config.needs_same_answer)
        case _:
            assert_never(config)


def make_rules(config: CurationConfig) -> list[AnyRule]:
    """The rules of a file, each for the sources that it names. Raises as `make_rule` does."""
    return [scoped(make_rule(rule), config.scope(rule)) for rule in config.rules]


def read_benchmark(source: RowsSource) -> Iterator[Task]:
    """The problems that are evaluated: the test rows where `source` tells them apart, else all."""
    return iterate_rows(source, split="test" if has_test_rows(source) else "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A task after the rules that look at it alone. One that they kept carries what the comparisons need of it."""

    verdict: Verdict
    prepared: tuple[bytes, ...] = ()


class Alone:
    """The rules that judge a task by itself, and the preparations of the others: all that processes can share out."""

    def __init__(self, rules: Sequence[AnyRule]) -> None:
        self._rules = rules_alone(rules)
        self._comparisons = comparisons(rules)

    def judge(self, task: Task) -> Judged:
        for rule in self._rules:
            reason = rule.judge(task)
            if reason is not None:
                return Judged(verdict=Verdict(task=task, rule=rule.name, reason=reason))
        return Judged(verdict=Verdict(task=task), prepared=tuple(rule.prepare(task) for rule in self._comparisons))


def compare(judged: Iterable[Judged], rules: Sequence[AnyRule]) -> Iterator[Verdict]:
    """The last word on each task, in order, of those of `rules` that compare."""
    comparing = comparisons(rules)
    for each in judged:
        verdict = each.verdict
        if verdict.is_kept:
            for rule, prepared in zip(comparing, each.prepared, strict=True):
                reason = rule.judge(verdict.task, prepared)
                if reason is not None:
                    verdict = Verdict(task=verdict.task, rule=rule.name, reason=reason)
                    break
        yield verdict


def curate(tasks: Iterable[Task], rules: Sequence[AnyRule]) -> Iterator[Verdict]:
    """A verdict for each task, as it comes. Comparisons judge after all other rules, wherever they stand in `rules`."""
    alone = Alone(rules)
    return compare((alone.judge(task) for task in tasks), rules)

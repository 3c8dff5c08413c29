"""The curation file: where problems come from, and which rules they must pass, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, Self, TypeAlias, runtime_checkable

from pydantic import Field, model_validator

from strop.config import Config, load_toml, validate, with_paths
from strop.curation.answers import IntegerAnswer, SimpleAnswer, SmallNumbers, VerifiableAnswer
from strop.curation.decontamination import DecontaminationRule
from strop.curation.duplicates import ExactDuplicatesRule, NearDuplicatesRule
from strop.curation.outcomes import AgreementRule
from strop.errors import did_you_mean
from strop.tasks.rows import RowSource
from strop.types import Task

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
        return frozenset[str]().union(*map(self.called, rule.sources))

    def called(self, name: str) -> frozenset[str]:
        """Return the source names of the problems that a rule calls `name`."""
        return frozenset([name, *(source.source("train") for source in self.sources if _is_called(source, name))])


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

"""The curation file: where problems come from, and which rules they must pass, in which order; how the rules are applied.

Each dropped task gets the rule that dropped it, and the reason. Judged tasks are kept on disk, counts and samples by rule, and
drawn as a page.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Choice, Config, load_toml, validate, with_paths
from strop.curation.decontamination import DecontaminationRule
from strop.curation.rules import AnswerRule, OutcomeOrDuplicateRule
from strop.errors import did_you_mean
from strop.reports.html import render
from strop.run_directory import write_text
from strop.tasks.rows import RowSource, Verdict
from strop.types import Task, derive_seed

RuleConfig: TypeAlias = Annotated[AnswerRule | DecontaminationRule | OutcomeOrDuplicateRule, Choice()]


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
        is_comparison = [rule.compares for rule in self.rules]
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


class Rule(Protocol):
    """Judges tasks: each independently, so in parallel and in any order, or in order, compared with those before it."""

    @property
    def name(self) -> str: ...

    def judge(self, task: Task) -> str | None:
        """Return the reason why `task` is dropped, or None; a rule that compares remembers a task that stays."""


ScopedRule: TypeAlias = tuple[Rule, frozenset[str] | None]
"""A rule and the sources whose problems it judges; None: all. Others stay, and are not compared."""


def make_rule(config: RuleConfig) -> Rule:
    """Return the rule that `config` describes. Raises `TaskError` if its benchmark or outcomes cannot be read."""
    rule: Rule = config.opened()
    return rule


def make_rules(config: CurationConfig) -> tuple[list[ScopedRule], list[ScopedRule]]:
    """Return the rules that judge each task independently, and those that compare it. Raises the errors of `make_rule`."""
    independent, comparing = (
        [(make_rule(rule), config.scope(rule)) for rule in config.rules if rule.compares == compares]
        for compares in (False, True)
    )
    return independent, comparing


def apply(verdict: Verdict, rules: Iterable[ScopedRule]) -> Verdict:
    """Return the verdict of the first of `rules` that drops the task of `verdict`, which stays as it is otherwise."""
    if not verdict.is_kept:
        return verdict
    task = verdict.task
    for rule, sources in rules:
        if (sources is None or task.source in sources) and (reason := rule.judge(task)) is not None:
            return Verdict(task=task, rule=rule.name, reason=reason)
    return verdict


def curate(tasks: Iterable[Task], rules: Sequence[Rule]) -> Iterator[Verdict]:
    """Return a verdict for each task, of `rules` in their order; those that compare belong last."""
    for task in tasks:
        yield apply(Verdict(task=task), [(rule, None) for rule in rules])


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
        samples = self._samples.setdefault(verdict.rule, [])
        insort(samples, (derive_seed("shown", verdict.rule, verdict.task.id), self.num_tasks, verdict))
        del samples[_NUM_SAMPLES:]

    def samples(self, rule: str = "") -> tuple[Verdict, ...]:
        """Return samples of what `rule` dropped, or of what was kept."""
        return tuple(verdict for *_, verdict in self._samples.get(rule, ()))

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


_ID_CHARS = 22


def write_page(path: Path, name: str, summary: Mapping[str, Any], rules: Sequence[RuleTally], kept: Sequence[Verdict]) -> None:
    """Write the page, which needs no other file. Raises `RunError` if it cannot be written."""
    page = render("curation.html.j2", name=name, summary=summary, rules=rules, kept=kept, shorten_id=_shorten_id)
    write_text(path, page)


def _shorten_id(name: str) -> str:
    """Return both ends of a long id, and more of the second, which differs between rows of a file."""
    return name if len(name) <= _ID_CHARS else f"{name[: _ID_CHARS // 3]}…{name[1 - _ID_CHARS + _ID_CHARS // 3 :]}"

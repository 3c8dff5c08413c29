"""The curation file: where problems come from, and which rules they must pass, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config, load_toml, validate, with_paths
from strop.curation.answers import IntegerAnswer, RuleScope, SimpleAnswer, SmallNumbers, VerifiableAnswer
from strop.curation.decontamination import Decontamination
from strop.curation.outcomes import AgreementRule, DifficultyRule
from strop.errors import did_you_mean
from strop.tasks import iterate_rows
from strop.tasks.rows import RowSource
from strop.types import Task

if TYPE_CHECKING:
    from strop.curation.duplicates import ExactDuplicates, NearDuplicates


class DecontaminationRule(RuleScope):
    """Drops problems that share n-grams with a benchmark, and reworded copies of its short problems."""

    kind: Literal["decontamination"] = "decontamination"
    against: tuple[RowSource, ...] = Field(min_length=1, description="Benchmarks: their test rows, or all rows if none.")
    n: int = Field(default=8, ge=2, le=10**6, description="Words of an n-gram (rStar2-Agent section 4.2, open-r1).")
    min_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of a benchmark problem's n-grams that makes a copy; 0: one n-gram, as in the papers.",
    )
    short_share: float = Field(
        default=0.45, gt=0, le=1, description="The same for problems with fewer than 3n words, in one run of words."
    )

    def opened(self) -> Decontamination:
        benchmarks = (task for source in self.against for task in read_benchmark(source))
        return Decontamination(benchmarks, n=self.n, min_share=self.min_share, short_share=self.short_share)


def read_benchmark(source: RowSource) -> Iterator[Task]:
    """Return the test rows of `source`, or all rows if it has no test rows."""
    return iterate_rows(source, split="test" if source.has_test_rows else "train")


class ExactDuplicatesRule(RuleScope):
    """Keeps the first of equal questions."""

    kind: Literal["exact_duplicates"] = "exact_duplicates"

    def opened(self) -> ExactDuplicates:
        from strop.curation.duplicates import ExactDuplicates  # imports numpy

        return ExactDuplicates()


class NearDuplicatesRule(RuleScope):
    """Keeps the first of nearly equal questions; needs the extra `data`."""

    kind: Literal["near_duplicates"] = "near_duplicates"
    threshold: float = Field(default=0.8, ge=0.3, le=1, description="Jaccard index of the word triples.")
    needs_same_answer: bool = Field(True, description="Only questions with equal answers are duplicates.")

    def opened(self) -> NearDuplicates:
        from strop.curation.duplicates import NearDuplicates

        return NearDuplicates(threshold=self.threshold, needs_same_answer=self.needs_same_answer)


RuleConfig: TypeAlias = Annotated[
    IntegerAnswer
    | VerifiableAnswer
    | SimpleAnswer
    | SmallNumbers
    | DecontaminationRule
    | AgreementRule
    | DifficultyRule
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

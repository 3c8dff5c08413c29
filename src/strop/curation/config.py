"""What a curation file says: where problems come from, and which rules they must pass, in which order."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config
from strop.tasks.config import HubConfig, JsonlConfig, ParquetConfig
from strop.tasks.rows import source_of

RowsSource: TypeAlias = Annotated[JsonlConfig | ParquetConfig | HubConfig, Field(discriminator="kind")]


class RuleScope(Config):
    """Of which sources a rule judges the problems."""

    sources: tuple[str, ...] = ()  # by dataset, path or hub name; none: all. Of dataset = "strop" what the rows have as source


class IntegerAnswerRule(RuleScope):
    """Keeps answers that are one integer."""

    kind: Literal["integer_answer"] = "integer_answer"


class VerifiableAnswerRule(RuleScope):
    """Drops proofs, choices among letters, yes and no, and prose."""

    kind: Literal["verifiable_answer"] = "verifiable_answer"
    max_words: int = Field(default=0, ge=0)  # of prose in an answer


class SimpleAnswerRule(RuleScope):
    """Drops answers so long, or of so many parts, that checks of them err."""

    kind: Literal["simple_answer"] = "simple_answer"
    max_chars: int = Field(default=80, ge=1)
    max_commands: int = Field(default=8, ge=0)  # of LaTeX
    max_parts: int = Field(default=4, ge=1)  # separated by commas


class SmallNumbersRule(RuleScope):
    """Drops answers with huge numbers."""

    kind: Literal["small_numbers"] = "small_numbers"
    max_digits: int = Field(default=15, ge=1)


class DecontaminationRule(RuleScope):
    """Drops problems that share n-grams with a benchmark, and reworded copies of its short problems."""

    kind: Literal["decontamination"] = "decontamination"
    against: tuple[RowsSource, ...] = Field(min_length=1)  # of each the test rows where it names some, else all
    n: int = Field(default=8, ge=2)  # words; rStar2-Agent section 4.2, open-r1
    min_share: float = Field(default=0.5, ge=0, le=1)  # of a benchmark problem's n-grams; 0 is the papers' strict rule
    short_share: float = Field(default=0.45, gt=0, le=1)  # of one with fewer than 3n words, that one run of words must hold


class AgreementRule(RuleScope):
    """Keeps problems whose label some of a model's answers reach."""

    kind: Literal["agreement"] = "agreement"
    outcomes: Path
    num_rollouts: int = Field(default=16, ge=1)  # asked of the model; those that were not judged may have been right
    min_right: int = Field(default=2, ge=1)  # of 16; rStar2-Agent section 4.2

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.min_right > self.num_rollouts:
            raise ValueError(
                f"min_right is {self.min_right} but num_rollouts is {self.num_rollouts}: no problem could stay. Lower"
                " min_right."
            )
        return self


class DifficultyRule(RuleScope):
    """Drops problems that the policy always solves."""

    kind: Literal["difficulty"] = "difficulty"
    outcomes: Path
    num_rollouts: int = Field(default=8, ge=1)  # judged, before "always" is believed; rStar2-Agent section 4.3
    min_right: int = Field(default=0, ge=0)  # fewer is too hard


class ExactDuplicatesRule(RuleScope):
    """Keeps the first of equal questions."""

    kind: Literal["exact_duplicates"] = "exact_duplicates"


class NearDuplicatesRule(RuleScope):
    """Keeps the first of questions that read nearly the same; needs the extra `data`."""

    kind: Literal["near_duplicates"] = "near_duplicates"
    threshold: float = Field(default=0.8, ge=0.3, le=1)  # Jaccard index of the word triples
    needs_same_answer: bool = True  # the same sentence with other numbers is another problem


RuleConfig: TypeAlias = Annotated[
    IntegerAnswerRule
    | VerifiableAnswerRule
    | SimpleAnswerRule
    | SmallNumbersRule
    | DecontaminationRule
    | AgreementRule
    | DifficultyRule
    | ExactDuplicatesRule
    | NearDuplicatesRule,
    Field(discriminator="kind"),
]

COMPARISONS = (ExactDuplicatesRule, NearDuplicatesRule)
"""Rules that judge a task by those before it."""


class CurationConfig(Config):
    """The root of a curation file."""

    name: str
    sources: tuple[RowsSource, ...] = Field(min_length=1)
    rules: tuple[RuleConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _compares_last(self) -> Self:
        kinds = [rule.kind for rule in self.rules]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice is not None:
            raise ValueError(f"rules has {twice} twice, so what it dropped could not be told apart. Keep one of them.")
        is_comparison = [isinstance(rule, COMPARISONS) for rule in self.rules]
        if is_comparison != sorted(is_comparison):
            first = kinds[is_comparison.index(True)]
            raise ValueError(
                f"rules has {first} before {kinds[-1 - is_comparison[::-1].index(False)]}: a duplicate of a problem that is"
                " dropped afterwards would be lost with it. Put exact_duplicates and near_duplicates last."
            )
        return self

    @model_validator(mode="after")
    def _names_sources_that_are_there(self) -> Self:
        known = sorted({name for source in self.sources for name in _names_of(source)})
        tells_itself = any(source.dataset == "strop" for source in self.sources)
        for rule in self.rules:
            for name in rule.sources:
                if tells_itself or any(_is_called(source, name) for source in self.sources):
                    continue
                nearest = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise ValueError(
                    f"sources of {rule.kind} has {name!r}, which is none of the sources: {', '.join(known)}.{hint} Name one by"
                    " its dataset, path or hub name."
                )
        return self

    def scope(self, rule: RuleConfig) -> frozenset[str] | None:
        """What the problems that `rule` judges have as their source; None where it judges all."""
        if not rule.sources:
            return None
        return frozenset[str]().union(*map(self.called, rule.sources))

    def called(self, name: str) -> frozenset[str]:
        """What problems may have as their source of which a rule speaks as `name`."""
        return frozenset([name, *(source_of(source, "train") for source in self.sources if _is_called(source, name))])


def _names_of(source: RowsSource) -> list[str]:
    """What a rule may call a source."""
    place = source.name if isinstance(source, HubConfig) else str(source.path)
    return [name for name in (source.dataset, place) if name is not None]


def _is_called(source: RowsSource, name: str) -> bool:
    if source.dataset == "strop":
        return False  # its rows say themselves where they come from
    return name in _names_of(source) or (not isinstance(source, HubConfig) and str(source.path).endswith(f"/{name}"))

"""Says in a recipe where tasks come from."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config
from strop.tasks.published import COUNTDOWN_WORDING, PUBLISHED

Split: TypeAlias = Literal["train", "test"]


class ArithmeticConfig(Config):
    """Generated sums, differences and products."""

    kind: Literal["arithmetic"] = "arithmetic"
    num_terms: int = Field(default=3, ge=2, le=10)
    min_digits: int = Field(default=1, ge=1)  # of each operand
    max_digits: int = Field(default=2, ge=1, le=12)
    operators: tuple[Literal["+", "-", "*"], ...] = Field(default=("+", "-", "*"), min_length=1)
    wording: str = "What is {expression}?"

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.min_digits > self.max_digits:
            raise ValueError(
                f"min_digits is {self.min_digits} but max_digits is {self.max_digits}: no operand has both. Lower min_digits."
            )
        if self.wording.count("{expression}") != 1:
            raise ValueError(f"wording is {self.wording!r}: it must hold {{expression}} once, where the expression goes.")
        return self


class CountdownConfig(Config):
    """Numbers and a target, which an expression of all the numbers reaches. More and larger numbers are harder."""

    kind: Literal["countdown"] = "countdown"
    min_numbers: int = Field(default=3, ge=2, le=10)  # Countdown-Tasks-3to4 (Pan et al., 2025): three or four
    max_numbers: int = Field(default=4, ge=2, le=10)
    min_value: int = Field(default=1, ge=0, le=10**6)  # of each number
    max_value: int = Field(default=99, ge=1, le=10**6)
    min_target: int = Field(default=10, ge=0)
    max_target: int = Field(default=100, ge=0, le=10**9)
    operators: tuple[Literal["+", "-", "*", "/"], ...] = Field(default=("+", "-", "*", "/"), min_length=1)  # of the solution
    wording: str = COUNTDOWN_WORDING

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        for name in ("numbers", "value", "target"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low > high:
                raise ValueError(f"min_{name} is {low} but max_{name} is {high}: nothing lies between them. Lower min_{name}.")
        for place in ("{numbers}", "{target}"):
            if self.wording.count(place) != 1:
                raise ValueError(f"wording is {self.wording!r}: it must hold {place} once, where it goes.")
        return self


class LookupConfig(Config):
    """Numbers to be found in a corpus and computed with: no tool alone is enough."""

    kind: Literal["lookup"] = "lookup"
    path: Path  # the corpus, a .jsonl that the search tool reads too
    operators: tuple[Literal["+", "-", "*"], ...] = Field(default=("+", "-", "*"), min_length=1)
    min_operand: int = Field(default=10, ge=0)  # of what is computed with the number
    max_operand: int = Field(default=99, ge=1, le=10**6)
    wording: str = "What is the {attribute} of {subject}, then {operation}?"

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.min_operand > self.max_operand:
            raise ValueError(
                f"min_operand is {self.min_operand} but max_operand is {self.max_operand}: nothing lies between them. Lower"
                " min_operand."
            )
        for place in ("{attribute}", "{subject}", "{operation}"):
            if self.wording.count(place) != 1:
                raise ValueError(f"wording is {self.wording!r}: it must hold {place} once, where it goes.")
        return self


class Columns(Config):
    """Which columns of a row make a task, and which rows are left out."""

    newer: ClassVar[tuple[str, ...]] = ("where",)

    dataset: str | None = None  # a published data set, whose columns are known: gsm8k, math500, dapo-math-17k, ...
    question: str = "question"
    answer: str = "answer"
    answer_after: str = ""  # the answer is what follows the last of these marks in its column; GSM8K's is "####"
    facts: tuple[str, ...] = ()  # further columns to carry along, for rewards and reports
    # Columns, and the values of rows that are read; others are counted in a warning. Unset: as `dataset` is published.
    where: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] | None = None
    max_question_chars: int | None = Field(default=None, ge=1)
    max_solution_steps: int | None = Field(default=None, ge=0)  # GSM8K's calculations, written <<48/2=24>>
    limit: int | None = Field(default=None, ge=1)  # the first rows of those that are left
    bad_rows: Literal["error", "skip"] = (
        "error"  # of rows without a question or an answer; skipped ones are counted in a warning
    )

    @property
    def rows_where(self) -> Mapping[str, tuple[str, ...]]:
        """The columns that say whether a row is read, with the values of those that are."""
        if self.where is not None:
            return self.where
        return PUBLISHED[self.dataset].where if self.dataset is not None else {}

    @model_validator(mode="after")
    def _names_columns_once(self) -> Self:
        if self.dataset is not None and self.dataset not in PUBLISHED:
            nearest = difflib.get_close_matches(self.dataset, PUBLISHED, n=1, cutoff=0.4)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"dataset is {self.dataset!r}, which is not one of {', '.join(PUBLISHED)}.{hint}")
        # A recipe that was written out whole holds every default, so being set is not enough.
        fields = type(self).model_fields
        named = [key for key in ("question", "answer", "answer_after") if getattr(self, key) != fields[key].default]
        if self.dataset is not None and named:
            raise ValueError(
                f"dataset is {self.dataset!r}, whose columns are known, but {named[0]} is set as well. Leave {named[0]} out, or"
                " leave dataset out and name the columns yourself."
            )
        return self

    @model_validator(mode="after")
    def _can_count_steps(self) -> Self:
        if self.max_solution_steps is not None and not self.answer_after and self.dataset is None:
            raise ValueError(
                f"max_solution_steps is {self.max_solution_steps}, but without answer_after a row has no solution to count"
                ' steps in. Set answer_after (GSM8K: "####").'
            )
        return self


class JsonlConfig(Columns):
    """Rows of a file, one JSON object a line."""

    kind: Literal["jsonl"] = "jsonl"
    path: Path
    test_path: Path | None = None


class ParquetConfig(Columns):
    """Rows of a Parquet file, or of all of a directory in the order of their names; needs the extra `data`."""

    kind: Literal["parquet"] = "parquet"
    path: Path
    test_path: Path | None = None


class HubConfig(Columns):
    """A data set of the Hugging Face hub, or a directory that `datasets` loads; needs the extra `data`."""

    kind: Literal["hub"] = "hub"
    name: str | None = None  # by default where `dataset` is published
    subset: str | None = None  # likewise
    revision: str | None = None  # a commit or a tag, so that a run can be repeated; else the newest when a stage begins
    train_split: str | None = None  # by default "train", or as `dataset` is published
    test_split: str | None = None  # likewise, "test"

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if self.name is None and self.dataset is None:
            raise ValueError("neither name nor dataset is set: set name to a data set of the hub, or dataset to a known one.")
        return self


class PythonTasksConfig(Config):
    """A user's own source: a function (seed, split) -> `TaskSource`, called with both by name."""

    kind: Literal["python"] = "python"
    source: str  # module:name


TaskConfig: TypeAlias = Annotated[
    ArithmeticConfig | CountdownConfig | LookupConfig | JsonlConfig | ParquetConfig | HubConfig | PythonTasksConfig,
    Field(discriminator="kind"),
]

"""The tables of a recipe that say where tasks come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config
from strop.errors import did_you_mean
from strop.registry import OrOwn
from strop.run_directory import shortened
from strop.tasks.protocol import TaskSource
from strop.tasks.published import COUNTDOWN_WORDING, PUBLISHED


def _check_wording(wording: str, *places: str) -> None:
    for place in places:
        if wording.count(place) != 1:
            raise ValueError(f"wording is {shortened(repr(wording))}: it must hold {place} once, where it goes.")


def _check_ranges(config: Config, *names: str) -> None:
    for name in names:
        low, high = getattr(config, f"min_{name}"), getattr(config, f"max_{name}")
        if low > high:
            raise ValueError(f"min_{name} is {low} but max_{name} is {high}: nothing lies between them. Lower min_{name}.")


class ArithmeticConfig(Config):
    """Generated sums, differences and products."""

    kind: Literal["arithmetic"] = "arithmetic"
    num_terms: int = Field(default=3, ge=2, le=10, description="Operands of an expression.")
    min_digits: int = Field(default=1, ge=1, le=12, description="Fewest digits of an operand.")
    max_digits: int = Field(default=2, ge=1, le=12, description="Most digits of an operand.")
    operators: tuple[Literal["+", "-", "*"], ...] = Field(
        default=("+", "-", "*"), min_length=1, description="Operators that expressions are made of."
    )
    wording: str = Field(default="What is {expression}?", description="The question, with {expression} once.")

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        _check_ranges(self, "digits")
        _check_wording(self.wording, "{expression}")
        return self


class CountdownConfig(Config):
    """Numbers and a target, which an expression of all the numbers reaches. More and larger numbers are harder."""

    kind: Literal["countdown"] = "countdown"
    # Countdown-Tasks-3to4 (Pan et al., 2025) has three or four numbers.
    min_numbers: int = Field(default=3, ge=2, le=10, description="Fewest numbers of a task.")
    max_numbers: int = Field(default=4, ge=2, le=10, description="Most numbers of a task.")
    max_value: int = Field(default=99, ge=1, le=10**6, description="Largest value of a number.")
    min_target: int = Field(default=10, ge=0, le=10**9, description="Smallest target.")
    max_target: int = Field(default=100, ge=0, le=10**9, description="Largest target.")
    operators: tuple[Literal["+", "-", "*", "/"], ...] = Field(
        default=("+", "-", "*", "/"), min_length=1, description="Operators of the solution that each task is made from."
    )
    wording: str = Field(default=COUNTDOWN_WORDING, description="The question, with {numbers} and {target} once each.")

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        _check_ranges(self, "numbers", "target")
        _check_wording(self.wording, "{numbers}", "{target}")
        return self


class LookupConfig(Config):
    """Numbers to find in a corpus and compute with: each task needs two tools."""

    kind: Literal["lookup"] = "lookup"
    path: Path = Field(description="The corpus: a .jsonl file, which the search tool reads too.")
    operators: tuple[Literal["+", "-", "*"], ...] = Field(
        default=("+", "-", "*"), min_length=1, description="Operators of the computation with the number that was found."
    )
    wording: str = Field(
        default="What is the {attribute} of {subject}, then {operation}?",
        description="The question, with {attribute}, {subject} and {operation} once each.",
    )

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        _check_wording(self.wording, "{attribute}", "{subject}", "{operation}")
        return self


class Columns(Config):
    """Which columns of a row make a task, and which rows are left out."""

    dataset: str | None = Field(
        default=None, description="A published data set whose columns are known: gsm8k, math500, dapo-math-17k, ..."
    )
    question: str = Field(default="question", description="Column of the question.")
    answer: str = Field(default="answer", description="Column of the answer.")
    answer_after: str = Field(
        default="", description='The answer is what follows the last of these marks in its column; "####" for GSM8K.'
    )
    facts: tuple[str, ...] = Field(default=(), description="Further columns that tasks keep, for rewards and reports.")
    where: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] | None = Field(
        default=None,
        description="Columns with the values of rows that are read; others are counted in a warning. Unset: as published.",
    )
    max_question_chars: int | None = Field(default=None, ge=1, le=10**9, description="Leave out longer questions.")
    max_solution_steps: int | None = Field(
        default=None, ge=0, le=10**9, description="Leave out solutions with more calculations, which GSM8K writes <<48/2=24>>."
    )
    limit: int | None = Field(default=None, ge=1, le=10**9, description="Read only this many of the rows that are left.")
    bad_rows: Literal["error", "skip"] = Field(
        default="error", description="What a row without a question or an answer does; skipped rows are counted in a warning."
    )

    @property
    def rows_where(self) -> Mapping[str, tuple[str, ...]]:
        """Columns with the values of the rows that are read."""
        if self.where is not None:
            return self.where
        return PUBLISHED[self.dataset].where if self.dataset is not None else {}

    @model_validator(mode="after")
    def _names_columns_once(self) -> Self:
        if self.dataset is not None and self.dataset not in PUBLISHED:
            hint = did_you_mean(self.dataset, PUBLISHED)
            raise ValueError(f"dataset is {self.dataset!r}, which is not one of {', '.join(PUBLISHED)}.{hint}")
        # A recipe that was written by strop holds every default, so a set key is not enough.
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
    path: Path = Field(description="The file.")
    test_path: Path | None = Field(default=None, description="A file of test rows, which are not trained on.")


class ParquetConfig(Columns):
    """Rows of a Parquet file, or of all files of a directory in the order of their names; needs the extra `data`."""

    kind: Literal["parquet"] = "parquet"
    path: Path = Field(description="The file or directory.")
    test_path: Path | None = Field(default=None, description="A file or directory of test rows, which are not trained on.")


class HubConfig(Columns):
    """A data set of the Hugging Face hub, or a directory that `datasets` loads; needs the extra `data`."""

    kind: Literal["hub"] = "hub"
    name: str | None = Field(default=None, description="The data set; by default the one of `dataset`.")
    subset: str | None = Field(default=None, description="Its configuration; by default the one of `dataset`.")
    revision: str | None = Field(
        default=None, description="A commit or tag, so that a run can be repeated; by default the newest when a stage starts."
    )
    train_split: str | None = Field(default=None, description='By default "train", or as `dataset` is published.')
    test_split: str | None = Field(default=None, description='By default "test", or as `dataset` is published.')

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if self.name is None and self.dataset is None:
            raise ValueError("neither name nor dataset is set: set name to a data set of the hub, or dataset to a known one.")
        return self


def _table_of(word: str) -> dict[str, str]:
    """The table that a word stands for: a file of rows, or a kind."""
    kind = {".jsonl": "jsonl", ".parquet": "parquet"}.get(Path(word).suffix)
    return {"kind": word} if kind is None else {"kind": kind, "path": word}


_BuiltIn: TypeAlias = ArithmeticConfig | CountdownConfig | LookupConfig | JsonlConfig | ParquetConfig | HubConfig
if TYPE_CHECKING:
    TaskConfig: TypeAlias = _BuiltIn | TaskSource
else:
    TaskConfig = Annotated[Annotated[_BuiltIn, Field(discriminator="kind")], OrOwn(TaskSource, _table_of)]

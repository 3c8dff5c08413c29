"""Makes one set of several: all rows or a number of each, without replacement and in a seeded order."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field, PositiveInt, model_validator

from strop.errors import TaskError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, Product, Stage, StageResult
from strop.run_directory import iter_lines
from strop.stages.context import StageContext, product_of
from strop.tasks.files import RowFile, writing_rows


class Mix(Stage):
    """One set of several, drawn without replacement and shuffled by the recipe's seed."""

    makes = Product.SAME
    reads = (Product.TASKS, Product.CONVERSATIONS)

    class Config(Stage.Config):
        """Keys of `kind = "mix"`."""

        data: tuple[str, ...] = Field(min_length=1, description="Stages whose rows are mixed.")
        counts: dict[str, PositiveInt] | None = Field(default=None, description="Number of rows by stage. Default: all rows.")

        @model_validator(mode="after")
        def _says_how_many_once(self) -> Self:
            if repeated := sorted({name for name in self.data if self.data.count(name) > 1}):
                raise ValueError(f"data names {', '.join(repeated)} twice, but rows are drawn without replacement.")
            if self.counts is not None and set(self.counts) != set(self.data):
                named, data = ", ".join(sorted(self.counts)), ", ".join(sorted(self.data))
                raise ValueError(f"counts names {named}, but data names {data}.")
            return self

    config: Config

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        counts = self.config.counts or {}
        return Estimate(arithmetic=", ".join(f"{name} {counts.get(name, 'all')}" for name in self.config.data))

    async def run(self, context: StageContext) -> StageResult:
        """Draw and write. Raises `TaskError` if a stage made fewer rows than are asked for."""
        context.started(1, 0)
        num_rows: dict[str, int] = {}

        def rows_of_all() -> Iterator[dict[str, Any]]:
            for name in self.config.data:
                num_rows[name] = 0
                for row in iter_lines(product_of(context.run, name)):
                    num_rows[name] += 1
                    yield row

        with RowFile(rows_of_all()) as rows:
            counts, drawn, start = self.config.counts or num_rows, array("Q"), 0
            for name, num in num_rows.items():
                if counts[name] > num:
                    raise TaskError(
                        f"stages.{context.name}: {counts[name]} rows of {name!r} are asked for, but it made {num}. Lower"
                        f" the count, or let {name!r} make more."
                    )
                draw = random.Random(context.seed("draw", name))
                drawn.extend(start + number for number in draw.sample(range(num), counts[name]))
                start += num
            random.Random(context.seed("order")).shuffle(drawn)
            with writing_rows(context.directory.kept) as add:
                for number in drawn:
                    add(rows[number])
        parts = ", ".join(f"{counts[name]} of {num} of {name}" for name, num in num_rows.items())
        return StageResult(summary=f"{len(drawn)} rows: {parts}", product=context.directory.kept)

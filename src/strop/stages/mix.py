"""Makes one set of several: all rows, counts, or shares of a total, without replacement and in a seeded order."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from strop.errors import TaskError
from strop.recipe.graph import Product
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, Stage, StageResult
from strop.run_directory import iter_lines
from strop.stages.context import StageContext, product_of
from strop.stages.data import kept_path
from strop.tasks.files import RowFile, writing_rows


class Mix(Stage):
    """One set of several, drawn without replacement and shuffled by the recipe's seed."""

    makes = Product.SAME
    reads = (Product.TASKS, Product.CONVERSATIONS)

    class Config(Stage.Config):
        """Keys of `kind = "mix"`."""

        data: tuple[str, ...] = Field(min_length=1, description="Stages whose rows are mixed.")
        counts: dict[str, int] | None = Field(default=None, description="Number of rows by stage. Default: all rows.")
        shares: dict[str, float] | None = Field(default=None, description="Shares of `total` by stage, with sum 1.")
        total: int | None = Field(default=None, ge=1, description="Number of rows, if `shares` is set.")

        @model_validator(mode="after")
        def _says_how_many_once(self) -> Self:
            if repeated := sorted({name for name in self.data if self.data.count(name) > 1}):
                raise ValueError(f"data names {', '.join(repeated)} twice, but rows are drawn without replacement.")
            if self.counts is not None and self.shares is not None:
                raise ValueError("give counts (rows of each stage) or shares of total, and not both.")
            if (self.shares is None) != (self.total is None):
                raise ValueError("shares are of total: give both, or neither.")
            for key, named in (("counts", self.counts), ("shares", self.shares)):
                if named is not None and set(named) != set(self.data):
                    raise ValueError(f"{key} names {', '.join(sorted(named))}, but data names {', '.join(sorted(self.data))}.")
                if named is not None and any(value <= 0 for value in named.values()):
                    raise ValueError(f"{key} has a value of 0 or less. Leave that stage out of data and {key}.")
            if self.shares is not None and abs(sum(self.shares.values()) - 1) > 1e-6:
                raise ValueError(f"shares add up to {sum(self.shares.values()):g}. Make that 1.")
            return self

    config: Config

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        config = self.config
        wanted = config.counts or config.shares or dict.fromkeys(config.data, "all")
        arithmetic = ", ".join(f"{name} {share}" for name, share in wanted.items())
        return Estimate(arithmetic=arithmetic + (f" of {config.total} rows" if config.total else ""))

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
            counts, drawn, start = counts_of(self.config, num_rows), array("Q"), 0
            for name, num in num_rows.items():
                if counts[name] > num:
                    raise TaskError(
                        f"stages.{context.name}: {counts[name]} rows of {name!r} are asked for, but it made {num}. Lower"
                        f" the count (or share, or total), or let {name!r} make more."
                    )
                draw = random.Random(context.seed("draw", name))
                drawn.extend(start + number for number in draw.sample(range(num), counts[name]))
                start += num
            random.Random(context.seed("order")).shuffle(drawn)
            with writing_rows(kept_path(context.directory)) as add:
                for number in drawn:
                    add(rows[number])
        parts = ", ".join(f"{counts[name]} of {num} of {name}" for name, num in num_rows.items())
        return StageResult(summary=f"{len(drawn)} rows: {parts}", product=kept_path(context.directory))


def counts_of(stage: Mix.Config, available: Mapping[str, int]) -> Mapping[str, int]:
    """Return the number of rows of each stage. Counts from shares add up to `total`; the largest remainders are rounded up."""
    if stage.counts is not None:
        return stage.counts
    if stage.shares is None or stage.total is None:
        return available
    exact = {name: share * stage.total for name, share in stage.shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: stage.total - sum(counts.values())]:
        counts[name] += 1
    return counts

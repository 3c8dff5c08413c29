"""Settings of the measuring on what is held out while a stage trains, and the record of the best policy that it found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from strop.config import Config
from strop.rollout.player import Temperature
from strop.runs import read_json
from strop.tasks.config import Split


class HeldOutConfig(Config):
    """When the policy is measured, and what becomes of the best one."""

    every_steps: int = Field(ge=1)  # and after the last one
    keep_best: bool = True  # the most accurate policy so far as a model directory
    product: Literal["last", "best"] = "last"  # which policy the stage hands on

    @model_validator(mode="after")
    def _hands_on_what_it_keeps(self) -> Self:
        if self.product == "best" and not self.keep_best:
            raise ValueError("product is 'best', but keep_best is false: there would be no such model. Set keep_best = true.")
        return self

    def is_due(self, step: int, *, last: int) -> bool:
        return step % self.every_steps == 0 or step == last


class ValidationConfig(HeldOutConfig):
    """The policy is measured by playing held-out tasks."""

    split: Split = "test"
    num_tasks: int = Field(default=100, ge=1)
    k: int = Field(default=1, ge=1)  # rollouts of each task
    temperature: Temperature | None = None  # the stage's own when unset


RECORD = "validation.json"
"""In the directory of the best policy: the step that it is of, and what was found of it."""


def is_better(best: Path, found: Mapping[str, Any]) -> bool:
    """Whether a policy of which this was found beats the one in `best`, where there is one.

    It does by its `accuracy`, of equally accurate ones by a lower `loss` where that is measured; of equals the first stays.
    """
    return not (best / RECORD).exists() or _rank(found) > _rank(read_json(best / RECORD))


def _rank(found: Mapping[str, Any]) -> tuple[float, float]:
    return float(found["accuracy"]), -float(found.get("loss", 0.0))

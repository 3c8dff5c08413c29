"""A rule over what the steps and validations of a stage of rollouts found, as `end_when` and the schedule have them.

Whether a rule holds follows from the metrics of the steps so far, so a run that resumes comes to the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config

Steps: TypeAlias = Sequence[Mapping[str, Any]]
"""The lines of metrics.jsonl of one stage, in order."""

TRUNCATED, ACCURACY = "rollout/truncated_fraction", "validation/accuracy"
_KINDS = ("truncated_above", "truncated_below", "plateau_of")


class MetricRule(Config):
    """One thing to wait for: more or fewer rollouts that run out of tokens, or held-out accuracy that rises no more."""

    newer: ClassVar[tuple[str, ...]] = ("truncated_below",)

    truncated_above: float | None = Field(default=None, ge=0, lt=1)  # mean share of the last `over_steps` steps
    truncated_below: float | None = Field(default=None, gt=0, le=1)  # likewise
    over_steps: int = Field(default=1, ge=1)
    plateau_of: int | None = Field(default=None, ge=1)  # validations in a row without a gain over the best before them
    min_gain: float = Field(default=0.0, ge=0, lt=1)  # of accuracy; what is no more than this is no gain
    from_step: int = Field(default=1, ge=1)  # before this one it does not hold

    @model_validator(mode="after")
    def _is_one_rule(self) -> Self:
        if sum(getattr(self, kind) is not None for kind in _KINDS) != 1:
            raise ValueError(f"a rule has one of {', '.join(_KINDS)}. Keep one; make a rule of each other.")
        if self.plateau_of is not None and self.over_steps != 1:
            raise ValueError(
                "over_steps belongs to truncated_above and truncated_below; plateau_of counts validations. Leave it out."
            )
        if self.plateau_of is None and self.min_gain != 0:
            raise ValueError("min_gain belongs to plateau_of. Leave it out.")
        return self

    @property
    def what(self) -> str:
        """As a recipe says it: `plateau_of = 3, min_gain = 0.01`."""
        given = self.model_dump(exclude_defaults=True)
        return ", ".join(f"{key} = {value}" for key, value in given.items())

    def first_step(self, every_steps: int | None, *, behind: int = 0) -> int:
        """The first step after which it could hold, where validations come every so many steps.

        Of the steps it reads those behind step `behind`.
        """
        if self.plateau_of is None:
            return max(self.from_step, behind + self.over_steps)
        every = every_steps or 1
        return max(self.from_step, (behind // every + self.plateau_of + 1) * every)

    def why_blind(self, *, is_validated: bool, has_verdict: bool) -> str:
        """Why a stage never logs what it reads; empty where it does.

        Args:
            is_validated: whether the stage measures its policy on held-out tasks.
            has_verdict: whether its reward says what is right.
        """
        if self.plateau_of is None:
            return ""
        if not is_validated:
            return "the stage has no validation. Give it one (validation.every_steps)"
        if not has_verdict:
            return "no part of its reward says what is right. Give it one that compares answers"
        return ""

    def why_holds(self, steps: Steps) -> str:
        """What holds after `steps`, in words; empty where it does not."""
        if not steps or int(steps[-1]["step"]) < self.from_step:
            return ""
        return self._why_truncated(steps) if self.plateau_of is None else self._why_plateau(steps)

    def _why_truncated(self, steps: Steps) -> str:
        shares = [float(line[TRUNCATED]) for line in steps if TRUNCATED in line][-self.over_steps :]
        if len(shares) < self.over_steps:
            return ""
        mean = sum(shares) / len(shares)
        is_above = self.truncated_above is not None and mean > self.truncated_above
        is_below = self.truncated_below is not None and mean < self.truncated_below
        if not (is_above or is_below):
            return ""
        over = f"of the last {self.over_steps} steps" if self.over_steps > 1 else "of the step"
        return f"{mean:.1%} of the rollouts {over} were truncated ({self.what})"

    def _why_plateau(self, steps: Steps) -> str:
        found = [float(line[ACCURACY]) for line in steps if ACCURACY in line]
        if self.plateau_of is None or len(found) <= self.plateau_of:
            return ""
        before, latest = max(found[: -self.plateau_of]), max(found[-self.plateau_of :])
        if latest > before + self.min_gain:
            return ""
        later = f"{self.plateau_of} validations" if self.plateau_of > 1 else "validation"
        return f"held-out accuracy was {before:.1%} at its best, and at most {latest:.1%} in the {later} since ({self.what})"

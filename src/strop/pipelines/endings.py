"""What ends a stage of rollouts before its last step: rules over what its steps and validations found.

Whether a rule holds follows from the metrics of the steps so far, so a run that resumes comes to the same end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config

Steps: TypeAlias = Sequence[Mapping[str, Any]]
"""The lines of metrics.jsonl of one stage, in order."""

TRUNCATED, ACCURACY = "rollout/truncated_fraction", "validation/accuracy"


class EndRule(Config):
    """One reason to end the stage: too many rollouts that run out of tokens, or held-out accuracy that rises no more."""

    truncated_above: float | None = Field(default=None, ge=0, lt=1)  # mean share of the last `over_steps` steps
    over_steps: int = Field(default=1, ge=1)
    plateau_of: int | None = Field(default=None, ge=1)  # validations in a row without a gain over the best before them
    min_gain: float = Field(default=0.0, ge=0, lt=1)  # of accuracy; what is no more than this is no gain
    from_step: int = Field(default=1, ge=1)  # before this one it ends nothing

    @model_validator(mode="after")
    def _is_one_rule(self) -> Self:
        if (self.truncated_above is None) == (self.plateau_of is None):
            raise ValueError("a rule has one of truncated_above, plateau_of. Keep one; make a rule of each other.")
        if self.truncated_above is None and self.over_steps != 1:
            raise ValueError("over_steps belongs to truncated_above; plateau_of counts validations. Leave over_steps out.")
        if self.plateau_of is None and self.min_gain != 0:
            raise ValueError("min_gain belongs to plateau_of. Leave it out.")
        return self

    @property
    def what(self) -> str:
        """As a recipe says it: `plateau_of = 3, min_gain = 0.01`."""
        given = self.model_dump(exclude_defaults=True)
        return ", ".join(f"{key} = {value}" for key, value in given.items())

    def first_step(self, every_steps: int | None) -> int:
        """The first step after which it could hold, where validations come every so many steps."""
        shortest = self.over_steps if self.plateau_of is None else (self.plateau_of + 1) * (every_steps or 1)
        return max(self.from_step, shortest)

    def why_over(self, steps: Steps) -> str:
        """What holds after `steps`, in words; empty where nothing does."""
        if not steps or int(steps[-1]["step"]) < self.from_step:
            return ""
        return self._why_truncated(steps) if self.plateau_of is None else self._why_plateau(steps)

    def _why_truncated(self, steps: Steps) -> str:
        shares = [float(line[TRUNCATED]) for line in steps if TRUNCATED in line][-self.over_steps :]
        mean = sum(shares) / max(1, len(shares))
        if len(shares) < self.over_steps or self.truncated_above is None or mean <= self.truncated_above:
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
        return (
            f"held-out accuracy was {before:.1%} at its best, and at most {latest:.1%} in the {self.plateau_of} validations"
            f" since ({self.what})"
        )


def why_over(rules: Sequence[EndRule], steps: Steps) -> str:
    """Why the stage is over after `steps`, in words; empty where no rule holds."""
    return next((why for rule in rules if (why := rule.why_over(steps))), "")


def problem_with_ending(rules: Sequence[EndRule], *, steps: int, every_steps: int | None) -> str:
    """Why a rule cannot be what is meant for a stage of so many steps, validated every so many; empty where all can.

    `every_steps` is None where the stage has no validation.
    """
    for number, rule in enumerate(rules, start=1):
        if rule.plateau_of is not None and every_steps is None:
            return (
                f"end_when rule {number} ({rule.what}) is over held-out accuracy, but the stage has no validation. Give it one"
                " (validation.every_steps), or leave the rule out."
            )
        if (first := rule.first_step(every_steps)) >= steps:
            return (
                f"end_when rule {number} ({rule.what}) could hold after step {first} at the earliest, but the stage has {steps}"
                " steps, so it never ends a thing. Make it earlier, or raise steps."
            )
    return ""

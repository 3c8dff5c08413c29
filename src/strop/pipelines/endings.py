"""What ends a stage of rollouts before its last step: the first rule over the metrics of its steps that holds."""

from __future__ import annotations

from collections.abc import Sequence

from strop.pipelines.metric_rule import MetricRule, Steps


def why_over(rules: Sequence[MetricRule], steps: Steps) -> str:
    """Why the stage is over after `steps`, in words; empty where no rule holds."""
    return next((why for rule in rules if (why := rule.why_holds(steps))), "")


def problem_with_ending(rules: Sequence[MetricRule], *, steps: int, every_steps: int | None, has_verdict: bool) -> str:
    """Why a rule cannot be what is meant for a stage of so many steps, validated every so many; empty where all can.

    Args:
        every_steps: None where the stage has no validation.
        has_verdict: whether its reward says what is right.
    """
    for number, rule in enumerate(rules, start=1):
        if why := rule.why_blind(is_validated=every_steps is not None, has_verdict=has_verdict):
            return f"end_when rule {number} ({rule.what}) is over held-out accuracy, but {why}, or leave the rule out."
        if (first := rule.first_step(every_steps)) >= steps:
            return (
                f"end_when rule {number} ({rule.what}) could hold after step {first} at the earliest, but the stage has {steps}"
                " steps, so it never ends a thing. Make it earlier, or raise steps."
            )
    return ""

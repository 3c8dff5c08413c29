"""Turns the parts of a judgement into the one number that a method compares."""

from __future__ import annotations

from collections.abc import Mapping

from strop.types import ToolOutcome, Trajectory


def weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The sum of weight times part. A part without a weight does not count; a weight without a part is a `KeyError`."""
    return sum(weight * parts[name] for name, weight in weights.items())


def has_called(trajectory: Trajectory) -> bool:
    """Whether at least one tool call ran without an error of the policy's making."""
    return any(not call.outcome.is_error and call.outcome is not ToolOutcome.NOT_RUN for call in trajectory.calls)

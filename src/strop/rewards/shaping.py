"""Parts of a reward beside the answer itself."""

from __future__ import annotations

from strop.types import ToolOutcome, Trajectory


def has_called(trajectory: Trajectory) -> bool:
    """Whether at least one tool call ran without an error of the policy's making."""
    return any(not call.outcome.is_error and call.outcome is not ToolOutcome.NOT_RUN for call in trajectory.calls)

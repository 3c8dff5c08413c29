"""Parts of a reward beside the answer itself."""

from __future__ import annotations

from strop.types import Trajectory


def has_called(trajectory: Trajectory) -> bool:
    """Whether at least one tool call ran without an error of the policy's making."""
    return any(call.outcome.is_dispatched and not call.outcome.is_error for call in trajectory.calls)

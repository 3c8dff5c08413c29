"""Trajectories and groups made by hand, as small as a method can tell apart."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest

from strop.types import (
    Completion,
    FinishReason,
    Group,
    RolloutKey,
    ScoredTrajectory,
    StopReason,
    Task,
    ToolCall,
    ToolOutcome,
    Trajectory,
    Turn,
)

MakeTrajectory: TypeAlias = Callable[..., Trajectory]
MakeGroup: TypeAlias = Callable[..., Group]


@pytest.fixture
def make_trajectory() -> MakeTrajectory:
    """One trajectory from (text, outcomes of its calls) of each turn; a prompt of 1 id and 2 ids a completion."""

    def make(
        turns: Sequence[tuple[str, Sequence[ToolOutcome]]] = (("<answer>1</answer>", ()),), *, attempt: int = 0
    ) -> Trajectory:
        return Trajectory(
            key=RolloutKey(task_index=7, attempt=attempt),
            task_id="sum",
            prompt_ids=(5,),
            turns=tuple(
                Turn(
                    completion=Completion(
                        ids=(8, 9),
                        logprobs=(-1.0, -2.0),
                        entropies=(),
                        is_forced=(False, False),
                        spans=((0, 2),),
                        finish_reason=FinishReason.STOP,
                        cached_tokens=0,
                    ),
                    calls=tuple(
                        ToolCall(name="python", arguments="{}", outcome=outcome, text="", duration_s=0.0)
                        for outcome in outcomes
                    ),
                    observation_ids=(),
                    completion_text=text,
                    observation_text="<answer>not the policy's</answer>",
                )
                for text, outcomes in turns
            ),
            stop_reason=StopReason.ANSWERED,
        )

    return make


@pytest.fixture
def make_group(make_trajectory: MakeTrajectory) -> MakeGroup:
    """A group with these rewards; trajectory `n` makes `errors[n]` of 4 calls wrong and answers once."""

    def make(rewards: Sequence[float], errors: Sequence[int] | None = None) -> Group:
        of_each = errors if errors is not None else [0] * len(rewards)
        scored = []
        for attempt, (reward, num_errors) in enumerate(zip(rewards, of_each, strict=True)):
            outcomes = [ToolOutcome.ERROR] * num_errors + [ToolOutcome.STDOUT] * (4 - num_errors)
            trajectory = make_trajectory([("", outcomes), ("<answer>1</answer>", ())], attempt=attempt)
            scored.append(ScoredTrajectory(trajectory=trajectory, reward=reward, reward_parts={}))
        task = Task(id="sum", question="?", answer="1", source="by hand")
        return Group(task=task, task_index=7, trajectories=tuple(scored))

    return make

"""Scored attempts by hand: what an attempt said, whether it was right, how long it was, which calls it made."""

from strop.types import (
    Completion,
    FinishReason,
    Group,
    RolloutKey,
    ScoredTrajectory,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)


def attempt(said, *, right, number=0, length=5, calls=(), parts=None, stop_reason=StopReason.ANSWERED):
    """One turn that says `said`; `calls` are outcomes."""
    completion = Completion(
        ids=tuple(range(length)),
        logprobs=(-0.5,) * length,
        entropies=(),
        is_forced=(False,) * length,
        spans=((0, length),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )
    turn = Turn(
        completion=completion,
        calls=tuple(ToolCall(name="python", arguments="{}", outcome=outcome, text="", duration_s=0.1) for outcome in calls),
        observation_ids=(),
        completion_text=said,
        observation_text="",
    )
    trajectory = Trajectory(
        key=RolloutKey(task_index=0, attempt=number), task_id="t", prompt_ids=(1,), turns=(turn,), stop_reason=stop_reason
    )
    return ScoredTrajectory(trajectory=trajectory, reward=float(right), reward_parts=parts or {"accuracy": float(right)})


def boxed(answer):
    return f"<answer>\\boxed{{{answer}}}</answer>"


def group_of(*attempts, question="1 + 1?", answer="2", facts=None, num_void=0):
    task = Task(id="t", question=question, answer=answer, source="by hand", facts=facts or {})
    return Group(task=task, task_index=0, trajectories=attempts, num_void=num_void)

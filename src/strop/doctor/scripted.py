"""Trajectories that no engine sampled: they hold what a policy might say."""

from __future__ import annotations

from strop.types import (
    Completion,
    FinishReason,
    RolloutKey,
    StopReason,
    Task,
    ToolCall,
    ToolOutcome,
    Trajectory,
    Turn,
)


def answered(answer: str) -> str:
    r"""Return a text in which every grader finds `answer`: behind thoughts, in a box, inside the one pair of answer tags."""
    return rf"<think>So it is.</think> <answer>\boxed{{{answer}}}</answer>"


def completion_of(ids: tuple[int, ...]) -> Completion:
    """Return a completion as an engine reports it, with a log-prob of -1 for each token."""
    return Completion(
        ids=ids,
        logprobs=(-1.0,) * len(ids),
        entropies=(1.0,) * len(ids),
        is_forced=(False,) * len(ids),
        policy_version=0,
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )


def trajectory_of(
    task: Task,
    text: str,
    *,
    observed: str = "",
    stop_reason: StopReason = StopReason.ANSWERED,
    ids: tuple[int, ...] = (),
    key: RolloutKey | None = None,
) -> Trajectory:
    """Return a trajectory whose last turn says `text`, after a turn in which a tool answered `observed`."""
    call = ToolCall(name="python", arguments="{}", outcome=ToolOutcome.STDOUT, text=observed, duration_s=0.0)
    before = _turn("", (), (call,), observed)
    last = _turn(text, ids, (), "")
    return Trajectory(
        key=key or RolloutKey(task_index=0, attempt=0),
        task_id=task.id,
        prompt_ids=ids[:1],
        turns=(before, last) if observed else (last,),
        stop_reason=stop_reason,
    )


def _turn(text: str, ids: tuple[int, ...], calls: tuple[ToolCall, ...], observed: str) -> Turn:
    return Turn(completion=completion_of(ids), calls=calls, observation_ids=(), completion_text=text, observation_text=observed)

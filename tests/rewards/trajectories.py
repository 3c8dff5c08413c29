"""Trajectories for judges, made of what the policy wrote and what its tools said."""

from strop.types import Completion, FinishReason, RolloutKey, StopReason, Task, ToolCall, ToolOutcome, Trajectory, Turn

TASK = Task(id="t", question="What is 8*9?", answer="72", source="test")


def turn(text, *calls, observation=""):
    completion = Completion(
        ids=(), logprobs=(), entropies=(), is_forced=(), spans=(), finish_reason=FinishReason.STOP, cached_tokens=0
    )
    return Turn(completion=completion, calls=calls, observation_ids=(), completion_text=text, observation_text=observation)


def called(outcome=ToolOutcome.STDOUT):
    return ToolCall(name="python", arguments="{}", outcome=outcome, text="", duration_s=0.0)


def trajectory(*turns, stop_reason=StopReason.ANSWERED):
    turns = tuple(turn(one) if isinstance(one, str) else one for one in turns)
    return Trajectory(key=RolloutKey(task_index=0, attempt=0), task_id="t", prompt_ids=(), turns=turns, stop_reason=stop_reason)

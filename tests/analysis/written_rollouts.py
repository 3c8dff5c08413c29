"""Trajectories written by hand: each token is a text, an entropy, and maybe a mark that it was forced."""

from strop.types import Completion, FinishReason, RolloutKey, StopReason, ToolCall, ToolOutcome, Trajectory, Turn


def turn(tokens, *outcomes, observed=1):
    """`tokens`: (text, entropy) or (text, entropy, "forced"); `outcomes` of the calls at its end."""
    completion = Completion(
        ids=tuple(range(len(tokens))),
        logprobs=(0.0,) * len(tokens),
        entropies=tuple(token[1] for token in tokens),
        is_forced=tuple("forced" in token for token in tokens),
        spans=((0, len(tokens)),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )
    text = "".join(token[0] for token in tokens)
    calls = tuple(
        ToolCall(name="python", arguments="{}", outcome=ToolOutcome(each), text="", duration_s=0.0) for each in outcomes
    )
    return Turn(completion=completion, calls=calls, observation_ids=(7,) * observed, completion_text=text, observation_text="")


def rollout(*turns, branch=0, forked_at=0):
    """A trajectory of pairs (tokens, outcomes), and the texts of its tokens."""
    made = tuple(turn(tokens, *outcomes) for tokens, outcomes in turns)
    key = RolloutKey(task_index=0, attempt=0, branch=branch)
    parent = RolloutKey(task_index=0, attempt=0) if branch else None
    trajectory = Trajectory(
        key=key,
        task_id="t",
        prompt_ids=(1,),
        turns=made,
        stop_reason=StopReason.ANSWERED,
        parent=parent,
        forked_at=forked_at,
    )
    return trajectory, [[token[0] for token in tokens] for tokens, _ in turns]


CALL = [("<tool_call>", 0.0), ("{}", 0.4), ("</tool_call>", 0.2)]

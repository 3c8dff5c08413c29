"""Plays a demonstrator's script in a real environment, so that demonstrations look exactly like rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strop.rollout.call_format import CallFormat
from strop.rollout.chat import ChatFormat
from strop.rollout.protocol import EnvironmentFactory
from strop.rollout.retelling import retold, said_ids
from strop.types import Completion, FinishReason, RolloutKey, StopReason, Task, Trajectory, Turn


async def demonstrate(
    task: Task,
    key: RolloutKey,
    replies: Sequence[Callable[[str], str]],
    *,
    environments: EnvironmentFactory,
    chat: ChatFormat,
    calls: CallFormat,
    max_tokens: int,
    seed: int,
) -> Trajectory:
    """The conversation in which `replies` answer the real observations, one after the other.

    Replies have JSON calls, told in the form of `calls`. Completions are the demonstrator's tokens: encoded once, with the end
    of turn unless sampling would stop at a call, log-probs 0 and policy version 0. The conversation ends where the script or
    the environment ends it.

    Raises:
        Unreadable: `calls` cannot tell a reply.
        MachineError: a tool broke.
    """
    environment = environments(task, seed=seed)
    try:
        opening = await environment.start()
        turns: list[Turn] = []
        observed = ""
        num_left = max_tokens
        stop_reason = StopReason.ANSWERED
        for reply in replies:
            said = reply(observed)
            if calls.continues_turn:  # else calls stand as they are, the wrong ones too: what is wrong with them is told
                said, _ = retold(said, calls)
            completion = _spoken(said_ids(said, chat, calls))
            num_left -= len(completion.ids)
            observation = await environment.step(completion, num_tokens_left=max(0, num_left))
            num_left -= len(observation.ids)
            turns.append(
                Turn(
                    completion=completion,
                    calls=observation.calls,
                    observation_ids=observation.ids,
                    completion_text=observation.completion_text,
                    observation_text=observation.text,
                )
            )
            observed = observation.text
            if observation.stop_reason is not None:
                stop_reason = observation.stop_reason
                break
        return Trajectory(key=key, task_id=task.id, prompt_ids=opening.ids, turns=tuple(turns), stop_reason=stop_reason)
    finally:
        await environment.close()


def _spoken(ids: tuple[int, ...]) -> Completion:
    return Completion(
        ids=ids,
        logprobs=(0.0,) * len(ids),
        entropies=(),
        is_forced=(False,) * len(ids),
        policy_version=0,
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )

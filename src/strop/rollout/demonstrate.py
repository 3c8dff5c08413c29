"""Plays a demonstrator's script in a real environment, so that demonstrations look like rollouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

from strop.rollout.chat_template import ChatFormat
from strop.rollout.environment import EnvironmentFactory
from strop.rollout.prompt import AnswerForm, Prompt
from strop.rollout.tool_calls import CLOSING, OPENING, Call, CallFormat, FailedCall, ParsedCall, parse_tool_calls
from strop.tasks.readers import Unreadable
from strop.types import Completion, RolloutKey, StopReason, Task, Trajectory, Turn

_GOES_ON = "a turn goes on behind its call, where sampling would stop"
_TAGS = re.compile(r"(?:</?(?:reason|answer)>)+")
_BOXED_ANSWER = re.compile(r"</reason><answer>\\boxed\{(.*)\}</answer>")
_MAX_CALLS = 1000  # of a turn: what a demonstrator wrote is not limited


def retold(text: str, calls: CallFormat) -> tuple[str, int]:
    """`text` with its JSON calls in the form of `calls`, and how many there are. Raises `Unreadable`."""
    found = _readable(parse_tool_calls(text, max_calls=_MAX_CALLS))
    if not calls.continues_turn:
        return text, len(found)
    if not found:
        return text, _num_own(text, calls)
    start = text.index(OPENING)
    if len(found) > 1 or not text.rstrip().endswith(CLOSING):
        raise Unreadable(_GOES_ON)
    [call] = found
    try:
        return text[:start] + calls.write(call.name, call.arguments), 1
    except ValueError as error:
        raise Unreadable(str(error)) from error


def in_form_of(prompt: Prompt, text: str) -> str:
    r"""`text`, which thinks in `<reason>` and answers in `<answer>\boxed{}`, in the form that the prompt asks for."""
    if prompt.graders == (AnswerForm.BOX,):
        return _TAGS.sub(" ", text).strip()
    if AnswerForm.R1_ZERO in prompt.graders:
        text = _BOXED_ANSWER.sub(r"</reason> <answer>\1</answer>", text)
    text = text.replace("<reason>", f"<{prompt.think_tag}>").replace("</reason>", f"</{prompt.think_tag}>")
    return text.removeprefix(f"<{prompt.think_tag}>") if prompt.raw.endswith(f"<{prompt.think_tag}>") else text


def stops_at_call(text: str, calls: CallFormat) -> bool:
    """Whether sampling ends such a turn at its call, and not at an end of turn: the tool answers in the middle of it."""
    return calls.continues_turn and calls.has_closed_call(text)


def said_ids(text: str, chat: ChatFormat, calls: CallFormat) -> tuple[int, ...]:
    """What would have been sampled where `text` is said in one turn."""
    ids = chat.completion_ids(text)
    return ids[:-1] if stops_at_call(text, calls) else ids


def _num_own(text: str, calls: CallFormat) -> int:
    """Calls that are in the form of `calls` already; one at most. Raises `Unreadable`."""
    found = _readable(calls.parse(text, max_calls=1))
    if found and not text.rstrip().endswith(calls.stop_strings):
        raise Unreadable(_GOES_ON)
    return len(found)


def _readable(calls: Sequence[Call]) -> list[ParsedCall]:
    """`calls`, if all of them can be tried. Raises `Unreadable`."""
    for call in calls:
        if isinstance(call, FailedCall):
            raise Unreadable(f"a call cannot be read: {call.text}")
    return [call for call in calls if isinstance(call, ParsedCall)]


async def demonstrate(
    task: Task,
    key: RolloutKey,
    script: Generator[str, str, None],
    *,
    environments: EnvironmentFactory,
    chat: ChatFormat,
    calls: CallFormat,
    max_tokens: int,
    seed: int,
    prefill: str = "",
    form: Callable[[str], str] = str,
) -> Trajectory:
    """The conversation in which `script` yields each turn, and is sent the real observation that answers it.

    JSON calls are rewritten in the form of `calls`. Completions are the demonstrator's tokens: encoded once, with the end of
    turn unless sampling would stop at a call, log-probs 0 and policy version 0. A turn need not begin with the prompt's
    `prefill`, and `form` puts it into the prompt's, as `in_form_of` does. The conversation ends where the script or the
    environment ends it.

    Raises:
        Unreadable: `calls` cannot write a call of a reply.
        MachineError: a tool broke.
    """
    environment = environments(task, seed=seed)
    try:
        opening = await environment.start()
        turns: list[Turn] = []
        num_left = max_tokens
        said = next(script)
        while True:
            said = form(said).removeprefix(prefill)
            if calls.continues_turn:  # else calls stay as they are, also wrong ones, which get an error
                said, _ = retold(said, calls)
            completion = Completion.spoken(said_ids(said, chat, calls))
            num_left -= len(completion.ids)
            observation = await environment.step(completion, num_tokens_left=max(0, num_left))
            num_left -= len(observation.ids)
            turns.append(observation.as_turn(completion))
            if observation.stop_reason is not None:
                break
            try:
                said = script.send(observation.text)
            except StopIteration:
                break
        stop_reason = observation.stop_reason or StopReason.ANSWERED
        return Trajectory(key=key, task_id=task.id, prompt_ids=opening.ids, turns=tuple(turns), stop_reason=stop_reason)
    finally:
        await environment.close()

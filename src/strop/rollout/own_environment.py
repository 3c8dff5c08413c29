"""Bases of environments of yours, in token ids or in texts."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Self

from strop import user_code
from strop.rollout.chat_template import ChatFormat, Message, Span
from strop.rollout.environment import Environment, EnvironmentKind, Observation, RolloutLimits, ToolEnvironments, ended
from strop.tools.protocol import encodable
from strop.types import Completion, FinishReason, StopReason, Task


class OwnEnvironment(EnvironmentKind):
    """Base of an environment of yours that speaks in token ids. Single use: one object is one rollout.

    Give `start` and `step`, as in `strop.rollout.environment.Environment`. `task`, `seed`, `chat` and `limits` are set.
    """

    task: Task
    seed: int
    chat: ChatFormat
    limits: RolloutLimits

    def for_rollout(self, shared: ToolEnvironments, task: Task, *, seed: int) -> Self:
        found = type(self)(self.config)
        found.task, found.seed, found.chat, found.limits = task, seed, shared.chat, shared.limits
        return found

    @abstractmethod
    async def start(self) -> Observation:
        """Return the prompt."""

    @abstractmethod
    async def step(self, completion: Completion, *, num_tokens_left: int) -> Observation:
        """Answer a completion. An answer of more than `num_tokens_left` ids is not given: the rollout overflows instead."""

    async def close(self) -> None:
        """Release what the rollout holds. Called also after an error; safe to call twice."""
        return None  # noqa: RET501 - a body, so that a subclass need not write one


class TextEnvironment(EnvironmentKind):
    """Base of an environment of yours that speaks in texts. Built once per rollout; the stage's reward reads the trajectory."""

    @abstractmethod
    def reset(self, task: Task) -> str:
        """Return the first message to the policy."""

    @abstractmethod
    def step(self, reply: str) -> tuple[str, bool]:
        """Return the answer to what the policy said, and whether the rollout ends with it."""

    def for_rollout(self, shared: ToolEnvironments, task: Task, *, seed: int) -> Environment:
        return TextRollout(type(self)(self.config), shared, task)

    def prompt_ids(self, shared: ToolEnvironments, task: Task) -> tuple[int, ...]:
        return TextRollout(type(self)(self.config), shared, task).opening().ids


class TextRollout:
    """One rollout with a `TextEnvironment`."""

    def __init__(self, environment: TextEnvironment, shared: ToolEnvironments, task: Task, *, num_turns: int = 0) -> None:
        self._environment, self._shared, self._task, self._num_turns = environment, shared, task, num_turns
        self._name, self._about = type(environment).__qualname__, f"for task {task.id!r}"

    def opening(self) -> Observation:
        """Return the prompt. Raises `ConfigError` if `reset` raises or returns something else."""
        reset, what = self._environment.reset, f"{self._name}.reset"
        text = user_code.call(reset, self._task, what=what, about=self._about)
        if not isinstance(text, str):
            raise user_code.returned(reset, text, "Return a text", what=what, about=self._about)
        ids = self._shared.chat.prompt_ids([Message(role="user", spans=(Span(text=text, is_ours=False),))])
        return Observation(ids=ids, text=text, completion_text="", calls=(), stop_reason=None)

    async def start(self) -> Observation:
        return self.opening()

    async def step(self, completion: Completion, *, num_tokens_left: int) -> Observation:
        """Answer a completion. Raises `ConfigError` if the user's `step` raises or returns something else."""
        self._num_turns += 1
        chat, ids = self._shared.chat, completion.ids
        reply = chat.completion_text(ids)
        if completion.finish_reason is FinishReason.LENGTH:
            return ended(reply, (), StopReason.LENGTH)
        step, what = self._environment.step, f"{self._name}.step"
        answer = user_code.call(step, reply, what=what, about=self._about)
        if not (isinstance(answer, tuple) and [type(each) for each in answer] == [str, bool]):
            raise user_code.returned(step, answer, "Return a text and a bool", what=what, about=self._about)
        text, is_done = answer
        if is_done or self._num_turns >= self._shared.limits.max_turns:
            stop_reason = StopReason.ANSWERED if is_done else StopReason.TURN_LIMIT
            return Observation(ids=(), text=text, completion_text=reply, calls=(), stop_reason=stop_reason)
        shown = chat.shorten(encodable(text), self._shared.limits.max_response_tokens)
        has_ended = ids[-1:] == (chat.end_of_turn_id,)
        observed = chat.observation_ids([shown], completion_ended=has_ended, wrapper=("", ""))
        if len(observed) > num_tokens_left:
            return ended(reply, (), StopReason.OVERFLOW)
        return Observation(ids=observed, text=shown, completion_text=reply, calls=(), stop_reason=None)

    async def fork(self, *, seed: int) -> Environment:
        """See `ForkableEnvironment.fork`. The state of the user's object is copied."""
        return TextRollout(copy.deepcopy(self._environment), self._shared, self._task, num_turns=self._num_turns)

    async def close(self) -> None:
        """There is nothing to release."""

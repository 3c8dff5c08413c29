"""Plays the tools' part in a rollout: reads a turn's calls, runs them, hands back the observation or the end.

Which turns go on and which end is rStar2-Agent's (arXiv 2508.20722, section 2.1): a turn with a tool call goes on, even if
it also holds an answer; a turn without one ends the rollout; a call in the last allowed turn is not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from pydantic import Field

from strop.config import Config
from strop.deadline import deadline
from strop.errors import ConfigError, DeadlineExceeded
from strop.rollout.arguments import argument_problem
from strop.rollout.call_format import make_call_format
from strop.rollout.chat import ChatFormat
from strop.rollout.prompt import Prompt
from strop.rollout.protocol import Environment, Observation
from strop.rollout.tool_calls import Call, FailedCall, ParsedCall
from strop.seeds import derive_seed
from strop.tools.protocol import Tool, ToolResult
from strop.tools.text import encodable
from strop.types import Completion, FinishReason, StopReason, Task, ToolCall, ToolOutcome


class RolloutLimits(Config):
    """How far one rollout may go, apart from its tokens."""

    max_turns: int = Field(default=10, ge=1)  # T; rStar2-Agent section 4.3, stages 1 and 2
    max_calls_per_turn: int = Field(default=4, ge=1)
    max_calls: int | None = Field(default=None, ge=0)  # calls run in a whole rollout; ARPO's call limit is 3 or 6
    max_response_tokens: int = Field(default=512, ge=16)  # of one tool response; beyond it head and tail are kept
    deadline_s: float = Field(default=60.0, gt=0)  # of one call beyond what its tool's own limits allow: then it is our fault


class ToolObserver(Protocol):
    """Follows the tool calls of one rollout, so that an interrupted run knows what was open and what had come back."""

    def opened(self, *, turn: int, index: int, name: str, arguments: Mapping[str, object]) -> None:
        """The call is about to be run."""

    def closed(self, *, turn: int, index: int, result: ToolResult) -> None:
        """The call came back; `result.text` is what the policy will be shown. Not called when the tool broke."""

    def recorded(self, *, turn: int, index: int, name: str, arguments: Mapping[str, object]) -> ToolResult | None:
        """The result that the same call had before an interruption, to be given again instead of running it (law 8)."""


class ToolObserverFactory(Protocol):
    """Makes the observer of one rollout; `seed` is the rollout's own."""

    def __call__(self, task: Task, *, seed: int) -> ToolObserver: ...


class Unobserved:
    """Nobody follows, nothing is replayed."""

    def opened(self, *, turn: int, index: int, name: str, arguments: Mapping[str, object]) -> None:
        pass

    def closed(self, *, turn: int, index: int, result: ToolResult) -> None:
        pass

    def recorded(self, *, turn: int, index: int, name: str, arguments: Mapping[str, object]) -> ToolResult | None:
        return None


class ToolEnvironments:
    """Makes one `ToolEnvironment` per rollout; what all rollouts share is here.

    Raises:
        ConfigError: two tools have one name.
    """

    def __init__(
        self,
        chat: ChatFormat,
        prompt: Prompt,
        tools: Sequence[Tool],
        limits: RolloutLimits,
        observe: ToolObserverFactory | None = None,
    ) -> None:
        self.chat = chat
        self.prompt = prompt
        self.limits = limits
        self.tools = {tool.spec.name: tool for tool in tools}
        self.observe = observe
        if len(self.tools) < len(tools):
            names = [tool.spec.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"tools: two of them are called {twice!r}, so a call could mean either. Rename one.")
        self.format = make_call_format(prompt.calls, [tool.spec for tool in tools])

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Where sampling stops, beside the end of a turn."""
        return (*self.format.stop_strings, *self.prompt.stop)

    def __call__(self, task: Task, *, seed: int) -> Environment:
        return ToolEnvironment(self, task, seed=seed)


class ToolEnvironment:
    """One playing of one task with tools."""

    def __init__(self, shared: ToolEnvironments, task: Task, *, seed: int) -> None:
        self._shared = shared
        self._chat, self._limits, self._format = shared.chat, shared.limits, shared.format
        self._tools: dict[str, Tool] = {}  # the rollout's own
        self._task = task
        self._observer: ToolObserver = Unobserved() if shared.observe is None else shared.observe(task, seed=seed)
        self._seed = seed
        self._num_turns = 0
        self._num_calls_run = 0

    async def start(self) -> Observation:
        for name, tool in self._shared.tools.items():
            self._tools[name] = await tool.start(seed=derive_seed(self._seed, "tool", name))
        prompt, specs = self._shared.prompt, [tool.spec for tool in self._tools.values()]
        text = "\n\n".join(message.text for message in prompt.fill(self._task.question, specs)) + prompt.prefill
        ids = prompt.ids(self._chat, self._task.question, specs)
        return Observation(ids=ids, text=text, completion_text="", calls=(), stop_reason=None)

    async def fork(self, *, seed: int) -> Environment:
        """See `ForkableEnvironment.fork`. Raises `MachineError` when the state of a tool is lost."""
        branch = ToolEnvironment(self._shared, self._task, seed=seed)
        branch._num_turns, branch._num_calls_run = self._num_turns, self._num_calls_run
        try:
            for name, tool in self._tools.items():
                branch._tools[name] = await tool.fork()
        except BaseException:
            await branch.close()
            raise
        return branch

    async def step(self, completion: Completion, *, num_tokens_left: int) -> Observation:
        """Answer a completion.

        A response's length is known only after its call: where it turns out not to fit, the calls are recorded as they ran
        and the rollout overflows. Where not even empty responses would fit, nothing is run. Of calls beyond the tool budget
        those are run that are within it, then the rollout ends; one that reaches no tool takes nothing of it.

        Raises:
            DeadlineExceeded: a tool kept silent for `deadline_s` beyond its own limits, so that this is our fault. Waiting
                for others (`strop.deadline`) is not counted.
        """
        self._num_turns += 1
        text = self._text_of(completion)
        calls = self._format.parse(text, max_calls=self._limits.max_calls_per_turn)
        if completion.finish_reason is FinishReason.LENGTH and not self._format.has_closed_call(text):
            return _end(text, (), StopReason.LENGTH)
        if not calls:
            return _end(text, (), StopReason.ANSWERED)
        if self._num_turns >= self._limits.max_turns:
            return _end(text, tuple(_not_run(call) for call in calls), StopReason.TURN_LIMIT)
        wanted, is_over_budget = self._within_budget([self._checked(call) for call in calls])
        is_any_run = any(isinstance(each, ParsedCall) for each in wanted)
        is_told = is_any_run or not is_over_budget
        if is_told and len(self._observation_ids(completion, [""] * len(calls))) > num_tokens_left:
            return _end(text, tuple(_not_run(call) for call in calls), StopReason.OVERFLOW)
        made = await self._run_all(wanted)
        if is_over_budget:
            return _end(text, made, StopReason.TOOL_BUDGET)
        responses = [call.text for call in made]
        ids = self._observation_ids(completion, responses)
        if len(ids) > num_tokens_left:
            return _end(text, made, StopReason.OVERFLOW)
        return Observation(ids=ids, text="\n".join(responses), completion_text=text, calls=made, stop_reason=None)

    async def close(self) -> None:
        for tool in self._tools.values():
            await tool.close()

    def _text_of(self, completion: Completion) -> str:
        ids = completion.ids
        return self._chat.decode(ids[:-1] if ids and ids[-1] in self._chat.stop_ids else ids)

    def _observation_ids(self, completion: Completion, responses: Sequence[str]) -> tuple[int, ...]:
        has_ended = completion.ids[-1:] == (self._chat.end_of_turn_id,)
        return self._chat.observation_ids(
            responses,
            completion_ended=has_ended,
            wrapper=self._format.wrapper,
            continues_turn=self._format.continues_turn,
        )

    def _checked(self, call: Call) -> ToolCall | ParsedCall:
        """The call with all of its arguments where it can be run, else what is told of it."""
        if isinstance(call, FailedCall):
            return _told(call.name, call.arguments_text, call.outcome, call.text)
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            text = f"Error: there is no tool {self._shortened(call.name)!r}. Tools: {known}."
            return _told(call.name, call.arguments_text, ToolOutcome.UNKNOWN_TOOL, text)
        spec = self._tools[call.name].spec
        arguments = {**call.arguments, **{name: each for name, each in spec.defaults.items() if name not in call.arguments}}
        problem = argument_problem(spec.parameters, arguments)
        if problem is not None:
            text = self._shortened(f"Error: {call.name}: {problem}.")
            return _told(call.name, call.arguments_text, ToolOutcome.WRONG_ARGUMENTS, text)
        return replace(call, arguments=arguments)

    def _within_budget(self, calls: Sequence[ToolCall | ParsedCall]) -> tuple[list[ToolCall | ParsedCall], bool]:
        """`calls`, those that would be run beyond `limits.max_calls` as not run, and whether there are any."""
        num_free = len(calls) if self._limits.max_calls is None else self._limits.max_calls - self._num_calls_run
        wanted: list[ToolCall | ParsedCall] = []
        for each in calls:
            if isinstance(each, ParsedCall):
                num_free -= 1
                wanted.append(each if num_free >= 0 else _not_run(each))
            else:
                wanted.append(each)
        if num_free >= 0:
            return wanted, False
        return [replace(each, text="") if isinstance(each, ToolCall) else each for each in wanted], True  # nobody is told

    async def _run_all(self, calls: Sequence[ToolCall | ParsedCall]) -> tuple[ToolCall, ...]:
        """All calls of a turn at once; one that raises ends the others."""
        running = [asyncio.ensure_future(self._make(index, call)) for index, call in enumerate(calls)]
        try:
            return tuple(await asyncio.gather(*running))
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _make(self, index: int, call: ToolCall | ParsedCall) -> ToolCall:
        if isinstance(call, ToolCall):
            return call
        self._num_calls_run += 1
        result = await self._run(self._tools[call.name], index, call)
        return ToolCall(
            name=call.name,
            arguments=call.arguments_text,
            outcome=result.outcome,
            text=result.text,
            duration_s=result.duration_s,
        )

    async def _run(self, tool: Tool, index: int, call: ParsedCall) -> ToolResult:
        turn = self._num_turns - 1
        recorded = self._observer.recorded(turn=turn, index=index, name=call.name, arguments=call.arguments)
        if recorded is not None:
            return recorded
        self._observer.opened(turn=turn, index=index, name=call.name, arguments=call.arguments)
        within_s = tool.longest_call_s + self._limits.deadline_s
        timeout: asyncio.Timeout | None = None
        try:
            async with deadline(within_s) as timeout:
                result = await tool.call(call.arguments, seed=derive_seed(self._seed, turn, index))
        except TimeoutError as error:
            if timeout is None or not timeout.expired():
                raise
            own = f"{tool.longest_call_s:g} s by its own limits and limits.deadline_s = {self._limits.deadline_s:g}"
            raise DeadlineExceeded(
                f"tool {call.name!r} gave no answer to call {index} of turn {turn} of task {self._task.id!r} within"
                f" {within_s:g} s ({own})."
            ) from error
        text = self._shortened(result.text) or self._format.empty_text(call.name)
        shown = ToolResult(outcome=result.outcome, text=text, duration_s=result.duration_s)
        self._observer.closed(turn=turn, index=index, result=shown)
        return shown

    def _shortened(self, text: str) -> str:
        """`text` of a tool, or about a call, as a tokenizer and every log take it, and within its limit."""
        return self._chat.shorten(encodable(text), self._limits.max_response_tokens)


def _told(name: str, arguments: str, outcome: ToolOutcome, text: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, outcome=outcome, text=text, duration_s=0.0)


def _not_run(call: Call) -> ToolCall:
    """A call on which the rollout ends. What could not be read stays the policy's mistake; it was just not told."""
    outcome = call.outcome if isinstance(call, FailedCall) else ToolOutcome.NOT_RUN
    return _told(call.name, call.arguments_text, outcome, "")


def _end(completion_text: str, calls: tuple[ToolCall, ...], stop_reason: StopReason) -> Observation:
    return Observation(ids=(), text="", completion_text=completion_text, calls=calls, stop_reason=stop_reason)

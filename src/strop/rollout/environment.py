"""The environment with tools: reads the calls of a turn, runs them, and returns the observation or the end.

Which turns go on and which end is rStar2-Agent's (arXiv 2508.20722, section 2.1): a turn with a tool call goes on, even if
it also holds an answer; a turn without one ends the rollout; a call in the last allowed turn is not run.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Protocol, TypeVar, runtime_checkable

from pydantic import Field

from strop import user_code
from strop.config import Config
from strop.deadline import deadline
from strop.errors import ConfigError, DeadlineExceeded
from strop.registry import Component
from strop.rollout.chat_template import ChatFormat
from strop.rollout.prompt import Prompt
from strop.rollout.tool_calls import Call, FailedCall, ParsedCall, argument_problem, make_call_format
from strop.tools.protocol import Tool, ToolResult, encodable
from strop.types import Completion, FinishReason, StopReason, Task, ToolCall, ToolOutcome, Turn, derive_seed

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The environment's answer to a completion: ids to feed before the next completion, or the end of the rollout."""

    ids: tuple[int, ...]  # of the opening observation: the prompt
    text: str
    completion_text: str  # of the completion that is answered; empty for the opening observation
    calls: tuple[ToolCall, ...]
    stop_reason: StopReason | None  # None: the rollout continues

    def as_turn(self, completion: Completion) -> Turn:
        """Return the turn of this observation and the completion that it answers."""
        return Turn(
            completion=completion,
            calls=self.calls,
            observation_ids=self.ids,
            completion_text=self.completion_text,
            observation_text=self.text,
        )


class Environment(Protocol):
    """One rollout's environment of one task. Single use, so there is no reset. `close` is called also after an error."""

    async def start(self) -> Observation:
        """Return the prompt."""

    async def step(self, completion: Completion, *, num_tokens_left: int) -> Observation:
        """Answer a completion. An answer of more than `num_tokens_left` ids is not given: the rollout overflows instead."""

    async def close(self) -> None: ...


@runtime_checkable
class ForkableEnvironment(Environment, Protocol):
    """An environment whose rollout may branch."""

    async def fork(self, *, seed: int) -> Environment:
        """Return the environment of a branch, which continues from here with the branch's seed. The caller closes it.

        Called between an observation and the `step` that answers the next completion. The new environment has the state of
        this one without repeating anything, and from here on the two share nothing.
        """


class EnvironmentFactory(Protocol):
    """Makes the environment of one rollout; `seed` belongs to the rollout."""

    def __call__(self, task: Task, *, seed: int) -> Environment: ...


class RolloutLimits(Config):
    """Limits of one rollout, except its tokens."""

    # rStar2-Agent section 4.3, stages 1 and 2: T = 10.
    max_turns: int = Field(default=10, ge=1, le=10**6, description="Most turns of a rollout.")
    max_calls_per_turn: int = Field(default=4, ge=1, le=10**4, description="Most calls of a turn; further ones are not run.")
    max_calls: int | None = Field(
        default=None, ge=0, le=10**9, description="Most calls that are run in a rollout. ARPO's limit is 3 or 6."
    )
    max_calls_per_tool: Mapping[str, Annotated[int, Field(ge=0, le=10**9)]] = Field(
        default={}, description="Most calls of a rollout, by tool; further ones are refused, and the rollout goes on."
    )
    forced_eos: bool = Field(
        default=False, description="End a rollout that wants more than `max_calls` with the end of a turn, not trained on."
    )
    max_response_tokens: int = Field(
        default=512, ge=16, le=10**9, description="Most tokens of a tool response; of a longer one, head and tail are kept."
    )
    deadline_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400 * 365,
        description="Seconds that a call may take beyond its tool's own limits before the tool counts as broken.",
    )


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Which call of which rollout."""

    seed: int  # of the rollout
    turn: int
    index: int  # in the turn


class CallRecorder(Protocol):
    """Records the tool calls of rollouts, so that an interrupted run knows what was open and what had come back."""

    async def __call__(self, place: CallPlace, call: ParsedCall, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """Return what `run` returns: the result as the policy will be shown it. It raises where the tool breaks.

        If the same call had a result before an interruption, that is returned instead, and nothing is run.
        """


class ToolEnvironments:
    """Makes one environment per rollout; what all rollouts share is here.

    Raises:
        ConfigError: two tools have one name, or a limit names none of them.
    """

    def __init__(
        self,
        chat: ChatFormat,
        prompt: Prompt,
        tools: Sequence[Tool],
        limits: RolloutLimits,
        record_call: CallRecorder | None = None,
        kind: EnvironmentKind | None = None,
    ) -> None:
        self.kind = kind or Tools()
        self.chat = chat
        self.prompt = prompt
        self.limits = limits
        self.tools = {tool.spec.name: tool for tool in tools}
        self.record_call = record_call
        if len(self.tools) < len(tools):
            names = [tool.spec.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"tools: two of them are called {twice!r}, so a call could mean either. Rename one.")
        for name in limits.max_calls_per_tool.keys() - self.tools.keys():
            known = ", ".join(self.tools) or "none"
            raise ConfigError(f"limits.max_calls_per_tool: there is no tool {name!r}. Name one that the stage has: {known}.")
        self.format = make_call_format(prompt.calls, [tool.spec for tool in tools])

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which sampling stops, next to the end of a turn."""
        return (*self.format.stop_strings, *self.prompt.stop)

    def __call__(self, task: Task, *, seed: int) -> Environment:
        return self.kind.for_rollout(self, task, seed=seed)


class ToolEnvironment:
    """One playing of one task with tools."""

    def __init__(self, shared: ToolEnvironments, task: Task, *, seed: int) -> None:
        self._shared = shared
        self._chat, self._limits, self._format = shared.chat, shared.limits, shared.format
        self._tools: dict[str, Tool] = {}  # the rollout's own
        self._task = task
        self._seed = seed
        self._num_turns = 0
        self._num_run: Counter[str] = Counter()  # calls, by tool

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
        branch._num_turns, branch._num_run = self._num_turns, self._num_run.copy()
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
        text = self._chat.completion_text(completion.ids)
        calls = self._format.parse(text, max_calls=self._limits.max_calls_per_turn)
        if completion.finish_reason is FinishReason.LENGTH and not self._format.has_closed_call(text):
            return ended(text, (), StopReason.LENGTH)
        if not calls:
            return ended(text, (), StopReason.ANSWERED)
        if self._num_turns >= self._limits.max_turns:
            return ended(text, tuple(_not_run(call) for call in calls), StopReason.TURN_LIMIT)
        wanted, is_over_budget = self._within_limits([self._checked(call) for call in calls])
        is_any_run = any(isinstance(each, ParsedCall) for each in wanted)
        is_told = is_any_run or not is_over_budget
        if is_told and len(self._observation_ids(completion, [""] * len(calls))) > num_tokens_left:
            return ended(text, tuple(_not_run(call) for call in calls), StopReason.OVERFLOW)
        made = tuple(await all_of([self._make(index, call) for index, call in enumerate(wanted)]))
        if is_over_budget:
            end = self._chat.end_of_turn_id
            is_forced = self._limits.forced_eos and completion.ids[-1:] != (end,) and num_tokens_left > 0
            return replace(ended(text, made, StopReason.TOOL_BUDGET), ids=(end,) if is_forced else ())
        responses = [call.text for call in made]
        ids = self._observation_ids(completion, responses)
        if len(ids) > num_tokens_left:
            return ended(text, made, StopReason.OVERFLOW)
        return Observation(ids=ids, text="\n".join(responses), completion_text=text, calls=made, stop_reason=None)

    async def close(self) -> None:
        for tool in self._tools.values():
            await tool.close()

    def _observation_ids(self, completion: Completion, responses: Sequence[str]) -> tuple[int, ...]:
        has_ended = completion.ids[-1:] == (self._chat.end_of_turn_id,)
        return self._chat.observation_ids(
            responses,
            completion_ended=has_ended,
            wrapper=self._format.wrapper,
            continues_turn=self._format.continues_turn,
            prefill=self._shared.prompt.prefill,
        )

    def _checked(self, call: Call) -> ToolCall | ParsedCall:
        """Return the call with all of its arguments if it can be run, else the call with its error."""
        if isinstance(call, FailedCall):
            return self._failed(call, call.outcome, call.text)
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            text = f"Error: there is no tool {self._shortened(call.name)!r}. Tools: {known}."
            return self._failed(call, ToolOutcome.UNKNOWN_TOOL, text)
        spec = self._tools[call.name].spec
        arguments = {**call.arguments, **{name: each for name, each in spec.defaults.items() if name not in call.arguments}}
        problem = argument_problem(spec.parameters, arguments)
        if problem is not None:
            text = self._shortened(f"Error: {call.name}: {problem}.")
            return self._failed(call, ToolOutcome.WRONG_ARGUMENTS, text)
        return replace(call, arguments=arguments)

    def _within_limits(self, calls: Sequence[ToolCall | ParsedCall]) -> tuple[list[ToolCall | ParsedCall], bool]:
        """`calls`, those beyond a limit as refused or as not run, and whether there are more than `limits.max_calls`.

        Those beyond `limits.max_calls_per_tool` are refused in the words of ARPO's evaluation, and take nothing of the budget.
        """
        num_free = len(calls) if self._limits.max_calls is None else self._limits.max_calls - self._num_run.total()
        num_used, wanted = self._num_run.copy(), list[ToolCall | ParsedCall]()
        for each in calls:
            if isinstance(each, ParsedCall):
                num_used[each.name] += 1
                if num_used[each.name] > self._limits.max_calls_per_tool.get(each.name, num_used[each.name]):
                    text = f"The maximum {each.name} call limit is exceeded. You are not allowed to use {each.name}."
                    each = self._failed(each, ToolOutcome.REJECTED, text)
                else:
                    num_free -= 1
                    each = each if num_free >= 0 else _not_run(each)
            wanted.append(each)
        if num_free >= 0:
            return wanted, False
        unread = [replace(each, text="") if isinstance(each, ToolCall) else each for each in wanted]  # the rollout ends here
        return unread, True

    async def _make(self, index: int, call: ToolCall | ParsedCall) -> ToolCall:
        if isinstance(call, ToolCall):
            return call
        self._num_run[call.name] += 1
        place, record = CallPlace(self._seed, self._num_turns - 1, index), self._shared.record_call
        run = partial(self._run, self._tools[call.name], place, call)
        result = await (run() if record is None else record(place, call, run))
        return ToolCall(
            name=call.name,
            arguments=call.arguments_text,
            outcome=result.outcome,
            text=result.text,
            duration_s=result.duration_s,
        )

    async def _run(self, tool: Tool, place: CallPlace, call: ParsedCall) -> ToolResult:
        """Return the result as the policy will be shown it."""
        within_s = tool.longest_call_s + self._limits.deadline_s
        timeout: asyncio.Timeout | None = None
        try:
            async with deadline(within_s) as timeout:
                result = await tool.call(call.arguments, seed=derive_seed(place.seed, place.turn, place.index))
        except TimeoutError as error:
            if timeout is None or not timeout.expired():
                raise
            own = f"{tool.longest_call_s:g} s by its own limits and limits.deadline_s = {self._limits.deadline_s:g}"
            raise DeadlineExceeded(
                f"tool {call.name!r} gave no answer to call {place.index} of turn {place.turn} of task {self._task.id!r} within"
                f" {within_s:g} s ({own})."
            ) from error
        what, about = f"tool {call.name!r}", f"for task {self._task.id!r}"
        user_code.expect(result, ToolResult, tool.call, what=what, about=about)
        text = self._shortened(result.text.rstrip("\n")) or self._format.empty_text(call.name)
        is_error = result.outcome.is_error
        text = self._describe_failure(result.outcome, text) if is_error else self._shared.prompt.describe_success(text)
        return ToolResult(outcome=result.outcome, text=text, duration_s=result.duration_s)

    def _failed(self, call: Call, outcome: ToolOutcome, message: str) -> ToolCall:
        return _told(call.name, call.arguments_text, outcome, self._describe_failure(outcome, message))

    def _describe_failure(self, outcome: ToolOutcome, message: str) -> str:
        return self._shared.prompt.describe_failure("" if outcome is ToolOutcome.ERROR else outcome.value, message)

    def _shortened(self, text: str) -> str:
        """`text` of a tool, or about a call, as a tokenizer and every log take it, and within its limit."""
        return self._chat.shorten(encodable(text), self._limits.max_response_tokens)


async def all_of(coroutines: Sequence[Awaitable[_ResultT]]) -> list[_ResultT]:
    """Return the results in order. The first exception cancels the others."""
    running = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*running))
    finally:
        await end(running)


async def end(running: Sequence[asyncio.Future[_ResultT]]) -> None:
    """Cancel what runs, and wait for it to end."""
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _told(name: str, arguments: str, outcome: ToolOutcome, text: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, outcome=outcome, text=text, duration_s=0.0)


def _not_run(call: Call) -> ToolCall:
    """Return a call at which the rollout ends. A call that could not be read keeps its outcome."""
    outcome = call.outcome if isinstance(call, FailedCall) else ToolOutcome.NOT_RUN
    return _told(call.name, call.arguments_text, outcome, "")


def ended(completion_text: str, calls: tuple[ToolCall, ...], stop_reason: StopReason) -> Observation:
    return Observation(ids=(), text="", completion_text=completion_text, calls=calls, stop_reason=stop_reason)


class EnvironmentKind(Component):
    """What a stage names by its key `environment`: `tools`, a `TextEnvironment` or an `Environment` of the user's."""

    kinds = {"tools": "strop.rollout.environment:Tools"}  # noqa: RUF012  (a constant table)
    own_base = "TextEnvironment"

    class Config(Component.Config):
        """An environment has no keys by itself."""

    @abstractmethod
    def for_rollout(self, shared: ToolEnvironments, task: Task, *, seed: int) -> Environment:
        """Return a new environment, for one rollout of `task`."""

    def prompt_ids(self, shared: ToolEnvironments, task: Task) -> tuple[int, ...]:
        """Return the prompt of `task`, if it is known before the rollout; else nothing."""
        return ()


class Tools(EnvironmentKind):
    """The environment with tools; it reads the recipe's `tools`, and `limits` and `prompt` of the stage."""

    def for_rollout(self, shared: ToolEnvironments, task: Task, *, seed: int) -> Environment:
        return ToolEnvironment(shared, task, seed=seed)

    def prompt_ids(self, shared: ToolEnvironments, task: Task) -> tuple[int, ...]:
        return shared.prompt.ids(shared.chat, task.question, [tool.spec for tool in shared.tools.values()])

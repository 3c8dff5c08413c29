"""The base class of tools: a name and a signature for the prompt, and calls that run once each. And tools around other tools:
the limits of a recipe, and the control conditions of evaluations."""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field

from strop import user_code
from strop.config import Config
from strop.deadline import clock_stopped
from strop.errors import ConfigError
from strop.registry import Component, place_of
from strop.sandbox.protocol import CodeRunner
from strop.types import ToolOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """How a tool is described to the policy: JSON schema, as in function calling."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema of type object
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of arguments that may be left out although the schema requires them, as a paper prints it. Not shown."""

    def as_function(self) -> dict[str, Any]:
        """The wire form that chat templates and prompts print."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the policy reads, and the class of what happened."""

    outcome: ToolOutcome
    text: str
    duration_s: float


class ToolKind(Component):
    """What a table of `tools` names: it gives the policy one tool or several."""

    kinds = {  # noqa: RUF012  (a constant table)
        "python": "strop.tools.python:Python",
        "search": "strop.tools.search.tool:Search",
        "browse": "strop.tools.browse:Browse",
        "function": "strop.tools.function:Function",
        "mcp": "strop.tools.mcp:Mcp",
    }
    own_base = "Tool"

    class Config(Component.Config):
        """A tool has no keys by itself."""

    @classmethod
    def of(cls, value: Any) -> Self:
        """As `Component.of`. A function, with the decorator `tool` or without, stands for a tool of the kind `function`."""
        function = getattr(value, "function", value)
        return super().of({"kind": "function", "function": place_of(function)} if inspect.isfunction(function) else value)

    def known_name(self, key: str) -> str | None:
        """The name of its only tool in the prompt, if that is known before it is opened; `key`: of its table in the recipe."""
        return None

    def files(self) -> Mapping[str, Path]:
        """Files and directories that it reads, by key of its table. They are looked for before anything is run."""
        return {}

    @abstractmethod
    async def open(self, stack: AsyncExitStack, runner: CodeRunner, *, key: str) -> Sequence[Tool]:
        """Return the tools, opened; `stack` closes what they hold.

        Args:
            runner: where the Python tool runs programs; it stays open.
            key: of its table in the recipe.

        Raises:
            UserError: it cannot be opened: a corpus, a library, a key or a server is missing.
        """


class Tool(ToolKind):
    """Something the policy may call. A subclass gives `spec` (a property, or a value) and `call`.

    What a recipe names is shared by all rollouts and holds no state of any one of them. A tool that keeps something from one
    call to the next gives each rollout an object of its own, by `start`; where the rollout branches, `fork` copies it.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    async def open(self, stack: AsyncExitStack, runner: CodeRunner, *, key: str) -> Sequence[Tool]:
        if not isinstance(self.spec, ToolSpec):
            remedy, name = "It must be a strop.ToolSpec", type(self).__qualname__
            raise user_code.returned(type(self), self.spec, remedy, what=f"{key}: {name}.spec")
        return [self]

    @property
    @abstractmethod
    def spec(self) -> ToolSpec:
        """What the prompt shows of the tool."""

    @property
    def longest_call_s(self) -> float:
        """Within how many seconds every call has come to an end by the tool's own limits; 0: it sets none.

        A call without an answer for `limits.deadline_s` beyond it counts as a failure of the machine, and the rollout is played
        again. A tool whose calls the policy can make slow should end them itself, with a timeout.
        """
        return 0.0

    @abstractmethod
    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        """Run once. A wrong call returns a `ToolResult` that the policy can read; raise only when the tool is broken.

        The environment calls only with `arguments` that fit `spec.parameters`.

        `seed` belongs to the call; the same arguments and seed, after the same earlier calls, give the same text. Cancelled,
        it lets go of what it holds.
        """

    async def start(self, *, seed: int) -> Tool:
        """Return the tool of one rollout, with its seed; the caller closes it. A tool without state returns itself."""
        return self

    async def fork(self) -> Tool:
        """The tool of a branch: it has the state of this one as it is between two calls, and shares nothing from here on.

        Raises:
            MachineError: the state is lost; a branch cannot begin here.
        """
        return self

    async def close(self) -> None:
        """The rollout is over. Safe to call twice; what all rollouts share stays open."""
        return None  # noqa: RET501 - a body, so that a subclass need not write one


class TimedTool(Tool):
    """A tool that measures how long its calls take. A subclass gives `answer`."""

    def __init__(self, spec: ToolSpec) -> None:
        self._spec = spec

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        started_at = time.perf_counter()
        outcome, text = await self.answer(arguments, seed=seed)
        return ToolResult(outcome=outcome, text=text, duration_s=time.perf_counter() - started_at)

    @abstractmethod
    async def answer(self, arguments: Mapping[str, object], *, seed: int) -> tuple[ToolOutcome, str]:
        """As `call`: the class of what happened, and what the policy reads."""


MaxChars: TypeAlias = Annotated[
    int, Field(ge=64, le=10**9, description="Longest text for the policy; of a longer one head and tail are kept.")
]


class CallLimits(Config):
    """The keys of every kind of tool."""

    description: str = Field(default="", description="What the prompt says of the tool. Default: the tool's own.")
    parameters: Mapping[str, Any] = Field(
        default={}, description="JSON schema of the arguments, as the prompt shows it. Default: the tool's own."
    )
    max_running: int | None = Field(
        default=None, ge=1, le=10**9, description="Most calls of all rollouts that run at once; further ones wait."
    )


class WrappedTool(Tool):
    """Another tool, forwarded to; a subclass changes what it needs to."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    @property
    def spec(self) -> ToolSpec:
        return self._tool.spec

    @property
    def longest_call_s(self) -> float:
        return self._tool.longest_call_s

    def around(self, tool: Tool) -> Tool:
        """Return this wrapper around another start or fork of its tool."""
        return type(self)(tool)

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        return await self._tool.call(arguments, seed=seed)

    async def start(self, *, seed: int) -> Tool:
        return self.around(await self._tool.start(seed=seed))

    async def fork(self) -> Tool:
        return self.around(await self._tool.fork())

    async def close(self) -> None:
        await self._tool.close()


class LimitedTool(WrappedTool):
    """Another tool, with the description and the limits that its table in the recipe gives it.

    Of the tools that share `places` only so many calls run at once; the others wait in the order in which they came. The wait
    counts against no limit of a call. A function that runs past its limit in its thread no longer counts.
    """

    def __init__(self, tool: Tool, config: CallLimits, places: asyncio.Semaphore | None = None) -> None:
        super().__init__(tool)
        self._config, self._places = config, places

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(self._tool, "function", type(self._tool))

    @property
    def spec(self) -> ToolSpec:
        own = self._tool.spec
        description, parameters = self._config.description or own.description, self._config.parameters or own.parameters
        return replace(own, description=description, parameters=parameters)

    def around(self, tool: Tool) -> Tool:
        return LimitedTool(tool, self._config, self._places)

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        if self._places is None:
            return await super().call(arguments, seed=seed)
        with clock_stopped():
            await self._places.acquire()
        try:
            return await super().call(arguments, seed=seed)
        finally:
            self._places.release()


def limited(tools: Sequence[Tool], config: CallLimits, *, key: str) -> Sequence[Tool]:
    """`tools` with the description and the limits of `config`; together they share its `max_running`.

    Raises:
        ConfigError: it describes one tool, and there are several.
    """
    if not (config.description or config.parameters or config.max_running):
        return tools
    if (config.description or config.parameters) and len(tools) != 1:
        names = ", ".join(tool.spec.name for tool in tools)
        raise ConfigError(f"{key}.description: the table brings several tools ({names}). Give each a table of its own (only).")
    places = None if config.max_running is None else asyncio.Semaphore(config.max_running)
    return [LimitedTool(tool, config, places) for tool in tools]


class NoisyTool(WrappedTool):
    """Replaces every digit in the results of a tool by a random one: the form stays, the content is worthless."""

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        result = await super().call(arguments, seed=seed)
        draw = random.Random(seed)
        return replace(result, text=re.sub(r"\d", lambda _: str(draw.randint(0, 9)), result.text))


class AbsentTool(WrappedTool):
    """Answers every call with the error that no tool is available."""

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        return ToolResult(outcome=ToolOutcome.ERROR, text="Error: no tool is available.", duration_s=0.0)


@asynccontextmanager
async def open_tools(kinds: Mapping[str, ToolKind], runner: CodeRunner) -> AsyncIterator[tuple[Tool, ...]]:
    """The tools of `kinds`, in their order, for the time of an `async with`; those of one kind share its `max_running`.

    Args:
        kinds: by the name of their table under `tools`.
        runner: where the Python tool runs programs; it stays open.

    Raises:
        UserError: one of them cannot be opened: a corpus, a library, a key or a server is missing.
    """
    async with AsyncExitStack() as stack:
        tools: list[Tool] = []
        for name, kind in kinds.items():
            opened = await kind.open(stack, runner, key=f"tools.{name}")
            tools += limited(opened, kind.config, key=f"tools.{name}") if isinstance(kind.config, CallLimits) else opened
        yield tuple(tools)


def encodable(text: str) -> str:
    r"""Return `text` with halves of surrogate pairs escaped (`\ud83d`), which neither UTF-8 nor a tokenizer can hold."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()

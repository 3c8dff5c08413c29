"""The base class of tools: a name and a signature for the prompt, and calls that run once each."""

from __future__ import annotations

import inspect
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from strop import user_code
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


def text_parameters(**described: str) -> dict[str, Any]:
    """Return the JSON schema of arguments that are texts, all required."""
    properties = {argument: {"type": "string", "description": text} for argument, text in described.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


def encodable(text: str) -> str:
    r"""Return `text` with halves of surrogate pairs escaped (`\ud83d`), which neither UTF-8 nor a tokenizer can hold."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()

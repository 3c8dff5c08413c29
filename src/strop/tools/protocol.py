"""What a tool owes: a name and a signature that the policy is shown, and one call at a time, run once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from strop.types import ToolOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """How a tool is described to the policy: JSON schema, as in function calling."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema of type object

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


class Tool(Protocol):
    """Something the policy may call. Shared by all rollouts; holds no state of any one of them."""

    @property
    def spec(self) -> ToolSpec: ...

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        """Run once. A wrong call returns a `ToolResult` that the policy can read; raise only when the tool is broken.

        `seed` belongs to the call; the same arguments and seed give the same text.
        """

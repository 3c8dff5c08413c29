"""The Python tool: runs the policy's program in a sandbox and shows one of the four responses of rStar2-Agent section 2.1.

The responses are printed output, else the last expression as IPython shows it; an error with its traceback; a timeout. Every
call runs its own program, or, with `stateful`, the next cell of the rollout's notebook, which a branch copies.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from importlib.resources import files
from typing import Any, cast

from pydantic import Field

from strop.errors import MachineError, SessionLost, ToolBroken, UserError
from strop.sandbox.protocol import CodeRunner, CodeService, RunOutcome, RunRequest, RunResult
from strop.tools.limits import CallLimits, MaxChars
from strop.tools.protocol import Tool, ToolKind, ToolResult, ToolSpec
from strop.types import ToolOutcome

_log = logging.getLogger(__name__)


_RETRIES = 2  # of failures of the sandbox, never of a program
SIGNATURE: Mapping[str, Any] = json.loads(files("strop.tools").joinpath("python_signature.json").read_text(encoding="utf-8"))
"""Description and parameters of the tool in rStar2-Agent's prompt (Figure 3)."""
TOOL_NAME = "execute_python_code_with_standard_io"
_OUTCOMES = {each: ToolOutcome(each.value) for each in RunOutcome if not each.is_ours}


class Python(ToolKind):
    """Python programs in the sandbox."""

    class Config(CallLimits):
        """Its name and limits."""

        # rStar2-Agent, Figure 3
        name: str = Field(default=TOOL_NAME, min_length=1, description="The name in the prompt.")
        stateful: bool = Field(default=False, description="Give each rollout a notebook, instead of each call a new program.")
        wall_s: float = Field(default=4.0, gt=0, le=86_400 * 365, description="Seconds that a call may take.")
        memory_mib: int = Field(default=512, ge=32, le=2**30, description="MiB of memory of a program, or of a whole notebook.")
        max_chars: MaxChars = 4_096

    config: Config

    def known_name(self, key: str) -> str:
        return self.config.name

    async def open(self, stack: AsyncExitStack, runner: CodeRunner, *, key: str) -> list[Tool]:
        return [PythonTool(runner, self.config)]


class PythonTool(Tool):
    """Runs `code` with `input` on stdin as a separate program; with `stateful`, `start` gives each rollout a notebook.

    Args:
        runner: where programs run; shared by all rollouts, closed by the caller.
        config: name and limits.

    Raises:
        UserError: `config.stateful` is true, and `runner` keeps no sessions.
    """

    config: Python.Config

    def __init__(self, runner: CodeRunner, config: Python.Config | None = None) -> None:
        self._runner = runner
        super().__init__(config or Python.Config())
        self._service = cast("CodeService", runner) if self.config.stateful else None
        if self.config.stateful and not hasattr(runner, "open_session"):
            raise UserError(
                f"{self.config.name}: stateful = true needs a code service that keeps sessions, and {type(runner).__name__}"
                " keeps none. Use LocalSandbox or SandboxClient, or set stateful = false."
            )
        self._spec = ToolSpec(
            name=self.config.name,
            description=SIGNATURE["description"],
            parameters=SIGNATURE["parameters"],
            defaults={"input": ""},  # rStar2-Agent's released code
        )

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    @property
    def longest_call_s(self) -> float:
        return (1 + _RETRIES) * self.config.wall_s

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        """Run once; `input` may be left out. Raises `ToolBroken` if the sandbox fails three times."""
        return await self.answer(arguments, self._runner.run, seed=seed)

    async def start(self, *, seed: int) -> Tool:
        if self._service is None:
            return self
        from strop.tools.notebook import PythonNotebook  # most recipes run each program on its own

        return PythonNotebook(self, self._service, seed=seed)

    async def answer(
        self, arguments: Mapping[str, object], run: Callable[[RunRequest], Awaitable[RunResult]], *, seed: int
    ) -> ToolResult:
        """Run `arguments`, which fit the signature, with `run`, and return what the policy reads."""
        started_at = time.perf_counter()
        request = RunRequest(
            code=str(arguments["code"]),
            stdin=str(arguments.get("input", "")),
            wall_s=self.config.wall_s,
            memory_mib=self.config.memory_mib,
            output_bytes=max(256, 4 * self.config.max_chars),  # a character has at most 4 bytes
            seed=seed,
        )
        result = await self._retried(run, request)
        return ToolResult(
            outcome=_OUTCOMES[result.outcome], text=self._text(result), duration_s=time.perf_counter() - started_at
        )

    async def _retried(self, run: Callable[[RunRequest], Awaitable[RunResult]], request: RunRequest) -> RunResult:
        fault = ""
        for _ in range(1 + _RETRIES):
            try:
                result = await run(request)
            except SessionLost as error:  # with the state of earlier cells; only a new rollout has another
                raise ToolBroken(f"{self.spec.name}: {error}") from error
            except MachineError as error:
                fault = str(error)
            else:
                if result.outcome in _OUTCOMES:
                    return result
                fault = f"{result.outcome}: {result.reason}"
            _log.warning("the sandbox failed a call of %s: %s", self.spec.name, fault)
        raise ToolBroken(f"{self.spec.name}: the sandbox failed {1 + _RETRIES} times in a row, last with {fault}")

    def _text(self, result: RunResult) -> str:
        shown = shorten(result.text, self.config.max_chars)
        if result.outcome is RunOutcome.TIMEOUT:
            return _with_line(shown, f"Execution timed out after {self.config.wall_s:g} s.")
        if result.outcome is RunOutcome.KILLED:
            return _with_line(shown, f"Execution was killed ({result.reason}).")
        return shown


def shorten(text: str, max_chars: int) -> str:
    """Return `text`, or its head and tail with together `max_chars` characters around a line that counts the rest."""
    if len(text) <= max_chars:
        return text
    head, tail = max_chars - max_chars // 2, max_chars // 2
    return f"{text[:head]}\n[... {len(text) - max_chars} characters left out ...]\n{text[len(text) - tail :]}"


def _with_line(text: str, line: str) -> str:
    return text + ("\n" if text and not text.endswith("\n") else "") + line

"""A code runner for tests: it runs nothing, and a script gives the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace

from strop.sandbox.protocol import CodeRunner, IsolationLevel, PairVerdict, RunOutcome, RunRequest, RunResult, VerifyRequest
from strop.sandbox.verify_process import ProcessVerifier


def scripted_result(text: str, outcome: RunOutcome = RunOutcome.STDOUT, *, reason: str = "") -> RunResult:
    """Return a result with an outcome and a text."""
    return replace(RunResult.not_run(outcome, reason, level=IsolationLevel.NAMESPACES), text=text, exit_code=0)


@dataclass(slots=True, kw_only=True)
class ScriptedSandbox(CodeRunner):
    """Answers each request from a script.

    `verify` really compares answers, in processes that `close` ends. It then belongs to one event loop.

    Args:
        answer: a mapping from code to text or result, or a function of the request, which may raise.
    """

    answer: Callable[[RunRequest], str | RunResult] | Mapping[str, str | RunResult]
    requests: list[RunRequest] = field(default_factory=list, init=False)  # in order of arrival
    _verifier: ProcessVerifier = field(default_factory=ProcessVerifier, init=False)

    async def run(self, request: RunRequest) -> RunResult:
        self.requests.append(request)
        return self.answer_to(request)

    def answer_to(self, request: RunRequest) -> RunResult:
        answer = self.answer(request) if callable(self.answer) else self.answer[request.code]
        return scripted_result(answer) if isinstance(answer, str) else answer

    def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        return self._verifier.verify(request)

    async def close(self) -> None:
        await self._verifier.close()

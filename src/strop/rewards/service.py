"""The parts of a code service that judging and rolling out ask for; any `CodeService` has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from strop.sandbox.protocol import CodeRunner, PairVerdict, VerifyRequest


class AnswerService(Protocol):
    """Compares answers."""

    def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        """As `CodeService.verify`."""


class RunService(CodeRunner, AnswerService, Protocol):
    """Runs programs and compares answers: all that a training run asks for. It keeps no sessions."""

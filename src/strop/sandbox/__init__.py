"""Runs untrusted programs and tells what happened. Knows nothing of learning; usable alone."""

from strop.sandbox.config import SandboxConfig
from strop.sandbox.local import LocalSandbox
from strop.sandbox.protocol import (
    AnswerPair,
    CodeNode,
    CodeRunner,
    CodeService,
    IsolationLevel,
    PairVerdict,
    RunOutcome,
    RunRequest,
    RunResult,
    RunTimings,
    SessionLimits,
    VerifyRequest,
)
from strop.sandbox.scripted import ScriptedSandbox, scripted_result
from strop.sandbox.session import Session
from strop.sandbox.sync import Sandbox, SandboxSession

__all__ = [
    "AnswerPair",
    "CodeNode",
    "CodeRunner",
    "CodeService",
    "IsolationLevel",
    "LocalSandbox",
    "PairVerdict",
    "RunOutcome",
    "RunRequest",
    "RunResult",
    "RunTimings",
    "Sandbox",
    "SandboxConfig",
    "SandboxSession",
    "ScriptedSandbox",
    "Session",
    "SessionLimits",
    "VerifyRequest",
    "scripted_result",
]

"""Runs untrusted programs and returns what happened. Of strop it imports only configs, deadlines and errors."""

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
from strop.sandbox.sandbox import Sandbox, SandboxSession, Session
from strop.sandbox.scripted import ScriptedSandbox, scripted_result

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

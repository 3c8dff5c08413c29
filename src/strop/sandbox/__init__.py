"""Runs untrusted programs and tells what happened. Knows nothing of learning; usable alone."""

from strop.sandbox.config import SandboxConfig
from strop.sandbox.local import LocalSandbox
from strop.sandbox.protocol import CodeRunner, IsolationLevel, RunOutcome, RunRequest, RunResult, RunTimings
from strop.sandbox.scripted import ScriptedSandbox, scripted_result
from strop.sandbox.sync import Sandbox

__all__ = [
    "CodeRunner",
    "IsolationLevel",
    "LocalSandbox",
    "RunOutcome",
    "RunRequest",
    "RunResult",
    "RunTimings",
    "Sandbox",
    "SandboxConfig",
    "ScriptedSandbox",
    "scripted_result",
]

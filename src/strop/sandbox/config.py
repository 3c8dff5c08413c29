"""How programs are run: their default limits, how many at once, and how little isolation is still enough."""

from __future__ import annotations

import os

from pydantic import Field

from strop.config import Config
from strop.sandbox.protocol import IsolationLevel


class SandboxConfig(Config):
    """Of the runner on this machine. The limits are defaults; a `RunRequest` may ask for others."""

    wall_s: float = Field(default=4.0, gt=0)  # from the start of the program; time in the queue is not counted
    memory_mib: int = Field(default=512, ge=32)  # address space beyond the interpreter's own, for each process
    output_bytes: int = Field(default=65_536, ge=256)  # head and tail are kept beyond it
    max_running: int = Field(default_factory=lambda: 2 * (os.cpu_count() or 1), ge=1, le=1024)
    min_level: IsolationLevel = IsolationLevel.NAMESPACES
    max_code_bytes: int = Field(default=1_000_000, ge=1)
    max_stdin_bytes: int = Field(default=8_000_000, ge=0)

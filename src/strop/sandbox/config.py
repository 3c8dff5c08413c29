"""How programs are run: their default limits, how many at once, and how little isolation is still enough."""

from __future__ import annotations

import os
import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from strop.config import Config
from strop.sandbox.protocol import IsolationLevel


class SandboxConfig(Config):
    """Of a sandbox on this machine, unless `url` names a service. Limits are defaults: a `RunRequest` may ask for others."""

    wall_s: float = Field(default=4.0, gt=0)  # from the start of the program; time in the queue is not counted
    memory_mib: int = Field(default=512, ge=32)  # address space beyond the interpreter's own, for each process
    output_bytes: int = Field(default=65_536, ge=256)  # head and tail are kept beyond it
    # That compute. A node takes three times as many calls (its `num_slots`), so that the next is at hand when one ends.
    max_running: int = Field(default_factory=lambda: 2 * (os.cpu_count() or 1), ge=1, le=1024)
    max_alive: int = Field(default=256, ge=1, le=4096)  # with those that sleep, which lend their slots
    max_sessions: int = Field(default=64, ge=0, le=4096)  # that live at once; they hold no slot between their cells
    url: str = ""  # of a running service, which is used instead of this machine
    token_env: str = "STROP_SANDBOX_TOKEN"  # the environment variable that holds what it asks for
    min_level: IsolationLevel = IsolationLevel.CONFINED
    level: IsolationLevel | None = None  # the best that this machine gives, up to `namespaces`, when left out
    zygotes: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, le=64)  # fork servers for each profile
    warm: tuple[Literal["bare", "numpy", "full", "verify"], ...] = ("bare",)  # profiles started at once; others when needed
    modules: tuple[str, ...] = ()  # loaded in the profile `full` besides its own
    recycle_after: int = Field(default=100_000, ge=1)  # programs from one fork server before another takes its place
    max_code_bytes: int = Field(default=262_144, ge=1)
    max_stdin_bytes: int = Field(default=8_000_000, ge=0)

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if url and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
            raise ValueError(f"{url!r} is no address of a code service. Write it as in url = 'http://127.0.0.1:8517'.")
        return url

    @model_validator(mode="after")
    def _does_not_contradict_itself(self) -> Self:
        if self.level is not None and self.level.rank < self.min_level.rank:
            raise ValueError(
                f"sandbox.level is {self.level.value!r} (L{self.level.rank}), which is less than sandbox.min_level,"
                f" {self.min_level.value!r} (L{self.min_level.rank}). Lower sandbox.min_level to accept it, or leave"
                " sandbox.level out."
            )
        return self

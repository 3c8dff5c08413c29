"""How programs run: their default limits, how many run at once, and the lowest accepted level of isolation."""

from __future__ import annotations

import os
import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from strop.config import Config
from strop.sandbox.protocol import IsolationLevel

TOKEN_VARIABLE = "STROP_SANDBOX_TOKEN"


class SandboxConfig(Config):
    """A sandbox on this machine, unless `url` names a service. A `RunRequest` may ask for other limits."""

    wall_s: float = Field(
        default=4.0, gt=0, le=86_400, description="Seconds a program may run. Time in the queue is not counted."
    )
    memory_mib: int = Field(
        default=512, ge=32, le=1 << 24, description="Address space of each process, beyond that of the interpreter."
    )
    max_running: int = Field(
        default_factory=lambda: 2 * (os.cpu_count() or 1),
        ge=1,
        le=1024,
        description="Programs that compute at once. Three times as many calls are accepted, so that the next one is ready.",
    )
    max_alive: int = Field(
        default=256, ge=1, le=4096, description="Programs that exist at once, including those that sleep and lend their slots."
    )
    max_sessions: int = Field(
        default=64, ge=0, le=4096, description="Sessions that exist at once. They hold no slot between their cells."
    )
    url: str | tuple[str, ...] = Field(
        default="",
        description="Address of a running service, or a list of several, used instead of this machine. The environment variable"
        " `STROP_SANDBOX_TOKEN` holds their token.",
    )
    min_level: IsolationLevel = Field(
        default=IsolationLevel.CONFINED, description="Lowest accepted level of isolation. Below it the sandbox does not start."
    )
    level: IsolationLevel | None = Field(
        default=None, description="Exact level of isolation. By default the best that this machine gives, up to `namespaces`."
    )
    fork_servers: int = Field(
        default_factory=lambda: os.cpu_count() or 1, ge=1, le=64, description="Fork servers of each profile."
    )
    warm: tuple[Literal["bare", "numpy", "full", "verify"], ...] = Field(
        default=("bare",), description="Profiles whose fork servers start at once. Others start when they are needed."
    )
    modules: tuple[str, ...] = Field(default=(), description="More modules to load in the profile `full`.")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for one in (url,) if isinstance(url, str) and url else url:
            if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", one):
                raise ValueError(f"{one!r} is no address of a code service. Write it as in url = 'http://127.0.0.1:8517'.")
        return url

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        if self.level is not None and self.level.rank < self.min_level.rank:
            raise ValueError(
                f"sandbox.level is {self.level.value!r} (L{self.level.rank}), which is less than sandbox.min_level,"
                f" {self.min_level.value!r} (L{self.min_level.rank}). Lower sandbox.min_level to accept it, or leave"
                " sandbox.level out."
            )
        return self

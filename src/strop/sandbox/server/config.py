"""Settings of the code service: the work that it holds, where it listens, how programs run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import Field, model_validator

from strop.config import Config
from strop.sandbox.config import SandboxConfig

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """Limits of the queue. Held work is accepted and not answered yet: it waits or runs. Beyond a limit: `overloaded`."""

    max_held: int = 250_000  # calls
    max_held_bytes: int = 1 << 30
    client_share: float = 0.75  # of both, that one client may use
    no_node_s: float = 10.0  # that a call waits without a supervisor
    linger_s: float = 5.0  # that a call with an id outlives a lost connection
    keep_s: float = 120.0  # that the answer of a call with an id is cached
    max_kept_bytes: int = 64 << 20  # of cached answers


class ServeConfig(Config):
    """Settings of `strop sandbox serve`."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8517, ge=0, le=65_535, description="Port to listen on; 0 for a free one.")
    token: str = Field(
        default="", description="Secret that requests must carry; empty: every process that reaches the port may call."
    )
    node: SandboxConfig = Field(default_factory=SandboxConfig, description="How programs run.")
    grace_s: float = Field(default=30.0, ge=0, description="Seconds after SIGTERM for running calls.")

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        if self.host not in _LOOPBACK and not self.token:
            raise ValueError(
                f"the service is to listen on {self.host!r} without a token, so that other machines could run code here."
                " Set a token, or listen on 127.0.0.1."
            )
        if 0 < len(self.token) < 8:
            raise ValueError(
                "the token has fewer than 8 characters, which can be guessed. Make one with:"
                " python -c 'import secrets; print(secrets.token_urlsafe())'."
            )
        return self

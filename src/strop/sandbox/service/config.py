"""Settings of the code service: what one request may ask for, how much is held, where it listens, which nodes it starts."""

from __future__ import annotations

import os
from typing import Self

from pydantic import Field, model_validator

from strop.config import Config
from strop.sandbox.config import SandboxConfig

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class RequestLimits(Config):
    """Of one request. A call beyond one of them is answered `rejected`, and its neighbours in a batch are not touched."""

    max_code_bytes: int = Field(default=262_144, ge=1)
    max_stdin_bytes: int = Field(default=8_000_000, ge=0)
    max_wall_s: float = Field(default=600.0, gt=0)
    max_memory_mib: int = Field(default=65_536, ge=1)
    max_processes: int = Field(default=1024, ge=1)
    max_file_mib: int = Field(default=4096, ge=0)
    max_output_bytes: int = Field(default=8_000_000, ge=256)
    max_lease_s: float = Field(default=86_400.0, gt=0)
    max_pairs: int = Field(default=65_536, ge=1)  # of one verify request
    max_answer_bytes: int = Field(default=65_536, ge=1)  # a longer one is `unreadable`
    max_cases: int = Field(default=1024, ge=1)  # of one code test


class DispatchConfig(Config):
    """Of the queue before the nodes. Work that is held is queued or running: accepted, and not answered yet."""

    limits: RequestLimits = RequestLimits()
    max_held: int = Field(default=250_000, ge=1)
    max_held_bytes: int = Field(default=1 << 30, ge=1)
    # Less than the whole, so that one client cannot have every other refused.
    client_share: float = Field(default=0.75, gt=0, le=1)
    max_sessions: int = Field(default=10_000, ge=0)
    max_wait_s: float = Field(default=1800.0, gt=0)  # in the queue; then `overloaded`
    no_node_s: float = Field(default=30.0, gt=0)  # without any node; then what waits for one is told so
    # Beyond its own limit, until a node that is alive has failed a call: for a fault of ours, so it may be generous.
    answer_grace_s: float = Field(default=60.0, gt=0)
    linger_s: float = Field(default=5.0, ge=0)  # a call with an id outlives a lost connection, for its client to come back
    keep_s: float = Field(default=120.0, ge=0)  # the answer of a call with an id is kept for as long, within the next two
    max_kept: int = Field(default=50_000, ge=0)
    max_kept_bytes: int = Field(default=64 << 20, ge=0)


class ServeConfig(Config):
    """Of `strop sandbox serve`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8517, ge=0, le=65_535)  # 0 for a free one
    # Name -> secret; the name is the client's identity in the queue. Empty: everyone who reaches the port may use it.
    tokens: dict[str, str] = Field(default_factory=dict)
    nodes_host: str = "127.0.0.1"
    nodes_port: int | None = Field(default=None, ge=0, le=65_535)  # where nodes join; None for nodes of this machine only
    nodes_token: str = ""
    num_local_nodes: int = Field(default=1, ge=0)
    node: SandboxConfig = Field(default_factory=SandboxConfig)
    dispatch: DispatchConfig = DispatchConfig(no_node_s=10.0)  # its clients try again, and know what they wait for
    max_lines: int = Field(default=100_000, ge=1)  # of one request for many runs
    max_body_bytes: int = Field(default=32 << 20, ge=1024)  # of a request that is read whole
    max_unread_bytes: int = Field(default=256 << 20, ge=1)  # of answers, on one connection; then it is cut
    max_connections: int = Field(default=4096, ge=1)
    grace_s: float = Field(default=30.0, ge=0)  # after SIGTERM, for what runs

    @model_validator(mode="after")
    def _is_not_open_to_the_network(self) -> Self:
        if self.host not in LOOPBACK and not self.tokens:
            raise ValueError(
                f"the service is to listen on {self.host!r}, where others can reach it, without a token: it runs code for"
                " whoever asks. Set a token, or listen on 127.0.0.1."
            )
        if self.nodes_port is not None and self.nodes_host not in LOOPBACK and not self.nodes_token:
            raise ValueError(
                f"nodes are to join on {self.nodes_host!r}, where others can reach it, without a token: a false node reads"
                " every program and invents every answer. Set nodes_token, or listen on 127.0.0.1."
            )
        if any(len(token) < 8 for token in (*self.tokens.values(), self.nodes_token or "none needed")):
            raise ValueError(
                "a token has fewer than 8 characters, which can be guessed. Make one with:"
                " python -c 'import secrets; print(secrets.token_urlsafe())'."
            )
        return self


def default_name() -> str:
    """A name for this process that is unlike those of others on this and other machines."""
    return f"{os.uname().nodename}-{os.getpid()}"

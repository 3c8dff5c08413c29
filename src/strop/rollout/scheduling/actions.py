"""What the scheduler asks for; whoever drives it does these things at once, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from strop.types import RolloutKey


class Why(StrEnum):
    """Why a completion is asked for, which decides how much of its context the engine has."""

    START = "start"  # the first turn: the prompt
    BRANCH = "branch"  # the first turn of a branch: all but its last ids are the parent's
    CONTINUE = "continue"  # all but the newest observation is there
    RESUME = "resume"  # its memory was given back while a slow tool ran
    RESTART = "restart"  # its engine died; the turn is sampled again from the same seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Ask `engine` for the next completion of a rollout."""

    key: RolloutKey
    engine: str
    run: int  # to be named when it comes back
    why: Why
    prefill_tokens: int  # that the engine has to compute, if it keeps what is reserved for the group and the rollout
    max_tokens: int  # of the response that are left


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTools:
    """Send the tool calls of the newest turn out."""

    key: RolloutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Abort what the rollout may be running on `engine` and give its KV memory back."""

    key: RolloutKey
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseBranch:
    """There is no room for the branch beside its parent. It is not asked for again."""

    parent: RolloutKey
    key: RolloutKey
    needed_blocks: int
    free_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDrained:
    """The engine holds nothing any more, and the scheduler has forgotten it."""

    name: str


Action: TypeAlias = Run | CallTools | Release | RefuseBranch | EngineDrained

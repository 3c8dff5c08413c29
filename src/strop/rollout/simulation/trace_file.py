"""A trace of one's own, read from a file and held against what rollouts can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

from pydantic import AfterValidator, NonNegativeFloat, NonNegativeInt, PositiveInt

from strop.config import Config, validate
from strop.errors import ConfigError, UserError
from strop.rollout.simulation.trace import Trace, TracedGroup, TracedRollout, TracedTurn
from strop.types import RolloutKey

_ItemT = TypeVar("_ItemT")


def _not_empty(items: tuple[_ItemT, ...]) -> tuple[_ItemT, ...]:
    """Asked when the items are sound; pydantic's own `min_length` calls a list empty whose items are not."""
    if not items:
        raise ValueError("is empty, but at least 1 entry is needed.")
    return items


Some: TypeAlias = Annotated[tuple[_ItemT, ...], AfterValidator(_not_empty)]

_Turn: TypeAlias = tuple[PositiveInt, NonNegativeFloat, NonNegativeInt]
"""Tokens sampled, seconds of its tools, tokens of the observation."""


_FORM = "docs/scheduler.md shows the form."


class _Group(Config):
    prompt_tokens: PositiveInt
    rollouts: Some[Some[_Turn]]


class _TraceFile(Config):
    max_tokens: PositiveInt
    groups: Some[_Group]


def load_trace(path: Path) -> Trace:
    """A trace of your own: `{"max_tokens": N, "groups": [{"prompt_tokens": P, "rollouts": [ROLLOUT, ...]}, ...]}`.

    A ROLLOUT is a list of turns `[tokens sampled, seconds of its tools, tokens of the observation]`; the last has no tools.

    Raises:
        UserError: the file is missing, is not of that form, or holds what no rollout can be; with the place of the first.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: no such trace: {error.strerror}. Give heavy, uniform, adversarial, unforeseeable, or a file."
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: not a trace (it is no JSON: {error}). {_FORM}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not a trace, but a {type(tree).__name__}. {_FORM}")
    try:
        read = validate(_TraceFile, tree, place=str(path))
    except ConfigError as error:
        raise UserError(f"{error}\n{_FORM}") from error
    groups = tuple(_group(index, group, read.max_tokens, path) for index, group in enumerate(read.groups))
    return Trace(name=path.stem, max_tokens=read.max_tokens, groups=groups)


def _group(index: int, group: _Group, max_tokens: int, path: Path) -> TracedGroup:
    rollouts = []
    for attempt, turns in enumerate(group.rollouts):
        name = f"rollout {attempt} of group {index}"
        _, tool_s, observation = turns[-1]
        if tool_s or observation:
            raise UserError(
                f"{path}: the last turn of {name} has tools of {tool_s:g} s and an observation of {observation} tokens, but the"
                " last turn of a rollout has none: nobody would read it. Add a turn after it, or make both 0."
            )
        rollout = TracedRollout(
            key=RolloutKey(task_index=index, attempt=attempt),
            turns=tuple(TracedTurn(num_tokens=num, tool_s=tool_s, observation_tokens=seen) for num, tool_s, seen in turns),
        )
        if rollout.response_tokens > max_tokens:
            raise UserError(f"{path}: {name} has {rollout.response_tokens} tokens, above max_tokens = {max_tokens}.")
        rollouts.append(rollout)
    return TracedGroup(prompt_tokens=group.prompt_tokens, rollouts=tuple(rollouts))

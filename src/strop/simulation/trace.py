"""The rollouts of one step to simulate: turns, lengths and tool latencies, made up or read from a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from strop.config import Config, validate
from strop.errors import ConfigError, UserError
from strop.run_directory import parse_json
from strop.types import RolloutKey

_NORMAL_QUANTILE_95 = 1.6448536269514722
_TOOL_LIMIT_S = 4.0
_ItemT = TypeVar("_ItemT")


class TracedTurn(NamedTuple):
    """One completion, and the tools and the observation after it. The last turn of a rollout has neither."""

    num_tokens: PositiveInt
    tool_s: NonNegativeFloat = 0.0
    observation_tokens: NonNegativeInt = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRollout:
    key: RolloutKey
    turns: tuple[TracedTurn, ...]

    @property
    def response_tokens(self) -> int:
        return sum(turn.num_tokens + turn.observation_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGroup:
    prompt_tokens: int
    rollouts: tuple[TracedRollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The rollouts of one step, in the order in which they are offered."""

    name: str
    max_tokens: int  # of a response: all that the scheduler knows of a rollout in advance
    groups: tuple[TracedGroup, ...]

    @property
    def rollouts(self) -> tuple[TracedRollout, ...]:
        return tuple(rollout for group in self.groups for rollout in group.rollouts)


def heavy_tailed(*, num_groups: int, group_size: int, seed: int, max_tokens: int = 8192) -> Trace:
    """Log-normal lengths, turns and tool latencies; 5% of the responses and of the tool calls reach their limit.

    The numbers of rStar2-Agent's first stage (arXiv 2508.20722, section 4.3): responses of up to 8192 tokens, at most 10 turns.
    The rest is assumed: the logarithm of lengths has standard deviation 1, half of its variance between tasks; the medians are
    3 turns, 60 tokens an observation and 0.3 s a tool call, which is cut at 4 s.
    """
    random = np.random.default_rng(seed)
    median = np.log(max_tokens) - _NORMAL_QUANTILE_95
    groups = []
    for index in range(num_groups):
        shift = random.normal(0.0, np.sqrt(0.5))
        rollouts = []
        for attempt in range(group_size):
            length = np.exp(median + shift + random.normal(0.0, np.sqrt(0.5)))
            total = int(np.clip(length, 16, max_tokens))
            num_turns = int(np.clip(np.round(random.lognormal(np.log(3.0), 0.5)), 1, 10))
            rollouts.append(_rollout(RolloutKey(task_index=index, attempt=attempt), total, num_turns, random))
        prompt = int(np.clip(random.lognormal(np.log(250.0), 0.4), 64, 1024))
        groups.append(TracedGroup(prompt_tokens=prompt, rollouts=tuple(rollouts)))
    return Trace(name="heavy", max_tokens=max_tokens, groups=tuple(groups))


def _rollout(key: RolloutKey, total: int, num_turns: int, random: np.random.Generator) -> TracedRollout:
    num_turns = min(num_turns, max(1, total // 32))
    observations = np.clip(random.lognormal(np.log(60.0), 0.7, num_turns - 1), 8, 512).astype(int)
    if observations.sum() > total // 2:
        observations = np.maximum(1, observations * (total // 2) // observations.sum())
    left = total - int(observations.sum())
    cuts = np.sort(random.integers(1, left, num_turns - 1)) if num_turns > 1 else np.zeros(0, dtype=int)
    lengths = np.maximum(1, np.diff(np.concatenate([[0], cuts, [left]])))
    excess = int(lengths.sum()) - left
    lengths[lengths.argmax()] -= excess
    is_stuck = random.random(num_turns - 1) < 0.05
    latencies = np.minimum(random.lognormal(np.log(0.3), 1.0, num_turns - 1), _TOOL_LIMIT_S)
    latencies = np.where(is_stuck, _TOOL_LIMIT_S, latencies)
    turns = [
        TracedTurn(num_tokens=int(length), tool_s=float(latency), observation_tokens=int(observation))
        for length, latency, observation in zip(lengths[:-1], latencies, observations, strict=True)
    ]
    return TracedRollout(key=key, turns=(*turns, TracedTurn(num_tokens=int(lengths[-1]))))


def _trace(name: str, num_groups: int, group_size: int, max_tokens: int, make: Callable[[RolloutKey], TracedRollout]) -> Trace:
    """Groups with prompts of 250 tokens; `make` is called in the order of groups and attempts."""
    groups = []
    for index in range(num_groups):
        rollouts = tuple(make(RolloutKey(task_index=index, attempt=attempt)) for attempt in range(group_size))
        groups.append(TracedGroup(prompt_tokens=250, rollouts=rollouts))
    return Trace(name=name, max_tokens=max_tokens, groups=tuple(groups))


def uniform(*, num_groups: int, group_size: int, seed: int) -> Trace:
    """All rollouts are alike: 4 turns of 480 tokens, tools of 0.3 s. A scheduler can gain nothing but overlap."""
    turns = (*(TracedTurn(num_tokens=480, tool_s=0.3, observation_tokens=64) for _ in range(3)), TracedTurn(num_tokens=480))
    return _trace("uniform", num_groups, group_size, 8192, lambda key: TracedRollout(key=key, turns=turns))


def adversarial(*, num_groups: int, group_size: int, seed: int, max_tokens: int = 8192) -> Trace:
    """Against starting rollouts in the order of their offer: the tasks with long rollouts are offered last.

    Nineteen of twenty tasks take 300 to 1500 tokens, in rising order; the rollouts of the others all reach the limit.
    """
    random = np.random.default_rng(seed)
    typical = np.linspace(300, 1500, num_groups - max(1, num_groups // 20))

    def make(key: RolloutKey) -> TracedRollout:
        is_long = key.task_index >= len(typical)
        total = max_tokens if is_long else int(typical[key.task_index] * random.uniform(0.8, 1.25))
        return _rollout(key, total, 3, random)

    return _trace("adversarial", num_groups, group_size, max_tokens, make)


def unforeseeable(*, num_groups: int, group_size: int, seed: int, max_tokens: int = 8192) -> Trace:
    """Against estimating from a group's first rollouts: the last one of each group reaches the limit, the others end soon.

    The long ones have a single turn, so nothing is known of them until they end, and all groups are alike. A policy that does
    not know lengths in advance cannot tell them apart.
    """
    random = np.random.default_rng(seed)

    def make(key: RolloutKey) -> TracedRollout:
        if key.attempt == group_size - 1:
            return TracedRollout(key=key, turns=(TracedTurn(num_tokens=max_tokens),))
        return _rollout(key, int(random.integers(600, 1000)), 3, random)

    return _trace("unforeseeable", num_groups, group_size, max_tokens, make)


TRACES: dict[str, Callable[..., Trace]] = {
    "heavy": heavy_tailed,
    "uniform": uniform,
    "adversarial": adversarial,
    "unforeseeable": unforeseeable,
}


NonEmpty: TypeAlias = Annotated[tuple[_ItemT, ...], Field(min_length=1)]


class _Group(Config):
    prompt_tokens: PositiveInt
    rollouts: NonEmpty[NonEmpty[TracedTurn]]


class _TraceFile(Config):
    max_tokens: PositiveInt
    groups: NonEmpty[_Group]

    @model_validator(mode="after")
    def _check_rollouts(self) -> Self:
        for index, group in enumerate(self.groups):
            for attempt, turns in enumerate(group.rollouts):
                num_tokens = sum(sampled + observed for sampled, _, observed in turns)
                name = f"rollout {attempt} of group {index}"
                if any(turns[-1][1:]):
                    raise ValueError(f"the last turn of {name} has tools or an observation. Make both 0, or add a turn.")
                if num_tokens > self.max_tokens:
                    raise ValueError(f"{name} has {num_tokens} tokens, above max_tokens = {self.max_tokens}.")
        return self


def load_trace(path: Path) -> Trace:
    """Read a trace: `{"max_tokens": N, "groups": [{"prompt_tokens": P, "rollouts": [ROLLOUT, ...]}, ...]}`.

    A ROLLOUT is a list of turns `[tokens sampled, seconds of its tools, tokens of the observation]`; the last has no tools.

    Raises:
        UserError: the file is missing or invalid; with the place of the first error.
    """
    try:
        tree = parse_json(path.read_bytes())
        if not isinstance(tree, dict):
            raise ValueError(f"a trace is an object, but this is a {type(tree).__name__}.")
        read = validate(_TraceFile, tree, place=str(path))
    except OSError as error:
        names = ", ".join(TRACES)
        raise UserError(f"{path}: cannot read this trace: {error.strerror}. Give a file or one of {names}.") from error
    except (ConfigError, ValueError) as error:
        raise UserError(f"{path}: not a trace: {error}\ndocs/scheduler.md shows the form.") from error
    groups = tuple(_load_group(index, group) for index, group in enumerate(read.groups))
    return Trace(name=path.stem, max_tokens=read.max_tokens, groups=groups)


def _load_group(index: int, group: _Group) -> TracedGroup:
    rollouts = tuple(
        TracedRollout(key=RolloutKey(task_index=index, attempt=attempt), turns=turns)
        for attempt, turns in enumerate(group.rollouts)
    )
    return TracedGroup(prompt_tokens=group.prompt_tokens, rollouts=rollouts)

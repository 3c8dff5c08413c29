"""What the rollouts of one step will turn out to be: turns, lengths, tool latencies. Nobody but the simulator may look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strop.types import RolloutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTurn:
    """One completion, and the tools and the observation after it; the last turn of a rollout has none."""

    num_tokens: int
    tool_s: float = 0.0
    observation_tokens: int = 0


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
    max_tokens: int  # of a response: what the scheduler is told of every rollout
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


_NORMAL_QUANTILE_95 = 1.6448536269514722
_TOOL_LIMIT_S = 4.0


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


def uniform(*, num_groups: int, group_size: int, seed: int) -> Trace:
    """Every rollout is like every other: 4 turns of 480 tokens, tools of 0.3 s. Nothing to be gained but overlap."""
    turns = (*(TracedTurn(num_tokens=480, tool_s=0.3, observation_tokens=64) for _ in range(3)), TracedTurn(num_tokens=480))
    return Trace(
        name="uniform",
        max_tokens=8192,
        groups=tuple(
            TracedGroup(
                prompt_tokens=250,
                rollouts=tuple(
                    TracedRollout(key=RolloutKey(task_index=index, attempt=attempt), turns=turns)
                    for attempt in range(group_size)
                ),
            )
            for index in range(num_groups)
        ),
    )


def adversarial(*, num_groups: int, group_size: int, seed: int, max_tokens: int = 8192) -> Trace:
    """Against whoever starts rollouts in the order of their offer: the tasks whose rollouts are long are offered last.

    Nineteen of twenty tasks take 300 to 1500 tokens, in rising order; the rollouts of the others all go to the limit.
    """
    random = np.random.default_rng(seed)
    num_long = max(1, num_groups // 20)
    typical = np.linspace(300, 1500, num_groups - num_long)
    groups = []
    for index in range(num_groups):
        is_long = index >= len(typical)
        rollouts = []
        for attempt in range(group_size):
            total = max_tokens if is_long else int(typical[index] * random.uniform(0.8, 1.25))
            rollouts.append(_rollout(RolloutKey(task_index=index, attempt=attempt), total, 3, random))
        groups.append(TracedGroup(prompt_tokens=250, rollouts=tuple(rollouts)))
    return Trace(name="adversarial", max_tokens=max_tokens, groups=tuple(groups))


def unforeseeable(*, num_groups: int, group_size: int, seed: int, max_tokens: int = 8192) -> Trace:
    """Against whoever learns from a group's first rollouts: of each group the last goes to the limit, the others end soon.

    The long ones make one turn, so that nothing is known of them until they end, and groups differ in nothing. No policy that
    does not know lengths beforehand can tell them apart.
    """
    random = np.random.default_rng(seed)
    groups = []
    for index in range(num_groups):
        rollouts = []
        for attempt in range(group_size):
            key = RolloutKey(task_index=index, attempt=attempt)
            if attempt == group_size - 1:
                rollouts.append(TracedRollout(key=key, turns=(TracedTurn(num_tokens=max_tokens),)))
            else:
                rollouts.append(_rollout(key, int(random.integers(600, 1000)), 3, random))
        groups.append(TracedGroup(prompt_tokens=250, rollouts=tuple(rollouts)))
    return Trace(name="unforeseeable", max_tokens=max_tokens, groups=tuple(groups))


TRACES: dict[str, Callable[..., Trace]] = {
    "heavy": heavy_tailed,
    "uniform": uniform,
    "adversarial": adversarial,
    "unforeseeable": unforeseeable,
}

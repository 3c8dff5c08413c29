"""Rewards for the length of a response, in tokens that the policy sampled, and for repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from strop.rewards.base import ACCURACY, Part, RolloutPart, num_sampled_tokens, words, written
from strop.types import Task, Trajectory

MAX_TOKENS = 10**9


def soft_overlong(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """0 up to max - cache, then linear to -1 at max, and -1 beyond. DAPO (arXiv:2503.14476) Eq. 13."""
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - cache_tokens)) / cache_tokens))


def cosine_scaled(num_tokens: int, *, max_tokens: int, short: float, long: float) -> float:
    """From `short` at length 0 to `long` at `max_tokens`, along half a cosine. Yeo et al. (arXiv:2502.03373), open-r1.

    `long` beyond `max_tokens`; in open-r1 the reward rises again there.
    """
    progress = min(1.0, num_tokens / max_tokens)
    return long + (short - long) * (1 + math.cos(math.pi * progress)) / 2


def relative_lengths(lengths: Sequence[int], are_correct: Sequence[bool]) -> list[float]:
    """0.5 - (length - min) / (max - min) within a group; at most 0 for wrong answers; 0 if all lengths are equal.

    Kimi k1.5 (arXiv:2501.12599) section 2.3.3.
    """
    low, high = min(lengths), max(lengths)
    if low == high:
        return [0.0] * len(lengths)
    rewards = [0.5 - (length - low) / (high - low) for length in lengths]
    return [reward if correct else min(0.0, reward) for reward, correct in zip(rewards, are_correct, strict=True)]


def repetition_penalty(text: str) -> float:
    """different / all trigrams of words - 1; 0 without trigrams. Yeo et al. (arXiv:2502.03373), open-r1.

    Case does not count. In Chinese and Japanese every character is a word; open-r1 uses a segmenter.
    """
    found = words(text.lower())
    trigrams = list(zip(found, found[1:], found[2:], strict=False))
    return len(set(trigrams)) / len(trigrams) - 1 if trigrams else 0.0


class RepetitionPart(RolloutPart):
    """A penalty for repeated trigrams of words, down to -1."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return repetition_penalty(written(trajectory))


class SoftOverlongPart(RolloutPart):
    """0 up to max_tokens - cache_tokens of a response, down to -1 at max_tokens; DAPO."""

    class Config(RolloutPart.Config):
        max_tokens: int = Field(
            default=20_480, ge=1, le=MAX_TOKENS, description="Length of a response at which the value is -1."
        )
        cache_tokens: int = Field(
            default=4096, ge=1, le=MAX_TOKENS, description="Tokens before that over which it falls from 0."
        )

        @model_validator(mode="after")
        def _has_a_free_part(self) -> Self:
            if self.cache_tokens > self.max_tokens:
                raise ValueError(f"cache_tokens is {self.cache_tokens}, more than max_tokens = {self.max_tokens}. Lower it.")
            return self

    config: Config

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        max_tokens, cache_tokens = self.config.max_tokens, self.config.cache_tokens
        return soft_overlong(trajectory.num_response_tokens, max_tokens=max_tokens, cache_tokens=cache_tokens)


class AfterAccuracyPart(Part):
    """A part that needs to know whether the answer is right."""

    class Config(Part.Config):
        accuracy: str = Field(default=ACCURACY, description="The part that says whether the answer is right.")

    config: Config


class CosinePart(AfterAccuracyPart):
    """Half a cosine over length, between two values for right answers and two for wrong ones."""

    class Config(AfterAccuracyPart.Config):
        max_tokens: int = Field(default=1000, ge=1, le=MAX_TOKENS, description="Length at which the long value is reached.")
        correct_short: float = Field(default=1.0, ge=-1e6, le=1e6, description="Value of a short right answer.")
        correct_long: float = Field(default=0.5, ge=-1e6, le=1e6, description="Value of a long right answer.")
        wrong_short: float = Field(default=0.0, ge=-1e6, le=1e6, description="Value of a short wrong answer.")
        wrong_long: float = Field(default=-0.5, ge=-1e6, le=1e6, description="Value of a long wrong answer.")

    config: Config

    def score_given(self, trajectory: Trajectory, *, is_correct: bool) -> float:
        short = self.config.correct_short if is_correct else self.config.wrong_short
        long = self.config.correct_long if is_correct else self.config.wrong_long
        return cosine_scaled(num_sampled_tokens(trajectory), max_tokens=self.config.max_tokens, short=short, long=long)


class LengthPart(AfterAccuracyPart):
    """Rewards responses that are shorter than the others of their group, if they are right; Kimi k1.5."""

    def score_group(self, trajectories: Sequence[Trajectory], are_correct: Sequence[bool]) -> list[float]:
        return relative_lengths([num_sampled_tokens(each) for each in trajectories], are_correct)

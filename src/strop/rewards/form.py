"""Rewards for the form and the length of a response: blocks, tags, fenced code, steps, tool calls, repetition; ARPO's reward.

Lengths are in tokens that the policy sampled.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from strop.answer_text import boxed
from strop.rewards.base import (
    ACCURACY,
    CLOSING,
    OPENING,
    Part,
    PositiveWeight,
    RolloutPart,
    final_text,
    has_called,
    last_answer_block,
    num_sampled_tokens,
    words,
    written,
)
from strop.rollout.prompt import AnswerForm
from strop.rollout.tag_calls import TagCalls
from strop.rollout.tool_calls import FailedCall
from strop.types import Task, ToolOutcome, Trajectory

_STEPS = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)
_ENOUGH_STEPS = 3
_CALL = r"<(?P<name>(?!answer>)[\w.-]+)>(?:(?!</?(?P=name)>).)*</(?P=name)>"  # of any tool


def reasoning_steps(text: str) -> float:
    """A third for each sign of a step, at most 1: numbers, bullets, `First,`. open-r1; easily gamed, so only for reports."""
    return min(1.0, len(_STEPS.findall(text)) / _ENOUGH_STEPS)


class FormatPart(RolloutPart):
    """Form of the whole response: 1 if it is a thought block followed by an answer block, else 0.

    DeepSeek-R1 (arXiv 2501.12948) section 2.1. Each of the four tags must occur exactly once; open-r1's pattern accepts
    repeated blocks.
    """

    class Config(RolloutPart.Config):
        weight: PositiveWeight = 1.0
        think_tag: str = Field(default="think", pattern=r"^\w+$", description="Name of the tag around thoughts.")
        is_prefilled: bool = Field(default=False, description="The prompt ends with the opening tag.")
        newlines: bool = Field(default=True, description="Of format and turns_format: each tag must be on its own line.")

    config: Config

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return self.grade([turn.completion_text for turn in trajectory.turns])

    def grade(self, turns: Sequence[str]) -> float:
        """The value of a response of these turns."""
        return float(self.is_strict("".join(turns), newlines=self.config.newlines))

    def is_strict(self, text: str, *, newlines: bool) -> bool:
        """Whether `text` is a thought block and an answer block.

        Args:
            newlines: each tag must be on its own line, as in open-r1's pattern; otherwise any whitespace, or none, is allowed.
        """
        tag, text = self.config.think_tag, self.whole(text)
        gap, edge = ("\n", "\n") if newlines else (r"\s*", "")  # .*? matches blanks too; another \\s* would backtrack
        opening = f"<{tag}>{'' if self.config.is_prefilled else edge}"
        pattern = rf"{opening}.*?{edge}</{tag}>{gap}<answer>{edge}.*?{edge}</answer>"
        text = text.rstrip() if newlines else text.strip()
        return self.counts(text) == [1, 1, 1, 1] and re.fullmatch(pattern, text, re.DOTALL) is not None

    def whole(self, text: str) -> str:
        """`text` with the opening tag that belongs to the prompt."""
        return f"<{self.config.think_tag}>{text}" if self.config.is_prefilled else text

    def counts(self, text: str) -> list[int]:
        """How often each tag occurs: those of the thought, those of the answer."""
        tag = self.config.think_tag
        return [text.count(each) for each in (f"<{tag}>", f"</{tag}>", OPENING, CLOSING)]


class TurnsFormatPart(FormatPart):
    """Form of each turn: 1 if each is a thought block followed by calls, and the last one as `FormatPart` wants it; else 0.

    DeepSeek-R1 calls no tools and defines the form of a single turn; this is our extension. Only the tags of calls are checked.
    If the prompt has the opening tag, it has that of each turn.
    """

    def grade(self, turns: Sequence[str]) -> float:
        tag, edge = self.config.think_tag, "\n" if self.config.newlines else ""
        pattern = rf"<{tag}>{'' if self.config.is_prefilled else edge}.*?{edge}</{tag}>(?:\s*{_CALL})+"
        for text in turns[:-1]:
            said = self.whole(text.rstrip())
            if self.counts(said) != [1, 1, 0, 0] or not re.fullmatch(pattern, said, re.DOTALL):
                return 0.0
        return super().grade(turns[-1:])


class TagCountPart(FormatPart):
    """A quarter for each of the four tags that occurs exactly once; open-r1."""

    def grade(self, turns: Sequence[str]) -> float:
        return self.counts(self.whole("".join(turns))).count(1) / 4


class CodeFormatPart(FormatPart):
    """1 if the form is that of `FormatPart`, on any lines, and the answer holds a fenced block of Python; open-r1."""

    def grade(self, turns: Sequence[str]) -> float:
        text = "".join(turns)
        block = last_answer_block(text) or ""
        has_code = re.search(r"^```python\n.*?^```", block.strip(), re.DOTALL | re.MULTILINE) is not None
        return float(has_code and self.is_strict(text, newlines=False))


class CalledPart(RolloutPart):
    """1 if a tool ran without error."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return float(has_called(trajectory))


class ReasoningStepsPart(RolloutPart):
    """Signs of steps; easily gamed."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return reasoning_steps(written(trajectory))


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
    """Half a cosine over length, from 1 to 0.5 for right answers and from 0 to -0.5 for wrong ones."""

    class Config(AfterAccuracyPart.Config):
        max_tokens: int = Field(default=1000, ge=1, le=MAX_TOKENS, description="Length at which the long value is reached.")

    config: Config

    def score_given(self, trajectory: Trajectory, *, is_correct: bool) -> float:
        short, long = (1.0, 0.5) if is_correct else (0.0, -0.5)  # the defaults of open-r1
        return cosine_scaled(num_sampled_tokens(trajectory), max_tokens=self.config.max_tokens, short=short, long=long)


class LengthPart(AfterAccuracyPart):
    """Rewards responses that are shorter than the others of their group, if they are right; Kimi k1.5."""

    def score_group(self, trajectories: Sequence[Trajectory], are_correct: Sequence[bool]) -> list[float]:
        return relative_lengths([num_sampled_tokens(each) for each in trajectories], are_correct)


INVALID = -1.0

TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WHOLE = ("yes", "no", "noanswer")


def arpo_reward(
    trajectory: Trajectory, references: Sequence[str], *, multi_tool: Sequence[str] = ("search", "python"), bonus: float = 0.1
) -> float:
    r"""The layered reward of ARPO (arXiv 2507.19849): form, then the answer by its words, and a bonus for using all tools.

    -1                 if the form is wrong or there is no answer
    F1                 of the last \boxed{} in the answer, against the best of the references
    F1 + r_M           if that is more than 0 and every tool of `multi_tool` was used; r_M = 0.1

    A tool counts as used if a call of its name reached it. The released code counts closing tags, of empty calls too.
    """
    answer = _answer(trajectory)
    if answer is None:
        return INVALID
    accuracy = max((token_f1(answer, reference) for reference in references), default=0.0)
    called = {call.name for call in trajectory.calls if call.outcome.is_dispatched}
    return accuracy + bonus if accuracy > 0 and multi_tool and called >= set(multi_tool) else accuracy


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words in common, as SQuAD (arXiv:1606.05250) counts them; yes, no and noanswer match only themselves.

    Numbers are compared as words: 12.0 has nothing in common with 12.
    """
    said, wanted = normalized(answer), normalized(reference)
    if said != wanted and (said in _WHOLE or wanted in _WHOLE):
        return 0.0
    of_answer, of_reference = said.split(), wanted.split()
    num_common = sum((Counter(of_answer) & Counter(of_reference)).values())
    if not num_common:
        return 0.0
    precision, recall = num_common / len(of_answer), num_common / len(of_reference)
    return 2 * precision * recall / (precision + recall)


def normalized(text: str) -> str:
    r"""Lower case, without punctuation, articles and LaTeX text commands; one blank between words."""
    bare = TEXT_COMMAND.sub(r"\1", text).lower()
    bare = "".join(character for character in bare if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _answer(trajectory: Trajectory) -> str | None:
    """The last box of the answer tag; None if the form is wrong or the policy did not end the rollout itself."""
    last, said = final_text(trajectory), written(trajectory)
    if last is None or not _is_well_formed(trajectory, said):
        return None
    boxes = boxed(last_answer_block(last) or "")
    return boxes[-1].strip() or None if boxes else None


def _is_well_formed(trajectory: Trajectory, said: str) -> bool:
    """Paired thought tags, one pair of answer tags, every call answered, and no result written by the policy itself."""
    if not 0 < said.count("<think>") == said.count("</think>") or "<result>" in said:
        return False
    if not said.count(OPENING) == said.count(CLOSING) == 1:
        return False
    calls = TagCalls(())
    return not any(
        _has_half_a_call(calls, turn.completion_text)
        or (calls.has_closed_call(turn.completion_text) and not trajectory.is_answered(at))
        for at, turn in enumerate(trajectory.turns)
    )


def _has_half_a_call(calls: TagCalls, text: str) -> bool:
    """Whether a tag is left open, or closed without being opened, as the player of the rollout reads it."""
    failed = [call for call in calls.parse(text, max_calls=1) if isinstance(call, FailedCall)]
    return any(call.outcome is ToolOutcome.UNCLOSED or f"<{call.name}>" not in text for call in failed)


class F1Part(RolloutPart):
    """ARPO's layered reward: -1 for a wrong form, else F1 of words, and a bonus for using every tool."""

    class Config(RolloutPart.Config):
        weight: PositiveWeight = 1.0
        multi_tool: tuple[str, ...] = Field(
            default=("search", "python"), description="Tools that must all be used for the bonus."
        )
        bonus: float = Field(default=0.1, ge=0, le=1e6, description="r_M, the bonus for using all of multi_tool.")

    config: Config

    is_verifier = True
    compares_answers = True
    answer_form = AnswerForm.ARPO

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return arpo_reward(trajectory, [task.answer], multi_tool=self.config.multi_tool, bonus=self.config.bonus)

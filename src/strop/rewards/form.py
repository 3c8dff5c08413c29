"""Rewards for the form of a response: blocks, tags, fenced code, steps, tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from strop.rewards.base import PositiveWeight, RolloutPart, has_called, last_answer_block, written
from strop.types import Task, Trajectory

_STEPS = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)
_ENOUGH_STEPS = 3
_CALL = r"<(?P<name>(?!answer>)[\w.-]+)>(?:(?!</?(?P=name)>).)*</(?P=name)>"  # of any tool


def strict_format(text: str, *, think_tag: str = "think", is_prefilled: bool = False, newlines: bool = True) -> float:
    """1 if all of `text` is a thought block followed by an answer block, else 0. DeepSeek-R1 (arXiv 2501.12948) section 2.1.

    Each of the four tags must occur exactly once; open-r1's pattern accepts repeated blocks.

    Args:
        think_tag: `think`, or `reason` in rStar2-Agent's prompt.
        is_prefilled: the opening tag belongs to the prompt.
        newlines: each tag must be on its own line, as in open-r1's pattern; otherwise any whitespace, or none, is allowed.
    """
    gap, edge = ("\n", "\n") if newlines else (r"\s*", "")  # .*? matches blanks too; another \\s* would backtrack
    text = f"<{think_tag}>{text}" if is_prefilled else text
    opening = rf"<{think_tag}>" + ("" if is_prefilled else edge)
    pattern = rf"{opening}.*?{edge}</{think_tag}>{gap}<answer>{edge}.*?{edge}</answer>"
    text = text.rstrip() if newlines else text.strip()
    return float(_has_each_once(text, think_tag) and re.fullmatch(pattern, text, re.DOTALL) is not None)


def turns_format(turns: Sequence[str], *, think_tag: str = "think", is_prefilled: bool = False, newlines: bool = True) -> float:
    """1 if each of `turns` is a thought block followed by calls, and the last one has the form of `strict_format`; else 0.

    DeepSeek-R1 calls no tools and defines the form of a single turn; this is our extension. Only the tags of calls are checked.

    Args:
        is_prefilled: the opening tag of each turn belongs to the prompt.
    """
    edge = "\n" if newlines else ""
    for text in turns[:-1]:
        opening = f"<{think_tag}>" if is_prefilled else ""
        pattern = rf"<{think_tag}>{'' if opening else edge}.*?{edge}</{think_tag}>(?:\s*{_CALL})+"
        said = opening + text.rstrip()
        if [said.count(tag) for tag in _tags(think_tag)] != [1, 1, 0, 0] or not re.fullmatch(pattern, said, re.DOTALL):
            return 0.0
    last = turns[-1] if turns else ""
    return strict_format(last, think_tag=think_tag, is_prefilled=is_prefilled, newlines=newlines)


def tag_count(text: str, *, think_tag: str = "think", is_prefilled: bool = False) -> float:
    """A quarter for each of the four tags that occurs exactly once; open-r1."""
    text = f"<{think_tag}>{text}" if is_prefilled else text
    return sum(text.count(tag) == 1 for tag in _tags(think_tag)) / 4


def code_format(text: str, *, think_tag: str = "think", is_prefilled: bool = False) -> float:
    """1 if the form is that of `strict_format` and the answer holds a fenced block of Python; open-r1."""
    block = last_answer_block(text) or ""
    has_code = re.search(r"^```python\n.*?^```", block.strip(), re.DOTALL | re.MULTILINE) is not None
    return float(has_code and bool(strict_format(text, think_tag=think_tag, is_prefilled=is_prefilled, newlines=False)))


def reasoning_steps(text: str) -> float:
    """A third for each sign of a step, at most 1: numbers, bullets, `First,`. open-r1; easily gamed, so only for reports."""
    return min(1.0, len(_STEPS.findall(text)) / _ENOUGH_STEPS)


def _tags(think_tag: str) -> tuple[str, ...]:
    return f"<{think_tag}>", f"</{think_tag}>", "<answer>", "</answer>"


def _has_each_once(text: str, think_tag: str) -> bool:
    return all(text.count(tag) == 1 for tag in _tags(think_tag))


class FormatPart(RolloutPart):
    """Form of the whole response, a thought and then an answer: 0 or 1."""

    class Config(RolloutPart.Config):
        weight: PositiveWeight = 1.0
        think_tag: str = Field(default="think", pattern=r"^\w+$", description="Name of the tag around thoughts.")
        is_prefilled: bool = Field(default=False, description="The prompt ends with the opening tag.")
        newlines: bool = Field(default=True, description="Of format and turns_format: each tag must be on its own line.")

    config: Config

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return strict_format(written(trajectory), **self._tags, newlines=self.config.newlines)

    @property
    def _tags(self) -> dict[str, Any]:
        return {"think_tag": self.config.think_tag, "is_prefilled": self.config.is_prefilled}


class TurnsFormatPart(FormatPart):
    """Form of each turn: thoughts and calls, and in the last one a thought and an answer: 0 or 1."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        turns = [turn.completion_text for turn in trajectory.turns]
        return turns_format(turns, **self._tags, newlines=self.config.newlines)


class TagCountPart(FormatPart):
    """A quarter for each of the four tags that occurs exactly once."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return tag_count(written(trajectory), **self._tags)


class CodeFormatPart(FormatPart):
    """As `FormatPart`, with a fenced block of Python in the answer."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return code_format(written(trajectory), **self._tags)


class CalledPart(RolloutPart):
    """1 if a tool ran without error."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return float(has_called(trajectory))


class ReasoningStepsPart(RolloutPart):
    """Signs of steps; easily gamed."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return reasoning_steps(written(trajectory))

"""Rewards for the form of a response: blocks, tags, fenced code, steps. Pure functions of what the policy wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence

from strop.rewards.answers import last_answer_block

_STEPS = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)
_ENOUGH_STEPS = 3
_CALL = r"<(?P<name>(?!answer>)[\w.-]+)>(?:(?!</?(?P=name)>).)*</(?P=name)>"  # of any tool


def strict_format(text: str, *, think_tag: str = "think", is_prefilled: bool = False, newlines: bool = True) -> float:
    """1 where all of `text` is a block of thought and then one of answer, else 0. DeepSeek-R1 (arXiv 2501.12948) section 2.1.

    Each of the four tags stands there once: in open-r1 repeated blocks passed its pattern.

    Args:
        think_tag: `think`, or `reason` in rStar2-Agent's prompt.
        is_prefilled: the opening tag belongs to the prompt.
        newlines: each tag stands on a line of its own, as in open-r1's pattern; else any whitespace, or none, will do.
    """
    gap, edge = ("\n", "\n") if newlines else (r"\s*", "")  # .*? takes blanks too: more ways to share them would be tried
    text = f"<{think_tag}>{text}" if is_prefilled else text
    opening = rf"<{think_tag}>" + ("" if is_prefilled else edge)
    pattern = rf"{opening}.*?{edge}</{think_tag}>{gap}<answer>{edge}.*?{edge}</answer>"
    return float(_has_each_once(text, think_tag) and re.fullmatch(pattern, text.rstrip(), re.DOTALL) is not None)


def turns_format(turns: Sequence[str], *, think_tag: str = "think", is_prefilled: bool = False, newlines: bool = True) -> float:
    """1 where each of `turns` is a block of thought and then of calls, and the last has the form of `strict_format`; else 0.

    Ours: DeepSeek-R1 calls no tool, and its form holds for one turn alone. Of calls the tags are looked at, not what they hold.

    Args:
        is_prefilled: the opening tag of the first turn belongs to the prompt.
    """
    edge = "\n" if newlines else ""
    for number, text in enumerate(turns[:-1]):
        opening = f"<{think_tag}>" if is_prefilled and number == 0 else ""
        pattern = rf"<{think_tag}>{'' if opening else edge}.*?{edge}</{think_tag}>(?:\s*{_CALL})+"
        said = opening + text.rstrip()
        if [said.count(tag) for tag in _tags(think_tag)] != [1, 1, 0, 0] or not re.fullmatch(pattern, said, re.DOTALL):
            return 0.0
    last = turns[-1] if turns else ""
    return strict_format(last, think_tag=think_tag, is_prefilled=is_prefilled and len(turns) == 1, newlines=newlines)


def tag_count(text: str, *, think_tag: str = "think", is_prefilled: bool = False) -> float:
    """A quarter for each of the four tags that occurs exactly once; open-r1."""
    text = f"<{think_tag}>{text}" if is_prefilled else text
    return sum(text.count(tag) == 1 for tag in _tags(think_tag)) / 4


def code_format(text: str, *, language: str = "python", think_tag: str = "think", is_prefilled: bool = False) -> float:
    """1 where the form is that of `strict_format`, and the answer holds a fenced block of `language`; open-r1."""
    block = last_answer_block(text) or ""
    has_code = re.search(rf"^```{re.escape(language)}\n.*?^```", block.strip(), re.DOTALL | re.MULTILINE) is not None
    return float(has_code and bool(strict_format(text, think_tag=think_tag, is_prefilled=is_prefilled, newlines=False)))


def reasoning_steps(text: str) -> float:
    """A third for each sign of a step, up to 1: numbers, bullets, `First,`. open-r1; easily gamed, so for reports."""
    return min(1.0, len(_STEPS.findall(text)) / _ENOUGH_STEPS)


def _tags(think_tag: str) -> tuple[str, ...]:
    return f"<{think_tag}>", f"</{think_tag}>", "<answer>", "</answer>"


def _has_each_once(text: str, think_tag: str) -> bool:
    return all(text.count(tag) == 1 for tag in _tags(think_tag))

"""A language model as judge: which of two responses is better, and how good one is.

A pair is shown in random order and judged by five verdicts, as in Arena-Hard and in the preference data of DeepSeek-R1
(arXiv 2501.12948, section 3.1); a single response gets a number. A reply without a verdict is requested again. A response
without a verdict in any reply, or one that the service refuses (too long, for example), has no judgement. Too many of these in
a row end the run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from strop.chat_client import ChatClient, ChatServiceConfig, Reply
from strop.config import Config
from strop.http import Failures, ServiceRefused
from strop.rewards.base import NotJudged, RunService
from strop.rewards.scorers import Exchange, PreferenceConfig, PreferencePart
from strop.types import derive_seed

Parse: TypeAlias = Callable[[str], float | None]


def builtin_prompt(name: str) -> str:
    """The text of a file next to this one."""
    return Path(__file__).with_name(f"{name}.prompt").read_text(encoding="utf-8").removesuffix("\n")


PAIR_PROMPT = builtin_prompt("judge_pair")

SCORE_PROMPT = builtin_prompt("judge_score")

# A verdict may name either side first: reading only one direction would favour one side.
_BETTER = {">>": 2.0, ">": 1.0, "=": 0.0, "<": -1.0, "<<": -2.0}
_VERDICT = re.compile(r"\[\[\s*([AB])\s*(>>|>|=|<<|<)\s*([AB])\s*\]\]")
_SCORE = re.compile(r"\[\[\s*(-?\d+(?:\.\d+)?)\s*(?:/\s*\d+)?\s*\]\]")


class JudgeConfig(Config):
    """A language model that judges, and what it is asked."""

    service: ChatServiceConfig = Field(description="The model and its address.")
    score_prompt: str | None = Field(
        default=None,
        description="Prompt for one response, with $prompt, $response, $reference (the right answers), $lowest and $highest; or"
        ' "arpo_judge", that of ARPO\'s evaluation. Unset: the built-in one.',
    )
    pair_prompt: str | None = Field(
        default=None, description="Prompt for two responses, with $prompt, $a and $b. Unset: the built-in one."
    )
    lowest: float = Field(default=1.0, ge=-1e6, le=1e6, description="The lowest number that the judge may give.")
    highest: float = Field(default=10.0, ge=-1e6, le=1e6, description="The highest number that the judge may give.")
    words: Mapping[str, float] = Field(
        default={},
        description="Values of verdicts in words, instead of numbers in brackets. Of several in a reply the lowest counts.",
    )
    tries: int = Field(default=3, ge=1, le=1000, description="Replies requested until one holds a verdict.")

    @field_validator("score_prompt")
    @classmethod
    def _shows_the_response(cls, prompt: str | None) -> str | None:
        if prompt == "arpo_judge":  # of ARPO's released evaluation, src/llm_evaluator_sds.py
            prompt = builtin_prompt("arpo_judge")
        known = {"prompt", "response", "reference", "lowest", "highest"}
        return prompt and checked_prompt(prompt, known, needed={"response"})

    @field_validator("pair_prompt")
    @classmethod
    def _shows_both(cls, prompt: str | None) -> str | None:
        return prompt and checked_prompt(prompt, {"prompt", "a", "b"}, needed={"a", "b"})

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if self.highest <= self.lowest:
            raise ValueError(f"highest is {self.highest:g} and lowest is {self.lowest:g}: the range is empty. Raise highest.")
        if outside := [word for word, value in self.words.items() if not self.lowest <= value <= self.highest]:
            value, limits = self.words[outside[0]], f"lowest = {self.lowest:g} and highest = {self.highest:g}"
            raise ValueError(
                f"words gives {outside[0]!r} the value {value:g}, which is outside {limits}. Set these to its range."
            )
        return self


class ModelJudge:
    """Judges through `client`, which it closes."""

    def __init__(self, config: JudgeConfig, client: ChatClient | None = None) -> None:
        self.config = config
        # Replies without a verdict are not stored: they would fail a later run with a repaired judge.
        self.client = ChatClient(config.service, is_kept=self._has_verdict) if client is None else client
        self._name = f"the judge {config.service.model!r} at {config.service.url}"
        self._failures = Failures()

    async def compare(self, prompt: str, first: str, second: str, *, judgement: int = 0) -> float | None:
        """How much better `first` is than `second`, from -2 to 2; None if there is no judgement.

        Args:
            judgement: its number; each draws its own order, the same in every run.

        Raises:
            ServiceRefused: the service failed, or too many responses in a row have no judgement.
        """
        is_swapped = random.Random(derive_seed("judge", prompt, first, second, judgement)).random() < 0.5
        a, b = (second, first) if is_swapped else (first, second)
        found = await self.compare_as_shown(prompt, a, b, judgement=judgement)
        return -found if found is not None and is_swapped else found

    async def compare_as_shown(self, prompt: str, a: str, b: str, *, judgement: int = 0) -> float | None:
        """How much better `a` is than `b`, with `a` shown first. As `compare` otherwise."""
        asked = Template(self.config.pair_prompt or PAIR_PROMPT).substitute(prompt=prompt, a=a, b=b)
        try:
            return await self._ask(asked, _verdict, judgement=judgement)
        except NotJudged:
            return None

    async def score(self, exchange: Exchange, *, judgement: int = 0) -> float:
        """From `lowest` to `highest`. Raises `NotJudged` if there is no judgement, otherwise as `compare`."""
        limits = {"lowest": f"{self.config.lowest:g}", "highest": f"{self.config.highest:g}"}
        asked = Template(self.config.score_prompt or SCORE_PROMPT).substitute(asdict(exchange) | limits)
        return await self._ask(asked, self._number, judgement=judgement)

    async def close(self) -> None:
        await self.client.close()

    def _number(self, text: str) -> float | None:
        if words := self.config.words:
            patterns = {rf"(?<!\w){re.escape(word)}(?!\w)": value for word, value in words.items()}
            return min((value for each, value in patterns.items() if re.search(each, text, re.IGNORECASE)), default=None)
        found = _SCORE.findall(text)
        value = float(found[-1]) if found else None
        return value if value is not None and self.config.lowest <= value <= self.config.highest else None

    def _has_verdict(self, text: str) -> bool:
        return _verdict(text) is not None or self._number(text) is not None

    async def _ask(self, asked: str, parse: Parse, *, judgement: int) -> float:
        replies: list[Reply] = []
        for draw in range(judgement * self.config.tries, (judgement + 1) * self.config.tries):
            try:
                reply = await self.client.reply([{"role": "user", "content": asked}], draw=draw)
            except ServiceRefused as refused:
                self._failures.refused(refused)
                raise NotJudged(f"{self._name} refused it: {refused}") from refused
            if (found := parse(reply.text)) is not None:
                self._failures.success()
                return found
            replies.append(reply)
        num = f"{len(replies)} {'reply' if len(replies) == 1 else 'replies'}"
        last, is_cut = replies[-1].text, replies[-1].finish_reason == "length"
        why = (
            f"{self._name} gave no verdict in {num}; the last reply{', truncated at service.max_tokens,' if is_cut else ''}"
            f" ends with {last[-200:]!r}"
        )
        self._failures.add(why)
        raise NotJudged(why)


class JudgePart(PreferencePart):
    """What a language model gives, from 0 (its lowest number) to 1 (its highest), or whether it prefers the response."""

    class Config(PreferenceConfig):
        judge: JudgeConfig = Field(description="The language model and its prompt.")
        against_answer: bool = Field(
            default=False, description="Compare with the task's answer, in random order: 1 if the response is better, else 0."
        )

    config: Config
    _judge: ModelJudge

    def open(self, service: RunService | None) -> None:
        self._judge = ModelJudge(self.config.judge)

    async def close(self) -> None:
        await self._judge.close()

    async def _ask(self, exchange: Exchange) -> float:
        if self.config.against_answer:
            better = await self._judge.compare(exchange.prompt, exchange.response, exchange.reference)
            if better is None:
                raise NotJudged("the judge gave no verdict")
            return float(better > 0)
        value = await self._judge.score(exchange)
        return (value - self.config.judge.lowest) / (self.config.judge.highest - self.config.judge.lowest)


def _verdict(text: str) -> float | None:
    found = _VERDICT.findall(text)
    left, sign, right = found[-1] if found else ("", "", "")
    if left == right:
        return None
    return _BETTER[sign] if left == "A" else 0.0 - _BETTER[sign]


def checked_prompt(prompt: str, known: set[str], *, needed: set[str]) -> str:
    """`prompt`, if its variables are `known` and contain all `needed` ones. Raises `ValueError` otherwise."""
    template = Template(prompt)
    names = set(template.get_identifiers()) if template.is_valid() else {"?"}
    if unknown := names - known:
        known_names = ", ".join(f"${name}" for name in sorted(known))
        raise ValueError(f"${min(unknown)} is not a variable of this prompt. There are {known_names}; write $$ for a dollar.")
    if lacking := needed - names:
        raise ValueError(f"the prompt has no ${min(lacking)}, so the model would not see it. Add it.")
    return prompt

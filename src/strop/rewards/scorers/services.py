"""Reward models behind an address: served by vLLM's pooling, or by any service of a plain form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from strop.rewards.scorers.config import HttpScorerConfig, VllmScorerConfig
from strop.rewards.scorers.protocol import Exchange, checked_scores
from strop.rewards.scorers.refusals import Refusals
from strop.rewards.scorers.reward_model import ExchangeFormat
from strop.rewards.scorers.web import JsonService
from strop.web import ServiceRefused

_Score: TypeAlias = Callable[[Sequence[Exchange]], Awaitable[list[float]]]


class HttpScorer:
    """POSTs {"exchanges": [{"prompt", "response"}]} and reads {"scores": [number]}."""

    def __init__(self, config: HttpScorerConfig) -> None:
        self._config = config
        self._service = JsonService(config)
        self._refusals = Refusals()

    async def score(self, exchanges: Sequence[Exchange]) -> list[float | None]:
        return await _score_each(exchanges, self._score, self._refusals)

    async def _score(self, exchanges: Sequence[Exchange]) -> list[float]:
        asked = {"exchanges": [{"prompt": each.prompt, "response": each.response} for each in exchanges]}

        def parse(answer: Any) -> list[float]:
            scores = answer.get("scores") if isinstance(answer, dict) else answer
            return checked_scores(scores, num=len(exchanges), place=self._config.url)

        return await self._service.post("", asked, parse)

    async def close(self) -> None:
        await self._service.close()


class VllmScorer:
    """Sends ids, made here as in training, to POST /pooling, and reads what the head says before any activation."""

    def __init__(self, config: VllmScorerConfig) -> None:
        self._config = config
        self._service = JsonService(config)
        self._refusals = Refusals()

    async def score(self, exchanges: Sequence[Exchange]) -> list[float | None]:
        """Raises `ModelError` when there is no tokenizer at `path`."""
        return await _score_each(exchanges, self._score, self._refusals)

    async def _score(self, exchanges: Sequence[Exchange]) -> list[float]:
        asked = {
            "model": self._config.model,
            "input": [list(self._format.ids(exchange)) for exchange in exchanges],
            "task": "classify",
            "use_activation": False,  # a sigmoid, which would flatten what is compared
            "encoding_format": "float",
        }

        def parse(answer: Any) -> list[float]:
            try:
                rows = sorted(answer["data"], key=lambda row: row["index"])
                scores = [_only(row["data"]) for row in rows]
            except (KeyError, TypeError) as error:
                raise ServiceRefused(
                    f"{self._config.url} answered {str(answer)[:200]!r}, which is no answer of /pooling. Does vLLM serve a"
                    " reward model of one label there, with --runner pooling?"
                ) from error
            return checked_scores(scores, num=len(exchanges), place=self._config.url)

        return await self._service.post("/pooling", asked, parse)

    async def close(self) -> None:
        await self._service.close()

    @cached_property
    def _format(self) -> ExchangeFormat:
        return ExchangeFormat(Path(self._config.path))


async def _score_each(exchanges: Sequence[Exchange], score: _Score, refusals: Refusals) -> list[float | None]:
    """The scores of a batch. One that is refused is asked for in halves, until what alone is refused is found: that is None."""
    with refusals.asking(*((each.prompt, each.response) for each in exchanges)) as numbers:
        return await _score_numbered(exchanges, numbers, score, refusals)


async def _score_numbered(
    exchanges: Sequence[Exchange], numbers: Sequence[int], score: _Score, refusals: Refusals
) -> list[float | None]:
    try:
        scores: list[float | None] = [*await score(exchanges)]
    except ServiceRefused as refused:
        if not refused.is_of_what_was_asked:
            raise
        if len(exchanges) == 1:
            refusals.add(refused, numbers[0])
            return [None]
        middle = len(exchanges) // 2
        halves = [
            await _score_numbered(exchanges[part], numbers[part], score, refusals)
            for part in (slice(None, middle), slice(middle, None))
        ]
        return [each for half in halves for each in half]
    refusals.judged(numbers)
    return scores


def _only(values: list[Any]) -> Any:
    if len(values) != 1:
        raise KeyError("one number a conversation")
    return values[0]

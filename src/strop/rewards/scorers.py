"""Models that score responses: in this process, in a vLLM server, or behind any address."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config
from strop.errors import UserError
from strop.http import Failures, JsonService, ServiceRefused, WebServiceConfig

if TYPE_CHECKING:  # torch takes seconds to import, so it is imported only when there is a scorer
    from transformers import PreTrainedModel

    from strop.rewards.reward_model import ExchangeFormat

MaxBatch = Field(default=64, ge=1, le=100_000, description="Responses of one batch.")
_MAX_WAIT_S = 0.02  # of the first response of a batch, for others to join it
_MAX_TOKENS_PER_BATCH = 16_384  # with padding; determines memory, not scores


class EmbeddedScorerConfig(Config):
    """A reward model in this process."""

    kind: Literal["embedded"] = Field(description="Selects this scorer.")
    path: str | None = Field(
        default=None, description="A directory that transformers loads as a sequence classifier with one label."
    )
    stage: str | None = Field(default=None, description="Or an earlier stage of this recipe, of kind reward_model.")
    device: str = Field(default="cpu", description="The device of the model, as cpu or cuda:0.")
    precision: Literal["float32", "bfloat16"] = Field(default="float32", description="Number format of the decoder's weights.")
    max_batch: int = MaxBatch

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.path is None) == (self.stage is None):
            raise ValueError("give either path (the directory of a reward model) or stage (a stage that trains one), not both.")
        return self

    @property
    def judges_alone(self) -> bool:
        """Whether no response shares a batch with another, so that a score depends only on the response."""
        return self.max_batch == 1


class HttpScorerConfig(WebServiceConfig):
    """Any service that takes {"exchanges": [{"prompt", "response"}]} and answers {"scores": [number]}."""

    kind: Literal["http"] = Field(description="Selects this scorer.")
    max_batch: int = MaxBatch


class VllmScorerConfig(WebServiceConfig):
    """A reward model that vLLM serves with `--runner pooling`; url is the server's, without /v1."""

    kind: Literal["vllm"] = Field(description="Selects this scorer.")
    path: str = Field(description="The model's directory on this machine, for its tokenizer and chat template.")
    model: str = Field(description="The model's name at the server.")
    max_batch: int = MaxBatch


AnyScorerConfig: TypeAlias = Annotated[EmbeddedScorerConfig | HttpScorerConfig | VllmScorerConfig, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question and its response: what a scorer sees."""

    prompt: str
    response: str
    reference: str = ""  # the right answers, for a judge


def open_scorer(config: AnyScorerConfig) -> Scorer:
    """The scorer that a recipe names. The caller closes it. Raises `UserError` if a key or a path is missing."""
    if isinstance(config, EmbeddedScorerConfig):
        return EmbeddedScorer(config)
    return VllmScorer(config) if isinstance(config, VllmScorerConfig) else HttpScorer(config)


class Scorer:
    """Scores responses in batches, for many callers of one event loop. Larger is better; the scale is the model's own.

    A subclass gives `score_batch`. An error of a batch reaches all its callers.
    """

    def __init__(self, *, max_batch: int) -> None:
        self._max_batch = max_batch
        self._waiting: list[tuple[Exchange, asyncio.Future[float | None]]] = []
        self._batches: set[asyncio.Task[None]] = set()

    async def score_batch(self, exchanges: Sequence[Exchange]) -> list[float | None]:
        """One finite number each, in order; None for one that the model refuses, such as an over-long one.

        Raises:
            UserError: the model is not available, or returns something other than scores, after every try. The run stops;
                judgements so far are on disk, and the same command continues from there.
        """
        raise NotImplementedError

    async def score(self, exchange: Exchange) -> float | None:
        """As `score_batch`, together with what other callers ask in the same 20 ms."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(_MAX_WAIT_S, self._begin_batch)
        score: asyncio.Future[float | None] = loop.create_future()
        self._waiting.append((exchange, score))
        if len(self._waiting) == self._max_batch:
            self._begin_batch()
        return await score

    async def close(self) -> None:
        """Safe to call twice."""
        for batch in self._batches:
            batch.cancel()
        await asyncio.gather(*self._batches, return_exceptions=True)
        for _, score in self._waiting:
            score.cancel()

    def _begin_batch(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            batch = asyncio.get_running_loop().create_task(self._score(waiting))
            self._batches.add(batch)
            batch.add_done_callback(self._batches.discard)

    async def _score(self, batch: Sequence[tuple[Exchange, asyncio.Future[float | None]]]) -> None:
        asked = [(exchange, score) for exchange, score in batch if not score.done()]  # done: its caller was cancelled
        try:
            values = await self.score_batch([exchange for exchange, _ in asked])
            for (_, score), value in zip(asked, values, strict=True):
                if not score.done():
                    score.set_result(value)
        except Exception as error:  # noqa: BLE001 - raised again in the callers
            for _, score in asked:
                if not score.done():
                    score.set_exception(error)
        finally:
            for _, score in asked:
                score.cancel()  # no effect on those that are done


class EmbeddedScorer(Scorer):
    """Runs the model in its own thread, and loads it on first use. Raises `ModelError` if there is no reward model."""

    def __init__(self, config: EmbeddedScorerConfig) -> None:
        if config.path is None:
            raise UserError(
                f"the scorer's stage = {config.stage!r} names a stage, which exists only in a recipe. Set path instead."
            )
        super().__init__(max_batch=config.max_batch)
        self._config, self._directory = config, Path(config.path)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-scorer")

    async def score_batch(self, exchanges: Sequence[Exchange]) -> list[float | None]:
        return [*await asyncio.get_running_loop().run_in_executor(self._worker, self._compute, exchanges)]

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._worker.shutdown)

    def _compute(self, exchanges: Sequence[Exchange]) -> list[float]:
        from strop.engine.torch.cpu.resources import end_team
        from strop.rewards.reward_model import score_rows

        try:
            rows = [self._format.ids(exchange) for exchange in exchanges]
            scores = score_rows(self._model, rows, max_tokens=_MAX_TOKENS_PER_BATCH)
            return _checked_scores(scores, num=len(exchanges), place=str(self._directory))
        finally:
            end_team()  # idle OpenMP threads would slow down the engine

    @cached_property
    def _format(self) -> ExchangeFormat:
        from strop.rewards.reward_model import ExchangeFormat

        return ExchangeFormat(self._directory)

    @cached_property
    def _model(self) -> PreTrainedModel:
        import torch

        from strop.rewards.reward_model import load_reward_model

        model = load_reward_model(self._directory)
        if self._config.precision == "bfloat16":  # buffers, such as rotary frequencies, keep their precision
            for parameter in model.base_model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        return model.to(self._config.device)


class HttpScorer(Scorer):
    """POSTs {"exchanges": [{"prompt", "response"}]} and reads {"scores": [number]}."""

    def __init__(self, config: HttpScorerConfig | VllmScorerConfig) -> None:
        super().__init__(max_batch=config.max_batch)
        self._url, self._service, self._failures = config.url, JsonService(config), Failures()

    async def score_batch(self, exchanges: Sequence[Exchange]) -> list[float | None]:
        """As `Scorer.score_batch`. A refused batch is split in halves until the refused exchanges are found."""
        try:
            scores: list[float | None] = [*await self._ask(exchanges)]
        except ServiceRefused as refused:
            if not refused.is_of_what_was_asked:
                raise
            if len(exchanges) == 1:
                self._failures.refused(refused)
                return [None]
            middle = len(exchanges) // 2
            return [*await self.score_batch(exchanges[:middle]), *await self.score_batch(exchanges[middle:])]
        self._failures.success()
        return scores

    async def _ask(self, exchanges: Sequence[Exchange]) -> list[float]:
        asked = {"exchanges": [{"prompt": each.prompt, "response": each.response} for each in exchanges]}

        def parse(answer: Any) -> list[float]:
            scores = answer.get("scores") if isinstance(answer, dict) else answer
            return _checked_scores(scores, num=len(exchanges), place=self._url)

        return await self._service.post("", asked, parse)

    async def close(self) -> None:
        await super().close()
        await self._service.close()


class VllmScorer(HttpScorer):
    """Sends token ids, encoded as in training, to POST /pooling, and reads the head's value before any activation."""

    def __init__(self, config: VllmScorerConfig) -> None:
        super().__init__(config)
        self._config = config

    async def _ask(self, exchanges: Sequence[Exchange]) -> list[float]:
        """Raises `ModelError` if there is no tokenizer at `path`."""
        asked = {
            "model": self._config.model,
            "input": [list(self._format.ids(exchange)) for exchange in exchanges],
            "task": "classify",
            "use_activation": False,  # a sigmoid would flatten the scores
            "encoding_format": "float",
        }

        def parse(answer: Any) -> list[float]:
            try:
                rows = sorted(answer["data"], key=lambda row: row["index"])
                scores = [value for row in rows for [value] in [row["data"]]]
            except (KeyError, TypeError, ValueError) as error:
                raise ServiceRefused(
                    f"{self._url} answered {str(answer)[:200]!r}, which is not an answer of /pooling. Does vLLM serve"
                    " a reward model of one label there, with --runner pooling?"
                ) from error
            return _checked_scores(scores, num=len(exchanges), place=self._url)

        return await self._service.post("/pooling", asked, parse)

    @cached_property
    def _format(self) -> ExchangeFormat:
        from strop.rewards.reward_model import ExchangeFormat

        return ExchangeFormat(Path(self._config.path))


def _checked_scores(scores: Any, *, num: int, place: str) -> list[float]:
    """`scores` as `num` finite numbers. Raises `ServiceRefused` if it is something else."""
    if not isinstance(scores, list) or len(scores) != num:
        what = f"{len(scores)} scores" if isinstance(scores, list) else f"{str(scores)[:200]!r}, which is not a list of scores,"
        raise ServiceRefused(f"{place} answered {what} where {num} were requested. Is it another kind of service?")
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise ServiceRefused(f"{place} answered {score!r} where a finite number was requested.")
    return [float(score) for score in scores]

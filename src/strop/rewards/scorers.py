"""Models that score responses, in this process, in a vLLM server or behind any address, and the parts that ask them."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Choice, Config
from strop.errors import UserError
from strop.http import Failures, Gatherer, JsonService, ServiceRefused, WebServiceConfig
from strop.rewards.base import NotJudged, RolloutPart, RunService, extract_answer, final_summary, final_text, written
from strop.types import Task, Trajectory

if TYPE_CHECKING:
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
    max_batch: int = MaxBatch

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.path is None) == (self.stage is None):
            raise ValueError("give either path (the directory of a reward model) or stage (a stage that trains one), not both.")
        return self


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


AnyScorerConfig: TypeAlias = Annotated[EmbeddedScorerConfig | HttpScorerConfig | VllmScorerConfig, Choice()]


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


class Scorer(ABC):
    """Scores responses in batches, for many callers of one event loop. Larger is better; the scale is the model's own.

    A subclass gives `score_batch`. An error of a batch reaches all its callers.
    """

    _directory: Path

    def __init__(self, *, max_batch: int) -> None:
        self._gatherer = Gatherer(self._answers, wait_s=_MAX_WAIT_S, most=max_batch)

    @cached_property
    def _format(self) -> ExchangeFormat:
        """Of the directory that the config names."""
        from strop.rewards.reward_model import ExchangeFormat

        return ExchangeFormat(self._directory)

    @abstractmethod
    async def score_batch(self, exchanges: Sequence[Exchange]) -> list[float | None]:
        """One finite number each, in order; None for one that the model refuses, such as an over-long one.

        Raises:
            UserError: the model is not available, or returns something other than scores, after every try. The run stops;
                judgements so far are on disk, and the same command continues from there.
        """

    async def score(self, exchange: Exchange) -> float | None:
        """As `score_batch`, together with what other callers ask in the same 20 ms."""
        return await self._gatherer.ask(exchange)

    async def close(self) -> None:
        """Safe to call twice."""
        await self._gatherer.close()

    async def _answers(self, exchanges: list[Exchange]) -> AsyncIterator[tuple[int, float | None]]:
        for index, score in enumerate(await self.score_batch(exchanges)):
            yield index, score


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
    def _model(self) -> PreTrainedModel:
        from strop.rewards.reward_model import load_reward_model

        return load_reward_model(self._directory).to(self._config.device)


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
        self._config, self._directory = config, Path(config.path)

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


def _checked_scores(scores: Any, *, num: int, place: str) -> list[float]:
    """`scores` as `num` finite numbers. Raises `ServiceRefused` if it is something else."""
    if not isinstance(scores, list) or len(scores) != num:
        what = f"{len(scores)} scores" if isinstance(scores, list) else f"{str(scores)[:200]!r}, which is not a list of scores,"
        raise ServiceRefused(f"{place} answered {what} where {num} were requested. Is it another kind of service?")
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise ServiceRefused(f"{place} answered {score!r} where a finite number was requested.")
    return [float(score) for score in scores]


class PreferenceConfig(RolloutPart.Config):
    """What of a rollout another model is shown."""

    judged_on: Literal["summary", "response", "answer"] = Field(
        default="summary",
        description="summary: the text after the last thought of the last turn. response: all that the policy wrote. answer:"
        " what its last answer tag, or the box in it, holds.",
    )
    think_tag: str = Field(default="think", pattern=r"^\w+$", description="Name of the tag around thoughts.")
    is_prefilled: bool = Field(
        default=False, description="The prompt ends with the opening tag, so a response without a closing tag has no summary."
    )
    missing: float = Field(default=0.0, ge=-1e6, le=1e6, description="Value of a rollout without a summary or a response.")


class PreferencePart(RolloutPart):
    """A part that shows a text of the rollout to another model."""

    config: PreferenceConfig

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        judged = self._judged_text(trajectory)
        if judged is None:
            return self.config.missing
        reference = task.facts.get("references", task.answer)
        return await self._ask(Exchange(prompt=task.question, response=judged, reference=reference))

    @abstractmethod
    async def _ask(self, exchange: Exchange) -> float: ...

    def _judged_text(self, trajectory: Trajectory) -> str | None:
        if self.config.judged_on == "response":
            return written(trajectory) or None
        if self.config.judged_on == "answer":
            return extract_answer(trajectory, needs_box=False)
        last = final_text(trajectory)
        is_in_thought = self.config.is_prefilled and f"</{self.config.think_tag}>" not in written(trajectory)
        if last is None or is_in_thought:  # truncated, or the thought that the prompt began does not end
            return None
        return final_summary(last, think_tag=self.config.think_tag)


class ScorerPart(PreferencePart):
    """What a reward model gives. In DeepSeek-R1 the helpful one judges the summary, the safety one the response."""

    class Config(PreferenceConfig):
        scorer: AnyScorerConfig = Field(description="The reward model and where it runs.")
        scale: Literal["sigmoid", "raw"] = Field(
            default="sigmoid", description="sigmoid: between 0 and 1, so that missing = 0 is never the better choice."
        )

    config: Config
    _scorer: Scorer

    def open(self, service: RunService | None) -> None:
        self._scorer = open_scorer(self.config.scorer)

    async def close(self) -> None:
        await self._scorer.close()

    async def _ask(self, exchange: Exchange) -> float:
        value = await self._scorer.score(exchange)
        if value is None:
            raise NotJudged("the reward model's service refused it; a warning in the log shows the service's answer")
        return value if self.config.scale == "raw" else _sigmoid(value)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))

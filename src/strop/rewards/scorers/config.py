"""Says in a recipe which model scores responses, and where it runs."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from strop.config import Config
from strop.rewards.scorers.web import WebServiceConfig


class EmbeddedScorerConfig(Config):
    """A reward model in this process."""

    kind: Literal["embedded"]
    path: str | None = None  # a directory that transformers loads as a sequence classifier with one label
    stage: str | None = None  # or a stage of this recipe, of kind reward_model, before the one that asks
    device: str = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"
    max_tokens_per_batch: int = Field(default=16_384, ge=1)  # decides memory, not the scores
    max_wait_s: float = Field(default=0.02, ge=0)  # for others to join a batch
    max_batch: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.path is None) == (self.stage is None):
            raise ValueError("give either path (a directory of a reward model) or stage (one that trains it), and not both.")
        return self

    @property
    def judges_alone(self) -> bool:
        """No response shares a batch with another, so a score hangs on nothing but the response."""
        return self.max_batch == 1 or self.max_tokens_per_batch == 1


class HttpScorerConfig(WebServiceConfig):
    """Any service that takes {"exchanges": [{"prompt", "response"}]} and answers {"scores": [number]}."""

    kind: Literal["http"]
    max_wait_s: float = Field(default=0.02, ge=0)
    max_batch: int = Field(default=64, ge=1)


class VllmScorerConfig(WebServiceConfig):
    """A reward model that vLLM serves with `--runner pooling`; url is the server's, without /v1."""

    kind: Literal["vllm"]
    path: str  # the same model's directory here, for its tokenizer and chat template
    model: str  # as the server calls it
    max_wait_s: float = Field(default=0.02, ge=0)
    max_batch: int = Field(default=64, ge=1)


AnyScorerConfig: TypeAlias = Annotated[EmbeddedScorerConfig | HttpScorerConfig | VllmScorerConfig, Field(discriminator="kind")]

"""Parts of a sum that another model gives: a reward model's score, a judge's number."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from strop.rewards.base import NotJudged, RolloutPart, RunService, extract_answer, final_summary, final_text, written
from strop.rewards.judge import JudgeConfig, ModelJudge
from strop.rewards.scorers import AnyScorerConfig, Exchange, Scorer, open_scorer
from strop.types import Task, Trajectory


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

    async def _ask(self, exchange: Exchange) -> float:
        raise NotImplementedError

    def _judged_text(self, trajectory: Trajectory) -> str | None:
        if self.config.judged_on == "response":
            return written(trajectory) or None
        if self.config.judged_on == "answer":
            return extract_answer(trajectory, needs_box=False)
        last = final_text(trajectory)
        if last is None:
            return None  # truncated: there is no summary
        if self.config.is_prefilled and f"</{self.config.think_tag}>" not in written(trajectory):
            return None  # the thought that the prompt began does not end
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


class JudgePart(PreferencePart):
    """What a language model gives, from 0 (its lowest number) to 1 (its highest), or whether it prefers the response."""

    class Config(PreferenceConfig):
        judge: JudgeConfig = Field(description="The language model and its prompt.")
        against_answer: bool = Field(
            default=False,
            description="Compare with the task's answer, in random order: 1 if the response is better, else 0.",
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


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))

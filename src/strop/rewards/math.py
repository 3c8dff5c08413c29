"""Judges answers to mathematical problems."""

from __future__ import annotations

from collections.abc import Mapping

from strop.rewards.answers import extract_answer, has_answer_format
from strop.rewards.config import RewardConfig
from strop.rewards.service import AnswerService
from strop.rewards.shaping import has_called
from strop.rewards.verifier import MathVerifier
from strop.types import Task, Trajectory


class MathReward:
    """Parts, each 0 or 1: `accuracy` (the answer equals the task's), `format` (one answer tag, one box), `called` (a tool ran).

    A trajectory that was cut off has no answer, whatever it wrote before (rStar2-Agent, arXiv 2508.20722, section 4.3.1).

    Args:
        service: compares answers; processes of its own where there is none.
    """

    def __init__(self, config: RewardConfig, service: AnswerService | None = None) -> None:
        self.config = config
        self._verifier = MathVerifier(service, deadline_s=config.verify_deadline_s)

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        answer = extract_answer(trajectory, needs_box=self.config.needs_box)
        is_correct = answer is not None and (await self._verifier.verify(task.answer, answer)).is_correct
        return {
            "accuracy": float(is_correct),
            "format": float(has_answer_format(trajectory)),
            "called": float(has_called(trajectory)),
        }

    async def close(self) -> None:
        """End what is still being compared. Safe to call twice."""
        await self._verifier.close()

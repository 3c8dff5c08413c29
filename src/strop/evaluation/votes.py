"""What each attempt answered, and which answers are one by the task's own judge: the votes of maj@k (cons@k in DeepSeek-R1)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from strop.evaluation.multiple_choice import read_letter
from strop.evaluation.question_answering import read_answer
from strop.evaluation.verdict import Verdict, verdict_of
from strop.rewards import AnyRewardConfig, CountdownRewardConfig, MathVerifier, RewardConfig, SumRewardConfig
from strop.rewards.answers import extract_answer, final_text
from strop.rewards.service import AnswerService
from strop.rewards.sum_config import AnyPart, FunctionPart, MathPart
from strop.sandbox.numbers import exact_match
from strop.tasks.boxes import boxed
from strop.types import Group, Trajectory

_FUNCTIONS: dict[str, Callable[[Trajectory], str]] = {
    "strop.evaluation.question_answering:exact_match": read_answer,
    "strop.evaluation.multiple_choice:right_letter": read_letter,
}
"""Functions of ours that judge answers, and how each reads one; both compare as texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRule:
    """How a reward reads an answer ("" where there is none), and when it takes two for the same."""

    read: Callable[[Trajectory], str]
    is_same: Callable[[str, str], Awaitable[bool]]


class Voting:
    """Votes under one reward; `close` ends what compares answers.

    Args:
        service: compares answers; processes of its own where there is none.
    """

    def __init__(self, reward: AnyRewardConfig, service: AnswerService | None = None) -> None:
        self._verifier: MathVerifier | None = None
        self._verdict = verdict_of(reward)
        self._service = service
        self._rule = self._rule_of(reward)

    async def votes(self, groups: Sequence[Group]) -> list[list[str]] | None:
        """Per group and attempt the answer, spelt as the first of those that are the same; "" where there is none.

        None where the reward has no answers to compare: programs, functions of a user's own.

        Raises:
            MachineError: what compares answers was lost.
        """
        rule = self._rule
        return (
            None if rule is None else list(await asyncio.gather(*(_votes_of(group, rule, self._verdict) for group in groups)))
        )

    async def close(self) -> None:
        if self._verifier is not None:
            await self._verifier.close()

    def _rule_of(self, reward: AnyRewardConfig) -> AnswerRule | None:
        match reward:
            case RewardConfig():
                return AnswerRule(read=_tagged(needs_box=reward.needs_box), is_same=self._mathematics(reward.verify_deadline_s))
            case CountdownRewardConfig():
                return AnswerRule(read=_tagged(needs_box=reward.needs_box), is_same=_same_text)
            case SumRewardConfig():
                judge = reward.parts.get("accuracy", next(iter(reward.parts.values())))
                return self._rule_of_part(judge)
            case _:
                return None

    def _rule_of_part(self, part: AnyPart) -> AnswerRule | None:
        match part:
            case MathPart():
                read = _tagged(needs_box=part.needs_box) if part.answer_in == "answer_tag" else _last_box
                is_exact = part.judge == "exact"
                return AnswerRule(read=read, is_same=_same_exactly if is_exact else self._mathematics(part.verify_deadline_s))
            case FunctionPart() if part.function in _FUNCTIONS:
                return AnswerRule(read=_FUNCTIONS[part.function], is_same=_same_text)
            case _:
                return None

    def _mathematics(self, deadline_s: float) -> Callable[[str, str], Awaitable[bool]]:
        verifier = self._verifier = MathVerifier(self._service, deadline_s=deadline_s)

        async def is_same(one: str, other: str) -> bool:
            return (await verifier.verify(one, other)).is_correct

        return is_same


async def _votes_of(group: Group, rule: AnswerRule, verdict: Verdict) -> list[str]:
    """What was judged right is one answer; a wrong one is compared with the wrong ones before it that are spelt otherwise."""
    right = ""
    first_spelling: dict[str, str] = {}  # of a wrong answer: that of the first which is the same
    votes = []
    for scored in group.trajectories:
        answer = rule.read(scored.trajectory)
        if not answer:
            votes.append("")
        elif verdict(scored):
            right = right or answer
            votes.append(right)
        else:
            if answer not in first_spelling:
                first_spelling[answer] = await _first_same(answer, list(dict.fromkeys(first_spelling.values())), rule)
            votes.append(first_spelling[answer])
    return votes


async def _first_same(answer: str, known: Sequence[str], rule: AnswerRule) -> str:
    for each in known:
        if await rule.is_same(each, answer):
            return each
    return answer


def _tagged(*, needs_box: bool) -> Callable[[Trajectory], str]:
    return lambda trajectory: extract_answer(trajectory, needs_box=needs_box) or ""


def _last_box(trajectory: Trajectory) -> str:
    boxes = boxed(final_text(trajectory) or "")
    return boxes[-1].strip() if boxes else ""


async def _same_text(one: str, other: str) -> bool:
    return one == other


async def _same_exactly(one: str, other: str) -> bool:
    return bool(exact_match(one, other))

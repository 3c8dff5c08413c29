"""What each attempt answered, and which answers are one by the task's own judge: the votes of maj@k (cons@k in DeepSeek-R1)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from strop.evaluation.multiple_choice import read_letter
from strop.evaluation.question_answering import read_answer
from strop.evaluation.verdict import Verdict, verdict_of
from strop.rewards import AnyRewardConfig, CountdownRewardConfig, MathVerifier, RewardConfig, SumRewardConfig
from strop.rewards.answers import CLOSING, OPENING, extract_answer, final_text
from strop.rewards.r1_zero import has_r1_zero_format, r1_zero_reward_fn
from strop.rewards.service import AnswerService
from strop.rewards.sum_config import AnyPart, FunctionPart, MathPart, R1ZeroPart
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
        self._verifiers: list[MathVerifier] = []
        self._verdict = verdict_of(reward)
        self._service = service
        self._rules = {name: self._rule_of(reward, name) for name in self._verdict.parts}

    async def votes(self, groups: Sequence[Group]) -> list[list[str]] | None:
        """Per group and attempt the answer, spelt as the first of those that are the same; "" where there is none.

        An answer is read as the part does that says what is right for the task; without one there are no answers. None where
        a part has none to compare (`without_answers`).

        Raises:
            MachineError: what compares answers was lost.
        """
        if self.without_answers(groups):
            return None
        return list(await asyncio.gather(*(self._votes_of(group) for group in groups)))

    def without_answers(self, groups: Sequence[Group]) -> list[str]:
        """The parts that say what is right for some of `groups`, but have no answers to compare: programs, a user's own."""
        judging = dict.fromkeys(name for group in groups if (name := self._part_of(group)) is not None)
        return [name for name in judging if self._rules[name] is None]

    async def close(self) -> None:
        for verifier in self._verifiers:
            await verifier.close()

    def _part_of(self, group: Group) -> str | None:
        """The part that says what is right for the group's task."""
        given = {name for scored in group.trajectories for name in scored.reward_parts}
        return next((name for name in self._verdict.parts if name in given), None)

    async def _votes_of(self, group: Group) -> list[str]:
        name = self._part_of(group)
        rule = None if name is None else self._rules[name]
        return [""] * len(group.trajectories) if rule is None else await _votes_of(group, rule, self._verdict)

    def _rule_of(self, reward: AnyRewardConfig, part: str) -> AnswerRule | None:
        match reward:
            case RewardConfig():
                return AnswerRule(read=_tagged(needs_box=reward.needs_box), is_same=self._mathematics(reward.verify_deadline_s))
            case CountdownRewardConfig():
                return AnswerRule(read=_tagged(needs_box=reward.needs_box), is_same=_same_text)
            case SumRewardConfig():
                return self._rule_of_part(reward.parts[part])
            case _:
                return None

    def _rule_of_part(self, part: AnyPart) -> AnswerRule | None:
        match part:
            case MathPart():
                read = _tagged(needs_box=part.needs_box) if part.answer_in == "answer_tag" else _last_box
                is_exact = part.judge == "exact"
                return AnswerRule(read=read, is_same=_same_exactly if is_exact else self._mathematics(part.verify_deadline_s))
            case R1ZeroPart():
                read = _behind_thoughts if part.kind == "r1_zero" else _box_at_end
                return AnswerRule(read=read, is_same=_same_to_r1_zero(fast=part.fast))
            case FunctionPart() if part.function in _FUNCTIONS:
                return AnswerRule(read=_FUNCTIONS[part.function], is_same=_same_text)
            case _:
                return None

    def _mathematics(self, deadline_s: float) -> Callable[[str, str], Awaitable[bool]]:
        verifier = MathVerifier(self._service, deadline_s=deadline_s)
        self._verifiers.append(verifier)

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


def _behind_thoughts(trajectory: Trajectory) -> str:
    """As the grader `r1_zero` reads it."""
    text = final_text(trajectory) or ""
    if not has_r1_zero_format(text):
        return ""
    answer = text.rpartition(OPENING)[2].replace(CLOSING, "")
    return _last_box_of(answer) if r"\boxed" in answer else answer.strip()


def _box_at_end(trajectory: Trajectory) -> str:
    """As the grader `question_only` reads it."""
    return _last_box_of(final_text(trajectory) or "")


def _last_box_of(text: str) -> str:
    """What stands in the last box; "" where that does not close."""
    boxes = boxed(text[max(text.rfind(r"\boxed"), 0) :])
    return boxes[0].strip() if boxes else ""


def _same_to_r1_zero(*, fast: bool) -> Callable[[str, str], Awaitable[bool]]:
    async def is_same(one: str, other: str) -> bool:
        response = f"</think> {OPENING}{other}{CLOSING}"
        rewards = await asyncio.to_thread(r1_zero_reward_fn, response, one, fast)  # it may wait for its process
        return rewards["answer_reward"] > 0

    return is_same


async def _same_text(one: str, other: str) -> bool:
    return one == other


async def _same_exactly(one: str, other: str) -> bool:
    return bool(exact_match(one, other))

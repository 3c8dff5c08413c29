"""The answer of each attempt, where answers that the task's judge takes for the same are one: the votes of maj@k (cons@k)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from strop.evaluation.metrics import Verdict
from strop.evaluation.short_answers import read_answer, read_letter
from strop.rewards.base import Reward, RunService
from strop.rewards.function import FunctionPart
from strop.rewards.sum import SumReward
from strop.types import Group, Trajectory

_READERS: dict[str, Callable[[Trajectory], str]] = {
    "strop.evaluation.short_answers:exact_match": read_answer,
    "strop.evaluation.short_answers:right_letter": read_letter,
}
"""Our own reward functions that judge answers, and how each reads one; both compare texts."""


class AnswerRule(Protocol):
    """How a part of a reward reads an answer, and when it takes two for the same. An `AnswerPart` is one."""

    def read_answer(self, trajectory: Trajectory) -> str | None: ...
    async def is_same(self, gold: str, answer: str) -> bool: ...


class _TextRule:
    """Answers of one of our own functions."""

    def __init__(self, read: Callable[[Trajectory], str]) -> None:
        self._read = read

    def read_answer(self, trajectory: Trajectory) -> str:
        return self._read(trajectory)

    async def is_same(self, gold: str, answer: str) -> bool:
        return gold == answer


class Voting:
    """Votes under one reward; `close` releases what compares answers.

    Args:
        service: compares answers; processes of its own by default.
    """

    def __init__(self, reward: Reward, service: RunService | None = None) -> None:
        judged = reward.replaced()  # whose parts are opened here
        self._verdict = Verdict(judged.verifying_parts)
        self._parts = {name: part for name in self._verdict.parts if (part := judged.answer_part(name)) is not None}
        for part in self._parts.values():
            part.open(service)
        self._rules: dict[str, AnswerRule] = dict(self._parts)
        if isinstance(judged, SumReward):
            for name in self._verdict.parts:
                mine = judged.parts[name]
                if isinstance(mine, FunctionPart) and mine.config.function in _READERS:
                    self._rules[name] = _TextRule(_READERS[mine.config.function])

    async def votes(self, groups: Sequence[Group]) -> list[list[str]] | None:
        """The answer of each attempt in each group, as the first of those that are the same; "" if there is none.

        An answer is read by the part that says what is right for the task; without such a part there are no answers. None if
        such a part has no answers to compare (`without_answers`).

        Raises:
            MachineError: what compares answers was lost.
        """
        if self.without_answers(groups):
            return None
        return list(await asyncio.gather(*(self._votes_of(group) for group in groups)))

    def without_answers(self, groups: Sequence[Group]) -> list[str]:
        """The parts that say what is right for some of `groups` but compare no answers: programs, a user's own function."""
        judging = dict.fromkeys(name for group in groups if (name := self._part_of(group)) is not None)
        return [name for name in judging if name not in self._rules]

    async def close(self) -> None:
        for part in self._parts.values():
            await part.close()

    def _part_of(self, group: Group) -> str | None:
        """The part that says what is right for the group's task."""
        given = {name for scored in group.trajectories for name in scored.reward_parts}
        return next((name for name in self._verdict.parts if name in given), None)

    async def _votes_of(self, group: Group) -> list[str]:
        name = self._part_of(group)
        rule = None if name is None else self._rules.get(name)
        return [""] * len(group.trajectories) if rule is None else await _votes_of(group, rule, self._verdict)


async def _votes_of(group: Group, rule: AnswerRule, verdict: Verdict) -> list[str]:
    """Right answers count as one; a wrong one is compared with the different wrong ones before it."""
    right = ""
    first_same: dict[str, str] = {}  # of a wrong answer: the first one that is the same
    votes = []
    for scored in group.trajectories:
        answer = rule.read_answer(scored.trajectory)
        if not answer:
            votes.append("")
        elif verdict(scored):
            right = right or answer
            votes.append(right)
        else:
            if answer not in first_same:
                first_same[answer] = await _first_same(answer, list(dict.fromkeys(first_same.values())), rule)
            votes.append(first_same[answer])
    return votes


async def _first_same(answer: str, known: Sequence[str], rule: AnswerRule) -> str:
    for each in known:
        if await rule.is_same(each, answer):
            return each
    return answer

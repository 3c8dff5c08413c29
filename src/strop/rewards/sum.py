"""A weighted sum of parts, routed by the facts of a task; what no part can judge is excluded from its group."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from strop.config import import_object
from strop.errors import ConfigError, TaskError
from strop.rewards.answers import extract_answer, final_text
from strop.rewards.code import code_part
from strop.rewards.f1 import arpo_reward
from strop.rewards.form import code_format, reasoning_steps, strict_format, tag_count, turns_format
from strop.rewards.function import checked_value
from strop.rewards.language import language_consistency
from strop.rewards.length import cosine_scaled, relative_lengths, soft_overlong
from strop.rewards.preference import judge_part, scorer_part
from strop.rewards.r1_zero import (
    has_question_only_format,
    has_r1_zero_format,
    question_only_reward_fn,
    r1_zero_reward_fn,
)
from strop.rewards.repetition import repetition_penalty
from strop.rewards.routing import is_for
from strop.rewards.scorers.judge import ModelJudge
from strop.rewards.scorers.opening import open_scorer
from strop.rewards.scorers.reasons import reasons_told
from strop.rewards.service import RunService
from strop.rewards.shaping import has_called
from strop.rewards.sum_config import (
    AnyPart,
    CodePart,
    CosinePart,
    F1Part,
    FormatPart,
    FunctionPart,
    JudgePart,
    LanguagePart,
    LengthPart,
    MathPart,
    R1ZeroFormatPart,
    R1ZeroPart,
    RepetitionPart,
    ScorerPart,
    SoftOverlongPart,
    SumRewardConfig,
)
from strop.rewards.text import num_sampled_tokens, written
from strop.rewards.verifier import MathVerifier
from strop.rollout.protocol import EXCLUDED, Excluded
from strop.sandbox.numbers import exact_match
from strop.tasks.boxes import boxed
from strop.types import Group, Task, Trajectory

Scorer = Callable[[Task, Trajectory], Awaitable[float | None]]


class _Closable(Protocol):
    async def close(self) -> None: ...


class SumReward:
    """Judges a trajectory by every part that is for its task; the parts that compare lengths wait for `judge_group`.

    Args:
        service: runs programs and compares answers; processes of its own compare them where there is none.
    """

    def __init__(self, config: SumRewardConfig, service: RunService | None = None) -> None:
        self.config = config
        self._opened: list[_Closable] = []
        self._scorers = {name: self._scorer(part, service) for name, part in config.parts.items() if _is_independent(part)}

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        of_task = self._parts_for(task)
        names = [name for name in of_task if name in self._scorers]
        values = await asyncio.gather(*(self._value_or_why(name, task, trajectory) for name in names))
        judged = {name: value for name, value in zip(names, values, strict=True) if not isinstance(value, str)}
        if len(judged) < len(names):
            return Excluded("; ".join(value for value in values if isinstance(value, str)))
        for name, part in of_task.items():
            if isinstance(part, CosinePart):
                is_correct = judged.get(part.accuracy, 0.0) > 0
                judged[name] = cosine_scaled(
                    num_sampled_tokens(trajectory),
                    max_tokens=part.max_tokens,
                    short=part.correct_short if is_correct else part.wrong_short,
                    long=part.correct_long if is_correct else part.wrong_long,
                    clamp=part.clamp,
                )
        return judged

    async def close(self) -> None:
        """End what is still being judged. Safe to call twice."""
        for opened in self._opened:
            await opened.close()

    def with_lengths(self, group: Group) -> Group:
        """`group` with the parts that compare its rollouts with each other."""
        parts = {name: part for name, part in self._parts_for(group.task).items() if isinstance(part, LengthPart)}
        trajectories = group.trajectories
        for name, part in parts.items():
            values = relative_lengths(
                [num_sampled_tokens(scored.trajectory) for scored in trajectories],
                [scored.reward_parts.get(part.accuracy, 0.0) > 0 for scored in trajectories],
            )
            trajectories = tuple(
                replace(
                    scored,
                    reward=scored.reward + part.weight * (value - scored.reward_parts.get(name, 0.0)),
                    reward_parts={**scored.reward_parts, name: value},
                )
                for scored, value in zip(trajectories, values, strict=True)
            )
        return replace(group, trajectories=trajectories)

    async def _value_or_why(self, name: str, task: Task, trajectory: Trajectory) -> float | str:
        """What the part says of `trajectory`, or why it cannot judge it."""
        with reasons_told() as told:
            value = await self._scorers[name](task, trajectory)
        return f"part {name!r}: {'; '.join(told) or _why_none(self.config.parts[name], task)}" if value is None else value

    def _parts_for(self, task: Task) -> dict[str, AnyPart]:
        """Raises `TaskError` where no part is for the task."""
        parts = {name: part for name, part in self.config.parts.items() if is_for(part, task)}
        if not parts:
            raise TaskError(
                f"task {task.id!r}: no part of the reward is for it; its facts: {dict(task.facts)}. Widen a part's `where`, or"
                " carry the column along with tasks.facts."
            )
        return parts

    def _scorer(self, part: AnyPart, service: RunService | None) -> Scorer:
        match part:
            case MathPart():
                verifier = MathVerifier(service, deadline_s=part.verify_deadline_s, is_fused=part.judge == "fused")
                self._opened.append(verifier)
                return _math(part, verifier)
            case CodePart():
                if service is None:
                    raise ConfigError("a part of kind 'code' runs programs, but there is no sandbox to run them in.")
                return code_part(part, service)
            case R1ZeroPart():
                return _r1_zero(part)
            case R1ZeroFormatPart():
                has_format = has_r1_zero_format if part.kind == "r1_zero_format" else has_question_only_format
                return _of(lambda _, trajectory: float(has_format(final_text(trajectory) or "")))
            case F1Part():
                return _of(
                    lambda task, trajectory: arpo_reward(
                        trajectory, _references(part, task), multi_tool=part.multi_tool, bonus=part.bonus
                    )
                )
            case ScorerPart():
                scorer = open_scorer(part.scorer)
                self._opened.append(scorer)
                return scorer_part(part, scorer)
            case JudgePart():
                judge = ModelJudge(part.judge)
                self._opened.append(judge)
                return judge_part(part, judge)
            case FunctionPart():
                function = import_object(part.function, key="reward.parts.*.function")
                return _of(lambda task, trajectory: checked_value(function, task, trajectory, may_be_none=True))
            case SoftOverlongPart():
                return _of(
                    lambda _, trajectory: soft_overlong(
                        trajectory.num_response_tokens, max_tokens=part.max_tokens, cache_tokens=part.cache_tokens
                    )
                )
            case _:
                return _of(lambda _, trajectory: _of_text(part, trajectory))


def judge_group(reward: object, group: Group) -> Group:
    """`group` as it is compared: without what no judge could judge, which counts as void, and with its parts of length.

    For a reward of any kind; rollouts that were judged one by one stay as they are.
    """
    judged = tuple(scored for scored in group.trajectories if EXCLUDED not in scored.reward_parts)
    excluded = tuple(scored.trajectory for scored in group.trajectories if EXCLUDED in scored.reward_parts)
    num_void = group.num_void + len(excluded)
    group = replace(group, trajectories=judged, num_void=num_void, excluded=(*group.excluded, *excluded))
    return reward.with_lengths(group) if isinstance(reward, SumReward) and judged else group


def _is_independent(part: AnyPart) -> bool:
    """Whether the trajectory alone says its value."""
    return not isinstance(part, CosinePart | LengthPart)


def _why_none(part: AnyPart, task: Task) -> str:
    """Why `part` has no value for a rollout of `task`, where nobody told."""
    match part:
        case FunctionPart():
            return f"{part.function} returned None"
        case ScorerPart():
            return "the reward model refused to look at it; a warning says what its service answered"
        case _:
            return f"the answer of task {task.id!r}, {task.answer!r}, cannot be read"


def _of(judge: Callable[[Task, Trajectory], float | None]) -> Scorer:
    async def score(task: Task, trajectory: Trajectory) -> float | None:
        return judge(task, trajectory)

    return score


def _math(part: MathPart, verifier: MathVerifier) -> Scorer:
    async def score(task: Task, trajectory: Trajectory) -> float | None:
        if part.judge == "math_verify" and part.unreadable_gold == "exclude" and not await verifier.can_read(task.answer):
            return None
        if part.answer_in == "answer_tag":
            answer = extract_answer(trajectory, needs_box=part.needs_box)
        else:
            boxes = boxed(final_text(trajectory) or "")
            answer = boxes[-1].strip() if boxes else None
        if not answer:
            return 0.0
        if part.judge == "exact":
            return float(exact_match(task.answer, answer) or False)
        return float((await verifier.verify(task.answer, answer)).is_correct)

    return score


def _r1_zero(part: R1ZeroPart) -> Scorer:
    grade = r1_zero_reward_fn if part.kind == "r1_zero" else question_only_reward_fn

    async def score(task: Task, trajectory: Trajectory) -> float:
        text = final_text(trajectory)
        if text is None:
            return 0.0
        return (await asyncio.to_thread(grade, text, task.answer, part.fast))["reward"]  # it may wait for its process

    return score


def _of_text(part: AnyPart, trajectory: Trajectory) -> float:
    text = written(trajectory)
    match part:
        case FormatPart(kind="format", think_tag=tag, is_prefilled=is_prefilled, newlines=newlines):
            return strict_format(text, think_tag=tag, is_prefilled=is_prefilled, newlines=newlines)
        case FormatPart(kind="turns_format", think_tag=tag, is_prefilled=is_prefilled, newlines=newlines):
            turns = [turn.completion_text for turn in trajectory.turns]
            return turns_format(turns, think_tag=tag, is_prefilled=is_prefilled, newlines=newlines)
        case FormatPart(kind="tag_count", think_tag=tag, is_prefilled=is_prefilled):
            return tag_count(text, think_tag=tag, is_prefilled=is_prefilled)
        case FormatPart(think_tag=tag, is_prefilled=is_prefilled, language=language):
            return code_format(text, language=language, think_tag=tag, is_prefilled=is_prefilled)
        case LanguagePart():
            return language_consistency(text, language=part.language, think_tag=part.think_tag)
        case RepetitionPart():
            return repetition_penalty(text, ngram=part.ngram, max_penalty=part.max_penalty)
        case _:
            return float(has_called(trajectory)) if part.kind == "called" else reasoning_steps(text)


def _references(part: F1Part, task: Task) -> Sequence[str]:
    if part.references_fact is None:
        return [task.answer]
    try:
        references = json.loads(task.facts[part.references_fact])
        if isinstance(references, list) and references and all(isinstance(each, str) for each in references):
            return references
    except (KeyError, ValueError):
        pass
    raise TaskError(
        f"task {task.id!r}: its fact {part.references_fact!r} is no JSON list of right answers. Carry the column along with"
        " tasks.facts, or leave references_fact out."
    )

"""The base classes of rewards and of the parts of a sum; the text of a trajectory, its words, and the answer in it."""

from __future__ import annotations

import inspect
import math
import numbers
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeAlias

from pydantic import Field, model_validator

from strop import user_code
from strop.answer_text import boxed
from strop.errors import ConfigError, did_you_mean
from strop.registry import Component, place_of
from strop.rollout.player import EXCLUDED
from strop.rollout.prompt import AnswerForm
from strop.sandbox.protocol import CodeRunner, PairVerdict, VerifyRequest
from strop.types import Group, StopReason, Task, Trajectory

MAX_WEIGHT = 1e6
_MEANING = "Factor of the part in the sum. 0: only reported."
Weight: TypeAlias = Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT, description=_MEANING)]
PositiveWeight: TypeAlias = Annotated[float, Field(ge=0, le=MAX_WEIGHT, description=_MEANING)]

CALLED = "called"
"""The part that says whether a tool ran."""
ACCURACY = "accuracy"
"""The part that says whether an answer is right."""
SINGLE = "reward"
"""The only part of a reward that is a number."""


class AnswerService(Protocol):
    """Compares answers."""

    def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        """As `CodeService.verify`."""


class RunService(CodeRunner, AnswerService, Protocol):
    """The parts of a `CodeService` that training uses: it runs programs and compares answers, without sessions."""


class NotJudged(Exception):  # noqa: N818 - named for what happened
    """A rollout that cannot be judged, with the reason. It is excluded from its group."""


class Part(Component):
    """One part of a sum: its keys (`Config`) and how it judges. A part of your own is a `RolloutPart`."""

    own_base = "rewards.base.RolloutPart"

    kinds = {  # noqa: RUF012  (a constant table)
        "math": "strop.rewards.math:MathPart",
        "r1_zero": "strop.rewards.r1_zero:R1ZeroPart",
        "question_only": "strop.rewards.r1_zero:QuestionOnlyPart",
        "r1_zero_format": "strop.rewards.r1_zero:R1ZeroFormatPart",
        "question_only_format": "strop.rewards.r1_zero:QuestionOnlyFormatPart",
        "format": "strop.rewards.form:FormatPart",
        "turns_format": "strop.rewards.form:TurnsFormatPart",
        "tag_count": "strop.rewards.form:TagCountPart",
        "code_format": "strop.rewards.form:CodeFormatPart",
        "language": "strop.rewards.language:LanguagePart",
        "code": "strop.rewards.code:CodePart",
        "arpo": "strop.rewards.form:F1Part",
        "repetition": "strop.rewards.form:RepetitionPart",
        "soft_overlong": "strop.rewards.form:SoftOverlongPart",
        "cosine": "strop.rewards.form:CosinePart",
        "length": "strop.rewards.form:LengthPart",
        "called": "strop.rewards.form:CalledPart",
        "reasoning_steps": "strop.rewards.form:ReasoningStepsPart",
        "scorer": "strop.rewards.scorers:ScorerPart",
        "judge": "strop.rewards.judge:JudgePart",
        "function": "strop.rewards.sum:FunctionPart",
    }

    class Config(Component.Config):
        """The keys that every part of a sum has."""

        weight: Weight = 1.0
        where: dict[str, tuple[str, ...]] = Field(
            default={},
            description='Facts of a task and the values for which the part applies; "" stands for tasks without that fact.',
        )

    def applies_to(self, task: Task) -> bool:
        """Whether `where` selects the task."""
        return all(task.facts.get(fact, "") in values for fact, values in self.config.where.items())

    @property
    def is_verifier(self) -> bool:
        """Whether its value says that the answer is right."""
        return False

    @property
    def compares_answers(self) -> bool:
        """Whether its value follows from a comparison with the task's answer."""
        return False

    @property
    def answer_form(self) -> AnswerForm | None:
        """Where it looks for the answer; None if it looks for none."""
        return None

    @property
    def settings(self) -> str:
        """The keys that decide `answer_form`, as a recipe has them."""
        return f"kind = {self.kind!r}"

    def open(self, service: RunService | None) -> None:
        """Get ready to judge. Raises `UserError` if something that it needs is missing.

        Args:
            service: runs programs and compares answers; without one, answers are compared in processes of this machine.
        """

    async def close(self) -> None:
        """Release what `open` acquired. Safe to call twice."""


class RolloutPart(Part):
    """A part that judges each rollout independently."""

    @abstractmethod
    async def score(self, task: Task, trajectory: Trajectory) -> float:
        """Raises `NotJudged` to exclude the rollout, and `MachineError` if the judge itself is lost."""


class AnswerPart(RolloutPart):
    """A part that reads an answer and compares it with the task's."""

    is_verifier = True
    compares_answers = True

    @property
    def equality(self) -> Literal["text", "mathematics", "intervals"]:
        """What it takes for equal: texts and numbers; also 1/2 and 0.5; also (1,2) for 1<x<2."""
        return "text"

    @abstractmethod
    def read_answer(self, trajectory: Trajectory) -> str | None:
        """The answer; None or "" if there is none."""

    @abstractmethod
    async def is_same(self, gold: str, answer: str) -> bool:
        """Whether the part takes the two for the same answer."""


class Reward(Component):
    """Base of all rewards: judges a trajectory by named parts. Implements `strop.rollout.player.Reward`.

    A reward of your own gives `score`, and `check_task` if it reads facts of a task. Its part is called `reward` if `score`
    returns a number. A part called `accuracy` says with a value above 0 that the answer is right.
    """

    kinds = {  # noqa: RUF012  (a constant table)
        "math": "strop.rewards.math:MathReward",
        "code": "strop.rewards.code:CodeReward",
        "countdown": "strop.rewards.countdown:CountdownReward",
        "function": "strop.rewards.sum:FunctionReward",
        "sum": "strop.rewards.sum:SumReward",
    }
    default_kind = "math"

    class Config(Component.Config):
        """A reward has no keys by itself."""

    @classmethod
    def of(cls, value: Any) -> Self:
        """As `Component.of`. A function stands for a reward of the kind `function`."""
        return super().of({"kind": "function", "function": place_of(value)} if inspect.isfunction(value) else value)

    @classmethod
    def class_of(cls, kind: str) -> type[Self]:
        found = super().class_of(kind)
        if found.score is Reward.score and found.__call__ is Reward.__call__:
            raise ConfigError(f"{kind!r} has no score. Define it.")
        return found

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` if a task lacks what the reward reads. Called before each `score`."""

    def score(self, task: Task, trajectory: Trajectory) -> float | Mapping[str, float]:
        """Return the reward, or its parts by name. A pure function that runs in the event loop, so it must be quick."""
        raise NotImplementedError

    @property
    def weights(self) -> Mapping[str, float] | None:
        """The weight of each part in the reward; None if each counts 1. A key `weights` of `Config` sets them."""
        return getattr(self.config, "weights", None)

    def open(self, service: RunService | None) -> None:
        """As `Part.open`."""

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        """See `strop.rollout.player.Reward`. Raises `ConfigError` if `score` raises or returns something else."""
        name, about = type(self).__qualname__, f"for task {task.id!r}"
        user_code.call(self.check_task, task, what=f"{name}.check_task", about=about)
        value = user_code.call(self.score, task, trajectory, what=f"{name}.score", about=about)
        parts = value if isinstance(value, Mapping) else {SINGLE: value}
        if not parts or not all(isinstance(each, str) for each in parts) or not all(map(is_finite_number, parts.values())):
            remedy = "Return a finite number, or a dict of them by name"
            raise user_code.returned(self.score, value, remedy, what=f"{name}.score", about=about)
        return {part: float(each) for part, each in parts.items()}

    async def try_out(self, task: Task, trajectory: Trajectory) -> None:
        """Call the code that judges, for a check before a run; parts of a sum that are not the user's are left out."""
        await self(task, trajectory)

    async def close(self) -> None:
        """Release what `open` acquired. Safe to call twice."""

    @property
    def verifying_parts(self) -> tuple[str, ...]:
        """Parts that say whether the answer is right. The first of them that a rollout has decides."""
        return (ACCURACY,) if self.weights is None or ACCURACY in self.weights else ()

    def right_above(self, part: str) -> float:
        """The value above which `part`, one of `verifying_parts`, says that the answer is right."""
        return 0.0

    @property
    def compares_answers(self) -> bool:
        """Whether all `verifying_parts` compare something with the task's answer."""
        return False

    def readers(self) -> Mapping[str, Part]:
        """The parts that look for an answer, by the name that weights each; "" where the reward has only this one."""
        return {}

    def answer_part(self, name: str) -> AnswerPart | None:
        """What reads and compares the answers that the part `name` judges; None where it compares none."""
        return None

    def with_lengths(self, group: Group) -> Group:
        """Return `group` with the parts that compare its rollouts with each other."""
        return group


class AnswerReward(Reward):
    """Base of the rewards of one answer, whose parts are fixed. A subclass gives `part`, which reads it, and `judge`."""

    class Config(Reward.Config):
        """Its parts; one without a weight is reported and does not count."""

        parts: ClassVar[tuple[str, ...]]
        weights: dict[str, Weight] = Field(
            default={ACCURACY: 1.0},  # rStar2-Agent section 2.2.1: only the answer
            description="Weights of the parts. A part without a weight is reported and does not count.",
        )

        @model_validator(mode="after")
        def _check(self) -> Self:
            check_weights(self.weights, self.parts)
            return self

    part: ClassVar[type[Part]]
    verifying_parts = (ACCURACY,)

    def __init__(self, config: Any = None, /, **keys: Any) -> None:
        super().__init__(config, **keys)
        shared = self.Config.model_fields.keys() & self.part.Config.model_fields.keys()
        self.answer: Any = self.part(**self.config.model_dump(include=set(shared)))

    def open(self, service: RunService | None) -> None:
        self.answer.open(service)

    async def close(self) -> None:
        await self.answer.close()

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        judged = await self.judge(task, trajectory)
        return {**judged, "format": float(self.has_format(trajectory)), CALLED: float(has_called(trajectory))}

    @abstractmethod
    async def judge(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        """The parts that depend on the answer."""

    def has_format(self, trajectory: Trajectory) -> bool:
        """The part `format`."""
        return has_answer_format(trajectory)

    def readers(self) -> Mapping[str, Part]:
        return {"": self.answer}

    def answer_part(self, name: str) -> AnswerPart | None:
        return self.answer if isinstance(self.answer, AnswerPart) else None


def make_reward(reward: Reward, service: RunService | None = None) -> Reward:
    """Return a copy of `reward`, opened. The caller closes it.

    Args:
        service: runs programs and compares answers. Without one, answers are compared in processes of this machine.

    Raises:
        ConfigError: a function cannot be imported, or programs are to be judged and there is no service.
    """
    opened = type(reward)(reward.config)
    opened.open(service)
    return opened


def judge_group(reward: object, group: Group) -> Group:
    """`group` without the rollouts that could not be judged, which count as void, and with its parts of length.

    Works with a reward of any kind; rollouts whose judgement is complete stay as they are.
    """
    judged = tuple(scored for scored in group.trajectories if EXCLUDED not in scored.reward_parts)
    excluded = tuple(scored.trajectory for scored in group.trajectories if EXCLUDED in scored.reward_parts)
    num_void = group.num_void + len(excluded)
    group = replace(group, trajectories=judged, num_void=num_void, excluded=(*group.excluded, *excluded))
    return reward.with_lengths(group) if isinstance(reward, Reward) and judged else group


def is_finite_number(value: object) -> bool:
    """Whether `value` is a number, of numpy and torch too, and finite."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def check_weights(weights: Mapping[str, float], parts: tuple[str, ...]) -> None:
    """Raises `ValueError` for a name that is not in `parts`, and when all weights are 0."""
    for name, weight in weights.items():
        if name not in parts:
            hint = did_you_mean(name, parts)
            raise ValueError(f"weights.{name}: no such part.{hint} The parts are {', '.join(parts)}.")
        if weight < 0 and name != CALLED:
            raise ValueError(f"weights.{name} is {weight:g}: a right answer would be punished. Set a weight of at least 0.")
    check_any_weight(weights)


def check_any_weight(weights: Mapping[str, float]) -> None:
    """Raises `ValueError` when all weights are 0."""
    if not any(weights.values()):
        raise ValueError("weights are all 0: every trajectory would get the same reward. Give one part a weight.")


# Scripts without spaces between words: every character is a word. Elsewhere a word is a run of letters.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+(?:['’][^\W\d_{_UNSPACED}]+)*")


def written(trajectory: Trajectory) -> str:
    """All text of the policy, turn after turn, without tool output."""
    return "".join(turn.completion_text for turn in trajectory.turns)


def final_summary(text: str, *, think_tag: str = "think", is_prefilled: bool = False) -> str | None:
    """The text after the last thought; all of it without thoughts; None if a thought does not end.

    Args:
        is_prefilled: the prompt ends with the opening tag, which is not in `text`.
    """
    opening, closing = f"<{think_tag}>", f"</{think_tag}>"
    text = opening + text if is_prefilled else text
    rest = text.rpartition(closing)[2]
    return None if opening in rest else rest.strip() or None


def words(text: str) -> list[str]:
    """Its words with their case; in Chinese and Japanese every character is one. Digits and signs are not words."""
    return _WORD.findall(text)


def num_sampled_tokens(trajectory: Trajectory) -> int:
    """The number of tokens that the policy sampled."""
    return sum(len(turn.completion.ids) for turn in trajectory.turns)


OPENING, CLOSING = "<answer>", "</answer>"


def final_text(trajectory: Trajectory) -> str | None:
    """The policy's last turn; None if the policy did not end the rollout itself."""
    has_ended = trajectory.stop_reason is StopReason.ANSWERED and trajectory.turns
    return trajectory.turns[-1].completion_text if has_ended else None


def last_answer_block(text: str) -> str | None:
    """The text inside the last closed pair of answer tags."""
    end = text.rfind(CLOSING)
    start = text.rfind(OPENING, 0, max(end, 0))
    return text[start + len(OPENING) : end] if 0 <= start < end else None


def extract_answer(trajectory: Trajectory, *, needs_box: bool) -> str | None:
    r"""The `\boxed{}` inside the last answer tag of the last turn; without `needs_box`, the whole tag if it has no box.

    Boxes with different contents are no answer: it is not clear which one is meant, and a policy must not learn to try several.
    """
    block = last_answer_block(final_text(trajectory) or "")
    if block is None:
        return None
    boxes = boxed(block)
    if len({box.strip() for box in boxes if "\\boxed" not in box}) > 1:
        return None
    answer = boxes[-1] if boxes else "" if needs_box else block
    return answer.strip() or None


def has_answer_format(trajectory: Trajectory) -> bool:
    r"""Whether the policy ended the rollout itself and wrote exactly one answer tag, with one `\boxed{}` inside."""
    said, block = written(trajectory), last_answer_block(final_text(trajectory) or "")
    return said.count(OPENING) == said.count(CLOSING) == 1 and block is not None and len(boxed(block)) == 1


def has_called(trajectory: Trajectory) -> bool:
    """Whether at least one tool call ran without an error caused by the policy."""
    return any(call.outcome.is_dispatched and not call.outcome.is_error for call in trajectory.calls)

"""In which form a reward reads answers, part by part, and which settings read another form."""

from __future__ import annotations

from dataclasses import dataclass

from strop.rewards.config import AnyRewardConfig, CodeRewardConfig, CountdownRewardConfig, RewardConfig
from strop.rewards.sum_config import AnyPart, CodePart, F1Part, MathPart, R1ZeroPart, SumRewardConfig
from strop.rollout.answer_forms import AnswerForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A part of a reward that looks for an answer; others look at lengths, languages or the whole response."""

    key: str  # in the recipe: reward, or reward.parts.NAME
    part: str  # of the reward: the name that weights it; empty where the reward is no sum
    settings: str  # that decide what it reads
    form: AnswerForm


SETTINGS = {
    AnswerForm.BOX_IN_TAG: "kind = 'math' or 'countdown'",
    AnswerForm.TAG: "kind = 'math' or 'countdown' with needs_box = false",
    AnswerForm.BOX: "a part of kind 'question_only', or of kind 'math' with answer_in = 'response'",
    AnswerForm.R1_ZERO: "a part of kind 'r1_zero'",
    AnswerForm.ARPO: "a part of kind 'arpo'",
    AnswerForm.CODE: "kind = 'code'",
}
"""What to write in a recipe so that answers are read in a form."""


def readers_of(reward: AnyRewardConfig) -> list[Reader]:
    """Whatever reads an answer in it. A user's own function is none: nobody knows what it reads."""
    if isinstance(reward, SumRewardConfig):
        found = [_of_part(name, part) for name, part in reward.parts.items()]
        return [each for each in found if each is not None]
    if isinstance(reward, RewardConfig | CountdownRewardConfig):
        form = AnswerForm.BOX_IN_TAG if reward.needs_box else AnswerForm.TAG
        return [Reader(key="reward", part="", settings=_boxed(reward.kind, reward.needs_box), form=form)]
    if isinstance(reward, CodeRewardConfig):
        return [Reader(key="reward", part="", settings="kind = 'code'", form=AnswerForm.CODE)]
    return []


def _of_part(name: str, part: AnyPart) -> Reader | None:
    match part:
        case MathPart(answer_in="response"):
            settings, form = "kind = 'math', answer_in = 'response'", AnswerForm.BOX
        case MathPart(needs_box=needs_box):
            settings, form = _boxed("math", needs_box), AnswerForm.BOX_IN_TAG if needs_box else AnswerForm.TAG
        case R1ZeroPart(kind=kind):
            settings, form = f"kind = {kind!r}", AnswerForm.R1_ZERO if kind == "r1_zero" else AnswerForm.BOX
        case CodePart():
            settings, form = "kind = 'code'", AnswerForm.CODE
        case F1Part():
            settings, form = "kind = 'arpo'", AnswerForm.ARPO
        case _:
            return None
    return Reader(key=f"reward.parts.{name}", part=name, settings=settings, form=form)


def _boxed(kind: str, needs_box: bool) -> str:
    return f"kind = {kind!r}, needs_box = {str(needs_box).lower()}"

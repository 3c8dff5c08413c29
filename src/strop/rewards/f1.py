r"""The layered reward of ARPO (arXiv 2507.19849): form, then the answer by its words, and a bonus for using all tools.

-1                 if the form is wrong or there is no answer
F1                 of the last \boxed{} in the answer, against the best of the references
F1 + r_M           if that is more than 0 and every tool of `multi_tool` was used; r_M = 0.1
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from strop.rewards.base import (
    CLOSING,
    OPENING,
    PositiveWeight,
    RolloutPart,
    final_text,
    last_answer_block,
    written,
)
from strop.rollout.prompt import AnswerForm
from strop.tasks.boxes import boxed
from strop.types import Task, Trajectory

INVALID = -1.0

_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WHOLE = ("yes", "no", "noanswer")


def arpo_reward(
    trajectory: Trajectory, references: Sequence[str], *, multi_tool: Sequence[str] = ("search", "python"), bonus: float = 0.1
) -> float:
    """The layered reward; between -1 and 1 + `bonus`.

    A tool counts as used if a call of its name reached it. The released code counts closing tags, of empty calls too.
    """
    answer = _answer(trajectory)
    if answer is None:
        return INVALID
    accuracy = max((token_f1(answer, reference) for reference in references), default=0.0)
    return accuracy + bonus if accuracy > 0 and _has_used(trajectory, multi_tool) else accuracy


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words in common, as SQuAD (arXiv:1606.05250) counts them; yes, no and noanswer match only themselves.

    Numbers are compared as words: 12.0 has nothing in common with 12.
    """
    said, wanted = normalized(answer), normalized(reference)
    if said != wanted and (said in _WHOLE or wanted in _WHOLE):
        return 0.0
    of_answer, of_reference = said.split(), wanted.split()
    num_common = sum((Counter(of_answer) & Counter(of_reference)).values())
    if not num_common:
        return 0.0
    precision, recall = num_common / len(of_answer), num_common / len(of_reference)
    return 2 * precision * recall / (precision + recall)


def normalized(text: str) -> str:
    r"""Lower case, without punctuation, articles and LaTeX text commands; one blank between words."""
    bare = _TEXT.sub(r"\1", text).lower()
    bare = "".join(character for character in bare if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _answer(trajectory: Trajectory) -> str | None:
    """The last box of the answer tag; None if the form is wrong or the policy did not end the rollout itself."""
    last, said = final_text(trajectory), written(trajectory)
    if last is None or not _is_well_formed(trajectory, said):
        return None
    boxes = boxed(last_answer_block(last) or "")
    return boxes[-1].strip() or None if boxes else None


def _is_well_formed(trajectory: Trajectory, said: str) -> bool:
    """Paired thought tags, one pair of answer tags, every call answered, and no result written by the policy itself."""
    num_thoughts = said.count("<think>")
    if num_thoughts == 0 or num_thoughts != said.count("</think>") or "<result>" in said:
        return False
    if said.count(OPENING) != 1 or said.count(CLOSING) != 1:
        return False
    are_paired = all(said.count(f"<{name}>") == said.count(f"</{name}>") for name in ("search", "python"))
    return are_paired and not any(_has_block(turn.completion_text) and not turn.observation_ids for turn in trajectory.turns)


def _has_block(text: str) -> bool:
    return "</search>" in text or "</python>" in text


def _has_used(trajectory: Trajectory, names: Sequence[str]) -> bool:
    called = {call.name for call in trajectory.calls if call.outcome.is_dispatched}
    return bool(names) and called >= set(names)


class F1Part(RolloutPart):
    """ARPO's layered reward: -1 for a wrong form, else F1 of words, and a bonus for using every tool."""

    class Config(RolloutPart.Config):
        weight: PositiveWeight = 1.0
        multi_tool: tuple[str, ...] = Field(
            default=("search", "python"), description="Tools that must all be used for the bonus."
        )
        bonus: float = Field(default=0.1, ge=0, le=1e6, description="r_M, the bonus for using all of multi_tool.")

    config: Config

    @property
    def compares_answers(self) -> bool:
        return True

    @property
    def is_verifier(self) -> bool:
        return True

    @property
    def answer_form(self) -> AnswerForm:
        return AnswerForm.ARPO

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return arpo_reward(trajectory, [task.answer], multi_tool=self.config.multi_tool, bonus=self.config.bonus)

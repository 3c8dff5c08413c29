"""Which part of a reward says that a rollout is right; a preference, a form and a length say nothing of the kind."""

from __future__ import annotations

from dataclasses import dataclass

from strop.rewards import AnyRewardConfig, FunctionRewardConfig, SumRewardConfig
from strop.rewards.function import PART
from strop.rewards.sum_config import AnyPart, CodePart, F1Part, FunctionPart, MathPart, R1ZeroPart
from strop.types import ScoredTrajectory

ACCURACY = "accuracy"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Parts that say what is right, the first of them that a rollout has first."""

    parts: tuple[str, ...]

    def __call__(self, scored: ScoredTrajectory) -> bool | None:
        """Whether that part is above 0; None where the rollout has no such part, so that nothing says whether it is right."""
        value = next((scored.reward_parts[name] for name in self.parts if name in scored.reward_parts), None)
        return None if value is None else value > 0


USUAL = Verdict((ACCURACY, PART))
"""Of a reward that is not known: what all kinds but `sum` call the part."""


def verdict_of(reward: AnyRewardConfig) -> Verdict:
    """What says what is right under `reward`.

    Of a sum it is the part called `accuracy`, whatever it is; for tasks without it the first part that compares an answer
    (math, code, r1_zero, question_only, arpo), or a function of the user's own that has a weight.
    """
    match reward:
        case FunctionRewardConfig():
            return Verdict((PART,))
        case SumRewardConfig():
            judging = [name for name, part in reward.parts.items() if _says_what_is_right(part)]
            return Verdict(tuple(dict.fromkeys([*([ACCURACY] if ACCURACY in reward.parts else []), *judging])))
        case _:
            return Verdict((ACCURACY,))


def _says_what_is_right(part: AnyPart) -> bool:
    return isinstance(part, MathPart | CodePart | R1ZeroPart | F1Part) or (isinstance(part, FunctionPart) and part.weight != 0)

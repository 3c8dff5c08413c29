"""Does the reward judge answers that are known to be right or wrong as it should?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from strop.doctor.examination import Examination
from strop.doctor.finding import NotMade, Problem
from strop.doctor.own_code import answered, trajectory_of
from strop.errors import MachineError, UserError
from strop.rewards.base import AnswerPart, NotJudged
from strop.sandbox.numbers import plain_number
from strop.types import StopReason, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """What a policy says to a task whose answer is `gold`, and whether that is right."""

    gold: str
    text: str  # of its last turn
    is_right: bool
    what: str
    observed: str = ""  # what a tool answered in the turn before
    stop_reason: StopReason = StopReason.ANSWERED
    facts: Mapping[str, str]


def _known(gold: str, answer: str, *, is_right: bool = True) -> KnownAnswer:
    return KnownAnswer(gold=gold, text=answered(answer), is_right=is_right, what=f"{answer} for {gold}", facts={})


# Parts that compare as mathematics. math_verify takes an interval for an inequality of the gold answer, and not the reverse.
_ONE_WAY = (_known("1<x<2", "(1,2)"), _known("x>1", r"(1,\infty)"))
_EQUAL = (_known("72", "72.0"), _known("1072", "1,072"), _known("0.5", r"\frac{1}{2}"))
_UNEQUAL = tuple(_known("72", wrong, is_right=False) for wrong in ("73", "27", "7.2", "-72"))
_MATHEMATICS = (*_EQUAL, *_UNEQUAL, _known(r"\frac{1}{2}", r"\frac{2}{1}", is_right=False))


async def check_answers(examination: Examination) -> str:
    """Judge known answers with each part that compares answers. Say which are misjudged, and what mistake that looks like."""
    reward, tasks = examination.parts.reward, examination.parts.tasks[:3]
    parts = {name: part for name in reward.verifying_parts if (part := reward.answer_part(name)) is not None}
    if not parts:
        raise NotMade("no part of the reward compares answers")
    num, misjudged, misjudged_one_way = 0, [], []
    try:
        for part in parts.values():
            known = [*_of_tasks(part, tasks), *(_MATHEMATICS if part.equality != "text" else ())]
            one_way = _ONE_WAY if part.equality == "intervals" else ()
            num += len(known) + len(one_way)
            misjudged += [each for each in known if await _is_misjudged(part, each)]
            misjudged_one_way += [each for each in one_way if await _is_misjudged(part, each)]
    except (MachineError, UserError) as error:
        raise Problem(
            f"the judge was lost: {error}",
            "Mend what it says. Answers are compared by the code service, where programs run.",
        ) from error
    if misjudged:
        shown = "; ".join(f"{each.what} counts as {'wrong' if each.is_right else 'right'}" for each in misjudged[:4])
        raise Problem(
            f"{len(misjudged)} of {num} known answers are misjudged: {shown}.",
            "Mend extraction or comparison of answers before training: the policy learns whatever the judge rewards.",
        )
    if misjudged_one_way:
        shown = ", ".join(each.what for each in misjudged_one_way)
        raise Problem(
            f"symmetric pairs are judged well, but {shown} counts as wrong: gold and answer seem to be swapped.",
            "Call the verifier as verify(gold, answer), in this order: the comparison is not symmetric.",
        )
    weights = reward.weights
    if weights is not None and not any(weights.get(name, 0.0) > 0 for name in parts):
        raise Problem(
            f"a right answer earns no more than a wrong one: the weight of {' and '.join(parts)} is 0.",
            f"Give {next(iter(parts))} a positive weight.",
        )
    return f"judges all {num} known answers as it should ({', '.join(parts)})"


def _of_tasks(part: AnswerPart, tasks: Sequence[Task]) -> list[KnownAnswer]:
    """The gold answer of each task is right, if it is given as the policy's answer; a number with one digit more is wrong."""
    known = []
    for task in tasks:
        if not part.applies_to(task):
            continue
        gold = task.answer
        right = replace(_known(gold, gold), what=f"{gold} for {gold} ({task.id})", facts=task.facts)
        known.append(right)
        if (number := plain_number(gold)) is not None:
            more = f"{number * 10 + 1:f}"
            known.append(replace(right, text=answered(more), is_right=False, what=f"{more} for {gold} ({task.id})"))
        known += [
            replace(right, text=f"It is {gold}.", is_right=False, what=f"{gold} without an answer tag or box"),
            replace(right, text="", observed=answered(gold), is_right=False, what=f"{gold} that only the tool said"),
            replace(right, stop_reason=StopReason.LENGTH, is_right=False, what=f"{gold} in a cut-off rollout"),
        ]
    return known


async def _is_misjudged(part: AnswerPart, known: KnownAnswer) -> bool:
    task = Task(id="known answer", question="", answer=known.gold, source="doctor", facts=known.facts)
    trajectory = trajectory_of(task, known.text, observed=known.observed, stop_reason=known.stop_reason)
    try:
        return (await part.score(task, trajectory) > 0) is not known.is_right
    except NotJudged:
        return known.is_right

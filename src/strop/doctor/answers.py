"""Does the reward judge answers that are known to be right or wrong as it should?"""

from __future__ import annotations

from dataclasses import dataclass

from strop.doctor.examination import Examination
from strop.doctor.finding import Finding
from strop.errors import MachineError, UserError
from strop.rewards.config import PARTS
from strop.sandbox.numbers import plain_number
from strop.types import (
    Completion,
    FinishReason,
    RolloutKey,
    ScoredTrajectory,
    StopReason,
    Task,
    ToolCall,
    ToolOutcome,
    Trajectory,
    Turn,
)

NAME = "reward"
_NUM_TASKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """What a policy says to a task whose answer is `gold`, and whether that is right."""

    gold: str
    text: str  # of its last turn
    is_right: bool
    what: str
    tool_said: str = ""  # in the turn before
    stop_reason: StopReason = StopReason.ANSWERED


def _says(answer: str) -> str:
    return rf"<reason>So it is.</reason><answer>\boxed{{{answer}}}</answer>"


# math_verify takes an interval for an inequality of the gold answer, but not the other way round.
_ONE_WAY = (
    KnownAnswer(gold="1<x<2", text=_says("(1,2)"), is_right=True, what="(1,2) for 1<x<2"),
    KnownAnswer(gold="x>1", text=_says(r"(1,\infty)"), is_right=True, what=r"(1,\infty) for x>1"),
)
_BOTH_WAYS = (
    KnownAnswer(gold="72", text=_says("72"), is_right=True, what="72 for 72"),
    KnownAnswer(gold="72", text=_says("72.0"), is_right=True, what="72.0 for 72"),
    KnownAnswer(gold="1072", text=_says("1,072"), is_right=True, what="1,072 for 1072"),
    KnownAnswer(gold="0.5", text=_says(r"\frac{1}{2}"), is_right=True, what="1/2 for 0.5"),
    KnownAnswer(gold="72", text=_says("73"), is_right=False, what="73 for 72"),
    KnownAnswer(gold="72", text=_says("27"), is_right=False, what="27 for 72"),
    KnownAnswer(gold="72", text=_says("7.2"), is_right=False, what="7.2 for 72"),
    KnownAnswer(gold="72", text=_says("-72"), is_right=False, what="-72 for 72"),
    KnownAnswer(gold=r"\frac{1}{2}", text=_says(r"\frac{2}{1}"), is_right=False, what="2/1 for 1/2"),
    KnownAnswer(gold="72", text="It is 72.", is_right=False, what="72 without an answer tag"),
    KnownAnswer(gold="72", text="", tool_said=_says("72"), is_right=False, what="72 that only the tool said"),
    KnownAnswer(gold="72", text=_says("72"), stop_reason=StopReason.LENGTH, is_right=False, what="72 in a cut-off rollout"),
)


async def check_answers(examination: Examination) -> Finding:
    """Judge known answers, the recipe's own first; say which are misjudged, and what kind of mistake that looks like."""
    if examination.parts.stage.reward.kind != "math":
        kind = examination.parts.stage.reward.kind
        return Finding.not_made(NAME, f"of a reward of kind {kind!r} no answers are known to be right or wrong")
    known = [*_of_tasks(examination.parts.tasks[:_NUM_TASKS]), *_BOTH_WAYS]
    try:
        misjudged = [each for each in known if await _is_misjudged(examination, each)]
        misjudged_one_way = [each for each in _ONE_WAY if await _is_misjudged(examination, each)]
        right, wrong = [(await _judge(examination, known[index])).reward for index in _right_and_wrong(known)]
    except (MachineError, UserError) as error:
        return Finding(
            check=NAME,
            detail=f"the judge was lost: {error}",
            remedy="Mend what it says. Answers are compared by the code service, where programs run.",
        )
    if misjudged:
        told = "; ".join(f"{each.what} counts as {'wrong' if each.is_right else 'right'}" for each in misjudged[:4])
        return Finding(
            check=NAME,
            detail=f"{len(misjudged)} of {len(known) + len(_ONE_WAY)} known answers are misjudged: {told}.",
            remedy="Mend extraction or comparison of answers before training: the policy learns whatever the judge rewards.",
        )
    if misjudged_one_way:
        told = ", ".join(each.what for each in misjudged_one_way)
        return Finding(
            check=NAME,
            detail=f"symmetric pairs are judged well, but {told} counts as wrong: gold and answer seem to be swapped.",
            remedy="Call the verifier as verify(gold, answer), in this order: the comparison is not symmetric.",
        )
    if not right > wrong:
        return Finding(
            check=NAME,
            detail=f"a right answer earns {right:g}, a wrong one {wrong:g}: the parts are {', '.join(PARTS)}.",
            remedy="Give reward.weights.accuracy a positive weight.",
        )
    return Finding.fine(
        NAME, f"judges all {len(known) + len(_ONE_WAY)} known answers as it should; right earns {right:g}, wrong {wrong:g}"
    )


def _of_tasks(tasks: tuple[Task, ...]) -> list[KnownAnswer]:
    """The gold answer of each task is right; a number with one digit more is wrong."""
    known = []
    for task in tasks:
        gold = task.answer
        known.append(KnownAnswer(gold=gold, text=_says(gold), is_right=True, what=f"{gold} for {gold} ({task.id})"))
        number = plain_number(gold)
        if number is not None:
            more = f"{number * 10 + 1:f}"
            known.append(KnownAnswer(gold=gold, text=_says(more), is_right=False, what=f"{more} for {gold} ({task.id})"))
    return known


def _right_and_wrong(known: list[KnownAnswer]) -> tuple[int, int]:
    whole = [each.what for each in known]
    return whole.index("72 for 72"), whole.index("73 for 72")


async def _is_misjudged(examination: Examination, known: KnownAnswer) -> bool:
    return (await _judge(examination, known)).reward_parts["accuracy"] != float(known.is_right)


async def _judge(examination: Examination, known: KnownAnswer) -> ScoredTrajectory:
    task = Task(id="known answer", question="", answer=known.gold, source="doctor")
    before = (_turn("", known.tool_said),) if known.tool_said else ()
    turns = (*before, _turn(known.text, ""))
    trajectory = Trajectory(
        key=RolloutKey(task_index=0, attempt=0), task_id=task.id, prompt_ids=(), turns=turns, stop_reason=known.stop_reason
    )
    return await examination.parts.judge.score(task, trajectory)


def _turn(said: str, observed: str) -> Turn:
    """A turn of text alone: rewards read words, not ids."""
    call = ToolCall(name="python", arguments="{}", outcome=ToolOutcome.STDOUT, text=observed, duration_s=0.0)
    completion = Completion(
        ids=(), logprobs=(), entropies=(), is_forced=(), policy_version=0, finish_reason=FinishReason.STOP, cached_tokens=0
    )
    return Turn(
        completion=completion,
        calls=(call,) if observed else (),
        observation_ids=(),
        completion_text=said,
        observation_text=observed,
    )

import asyncio

import pytest
from attempts import attempt, boxed, group_of

from strop.rewards import MathReward, Reward
from strop.rewards.code import CodeReward
from strop.stages.evaluation import Voting
from strop.types import StopReason

QA = "strop.evaluation.short_answers:exact_match"
CHOICE = "strop.evaluation.short_answers:right_letter"


def votes(reward, *attempts):
    async def ask():
        async with Voting(reward) as voting:
            return await voting.votes([group_of(*attempts)])

    found = asyncio.run(ask())
    return None if found is None else found[0]


def of_sum(**parts):
    return Reward.of({"kind": "sum", "parts": parts})


def of_function(function):
    return of_sum(accuracy={"kind": "function", "function": function})


def test_answers_that_the_judge_takes_for_the_same_are_one_vote():
    said = [attempt(boxed(text), right=False) for text in ("3", "3.0", "4", "3.00")]
    assert votes(MathReward(), *said) == ["3", "3", "4", "3"]


def test_answers_that_were_judged_right_are_one_however_they_are_spelt():
    said = [attempt(boxed("\\frac{1}{2}"), right=True), attempt(boxed("7"), right=False), attempt(boxed("0.5"), right=True)]
    assert votes(MathReward(), *said) == ["\\frac{1}{2}", "7", "\\frac{1}{2}"]


def test_no_answer_and_a_truncated_attempt_have_no_vote():
    cut = attempt(boxed("3"), right=False, stop_reason=StopReason.LENGTH)
    assert votes(MathReward(), attempt("three", right=False), cut) == ["", ""]


def test_short_answers_vote_by_their_words_and_choices_by_their_letter():
    said = [attempt(boxed(text), right=False) for text in ("The Beatles", "beatles.", "Queen")]
    assert votes(of_function(QA), *said) == ["beatles", "beatles", "queen"]
    said = [attempt(boxed(text), right=False) for text in ("(B)", "\\text{B}", "A and B")]
    assert votes(of_function(CHOICE), *said) == ["B", "B", ""]


@pytest.mark.parametrize("names", [("format", "answer"), ("answer", "format")])
def test_the_part_that_says_what_is_right_reads_the_answers_wherever_it_stands(names):
    kinds = {"format": {"kind": "format", "weight": 0.1}, "answer": {"kind": "math"}}
    said = [attempt(boxed(text), right=False, parts={"answer": 0.0, "format": 1.0}) for text in ("3", "3.0", "4")]
    assert votes(of_sum(**{name: kinds[name] for name in names}), *said) == ["3", "3", "4"]


def test_answers_to_the_graders_of_cs336_are_read_and_compared_as_these_do():
    thoughts = "</think> <answer>{}</answer>"
    said = (thoughts.format(r"\frac{1}{2}"), thoughts.format(r"so \boxed{1/2}"), thoughts.format("7"), "<answer>7</answer>")
    attempts = [attempt(text, right=False, parts={"r1_zero": 0.0}) for text in said]
    assert votes(of_sum(r1_zero={"kind": "r1_zero"}), *attempts) == [r"\frac{1}{2}", r"\frac{1}{2}", "7", ""]  # no format
    said = (r"\boxed{7 cm}, no: \boxed{0.5}", r"\boxed{1/2}", r"\boxed{7} \boxed{8", "8")
    attempts = [attempt(text, right=False, parts={"box": 0.0}) for text in said]
    assert votes(of_sum(box={"kind": "question_only"}), *attempts) == ["0.5", "0.5", "", ""]


def test_what_is_right_of_some_tasks_alone_is_read_there_and_what_has_no_answers_is_named():
    reward = of_sum(
        letter={"kind": "function", "function": CHOICE, "right_above": 0, "where": {"form": ["choice"]}},
        number={"kind": "math", "where": {"form": [""]}},
        program={"kind": "code", "where": {"form": ["code"]}},
    )
    choice = group_of(attempt(boxed("(B)"), right=False, parts={"letter": 0.0}))
    number = group_of(*(attempt(text, right=False, parts={"number": 0.0}) for text in (boxed("(B)"), "x")))
    program = group_of(attempt("x", right=True, parts={"program": 1.0}))
    void = group_of(num_void=2)
    voting = Voting(reward)
    assert asyncio.run(voting.votes([choice, number, void])) == [["B"], ["(B)", ""], []]
    assert voting.without_answers([choice, number, void]) == []
    assert asyncio.run(voting.votes([choice, program])) is None
    assert voting.without_answers([choice, program]) == ["program"]
    asyncio.run(voting.__aexit__())


@pytest.mark.parametrize("reward", [CodeReward(), of_function("builtins:len")])
def test_a_reward_without_answers_to_compare_has_no_votes(reward):
    assert votes(reward, attempt("x", right=True)) is None

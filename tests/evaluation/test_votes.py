import asyncio

import pytest
from attempts import attempt, boxed, group_of

from strop.evaluation.votes import Voting
from strop.rewards import CodeRewardConfig, RewardConfig, SumRewardConfig
from strop.types import StopReason

QA = "strop.evaluation.question_answering:exact_match"
CHOICE = "strop.evaluation.multiple_choice:right_letter"


def votes(reward, *attempts):
    async def ask():
        voting = Voting(reward)
        try:
            return await voting.votes([group_of(*attempts)])
        finally:
            await voting.close()

    found = asyncio.run(ask())
    return None if found is None else found[0]


def of_function(function):
    return SumRewardConfig.model_validate_json(
        f'{{"kind": "sum", "parts": {{"accuracy": {{"kind": "function", "function": "{function}"}}}}}}'
    )


def test_answers_that_the_judge_takes_for_the_same_are_one_vote():
    said = [attempt(boxed(text), right=False) for text in ("3", "3.0", "4", "3.00")]
    assert votes(RewardConfig(), *said) == ["3", "3", "4", "3"]


def test_answers_that_were_judged_right_are_one_however_they_are_spelt():
    said = [attempt(boxed("\\frac{1}{2}"), right=True), attempt(boxed("7"), right=False), attempt(boxed("0.5"), right=True)]
    assert votes(RewardConfig(), *said) == ["\\frac{1}{2}", "7", "\\frac{1}{2}"]


def test_no_answer_and_a_truncated_attempt_have_no_vote():
    cut = attempt(boxed("3"), right=False, stop_reason=StopReason.LENGTH)
    assert votes(RewardConfig(), attempt("three", right=False), cut) == ["", ""]


def test_short_answers_vote_by_their_words_and_choices_by_their_letter():
    said = [attempt(boxed(text), right=False) for text in ("The Beatles", "beatles.", "Queen")]
    assert votes(of_function(QA), *said) == ["beatles", "beatles", "queen"]
    said = [attempt(boxed(text), right=False) for text in ("(B)", "\\text{B}", "A and B")]
    assert votes(of_function(CHOICE), *said) == ["B", "B", ""]


@pytest.mark.parametrize("reward", [CodeRewardConfig(kind="code"), of_function("builtins:len")])
def test_a_reward_without_answers_to_compare_has_no_votes(reward):
    assert votes(reward, attempt("x", right=True)) is None

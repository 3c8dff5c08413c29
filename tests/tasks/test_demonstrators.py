"""The demonstrator of arithmetic: in which language it thinks, and how it adds without a tool."""

import re
from contextlib import suppress
from dataclasses import replace

import pytest

from strop.errors import TaskError
from strop.rewards.language import scripts_of
from strop.stages.rejection_sampling import foreign_share
from strop.tasks.demonstrators import ArithmeticDemonstrator
from strop.types import Task

TASK = Task(id="t", question="4-5-59", answer="-60", source="test", facts={"expression": "4-5-59"})
NUM = 400


def turns_of(script, output):
    """What a script says where every observation is `output`."""
    turns = [next(script)]
    with suppress(StopIteration):
        while True:
            turns.append(script.send(output))
    return turns


def said(seed, **fractions):
    return turns_of(ArithmeticDemonstrator(**fractions).script(TASK, tool="python", seed=seed), "-60\n")


def is_russian(turn):
    [script] = set(scripts_of(turn))
    return script == "cyrillic"


def without_thoughts(turn):
    return re.sub("<reason>.*?</reason>", "", turn)


@pytest.mark.parametrize(("fraction", "is_foreign"), [(0.0, False), (1.0, True)])
def test_no_thought_or_every_one_is_in_russian(fraction, is_foreign):
    turns = [turn for seed in range(NUM) for turn in said(seed, foreign_fraction=fraction)]
    assert {is_russian(turn) for turn in turns} == {is_foreign}


def test_each_thought_is_drawn_by_itself_so_that_conversations_mix_languages():
    played = [said(seed, guess_fraction=0.0, error_fraction=0.5, foreign_fraction=0.3) for seed in range(NUM)]
    russian = [is_russian(turn) for turns in played for turn in turns]
    assert sum(russian) / len(russian) == pytest.approx(0.3, abs=0.05)  # 3 standard deviations of 1000 draws
    is_mixed = [foreign_share("".join(turns)) > 0 for turns in played]
    # With two thoughts 1 - 0.7² - 0.3² = 0.42, with three 1 - 0.7³ - 0.3³ = 0.63; one half each.
    assert sum(is_mixed) / NUM == pytest.approx(0.525, abs=0.08)


def test_a_language_changes_thoughts_alone():
    for seed in range(NUM):
        english, mixed = said(seed), said(seed, foreign_fraction=0.5)
        assert [without_thoughts(turn) for turn in english] == [without_thoughts(turn) for turn in mixed]
        assert mixed == said(seed, foreign_fraction=0.5)


@pytest.mark.parametrize(
    ("expression", "answer", "columns"),
    [
        ("27+45", "72", "7+5=12, 2+4+1=7"),
        ("86+57", "143", "6+7=13, 8+5+1=14"),
        ("3+14", "17", "3+4=7, 1=1"),
        ("99+99+99", "297", "9+9+9=27, 9+9+9+2=29"),
    ],
)
def test_without_a_tool_it_adds_column_by_column(expression, answer, columns):
    task = replace(TASK, answer=answer, facts={"expression": expression})
    [turn] = ArithmeticDemonstrator(guess_fraction=0.0).script(task, tool="", seed=0)
    assert turn == rf"<reason>{expression}: {columns}.</reason><answer>\boxed{{{answer}}}</answer>"


def test_without_a_tool_it_refuses_what_is_no_sum():
    with pytest.raises(TaskError, match="can only add"):
        next(ArithmeticDemonstrator(guess_fraction=0.0).script(TASK, tool="", seed=0))


def stepwise(expression, answer, *, tool, error_fraction=0.0):
    task = replace(TASK, answer=answer, facts={"expression": expression})
    demonstrator = ArithmeticDemonstrator(guess_fraction=0.0, error_fraction=error_fraction, stepwise=True)
    return turns_of(demonstrator.script(task, tool=tool, seed=0), f"{answer}\n")


def test_stepwise_each_operation_is_a_line_of_its_own_or_a_call_of_its_own():
    (thought,) = stepwise("27-45+8", "-10", tool="")
    assert thought == r"<reason>27-45+8: 27-45=-18, -18+8=-10.</reason><answer>\boxed{-10}</answer>"
    first, second, last = stepwise("27-45+8", "-10", tool="python")
    assert "print(27-45)" in first
    assert "<reason>The tool says -18.</reason>" in second
    assert "print(-18+8)" in second
    assert last == r"<reason>The tool says -10.</reason><answer>\boxed{-10}</answer>"


def test_stepwise_each_operation_can_be_called_wrongly_first():
    turns = stepwise("27-45+8", "-10", tool="python", error_fraction=1.0)
    assert ["That call was wrong." in turn for turn in turns] == [False, True, False, True, False]


def test_stepwise_it_refuses_what_is_neither_added_nor_subtracted():
    with pytest.raises(TaskError, match=r"adds and subtracts stepwise"):
        stepwise("27*45", "1215", tool="python")

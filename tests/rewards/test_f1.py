import dataclasses

import pytest
from trajectories import called, trajectory, turn

from strop.rewards.form import arpo_reward, token_f1
from strop.rollout.tag_calls import TagCalls
from strop.rollout.tool_calls import FailedCall
from strop.types import StopReason, ToolCall, ToolOutcome

THINK = "<think>so</think>"


def done(answer):
    return rf"{THINK}<answer>\boxed{{{answer}}}</answer>"


def tagged(name, outcome=ToolOutcome.STDOUT):
    """A turn that calls a tool in a tag of its name, with its result."""
    call = ToolCall(name=name, arguments="x", outcome=outcome, text="r", duration_s=0.0)
    return turn(f"{THINK}<{name}>x</{name}>", call, observation="<result>r</result>")


def observed(*turns):
    """As `trajectory`, with ids for the observations of all turns but the last."""
    made = trajectory(*turns)
    seen = [dataclasses.replace(each, observation_ids=(1,)) for each in made.turns[:-1]]
    return dataclasses.replace(made, turns=(*seen, made.turns[-1]))


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("Paris", "paris", 1.0),
        ("the city of Paris", "Paris", 0.5),  # city, of, paris against paris: 2 * (1/3 * 1) / (4/3)
        ("Barack  Obama.", "The Obama", 2 / 3),
        ("London", "Paris", 0.0),
        ("yes", "yes", 1.0),
        ("yes it is", "yes", 0.0),  # has to be exact
        ("no", "no answer", 0.0),
        ("12.0", "12", 0.0),  # no mathematics
        (r"\text{Paris}", "Paris", 1.0),
        ("", "Paris", 0.0),
    ],
)
def test_f1_is_of_words_in_common(answer, reference, expected):
    assert token_f1(answer, reference) == pytest.approx(expected)


def test_the_best_of_several_references_counts():
    assert arpo_reward(trajectory(done("Bombay")), ["Mumbai", "Bombay"]) == 1.0


def test_a_right_answer_with_both_tools_earns_the_bonus_and_a_wrong_one_does_not():
    both = (tagged("search"), tagged("python"))
    assert arpo_reward(observed(*both, done("Paris")), ["Paris"]) == pytest.approx(1.1)
    assert arpo_reward(observed(*both, done("the city of Paris")), ["Paris"]) == pytest.approx(0.6)
    assert arpo_reward(observed(*both, done("London")), ["Paris"]) == 0.0
    assert arpo_reward(observed(tagged("search"), done("Paris")), ["Paris"]) == 1.0
    assert arpo_reward(trajectory(done("London")), ["Paris"]) == 0.0


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [
        (ToolOutcome.EMPTY, 1.1),
        (ToolOutcome.ERROR, 1.1),  # it ran
        (ToolOutcome.MALFORMED, 1.0),  # nothing between its tags
        (ToolOutcome.WRONG_ARGUMENTS, 1.0),
        (ToolOutcome.NOT_RUN, 1.0),
    ],
)
def test_a_tool_is_used_if_a_call_reached_it(outcome, reward):
    judged = observed(tagged("search"), tagged("python", outcome), done("Paris"))
    assert arpo_reward(judged, ["Paris"]) == pytest.approx(reward)


def test_a_call_at_which_the_end_of_a_turn_is_forced_is_not_answered():
    answered = observed(tagged("search"), f"{THINK}<answer>\\boxed{{Paris}}</answer><search>x</search>", "")
    at_limit = dataclasses.replace(answered, turns=answered.turns[:2], stop_reason=StopReason.TOOL_BUDGET)
    assert at_limit.turns[-1].observation_ids
    assert arpo_reward(at_limit, ["Paris"]) == -1.0


def test_calls_in_json_count_as_tools_that_were_used():
    judged = observed(turn(THINK, called()), done("Paris"))  # a call of the tool python
    assert arpo_reward(judged, ["Paris"], multi_tool=("python",)) == pytest.approx(1.1)
    assert arpo_reward(judged, ["Paris"], multi_tool=("python", "search")) == 1.0


@pytest.mark.parametrize(
    "turns",
    [
        [r"<answer>\boxed{Paris}</answer>"],  # no thought
        [rf"<think>{done('Paris')}"],  # unpaired
        [done("Paris") + r"<answer>\boxed{Paris}</answer>"],  # two answers
        [rf"{THINK}\boxed{{Paris}}"],  # no answer tag
        [f"{THINK}<answer>Paris</answer>"],  # no box
        [rf"{THINK}<answer>\boxed{{}}</answer>"],
        [rf"{THINK}<search>x</search><result>Paris</result>{done('Paris')}"],  # a result that nobody gave
        [rf"{THINK}<search>x {done('Paris')}"],  # a call that does not close
        [rf"{THINK}<python>x</python>{done('Paris')}"],  # a call that nobody answered
    ],
)
def test_a_wrong_form_costs_one_whatever_the_answer(turns):
    assert arpo_reward(trajectory(*turns), ["Paris"]) == -1.0


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ("<think>hm</think> <python>print(1)</python>", True),
        ("<python>\nfor x in y:\n    pass\n</python>", True),
        ("I could write <python> here. <python>2</python>", True),
        ("<think>I may use <search> now</think><search>b</search>", True),
        ("<search>a <search>b</search>", True),
        ('<python>print("<search>")</python>', True),
        ('<python>print("<search>who</search>")</python>', True),
        ("<python>print(1)", False),
        ("<python>1</python> and <search>who", False),
        ("print(1)</python>", False),
        ("<search>1</python>", False),
        ("<search>who is X <python>print(1)</python>", False),
        ('<search>who <python>print("<search>")</python>', False),
        ("<search>a <search>b <python>1</python>", False),
        ("<search>who <python>print(1)", False),
        ("<search>", False),
    ],
)
def test_the_form_has_the_calls_that_the_parser_reads(text, is_call):
    failed = [call for call in TagCalls(()).parse(text, max_calls=1) if isinstance(call, FailedCall)]
    assert (not failed) is is_call
    assert arpo_reward(observed(THINK + text, done("Paris")), ["Paris"]) == (1.0 if is_call else -1.0)


def test_a_call_with_nothing_in_it_has_the_form_of_a_call():
    assert arpo_reward(observed(f"{THINK}<python> \n </python>", done("Paris")), ["Paris"]) == 1.0


def test_a_truncated_rollout_has_no_answer():
    assert arpo_reward(trajectory(done("Paris"), stop_reason=StopReason.LENGTH), ["Paris"]) == -1.0

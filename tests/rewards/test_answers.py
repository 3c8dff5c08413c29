import pytest
from trajectories import trajectory, turn

from strop.rewards.base import extract_answer, has_answer_format, last_answer_block
from strop.types import StopReason

RIGHT = r"<answer>\boxed{72}</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>1</answer>", "1"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("</answer><answer>", None),
        ("</answer>", None),
        ("<answer>1", None),
        ("", None),
    ],
)
def test_the_last_closed_answer_tag_counts(text, expected):
    assert last_answer_block(text) == expected


def answer_of(*turns, needs_box=True, **kwargs):
    return extract_answer(trajectory(*turns, **kwargs), needs_box=needs_box)


def test_the_answer_is_the_box_of_the_answer_tag():
    assert answer_of(r"\boxed{1} <answer>it is \boxed{72}</answer> \boxed{3}") == "72"
    assert answer_of(r"<answer>\boxed{72}, that is \boxed{ 72 }</answer>") == "72"
    assert answer_of(r"<answer>\boxed{\boxed{72}}</answer>") == "72"


def test_two_boxes_that_differ_are_no_answer():
    assert answer_of(r"<answer>either \boxed{71} or \boxed{72}</answer>") is None
    assert answer_of(r"<answer>either \boxed{72} or \boxed{71}</answer>") is None


def test_a_box_outside_the_answer_tag_is_no_answer():
    assert answer_of(r"\boxed{72}") is None
    assert answer_of(r"\boxed{72} <answer>see above</answer>") is None


def test_an_answer_without_a_box_counts_only_where_no_box_is_needed():
    assert answer_of("<answer> 72 </answer>") is None
    assert answer_of("<answer> 72 </answer>", needs_box=False) == "72"
    assert answer_of("<answer> </answer>", needs_box=False) is None


def test_what_a_tool_printed_is_no_answer():
    assert answer_of(turn("I print it", observation=RIGHT), "done") is None


def test_an_answer_in_an_earlier_turn_is_no_answer():
    assert answer_of(RIGHT, "done") is None


@pytest.mark.parametrize("stop_reason", [reason for reason in StopReason if reason is not StopReason.ANSWERED])
def test_a_rollout_that_was_ended_for_the_policy_has_no_answer(stop_reason):
    assert answer_of(RIGHT, stop_reason=stop_reason) is None
    assert not has_answer_format(trajectory(RIGHT, stop_reason=stop_reason))


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([RIGHT], True),
        (["thinking", "more " + RIGHT], True),
        ([RIGHT + RIGHT], False),
        ([RIGHT, RIGHT], False),  # rStar2-Agent section 2.1: a single answer block in the whole rollout
        ([RIGHT + "<answer>"], False),
        (["<answer>72</answer>"], False),
        ([r"<answer>\boxed{7}\boxed{2}</answer>"], False),
        ([r"\boxed{72}"], False),
        ([RIGHT, "done"], False),
    ],
)
def test_the_format_is_one_answer_tag_with_one_box(turns, expected):
    assert has_answer_format(trajectory(*turns)) is expected

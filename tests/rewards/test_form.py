import time

import pytest

from strop.rewards.form import CodeFormatPart, FormatPart, TagCountPart, TurnsFormatPart, reasoning_steps


def strict_format(text, **keys):
    return FormatPart(**keys).grade([text])


def turns_format(turns, **keys):
    return TurnsFormatPart(**keys).grade(turns)


def tag_count(text, **keys):
    return TagCountPart(**keys).grade([text])


def code_format(text):
    return CodeFormatPart().grade([text])


RIGHT = "<think>\nfirst this\nthen that\n</think>\n<answer>\n42\n</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, 1),
        (RIGHT + "\n", 1),
        (RIGHT + " so there", 0),
        ("Well. " + RIGHT, 0),
        (RIGHT.replace("\n", ""), 0),  # tags on lines of their own
        (RIGHT.replace("</think>", ""), 0),
        (RIGHT + "\n" + RIGHT, 0),  # passed open-r1's pattern
        ("<answer>\n42\n</answer>\n<think>\nlater\n</think>", 0),
        ("", 0),
    ],
)
def test_the_strict_format_is_one_block_of_thought_and_one_of_answer_and_nothing_else(text, expected):
    assert strict_format(text) == expected


def test_a_prompt_may_hold_the_opening_tag_and_newlines_may_not_matter():
    rest = RIGHT.removeprefix("<think>\n")
    assert (strict_format(rest), strict_format(rest, is_prefilled=True)) == (0, 1)
    assert strict_format("<reason>so</reason><answer>42</answer>", think_tag="reason", newlines=False) == 1


THOUGHT, CALL = "<reason>I compute.</reason>", '<tool_call>{"name": "python"}</tool_call>'
LAST = "<reason>So.</reason><answer>42</answer>"


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([LAST], 1),
        ([THOUGHT + CALL, LAST], 1),
        ([THOUGHT + CALL + CALL, THOUGHT + " " + CALL + "\n", LAST], 1),
        ([THOUGHT + "<python>1</python>", LAST], 1),
        ([CALL, LAST], 0),  # without a thought
        ([THOUGHT, LAST], 0),  # without a call
        ([THOUGHT + CALL + "so", LAST], 0),
        ([THOUGHT + CALL + THOUGHT, LAST], 0),
        ([CALL + THOUGHT, LAST], 0),
        ([THOUGHT + "<tool_call>{}", LAST], 0),
        ([THOUGHT + "<python>1</search>", LAST], 0),
        ([THOUGHT + CALL + "<answer>42</answer>", LAST], 0),
        ([THOUGHT + CALL, "<answer>42</answer>"], 0),
        ([THOUGHT + CALL], 0),  # it never came to an answer
        ([], 0),
    ],
)
def test_with_calls_every_turn_is_a_thought_and_then_calls_and_the_last_a_thought_and_an_answer(turns, expected):
    assert turns_format(turns, think_tag="reason", newlines=False) == expected


def test_a_prompt_may_hold_the_opening_tag_of_each_turn():
    first, last = THOUGHT.removeprefix("<reason>") + CALL, LAST.removeprefix("<reason>")
    assert turns_format([first, last], think_tag="reason", is_prefilled=True, newlines=False) == 1
    assert turns_format([last], think_tag="reason", is_prefilled=True, newlines=False) == 1
    assert turns_format([first, LAST], think_tag="reason", is_prefilled=True, newlines=False) == 0


def test_of_one_turn_it_is_the_strict_format():
    for text in (RIGHT, RIGHT + " so there", RIGHT.replace("\n", "")):
        assert turns_format([text]) == strict_format(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, 1.0),
        ("", 0.0),
        ("<think>so</think> 42", 0.5),
        (RIGHT + "</answer>", 0.75),  # a tag twice is no tag once
        (RIGHT + RIGHT, 0.0),
    ],
)
def test_each_tag_that_occurs_once_is_a_quarter(text, expected):
    assert tag_count(text) == expected
    assert tag_count(text.removeprefix("<think>"), is_prefilled=True) == (expected if text else 0.25)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("```python\nprint(1)\n```", 1),
        ("It is\n```python\nprint(1)\n```\nso.", 1),
        ("```cpp\nint i;\n```", 0),
        ("```python\nprint(1)", 0),
        ("print(1)", 0),
    ],
)
def test_the_code_format_wants_a_fenced_block_of_its_language_in_the_answer(answer, expected):
    assert code_format(f"<think>\nso\n</think>\n<answer>\n{answer}\n</answer>") == expected


def test_code_outside_the_answer_is_no_code_format():
    assert code_format("<think>\n```python\nprint(1)\n```\n</think>\n<answer>\n1\n</answer>") == 0


def test_three_signs_of_a_step_are_enough():
    assert reasoning_steps("First, this.\nStep 2: that.") == pytest.approx(2 / 3)
    assert reasoning_steps("1. one\n2. two\n3. three\n4. four") == 1.0
    assert reasoning_steps("") == 0.0


@pytest.mark.parametrize("newlines", [True, False])
def test_a_long_run_of_blanks_is_judged_at_once(newlines):
    blanks = " \n" * 20_000
    started = time.perf_counter()
    call = "<tool_call>{}</tool_call>"
    assert turns_format([f"<think>{blanks}x</think> y {call}", "z"], newlines=newlines) == 0.0
    assert turns_format([f"<think>{blanks}x</think>{blanks}y{blanks}{call}", "z"], newlines=newlines) == 0.0
    assert strict_format(f"<think>{blanks}x</think>{blanks}y{blanks}<answer>{blanks}</answer>z", newlines=newlines) == 0.0
    assert time.perf_counter() - started < 5  # milliseconds; it was cubic in the number of blanks


def test_calls_of_any_tool_are_calls():
    answer = "<think>so</think><answer>2</answer>"
    assert turns_format(["<think>a</think><calculator>1+1</calculator>", answer], newlines=False) == 1.0
    assert turns_format(['<think>a</think><tool_call>{"q": "<search>"}</tool_call>', answer], newlines=False) == 1.0
    assert turns_format(["<think>a</think><answer>2</answer>", answer], newlines=False) == 0.0
    assert turns_format(["<think>a</think><calculator>1+1</python>", answer], newlines=False) == 0.0

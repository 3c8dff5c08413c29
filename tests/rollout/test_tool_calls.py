import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rollout.tool_calls import FailedCall, JsonCalls, NoCalls, ParsedCall, parse_tool_calls
from strop.types import ToolOutcome

GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def outcomes(text, max_calls=4):
    return [call.outcome if isinstance(call, FailedCall) else "parsed" for call in parse_tool_calls(text, max_calls=max_calls)]


def test_a_call_has_a_name_and_arguments():
    (call,) = parse_tool_calls(f"I add. {GOOD} Done.", max_calls=1)
    assert call == ParsedCall(name="add", arguments={"a": 1}, arguments_text='{"a": 1}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("just words", []),
        ("words </tool_call>", []),  # nothing was opened
        (GOOD + GOOD, ["parsed", "parsed"]),
        ("<tool_call>{bad}</tool_call>", [ToolOutcome.MALFORMED]),
        ("<tool_call></tool_call>", [ToolOutcome.MALFORMED]),
        ("<tool_call>[1]</tool_call>", [ToolOutcome.MALFORMED]),
        ('<tool_call>{"arguments": {}}</tool_call>', [ToolOutcome.MALFORMED]),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', [ToolOutcome.MALFORMED]),
        ('<tool_call>{"name": "add"}</tool_call>', [ToolOutcome.MALFORMED]),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', [ToolOutcome.WRONG_ARGUMENTS]),
        ('<tool_call>{"name": "a", "arguments": {}} {"name": "b", "arguments": {}}</tool_call>', [ToolOutcome.MALFORMED]),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', [ToolOutcome.MALFORMED]),
        ('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', [ToolOutcome.MALFORMED]),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>", [ToolOutcome.MALFORMED]),
        ('<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', [ToolOutcome.MALFORMED]),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "[" * 64 + "]" * 64 + "}}</tool_call>", [ToolOutcome.MALFORMED]),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", [ToolOutcome.MALFORMED]),
        ('<tool_call>{"name": "a", "arguments": {"x": "raw\nnewline"}}</tool_call>', [ToolOutcome.MALFORMED]),
        ("<tool_call>", [ToolOutcome.UNCLOSED]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', [ToolOutcome.UNCLOSED]),
        ("<tool_call>{oops " + GOOD, [ToolOutcome.UNCLOSED, "parsed"]),
        (GOOD + " then <tool_call>{", ["parsed", ToolOutcome.UNCLOSED]),
        ("<tool_call>{bad}</tool_call>" + GOOD, [ToolOutcome.MALFORMED, "parsed"]),
    ],
)
def test_every_block_that_is_opened_gets_an_outcome(text, expected):
    assert outcomes(text) == expected


@pytest.mark.parametrize(
    "code", ["print('</tool_call>')", "print('<tool_call>')", "d = {'a': {'b': '}}'}}", 'print("\\"")', "é\n\t\\"]
)
def test_tags_braces_and_quotes_inside_json_strings_are_text(code):
    block = f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"
    (call,) = parse_tool_calls(block, max_calls=4)
    assert isinstance(call, ParsedCall)
    assert call.arguments == {"code": code}


def test_calls_beyond_the_limit_are_told_so_one_by_one():
    calls = parse_tool_calls(GOOD * 3, max_calls=1)
    assert [getattr(call, "outcome", None) for call in calls] == [None, ToolOutcome.TOO_MANY_CALLS, ToolOutcome.TOO_MANY_CALLS]
    assert calls[2].text == "Error: at most 1 call in one turn. This call was not run; make it in your next turn."


def test_a_failure_says_where_the_json_breaks_and_how_to_write_it():
    (call,) = parse_tool_calls('<tool_call>{"name": add}</tool_call>', max_calls=1)
    assert call.text == (
        "Error: the tool call could not be read: invalid JSON: Expecting value at character 9."
        ' Write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
    )


def test_a_block_is_closed_only_behind_its_opening():
    assert JsonCalls().has_closed_call(GOOD)
    assert not JsonCalls().has_closed_call("</tool_call><tool_call>")


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', *'{}[]":,1\\ '])))
def test_any_text_is_read_without_raising_and_an_opening_tag_is_never_passed_over(pieces):
    text = "".join(pieces)
    assert bool(parse_tool_calls(text, max_calls=100)) == ("<tool_call>" in text)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=8), st.text() | st.integers() | st.lists(st.booleans()), max_size=4))
def test_a_call_that_is_written_is_read_again(arguments):
    try:
        written = JsonCalls().write("add", arguments)
        written.encode()
    except UnicodeEncodeError:
        return  # no text
    (call,) = parse_tool_calls(f"I add. {written} Done.", max_calls=1)
    assert isinstance(call, ParsedCall)
    assert (call.name, call.arguments) == ("add", arguments)


def test_a_prompt_without_tools_has_no_way_to_write_a_call():
    with pytest.raises(ValueError, match="tells the policy of no tools"):
        NoCalls().write("add", {"a": 1})


@pytest.mark.parametrize("unit", ["<tool_call>", '<tool_call>["', "<tool_call></tool_call>"])
def test_ten_times_the_text_takes_at_most_fifteen_times_as_long(unit):
    def seconds(size):
        text = (unit * (size // len(unit) + 1))[:size]
        times = []
        for _ in range(2):
            started_at = time.thread_time()
            parse_tool_calls(text, max_calls=4)
            times.append(time.thread_time() - started_at)
        return min(times)

    assert any(seconds(1_000_000) <= 15 * seconds(100_000) for _ in range(8))  # quadratic: 100 times


def test_a_tag_in_a_string_belongs_to_its_block_and_the_next_block_is_read_all_the_same():
    text = '<tool_call>{"name": "a", "arguments": {"x": "<tool_call>{</tool_call>"}}</tool_call>' + GOOD
    assert [call.name for call in parse_tool_calls(text, max_calls=4)] == ["a", "add"]

import asyncio
import json

import pytest
from test_environment import CHAT, PLENTY, TASK, completion, cut_off, outcomes

from strop.rollout.environment import RolloutLimits, ToolEnvironments
from strop.rollout.prompt import load_prompt
from strop.rollout.tag_calls import TagCalls
from strop.rollout.tool_calls import FailedCall, ParsedCall
from strop.tools.protocol import Tool, ToolResult, ToolSpec
from strop.types import RolloutKey, StopReason, ToolOutcome, Trajectory

TEXT = {"type": "string"}
PYTHON = ToolSpec(
    name="python",
    description="Run code.",
    parameters={"type": "object", "properties": {"code": TEXT, "input": TEXT}, "required": ["code", "input"]},
)
CALLS = TagCalls([PYTHON])


class Python(Tool):
    """Says what it is asked to say; nothing where it is asked for nothing."""

    spec = PYTHON

    async def call(self, arguments, *, seed):
        text = arguments["code"].removeprefix("print ").removeprefix("pass")
        outcome = ToolOutcome.STDOUT if text else ToolOutcome.EMPTY
        return ToolResult(outcome=outcome, text=text, duration_s=0.0)


def step(said, *, num_tokens_left=PLENTY, **limits):
    async def one():
        shared = ToolEnvironments(CHAT, load_prompt("arpo"), [Python()], RolloutLimits(**limits))
        environment = shared(TASK, seed=0)
        await environment.start()
        try:
            return [await environment.step(each, num_tokens_left=num_tokens_left) for each in said]
        finally:
            await environment.close()

    return asyncio.run(one())


def stopped(text):
    """As it is sampled up to a stop string."""
    return completion(text, ending=())


def test_sampling_stops_at_the_tags_of_arpos_tools_and_of_those_that_are_offered():
    assert TagCalls([PYTHON, ToolSpec(name="look", description="", parameters={})]).stop_strings == (
        "</search>",
        "</python>",
        "</look>",
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<think>hm</think> <python>print(1)</python>", "print(1)"),
        ("<python>\nfor x in y:\n    pass\n</python>", "for x in y:\n    pass"),
        ("I could write <python> here. <python>2</python>", "2"),
        ("<python>1</python>\n", "1"),  # the token that ends the tag may hold more
        ("<answer>5</answer><python>1</python>", "1"),
        ('<python>print("<search>")</python>', 'print("<search>")'),
        ('<python>print("<search>who</search>")</python>', 'print("<search>who</search>")'),  # where nothing stops sampling
    ],
)
def test_a_call_is_the_tag_that_the_turn_ends_with(text, code):
    [call] = CALLS.parse(text, max_calls=4)
    assert isinstance(call, ParsedCall)
    assert (call.name, call.arguments) == ("python", {"code": code, "input": ""})


@pytest.mark.parametrize(
    ("text", "outcome", "told"),
    [
        ("<python>print(1)", ToolOutcome.UNCLOSED, "<python> without </python>"),
        ("<python>1</python> and <search>who", ToolOutcome.UNCLOSED, "<search> without </search>"),
        ("print(1)</python>", ToolOutcome.MALFORMED, "</python> without <python>"),
        ("<search>1</python>", ToolOutcome.MALFORMED, "</python> without <python>"),
        ("<python> \n </python>", ToolOutcome.MALFORMED, "nothing between <python> and </python>"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text, outcome, told):
    [call] = CALLS.parse(text, max_calls=4)
    assert isinstance(call, FailedCall)
    assert call.outcome is outcome
    assert told in call.text


@pytest.mark.parametrize(
    ("text", "left_open", "code"),
    [
        ("<search>who is X <python>print(1)</python>", [("search", "who is X ")], "print(1)"),
        ('<search>who <python>print("<search>")</python>', [("search", "who ")], 'print("<search>")'),
        ("<search>a <search>b <python>1</python>", [("search", "b ")], "1"),
        ("<look>a <search>b <python>1</python>", [("look", "a "), ("search", "b ")], "1"),
        ("<look>a <python>b <python>1</python>", [("look", "a ")], "1"),
        ("<search>who <python>print(1)", [("search", "who "), ("python", "print(1)")], None),
    ],
)
def test_a_tag_that_is_left_open_before_a_call_is_told_and_the_call_is_read(text, left_open, code):
    calls = TagCalls([PYTHON, ToolSpec(name="look", description="", parameters={})]).parse(text, max_calls=1)
    failed = [call for call in calls if isinstance(call, FailedCall)]
    assert [(call.name, call.arguments_text) for call in failed] == left_open
    assert {call.outcome for call in failed} == {ToolOutcome.UNCLOSED}
    assert [call.arguments["code"] for call in calls[len(failed) :]] == ([] if code is None else [code])


def test_a_tag_that_is_left_open_is_answered_beside_the_call_behind_it():
    (observation,) = step([stopped("<search>who is X <python>print 5</python>")], max_calls_per_turn=1)
    assert outcomes(observation) == [ToolOutcome.UNCLOSED, ToolOutcome.STDOUT]
    text = CHAT.decode(observation.ids)
    assert text.startswith(" <result>\nError: the call could not be read: <search> without </search>.")
    assert text.endswith("</result>\n <result>\n5\n</result>")


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"properties": {"a": TEXT}, "required": ["a", "unlisted"]}, {"a": "x"}),
        ({"properties": {"a": True, "b": True}, "required": ["b", "a"]}, {"a": "x"}),
        ({"required": ["unlisted"]}, {"unlisted": "x"}),
        ({}, {"text": "x"}),
    ],
)
def test_a_tags_text_is_the_first_argument_of_whatever_schema(parameters, arguments):
    [call] = TagCalls([ToolSpec(name="look", description="", parameters=parameters)]).parse("<look>x</look>", max_calls=1)
    assert call.arguments == arguments


def test_a_result_goes_on_in_the_policys_own_turn():
    (observation,) = step([stopped("<python>print 5</python>")])
    assert CHAT.decode(observation.ids) == " <result>\n5\n</result>"
    assert (observation.stop_reason, outcomes(observation)) == (None, [ToolOutcome.STDOUT])


def test_empty_output_is_said_and_is_no_failure():
    (observation,) = step([stopped("<python>pass</python>")])
    assert CHAT.decode(observation.ids) == " <result>\nTool(python) returned empty output.\n</result>"
    assert outcomes(observation) == [ToolOutcome.EMPTY]
    assert not observation.calls[0].outcome.is_error


def test_a_result_after_the_end_of_a_turn_opens_another():
    (observation,) = step([completion("<python>print(1)")])  # ended without its closing tag
    assert outcomes(observation) == [ToolOutcome.UNCLOSED]
    text = CHAT.decode(observation.ids)
    assert text.startswith("\n<|im_start|>user\n <result>\nError")
    assert text.endswith("<|im_start|>assistant\n")


def test_a_tool_that_is_not_offered_is_unknown():
    (observation,) = step([stopped("<search>who</search>")])
    assert outcomes(observation) == [ToolOutcome.UNKNOWN_TOOL]
    assert "there is no tool 'search'. Tools: python." in observation.text


def test_budgets_hold_for_tags_as_for_json():
    said = [stopped("<python>print 5</python>")] * 2
    assert [each.stop_reason for each in step(said, max_calls=1)] == [None, StopReason.TOOL_BUDGET]
    assert [each.stop_reason for each in step(said, max_turns=2)] == [None, StopReason.TURN_LIMIT]
    (over,) = step(said[:1], num_tokens_left=3)
    assert (over.stop_reason, over.ids) == (StopReason.OVERFLOW, ())
    assert step([completion("<answer>5</answer>")])[0].stop_reason is StopReason.ANSWERED
    assert step([cut_off("<python>print(")])[0].stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("makes", [stopped, completion])
def test_a_rollout_over_its_budget_ends_with_the_end_of_a_turn_that_is_not_trained_on(makes):
    first, second = makes("<python>print 5</python>"), makes("<python>print 6</python>")
    observed = step([first, second], max_calls=1, forced_eos=True)
    assert observed[1].stop_reason is StopReason.TOOL_BUDGET
    assert observed[1].ids == ((CHAT.end_of_turn_id,) if makes is stopped else ())  # else the policy sampled it
    assert step([first], max_calls=0, forced_eos=True, num_tokens_left=0)[0].ids == ()
    assert step([first, completion("<answer>5</answer>")], max_calls=1, forced_eos=True)[1].ids == ()
    turns = tuple(each.as_turn(said) for each, said in zip(observed, (first, second), strict=True))
    key = RolloutKey(task_index=0, attempt=0)
    told = Trajectory(key=key, task_id="t", prompt_ids=(1,), turns=turns, stop_reason=StopReason.TOOL_BUDGET)
    assert told.ids[-1] == CHAT.end_of_turn_id
    assert told.loss_mask[-1] is (makes is completion)
    assert [told.is_answered(at) for at in (0, 1)] == [True, False]


@pytest.mark.parametrize("code", ["print(1)", "for i in range(3):\n    print(i)", "a < b"])
def test_a_call_that_is_written_is_read_again(code):
    (call,) = CALLS.parse("I compute. " + CALLS.write("python", {"code": code, "input": ""}), max_calls=1)
    assert call == ParsedCall(
        name="python", arguments={"code": code, "input": ""}, arguments_text=json.dumps({"code": code, "input": ""})
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("python", {"code": "print(1)", "input": "2"}),  # two texts
        ("python", {"code": "", "input": "2"}),  # not the first argument
        ("python", {"code": " "}),
        ("python", {"code": "print('</python>')"}),  # would end there
        ("python", {"code": 1}),
        ("weather", {"city": "Rome"}),  # nobody reads such a tag
        ("python", {}),
    ],
)
def test_what_a_tag_cannot_hold_is_refused(name, arguments):
    with pytest.raises(ValueError, match=f"a call of '{name}' cannot be written as a tag"):
        CALLS.write(name, arguments)

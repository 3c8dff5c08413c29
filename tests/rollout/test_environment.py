import asyncio
import json
from dataclasses import astuple

import pytest
from toy_tokenizers import byte_tokenizer

from strop.errors import ConfigError, DeadlineExceeded, ToolBroken
from strop.rollout.chat_template import ChatFormat
from strop.rollout.environment import RolloutLimits, ToolEnvironments
from strop.rollout.prompt import load_prompt
from strop.sandbox import ScriptedSandbox
from strop.tools import Python
from strop.tools.protocol import Tool, ToolResult, ToolSpec
from strop.tools.python import PythonTool
from strop.types import Completion, FinishReason, StopReason, Task, ToolOutcome

CHAT = ChatFormat(byte_tokenizer())
TASK = Task(id="t", question="What is 2+3?", answer="5", source="test")
PLENTY = 10_000


class Adder(Tool):
    """Adds; a negative number breaks it, and `wait_s` passes before it answers."""

    spec = ToolSpec(
        name="add",
        description="Add two integers.",
        parameters={
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    )

    longest_call_s = 0.0

    def __init__(self, *, wait_s=0.0, longest_call_s=0.0):
        self.wait_s, self.longest_call_s = wait_s, longest_call_s
        self.seeds = []
        self.num_running = self.most_running = 0

    async def call(self, arguments, *, seed):
        self.seeds.append(seed)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.wait_s)
        finally:
            self.num_running -= 1
        if arguments["a"] < 0:
            raise ToolBroken("add: out of order")
        return ToolResult(outcome=ToolOutcome.STDOUT, text=str(arguments["a"] + arguments["b"]), duration_s=self.wait_s)


def call(a=2, b=3, name="add"):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}</tool_call>"


def completion(text, *, ending=("<|im_end|>",), finish_reason=FinishReason.STOP):
    ids = CHAT.tokenizer.encode(text, add_special_tokens=False) + CHAT.tokenizer.convert_tokens_to_ids(list(ending))
    return Completion(
        ids=tuple(ids),
        logprobs=(0.0,) * len(ids),
        entropies=(),
        is_forced=(False,) * len(ids),
        spans=((0, len(ids)),),
        finish_reason=finish_reason,
        cached_tokens=0,
    )


def cut_off(text):
    return completion(text, ending=(), finish_reason=FinishReason.LENGTH)


def environment(tool=None, record_call=None, seed=0, **limits):
    prompt = load_prompt("plain")
    return ToolEnvironments(CHAT, prompt, [tool or Adder()], RolloutLimits(**limits), record_call)(TASK, seed=seed)


def play(env, *completions, num_tokens_left=PLENTY):
    """The observations that answer `completions`, one after the other."""

    async def steps():
        await env.start()
        try:
            return [await env.step(each, num_tokens_left=num_tokens_left) for each in completions]
        finally:
            await env.close()

    return asyncio.run(steps())


def outcomes(observation):
    return [each.outcome for each in observation.calls]


def test_a_call_is_answered_under_the_user_role_and_the_rollout_goes_on():
    (observation,) = play(environment(), completion("Let me add. " + call()))
    assert CHAT.decode(observation.ids) == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert observation.stop_reason is None
    assert observation.completion_text == "Let me add. " + call()
    assert [(each.name, each.arguments, each.outcome, each.text) for each in observation.calls] == [
        ("add", '{"a": 2, "b": 3}', ToolOutcome.STDOUT, "5")
    ]


def test_a_turn_without_a_call_ends_the_rollout():
    (observation,) = play(environment(), completion("<answer>5</answer>"))
    assert (observation.stop_reason, observation.ids, observation.calls) == (StopReason.ANSWERED, (), ())
    assert observation.completion_text == "<answer>5</answer>"


def test_a_turn_with_a_call_goes_on_even_if_it_holds_an_answer():
    (observation,) = play(environment(), completion("<answer>5</answer>" + call()))
    assert observation.stop_reason is None
    assert outcomes(observation) == [ToolOutcome.STDOUT]


@pytest.mark.parametrize(
    ("text", "outcome", "told"),
    [
        ("<tool_call>{bad}</tool_call>", ToolOutcome.MALFORMED, "invalid JSON"),
        ("<tool_call>{", ToolOutcome.UNCLOSED, "<tool_call> without </tool_call>"),
        (call(name="subtract"), ToolOutcome.UNKNOWN_TOOL, "there is no tool 'subtract'. Tools: add."),
        (call(a="2"), ToolOutcome.WRONG_ARGUMENTS, "add: argument 'a' must be of type integer, not string."),
    ],
)
def test_the_policys_mistakes_are_told_to_it_and_the_rollout_goes_on(text, outcome, told):
    tool = Adder()
    (observation,) = play(environment(tool), completion(text))
    assert observation.stop_reason is None
    assert outcomes(observation) == [outcome]
    assert told in CHAT.decode(observation.ids)
    assert not tool.seeds  # never run


def test_a_completion_cut_off_without_a_closed_call_ends_by_length_even_inside_an_answer():
    for text in ("thinking", "<answer>5</answer>", "<tool_call>{"):
        (observation,) = play(environment(), cut_off(text))
        assert (observation.stop_reason, observation.calls) == (StopReason.LENGTH, ())
        assert observation.completion_text == text


def test_a_call_in_the_last_turn_is_not_run():
    tool = Adder()
    first, second = play(environment(tool, max_turns=2), completion(call()), completion(call()))
    assert first.stop_reason is None
    assert (second.stop_reason, second.ids) == (StopReason.TURN_LIMIT, ())
    assert outcomes(second) == [ToolOutcome.NOT_RUN]
    assert len(tool.seeds) == 1


def test_a_call_beyond_the_tool_budget_ends_the_rollout_and_is_not_run():
    tool = Adder()
    first, second = play(environment(tool, max_calls=1), completion(call()), completion(call()))
    assert first.stop_reason is None
    assert (second.stop_reason, outcomes(second)) == (StopReason.TOOL_BUDGET, [ToolOutcome.NOT_RUN])
    assert len(tool.seeds) == 1


def test_calls_beyond_a_tools_own_limit_are_refused_and_the_rollout_goes_on():
    tool = Adder()
    limited = environment(tool, max_calls_per_tool={"add": 2})
    first, second, third = play(limited, *(completion(each) for each in (call(), call() * 2, call() + call(name="subtract"))))
    assert outcomes(first) == [ToolOutcome.STDOUT]
    assert outcomes(second) == [ToolOutcome.STDOUT, ToolOutcome.REJECTED]
    assert outcomes(third) == [ToolOutcome.REJECTED, ToolOutcome.UNKNOWN_TOOL]
    assert "The maximum add call limit is exceeded. You are not allowed to use add." in second.text
    assert [each.stop_reason for each in (first, second, third)] == [None] * 3
    assert len(tool.seeds) == 2


def test_a_limit_of_a_tool_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match=r"max_calls_per_tool: there is no tool 'subtract'.*: add\."):
        environment(Adder(), max_calls_per_tool={"subtract": 2})


def test_a_branch_has_what_is_left_of_a_tools_own_limit():
    async def branch():
        parent = environment(Adder(), max_calls_per_tool={"add": 2})
        await parent.start()
        await parent.step(completion(call()), num_tokens_left=PLENTY)
        child = await parent.fork(seed=1)
        return [outcomes(await child.step(completion(call()), num_tokens_left=PLENTY)) for _ in range(2)]

    assert asyncio.run(branch()) == [[ToolOutcome.STDOUT], [ToolOutcome.REJECTED]]


def test_of_a_turn_beyond_the_tool_budget_the_calls_that_fit_are_run():
    tool = Adder()
    first, second = play(environment(tool, max_calls=3), completion(call() * 2), completion(call(1, 1) + call(2, 2)))
    assert first.stop_reason is None
    assert (second.stop_reason, second.ids) == (StopReason.TOOL_BUDGET, ())
    assert [(each.outcome, each.text) for each in second.calls] == [(ToolOutcome.STDOUT, "2"), (ToolOutcome.NOT_RUN, "")]
    assert len(tool.seeds) == 3


def test_a_call_that_reaches_no_tool_takes_nothing_of_the_tool_budget():
    tool = Adder()
    wrong = call(name="subtract") + call(a="2") + "<tool_call>{bad}</tool_call>"
    told, run, again, over = play(
        environment(tool, max_calls=1), *(completion(each) for each in (wrong, call(), wrong, wrong + call()))
    )
    mistakes = [ToolOutcome.UNKNOWN_TOOL, ToolOutcome.WRONG_ARGUMENTS, ToolOutcome.MALFORMED]
    assert [each.stop_reason for each in (told, run, again)] == [None] * 3
    assert outcomes(told) == outcomes(again) == mistakes
    assert (over.stop_reason, outcomes(over)) == (StopReason.TOOL_BUDGET, [*mistakes, ToolOutcome.NOT_RUN])
    assert [each.text for each in over.calls] == [""] * 4  # nobody was told
    assert len(tool.seeds) == 1


def test_a_call_within_the_budget_is_not_run_where_no_response_fits_though_others_are_beyond_it():
    tool = Adder()
    (over,) = play(environment(tool, max_calls=1), completion(call() * 2), num_tokens_left=3)
    assert (over.stop_reason, outcomes(over)) == (StopReason.OVERFLOW, [ToolOutcome.NOT_RUN] * 2)
    assert not tool.seeds


def test_an_argument_of_the_python_tool_that_is_left_out_has_its_default_and_is_shown_as_required():
    box = ScriptedSandbox(answer=lambda request: f"{request.code} of {request.stdin!r}")
    tool = PythonTool(box, Python.Config(name="python"))
    ledger = Ledger()
    said = [
        json.dumps({"name": "python", "arguments": each}) for each in ({"code": "1"}, {"input": "2"}, {"code": "1", "input": 2})
    ]
    text = "".join(f"<tool_call>{each}</tool_call>" for each in said)
    (observation,) = play(environment(tool, record_call=ledger.record_call), completion(text))
    assert outcomes(observation) == [ToolOutcome.STDOUT, ToolOutcome.WRONG_ARGUMENTS, ToolOutcome.WRONG_ARGUMENTS]
    assert (observation.calls[0].text, observation.calls[0].arguments) == ("1 of ''", '{"code": "1"}')
    assert "missing required argument 'code'" in observation.calls[1].text
    assert ledger.events[0] == ("opened", 0, 0, 0, "python", {"code": "1", "input": ""})
    assert tool.spec.as_function()["function"]["parameters"]["required"] == ["code", "input"]


def test_calls_beyond_the_turns_limit_are_refused_and_the_others_run():
    (observation,) = play(environment(max_calls_per_turn=1), completion(call(1, 1) + call(2, 2)))
    assert outcomes(observation) == [ToolOutcome.STDOUT, ToolOutcome.TOO_MANY_CALLS]
    assert "at most 1 call in one turn" in CHAT.decode(observation.ids)


def test_an_observation_of_exactly_the_tokens_left_is_given_and_one_more_overflows():
    (fits,) = play(environment(), completion(call()))
    (exactly,) = play(environment(), completion(call()), num_tokens_left=len(fits.ids))
    assert exactly.stop_reason is None
    (over,) = play(environment(), completion(call()), num_tokens_left=len(fits.ids) - 1)
    assert (over.stop_reason, over.ids) == (StopReason.OVERFLOW, ())


def test_a_call_whose_response_turns_out_too_long_is_recorded_as_it_ran():
    tool = Adder()
    (fits,) = play(environment(), completion(call()))
    (over,) = play(environment(tool), completion(call(10**50, 0)), num_tokens_left=len(fits.ids) + 10)
    assert (over.stop_reason, over.ids, outcomes(over)) == (StopReason.OVERFLOW, (), [ToolOutcome.STDOUT])
    assert len(tool.seeds) == 1


def test_a_long_response_is_shortened_in_the_middle():
    (observation,) = play(environment(max_response_tokens=64), completion(call(10**200, 0)))
    assert "characters left out" in observation.text
    assert CHAT.num_tokens(observation.calls[0].text) <= 64


def test_half_a_surrogate_pair_in_a_result_is_written_out():
    class Emoji(Adder):
        async def call(self, arguments, *, seed):
            return ToolResult(outcome=ToolOutcome.STDOUT, text="é \ud83d!", duration_s=0.0)

    ledger = Ledger()
    (observation,) = play(environment(Emoji(), record_call=ledger.record_call), completion(call()))
    assert "é \\ud83d!" in CHAT.decode(observation.ids)
    assert (observation.calls[0].text, ledger.events[-1][-1]) == ("é \\ud83d!", "é \\ud83d!")


def test_calls_of_one_turn_run_at_once_and_are_answered_in_order():
    tool = Adder(wait_s=0.05)
    (observation,) = play(environment(tool), completion(call(1, 1) + call(2, 2) + call(3, 3)))
    assert tool.most_running == 3
    assert [each.text for each in observation.calls] == ["2", "4", "6"]


def test_a_broken_tool_raises_and_ends_the_other_calls():
    tool = Adder(wait_s=0.01)
    with pytest.raises(ToolBroken):
        play(environment(tool), completion(call(-1, 0) + call(2, 2)))
    assert tool.num_running == 0


def test_a_tool_that_keeps_silent_is_our_fault_and_is_named():
    told = r"tool 'add' gave no answer to call 0 of turn 0 of task 't' within 0\.01 s \(0 s by its own limits"
    with pytest.raises(DeadlineExceeded, match=told):
        play(environment(Adder(wait_s=10), deadline_s=0.01), completion(call()))


def test_the_deadline_begins_where_the_tools_own_limits_end():
    tool = Adder(wait_s=0.1, longest_call_s=30.0)
    (observation,) = play(environment(tool, deadline_s=0.01), completion(call()))
    assert outcomes(observation) == [ToolOutcome.STDOUT]
    tool = Adder(wait_s=10, longest_call_s=0.04)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s \(0\.04 s by its own limits and limits\.deadline_s = 0\.01\)"):
        play(environment(tool, deadline_s=0.01), completion(call()))


def test_a_calls_seed_belongs_to_its_rollout_turn_and_place():
    first, again, other = Adder(), Adder(), Adder()
    for tool, seed in ((first, 1), (again, 1), (other, 2)):
        play(environment(tool, seed=seed), completion(call() + call()), completion(call()))
    assert first.seeds == again.seeds
    assert len({*first.seeds, *other.seeds}) == 6


class Ledger:
    """Keeps what it was told, and plays back what it was given."""

    def __init__(self, results=()):
        self.results = dict(results)
        self.events = []

    async def record_call(self, place, call, run):
        if (place.turn, place.index) in self.results:
            return self.results[place.turn, place.index]
        self.events.append(("opened", *astuple(place), call.name, dict(call.arguments)))
        result = await run()
        self.events.append(("closed", *astuple(place), result.text))
        return result


def test_a_recorder_sees_each_call_open_and_close():
    ledger = Ledger()
    env = environment(record_call=ledger.record_call, seed=7)
    play(env, completion("<tool_call>{}</tool_call>" + call()), completion(call(1, 1)))
    assert ledger.events == [
        ("opened", 7, 0, 1, "add", {"a": 2, "b": 3}),
        ("closed", 7, 0, 1, "5"),
        ("opened", 7, 1, 0, "add", {"a": 1, "b": 1}),
        ("closed", 7, 1, 0, "2"),
    ]


def test_a_recorded_outcome_is_given_again_instead_of_running_the_call():
    tool = Adder()
    timed_out = ToolResult(outcome=ToolOutcome.TIMEOUT, text="Timed out.", duration_s=4.0)
    ledger = Ledger({(0, 0): timed_out})
    (observation,) = play(environment(tool, record_call=ledger.record_call), completion(call()))
    assert (outcomes(observation), observation.calls[0].text) == ([ToolOutcome.TIMEOUT], "Timed out.")
    assert not tool.seeds


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two of them are called 'add'"):
        ToolEnvironments(CHAT, load_prompt("plain"), [Adder(), Adder()], RolloutLimits())

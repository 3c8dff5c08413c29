"""Demonstrations as they are played: calls in the prompt's own form, and turns that end where a policy's would."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from toy_tokenizers import byte_tokenizer

from strop.rewards.form import arpo_reward
from strop.rollout.chat_template import ChatFormat
from strop.rollout.demonstrate import demonstrate, in_form_of
from strop.rollout.environment import RolloutLimits, ToolEnvironments
from strop.rollout.prompt import load_prompt
from strop.tasks.demonstrators import ArithmeticDemonstrator, LookupDemonstrator, RecordedDemonstrator
from strop.tasks.readers import Unreadable
from strop.tools import tool
from strop.types import RolloutKey, Task, ToolOutcome

CHAT = ChatFormat(byte_tokenizer())
END = "<|im_end|>"
TASK = Task(
    id="t",
    question="price of (bamiro)+57",
    answer="469",
    source="test",
    facts={"subject": "bamiro", "attribute": "price", "operation": "+57", "expression": "412+57"},
)


@tool
def python(code: str, input: str) -> str:
    """Runs code."""
    return {"print(412+57)": "469\n"}[code]


@tool
def search(query: str) -> str:
    """Searches."""
    return {"price of (bamiro)": "Page 1: The price of (bamiro) is 412."}[query]


def played(demonstrator, prompt, task=TASK, form=str):
    environments = ToolEnvironments(CHAT, load_prompt(prompt), [python, search], RolloutLimits())
    return asyncio.run(
        demonstrate(
            task,
            RolloutKey(task_index=0, attempt=0),
            demonstrator.script(task, tool="python", seed=0),
            environments=environments,
            chat=CHAT,
            calls=environments.format,
            max_tokens=10_000,
            seed=0,
            form=form,
        )
    )


@pytest.mark.parametrize(
    ("prompt", "search_call", "python_call", "result"),
    [
        (
            "plain",
            '<tool_call>{"name": "search", "arguments": {"query": "price of (bamiro)"}}</tool_call>' + END,
            '<tool_call>{"name": "python", "arguments": {"code": "print(412+57)", "input": ""}}</tool_call>' + END,
            "\n<|im_start|>user\n<tool_response>\n469\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "arpo",
            "<search>price of (bamiro)</search>",
            "<python>print(412+57)</python>",
            " <result>\n469\n</result>",
        ),
    ],
)
def test_calls_are_written_as_the_prompt_asks_and_a_turn_ends_where_sampling_stops(prompt, search_call, python_call, result):
    flawless = LookupDemonstrator(guess_fraction=0.0, head_fraction=0.0, error_fraction=0.0)
    trajectory = played(flawless, prompt)
    assert [CHAT.decode(turn.completion.ids) for turn in trajectory.turns] == [
        f"<reason>I look it up.</reason>{search_call}",
        f"<reason>I compute.</reason>{python_call}",
        rf"<reason>The tool says 469.</reason><answer>\boxed{{469}}</answer>{END}",
    ]
    assert [call.outcome for call in trajectory.calls] == [ToolOutcome.STDOUT] * 2
    assert CHAT.decode(trajectory.turns[1].observation_ids) == result


def test_a_call_that_is_wrong_on_purpose_is_wrong_as_a_tag_too():
    flawed = ArithmeticDemonstrator(guess_fraction=0.0, error_fraction=1.0)
    first, mended, last = played(flawed, "arpo").turns
    assert first.calls[0].outcome is ToolOutcome.ERROR
    assert mended.completion_text.endswith("<python>print(412+57)</python>")
    assert last.completion_text.endswith(r"<answer>\boxed{469}</answer>")


def test_a_reply_that_the_prompts_calls_cannot_tell_is_refused():
    said = '<tool_call>{"name": "python", "arguments": {"code": "print(412+57)", "input": ""}}</tool_call> So it is 469.'
    task = replace(TASK, facts={"response": said})
    [turn] = played(RecordedDemonstrator(), "plain", task).turns  # in JSON a turn may go on behind its call
    assert turn.completion_text == said
    with pytest.raises(Unreadable, match="goes on behind its call"):
        played(RecordedDemonstrator(), "arpo", task)


def test_a_demonstration_in_the_form_of_arpos_prompt_earns_its_reward():
    """Thoughts in another tag than the prompt's earned -1 in every rollout."""
    prompt = load_prompt("arpo")
    demonstrator = LookupDemonstrator(guess_fraction=0.0, head_fraction=0.0, error_fraction=0.0)
    trajectory = played(demonstrator, "arpo", form=partial(in_form_of, prompt))
    assert arpo_reward(trajectory, ["469"]) == 1.1
    assert arpo_reward(played(demonstrator, "arpo"), ["469"]) == -1


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("plain", r"<reason>2+2: 2+2=4.</reason><answer>\boxed{4}</answer>"),
        ("arpo", r"<think>2+2: 2+2=4.</think><answer>\boxed{4}</answer>"),
        ("r1_zero", "2+2: 2+2=4.</think> <answer>4</answer>"),  # the prompt ends with <think>
        ("question_only", r"2+2: 2+2=4. \boxed{4}"),
    ],
)
def test_thoughts_and_answer_have_the_form_that_the_prompt_asks_for(prompt, said):
    assert in_form_of(load_prompt(prompt), r"<reason>2+2: 2+2=4.</reason><answer>\boxed{4}</answer>") == said

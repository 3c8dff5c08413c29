# ruff: noqa: E501 - the text of the prompt
"""One conversation of rStar2-Agent's form to the last character, and the same ids in SFT, RL and evaluation."""

import asyncio
from pathlib import Path

import pytest
from toy_tokenizers import byte_tokenizer

from strop.rollout.chat_template import ChatFormat
from strop.rollout.demonstrate import demonstrate
from strop.rollout.environment import RolloutLimits, ToolEnvironments
from strop.rollout.prompt import load_prompt
from strop.rollout.tool_calls import make_call_format
from strop.sandbox import RunOutcome, ScriptedSandbox, scripted_result
from strop.stages.conversations import as_demonstration, as_written_demonstration, encoded_again
from strop.tools.python import PythonTool
from strop.types import Completion, FinishReason, RolloutKey, StopReason, Task, Trajectory

TEMPLATES, PROMPT = Path(__file__).with_name("chat_templates"), load_prompt("rstar2")
TASK = Task(id="t", question="What is 2 + 3?", answer="5", source="test")
TRACEBACK = "Traceback (most recent call last):\n  File \"<code>\", line 1, in <module>\nNameError: name 'x' is not defined\n"
CALL = '<tool_call>\n{"name": "execute_python_code_with_standard_io", "arguments": {"code": "%s", "input": ""}}\n</tool_call>'
SAID = [
    f"I compute.</reason>{CALL % 'x'}",
    f"x is unknown.</reason>{CALL % 'print(2 + 3)'}",
    f"I look again.</reason>{CALL % '2 + 3'}",
    r"It is 5.</reason><answer>\boxed{5}</answer>",
]
RESULTS = {
    "x": scripted_result(TRACEBACK, RunOutcome.ERROR),
    "print(2 + 3)": scripted_result("5\n"),
    "2 + 3": scripted_result("5", RunOutcome.ECHO),
}
GOLDEN = (
    rf"""<|im_start|>system
A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The Assistant first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and answer are enclosed within <reason> </reason> and <answer> </answer> tags, respectively, i.e., <reason> reasoning process here </reason><answer> answer here </answer>.

Tools: You may call one or more functions to assist with the user query. You are provided with function signatures within <tools></tools> XML tags:

<tools>{{"type": "function", "function": {{"name": "execute_python_code_with_standard_io", "description": "Execute Python code with standard input and capture standard output. This function takes a Python code string and an input string, provides the input string through standard input (stdin) to the code, and captures and returns any output produced through standard output (stdout). If the executed code raises an exception, the error message will be captured and returned instead.", "parameters": {{"type": "object", "properties": {{"code": {{"type": "string", "description": "A string containing Python code to be executed. The code can read from standard input using the input() function."}}, "input": {{"type": "string", "description": "A string that will be provided as standard input to the code when it calls input()."}}}}, "required": ["code", "input"], "return": {{"type": "string", "description": "str: The output produced by the executed code through standard output. If an error occurs during execution, the error message will be returned."}}}}}}}}</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call><|im_end|>
<|im_start|>user
You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final answer will be extracted automatically by the \boxed{{}} tag.

This is the problem: What is 2 + 3?<|im_end|>
<|im_start|>assistant
<reason>I compute.</reason>{CALL % "x"}<|im_end|>
<|im_start|>user
<tool_response>
tool call failed
reason: """
    + rf"""
error message: Traceback (most recent call last):
  File "<code>", line 1, in <module>
NameError: name 'x' is not defined
</tool_response><|im_end|>
<|im_start|>assistant
<reason>x is unknown.</reason>{CALL % "print(2 + 3)"}<|im_end|>
<|im_start|>user
<tool_response>
5
</tool_response><|im_end|>
<|im_start|>assistant
<reason>I look again.</reason>{CALL % "2 + 3"}<|im_end|>
<|im_start|>user
<tool_response>
5
</tool_response><|im_end|>
<|im_start|>assistant
<reason>It is 5.</reason><answer>\boxed{{5}}</answer><|im_end|>"""
)


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def chat(request):
    return ChatFormat(byte_tokenizer((TEMPLATES / f"{request.param}.jinja").read_text()))


def environments(chat):
    sandbox = ScriptedSandbox(answer=lambda request: RESULTS[request.code])
    return ToolEnvironments(chat, PROMPT, [PythonTool(sandbox)], RolloutLimits())


async def played(chat):
    """What a policy samples in RL and in evaluation."""
    environment = environments(chat)(TASK, seed=0)
    opening, turns = await environment.start(), []
    for text in SAID:
        ids = chat.completion_ids(text)
        completion = Completion(
            ids=ids,
            logprobs=(0.0,) * len(ids),
            entropies=(),
            is_forced=(False,) * len(ids),
            spans=((0, len(ids)),),
            finish_reason=FinishReason.STOP,
            cached_tokens=0,
        )
        turns.append((await environment.step(completion, num_tokens_left=10_000)).as_turn(completion))
    return Trajectory(
        key=RolloutKey(task_index=0, attempt=0),
        task_id="t",
        prompt_ids=opening.ids,
        turns=tuple(turns),
        stop_reason=StopReason.ANSWERED,
    )


@pytest.fixture(scope="module")
def rollout(chat):
    return asyncio.run(played(chat))


def test_a_rollout_reads_as_the_figures_of_the_paper(chat, rollout):
    assert chat.decode(rollout.ids) == GOLDEN
    trained = [token for token, is_trained in zip(rollout.ids, rollout.loss_mask, strict=True) if is_trained]
    assert chat.decode(trained) == "<|im_end|>".join([*SAID, ""])


def test_demonstrations_that_are_played_have_the_same_ids(chat, rollout):
    made = demonstrate(
        TASK,
        RolloutKey(task_index=0, attempt=0),
        (f"<reason>{text}" for text in SAID),
        environments=environments(chat),
        chat=chat,
        calls=environments(chat).format,
        max_tokens=10_000,
        seed=0,
        prefill=PROMPT.prefill,
    )
    found = as_demonstration(asyncio.run(made))
    assert (found.ids, found.loss_mask) == (list(rollout.ids), list(rollout.loss_mask))


def test_a_rollout_of_another_tokenizer_has_the_same_ids(chat, rollout):
    found = encoded_again(TASK, rollout, "rstar2", chat, [PythonTool(ScriptedSandbox(answer={}))])
    assert (found.ids, found.loss_mask) == (list(rollout.ids), list(rollout.loss_mask))


def test_written_conversations_have_the_same_ids(chat, rollout):
    tool = PythonTool(ScriptedSandbox(answer={}))
    messages = [{"role": each.role, "content": each.text} for each in PROMPT.fill(TASK.question, [tool.spec])]
    for text, turn in zip(SAID, rollout.turns, strict=True):
        messages.append({"role": "assistant", "content": f"<reason>{text}"})
        messages += [{"role": "tool", "content": call.text} for call in turn.calls]
    row = {"id": "t", "source": "test", "messages": messages}
    found = as_written_demonstration(row, chat, make_call_format(PROMPT.calls, [tool.spec]), prefill=PROMPT.prefill)
    assert (found.ids, found.loss_mask) == (list(rollout.ids), list(rollout.loss_mask))


def test_a_file_of_whole_prompts_has_the_ids_of_the_prompt_in_evaluation():
    """Added tokens, as Qwen3 has them for <think>, are one id in a prompt's own text and several in a question."""
    tokenizer = byte_tokenizer((TEMPLATES / "qwen3.jinja").read_text())
    tokenizer.add_tokens(["<think>", "</think>", "<answer>", "</answer>"])
    chat, prompt = ChatFormat(tokenizer), load_prompt("r1_zero")
    whole = prompt.raw.replace("{question}", TASK.question)
    blank_line = whole.replace("\nUser:", "\n\nUser:")
    for text in (whole, f"{whole}\n", f"\n\n {whole} ", whole.strip(), blank_line):
        assert prompt.ids(chat, text, []) == prompt.ids(chat, TASK.question, [])
    assert len(prompt.ids(chat, whole, [])) < len(load_prompt("question_only").ids(chat, whole, []))

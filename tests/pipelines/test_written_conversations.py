"""Conversations that somebody wrote down: what of them is imitated, and that it looks like a rollout."""

import asyncio
import json

import pytest
from transformers import AutoTokenizer

from scripted_runs import RECIPE, lines_of, run_recipe
from strop.config import validate
from strop.errors import TaskError
from strop.recipe.recipe import Recipe, resolve
from strop.rollout.chat_template import ChatFormat
from strop.rollout.environment import RolloutLimits, ToolEnvironments
from strop.rollout.prompt import Prompt, PromptMessage
from strop.rollout.tool_calls import Calls, make_call_format
from strop.run_directory import read_lines
from strop.stages.conversations import as_written_demonstration, turns_of
from strop.stages.model import TinyModel, make_tiny_model
from strop.tasks.conversations import call_text, conversation_of
from strop.tasks.readers import Unreadable
from strop.tools.protocol import Tool, ToolResult, ToolSpec
from strop.types import Completion, FinishReason, Task, ToolOutcome

TEXT = {"type": "string"}
PYTHON = ToolSpec(
    name="python",
    description="Run code.",
    parameters={"type": "object", "properties": {"code": TEXT, "input": TEXT}, "required": ["code", "input"]},
)
CALL = call_text("python", {"code": "print(6*7)", "input": ""})


class Python(Tool):
    spec = PYTHON

    async def call(self, arguments, *, seed):
        return ToolResult(outcome=ToolOutcome.STDOUT, text="42", duration_s=0.0)


def row(*said, roles=None, **facts):
    names = roles or ["user", "assistant", "tool", "assistant"][: len(said)]
    messages = [{"role": role, "content": text} for role, text in zip(names, said, strict=True)]
    return {"id": "r", "source": "test", "messages": messages, **facts}


PLAYED = row("What is 6*7?", f"I compute.\n{CALL}", "42", r"So <answer>\boxed{42}</answer>")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    directory = tmp_path_factory.mktemp("written")
    sizes = TinyModel(vocab_size=320, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_texts=10)
    make_tiny_model(sizes, ["I compute: 6*7 is 42."], directory / "model", seed=0)
    return ChatFormat(AutoTokenizer.from_pretrained(directory / "model"))


def calls_of(kind):
    return make_call_format(Calls(kind), [PYTHON])


def demonstration(chat, kind, given=PLAYED):
    return as_written_demonstration(given, chat, calls_of(kind))


def texts(chat, told, *, is_demonstrator):
    return [chat.decode(each.ids) for each in told.segments if each.is_demonstrator is is_demonstrator]


def test_the_loss_is_on_what_the_assistant_says_and_on_the_end_of_its_turns(chat):
    told = demonstration(chat, "json")
    end = chat.decode([chat.end_of_turn_id])
    assert texts(chat, told, is_demonstrator=True) == [f"I compute.\n{CALL}{end}", r"So <answer>\boxed{42}</answer>" + end]
    seen = "".join(texts(chat, told, is_demonstrator=False))
    assert "What is 6*7?" in seen
    assert "<tool_response>\n42\n</tool_response>" in seen


def test_tags_stop_a_turn_in_its_middle_and_the_result_stands_there(chat):
    told = demonstration(chat, "tags")
    end = chat.decode([chat.end_of_turn_id])
    assert texts(chat, told, is_demonstrator=True) == [
        "I compute.\n<python>print(6*7)</python>",
        r"So <answer>\boxed{42}</answer>" + end,
    ]
    assert texts(chat, told, is_demonstrator=False)[1] == " <result>\n42\n</result>"


@pytest.mark.parametrize("kind", ["json", "tags"])
def test_a_conversation_has_the_ids_of_the_rollout_in_which_the_same_is_said(chat, kind):
    """Everything behind the prompt is what the real environment puts together from the same words (laws 1 and 2)."""
    prompt = Prompt(source="test", messages=(PromptMessage(role="user", content="{question}"),), calls=Calls(kind))
    told = demonstration(chat, kind)
    said = [each for each in told.segments if each.is_demonstrator]

    async def played():
        environments = ToolEnvironments(chat, prompt, [Python()], RolloutLimits())
        environment = environments(Task(id="t", question="What is 6*7?", answer="42", source="test"), seed=0)
        ids, mask = list((await environment.start()).ids), []
        mask += [False] * len(ids)
        for segment in said:
            completion = Completion(
                ids=segment.ids,
                logprobs=(0.0,) * len(segment.ids),
                entropies=(),
                is_forced=(False,) * len(segment.ids),
                spans=((0, len(segment.ids)),),
                finish_reason=FinishReason.STOP,
                cached_tokens=0,
            )
            observation = await environment.step(completion, num_tokens_left=10_000)
            ids += [*segment.ids, *observation.ids]
            mask += [True] * len(segment.ids) + [False] * len(observation.ids)
        await environment.close()
        return ids, mask

    assert (told.ids, told.loss_mask) == asyncio.run(played())


def test_turns_of_a_user_are_read_and_not_imitated(chat):
    given = row("Hello.", "Hi!", "What is 6*7?", "42.", roles=["user", "assistant", "user", "assistant"])
    told = demonstration(chat, "json", given)
    end = chat.decode([chat.end_of_turn_id])
    assert texts(chat, told, is_demonstrator=True) == [f"Hi!{end}", f"42.{end}"]
    assert "What is 6*7?" in texts(chat, told, is_demonstrator=False)[1]
    assert "tool_response" not in texts(chat, told, is_demonstrator=False)[1]
    whole = chat.tokenizer.apply_chat_template(given["messages"], tokenize=False)
    assert chat.decode(told.ids) == whole[: len(chat.decode(told.ids))]


def test_what_others_wrote_cannot_forge_the_end_of_a_turn(chat):
    end = chat.decode([chat.end_of_turn_id])
    given = row(f"What is {end} 6*7?", CALL, f"42{end}", "42.")
    told = demonstration(chat, "json", given)
    plain = demonstration(chat, "json", row("What is 6*7?", CALL, "42", "42."))
    assert told.ids.count(chat.end_of_turn_id) == plain.ids.count(chat.end_of_turn_id)


@pytest.mark.parametrize(
    ("kind", "given", "why"),
    [
        ("json", row("Q", "<tool_call>{bad}</tool_call>", "42", "A"), "a call cannot be read"),
        ("json", row("Q", "No call.", "42", "A"), "a tool answers, but nothing was called"),
        (
            "json",
            row("Q", CALL, "42", "B", "A", roles=["user", "assistant", "tool", "user", "assistant"]),
            "a user speaks between",
        ),
        ("tags", row("Q", f"{CALL}\n{CALL}", "42", "A"), "goes on behind its call"),
        ("tags", row("Q", f"{CALL} Done.", "42", "A"), "goes on behind its call"),
        ("tags", row("Q", "<python>1</python> Done.", "42", "A"), "goes on behind its call"),
        ("tags", row("Q", call_text("weather", {"city": "Rome"}), "42", "A"), "cannot be written as a tag"),
    ],
)
def test_what_cannot_be_told_is_refused_with_its_reason(kind, given, why):
    with pytest.raises(Unreadable, match=why):
        turns_of(conversation_of(given, id="r", source="test"), calls_of(kind))


def test_calls_in_the_tags_of_the_prompt_are_taken_as_they_are():
    given = row("Q", "I look. <search>a</search>", "b", "A")
    [(said, [result]), (last, nothing)] = turns_of(conversation_of(given, id="r", source="test"), calls_of("tags"))
    assert (said, result.content, last, list(nothing)) == ("I look. <search>a</search>", "b", "A", [])


def recipe_of(path, **stages):
    base = RECIPE["stages"]["base"]
    read = {"kind": "conversations", "path": str(path), "prompt": "plain"}
    sft = {"kind": "sft", "init": "base", "prompt": "plain", "data": ["read"], "steps": 2, "batch_size": 2}
    sft |= {"trainer": {"optimizer": {"lr": 1e-2}}}
    tree = RECIPE | {"stages": {"base": base, "read": read | stages.get("read", {}), "sft": sft}}
    return validate(Recipe, resolve(tree), place="test")


def test_a_stage_reads_a_file_and_another_imitates_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    bad = row("Q", "No call.", "42", "A") | {"id": "bad"}
    path.write_text("".join(json.dumps(each) + "\n" for each in (PLAYED, bad, row("Hello.", "Hi!"))))
    done = run_recipe(tmp_path / "run", recipe_of(path))
    stage = done.run.stage("read")
    assert [each["prompt"] for each in read_lines(stage.path / "data" / "kept.jsonl")] == ["plain", "plain"]
    [dropped] = read_lines(stage.path / "data" / "dropped.jsonl")
    assert dropped["id"] == "bad"
    assert "nothing was called" in dropped["reason"]
    lines = lines_of(done.run, "sft")
    assert [each["step"] for each in lines] == [1, 2]
    assert lines[1]["sft/loss"] < lines[0]["sft/loss"]  # both batches hold the same two rows


def test_the_first_rows_alone_may_be_asked_for_and_a_file_without_any_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row("Hello.", f"Hi {number}!")) + "\n" for number in range(5)))
    done = run_recipe(tmp_path / "run", recipe_of(path, read={"limit": 3}))
    assert len(read_lines(done.run.stage("read").path / "data" / "kept.jsonl")) == 3
    path.write_text(json.dumps(row("Q", "No call.", "42", "A")) + "\n")
    with pytest.raises(TaskError, match=r"none of the 1 conversations can be imitated\. r: a tool answers"):
        run_recipe(tmp_path / "other", recipe_of(path))
    path.write_text("")
    with pytest.raises(TaskError, match=r"stages\.read\.path: .*rows\.jsonl: it has no rows\. Name another file"):
        run_recipe(tmp_path / "third", recipe_of(path))


@pytest.mark.parametrize(("prompt", "tag", "asked"), [("arpo", "reason", "think"), ("rstar2", "think", "reason")])
@pytest.mark.parametrize("kind", ["recorded", "conversations"])
def test_thoughts_in_another_tag_than_that_of_the_prompt_are_warned_of_once(tmp_path, kind, prompt, tag, asked):
    path = tmp_path / "rows.jsonl"
    replies = [f"<{tag}>Say {number}.</{tag}><answer>{number}</answer>" for number in range(4)]
    if kind == "recorded":
        lines = [{"question": "Q", "answer": "1", "response": said} for said in replies]
        tasks = {"kind": "jsonl", "path": str(path), "facts": ["response"]}
        sft = RECIPE["stages"]["sft"] | {"tasks": tasks, "prompt": prompt, "demonstrator": {"kind": "recorded"}}
        stages = {"base": RECIPE["stages"]["base"], "sft": sft | {"num_demonstrations": 4, "batch_size": 2, "steps": 1}}
        recipe = validate(Recipe, resolve(RECIPE | {"stages": stages}), place="test")
    else:
        lines = [row("Q", said) for said in replies]
        recipe = recipe_of(path, read={"prompt": prompt})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [warning] = [text for text in run_recipe(tmp_path / "run", recipe).progress.warnings if "thoughts" in text]
    assert warning.startswith(f"demonstrations have thoughts in <{tag}>, but prompt {prompt!r} asks for <{asked}>")
    assert warning.endswith(f"Rename the tags in the file, or set a prompt that asks for <{tag}>.")


@pytest.mark.parametrize("prompt", ["arpo", "r1_zero", "plain"])
def test_thoughts_as_the_prompt_asks_for_them_are_not_warned_of(tmp_path, prompt):
    path = tmp_path / "rows.jsonl"
    path.write_text(4 * (json.dumps(row("Q", "<think>So.</think><answer>1</answer>")) + "\n"))
    warnings = run_recipe(tmp_path / "run", recipe_of(path, read={"prompt": prompt})).progress.warnings
    assert not [text for text in warnings if "thoughts" in text]

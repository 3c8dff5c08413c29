import json

import pytest
from toy_tokenizers import byte_tokenizer

from strop.errors import ConfigError
from strop.rollout.chat import ChatFormat
from strop.rollout.prompt import load_prompt, prompt_names
from strop.tools.protocol import ToolSpec

TOOL = ToolSpec(name="add", description="Add.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.mark.parametrize("name", prompt_names())
def test_every_shipped_prompt_has_a_source_and_asks_the_question(name):
    prompt = load_prompt(name)
    assert prompt.source
    assert sum("What is 1+1?" in one.text for one in prompt.fill("What is 1+1?", [TOOL])) == 1


def test_the_rstar2_prompt_is_figure_3():
    prompt = load_prompt("rstar2")
    system, user = prompt.fill("What is {tools}?", [TOOL, TOOL])
    assert system.text.startswith("A conversation between User and Assistant. The user asks a question,")
    signature = json.dumps(TOOL.as_function())
    assert f"<tools>{signature}\n{signature}</tools>" in system.text
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in system.text
    assert user.text.endswith(r"extracted automatically by the \boxed{} tag." + "\n\nThis is the problem: What is {tools}?")
    assert prompt.prefill == "<reason>"


def test_the_question_counts_as_text_that_is_not_ours():
    chat = ChatFormat(byte_tokenizer())
    end = chat.end_of_turn_id
    filled = load_prompt("plain").fill("<|im_end|>", [])
    assert chat.prompt_ids(filled).count(end) == 1  # the template's own, behind the user's message


def test_a_prompt_that_does_not_exist_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'rstar': no such prompt\. Did you mean 'rstar2'\?"):
        load_prompt("rstar")


def test_ones_own_prompt_is_loaded_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('source = "me"\nmessages = [{role = "user", content = "{question} Braces {} stay."}]\n')
    (only,) = load_prompt(str(path)).fill("Why?", [])
    assert only.text == "Why? Braces {} stay."


def test_a_prompt_without_a_place_for_the_question_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('source = "me"\nmessages = [{role = "user", content = "hello"}]\n')
    with pytest.raises(ConfigError, match=r"hold \{question\} 0 times"):
        load_prompt(str(path))

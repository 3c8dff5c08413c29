import hashlib
import json
from importlib.resources import files
from pathlib import Path

import pytest
from toy_tokenizers import byte_tokenizer

from strop import cs336
from strop.errors import ConfigError
from strop.rollout.chat_template import ChatFormat
from strop.rollout.prompt import load_prompt, prompt_names
from strop.tools.protocol import ToolSpec

TOOL = ToolSpec(name="add", description="Add.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


DIGESTS = {
    "alpaca_sft": "fbd4a4672e92a2ec",
    "arpo": "a6cef192c934e396",
    "deepseek_r1_zero": "7f05515be7a6ad52",
    "question_only": "bf085a6e12c9d0e2",
    "qwen_math": "72f4dc917e752d41",
    "r1_zero": "56213732da87e12a",
    "rstar2": "3279b37361472295",
    "rstar2_released": "9251bd7b33c7292f",
    "zero_shot_system_prompt": "1b4854e31925e282",
}


def digest_of(name):
    """Of every character that a policy may read of the prompt, whichever of the two files holds it."""
    path = Path(str(files("strop.rollout") / "prompts"))
    text = path / f"{name}.prompt"
    if text.exists():
        said = text.read_text(encoding="utf-8")
    else:
        prompt = load_prompt(name)
        said = json.dumps([[[one.role, one.content] for one in prompt.messages], prompt.prefill])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", DIGESTS)
def test_a_prompt_that_is_carried_over_is_unchanged_to_the_last_character(name):
    assert digest_of(name) == DIGESTS[name]


def test_every_prompt_that_is_carried_over_is_pinned():
    own = {"plain", "short"}
    shipped = {
        path.stem for path in Path(str(files("strop.rollout") / "prompts")).iterdir() if path.suffix in (".toml", ".prompt")
    }
    assert shipped - own == set(DIGESTS)


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


def test_the_released_rstar2_prompt_words_results_of_calls():
    prompt = load_prompt("rstar2_released")
    assert prompt.describe_success("5") == "Tool call success\nstdout: 5"
    assert prompt.describe_success("") == "Tool call success"
    said = prompt.describe_failure("timeout", "late")
    assert said == "Tool call failure\nreason: timeout\nstderr: late"
    assert load_prompt("rstar2").describe_success("5") == "5"


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


def test_the_prompt_of_deepseek_r1_zero_ends_where_table_1_ends():
    """Nothing is prefilled, and the words are the paper's; the assignment's have other capitals and end with <think>."""
    chat, prompt = ChatFormat(byte_tokenizer()), load_prompt("deepseek_r1_zero")
    text = chat.decode(prompt.ids(chat, "What is 1+1?", []))
    assert text.startswith("A conversation between User and Assistant. The user asks a question, and the Assistant solves it.")
    assert text.endswith("<answer> answer here </answer>. User: What is 1+1?. Assistant:")


def test_the_r1_zero_prompt_is_a_raw_text_that_the_policy_continues_in_its_thoughts():
    chat, prompt = ChatFormat(byte_tokenizer()), load_prompt("r1_zero")
    text = chat.decode(prompt.ids(chat, "What is 1+1?", [TOOL]))
    assert text.startswith("A conversation between User and Assistant. The User asks a question, and the Assistant solves it.")
    assert text.endswith("answer here </answer>.\nUser: What is 1+1?\nAssistant: <think>")
    assert "<|im_start|>" not in text
    assert (prompt.stop, prompt.calls) == (("</answer>",), "none")
    question_only = load_prompt("question_only")
    assert chat.decode(question_only.ids(chat, "What is 1+1?", [])) == "What is 1+1?"


def test_the_arpo_prompt_calls_by_tags_under_the_models_own_template():
    chat, prompt = ChatFormat(byte_tokenizer()), load_prompt("arpo")
    text = chat.decode(prompt.ids(chat, "Who?", [TOOL]))
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant that can solve the given question step by step")
    assert r"<answer> The final answer is \[ \boxed{answer here} \] </answer>." in text
    assert text.endswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.calls == "tags"


def test_a_prompt_with_messages_and_a_raw_text_is_refused_and_so_is_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('source = "me"\nraw = "{question}"\nmessages = [{role = "user", content = "{question}"}]\n')
    with pytest.raises(ConfigError, match="either messages, or the raw text"):
        load_prompt(str(path))
    path.write_text('source = "me"\nfile = "gone.prompt"\n')
    with pytest.raises(ConfigError, match=r"its file .*gone\.prompt cannot be read"):
        load_prompt(str(path))


def test_the_alpaca_prompt_is_the_hand_outs_up_to_the_response():
    [message] = load_prompt("alpaca_sft").fill("Add 1 and 1.", [])
    assert message.text + "2" == cs336.load_prompt("alpaca_sft").removesuffix("\n").format(
        instruction="Add 1 and 1.", response="2"
    )

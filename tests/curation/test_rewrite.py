"""Rewriting by a model that a server on this machine stands for."""

import asyncio
import json

import pytest
from pydantic import ValidationError

from rewards.scorers.chat_service import Answer, said, serving
from strop.curation.rewrite import RewriteConfig, rewrite_file
from strop.errors import TaskError, UserError
from strop.run_directory import read_lines


def config(service, **keys):
    told = {"service": {"url": service.url, "model": "writer", "retries": 1, "max_running": 4}} | keys
    return RewriteConfig.model_validate_json(json.dumps(told))


def conversations(path, *responses):
    rows = [
        {
            "id": str(number),
            "messages": [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": response}],
            "trajectory": {"ids": [1, 2]},
            "tokenizer": "c0ffee",
        }
        for number, response in enumerate(responses)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shown(asked):
    text = asked.body["messages"][0]["content"]
    return text[text.index("<response>\n") + 11 : text.index("\n</response>")]


def politely(asked, _):
    return said(f"I think: {shown(asked)}")


def test_the_last_message_is_rewritten_in_order_and_its_old_ids_go(tmp_path):
    source = conversations(tmp_path / "rows.jsonl", *(f"it is \\boxed{{{number}}}" for number in range(20)))
    with serving(politely) as service:
        made = asyncio.run(rewrite_file(config(service), source, tmp_path / "out.jsonl"))
    rows = read_lines(tmp_path / "out.jsonl")
    assert [row["messages"][-1]["content"] for row in rows] == [f"I think: it is \\boxed{{{n}}}" for n in range(20)]
    assert rows[3] == {
        "id": "3",
        "messages": [
            {"role": "user", "content": "question 3"},
            {"role": "assistant", "content": "I think: it is \\boxed{3}"},
        ],
        "rewritten_by": "writer",
        "rewritten_from": "it is \\boxed{3}",
    }
    assert any("question 3" in asked.body["messages"][0]["content"] for asked in service.asked)
    assert service.most_at_once <= 4
    assert (made.num_rewritten, made.failures) == (20, {})


def test_the_users_turns_are_rewritten_one_by_one_and_the_answers_stay(tmp_path):
    source = tmp_path / "rows.jsonl"
    said_before = ["Hi, add 1 and 2.", "3", "Now \\boxed{4}?", "No."]
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, said_before, strict=True)]
    source.write_text(json.dumps({"id": "a", "messages": messages}) + "\n")

    def answer(asked, _):
        text = asked.body["messages"][0]["content"]
        return said("Please: " + text[text.index("<request>\n") + 10 : text.index("\n</request>")])

    with serving(answer) as service:
        made = asyncio.run(rewrite_file(config(service, turns="user"), source, tmp_path / "out.jsonl"))
    [row] = read_lines(tmp_path / "out.jsonl")
    assert [each["content"] for each in row["messages"]] == ["Please: Hi, add 1 and 2.", "3", "Please: Now \\boxed{4}?", "No."]
    assert row["rewritten_from"] == [said_before[0], said_before[2]]
    assert made.num_rewritten == 1


def test_a_conversation_of_which_one_turn_fails_is_not_rewritten_in_part(tmp_path):
    source = tmp_path / "rows.jsonl"
    good = [{"role": "user", "content": "fine"}, {"role": "assistant", "content": "yes"}]
    bad = [*good, {"role": "user", "content": "not fine"}]
    source.write_text("".join(json.dumps({"messages": each}) + "\n" for each in (good, bad)))
    with serving(lambda asked, _: said("" if "not fine" in asked.body["messages"][0]["content"] else "OK")) as service:
        made = asyncio.run(rewrite_file(config(service, turns="user"), source, tmp_path / "out.jsonl"))
    assert [row["messages"][0]["content"] for row in read_lines(tmp_path / "out.jsonl")] == ["OK"]
    assert (made.num_rewritten, made.failures) == (1, {"empty": 1})


def test_turns_and_a_column_exclude_each_other():
    told = {"service": {"url": "http://a", "model": "m"}, "turns": "user", "column": "text"}
    with pytest.raises(ValidationError, match="which has no turns"):
        RewriteConfig.model_validate_json(json.dumps(told))


def test_what_cannot_be_rewritten_is_counted_shown_and_written_with_its_reason(tmp_path):
    def answer(asked, _):
        replies = {
            "cut": said("so far", finish_reason="length"),
            "silent": said("  "),
            "long": Answer(body={"error": "maximum context length"}, status=400),
            "is \\boxed{4}": said("is \\boxed{5}"),
        }
        return replies.get(shown(asked)) or politely(asked, _)

    source = conversations(tmp_path / "rows.jsonl", "fine", "cut", "silent", "long", "is \\boxed{4}", "fine too")
    out = tmp_path / "out.jsonl"
    with serving(answer) as service:
        made = asyncio.run(rewrite_file(config(service), source, out))
    assert [row["id"] for row in read_lines(out)] == ["0", "5"]
    failed = read_lines(made.failed_path)
    assert [(each["row"]["id"], each["reason"].partition(":")[0]) for each in failed] == [
        ("1", "cut off"),
        ("2", "empty"),
        ("3", "refused"),
        ("4", "answer changed"),
    ]
    assert failed[0]["place"].endswith("rows.jsonl:2")
    assert "from '4' to '5'" in failed[3]["reason"]
    assert "2 rewritten, 4 not (1 cut off, 1 empty, 1 refused, 1 answer changed)" in made.summary
    tried = [shown(asked) for asked in service.asked]
    assert (tried.count("cut"), tried.count("long")) == (2, 1)  # another draw may help the first, and not the second


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("so \\boxed{7}", "<think>a draft: \\boxed{9}</think> Clean: \\boxed{7}", "thoughts that the original does not have"),
        (
            "so \\boxed{7}",
            "a draft</think> Clean: \\boxed{7}",
            "thoughts that the original does not have",
        ),  # opened by the template
        ("<think>7</think> so \\boxed{7}", "\\boxed{7}", "thoughts of the original are gone"),
        ("<think>7</think> so \\boxed{7}", "<think>it is 7</think> \\boxed{7}", ""),
    ],
)
def test_what_the_rewriter_thinks_is_no_part_of_a_rewrite(before, after, reason, tmp_path):
    source = conversations(tmp_path / "rows.jsonl", before, "fine")
    with serving(lambda asked, at: said(after) if shown(asked) == before else politely(asked, at)) as service:
        made = asyncio.run(rewrite_file(config(service), source, tmp_path / "out.jsonl"))
    assert list(made.failures) == ([reason] if reason else [])
    assert all("1 </think>" in row["reason"] for row in read_lines(made.failed_path))


def test_a_call_that_was_cut_short_asks_only_for_the_rest(tmp_path):
    source = conversations(tmp_path / "rows.jsonl", *map(str, range(12)))
    out = tmp_path / "out.jsonl"

    def fails_at_the_seventh(asked, _):
        return Answer(body={"error": "bad key"}, status=401) if int(shown(asked)) >= 7 else politely(asked, _)

    with serving(fails_at_the_seventh) as service, pytest.raises(UserError, match="answered 401"):
        asyncio.run(rewrite_file(config(service), source, out))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["rows.jsonl"]  # nothing half done
    with serving(politely) as service:
        asyncio.run(rewrite_file(config(service), source, out))
    assert {shown(asked) for asked in service.asked} >= {str(number) for number in range(7, 12)}
    assert not {shown(asked) for asked in service.asked} & {"0", "1", "2"}
    assert len(read_lines(out)) == 12


def test_a_row_to_which_the_model_said_nothing_is_asked_for_again_by_the_next_call(tmp_path):
    source = conversations(tmp_path / "rows.jsonl", "fine", "silent")
    is_mended = False

    def answer(asked, at):
        return politely(asked, at) if is_mended or shown(asked) == "fine" else said("")

    with serving(answer) as service:
        first = asyncio.run(rewrite_file(config(service), source, tmp_path / "out.jsonl"))
        is_mended = True
        second = asyncio.run(rewrite_file(config(service), source, tmp_path / "out.jsonl"))
    assert (first.failures, second.failures) == ({"empty": 1}, {})
    assert [shown(asked) for asked in service.asked].count("fine") == 1


def test_a_column_of_plain_rows_is_rewritten_with_its_question(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"question": "2+2?", "response": "four", "answer": "4"}) + "\n")
    with serving(politely) as service:
        asyncio.run(rewrite_file(config(service, column="response"), source, tmp_path / "out.jsonl"))
    [row] = read_lines(tmp_path / "out.jsonl")
    assert (row["response"], row["answer"], row["rewritten_from"]) == ("I think: four", "4", "four")
    assert "2+2?" in service.asked[0].body["messages"][0]["content"]


def test_a_reply_goes_into_another_column_and_the_request_has_further_keys(tmp_path):
    source = tmp_path / "rows.jsonl"
    row = {"question": "2+2?", "answer": "4", "facts": {"solution": "two and two"}}
    source.write_text(json.dumps(row) + "\n")
    with serving(lambda *_: said("<think>add</think> \\boxed{4}")) as service:  # the prompt may ask for thoughts
        keys = config(service, column="facts.solution", into="response").model_dump()
        keys["service"]["extra"] = {"structured_outputs": {"choice": ["safe", "unsafe"]}}
        asyncio.run(rewrite_file(RewriteConfig.model_validate(keys), source, tmp_path / "out.jsonl"))
    assert read_lines(tmp_path / "out.jsonl") == [row | {"response": "<think>add</think> \\boxed{4}", "rewritten_by": "writer"}]
    [asked] = service.asked
    assert (asked.body["structured_outputs"], asked.body["model"]) == ({"choice": ["safe", "unsafe"]}, "writer")
    with pytest.raises(ValidationError, match="into is 'response', but column is not set"):
        config(service, into="response")


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"question": "?"}, {}, r"rows.jsonl:1: no messages that end with an assistant's"),
        ({"messages": [{"role": "user", "content": "?"}]}, {}, "no messages that end with an assistant's"),
        ({"question": "?"}, {"column": "response"}, "rows.jsonl:1: no column 'response'. It has 'question'"),
        ({"facts": {"solution": None}}, {"column": "facts.solution"}, "rows.jsonl:1: its 'facts.solution' is empty"),
    ],
)
def test_a_row_without_a_response_is_named(row, keys, message, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row) + "\n")
    with serving(politely) as service, pytest.raises(TaskError, match=message):
        asyncio.run(rewrite_file(config(service, **keys), source, tmp_path / "out.jsonl"))
    assert not service.asked


def test_a_service_that_refuses_everything_leaves_no_file(tmp_path):
    source = conversations(tmp_path / "rows.jsonl", *map(str, range(8)))
    refused = Answer(body={"error": "no key called seed"}, status=400)
    with serving(lambda *_: refused) as service, pytest.raises(UserError, match=r"no key called seed"):
        asyncio.run(rewrite_file(config(service), source, tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()


def test_where_nothing_could_be_rewritten_there_is_one_message(tmp_path):
    source = conversations(tmp_path / "rows.jsonl", "a", "b")
    with (
        serving(lambda *_: said("")) as service,
        pytest.raises(TaskError, match=r"no row could be rewritten.*rows.jsonl:1: empty"),
    ):
        asyncio.run(rewrite_file(config(service), source, tmp_path / "out.jsonl"))


@pytest.mark.parametrize(
    ("prompt", "words"), [("Do it", r"has no \$response"), ("$response $text", r"\$text is not a variable")]
)
def test_a_prompt_that_shows_nothing_to_rewrite_is_refused(prompt, words):
    with pytest.raises(ValidationError, match=words):
        RewriteConfig.model_validate_json(json.dumps({"service": {"url": "http://x", "model": "m"}, "prompt": prompt}))

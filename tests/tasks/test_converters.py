"""Each converter, on rows written here in the published schema, and on the real Glaive sample where it is at hand."""

import json
import os
from pathlib import Path

import pytest

from strop.errors import TaskError
from strop.rollout.tool_calls import ParsedCall, parse_tool_calls
from strop.tasks.conversations import Message, convert_file, read_conversations
from strop.tasks.converters import CONVERTERS, converter_of, parse_bracket_calls
from strop.tasks.readers import Unreadable

DATA = Path(os.environ.get("STROP_DATA", Path(__file__).parents[2].parent / "shared" / "data"))

WEATHER = {
    "name": "Get Weather",
    "description": "Tells the weather.",
    "parameters": {"type": "dict", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "required": None,
}
TOOLACE = {
    "system": f"You compose functions. Here is a list of functions in JSON:\n{json.dumps([WEATHER])}. Format: [f(a=1)]",
    "conversations": [
        {"from": "user", "value": "Is it raining in Rome?"},
        {"from": "assistant", "value": '[Get Weather(city="Rome, Italy")]'},
        {"from": "tool", "value": '[{"name": "Get Weather", "results": {"rain": false}}]'},
        {"from": "assistant", "value": "No."},
    ],
}
APIGEN = {
    "system": "# Airline policy",
    "tools": json.dumps([{"name": "book", "description": "d", "parameters": {"type": "object", "properties": {}}}]),
    "conversations": [
        {"from": "human", "value": "Book it."},
        {"from": "function_call", "value": '{"name": "book", "arguments": {"seat": "1A"}}'},
        {"from": "observation", "value": '{"ok": true}'},
        {"from": "gpt", "value": "Done."},
    ],
}
GLAIVE = {
    "system": 'SYSTEM: You are helpful. Use them if required -\n{"name": "rate", "description": "d", "parameters": {}}',
    "chat": (
        "USER: What is a dollar in euros?\n\n\nASSISTANT: <functioncall> "
        '{"name": "rate", "arguments": \'{"from": "USD", "note": "it\\\'s"}\'} <|endoftext|>\n\n\n'
        'FUNCTION RESPONSE: {"rate": 0.9}\n\n\nASSISTANT: About 0.9. <|endoftext|>'
    ),
}
MAGICODER = {
    "lang": "python",
    "problem": "Print six times seven.",
    "solution": "I multiply.\n```python\nprint(6 * 7)\n```\nDone.",
}
TULU = {
    "id": "x",
    "prompt": "Write two words.",
    "messages": [{"role": "user", "content": "Write two words."}, {"role": "assistant", "content": "two words"}],
    "constraints": ["length"],
}
NEMOTRON = {
    "input": [{"role": "user", "content": "Hello"}],
    "output": "Hello!",
    "reasoning": "off",
    "system_prompt": "detailed thinking off",
    "category": "chat",
}

TOOL_STAR = {
    "instruction": "You are a helpful assistant that can solve the given question step by step.",
    "input": "How tall is the tower, doubled?",
    "output": (
        "<think>I look.</think><search>height of the tower</search><result>\n330 m\n</result>"
        "<think>Double it.</think>\n<python>\nprint(330 * 2)\n</python><result>\n660\n</result>"
        "<think>So it is.</think><answer>\\boxed{660}</answer>"
    ),
}

# data set, row, roles, the call that the first assistant makes
CASES = [
    ("toolace", TOOLACE, "system user assistant tool assistant", ("Get Weather", {"city": "Rome, Italy"})),
    ("apigen-mt", APIGEN, "system user assistant tool assistant", ("book", {"seat": "1A"})),
    ("glaive", GLAIVE, "system user assistant tool assistant", ("rate", {"from": "USD", "note": "it's"})),
    ("glaive-sharegpt", {**APIGEN, "system": ""}, "system user assistant tool assistant", ("book", {"seat": "1A"})),
    (
        "magicoder",
        MAGICODER,
        "system user assistant",
        ("execute_python_code_with_standard_io", {"code": "print(6 * 7)", "input": ""}),
    ),
    ("tulu3-if", TULU, "user assistant", None),
    ("llama-nemotron-chat", NEMOTRON, "system user assistant", None),
    (
        "tool-star",
        TOOL_STAR,
        "system user assistant tool assistant tool assistant",
        ("search", {"query": "height of the tower"}),
    ),
]


def convert(dataset, row):
    return converter_of(dataset)(row, id="row", source="test")


def with_turn(row, place, value):
    """`row` of turns, in which another `value` is said at `place`."""
    turns = list(row["conversations"])
    turns[place] = {**turns[place], "value": value}
    return {**row, "conversations": turns}


def solved_by(*pieces):
    return {**MAGICODER, "solution": "\n".join(pieces)}


EXAMPLE, SOLUTION = "```python\nx = 1\n```", "```python\nprint(6 * 7)\n```"


def test_every_converter_has_a_row_here():
    assert [name for name, *_ in CASES] == list(CONVERTERS)


@pytest.mark.parametrize(("dataset", "row", "roles", "call"), CASES, ids=[name for name, *_ in CASES])
def test_a_row_of_the_published_schema_becomes_a_conversation_whose_calls_the_rollouts_parser_reads(dataset, row, roles, call):
    messages = convert(dataset, row).messages
    assert " ".join(message.role for message in messages) == roles
    said = next(message.content for message in messages if message.role == "assistant")
    calls = parse_tool_calls(said, max_calls=8)
    assert all(isinstance(each, ParsedCall) for each in calls)
    assert [(each.name, dict(each.arguments)) for each in calls] == ([call] if call else [])


def test_the_tools_stand_in_the_system_message_and_the_other_format_does_not():
    system = convert("toolace", TOOLACE).messages[0].content
    assert '"name": "Get Weather"' in system
    assert '"type": "object"' in system
    assert "[f(a=1)]" not in system


@pytest.mark.parametrize(
    "before",
    ["```bash\npip install six\n```\nThen", "```\n$ python six.py\n```", "Say `six`:"],
    ids=["another language", "a block that does not parse", "no block"],
)
def test_the_one_block_of_python_is_the_code_whatever_stands_around_it(before):
    for language in ("python", "Python", "python3", "py", ""):
        said = convert("magicoder", solved_by(before, f"```{language}\nprint(6 * 7)\n```", "Done.")).messages[-1].content
        (call,) = parse_tool_calls(said, max_calls=8)
        assert call.arguments == {"code": "print(6 * 7)", "input": ""}
        assert said.startswith(f"{before}\n<tool_call>")


@pytest.mark.parametrize(
    "code", ['print("input(")  # sys.stdin', "p.stdin.write(x)", "self.input()", "open(1)", "from sys import argv"]
)
def test_code_that_only_looks_like_reading_is_a_call(code):
    assert convert("magicoder", solved_by(f"```python\n{code}\n```")).messages[-1].content.startswith("<tool_call>")


def test_a_tool_that_is_wrapped_as_a_function_is_offered_as_one_that_is_not():
    wrapped = json.dumps([{"type": "function", "function": tool} for tool in json.loads(APIGEN["tools"])])
    assert convert("apigen-mt", {**APIGEN, "tools": wrapped}).messages == convert("apigen-mt", APIGEN).messages


def test_brackets_that_hold_no_call_stay():
    said = "It rains [see the map] in [Rome](https://rome.example), where f(a=1) is 2; x[0] == 1."
    assert convert("toolace", with_turn(TOOLACE, 3, said)).messages[-1].content == said


def test_results_within_a_text_of_tool_star_become_messages_of_their_own():
    messages = convert("tool-star", TOOL_STAR).messages
    assert [each.content for each in messages if each.role == "tool"] == ["330 m", "660"]
    assert not any("<result>" in each.content or "<python>" in each.content for each in messages)
    assert messages[4].content.startswith("<think>Double it.</think>\n<tool_call>")
    assert json.dumps("\nprint(330 * 2)\n") in messages[4].content  # to the letter, its line breaks too
    assert messages[-1].content == "<think>So it is.</think><answer>\\boxed{660}</answer>"


@pytest.mark.parametrize(
    "output",
    [
        "I know. <result>1</result> So 1.",
        "<search>a</search><result>1</result>",
        "<search>a</search><result>1</result> Then <python>print(1)</python>",
        "<search>a</search> or <search>b</search><result>1</result> So 1.",
    ],
)
def test_a_text_of_tool_star_that_was_not_played_to_its_end_is_refused(output):
    with pytest.raises(Unreadable):
        convert("tool-star", {**TOOL_STAR, "output": output})


def test_a_tool_may_answer_nothing():
    assert convert("apigen-mt", with_turn(APIGEN, 2, "")).messages[3] == Message(role="tool", content="")
    with pytest.raises(Unreadable, match="an empty message"):
        convert("apigen-mt", with_turn(APIGEN, 0, ""))


@pytest.mark.parametrize(
    ("dataset", "row", "message"),
    [
        ("magicoder", {**MAGICODER, "lang": "rust"}, "in rust, which the Python tool cannot run"),
        ("magicoder", {**MAGICODER, "solution": "```python\nprint(\n```"}, "no block of Python that parses"),
        ("magicoder", solved_by("First an example:", EXAMPLE, "The solution:", SOLUTION), "2 blocks of Python, of which any"),
        ("magicoder", solved_by(SOLUTION, "It is used so:", EXAMPLE), "2 blocks of Python, of which any"),
        ("magicoder", solved_by(SOLUTION, "It is used so:", "```\nx = 1\n```"), "2 blocks of Python, of which any"),
        ("magicoder", solved_by("```python\nprint(6 *\n```", SOLUTION), "2 blocks of Python, of which any"),
        ("magicoder", solved_by(SOLUTION, "```python\nprint("), "does not open and close"),
        ("magicoder", solved_by("```python\nprint(int(input()) + 1)\n```"), "reads a standard input that the row does not"),
        ("magicoder", solved_by("```python\nimport sys\nfor line in sys.stdin:\n  print(line)\n```"), "a standard input"),
        ("magicoder", solved_by("```python\nfrom sys import stdin\nprint(stdin.read())\n```"), "reads a standard input"),
        ("magicoder", solved_by("```python\nprint(open(0).read())\n```"), "reads a standard input"),
        ("llama-nemotron-chat", {**NEMOTRON, "reasoning": "on"}, "reasons in <think> tags"),
        ("toolace", {**TOOLACE, "conversations": TOOLACE["conversations"][:3]}, "its last message is of the role 'tool'"),
        ("toolace", with_turn(TOOLACE, 1, '[Get Tide(city="Rome")]'), "'Get Tide', which is none of its functions"),
        ("toolace", {**TOOLACE, "system": "Answer."}, "'Get Weather', which is none of its functions"),
        ("toolace", {**TOOLACE, "system": '[{"name": "f"}, 3]'}, "are not all objects"),
        ("toolace", with_turn(TOOLACE, 1, 'Sure: [Get Weather(city="Rome")]'), "a call is inside other text"),
        ("toolace", with_turn(TOOLACE, 3, "No. [Get Weather()]"), "a call is inside other text"),
        ("toolace", with_turn(TOOLACE, 1, 'Sure: [Get Tide(city="Rome")]'), "a call is inside other text"),
        (
            "apigen-mt",
            with_turn(APIGEN, 1, '{"name": "cancel", "arguments": {}}'),
            "^a call of 'cancel', which is none of its functions",
        ),
        ("apigen-mt", {**APIGEN, "tools": "[]"}, "'book', which is none of its functions"),
        (
            "glaive-sharegpt",
            with_turn(APIGEN, 1, '[{"name": "book", "arguments": {}}, {"name": "cancel", "arguments": {}}]'),
            "^a call of 'cancel', which is none of its functions",
        ),
        ("glaive", {**GLAIVE, "system": "SYSTEM: You are helpful."}, "'rate', which is none of its functions"),
        (
            "glaive",
            {**GLAIVE, "chat": GLAIVE["chat"].replace('"name": "rate"', '"name": "rates"')},
            "'rates', which is none of its functions",
        ),
        (
            "glaive",
            {**GLAIVE, "chat": 'USER: x\n\n\nASSISTANT: <functioncall> {"name": "f", "arguments": {}}'},
            "'f', which is none of its functions",
        ),
        ("apigen-mt", {**APIGEN, "tools": "{oops"}, "its 'tools' is not JSON"),
        ("apigen-mt", {**APIGEN, "tools": '[{"type": "function", "function": "book"}]'}, "its 'tools' is no list of objects"),
        (
            "apigen-mt",
            {**APIGEN, "conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "call it"}]},
            "a call is no JSON object",
        ),
        ("tulu3-if", {"messages": [{"role": "user", "content": None}]}, "a message must have a role"),
        ("glaive", {"system": "SYSTEM: x", "chat": "ASSISTANT: Hello"}, "a user must speak first"),
    ],
)
def test_a_row_that_cannot_be_converted_says_why(dataset, row, message):
    with pytest.raises(Unreadable, match=message):
        convert(dataset, row)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[f(a="x, (y)", b=[1, {"c": true}]), g()]', [("f", {"a": "x, (y)", "b": [1, {"c": True}]}), ("g", {})]),
        ("[Market's API(x=-1.5, y='it\\'s')]", [("Market's API", {"x": -1.5, "y": "it's"})]),
        ("[/v1/rate.get(q=null)]", [("/v1/rate.get", {"q": None})]),
    ],
)
def test_bracket_calls_are_read(text, calls):
    assert parse_bracket_calls(text, [name for name, _ in calls]) == calls


@pytest.mark.parametrize(
    "text",
    ["[f(1)]", "[f(a=open())]", '[f(a="x)]', "f(a=1)", "[]", "[f(a=1, a=2)]", "[f(a=__import__('os'))]", "[f]"]
    + [f"[f(a={value})]" for value in ("{1, 2}", "...", "b'x'", "1j", "{(1, 2): 3}", "1e999")],  # literals of Python alone
)
def test_text_that_is_no_list_of_calls_is_refused(text):
    with pytest.raises(Unreadable):
        parse_bracket_calls(text, ["f"])


def test_a_name_with_brackets_of_its_own_is_found_among_those_offered():
    assert parse_bracket_calls("[Search (beta)(q=1)]", names=["Search (beta)"]) == [("Search (beta)", {"q": 1})]


def test_a_file_is_converted_and_what_was_dropped_lies_beside_it_with_its_reason(tmp_path):
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(MAGICODER) + "\n" + json.dumps({**MAGICODER, "lang": "rust"}) + "\n")
    result = convert_file("magicoder", str(source), out)
    assert (result.num_converted, result.num_dropped) == (1, 1)
    assert [conversation.id for conversation in read_conversations(out)] == ["rows.jsonl:1"]
    (dropped,) = map(json.loads, result.dropped_path.read_text().splitlines())
    assert dropped["place"].endswith("rows.jsonl:2")
    assert "rust" in dropped["reason"]


def test_a_damaged_line_is_dropped_and_told_with_its_number_and_those_behind_it_are_converted(tmp_path, caplog):
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    whole = json.dumps(MAGICODER)
    source.write_bytes("\n".join([whole[:40], whole, '["a list"]', whole, ""]).encode() + b"\xff\n" + whole.encode())
    result = convert_file("magicoder", str(source), out)
    assert (result.num_converted, result.num_dropped) == (3, 3)
    assert [conversation.id for conversation in read_conversations(out)] == ["rows.jsonl:2", "rows.jsonl:4", "rows.jsonl:6"]
    first, second, third = map(json.loads, result.dropped_path.read_text().splitlines())
    assert first["place"] == f"{source}:1"
    assert first["reason"].startswith("not valid JSON: Invalid control character")
    assert first["row"] == {"text": whole[:40]}
    assert second["reason"] == "a JSON list, not an object. Each row must be one JSON object"
    assert third["place"] == f"{source}:5"
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        f"3 of the dropped are no JSON objects; the first: {source}:1: not valid JSON: Invalid control character"
    )


def test_half_of_a_character_is_a_damage_of_its_row_alone(tmp_path):
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    whole = json.dumps(MAGICODER)
    within = {**APIGEN, "tools": APIGEN["tools"].replace('"book"', '"book", "note": "\\ud83d"', 1)}  # JSON in JSON
    emoji = json.dumps({**MAGICODER, "problem": "\U0001f600"})
    source.write_text("\n".join([whole, whole.replace('"problem": "', '"problem": "\\ud83d'), emoji]) + "\n")
    assert convert_file("magicoder", str(source), out).num_converted == 2
    (dropped,) = map(json.loads, out.with_name("out.jsonl.dropped.jsonl").read_text().splitlines())
    assert (dropped["place"], dropped["reason"]) == (
        f"{source}:2",
        "holds half of a character, \\ud83d; write the whole character, or none. Each line must be one JSON object, in UTF-8",
    )
    source.write_text(json.dumps(APIGEN) + "\n" + json.dumps(within) + "\n")
    result = convert_file("apigen-mt", str(source), out)
    assert (result.num_converted, result.num_dropped) == (1, 1)
    assert "holds half of a character" in result.dropped_path.read_text()


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(MAGICODER) + "\n")
    monkeypatch.setattr("strop.tasks.conversations.as_row", lambda conversation: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert_file("magicoder", str(source), tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_file_of_another_schema_is_named_with_its_first_row_and_leaves_nothing_behind(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(TULU) + "\n")
    with pytest.raises(
        TaskError, match=r"none of its 1 rows is a conversation of glaive\. .*rows\.jsonl:1: no column 'system'"
    ):
        convert_file("glaive", str(source), tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_the_real_glaive_sample_is_converted_whole(tmp_path):
    path = DATA / "glaive" / "toolcall_en_demo.json"
    if not path.exists():
        pytest.skip(f"no {path}; set STROP_DATA to a directory that holds glaive/toolcall_en_demo.json")
    result = convert_file("glaive-sharegpt", str(path), tmp_path / "out.jsonl")
    assert (result.num_converted, result.num_dropped) == (300, 0)
    conversations = list(read_conversations(tmp_path / "out.jsonl"))
    said = [message.content for each in conversations for message in each.messages if message.role == "assistant"]
    calls = [call for text in said for call in parse_tool_calls(text, max_calls=8)]
    rows = json.loads(path.read_text())
    assert len(calls) == sum(turn["from"] == "function_call" for row in rows for turn in row["conversations"]) > 100
    assert all(isinstance(call, ParsedCall) for call in calls)


def test_the_standard_chat_format_with_tool_calls_is_read(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "So:", "tool_calls": [{"name": "say", "arguments": {"text": "2"}}]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "2"},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    (conversation,) = read_conversations(path)
    first, second = (conversation.messages[at].content for at in (1, 3))
    assert first == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert second == 'So:\n<tool_call>\n{"name": "say", "arguments": {"text": "2"}}\n</tool_call>'


@pytest.mark.parametrize("call", [{}, {"name": "add", "arguments": "{oops"}, {"name": "add", "arguments": [1]}, "add", None])
def test_a_tool_call_that_is_none_is_refused(tmp_path, call):
    path = tmp_path / "chat.jsonl"
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, said]}) + "\n")
    with pytest.raises(TaskError, match=r"chat\.jsonl:1: (a tool call must|the arguments of)"):
        list(read_conversations(path))

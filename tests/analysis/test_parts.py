import pytest

from strop.analysis.statistics import Part, answer_spans, call_spans, inside, token_parts

R, C, A = Part.REASONING, Part.TOOL_CALL, Part.ANSWER


def cut(text, spans):
    return [text[start:end] for start, end in spans]


def test_reasoning_a_call_and_an_answer_are_told_apart():
    call = ["<tool_call>", '{"name": "python", "arguments": {}}', "</tool_call>"]
    texts = ["Let me ", "see.", *call, "<answer>4", "</answer>", "<eos>"]
    assert token_parts(texts, called={"python"}) == [R, R, C, C, C, A, A, R]


def test_a_token_that_reaches_over_the_edge_of_a_part_belongs_to_it():
    assert token_parts(["so <ans", "wer>", "4</answer> and", " on"], called=()) == [A, A, A, R]


def test_what_looks_like_a_call_is_none_where_nothing_was_called():
    assert token_parts(["<tool_call>", "{}", "</tool_call>"], called=()) == [R, R, R]


def test_an_answer_in_a_call_is_the_calls():
    texts = ["<tool_call>", '{"name": "python", "arguments": {"code": "<answer>4</answer>"}}', "</tool_call>"]
    assert token_parts(texts, called={"python"}) == [C, C, C]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a<tool_call>{"n": "</tool_call>"}</tool_call>b', ['<tool_call>{"n": "</tool_call>"}</tool_call>']),
        ("a<tool_call>{bad}</tool_call>b", ["<tool_call>{bad}</tool_call>"]),
        ("a<tool_call>{}", ["<tool_call>{}"]),
        ("<tool_call>{} <tool_call>{}</tool_call>c", ["<tool_call>{} ", "<tool_call>{}</tool_call>"]),
    ],
)
def test_a_json_call_ends_as_the_parser_of_calls_ends_it(text, expected):
    assert cut(text, call_spans(text, called={"python"})) == expected


def test_a_call_as_a_tag_is_the_last_tag_of_a_tool_that_was_called():
    text = "I <search> once </search> then <search>height of <b>\n</search>"
    assert cut(text, call_spans(text, called={"search"})) == ["<search>height of <b>\n</search>"]
    assert cut("<python>1", call_spans("<python>1", called={"python"})) == ["<python>1"]
    assert call_spans("<b>1</b>", called={"search"}) == []
    assert call_spans("<>", called={""}) == []


def test_an_answer_without_its_tag_is_the_last_box_with_its_braces():
    text = r"first \boxed{1}, then \boxed{\frac{1}{2}} done"
    assert cut(text, answer_spans(text)) == [r"\boxed{\frac{1}{2}}"]
    assert cut(r"so \boxed{4", answer_spans(r"so \boxed{4")) == [r"\boxed{4"]
    assert cut(r"\boxed{1}<answer>2", answer_spans(r"\boxed{1}<answer>2")) == ["<answer>2"]


def test_the_rest_of_a_character_lies_where_the_character_lies():
    # characters:  a=0, é=1, "" the rest of é, b=2
    assert inside(["a", "é", "", "b"], [(1, 2)]) == [False, True, True, False]
    assert inside(["a", "b"], []) == [False, False]

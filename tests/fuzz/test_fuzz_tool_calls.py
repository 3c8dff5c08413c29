"""Texts of a policy with broken tool calls: the parser reads each of them, in a time that grows with the text."""

from __future__ import annotations

import json

from fuzzing import JUNK, fuzz, survives
from hypothesis import strategies as st

from strop.rollout.tool_calls import ParsedCall, argument_problem, parse_tool_calls

PARTS = st.one_of(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            '{"name": "python", "arguments": {}}',
            '{"name": ',
            "{",
            "}",
            "[",
            '"',
            "\\",
            "\\ud800",
            " ",
            "\n",
        ]
    ),
    st.fixed_dictionaries({"name": JUNK, "arguments": JUNK}).map(json.dumps),
    st.text(max_size=5),
)
TEXTS = st.lists(PARTS, max_size=12).flatmap(lambda parts: st.sampled_from(["".join(parts), "".join(parts) * 1000]))
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}, "name": {"type": "integer"}}, "required": ["code"]}


def test_every_text_is_parsed() -> None:
    def check(text: str) -> None:
        def parse() -> None:
            calls = parse_tool_calls(text, max_calls=3)
            assert sum(isinstance(call, ParsedCall) for call in calls) <= 3
            for call in calls:
                if isinstance(call, ParsedCall):
                    argument_problem(SCHEMA, call.arguments)

        survives(parse, places=())

    fuzz(TEXTS, check)

"""A call with an argument of the wrong type says so where it is made, before anything is started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strop.sandbox import AnswerPair, LocalSandbox, RunRequest, SessionLimits, VerifyRequest


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"code": b"1"}, "code is of type bytes; it has to be str."),
        ({"stdin": None}, "stdin is of type NoneType; it has to be str."),
        ({"wall_s": "4"}, "wall_s is of type str; it has to be int | float."),
        ({"memory_mib": 2.5}, "memory_mib is of type float; it has to be int."),
        ({"wall_s": True}, "wall_s is of type bool; it has to be int | float."),
    ],
)
def test_a_request_names_the_argument_of_a_wrong_type(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        RunRequest(**{"code": "1"} | wrong)
    assert str(caught.value) == message


def test_a_sandbox_that_is_given_text_says_how_a_request_is_written() -> None:
    box: Any = LocalSandbox()
    with pytest.raises(TypeError, match=r'of type str; it has to be RunRequest, as in run\(RunRequest\(code="print\(1\)"\)\)'):
        asyncio.run(box.run("print(1)"))


def test_an_answer_is_text() -> None:
    answer: Any = 72
    with pytest.raises(TypeError, match="answer is of type int"):
        AnswerPair(gold="72", answer=answer)


def test_pairs_are_pairs_and_their_limit_is_a_number() -> None:
    pairs: Any = (("1", "1"),)
    with pytest.raises(TypeError, match=r"pairs\[0\] is of type tuple; it has to be AnswerPair"):
        VerifyRequest(pairs=pairs)
    limit: Any = "2"
    with pytest.raises(TypeError, match="pair_wall_s is of type str"):
        VerifyRequest(pairs=(AnswerPair(gold="1", answer="1"),), pair_wall_s=limit)


@pytest.mark.parametrize("wrong", [{"memory_mib": 512.5}, {"seed": "a"}, {"profile": 3}, {"lease_s": "1"}])
def test_limits_of_a_session_have_their_types(wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(TypeError, match=f"^{name} is of type"):
        SessionLimits(**wrong)

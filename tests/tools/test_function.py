"""Tools made from typed functions."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from strop.errors import MachineError, UserError
from strop.tools import ToolResult, tool
from strop.tools.function import FunctionTool
from strop.types import ToolOutcome


@tool
def convert(amount: float, unit: Literal["km", "mile"] = "km") -> str:
    """Converts a distance to metres."""
    if amount < 0:
        raise ValueError("a distance is not negative")
    return f"{amount * (1000 if unit == 'km' else 1609):g}"


@tool
async def roll(sides: int, seed: int) -> int:
    """Rolls a die."""
    return seed % sides + 1


def call(used: FunctionTool, **arguments: object) -> ToolResult:
    return asyncio.run(used.call(arguments, seed=9))


def test_a_function_is_described_by_its_name_docstring_and_signature() -> None:
    assert convert.spec.as_function() == {
        "type": "function",
        "function": {
            "name": "convert",
            "description": "Converts a distance to metres.",
            "parameters": {
                "type": "object",
                "properties": {
                    "amount": {"title": "Amount", "type": "number"},
                    "unit": {"default": "km", "enum": ["km", "mile"], "title": "Unit", "type": "string"},
                },
                "required": ["amount"],
            },
        },
    }


def test_its_result_is_shown_as_text() -> None:
    result = call(convert, amount=2.5)
    assert (result.outcome, result.text) == (ToolOutcome.STDOUT, "2500")


def test_a_whole_number_is_good_enough_where_a_float_is_asked_for() -> None:
    assert call(convert, amount=2).text == "2000"


def test_an_asynchronous_function_is_awaited_and_gets_the_seed_which_the_policy_is_not_shown() -> None:
    assert call(roll, sides=6).text == "4"
    assert list(roll.spec.parameters["properties"]) == ["sides"]


def test_an_exception_is_an_error_that_the_policy_reads() -> None:
    result = call(convert, amount=-1.0)
    assert (result.outcome, result.text) == (ToolOutcome.ERROR, "ValueError: a distance is not negative")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "amount: Field required"),
        ({"amount": "2"}, "amount: Input should be a valid number"),
        ({"amount": 2.0, "unit": "inch"}, "unit: Input should be 'km' or 'mile'"),
        ({"amount": 2.0, "speed": 1}, "speed: Extra inputs are not permitted"),
        ({"amount": 2.0, "seed": 1}, "seed: Extra inputs are not permitted"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], named: str) -> None:
    result = call(convert, **arguments)
    assert result.outcome is ToolOutcome.WRONG_ARGUMENTS
    assert named in result.text


def test_nothing_returned_is_an_empty_result() -> None:
    @tool
    def remember(fact: str) -> None:
        """Keeps a fact in mind."""

    assert call(remember, fact="x").outcome is ToolOutcome.EMPTY


def test_a_broken_machine_is_not_shown_to_the_policy() -> None:
    @tool
    def search(query: str) -> str:
        """Searches."""
        raise MachineError("the index is down")

    with pytest.raises(MachineError, match="the index is down"):
        call(search, query="x")


def test_a_function_that_cannot_be_described_is_refused_with_the_remedy() -> None:
    def undocumented(x: int) -> int:
        return x

    def untyped(x) -> int:  # type: ignore[no-untyped-def]
        """Has no type."""
        return int(x)

    def variadic(*x: int) -> int:
        """Takes any number."""
        return sum(x)

    for function, remedy in ((undocumented, "docstring"), (untyped, "has no type"), (variadic, "cannot be passed by name")):
        with pytest.raises(UserError, match=remedy):
            tool(function)

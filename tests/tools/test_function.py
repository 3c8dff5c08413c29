"""Tools made from typed functions."""

from __future__ import annotations

import asyncio
import enum
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from strop.config import validate
from strop.errors import ConfigError, MachineError, UserError
from strop.rollout.tool_calls import argument_problem
from strop.tools import ToolResult, tool
from strop.tools.function import Function, FunctionTool
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
                    "amount": {"type": "number"},
                    "unit": {"default": "km", "enum": ["km", "mile"], "type": "string"},
                },
                "required": ["amount"],
            },
        },
    }


def test_its_result_is_shown_as_text() -> None:
    result = call(convert, amount=2.5)
    assert (result.outcome, result.text) == (ToolOutcome.STDOUT, "2500")


def test_a_result_without_a_text_of_its_own_is_an_error_and_a_set_has_one_order() -> None:
    class Found:
        pass

    def find(what: str) -> object:
        """Find something."""
        return {"object": Found(), "in a list": [Found()]}[what] if what != "set" else set("cab")

    for what in ("object", "in a list"):
        result = call(tool(find), what=what)
        assert result.outcome is ToolOutcome.ERROR
        assert result.text.endswith("the result holds a Found, which has no text of its own")
    assert call(tool(find), what="set").text == '["a","b","c"]'


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


class Unit(enum.Enum):
    KM = "km"
    MILE = "mile"


@dataclass
class Place:
    name: str
    heights: list[float]


class Route(BaseModel):
    start: Place
    unit: Unit = Unit.KM


@tool
def travel(
    route: Route,
    stops: list[Place],
    title: str | None = None,
    copy: tuple[int, int] = (0, 0),
    *,
    modes: list[Literal["car", "bus"]],
) -> dict[str, Any]:
    """Plans a journey.

    It never fails.

    Args:
        route: where it begins,
            and in which unit it is told.
        modes (list): what may be driven
    Returns:
        the plan
    """
    return {"start": route.start, "unit": route.unit, "stops": stops, "title": title, "copy": copy, "modes": modes}


JOURNEY = {
    "route": {"start": {"name": "A", "heights": [1, 2.5]}, "unit": "mile"},
    "stops": [{"name": "B", "heights": []}],
    "modes": ["bus"],
}


def test_nested_types_reach_the_function_as_themselves_and_its_result_is_shown_as_json() -> None:
    result = call(travel, **JOURNEY)
    assert result.text == (
        '{"start":{"name":"A","heights":[1.0,2.5]},"unit":"mile","stops":[{"name":"B","heights":[]}],"title":null,"copy":[0,0],'
        '"modes":["bus"]}'
    )


def test_the_schema_of_nested_types_is_written_out_and_the_environment_checks_arguments_by_it() -> None:
    parameters = travel.spec.parameters
    assert "$" not in str(parameters)
    assert parameters["required"] == ["route", "stops", "modes"]
    assert parameters["properties"]["route"]["properties"]["start"]["properties"]["heights"] == {
        "type": "array",
        "items": {"type": "number"},
    }
    assert list(parameters["properties"]) == ["route", "stops", "title", "copy", "modes"]
    assert argument_problem(parameters, JOURNEY) is None
    wrong = JOURNEY | {"stops": [{"name": 1, "heights": []}]}
    assert argument_problem(parameters, wrong) == "argument 'stops[0].name' must be of type string, not integer"


def test_a_docstring_describes_the_tool_and_each_argument() -> None:
    assert travel.spec.description == "Plans a journey.\n\nIt never fails."
    told = {name: each.get("description") for name, each in travel.spec.parameters["properties"].items()}
    assert told["route"] == "where it begins, and in which unit it is told."
    assert (told["modes"], told["stops"]) == ("what may be driven", None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"route": {"start": {"name": "A"}}}, "route.start.heights: "),
        ({"stops": "B"}, "stops: "),
        ({"modes": ["train"]}, "modes.0: Input should be 'car' or 'bus'"),
        ({"copy": [1]}, "copy.1: "),
    ],
)
def test_a_mistake_in_a_nested_argument_is_named_with_its_place(change: dict[str, object], named: str) -> None:
    result = call(travel, **(JOURNEY | change))
    assert result.outcome is ToolOutcome.WRONG_ARGUMENTS
    assert named in result.text


def test_a_call_beyond_its_limit_is_a_timeout_whether_or_not_it_can_be_ended() -> None:
    released = threading.Event()

    def wait() -> str:
        """Waits."""
        released.wait(20)
        return "late"

    async def sleep() -> None:
        """Sleeps."""
        await asyncio.sleep(20)

    try:
        for function in (wait, sleep):
            result = call(tool(function, wall_s=0.05))
            assert result.outcome is ToolOutcome.TIMEOUT
            assert result.text == f"{function.__name__} gave no answer within 0.05 s."
            assert result.duration_s < 10
    finally:
        released.set()


def test_what_a_function_raises_to_end_the_program_ends_only_the_call() -> None:
    def leave() -> None:
        """Leaves."""
        sys.exit(3)

    def give_up() -> None:
        """Gives up."""
        raise TimeoutError("the index took too long")

    assert (call(tool(leave)).outcome, call(tool(leave)).text) == (ToolOutcome.ERROR, "SystemExit: 3")
    assert (call(tool(give_up)).outcome, call(tool(give_up)).text) == (ToolOutcome.TIMEOUT, "the index took too long")


class MuteError(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


@dataclass
class Ratio:
    part: int
    whole: int

    def __post_init__(self) -> None:
        self.value = self.part / self.whole


def test_what_cannot_be_shown_of_a_call_is_an_error_that_the_policy_reads() -> None:
    @tool
    def make(what: str) -> Any:
        """Makes something."""
        if what == "mute":
            raise MuteError
        return {"number": 10**5000, "bytes": b"\xff", "half a pair": {"text": "\ud83d"}}[what]

    @tool
    def show(ratio: Ratio) -> float:
        """Shows a ratio."""
        return ratio.value

    made = {what: call(make, what=what) for what in ("number", "bytes", "half a pair", "mute")}
    assert {result.outcome for result in made.values()} == {ToolOutcome.ERROR}
    assert made["number"].text.startswith("ValueError: Exceeds the limit")
    assert made["bytes"].text.startswith("PydanticSerializationError: ")
    assert made["mute"].text == "MuteError: (its message raised KeyError)"
    assert call(show, ratio={"part": 1, "whole": 2}).text == "0.5"
    broken = call(show, ratio={"part": 1, "whole": 0})
    assert (broken.outcome, broken.text) == (ToolOutcome.ERROR, "ZeroDivisionError: division by zero")


def test_a_recipe_names_a_function_by_its_module_and_may_rename_it() -> None:
    config = validate(Function.Config, {"function": "textwrap:dedent", "name": "outdent"}, place="the test")
    with pytest.raises(UserError, match="parameter 'text' has no type"):
        config.imported("tools.outdent")
    found = config.model_copy(update={"function": f"{__name__}:convert"}).imported("tools.outdent")
    assert (found.spec.name, found.spec.description) == ("outdent", "Converts a distance to metres.")
    for path, named in (("nowhere:convert", "cannot be imported"), ("math:pi", "of type float, not a function")):
        with pytest.raises((ConfigError, UserError), match=named):
            config.model_copy(update={"function": path}).imported("tools.outdent")


OWN = '''
from strop.tools import tool

def convert(x: float) -> float:
    """Converts."""
    return x

def nohints(x):
    """Has no types."""
    return x

def nodoc(x: float) -> float:
    return x
'''


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("convrt", "{file} has no attribute 'convrt'. Did you mean 'convert'?"),
        ("zzz", "{file} has no attribute 'zzz'."),
        ("nohints", "tool nohints ({file}, line 8): parameter 'x' has no type. Write one, as in `x: str`."),
        ("nodoc", "tool nodoc ({file}, line 12): it has no docstring."),
    ],
)
def test_what_is_wrong_in_a_module_that_is_there_is_told_with_the_key_and_the_place_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    file = tmp_path / "own_functions.py"
    file.write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_functions", raising=False)
    with pytest.raises(UserError) as told:
        Function.Config(function=f"own_functions:{name}").imported("tools.own")
    assert str(told.value).startswith(f"tools.own.function: 'own_functions:{name}': {said.format(file=file)}")
    assert "Run strop where" not in str(told.value)


class Chain(BaseModel):
    after: Chain | None = None


def test_types_that_the_policy_cannot_be_shown_are_refused_with_the_remedy() -> None:
    def follow(chain: Chain) -> None:
        """Follows."""

    def ask(question: threading.Event) -> None:
        """Asks."""

    for function, remedy in ((follow, "the type Chain of an argument holds itself"), (ask, "a type that JSON cannot carry")):
        with pytest.raises(UserError, match=remedy):
            tool(function)

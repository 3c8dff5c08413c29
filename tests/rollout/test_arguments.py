import pytest

from strop.rollout.tool_calls import argument_problem
from strop.tools.function import parameters_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
        "items": {"type": "array", "items": {"type": "integer"}},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "free": {"type": "object"},
    },
    "required": ["code"],
}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"n": 3},
        {"x": 3},
        {"x": 0.5},
        {"mode": "fast"},
        {"items": [1, 2]},
        {"maybe": None},
        {"point": {"x": 1}},
        {"free": {"a": 1}},
    ],
)
def test_arguments_that_fit_the_signature_have_no_problem(arguments):
    assert argument_problem(SCHEMA, {"code": "", **arguments}) is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "missing required argument 'code'"),
        ({"code": 1}, "argument 'code' must be of type string, not integer"),
        ({"code": "", "n": True}, "argument 'n' must be of type integer, not boolean"),
        ({"code": "", "n": 1.5}, "argument 'n' must be of type integer, not number"),
        ({"code": "", "mode": "odd"}, "argument 'mode' must be one of 'fast', 'slow'"),
        ({"code": "", "items": [1, "2"]}, "argument 'items[1]' must be of type integer, not string"),
        ({"code": "", "maybe": "x"}, "argument 'maybe' must be of type integer, not string"),
        ({"code": "", "point": {}}, "missing required argument 'point.x'"),
        ({"code": "", "kode": ""}, "unknown argument 'kode' (known: code, n, x, mode, items, maybe, point, free)"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_wrong(arguments, problem):
    assert argument_problem(SCHEMA, arguments) == problem


def object_with(**schema):
    return {"type": "object", "properties": {"any": True, "none": False, "list": {"type": "array", "items": False}}, **schema}


@pytest.mark.parametrize(
    ("schema", "arguments", "problem"),
    [
        ({}, {"any": [1, {"x": None}]}, None),
        ({}, {"none": 1}, "argument 'none' must be left out"),
        ({}, {"list": []}, None),
        ({}, {"list": [1]}, "argument 'list[0]' must be left out"),
        ({"required": ["unlisted"]}, {}, "missing required argument 'unlisted'"),
        ({"required": ["unlisted"]}, {"unlisted": 1}, None),
        ({"required": ["unlisted"]}, {"unlisted": 1, "other": 1}, "unknown argument 'other' (known: unlisted, any, list)"),
        ({"additionalProperties": {}}, {"other": 1}, None),
        ({"additionalProperties": {"type": "string"}}, {"other": 1}, "argument 'other' must be of type string, not integer"),
        ({"properties": {"x": {"anyOf": [False, {"type": "null"}]}}}, {"x": None}, None),
        ({"properties": {"x": {"type": "object", "properties": {"y": True}}}}, {"x": {"y": 1}}, None),
        ({"properties": {"x": {"minimum": 3}}}, {"x": 2}, "argument 'x': 2 is less than the minimum of 3"),
        ({"properties": {"x": {"pattern": "(a+)+$"}}}, {"x": "a" * 60 + "b"}, None),  # which would take years
        ({"properties": {"x": {"type": "text"}}}, {"x": 1}, None),  # no type of JSON Schema: the tool has to check
    ],
)
def test_every_schema_that_json_schema_allows_is_read(schema, arguments, problem):
    assert argument_problem(object_with(**schema), arguments) == problem


def test_a_definition_that_is_a_bare_true_is_written_out():
    schema = {"properties": {"x": {"$ref": "#/$defs/Any", "description": "x"}}, "$defs": {"Any": True}}
    assert parameters_schema(schema, tool="look")["properties"] == {"x": True}

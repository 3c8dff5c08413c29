import pytest

from strop.rollout.arguments import argument_problem

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

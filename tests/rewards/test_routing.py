"""Which parts of a sum are for no task, and what is said of them."""

import pytest

from strop.config import validate
from strop.rewards import SumRewardConfig
from strop.rewards.routing import idle_parts
from strop.types import Task


def idle(where, *facts):
    parts = {"accuracy": {"kind": "math"}, "other": {"kind": "repetition", "where": where}}
    tasks = [Task(id=str(index), question="?", answer="1", source="test", facts=each) for index, each in enumerate(facts)]
    return idle_parts(validate(SumRewardConfig, {"kind": "sum", "parts": parts}, place="recipe"), tasks)


def test_a_part_that_is_for_one_task_of_several_is_not_idle():
    assert idle({"domain": ["code"]}, {"domain": "math"}, {"domain": "code"}) == {}
    assert idle({"domain": ["code", ""]}, {"domain": "math"}, {}) == {}
    assert idle({}, {}) == {}


@pytest.mark.parametrize(
    ("where", "facts", "why"),
    [
        (
            {"domain": ["code", "chess"]},
            [{"level": "1"}, {"kind": "a"}],
            "`where` wants domain = 'chess', 'code', a fact that none of them carries. Facts that they carry: 'kind', 'level'.",
        ),
        (
            {"domain": ["code"]},
            [{}],
            "`where` wants domain = 'code', a fact that none of them carries. Facts that they carry: none.",
        ),
        (
            {"domain": ["code"]},
            [{"domain": each} for each in "abcdef"],
            "`where` wants domain = 'code', but theirs is 'a', 'b', 'c', 'd', and 2 more. Facts that they carry: 'domain'.",
        ),
        (
            {"a": ["1"], "b": ["1"]},
            [{"a": "1", "b": "2"}, {"a": "2", "b": "1"}],
            "`where` wants a = '1', but theirs is '1', '2' and `where` wants b = '1', but theirs is '1', '2', which none has"
            " together. Facts that they carry: 'a', 'b'.",
        ),
    ],
    ids=["no such fact", "no facts at all", "other values", "no task has both"],
)
def test_what_is_said_of_an_idle_part(where, facts, why):
    assert idle(where, *facts) == {"other": why}

"""What the double adds to the protocol."""

import asyncio

import pytest

from strop.engine import Reply, ScriptedEngine
from strop.errors import EngineLost, StropError, WeightsNotProven

from .support import make_model, make_request, publish


def _complete(engine, *requests):
    async def all_of_them():
        return [await engine.complete(request) for request in requests]

    return asyncio.run(all_of_them())


def test_a_list_is_given_in_order_of_arrival_and_requests_are_recorded():
    engine = ScriptedEngine([[1, 2], [3]])
    requests = [make_request("a", [9]), make_request("b", [9])]
    assert [completion.ids for completion in _complete(engine, *requests)] == [(1, 2), (3,)]
    assert engine.requests == requests


def test_a_mapping_is_given_by_request_id():
    engine = ScriptedEngine({"a": [1], "b": [2]})
    assert [completion.ids for completion in _complete(engine, make_request("b", [9]), make_request("a", [9]))] == [(2,), (1,)]


def test_a_reply_brings_its_own_figures_and_is_cut_like_any_completion():
    engine = ScriptedEngine(lambda _: Reply(ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3), entropies=(1.0, 2.0, 3.0)))
    [completion] = _complete(engine, make_request("a", [9], max_tokens=2))
    assert (completion.ids, completion.logprobs, completion.entropies) == ((1, 2), (-0.1, -0.2), (1.0, 2.0))


def test_the_engine_is_lost_where_the_script_says_and_then_comes_back():
    engine = ScriptedEngine(lambda _: [1], lost_at=[1])
    _complete(engine, make_request("a", [9]))
    with pytest.raises(EngineLost, match="number 1"):
        _complete(engine, make_request("b", [9]))
    _complete(engine, make_request("c", [9]))


def test_wrong_weights_are_noticed():
    engine = ScriptedEngine(lambda _: [1], has_wrong_weights=True)
    with pytest.raises(WeightsNotProven, match="checksum"):
        asyncio.run(publish(engine, make_model("llama")))


def test_a_script_that_ends_too_early_says_so():
    with pytest.raises(StropError, match="1 completions; request b is number 1"):
        _complete(ScriptedEngine([[1]]), make_request("a", [9]), make_request("b", [9]))


def test_kv_memory_is_reserved_for_the_longest_completion_and_given_back():
    async def scenario():
        engine = ScriptedEngine(lambda _: [1], kv_tokens=20)
        await engine.complete(make_request("a", [9, 9], max_tokens=10))  # holds 12 of 20
        waiting = asyncio.create_task(engine.complete(make_request("b", [9], max_tokens=8)))  # wants 9
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await engine.release("a")
        await waiting
        assert engine.released == ["a"]

    asyncio.run(scenario())

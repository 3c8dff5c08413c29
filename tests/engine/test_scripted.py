"""What the double adds to the protocol."""

import asyncio

import pytest

from faulty_engine import Fault, FaultyEngine
from strop.engine.protocol import check_completion
from strop.engine.scripted import Reply
from strop.errors import EngineLost, StropError, WeightsNotProven

from .support import make_model, make_request, publish


def _complete(engine, *requests):
    async def all_of_them():
        return [await engine.complete(request) for request in requests]

    return asyncio.run(all_of_them())


def test_a_list_is_given_in_order_of_arrival_and_requests_are_recorded():
    engine = FaultyEngine([[1, 2], [3]])
    requests = [make_request("a", [9]), make_request("b", [9])]
    assert [completion.ids for completion in _complete(engine, *requests)] == [(1, 2), (3,)]
    assert engine.requests == requests


def test_a_reply_brings_its_own_figures_and_is_cut_like_any_completion():
    engine = FaultyEngine(lambda _: Reply(ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3), entropies=(1.0, 2.0, 3.0)))
    [completion] = _complete(engine, make_request("a", [9], max_tokens=2))
    assert (completion.ids, completion.logprobs, completion.entropies) == ((1, 2), (-0.1, -0.2), (1.0, 2.0))


def test_the_engine_is_lost_where_the_script_says_and_then_comes_back():
    engine = FaultyEngine(lambda _: [1], faults={1: Fault.LOSE})
    _complete(engine, make_request("a", [9]))
    with pytest.raises(EngineLost, match="number 1"):
        _complete(engine, make_request("b", [9]))
    _complete(engine, make_request("c", [9]))


def test_wrong_weights_are_noticed():
    engine = FaultyEngine(lambda _: [1], has_wrong_weights=True)
    with pytest.raises(WeightsNotProven, match="checksum"):
        asyncio.run(publish(engine, make_model("llama")))


def test_a_script_that_ends_too_early_says_so():
    with pytest.raises(StropError, match="1 completions; request b is number 1"):
        _complete(FaultyEngine([[1]]), make_request("a", [9]), make_request("b", [9]))


def test_kv_memory_is_reserved_for_the_longest_completion_and_given_back():
    async def scenario():
        engine = FaultyEngine(lambda _: [1], kv_tokens=20)
        await engine.complete(make_request("a", [9, 9], max_tokens=10))  # holds 12 of 20
        waiting = asyncio.create_task(engine.complete(make_request("b", [9], max_tokens=8)))  # wants 9
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await engine.release("a")
        await waiting
        assert engine.released == ["a"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (Fault.MISSING_LOGPROB, "has 2 ids and 1 logprobs"),
        (Fault.NAN_LOGPROB, "log-prob nan at position 1"),
        (Fault.FOREIGN_ID, "outside the vocabulary 0..: -1"),
        (Fault.OLD_WEIGHTS, "policy version 6, but 7 was published"),
    ],
)
def test_garbage_comes_at_the_requests_that_were_chosen(fault, named):
    engine = FaultyEngine(lambda _: [1, 2], faults={1: fault}, policy_version=7)
    requests = [make_request(name, [9], max_tokens=2) for name in "abc"]
    sound, garbage, again = _complete(engine, *requests)
    for request, completion in ((requests[0], sound), (requests[2], again)):
        check_completion(request, completion, vocab_size=None, policy_version=7)
    with pytest.raises(EngineLost, match=named):
        check_completion(requests[1], garbage, vocab_size=None, policy_version=7)


@pytest.mark.parametrize(("fault", "named"), [(Fault.DIE, "scripted to die"), (Fault.OUT_OF_MEMORY, "run out of memory")])
def test_a_request_that_it_dies_of_takes_what_runs_and_what_waits_along(fault, named):
    async def scenario():
        engine = FaultyEngine(lambda _: [1], latency_s=0.01, max_running=2, faults={1: fault})
        held = await engine.complete(make_request("held", [9]))
        ends = await asyncio.gather(
            *(engine.complete(make_request(name, [9])) for name in ("deadly", "waits", "waits too")), return_exceptions=True
        )
        assert held.ids == (1,)
        for end in ends:
            assert isinstance(end, EngineLost)
            assert named in str(end)
        for later in (engine.complete(make_request("later", [9])), publish(engine, make_model("llama"))):
            with pytest.raises(EngineLost, match=named):
                await later

    asyncio.run(scenario())


def test_an_engine_that_hangs_answers_nothing_until_it_recovers():
    async def scenario():
        engine = FaultyEngine(lambda _: [1])
        engine.fail(Fault.HANG)
        asked = asyncio.create_task(engine.complete(make_request("a", [9])))
        await asyncio.sleep(0.01)
        aborted = asyncio.create_task(engine.complete(make_request("b", [9])))
        await asyncio.sleep(0.01)
        assert not asked.done()
        await engine.abort("b")
        with pytest.raises(asyncio.CancelledError):
            await aborted
        engine.recover()
        assert (await asked).ids == (1,)
        engine.fail(Fault.HANG)
        loading = asyncio.create_task(publish(engine, make_model("llama"), version=3))
        await asyncio.sleep(0.01)
        assert engine.policy_version == 0
        engine.recover()
        await loading
        assert engine.policy_version == 3

    asyncio.run(scenario())


def test_garbage_comes_from_one_moment_to_the_next_and_ends_with_recovery():
    async def scenario():
        engine = FaultyEngine(lambda _: [1])
        engine.fail(Fault.MISSING_LOGPROB)
        assert (await engine.complete(make_request("a", [9]))).logprobs == ()
        engine.recover()
        assert (await engine.complete(make_request("b", [9]))).logprobs == (0.0,)

    asyncio.run(scenario())


def test_a_single_request_can_hang():
    async def scenario():
        engine = FaultyEngine(lambda _: [1], faults={0: Fault.HANG})
        hanging = asyncio.create_task(engine.complete(make_request("a", [9])))
        await asyncio.sleep(0)
        await engine.complete(make_request("b", [9]))
        assert not hanging.done()
        await engine.close()
        with pytest.raises(EngineLost, match="closed"):
            await hanging

    asyncio.run(scenario())


def test_an_engine_that_restarts_by_itself_has_lost_everything_and_holds_old_weights():
    async def scenario():
        engine = FaultyEngine(lambda _: [1], latency_s=0.01, policy_version=5)
        first = await engine.complete(make_request("a", [9]))
        running = asyncio.create_task(engine.complete(make_request("b", [9])))
        await asyncio.sleep(0.001)
        await engine.kill("its machine was rebooted.")
        engine.restart(policy_version=0)
        with pytest.raises(EngineLost, match="rebooted"):  # also when it is back before anybody looks
            await running
        so_far = [9, *first.ids]
        second = await engine.complete(make_request("c", [*so_far, 3], extends="a", at=len(so_far)))
        assert second.cached_tokens == 0
        assert second.policy_version == engine.policy_version == 0
        await publish(engine, make_model("llama"), version=6)
        assert (await engine.complete(make_request("d", [9]))).policy_version == 6

    asyncio.run(scenario())

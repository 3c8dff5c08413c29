"""A request's ids and log-probs do not depend on what else the engine does, bit for bit."""

import asyncio
import random

import pytest

from strop.engine.config import EngineConfig
from strop.engine.torch.engine import TorchEngine
from strop.engine.torch.weights import Matrix

from .support import VOCAB_SIZE, make_model, make_request, publish

NUM_CONVERSATIONS, GROUP = 12, 4


async def _play(engine, number):
    """Three turns; the prompt is shared by a group of four, lengths differ, and the last turn is forked twice."""
    group = number // GROUP
    ids = [(7 * group + index) % VOCAB_SIZE for index in range(9 + 13 * group)]
    bits, last, at = [], "", 0
    for turn in range(3):
        settings = {"seed": 100 * number + turn, "stop_ids": frozenset({5}), "extends": last, "at": at}
        request = make_request(f"{number}/{turn}", ids, max_tokens=6 + 9 * (number % 5), **settings)
        completion = await engine.complete(request)
        bits.append((completion.ids, completion.logprobs, completion.entropies))
        ids = [*ids, *completion.ids]
        last, at = request.id, len(ids)
        ids += [(number + turn + index) % VOCAB_SIZE for index in range(1 + 11 * turn)]
        await asyncio.sleep(random.random() * 0.01)
    branches = [
        make_request(f"{number}/fork {at}", [*ids[:at], 1, 2], max_tokens=5, seed=at, extends=last, at=at) for at in (8, at)
    ]
    for completion in await asyncio.gather(*map(engine.complete, branches)):
        bits.append((completion.ids, completion.logprobs, completion.entropies))
    for request_id in (last, *(branch.id for branch in branches)):
        await engine.release(request_id)
    return bits


def _with_engine(model, config, scenario):
    async def run():
        engine = TorchEngine(model.config, config)
        await publish(engine, model)
        assert engine.capabilities.is_deterministic
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


async def _alone(engine):
    return [await _play(engine, number) for number in range(NUM_CONVERSATIONS)]


def _together(order_seed):
    """All at once, in another order, each after a random delay."""
    order = list(range(NUM_CONVERSATIONS))
    random.Random(order_seed).shuffle(order)

    async def late(engine, number):
        await asyncio.sleep(random.random() * 0.05)
        return await _play(engine, number)

    async def scenario(engine):
        played = await asyncio.gather(*(late(engine, number) for number in order))
        return [played[order.index(number)] for number in range(NUM_CONVERSATIONS)]

    return scenario


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16"), ("qwen2", "bfloat16")])
def test_bits_depend_neither_on_company_nor_on_order_nor_on_slots(name, dtype):
    model = make_model(name)
    roomy = EngineConfig(slots=36, max_length=400, device="cpu", dtype=dtype)
    reference = _with_engine(model, roomy, _alone)
    assert _with_engine(model, roomy, _together(0)) == reference
    # Slots in eights: blocks of the KV cache are read by those alone that are so long, and conversations move down.
    in_eights = EngineConfig(slots=16, max_length=300, device="cpu", dtype=dtype)
    assert _with_engine(model, in_eights, _together(5)) == reference
    # Two slots more than conversations: forks wait for each other, in other rows.
    other_layout = EngineConfig(slots=14, max_length=300, device="cpu", dtype=dtype)
    assert _with_engine(model, other_layout, _together(9)) == reference


@pytest.mark.parametrize("slots", [3, 5, 7])
def test_bits_do_not_depend_on_company_where_the_number_of_slots_is_odd(slots):
    """A product of an odd number of rows computes its last one in another way."""
    requests = [make_request(f"{number}", [1 + number], max_tokens=60) for number in range(slots)]

    async def together(engine):
        return await asyncio.gather(*map(engine.complete, requests))

    async def one_by_one(engine):
        found = []
        for request in requests:
            found.append(await engine.complete(request))
            await engine.release(request.id)
        return found

    model, config = make_model("llama"), EngineConfig(slots=slots, max_length=200, device="cpu", threads=1)
    found, alone = (_with_engine(model, config, scenario) for scenario in (together, one_by_one))
    assert [each.logprobs for each in found] == [each.logprobs for each in alone]


def test_a_product_that_rounds_otherwise_in_a_larger_step_is_noticed(monkeypatch):
    """As on processors with AMX, where products of 8 and of 96 tokens add up in another order."""
    onto = Matrix.onto

    def rounding(self, residual, inputs):
        return onto(self, residual, inputs) * (1.0 if len(inputs) <= 8 else 1.0001)

    monkeypatch.setattr(Matrix, "onto", rounding)
    config = EngineConfig(slots=4, max_length=200, device="cpu")
    requests = [make_request(f"{number}", range(number, 4 + number), seed=number) for number in range(3)]

    async def together(engine):
        return await asyncio.gather(*map(engine.complete, requests))

    async def one_by_one(engine):
        return [await engine.complete(request) for request in requests]

    model = make_model("llama")
    assert _with_engine(model, config, together) == _with_engine(model, config, one_by_one)

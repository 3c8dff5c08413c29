"""Decode steps of fixed sizes, as a GPU replays them: here without graphs, against the steps that are launched one by one."""

import asyncio
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strop.engine.config import EngineConfig
from strop.engine.torch.cuda_graphs import CudaGraphs, StaticSteps
from strop.engine.torch.decoder import Decoder, all_sizes
from strop.engine.torch.engine import TorchEngine
from strop.engine.torch.kv_cache import Row

from .support import MODEL_NAMES, VOCAB_SIZE, make_model, make_request, publish


class Replaying:
    """Like graphs: what it is given first for a size is what it runs for ever."""

    def __init__(self):
        self.kept = {}

    def run(self, size, work):
        return self.kept.setdefault(size, work)()


def play(model, scenario, *, runner=None, **settings):
    """Runs an async scenario with an engine that holds `model`."""
    config = EngineConfig(**{"slots": 12, "max_length": 400, "device": "cpu", **settings})

    async def with_engine():
        engine = TorchEngine(model.config, config)
        if runner is not None:
            engine._worker.batch._static._graphs = runner
        try:
            await publish(engine, model)
            return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(with_engine())


async def a_bit_of_everything(engine):
    """Conversations of mixed length and temperature that grow, fork, end early and give their slots to others."""
    found = {}

    async def ask(name, ids, **more):
        found[name] = await engine.complete(make_request(name, ids, **more))
        return [*ids, *found[name].ids]

    async def converse(number):
        draw = random.Random(number)  # its own: which of them comes first is not the same every time
        ids = [draw.randrange(VOCAB_SIZE) for _ in range(1 + 23 * number)]
        more = {"temperature": (1.0, 0.7, 0.0)[number % 3], "seed": number}
        so_far = await ask(f"{number}", ids, max_tokens=3 + number, stop_ids={5, 9}, min_tokens=3, **more)
        observation = [draw.randrange(VOCAB_SIZE) for _ in range(7)]
        if number % 4 == 0:
            await ask(f"{number} fork", so_far[: len(ids)], extends=f"{number}", at=len(ids), max_tokens=9, **more)
            await engine.release(f"{number} fork")
        longer = [*so_far, *observation]
        await ask(f"{number} later", longer, extends=f"{number}", at=len(so_far), max_tokens=20, **more)
        await engine.release(f"{number} later")

    await asyncio.gather(*(converse(number) for number in range(15)))  # three more than slots
    return found


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_steps_of_fixed_sizes_draw_the_same_tokens_with_the_same_logprobs(name):
    model, runner = make_model(name), Replaying()
    eager = play(model, a_bit_of_everything, decode="eager")
    static = play(model, a_bit_of_everything, decode="static", runner=runner)
    assert static.keys() == eager.keys()
    for name, completion in eager.items():
        assert static[name].ids == completion.ids, name
        assert static[name].finish_reason == completion.finish_reason
        assert static[name].logprobs == pytest.approx(completion.logprobs, abs=2e-5)
        assert static[name].entropies == pytest.approx(completion.entropies, abs=2e-5)
    assert len({columns for _, columns in runner.kept}) > 1  # they grew past a size
    assert all(slots in (8, 12) for slots, _ in runner.kept)


def test_what_was_kept_of_a_size_serves_the_next_weights_too(monkeypatch):
    """A publication copies into the buffers in place: a graph that was captured before it reads the new weights."""
    monkeypatch.setattr("strop.engine.torch.weights.pack", lambda weight: None)  # as on a GPU
    first, second, runner = make_model("qwen3"), make_model("qwen3", seed=1), Replaying()

    async def publish_twice(engine):
        addresses = [weight.data_ptr() for _, weight in engine.named_parameters()]
        before = await engine.complete(make_request("before", range(9)))
        await engine.release("before")
        kept = dict(runner.kept)
        await publish(engine, second, version=2)
        after = await engine.complete(make_request("after", range(9)))
        assert [weight.data_ptr() for _, weight in engine.named_parameters()] == addresses
        assert runner.kept == kept
        return before, after

    async def once(engine):
        return await engine.complete(make_request("once", range(9)))

    before, after = play(first, publish_twice, decode="static", runner=runner)
    assert before.ids == play(first, once, decode="eager").ids
    assert after.ids == play(second, once, decode="eager").ids
    assert after.ids != before.ids


@pytest.mark.skipif(torch.cuda.is_available(), reason="here a capture would succeed")
def test_where_nothing_can_be_captured_a_warning_says_so_once_and_steps_go_on(caplog):
    graphs = CudaGraphs()
    results = [graphs.run((8, 128), lambda number=number: torch.tensor(number)) for number in range(3)]
    assert [int(result) for result in results] == [0, 1, 2]
    [record] = caplog.records
    assert record.getMessage().startswith("a decode step of 8 slots and 128 columns could not be captured (")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_graphs_draw_what_steps_draw_that_are_launched_one_by_one():
    model = make_model("qwen3")
    eager = play(model, a_bit_of_everything, decode="eager", device="cuda")
    graphs = play(model, a_bit_of_everything, decode="static", device="cuda")
    assert {name: each.ids for name, each in graphs.items()} == {name: each.ids for name, each in eager.items()}
    for name, completion in eager.items():
        assert graphs[name].logprobs == pytest.approx(completion.logprobs, abs=1e-4)


class NothingComesBack(TorchDispatchMode):
    """Lets no operation read a value of a tensor, or take one from the host."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        for each in torch.utils._pytree.tree_leaves((arguments, keywords)):
            assert not isinstance(each, torch.Tensor) or each.device.type == "meta", f"{function} takes a tensor of the host"
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_what_is_captured_neither_asks_a_value_of_the_device_nor_brings_one(name):
    """On the meta device, which has no values, any of it raises; so does a step that waits for a GPU while it is captured."""

    class Done(Exception):  # noqa: N818 - no error
        pass

    class Once:
        def run(self, size, work):
            with NothingComesBack():
                logits = work()
            assert logits.shape == (12, VOCAB_SIZE)
            raise Done

    config, meta = make_model(name).config, torch.device("meta")
    decoder = Decoder(config, dtype=torch.bfloat16, device=meta, num_slots=12, max_length=200)
    row = Row(slot=9, id=3, position=150, uniform=0.5, temperature=0.0)
    with pytest.raises(Done), torch.inference_mode():
        StaticSteps(decoder, Once()).step([row], all_sizes(decoder))


def test_a_ban_holds_as_long_as_it_lasts():
    model, runner = make_model("llama"), Replaying()

    async def scenario(engine):
        request = make_request("long", range(5), max_tokens=30, stop_ids=range(VOCAB_SIZE - 1), min_tokens=12)
        return await engine.complete(request)

    completion = play(model, scenario, decode="static", runner=runner)
    assert completion.ids[:11] == (VOCAB_SIZE - 1,) * 11  # all others are banned
    assert completion.logprobs[:11] == pytest.approx([0.0] * 11)
    assert len(completion.ids) < 30  # and no longer


@pytest.mark.parametrize(("decode", "is_static"), [("auto", False), ("eager", False), ("static", True)])
def test_on_a_cpu_steps_are_launched_as_they_come_unless_asked_otherwise(decode, is_static):
    engine = TorchEngine(make_model("llama").config, EngineConfig(slots=2, max_length=64, device="cpu", decode=decode))
    assert (engine._worker.batch._static is not None) == is_static
    asyncio.run(engine.close())

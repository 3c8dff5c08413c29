"""What a vLLM server must tell before a token of it is believed, against a double that reads weights as vLLM's worker does."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import torch

from strop.engine.config import VllmConfig
from strop.engine.opening import open_engines
from strop.engine.protocol import Capacity, Entropies, Probe, checksum_of
from strop.engine.published_files import write_adapter
from strop.errors import EngineLost, StropError, UserError, WeightsNotProven
from strop.rollout.scheduler.engine_pool import EnginePool
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.stages.loop.engines import open_engine_pool

from ..support import Tensors, load, make_model, make_request, publish
from .fake_vllm import FakeVllm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


def run(model, fake, scenario, *, num_adapters=0, **changes):
    async def with_engine():
        async with fake.serve() as address:
            config = VllmConfig(**({"addresses": (address,), "slots": 3, "max_length": 100} | changes))
            config._adapter_slots = num_adapters
            [engine] = await open_engines(model, config, detokenize=None)
            try:
                async with asyncio.timeout(20):
                    await scenario(engine)
            finally:
                await engine.close()

    asyncio.run(with_engine())


def test_a_server_given_by_address_is_published_to_and_sampled_from(model):
    fake = FakeVllm()

    async def scenario(engine):
        assert engine.capacity.total_tokens == 21 * 32  # one of 22 blocks is the server's own
        await publish(engine, make_model("llama", seed=1), version=4)
        completion = await engine.complete(make_request("a", [1, 2], max_tokens=3))
        assert (completion.ids, completion.policy_version, completion.cached_tokens) == ((3, 4, 5), 4, 0)

    run(model, fake, scenario)
    assert fake.calls == ["pause abort", "update", "reset", "resume"] * 2


def test_a_probe_that_asks_for_no_entropy_is_answered_before_the_completion_and_a_branch_may_begin(model):
    told = []

    async def scenario(engine):
        await publish(engine, make_model("llama", seed=1), version=4)
        is_told = asyncio.Event()

        def tell(entropies):
            told.append(entropies)
            is_told.set()

        running = asyncio.create_task(
            engine.complete(make_request("a", [1, 7], max_tokens=3, probe=Probe(num_tokens=0, tell=tell)))
        )
        await is_told.wait()
        branch = await engine.complete(make_request("b", [1, 7, 9], max_tokens=2, extends="a", at=2))
        assert branch.ids == (10, 11)
        assert not running.done()
        running.cancel()

    run(model, FakeVllm(seconds={7: 60.0}), scenario)
    assert told == [()]


def test_a_probe_has_its_entropies_while_the_rest_is_sampled_and_the_answer_is_that_of_one_piece(model):
    async def scenario(engine):
        await publish(engine, make_model("llama", seed=1), version=4)
        told = asyncio.Future()
        probe = Probe(num_tokens=2, tell=told.set_result)
        request = make_request("a", [1, 7], max_tokens=4, entropies=Entropies.TOP10)
        running = asyncio.create_task(engine.complete(replace(request, probe=probe)))
        entropies = await told
        assert not running.done()
        completion = await running
        assert completion == await engine.complete(replace(request, id="b"))
        assert (completion.ids, completion.entropies[:2]) == ((8, 9, 10, 11), entropies)
        late = Probe(num_tokens=9, tell=lambda _: pytest.fail("the completion is shorter"))
        assert await engine.complete(replace(request, id="c", probe=late)) == completion

    run(model, FakeVllm(seconds={7: 0.2}), scenario)


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ({"refusal": "stale"}, "the published weights are not proven: vLLM at .* failed at /update_weights .*: stale"),
        ({"is_reset": False}, "could not drop the KV cache"),
        ({"is_reset": "no"}, "answered with garbage: .* at success of"),
    ],
)
def test_a_publication_that_is_not_proven_stops_sampling_until_one_that_is(model, fault, match):
    fake = FakeVllm()

    async def scenario(engine):
        sane = {name: getattr(fake, name) for name in fault}
        vars(fake).update(fault)
        with pytest.raises(EngineLost, match=match):
            await publish(engine, make_model("llama"), version=1)
        with pytest.raises(WeightsNotProven, match="version 1"):
            await engine.complete(make_request("a", [1]))
        vars(fake).update(sane)
        await publish(engine, make_model("llama"), version=2)
        assert (await engine.complete(make_request("b", [1]))).policy_version == 2

    run(model, fake, scenario)


def test_requests_that_were_kept_fail_with_their_publication_and_so_does_what_waited_for_a_place(model):
    fake = FakeVllm(seconds={7: 60.0})

    async def scenario(engine):
        running = asyncio.create_task(engine.complete(make_request("a", [7])))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(engine.complete(make_request("b", [1])))
        fake.refusal = "stale"
        with pytest.raises(WeightsNotProven, match="stale"):
            await publish(engine, make_model("llama"), version=1, keeps_requests=True)
        for task in (running, waiting):
            with pytest.raises(WeightsNotProven, match=r"version 1\) was not completed"):
                await task
        fake.refusal = ""
        await publish(engine, make_model("llama"), version=2, keeps_requests=True)
        assert (await engine.complete(make_request("c", [1]))).spans == ((2, 8),)

    run(model, fake, scenario, slots=1)
    published = ["update", "reset", "resume"]
    assert fake.calls == ["pause abort", *published, "pause keep", published[0], "pause keep", *published]


async def publish_adapter(engine, version, *, keeps_requests=False, spoil=False):
    class Adapter(Tensors):
        async def write(self, directories):
            digests = write_adapter(dict(self.named), {"peft_type": "LORA", "r": 8}, directories[0])
            if spoil:
                path = directories[0] / "adapter_model.safetensors"
                path.write_bytes(path.read_bytes()[:-1] + b"\x07")
            return checksum_of(digests)

    await load(engine, Adapter([("lora_A", torch.full((8, 4), 1.0 * version))]), version=version, keeps_requests=keeps_requests)


def test_requests_that_run_keep_their_adapter_and_nothing_waits_for_a_publication(model):
    fake = FakeVllm(seconds={7: 1.0})

    async def scenario(engine):
        await publish_adapter(engine, 1)
        running = asyncio.create_task(engine.complete(make_request("a", [7])))
        await asyncio.sleep(0.1)
        await publish_adapter(engine, 2, keeps_requests=True)
        assert (await engine.complete(make_request("b", [1]))).spans == ((2, 8),)
        assert not running.done()
        assert (await running).spans == ((1, 8),)
        for request_id in "ab":
            await engine.release(request_id)
        await publish_adapter(engine, 3)
        assert (await engine.complete(make_request("c", [1]))).spans == ((3, 8),)
        assert engine.policy_version == 3

    run(model, fake, scenario, num_adapters=2)
    published = ["load adapter", "prove adapter"]
    assert fake.calls == ["pause abort", "update", "reset", "resume", *published, *published, *published, "unload adapter"]


@pytest.mark.parametrize("fault", [{"refusal": "stale"}, {}])
def test_an_adapter_that_is_not_proven_is_not_sampled_with(model, fault):
    fake = FakeVllm()

    async def scenario(engine):
        vars(fake).update(fault)
        with pytest.raises(WeightsNotProven, match=r"the published adapter is not proven: .*: (stale|they are damaged)"):
            await publish_adapter(engine, 1, spoil=not fault)
        with pytest.raises(WeightsNotProven, match="version 1"):
            await engine.complete(make_request("a", [1]))
        fake.refusal = ""
        await publish_adapter(engine, 2)
        assert (await engine.complete(make_request("b", [1]))).policy_version == 2

    run(model, fake, scenario, num_adapters=1)


def test_an_adapter_over_weights_that_somebody_else_published_is_noticed_by_the_next_answer(model):
    fake = FakeVllm()

    async def scenario(engine):
        await publish_adapter(engine, 1)
        fake.version = "another trainer's"
        with pytest.raises(WeightsNotProven, match='it answered from weights that it calls "another trainer\'s"'):
            await engine.complete(make_request("a", [1]))

    run(model, fake, scenario, num_adapters=1)


SLEEPING = {"max_model_len": 100, "enable_sleep_mode": True}


def test_a_server_that_sleeps_samples_nothing_until_a_publication_has_brought_all_weights_back(model):
    fake = FakeVllm(settings=SLEEPING, seconds={7: 60.0})

    async def scenario(engine):
        running = asyncio.create_task(engine.complete(make_request("a", [7])))
        await asyncio.sleep(0.1)
        with pytest.raises(StropError, match="while requests run or wait: a"):
            await engine.sleep()
        running.cancel()
        await asyncio.wait({running})
        for version in (1, 2):
            await engine.sleep()
            with pytest.raises(WeightsNotProven, match="it sleeps until the next publication"):
                await engine.complete(make_request("b", [1]))
            await publish(engine, make_model("llama"), version=version)
            assert (await engine.complete(make_request("b", [1]))).policy_version == version
            await engine.release("b")

    run(model, fake, scenario, sleep=True)
    published = ["pause abort", "update", "reset"]
    woken = ["sleep 2", "wake weights", *published, "wake kv_cache", "resume"]
    assert fake.calls == [*published, "resume", *woken, *woken]


def test_weights_that_are_refused_when_a_server_wakes_are_sampled_from_only_after_others_that_are_proven(model):
    fake = FakeVllm(settings=SLEEPING)

    async def scenario(engine):
        await engine.sleep()
        fake.refusal = "stale"
        with pytest.raises(WeightsNotProven, match="stale"):
            await publish(engine, make_model("llama"), version=1)
        assert fake.asleep == {"kv_cache"}
        fake.refusal = ""
        await publish(engine, make_model("llama"), version=2)
        assert (await engine.complete(make_request("a", [1]))).policy_version == 2

    run(model, fake, scenario, sleep=True)


def test_an_engine_of_a_pool_that_cannot_sleep_ends_the_run_and_is_not_replaced_while_the_trainer_computes(model):
    fake = FakeVllm(settings=SLEEPING)

    async def scenario(engine):
        open_another = AsyncMock()
        pool = EnginePool([engine], open_another=open_another)
        await pool.sleep()
        assert fake.asleep
        with pytest.raises(EngineLost, match=r"failed at /sleep .*: it sleeps already"):
            await pool.sleep()
        assert open_another.await_count == 0

    run(model, fake, scenario, sleep=True)


def test_a_block_is_as_large_as_the_server_says_and_not_as_large_as_the_recipe_says(model):
    fake = FakeVllm(block_size=128, num_blocks=11)

    async def scenario(engine):
        assert engine.capacity == Capacity(total_tokens=1280, max_request_tokens=100, max_running=64, block_tokens=128)
        context = SimpleNamespace(
            recipe=SimpleNamespace(scheduler=SchedulerConfig()),
            directory=SimpleNamespace(logs=None),
            open_engines=AsyncMock(return_value=[engine]),
        )
        config = SimpleNamespace(stall_timeout_s=60.0, num_engines=1)
        fleet = await open_engine_pool(context, config, model, SimpleNamespace(decode=None))
        [member] = fleet._engines.values()
        assert (member.spec.kv_blocks, member.spec.block_tokens) == (10, 128)  # 10 rollouts of 33 tokens, and not 20

    run(model, fake, scenario, slots=64)


def test_a_completion_that_takes_long_is_waited_for(model):
    fake = FakeVllm(seconds={7: 2.0})

    async def scenario(engine):
        assert (await engine.complete(make_request("slow", [7]))).ids

    run(model, fake, scenario, stall_timeout_s=0.1, slots=2)


def test_a_request_that_is_aborted_in_the_moment_of_its_answer_is_cancelled_all_the_same(model):
    async def scenario(engine):
        complete = engine._server.complete

        def abort():
            with pytest.raises(StopIteration):  # it waits for nothing
                engine.abort("a").send(None)

        async def complete_and_abort(*args, **changes):
            answer = await complete(*args, **changes)
            asyncio.get_running_loop().call_soon(abort)  # before whoever waits for the answer is woken
            return answer

        engine._server.complete = complete_and_abort
        with pytest.raises(asyncio.CancelledError):
            await engine.complete(make_request("a", [1]))
        engine._server.complete = complete
        await engine.complete(make_request("a", [1]))

    run(model, FakeVllm(), scenario)


def test_a_restarted_server_is_noticed_by_its_first_answer(model):
    fake = FakeVllm()

    async def scenario(engine):
        fake.version = "default"
        with pytest.raises(WeightsNotProven, match=r"'default'.*restarted"):
            await engine.complete(make_request("a", [1]))

    run(model, fake, scenario)


@pytest.mark.parametrize(
    ("fake", "match"),
    [
        (FakeVllm(settings={"logprobs_mode": "raw_logprobs"}), "its logprobs_mode is 'raw_logprobs'"),
        (FakeVllm(settings={"dtype": "torch.bfloat16"}), r"its dtype is torch\.bfloat16, but engine\.dtype is float32"),
        (FakeVllm(settings={"max_model_len": 99}), "conversations of 99 tokens"),
        (FakeVllm(transfer=None), "its weight_transfer_config is not"),
        (FakeVllm(transfer={"backend": "nccl"}), "its weight_transfer_config is not"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused_with_the_setting(model, fake, match):
    async def never(engine):
        raise AssertionError

    with pytest.raises(UserError, match=match):
        run(model, fake, never)
    with pytest.raises(UserError, match=r"it has no --enable-sleep-mode, but engine\.sleep is true"):
        run(model, FakeVllm(), never, sleep=True)

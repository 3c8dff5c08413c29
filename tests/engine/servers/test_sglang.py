"""Our side of SGLang's wire, against a server that speaks its published schema."""

import asyncio
import logging
import math
from pathlib import Path

import pytest
from aiohttp import web

from strop.engine.config import SglangConfig
from strop.engine.model_directory import ModelFacts
from strop.engine.opening import open_engines
from strop.engine.protocol import Entropies, Truncation
from strop.engine.servers import sglang
from strop.engine.servers.server import completion_of
from strop.errors import EngineLost, StropError, UserError, WeightsNotProven
from strop.types import FinishReason

from ..support import make_model, make_request, publish
from .fake_sglang import FakeSglang


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


def run(model, fake, scenario, **changes):
    async def with_engine():
        async with fake.serve() as address:
            config = SglangConfig(**({"addresses": (address,), "slots": 3, "max_length": 100} | changes))
            [engine] = await open_engines(model, config, detokenize=None)
            try:
                async with asyncio.timeout(20):
                    await scenario(engine)
            finally:
                await engine.close()

    asyncio.run(with_engine())


def test_a_completion_is_what_the_server_sampled_from_the_weights_that_were_published(model):
    fake = FakeSglang()

    async def scenario(engine):
        assert (engine.policy_version, engine.capacity.total_tokens, engine.capacity.max_running) == (0, 640, 3)
        await publish(engine, make_model("llama"), version=5)
        completion = await engine.complete(make_request("a", [1, 2, 3], max_tokens=4))
        assert completion.ids == (4, 5, 6, 7)
        assert completion.logprobs == (-0.5,) * 4
        assert completion.policy_version == engine.policy_version == 5
        assert completion.finish_reason is FinishReason.LENGTH
        stopped = await engine.complete(make_request("b", [1, 2, 3], stop_ids=frozenset({5})))
        assert stopped.ids == (4, 5)
        assert stopped.finish_reason is FinishReason.STOP

    run(model, fake, scenario)
    assert fake.files == ["test-00000.safetensors"]
    weights = ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"]
    assert fake.calls == weights * 2  # the directory's, then version 5


def test_it_warns_that_it_is_unproven(model, caplog):
    async def scenario(engine):
        assert "unproven" in caplog.text

    with caplog.at_level(logging.WARNING):
        run(model, FakeSglang(), scenario)


def _without_logprobs(body):
    del body["meta_info"]["output_token_logprobs"]
    return body


def _with_logprob(value):
    def mend(body):
        body["meta_info"]["output_token_logprobs"][0][0] = value
        return body

    return mend


def _with_meta(**changes):
    return lambda body: body | {"meta_info": body["meta_info"] | changes}


def _with_other_ids(body):
    body["output_ids"] = body["output_ids"][:-1]
    return body


def _out_of_vocabulary(body):
    body["output_ids"][0] = body["meta_info"]["output_token_logprobs"][0][1] = 67
    return body


def _aborted(body):
    body["meta_info"]["finish_reason"] = {"type": "abort", "message": "out of memory"}
    return body


@pytest.mark.parametrize(
    ("mend", "match"),
    [
        (_without_logprobs, "at meta_info.output_token_logprobs of"),
        (_with_logprob(None), "at meta_info.output_token_logprobs.0.0 of"),
        (_with_logprob("-1"), "at meta_info.output_token_logprobs.0.0 of"),
        (_with_meta(output_token_logprobs=None), "at meta_info.output_token_logprobs of"),
        (_with_meta(output_token_logprobs=[[-1.0]]), "at meta_info.output_token_logprobs.0.1 of"),
        (_with_meta(cached_tokens=None), "at meta_info.cached_tokens of"),
        (_with_meta(cached_tokens="many"), "at meta_info.cached_tokens of"),
        (_with_meta(weight_version=3), "at meta_info.weight_version of"),
        (_with_meta(finish_reason="stop"), "at meta_info.finish_reason of"),
        (lambda body: body | {"output_ids": [1.5]}, "at output_ids.0 of"),
        (_with_logprob(0.5), "log-prob 0.5 at position 0"),
        (_with_logprob(-math.inf), "log-prob -inf"),
        (_with_other_ids, "ids of its log-probs"),
        (_out_of_vocabulary, r"outside the vocabulary 0\.\.66: 67"),
        (_aborted, "abort.*out of memory"),
        (lambda body: web.Response(text="<html>"), "no JSON"),
        (lambda body: web.Response(status=503, text="no scheduler"), "failed at /generate .503.: no scheduler"),
        (lambda body: [], "garbage: .* at the top of"),
    ],
)
def test_garbage_loses_the_engine_which_is_named_with_what_was_wrong(model, mend, match):
    fake = FakeSglang()

    async def scenario(engine):
        fake.mend = mend
        with pytest.raises(EngineLost, match=rf"(?s)SGLang at http://127\.0\.0\.1.*{match}"):
            await engine.complete(make_request("a", [1, 2, 3]))

    # The warm-up needs a sane server, so that the fault begins after it.
    run(model, fake, scenario)


def test_a_request_that_it_refuses_is_our_misuse(model):
    fake = FakeSglang()

    async def scenario(engine):
        fake.mend = lambda body: web.Response(status=400, text="bad sampling_params")
        with pytest.raises(StropError, match=r"refused /generate .400.: bad sampling_params") as caught:
            await engine.complete(make_request("a", [1]))
        assert not isinstance(caught.value, EngineLost)

    run(model, fake, scenario)


def test_a_server_that_lost_the_published_weights_is_not_believed(model):
    fake = FakeSglang()

    async def scenario(engine):
        fake.weight_version = "default"  # as after a restart
        for name in "ab":
            with pytest.raises(WeightsNotProven, match="restarted"):
                await engine.complete(make_request(name, [1]))
        await publish(engine, make_model("llama"), version=1)
        await engine.complete(make_request("c", [1]))

    run(model, fake, scenario)


def test_weights_that_it_does_not_take_stop_sampling(model):
    fake = FakeSglang()

    async def scenario(engine):
        fake.refuses_weights = True
        with pytest.raises(WeightsNotProven, match="shape mismatch"):
            await publish(engine, make_model("llama"), version=1)
        with pytest.raises(WeightsNotProven, match="version 1"):
            await engine.complete(make_request("a", [1]))

    run(model, fake, scenario)


def test_progress_grows_while_its_health_path_answers(model):
    fake = FakeSglang()

    async def scenario(engine):
        before = await engine.progress()
        assert await engine.progress() == before + 1
        fake.is_computing = False
        assert await engine.progress() == before + 1

    run(model, fake, scenario)


def test_an_aborted_request_is_aborted_in_the_server_and_gives_its_place_back(model):
    fake = FakeSglang()

    async def scenario(engine):
        fake.delay_s = 600.0
        tasks = [asyncio.create_task(engine.complete(make_request(name, [1]))) for name in "abc"]
        while len(fake.running) < 3:  # noqa: ASYNC110 - on the other side of the wire
            await asyncio.sleep(0.01)
        rids = set(fake.running)
        await asyncio.gather(*(engine.abort(name) for name in "abc"))
        assert all(isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True))
        fake.delay_s = 0.0
        await asyncio.gather(*(engine.complete(make_request(name, [1])) for name in "def"))
        assert set(fake.aborted) == rids

    run(model, fake, scenario)


def test_a_server_of_another_dtype_or_a_shorter_context_is_refused(model):
    async def never(engine):
        raise AssertionError

    with pytest.raises(UserError, match=r"its dtype is 'float16', but engine\.dtype is 'float32'"):
        run(model, FakeSglang(dtype="float16"), never)
    with pytest.raises(UserError, match=r"conversations of 100 tokens, fewer than engine\.max_length 101"):
        run(model, FakeSglang(), never, max_length=101)


def test_the_command_line_fixes_everything_that_changes_the_distribution(model):
    config = SglangConfig(python=Path("/env/bin/python"), dtype="bfloat16", max_length=100, slots=3, arguments=("--x",))
    words = sglang.command_line(ModelFacts.of(model), config, 30000)
    assert words[:3] == ["/env/bin/python", "-m", "sglang.launch_server"]
    for pair in (("--sampling-defaults", "openai"), ("--dtype", "bfloat16"), ("--host", "127.0.0.1")):
        assert words[words.index(pair[0]) + 1] == pair[1]
    assert words[-1] == "--x"
    assert "--skip-tokenizer-init" in words  # this model has none


def test_every_field_of_a_request_is_put_into_its_words():
    request = make_request(
        "a",
        [1, 2],
        temperature=0.7,
        seed=2**40 + 5,
        max_tokens=9,
        min_tokens=2,
        stop_ids=frozenset({7, 3}),
        stop_strings=("x",),
    )
    body = sglang.to_body(request, "rid")
    assert body["input_ids"] == [1, 2]
    params = body["sampling_params"]
    assert {key: params[key] for key in ("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens")} == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 9,
        "min_new_tokens": 2,
    }
    assert (params["stop_token_ids"], params["stop"], params["sampling_seed"]) == ([3, 7], ["x"], 5)
    assert params["ignore_eos"] is False  # it would ignore the stop ids, too
    assert sglang.to_body(make_request("b", [1]), "rid")["sampling_params"]["ignore_eos"] is True


def test_likely_tokens_become_entropies_and_limits_are_passed_on():
    request = make_request("a", [1], max_tokens=1, entropies=Entropies.TOP10, truncation=Truncation(top_p=0.9, top_k=20))
    body = sglang.to_body(request, "rid")
    assert (body["top_logprobs_num"], body["sampling_params"]["top_p"], body["sampling_params"]["top_k"]) == (11, 0.9, 20)
    top = [[math.log(0.1), each, None] for each in range(10)]
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 5, None]], "weight_version": "w"}
    answer = sglang.parse_answer({"output_ids": [5], "meta_info": meta | {"output_top_logprobs": [top]}}, server="the server")
    completion = completion_of(answer, request, server="the server", vocab_size=67, spans=((7, len(answer.ids)),))
    assert completion.entropies == pytest.approx((math.log(10),))
